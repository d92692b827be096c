"""The losses: masked diffusion, next token for the AR baseline, and those of models trained by a schedule of noise.

Every loss is a `LossBatch` (input tokens, the rows to read, the tokens to predict there) and a weighted sum over it.
`return_type="loss"` of the model takes the same batch.

The masked diffusion loss masks each token with probability p, and takes the cross-entropy of the masked ones. Weighted
by 1/p, this is an upper bound on the negative log-likelihood (Nie et al. 2024, arXiv 2410.18514, eq. 4; ML-GSAI/SMDM
`pretrain/train_mdm.py`, `sft/finetune_mdm_reverse.py`):

    t ~ U(0, 1) for each row,  p = (1 - eps) t + eps,  loss = 1/(batch · pos) Σ_masked CE / p

Entities can be masked as wholes, so that no part of a name gives away the rest (He et al. 2026, DiffER, arXiv
2601.07347). One draw then decides for all tokens of an entity: each is still masked with probability p, so that the
weight 1/p stays right. The authors' code (`pretrainwem.py`) masks a whole entity as soon as one of its n tokens is
drawn, which has the probability 1 - (1 - p)^n, and divides by p too, so that longer entities weigh more.

Of a model that attends by blocks, each block is predicted from its noisy self and the clean blocks before it, as in its
training (Arriola et al. 2025, BD3LM, arXiv 2503.09573; Cheng et al. 2025, SDAR, arXiv 2510.06303): the network reads
the noisy and the clean text in one pass, `model(noisy, clean=tokens)`. So of an entity across two blocks, the part in
the later block is predicted from the clean part before it, also if it is masked as a whole.

Under a schedule of noise, a token is noised at time t with probability p = 1 - exp(-sigma(t)). The loss of a text is
the mean over times of

    logits, absorbing      Σ_masked -log p(x_0) · sigma'(t) / (e^sigma - 1)      Sahoo et al. 2024, arXiv 2406.07524
    log scores             Σ score entropy · sigma'(t)                           Lou et al. 2023, arXiv 2310.16834
    logits, uniform        Σ bound of `noise.uniform_bound`                      Schiff et al. 2024, arXiv 2412.10193

The last bounds the likelihood together with the surprisal of the clean text at time 0, which training leaves out and
`evaluation.monte_carlo_nll` adds. The first is that of masked diffusion with the weight 1/t in place of 1/p, which is
1/t under a linear schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.noise import (
    LossTerm,
    Schedule,
    clean_cross_entropy,
    schedule_of,
    score_entropy,
    uniform_bound,
)
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import checked_arguments
from diffusion_lens.settings.arguments import shown

Objective = Callable[[DiffusionTransformer, Tokens, torch.Generator | None], Tensor]
FIXED_SEED = 0  # of the loss's noise in eval mode, so that two losses of one text can be compared
NOWHERE = -1  # no token: it marks those that noise replaces


@checked_arguments
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


@checked_arguments
def autoregressive_loss(model: DiffusionTransformer, tokens: Tokens) -> Float[Tensor, ""]:
    """Mean cross-entropy of every token but the first."""
    batch = next_token_batch(model, tokens)
    return batch.loss(_logits(model, batch))


@checked_arguments
def own_loss(
    model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None = None
) -> Float[Tensor, ""]:
    """The loss that the model is trained on: that of its noise, and of a causal model next token."""
    batch = loss_batch(model, tokens, None, generator)
    return batch.loss(_logits(model, batch))


@dataclass(frozen=True)
class LossBatch:
    """Input and targets of a loss."""

    tokens: Tokens  # input of the network
    rows: tuple[Int[Tensor, "selected"], Int[Tensor, "selected"]]  # batch index and row of the logits to read
    targets: Int[Tensor, "selected"]  # tokens to predict there
    weights: Float[Tensor, "selected"]  # weight of each term; the loss is their weighted sum
    predicted: PosMask  # positions of the targets; rows, targets and weights follow their reading order
    n_counted: int  # positions over which the loss is a mean
    clean: Tokens | None = None  # what the network reads beside the tokens, of a model that attends by blocks
    term: LossTerm | None = None  # the loss at each position; `None` for the cross-entropy of the logits
    t: Float[Tensor, "batch pos"] | None = None  # time and noise of each position, under a schedule of noise
    sigma: Float[Tensor, "batch pos"] | None = None
    time_conditioning: bool = False  # whether the network reads the noise of each row, that of its first position

    @property
    def beside(self) -> dict[str, Any]:
        """What the network is given beside the tokens, as arguments."""
        sigma = self.sigma[:, 0] if self.time_conditioning and self.sigma is not None else None
        given = {"clean": self.clean, "sigma": sigma}
        return {name: value for name, value in given.items() if value is not None}

    def loss(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, ""]:
        """Weighted loss of the logits read at `rows`."""
        return self._weighted(logits).sum()

    def by_position(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "batch pos"]:
        """Contribution of each position to the loss, which is their mean; 0 where nothing is predicted."""
        weighted = self._weighted(logits) * self.n_counted
        return weighted.new_zeros(self.predicted.shape).masked_scatter(self.predicted, weighted)

    def _weighted(self, logits: Float[Tensor, "selected d_vocab_out"]) -> Float[Tensor, "selected"]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.term is None or self.t is None or self.sigma is None:
            return F.cross_entropy(wide, self.targets, reduction="none") * self.weights
        present, t, sigma = (x[self.predicted] for x in (self.tokens, self.t, self.sigma))
        return self.term(wide, self.targets, present, t, sigma) * self.weights

    def part(self, start: int, stop: int) -> "LossBatch":
        """Rows `start` to `stop` of the batch, with unchanged weights: the losses of all parts add up to the whole."""
        batch, pos = self.rows
        inside = (batch >= start) & (batch < stop)
        by_row = {name: getattr(self, name) for name in ("tokens", "predicted", "clean", "t", "sigma")}
        parts: dict[str, Any] = {name: None if x is None else x[start:stop] for name, x in by_row.items()}
        return replace(
            self,
            **parts,
            rows=(batch[inside] - start, pos[inside]),
            targets=self.targets[inside],
            weights=self.weights[inside],
        )


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
    if model.cfg.is_autoregressive:
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


def require_known_loss(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if nothing says on which loss a model of this kind was trained."""
    if model.cfg.self_conditioning:
        raise ValueError(
            f"the loss on which {model.cfg.model_name!r} was trained, with self-conditioning in a part of the rows, is "
            "not published, so that a loss or a likelihood here would be another number"
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
    entities: Int[Tensor, "batch pos"] | None = None,
) -> LossBatch:
    """Masked tokens as targets, each weighted by 1/p; see `masked_diffusion_loss`, and `hide` for `entities`."""
    if (noisy is None) != (p_mask is None):
        raise ValueError("noisy and p_mask go together: pass both, or neither to have the noise sampled")
    if model.cfg.is_autoregressive:
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
    require_known_loss(model)
    if noisy is None or p_mask is None:
        noisy, p_mask = noised(model, tokens, generator=generator, eps=eps, entities=entities)
    noisy, p = noisy.to(tokens.device), p_mask.to(tokens.device)
    counted = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.to(tokens.device)
    noisy, n_counted = torch.where(counted, noisy, tokens), int(counted.sum())
    predicted = counted if model.cfg.uniform_noise else counted & (noisy == model.cfg.blank)
    if has_schedule(model):
        weights, by_schedule = _by_schedule(model, p)
        weights = (weights / n_counted).float()
    else:
        weights, by_schedule = 1 / (p * n_counted), {}
    # Each block is predicted from clean blocks before it.
    clean = None if model.cfg.causal_block is None else tokens
    rows = model.readout.locate(predicted, real)
    return LossBatch(
        noisy, rows, tokens[predicted], weights[predicted], predicted, n_counted, clean=clean, **by_schedule
    )


