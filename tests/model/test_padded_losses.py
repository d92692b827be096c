"""A loss over padded rows, where the network predicts each position in the row before it."""

from pathlib import Path

import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.losses import masked_batch

DREAM = Path(__file__).parents[1] / "golden" / "dream"


def test_a_masked_first_position_is_not_read_in_padding():
    model = HookedDiffusionTransformer.from_pretrained(DREAM, device="cpu")
    mask = model.cfg.mask_token_id
    tokens = torch.tensor([[3, 40, 5, 60, 7]])
    noisy = torch.tensor([[mask, 40, mask, 60, mask]])
    p_mask = torch.full((1, 5), 0.6)
    batch = masked_batch(model, tokens, noisy, p_mask)
    alone = batch.loss(model(batch.tokens, logits_at=batch.rows))

    padding = torch.full((1, 2), 9)
    real = torch.tensor([[False, False, True, True, True, True, True]])
    padded = masked_batch(
        model,
        torch.cat([padding, tokens], dim=1),
        torch.cat([padding, noisy], dim=1),
        torch.full((1, 7), 0.6),
        real=real,
    )
    beside = padded.loss(model(padded.tokens, attention_mask=real, logits_at=padded.rows))
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)
