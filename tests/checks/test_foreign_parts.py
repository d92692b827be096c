"""Parts of another model or of another seed in the bundled models: the weights show them, the report names them."""

import pytest
import torch
from faults import layer_of_another_seed
from judged import (
    BRIEFLY,
    bundled,
    judged_by_behaviour,
    on_short_page,
    only_tiny_ar,
    outcomes,
    with_changes,
    without_search_of_parts,
)

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.checks import Expected, check_model
from diffusion_lens.checks.weights import Composition, compositions, foreign_parts


def with_block_of(name, other, block):
    """A bundled model with one block of the other."""
    prefix = f"blocks.{block}."
    tensors = {key: weight for key, weight in bundled(other).state_dict().items() if key.startswith(prefix)}
    return with_changes(bundled(name), bundled(name).cfg.architecture, tensors)


@pytest.mark.parametrize("names", [("tiny-mdm", "tiny-ar"), ("tiny-ar", "tiny-mdm")])
def test_the_weights_show_each_trained_block_of_another_model(names):
    for block in range(4):
        parts = foreign_parts(compositions(with_block_of(*names, block)))
        assert [(part.block, part.part) for part in parts] == [(block, "attention"), (block, "MLP")]


@on_short_page
def test_a_trained_block_of_another_model_is_named():
    mixed = with_block_of("tiny-mdm", "tiny-ar", 2)
    report = check_model(mixed, expected=judged_by_behaviour("tiny-mdm"), only=BRIEFLY)
    assert any("of block 2 are foreign" in cause for cause in report.likely), report.to_text()


def test_random_weights_have_no_foreign_blocks(every):
    """Nothing follows from blocks that do not belong together anyway."""
    architecture = every.model.cfg.architecture
    if architecture.time is not None:  # random gates single out directions of the stream, which blocks then share
        return
    _, tensors = layer_of_another_seed(architecture, dict(every.model.state_dict()))
    if architecture.tied:
        tensors.pop("unembed.weight", None)
    cfg = DiffusionConfig.from_architecture(architecture, device="cpu")
    report = check_model(HookedDiffusionTransformer(cfg, tensors=tensors.items()), only=["weights"])
    assert report.findings[0].outcome == "ok", report.to_text()
    assert {score["block"] for score in report.findings[0].numbers["composition"]} == set(range(cfg.n_layers))


@on_short_page
@only_tiny_ar
def test_a_part_without_which_texts_get_less_likely_is_not_foreign(tiny, monkeypatch):
    """The weights only raise a suspicion, here of an MLP that the correct model needs."""
    scores = [Composition(1, "MLP", 1.0, 1.0)]
    monkeypatch.setattr("diffusion_lens.checks.run.foreign_parts", lambda _: scores)
    monkeypatch.setattr("diffusion_lens.checks.weights.foreign_parts", lambda _: scores)
    report = check_model(tiny, expected=Expected.of(tiny.cfg.model_name), only=(*BRIEFLY, "config"))
    assert outcomes(report) == {"config": "ok", "weights": "noted", "page loss": "ok", "diagnosis": "ok"}
    assert report.passed


@on_short_page
@without_search_of_parts
@only_tiny_ar
@pytest.mark.parametrize(
    ("block", "prefix", "parts", "expected"),
    [
        (2, "", ("attention", "MLP"), None),
        (0, "attn.", ("attention",), "tiny-ar"),
        (2, "mlp.", ("MLP",), "tiny-ar"),
    ],
)
def test_weights_of_another_seed_under_the_same_norms_are_foreign(tiny, block, prefix, parts, expected):
    """Whole blocks, or their attention or MLP alone: the loss hardly changes for some of them, and the weights tell."""
    known = expected and judged_by_behaviour(expected)
    tensors = dict(tiny.state_dict())
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.startswith(f"blocks.{block}.{prefix}") and tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()
    report = check_model(with_changes(tiny, tiny.cfg.architecture, tensors), expected=known, only=BRIEFLY)
    assert not report.passed
    blamed = [f"the {part} of block {block}" for part in parts]
    weights_finding = report.findings[0]
    assert weights_finding.outcome == "noted"
    assert all(part in weights_finding.said for part in blamed)
    (cause,) = report.likely
    assert any(f"the weights of {part} are foreign" in cause for part in blamed)
