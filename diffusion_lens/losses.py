"""The two losses: masked diffusion, and next token for the autoregressive twin.

Masked diffusion hides each token with probability p and asks for the hidden ones. Weighted by 1/p, the cross-entropy is
an upper bound on the negative log-likelihood (Nie et al. 2024, arXiv 2410.18514, eq. 4; ML-GSAI/SMDM
`pretrain/train_mdm.py`, `sft/finetune_mdm_reverse.py`):

    t ~ U(0, 1) for each row,  p = (1 - eps) t + eps,  loss = 1/(batch · pos) Σ_hidden CE / p

Either way a loss is a question (what goes in, which rows are read, what should stand there) and the weighted surprise
at the answers; `return_type="loss"` of the model asks the same question.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.shapes import PosMask, Tokens

# Of the noise that a loss in eval mode is taken under: the same at every call, so that two losses of one text compare.
FIXED_SEED = 0

Objective = Callable[[DiffusionTransformer, Tokens, torch.Generator | None], Tensor]


@dataclass(frozen=True)
class LossQuestion:
    """What a loss asks of the network.

    Attributes:
        tokens: Int[batch pos], what goes in.
        rows: batch and row of the logits that are read, Int[selected] each.
        targets: Int[selected], what should stand there.
        weights: Float[selected], how much each surprise counts; the loss is their weighted sum.
        places: Bool[batch pos], the places asked for, which `rows`, `targets` and `weights` follow in reading order.
        counted: places over which the loss is a mean.
    """

    tokens: Tokens
    rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]
    targets: Int[Tensor, "selected"]
    weights: Float[Tensor, "selected"]
    places: PosMask
    counted: int

    def loss(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, ""]:
        """Weighted cross-entropy of the logits read at `rows`."""
        return self._weighted(logits).sum()

    def by_place(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "batch pos"]:
        """What each place adds to the loss, a mean over `counted` places; 0 where nothing is asked."""
        weighted = self._weighted(logits) * self.counted
        return weighted.new_zeros(self.places.shape).masked_scatter(self.places, weighted)

    def _weighted(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "selected"]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, self.targets, reduction="none") * self.weights

    def part(self, start: int, stop: int) -> "LossQuestion":
        """What is asked of rows `start` to `stop`; weights stay, so the losses of all parts add up to the whole's."""
        batch, pos = self.rows
        inside = (batch >= start) & (batch < stop)
        rows = (batch[inside] - start, pos[inside])
        return LossQuestion(
            self.tokens[start:stop],
            rows,
            self.targets[inside],
            self.weights[inside],
            self.places[start:stop],
            self.counted,
        )


def ask_masked(
    model: DiffusionTransformer,
    tokens: Tokens,
    noisy: Tokens | None = None,
    p_mask: Float[Tensor, "batch pos"] | None = None,
    *,
    real: PosMask | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
) -> LossQuestion:
    """The hidden tokens, each weighted by 1/p; see `masked_diffusion_loss`. Only `real` places are hidden and count."""
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask belong together: pass both, or neither to have the noise drawn")
    mask = model.cfg.mask_token_id
    if mask is None:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so nothing can be hidden from it: an autoregressive model is "
            "trained by autoregressive_loss"
        )
    tokens = tokens.to(model.cfg.device)
    text = tokens if real is None else tokens[real.to(tokens.device)]
    if not bool(model.cfg.writable(text).all()):
        raise ValueError(
            "the tokens of a loss are clean text, and these hold [MASK], or ids that no text holds. For a canvas of "
            "your own take training.masked_diffusion_loss(model, tokens, noisy, p_mask)"
        )
    if noisy is None or p_mask is None:
        noisy, p_mask = hide(tokens, mask, generator=generator, eps=eps)
    noisy, p_mask = noisy.to(tokens.device), p_mask.to(tokens.device)
    hidden = noisy == mask
    counted = tokens.numel()
    if real is not None:
        real = real.to(tokens.device)
        noisy, hidden, counted = torch.where(real, noisy, tokens), hidden & real, int(real.sum())
    weights = 1 / (p_mask[hidden] * counted)
    return LossQuestion(noisy, model.readout.locate(hidden, real), tokens[hidden], weights, hidden, counted)


def ask_next(
    model: DiffusionTransformer, tokens: Tokens, *, real: PosMask | None = None, counted: PosMask | None = None
) -> LossQuestion:
    """Every token but the first of its row, all alike; see `autoregressive_loss`.

    Args:
        real: places that are not padding; by default all.
        counted: of those, the ones that are asked for; by default all.
    """
    tokens = tokens.to(model.cfg.device)
    predicted = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.to(tokens.device)
    if bool((predicted.long().diff(dim=1) > 0).sum(dim=1).add(predicted[:, 0].long()).gt(1).any()):
        raise ValueError("a row's real tokens must stand together: there is padding between them")
    predicted = predicted & (predicted.cumsum(dim=1) > 1)
    if counted is not None:
        predicted = predicted & counted.to(tokens.device)
    count = int(predicted.sum())
    if count == 0:
        raise ValueError("an autoregressive loss needs at least two tokens in a row: the first one is not predicted")
    weights = torch.full((count,), 1 / count, device=tokens.device)
    return LossQuestion(tokens, model.readout.locate(predicted), tokens[predicted], weights, predicted, count)


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
    asked = ask_masked(model, tokens, noisy, p_mask, generator=generator, eps=eps)
    return asked.loss(_logits(model, asked))


def autoregressive_loss(model: DiffusionTransformer, tokens: Tokens) -> Float[Tensor, ""]:
    """Mean cross-entropy of every token but the first."""
    asked = ask_next(model, tokens)
    return asked.loss(_logits(model, asked))


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


def ask(
    model: DiffusionTransformer,
    tokens: Tokens,
    real: PosMask | None,
    generator: torch.Generator | None,
    samples: int = 1,
) -> LossQuestion:
    """The question that the model's own loss asks, about `samples` copies of the tokens under noises of their own.

    Without a generator the noise is fixed in eval mode, and drawn from torch's global one in train mode. There is none
    on an autoregressive model, which is asked once.
    """
    if not model.cfg.has_mask:
        return ask_next(model, tokens, real=real)
    # As one batch, so that the samples' times are spread evenly too.
    copies = None if real is None else real.repeat(samples, 1)
    asked = ask_masked(model, tokens.repeat(samples, 1), real=copies, generator=noise_of(model, generator))
    if generator is None and not model.training and not len(asked.targets):
        raise ValueError(
            f"the fixed noise of eval mode, samples={samples}, hides none of the {tokens.numel()} tokens: there is no "
            "loss to take. Give more text, samples=32 for a mean over that many noises, or a generator="
        )
    return asked


def noise_of(model: DiffusionTransformer, generator: torch.Generator | None) -> torch.Generator | None:
    """The source of a loss's noise: the one given, else a fixed one in eval mode, else (`None`) torch's global one."""
    if generator is None and not model.training:
        return torch.Generator().manual_seed(FIXED_SEED)
    return generator


def own_loss(
    model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None = None
) -> Float[Tensor, ""]:
    """The loss the model is trained by: masked diffusion where there is a [MASK], else next token."""
    asked = ask(model, tokens, None, generator)
    return asked.loss(_logits(model, asked))


def _logits(model: DiffusionTransformer, asked: LossQuestion) -> Float[Tensor, "selected d_vocab_out"]:
    """The rows that are read. Every place is text here, also what would pass for padding."""
    logits: Tensor = model(asked.tokens, attention_mask=model.all_real(asked.tokens), logits_at=asked.rows)
    return logits
