"""The two losses: masked diffusion, and next token for the AR baseline.

The masked diffusion loss masks each token with probability p, and takes the cross-entropy of the masked ones. Weighted
by 1/p, this is an upper bound on the negative log-likelihood (Nie et al. 2024, arXiv 2410.18514, eq. 4; ML-GSAI/SMDM
`pretrain/train_mdm.py`, `sft/finetune_mdm_reverse.py`):

    t ~ U(0, 1) for each row,  p = (1 - eps) t + eps,  loss = 1/(batch · pos) Σ_masked CE / p

Of a model that attends by blocks, each block is predicted from its noisy self and the clean blocks before it, as in its
training (Arriola et al. 2025, BD3LM, arXiv 2503.09573; Cheng et al. 2025, SDAR, arXiv 2510.06303): the network reads
the noisy and the clean text in one pass, `model(noisy, clean=tokens)`.

Both losses are a `LossBatch` (input tokens, the rows to read, the tokens to predict there) and a weighted cross-entropy
over it. `return_type="loss"` of the model takes the same batch.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.scheduled_loss import has_schedule, noised, scheduled_batch
from diffusion_lens.shapes import PosMask, Tokens

# Seed of the loss's noise in eval mode: the same at every call, so that two losses of one text can be compared.
FIXED_SEED = 0

Objective = Callable[[DiffusionTransformer, Tokens, torch.Generator | None], Tensor]


def masked_batch(
    model: DiffusionTransformer,
    tokens: Tokens,
    noisy: Tokens | None = None,
    p_mask: Float[Tensor, "batch pos"] | None = None,
    *,
    real: PosMask | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
) -> LossBatch:
    """Masked tokens as targets, each weighted by 1/p; see `masked_diffusion_loss`.

    A model that was trained by a schedule of noise has its own loss there (`scheduled_loss`).

    Args:
        real: Bool[batch pos], positions that may be masked and that count; by default all.

    Raises:
        ValueError: The model has no [MASK], the tokens are not clean text, or `noisy` is passed without `p_mask`.
    """
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask go together: pass both, or neither to have the noise sampled")
    if model.cfg.grows:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so none of its tokens can be masked: the loss of an "
            "autoregressive model is autoregressive_loss"
        )
    tokens = tokens.to(model.cfg.device)
    text = tokens if real is None else tokens[real.to(tokens.device)]
    if not bool(model.cfg.writable(text).all()):
        raise ValueError(
            "the loss expects unmasked text, but these tokens include [MASK] or invalid ids. To supply your own "
            "masking, call training.masked_diffusion_loss(model, tokens, noisy, p_mask)"
        )
    if noisy is None or p_mask is None:
        noisy, p_mask = noised(model, tokens, generator=generator, eps=eps)
    if has_schedule(model):
        return scheduled_batch(model, tokens, noisy, p_mask, real)
    mask = model.cfg.blank
    noisy, p_mask = noisy.to(tokens.device), p_mask.to(tokens.device)
    masked = noisy == mask
    n_counted = tokens.numel()
    if real is not None:
        real = real.to(tokens.device)
        noisy, masked, n_counted = torch.where(real, noisy, tokens), masked & real, int(real.sum())
    weights = 1 / (p_mask[masked] * n_counted)
    # Each block is predicted from clean blocks before it.
    clean = None if model.cfg.causal_block is None else tokens
    return LossBatch(noisy, model.readout.locate(masked, real), tokens[masked], weights, masked, n_counted, clean)


def next_token_batch(
    model: DiffusionTransformer, tokens: Tokens, *, real: PosMask | None = None, counted: PosMask | None = None
) -> LossBatch:
    """Every token but the first of its row as a target, all with one weight; see `autoregressive_loss`.

    Args:
        real: Bool[batch pos], false at padding; by default there is none.
        counted: Bool[batch pos], positions that count among the real ones; by default all.

    Raises:
        ValueError: There is padding inside a row, or no token to predict.
    """
    tokens = tokens.to(model.cfg.device)
    predicted = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.to(tokens.device)
    if bool((predicted.long().diff(dim=1) > 0).sum(dim=1).add(predicted[:, 0].long()).gt(1).any()):
        raise ValueError("padding must be at the start or end of a row; this row has padding between real tokens")
    predicted = predicted & (predicted.cumsum(dim=1) > 1)
    if counted is not None:
        predicted = predicted & counted.to(tokens.device)
    count = int(predicted.sum())
    if count == 0:
        raise ValueError("an autoregressive loss needs at least two tokens in a row: the first one is not predicted")
    weights = torch.full((count,), 1 / count, device=tokens.device)
    return LossBatch(tokens, model.readout.locate(predicted), tokens[predicted], weights, predicted, count)


def masked_diffusion_loss(
    model: DiffusionTransformer,
    tokens: Tokens,
    noisy: Tokens | None = None,
    p_mask: Float[Tensor, "batch pos"] | None = None,
    *,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
) -> Float[Tensor, ""]:
    """SMDM's loss on `tokens`; every position counts, padding with the end token included.

    Args:
        noisy: `tokens` with some of them masked; by default `hide` masks them.
        p_mask: Probability with which each position was masked; goes with `noisy`.
        generator: Random number generator of `hide`; by default torch's global one.
        eps: Lowest probability of being masked.
    """
    batch = masked_batch(model, tokens, noisy, p_mask, generator=generator, eps=eps)
    return batch.loss(_logits(model, batch))


def autoregressive_loss(model: DiffusionTransformer, tokens: Tokens) -> Float[Tensor, ""]:
    """Mean cross-entropy of every token but the first."""
    batch = next_token_batch(model, tokens)
    return batch.loss(_logits(model, batch))


def loss_batch(
    model: DiffusionTransformer,
    tokens: Tokens,
    real: PosMask | None,
    generator: torch.Generator | None,
    samples: int = 1,
) -> LossBatch:
    """The batch of the model's own loss: `samples` copies of the tokens, each under its own noise.

    Without a generator, the noise is fixed in eval mode, and from torch's global generator in train mode. An
    autoregressive model has no noise, and its batch contains the tokens once.
    """
    if model.cfg.grows:
        return next_token_batch(model, tokens, real=real)
    # As one batch, so that the samples' times are spread evenly too.
    copies = None if real is None else real.repeat(samples, 1)
    batch = masked_batch(model, tokens.repeat(samples, 1), real=copies, generator=noise_of(model, generator))
    if generator is None and not model.training and not len(batch.targets):
        raise ValueError(
            f"the fixed noise of eval mode, samples={samples}, masks none of the {tokens.numel()} tokens, so there is "
            "no loss. Give more text, samples=32 for a mean over that many noise samples, or a generator="
        )
    return batch


def noise_of(model: DiffusionTransformer, generator: torch.Generator | None) -> torch.Generator | None:
    """The generator of a loss's noise: the given one, or a fixed one in eval mode; `None` is torch's global one."""
    if generator is None and not model.training:
        return torch.Generator().manual_seed(FIXED_SEED)
    return generator


def own_loss(
    model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None = None
) -> Float[Tensor, ""]:
    """The loss that the model is trained on: that of its noise, and of a causal model next token."""
    batch = loss_batch(model, tokens, None, generator)
    return batch.loss(_logits(model, batch))


def _logits(model: DiffusionTransformer, batch: LossBatch) -> Float[Tensor, "selected d_vocab_out"]:
    """The rows of logits that a loss reads. Every token is text here, also the padding token."""
    real = model.all_real(batch.tokens)
    logits: Tensor = model(batch.tokens, attention_mask=real, logits_at=batch.rows, **batch.beside)
    return logits
