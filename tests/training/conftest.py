"""Small models to train."""

from dataclasses import replace

import pytest


@pytest.fixture(scope="session")
def toy():
    from diffusion_lens.data import toy_facts

    return toy_facts.load()


@pytest.fixture(scope="session")
def tokenizer(toy):

    from bundled_models.rows_and_blocks import toy_tokenizer

    return toy_tokenizer(toy)


@pytest.fixture(scope="session")
def tokens(toy, tokenizer):
    """200 sentences of the toy facts."""

    from bundled_models.rows_and_blocks import toy_rows

    return toy_rows(toy.sentences()[:200], tokenizer)


@pytest.fixture
def new_model(tokenizer):
    """`new_model("mdm")` or `new_model("ar")`: one layer over the words of the toy facts, always the same weights."""
    from bundled_models import tiny_pair
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

    def make(kind="mdm", **changes):
        shape = replace(
            tiny_pair.architecture(kind, len(tokenizer)), n_layers=1, d_model=16, d_head=4, d_mlp=24, **changes
        )
        cfg = DiffusionConfig.from_architecture(shape, device="cpu", default_prepend_bos=False)
        return HookedDiffusionTransformer(cfg, tokenizer, seed=1)

    return make
