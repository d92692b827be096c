"""The two losses: masked diffusion, and next token for the autoregressive twin.

Masked diffusion hides each token with probability p and asks for the hidden ones. Weighted by 1/p, the cross-entropy is
an upper bound on the negative log-likelihood (Nie et al. 2024, arXiv 2410.18514, eq. 4; ML-GSAI/SMDM
`pretrain/train_mdm.py`, `sft/finetune_mdm_reverse.py`):

    t ~ U(0, 1) for each row,  p = (1 - eps) t + eps,  loss = 1/(batch · pos) Σ_hidden CE / p
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import Tokens

Objective = Callable[[DiffusionTransformer, Tensor, torch.Generator | None], Tensor]


def masked_diffusion_loss(
    model: DiffusionTransformer,
    tokens: Tokens,
    noisy: Tokens | None = None,
    p_mask: Float[Tensor, "batch pos"] | None = None,
    *,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
) -> Float[Tensor, ""]:
    """SMDM's loss on `tokens`; every place counts, padding with the end token included.

    Args:
        noisy: `tokens` with some of them masked. Drawn here by `hide` when not given.
        p_mask: probability with which each place was masked; goes with `noisy`.
        generator: source of the noise drawn here; by default torch's global one.
        eps: least probability of being masked.
    """
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask belong together: pass both, or neither to have the noise drawn")
    mask = _mask_id(model)
    tokens = tokens.to(model.cfg.device)
    if noisy is None or p_mask is None:
        noisy, p_mask = hide(tokens, mask, generator=generator, eps=eps)
    noisy, p_mask = noisy.to(tokens.device), p_mask.to(tokens.device)
    hidden = noisy == mask
    logits = model(noisy, logits_at=model.readout.locate(hidden))
    surprise = F.cross_entropy(logits.float(), tokens[hidden], reduction="none")
    return (surprise / p_mask[hidden]).sum() / tokens.numel()


def autoregressive_loss(model: DiffusionTransformer, tokens: Tokens) -> Float[Tensor, ""]:
    """Mean cross-entropy of every token but the first."""
    tokens = tokens.to(model.cfg.device)
    predicted = torch.arange(1, tokens.shape[1], device=tokens.device)
    logits = model(tokens, logits_at=model.readout.rows(predicted))
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, predicted].flatten())


def hide(
    tokens: Tokens, mask_token_id: int, *, generator: torch.Generator | None = None, eps: float = 1e-3
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Mask each token with its row's probability p; returns the noisy tokens and p.

    The rows' t are stratified, t_i = u + i/batch (mod 1) with one u ~ U(0, 1): each is uniform, and together they cover
    the unit interval evenly, which lowers the variance of the loss. Noise is drawn on the CPU, whatever the device, so
    that a seed means the same everywhere; a generator of another device draws there.
    """
    n_batch, n_pos = tokens.shape
    device = generator.device if generator is not None else torch.device("cpu")
    t = (torch.rand((), generator=generator, device=device) + torch.arange(n_batch, device=device) / n_batch) % 1
    p = ((1 - eps) * t + eps)[:, None].expand(n_batch, n_pos)
    hidden = torch.rand((n_batch, n_pos), generator=generator, device=device) < p
    return tokens.masked_fill(hidden.to(tokens.device), mask_token_id), p.to(tokens.device)


OBJECTIVES: dict[str, Objective] = {
    "bidirectional": lambda model, tokens, generator: masked_diffusion_loss(model, tokens, generator=generator),
    "causal": lambda model, tokens, generator: autoregressive_loss(model, tokens),
}


def _mask_id(model: DiffusionTransformer) -> int:
    if model.cfg.mask_token_id is None:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so nothing can be hidden from it: an autoregressive model is "
            "trained by autoregressive_loss"
        )
    return model.cfg.mask_token_id
