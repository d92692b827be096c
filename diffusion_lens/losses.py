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
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import noise_of as noise_kind
from diffusion_lens.shapes import PosMask, Tokens

# No token: it marks those that noise replaces.
NOWHERE = -1
# Seed of the loss's noise in eval mode: the same at every call, so that two losses of one text can be compared.
FIXED_SEED = 0

Objective = Callable[[DiffusionTransformer, Tokens, torch.Generator | None], Tensor]


@dataclass(frozen=True)
class LossBatch:
    """Input and targets of a loss.

    Attributes:
        tokens: Int[batch pos], input of the network.
        rows: Batch index and row of the logits to read, Int[selected] each.
        targets: Int[selected], tokens to predict there.
        weights: Float[selected], weight of each cross-entropy; the loss is their weighted sum.
        predicted: Bool[batch pos], positions of the targets; `rows`, `targets`, `weights` follow their reading order.
        n_counted: Number of positions over which the loss is a mean.
        clean: Int[batch pos], clean text that the network reads beside the tokens, of a model that attends by blocks.
    """

    tokens: Tokens
    rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]
    targets: Int[Tensor, "selected"]
    weights: Float[Tensor, "selected"]
    predicted: PosMask
    n_counted: int
    clean: Tokens | None = None

    @property
    def beside(self) -> dict[str, Any]:
        """What the network is given beside the tokens, as arguments."""
        return {} if self.clean is None else {"clean": self.clean}

    def loss(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, ""]:
        """Weighted cross-entropy of the logits read at `rows`."""
        return self._weighted(logits).sum()

    def by_position(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "batch pos"]:
        """Contribution of each position to the loss, which is their mean; 0 where nothing is predicted."""
        weighted = self._weighted(logits) * self.n_counted
        return weighted.new_zeros(self.predicted.shape).masked_scatter(self.predicted, weighted)

    def _weighted(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "selected"]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, self.targets, reduction="none") * self.weights

    def part(self, start: int, stop: int) -> "LossBatch":
        """Rows `start` to `stop` of the batch, with unchanged weights: the losses of all parts add up to the whole."""
        batch, pos = self.rows
        inside = (batch >= start) & (batch < stop)
        rows = (batch[inside] - start, pos[inside])
        return LossBatch(
            self.tokens[start:stop],
            rows,
            self.targets[inside],
            self.weights[inside],
            self.predicted[start:stop],
            self.n_counted,
            None if self.clean is None else self.clean[start:stop],
        )


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

    Args:
        real: Bool[batch pos], positions that may be masked and that count; by default all.

    Raises:
        ValueError: The model has no [MASK], the tokens are not clean text, or `noisy` is passed without `p_mask`.
    """
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask go together: pass both, or neither to have the noise sampled")
    if not model.cfg.has_mask:
        instead = (
            "the loss of an autoregressive model is autoregressive_loss"
            if model.cfg.grows
            else "it is bidirectional, so its noise replaces tokens by other tokens, and there is no loss of such noise"
        )
        raise ValueError(f"{model.cfg.model_name!r} has no [MASK], so none of its tokens can be masked: {instead}")
    mask = model.cfg.blank
    tokens = tokens.to(model.cfg.device)
    text = tokens if real is None else tokens[real.to(tokens.device)]
    if not bool(model.cfg.writable(text).all()):
        raise ValueError(
            "the loss expects unmasked text, but these tokens include [MASK] or invalid ids. To supply your own "
            "masking, call training.masked_diffusion_loss(model, tokens, noisy, p_mask)"
        )
    if noisy is None or p_mask is None:
        noisy, p_mask = hide(tokens, mask, generator=generator, eps=eps)
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


def hide(
    tokens: Tokens, mask_token_id: int, *, generator: torch.Generator | None = None, eps: float = 1e-3
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Mask each token with the probability p of its row, and return the masked tokens and p.

    The times of the rows are stratified, t_i = u + i/batch (mod 1) with one u ~ U(0, 1): each is uniform, and together
    they cover the unit interval evenly, which lowers the variance of the loss. The noise is sampled on the CPU, so that
    a seed means the same on every device; with a generator of another device, it is sampled there.
    """
    n_batch, n_pos = tokens.shape
    device = generator.device if generator is not None else torch.device("cpu")
    t = (torch.rand((), generator=generator, device=device) + torch.arange(n_batch, device=device) / n_batch) % 1
    p = ((1 - eps) * t + eps)[:, None].expand(n_batch, n_pos)
    masked = torch.rand((n_batch, n_pos), generator=generator, device=device) < p
    return tokens.masked_fill(masked.to(tokens.device), mask_token_id), p.to(tokens.device)


def noised(
    model: DiffusionTransformer, tokens: Tokens, *, generator: torch.Generator | None = None, eps: float = 1e-3
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Tokens under the model's noise, and the probability p with which each was replaced.

    As `hide`; under uniform noise a token is replaced by one drawn from all, itself included.
    """
    if not model.cfg.rewrites:
        return hide(tokens, model.cfg.blank, generator=generator, eps=eps)
    replaced, p = hide(tokens, NOWHERE, generator=generator, eps=eps)
    noise = noise_kind(model.cfg, model.cfg.d_vocab_out)
    return torch.where(replaced == NOWHERE, noise.replacements(tokens, generator), tokens), p


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
    """The loss that the model is trained on: masked diffusion where there is a [MASK], else next token."""
    batch = loss_batch(model, tokens, None, generator)
    return batch.loss(_logits(model, batch))


def _logits(model: DiffusionTransformer, batch: LossBatch) -> Float[Tensor, "selected d_vocab_out"]:
    """The rows of logits that a loss reads. Every token is text here, also the padding token."""
    real = model.all_real(batch.tokens)
    logits: Tensor = model(batch.tokens, attention_mask=real, logits_at=batch.rows, **batch.beside)
    return logits