def next_token_batch(
    model: DiffusionTransformer, tokens: Tokens, *, real: PosMask | None = None, counted: PosMask | None = None
) -> LossBatch:
    """Every token but the first of its row as a target, all with one weight; see `autoregressive_loss`."""
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


def _by_schedule(
    model: DiffusionTransformer, p: Float[Tensor, "batch pos"]
) -> tuple[Float[Tensor, "batch pos"], dict[str, Any]]:
    """The weight of each position under a schedule of noise, and what the batch says of its time."""
    head, schedule = model.head, schedule_of(model.cfg.schedule)
    # Where the schedule ends with p = 1, nothing is left of the text, and sigma is infinite.
    highest = min(float(schedule.chance(torch.ones((), dtype=torch.float64))), 1 - 1e-9)
    sigma = -torch.log1p(-p.double().clamp(max=highest))
    t = schedule.time(sigma)
    if model.cfg.head == "log_scores":
        term, weights = score_entropy, schedule.rate(t)
    elif model.cfg.uniform_noise:
        term, weights = uniform_bound, torch.ones_like(t)
    else:
        term, weights = clean_cross_entropy, schedule.rate(t) / torch.expm1(sigma)
    # The network reads what its schedule says, which may have a largest noise.
    read = schedule.sigma(t).float()
    by_position = {"term": partial(term, head), "t": t.float(), "sigma": read}
    return weights, {**by_position, "time_conditioning": model.cfg.time_conditioning}


