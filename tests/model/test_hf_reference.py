"""Hugging Face's Llama, a second implementation by other hands, gives the same logits."""

import pytest
import torch
from oracles.hugging_face import everything_visible, hugging_face_llama
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

SIZES = dict(n_layers=3, d_model=48, n_heads=4, d_head=12, d_mlp=80, d_vocab=101, d_vocab_out=101, n_ctx=64)


def random_model(n_key_value_heads: int, attention_dir: str) -> HookedDiffusionTransformer:
    more = dict(n_key_value_heads=n_key_value_heads, attention_dir=attention_dir, readout="shifted")
    architecture = small_architecture(family="lit_gpt", norm_eps=1e-5, rotary_base=500.0, **SIZES, **more)
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=0)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(101, (3, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("attention_dir", ["causal", "bidirectional"])
def test_logits(n_key_value_heads, attention_dir, tokens):
    model = random_model(n_key_value_heads, attention_dir)
    # Larger weights than a fresh model has, so that attention is far from uniform.
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() > 1 else 1.0)
    mask = everything_visible(tokens) if attention_dir == "bidirectional" else None
    theirs = hugging_face_llama(model)(tokens, attention_mask=mask).logits
    torch.testing.assert_close(model(tokens), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_logits(side, tokens):
    model = random_model(2, "causal")
    real = torch.ones_like(tokens)
    real[0, slice(5) if side == "left" else slice(-5, None)] = 0
    positions = (real.cumsum(1) - 1).clamp(min=0)
    theirs = hugging_face_llama(model)(tokens, attention_mask=real, position_ids=positions).logits
    ours = model(tokens, attention_mask=real)
    torch.testing.assert_close(ours[real.bool()], theirs[real.bool()], rtol=1e-5, atol=1e-5)
