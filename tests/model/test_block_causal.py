"""Attention by blocks against the authors' numbers, and what holds of it for every block size and padding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from weight_conversion import export, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "sdar"
relaxed = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def with_block():
    """The golden checkpoint under other attention: a block size, "causal" or "bidirectional"."""
    tensors = dict(open_checkpoint(GOLDEN).tensors())
    built = {}

    def model(size):
        if size not in built:
            direction, block = (size, None) if isinstance(size, str) else ("block_causal", size)
            architecture = open_checkpoint(GOLDEN).architecture
            cfg = DiffusionConfig.from_architecture(
                replace(architecture, attention_dir=direction, causal_block=block), device="cpu"
            )
            built[size] = HookedDiffusionTransformer(cfg, tensors=tensors.items())
        return built[size]

    return model


@torch.no_grad()
def test_every_activation_of_the_authors_code(numbers):
    model = HookedDiffusionTransformer.from_pretrained(GOLDEN, device="cpu")
    assert (model.cfg.attention_dir, model.cfg.block_size, model.cfg.readout) == ("block_causal", 4, "in_place")
    logits, cache = model.run_with_cache(numbers["tokens"])
    near = dict(rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(logits, numbers["b4.logits"], **near)
    torch.testing.assert_close(cache["blocks.0.hook_resid_pre"], numbers["b4.resid_pre.0"], **near)
    for layer in range(3):
        for name in ("attn_out", "mlp_out", "resid_post"):
            torch.testing.assert_close(cache[f"blocks.{layer}.hook_{name}"], numbers[f"b4.{name}.{layer}"], **near)


@torch.no_grad()
@pytest.mark.parametrize(("size", "name"), [(8, "b8"), (1, "causal"), (64, "bidirectional"), ("causal", "causal")])
def test_another_block_size_gives_the_authors_numbers_of_it(size, name, numbers, with_block):
    theirs = numbers[f"{name}.logits"]
    torch.testing.assert_close(with_block(size)(numbers["tokens"]), theirs, rtol=1e-5, atol=3e-5)


@torch.no_grad()
def test_the_block_size_moves_the_logits(numbers, with_block):
    four, eight = (with_block(size)(numbers["tokens"]) for size in (4, 8))
    assert ((four - eight).abs().amax(dim=(0, 2)) > 1e-2).all(), "in a deeper layer than the first, every position"


@relaxed
@given(size=st.integers(1, 13), n_pos=st.integers(1, 12), left=st.integers(0, 5), right=st.integers(0, 5))
@torch.no_grad()
def test_blocks_are_counted_over_real_tokens(size, n_pos, left, right, with_block):
    """Block 1 is causal, a block of the text bidirectional, and padding moves the logits of no real token."""
    model = with_block(size)
    text = torch.randint(140, (2, n_pos), generator=torch.Generator().manual_seed(size + 20 * n_pos))
    plain = model(text)
    for name in [*["causal"] * (size == 1), *["bidirectional"] * (size >= n_pos)]:
        torch.testing.assert_close(plain, with_block(name)(text), rtol=1e-5, atol=1e-5)

    padded = torch.nn.functional.pad(text, (left, right), value=7)
    real = torch.zeros_like(padded, dtype=torch.bool)
    real[:, left : left + n_pos] = True
    inside = model(padded, attention_mask=real)[:, left : left + n_pos]
    torch.testing.assert_close(inside, plain, rtol=1e-5, atol=2e-5)


def test_conversion_and_export_are_inverse(tmp_path):
    checkpoint = open_checkpoint(GOLDEN)
    path = export(dict(checkpoint.tensors()), checkpoint.architecture, tmp_path / "model.safetensors")
    theirs, ours = load_file(GOLDEN / "model.safetensors"), load_file(path)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert open_checkpoint(path).architecture == checkpoint.architecture