def has_schedule(model: DiffusionTransformer) -> bool:
    """Whether the loss of a model depends on a schedule of noise."""
    return model.cfg.uniform_noise or (model.cfg.has_mask and model.cfg.schedule is not None)


def noised(
    model: DiffusionTransformer,
    tokens: Tokens,
    *,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
    entities: Int[Tensor, "batch pos"] | None = None,
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Tokens under the model's noise, and the probability p with which each was noised: `hide` by its schedule, if it
    has one. Under uniform noise, a token is replaced by one drawn from all, itself included."""
    if not has_schedule(model):
        return hide(tokens, model.cfg.blank, generator=generator, eps=eps, entities=entities)
    schedule, noise = schedule_of(model.cfg.schedule), model.head.noise
    assert noise is not None
    replaced, p = hide(tokens, NOWHERE, generator=generator, eps=eps, schedule=schedule, entities=entities)
    return torch.where(replaced == NOWHERE, noise.replacements(tokens, generator), tokens), p


def hide(
    tokens: Tokens,
    mask_token_id: int,
    *,
    generator: torch.Generator | None = None,
    eps: float = 1e-3,
    schedule: Schedule | None = None,
    entities: Int[Tensor, "batch pos"] | None = None,
) -> tuple[Tokens, Float[Tensor, "batch pos"]]:
    """Mask each token with the probability p of its row, between `eps` and 1, and return the masked tokens and p.

    The times of the rows are stratified, t_i = u + i/batch (mod 1) with one u ~ U(0, 1): each is uniform, and together
    they cover the unit interval evenly, which lowers the variance of the loss. The noise is sampled on the CPU, so that
    a seed means the same on every device; with a generator of another device, it is sampled there. By a `schedule` of
    noise, p is the probability at a time between `eps` and 1.

    `entities` has for each position the first one of its entity, or itself. The draw of that position decides.
    """
    if not 0 <= eps < 1:
        raise ValueError(f"eps={shown(eps)}; it must be a probability from 0 to below 1")
    n_batch, n_pos = tokens.shape
    device = generator.device if generator is not None else torch.device("cpu")
    t = (torch.rand((), generator=generator, device=device) + torch.arange(n_batch, device=device) / n_batch) % 1
    t = (1 - eps) * t + eps
    p = (t if schedule is None else schedule.chance(t.double()))[:, None].expand(n_batch, n_pos)
    drawn = torch.rand((n_batch, n_pos), generator=generator, device=device)
    masked = (drawn if entities is None else drawn.gather(1, entities.to(device))) < p
    return tokens.masked_fill(masked.to(tokens.device), mask_token_id), p.to(tokens.device)


def noise_of(model: DiffusionTransformer, generator: torch.Generator | None) -> torch.Generator | None:
    """The generator of a loss's noise: the given one, or a fixed one in eval mode; `None` is torch's global one."""
    if generator is None and not model.training:
        return torch.Generator().manual_seed(FIXED_SEED)
    return generator


def _logits(model: DiffusionTransformer, batch: LossBatch) -> Float[Tensor, "selected d_vocab_out"]:
    """The rows of logits that a loss reads. Every token is text here, also the padding token."""
    real = model.padding.all_real(batch.tokens)
    logits: Tensor = model(batch.tokens, attention_mask=real, logits_at=batch.rows, **batch.beside)
    return logits
