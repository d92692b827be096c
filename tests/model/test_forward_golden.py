"""Activations and logits equal the authors' code."""

import pytest
import torch
from torch import Tensor

NAMES = {
    "resid_post": "blocks.{}.hook_resid_post",
    "attn_out": "blocks.{}.hook_attn_out",
    "mlp_out": "blocks.{}.hook_mlp_out",
    "mlp_post": "blocks.{}.mlp.hook_post",
}


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def test_every_recorded_activation(golden):
    recorded = golden.tensors("forward")
    logits, cache = golden.model.run_with_cache(recorded["tokens"])
    assert relative_error(logits, recorded["logits"]) <= 1e-5
    assert relative_error(cache["hook_embed"], recorded["embed"]) <= 1e-5
    for layer in range(golden.model.cfg.n_layers):
        for theirs, ours in NAMES.items():
            assert relative_error(cache[ours.format(layer)], recorded[f"{theirs}.{layer}"]) <= 1e-5, (theirs, layer)


def test_without_a_cache_the_logits_are_the_same_bits(golden):
    tokens = golden.tensors("forward")["tokens"]
    cached, _ = golden.model.run_with_cache(tokens)
    assert torch.equal(golden.model(tokens), cached)


@pytest.mark.parametrize(
    ("golden", "dtype"),
    [
        (("gqa", "mdm"), torch.bfloat16),
        (("mha", "mdm"), torch.float16),
        (("gqa", "ar"), torch.float16),
        (("mha", "ar"), torch.bfloat16),
    ],
    indirect=["golden"],
)
def test_half_precision_stays_near(golden, dtype):
    from diffusion_lens import HookedDiffusionTransformer

    recorded = golden.tensors("forward")
    model = HookedDiffusionTransformer.from_pretrained(
        golden.checkpoint, config=golden.config, device="cpu", dtype=dtype
    )
    logits = model(recorded["tokens"])
    assert logits.dtype == dtype
    error = (logits.float() - recorded["logits"]).square().mean().sqrt()
    assert error <= 0.05 * recorded["logits"].std()
