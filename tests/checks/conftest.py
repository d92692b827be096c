"""A short page and few questions, for what does not depend on their number."""

import functools

import pytest


@functools.cache
def known_losses(n_sentences):
    """The losses of the correct models on a page that has so many sentences while this is called."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.checks.texts import KNOWN_LOSS, page_loss, read_page, texts_for

    models = [HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in KNOWN_LOSS]
    return {model.cfg.model_name: page_loss(model, read_page(model, texts_for(model)).ordered) for model in models}


@pytest.fixture
def short_page(request, monkeypatch):
    """Three sentences of the bundled models instead of 32, or a parameter's, whose losses are the known ones; two
    questions of recall for each pair of directions instead of ten."""
    n_sentences = getattr(request, "param", 3)
    monkeypatch.setattr("diffusion_lens.checks.texts.N_SENTENCES", n_sentences)
    monkeypatch.setattr("diffusion_lens.checks.texts.KNOWN_LOSS", known_losses(n_sentences))
    monkeypatch.setattr("diffusion_lens.checks.texts.A_CELL", 2)


@pytest.fixture
def no_search_of_parts(monkeypatch):
    """A diagnosis without its two searches for mistakes in single parts, which take longest."""
    for search in ("_shifted", "_without_each"):
        monkeypatch.setattr(f"diffusion_lens.checks.diagnosis.{search}", lambda *_: [])
