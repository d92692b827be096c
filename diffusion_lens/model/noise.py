"""Noise and how it is undone: its two kinds, what a head's output means under it, schedules, and losses by position.

Absorbing noise replaces a token by [MASK]; uniform noise replaces it by a token drawn from all n, itself included. The
reverse process needs one of two descriptions of the clean tokens x_0, given the noisy token z of a position at noise
sigma:

- their probabilities p(x_0 | z), as a network with logits gives them, or
- the scores s(y) = p_sigma(y) / p_sigma(z), ratios of the probabilities of noisy tokens, as a network trained with
  score entropy gives them (Lou et al. 2023, arXiv 2310.16834).

Each determines the other. A step from sigma to sigma - d takes the token y with probability
(exp(-d Q) s)(y) · exp(d Q)(z, y), where Q is the matrix of rates (Tweedie; the authors' "analytic" step). For d = sigma
this is p(x_0 | z) itself. Probabilities are not normalised where the authors' are not, and may be negative by rounding
or far from the data: a draw ignores both.

`model(...)` returns the output of the head's linear map as it is. A `Head` reads it:

    logits       softmax over all columns is p(x_0)
    subs         the same without [MASK], which no clean text contains (Sahoo et al. 2024, arXiv 2406.07524)
    log_scores   logarithms of the scores, from which p(x_0) follows. Under absorbing noise it is proportional to them,
                 as with "subs"; under uniform noise it depends on the present token z and on sigma.

Its `clean_logits` are logits whose softmax is p(x_0), so that everything that works on logits works on every head.

A `Schedule` gives the amount of noise at each time. A token is replaced at a rate that depends on the time only, so it
is noised at time t with probability 1 - exp(-sigma(t)), where sigma is the integral of the rate.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.settings import own_seed
from weight_conversion import NoiseSchedule, Variant

Ids = Int[Tensor, "*rest"]
Amount = Float[Tensor, "*#rest"]
Raw = Float[Tensor, "*rest d_vocab_out"]
Chance = float | Float[Tensor, "*#rest 1"]  # One number, or one for each row, with an axis for the columns.
OverTokens = Float[Tensor, "*rest d_vocab"]  # With a column for [MASK], also where the head has none.
Output = Float[Tensor, "selected d_vocab_out"]
SelectedIds = Int[Tensor, "selected"]
Numbers = Float[Tensor, "selected"]
# The loss at each position before it is weighted, from the output of the head, the clean tokens, the tokens on the
# noisy canvas, the time of the canvas and its noise.
LossTerm = Callable[[Output, SelectedIds, SelectedIds, Numbers, Numbers], Numbers]

# The authors' logit of [MASK] in "subs": finite, so that differences of two such logits are numbers.
NEVER = -1e6
_NEEDS = "the head's output is log scores under uniform noise, so the probabilities of clean tokens depend on"


class Noise(ABC):
    """A kind of noise. All arguments have one row for each position; the columns of a matrix are the tokens."""

    @abstractmethod
    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        """The token that each position has once it is noised."""

    @abstractmethod
    def scores(self, p_clean: Raw, present: Ids, sigma: Amount) -> OverTokens:
        """The scores that follow from p(x_0)."""

    @abstractmethod
    def staggered(self, scores: OverTokens, d_sigma: Amount) -> OverTokens:
        """exp(-d Q) s, the scores of a step's end relative to its start."""

    @abstractmethod
    def transition(self, present: Ids, d_sigma: Amount, n_columns: int) -> OverTokens:
        """exp(d Q)(z, y), the probability that a token y becomes the present token z."""

    @abstractmethod
    def reverse_rate(self, scores: OverTokens, present: Ids) -> OverTokens:
        """Rate at which the present token becomes each other token in the reverse process, for dsigma/dt = 1."""

    @abstractmethod
    def posterior(self, p_clean: Raw, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
        """Probability of each token at an earlier time s, up to a factor, from the chances that a token is noised."""

    @abstractmethod
    def score_entropy(self, log_scores: OverTokens, sigma: Amount, present: Ids, clean: Ids) -> Float[Tensor, "*rest"]:
        """The loss of Lou et al. at each position, for dsigma/dt = 1; 0 for perfect scores."""

    def analytic(self, scores: OverTokens, present: Ids, d_sigma: Amount) -> OverTokens:
        """Probability of each token after a step that removes noise `d_sigma`, up to a factor."""
        return self.staggered(scores, d_sigma) * self.transition(present, d_sigma, scores.shape[-1])

    def euler(self, scores: OverTokens, present: Ids, d_sigma: Amount) -> OverTokens:
        """The same in first order, where `d_sigma` is the length of the step times dsigma/dt at its start."""
        stays = F.one_hot(present, scores.shape[-1])
        return stays + d_sigma[..., None] * self.reverse_rate(scores, present)


@dataclass(frozen=True)
class Absorbing(Noise):
    """Noise that replaces tokens by [MASK]. The formulas of the reverse process are those of masked positions, because
    a token that is not masked is clean."""

    mask: int

    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        return torch.full_like(tokens, self.mask)

    def scores(self, p_clean: Raw, present: Ids, sigma: Amount) -> OverTokens:
        scores = self._with_mask(p_clean / torch.expm1(sigma)[..., None])
        scores[..., self.mask] = 1.0
        return scores

    def staggered(self, scores: OverTokens, d_sigma: Amount) -> OverTokens:
        grown = scores * torch.exp(d_sigma)[..., None]
        grown[..., self.mask] -= torch.expm1(d_sigma) * scores.sum(dim=-1)
        return grown

    def transition(self, present: Ids, d_sigma: Amount, n_columns: int) -> OverTokens:
        stays = F.one_hot(present, n_columns) * torch.exp(-d_sigma)[..., None]
        masked = (present == self.mask)[..., None]
        return torch.where(masked, stays - torch.expm1(-d_sigma)[..., None], stays)

    def reverse_rate(self, scores: OverTokens, present: Ids) -> OverTokens:
        rate = torch.where((present == self.mask)[..., None], scores, 0.0)
        rate[..., self.mask] = 0.0
        return rate.scatter_add(-1, present[..., None], -rate.sum(dim=-1, keepdim=True))

    def posterior(self, p_clean: Raw, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
        p = self._with_mask(p_clean * (chance_t - chance_s))
        p[..., self.mask : self.mask + 1] = chance_s
        return p

    def score_entropy(self, log_scores: OverTokens, sigma: Amount, present: Ids, clean: Ids) -> Float[Tensor, "*rest"]:
        ratio = 1 / torch.expm1(sigma)
        others = log_scores.exp().sum(dim=-1) - log_scores[..., self.mask].exp()
        of_clean = log_scores.gather(-1, clean[..., None])[..., 0]
        loss = others - ratio * of_clean + ratio * (ratio.log() - 1)
        return torch.where(present == self.mask, loss, 0.0)

    def _with_mask(self, p: Raw) -> OverTokens:
        """A copy with a column for [MASK], also where the head has none."""
        return F.pad(p, (0, max(0, self.mask + 1 - p.shape[-1])))


@dataclass(frozen=True)
class Uniform(Noise):
    """Noise that replaces tokens by tokens drawn from all n."""

    n: int

    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        device = torch.device("cpu") if generator is None else generator.device
        return torch.randint(self.n, tokens.shape, generator=generator, device=device).to(tokens.device)

    def scores(self, p_clean: Raw, present: Ids, sigma: Amount) -> OverTokens:
        # s(y) = Σ_x p(x | z) q(y | x) / q(z | x), where q(y | x) = spread, plus kept if y = x.
        kept = torch.exp(-sigma)[..., None]
        spread = -torch.expm1(-sigma)[..., None] / self.n
        # For x = z the denominator is kept + spread, otherwise spread.
        ratio = p_clean / spread
        ratio = ratio.scatter(-1, present[..., None], p_clean.gather(-1, present[..., None]) / (kept + spread))
        scores = kept * ratio + spread * ratio.sum(dim=-1, keepdim=True)
        return scores.scatter(-1, present[..., None], 1.0)

    def staggered(self, scores: OverTokens, d_sigma: Amount) -> OverTokens:
        kept = torch.exp(-d_sigma)[..., None]
        return (scores - (1 - kept) / self.n * scores.sum(dim=-1, keepdim=True)) / kept

    def transition(self, present: Ids, d_sigma: Amount, n_columns: int) -> OverTokens:
        stays = F.one_hot(present, n_columns) * torch.exp(-d_sigma)[..., None]
        return stays - torch.expm1(-d_sigma)[..., None] / self.n

    def reverse_rate(self, scores: OverTokens, present: Ids) -> OverTokens:
        rate = (scores / self.n).scatter(-1, present[..., None], 0.0)
        return rate.scatter_add(-1, present[..., None], -rate.sum(dim=-1, keepdim=True))

    def posterior(self, p_clean: Raw, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
        # Schiff et al. 2024 (arXiv 2412.10193), eq. 16, for the prediction in place of the clean token.
        alpha_t, alpha_s = 1 - chance_t, 1 - chance_s
        here = F.one_hot(present, self.n)
        p_here = p_clean.gather(-1, present[..., None])
        kept = (alpha_t * self.n * p_here + alpha_t / alpha_s - alpha_t) * here
        moved = (alpha_s - alpha_t) * p_clean + (1 - alpha_t / alpha_s) * (1 - alpha_s) / self.n
        return (kept + moved) / (alpha_t * self.n * p_here + 1 - alpha_t)

    def score_entropy(self, log_scores: OverTokens, sigma: Amount, present: Ids, clean: Ids) -> Float[Tensor, "*rest"]:
        e = torch.expm1(sigma)
        r = 1 - self.n / (e + self.n)
        at_present = log_scores.gather(-1, present[..., None])[..., 0]
        at_clean = log_scores.gather(-1, clean[..., None])[..., 0]
        mean = log_scores.mean(dim=-1) - at_present / self.n
        kept = present == clean
        negative = torch.where(kept, r * mean, at_clean / e + mean)
        constant = torch.where(
            kept, (self.n - 1) / self.n * r * (r.log() - 1), ((-r.log() - 1) / r - (self.n - 2)) / self.n
        )
        positive = log_scores.exp().mean(dim=-1) - at_present.exp() / self.n
        return positive - negative + constant


def noise_of(variant: Variant, n_tokens: int) -> Noise:
    """The noise of a kind of model with this number of tokens; a `ValueError` if it predicts next tokens."""
    if variant.noise == "absorbing":
        assert variant.mask_token_id is not None
        return Absorbing(variant.mask_token_id)
    if variant.noise == "uniform":
        return Uniform(n_tokens)
    raise ValueError("a model of next tokens is trained without noise")


def draw(p: Float[Tensor, "selected d_vocab"], uniform: Float[Tensor, "selected d_vocab"]) -> Int[Tensor, "selected"]:
    """A token for each row, with probability proportional to its entry (Gumbel-max, as in the authors' code)."""
    return (p / (1e-10 - torch.log(uniform + 1e-10))).argmax(dim=-1)


class Head(ABC):
    """The meaning of a head's output."""

    noise: Noise | None  # `None` for a model of next tokens
    needs_canvas: bool = False  # whether p(x_0) depends on the present tokens and on sigma, apart from the output

    @abstractmethod
    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        """Logits whose softmax is p(x_0), from the head's output, the token and the noise at some positions; the last
        two only where `needs_canvas`."""

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        """The logarithms of the scores, 0 at the present token."""
        scores = self.scores(output, present, sigma)
        return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()

    def scores(self, output: Raw, present: Ids, sigma: Amount) -> Float[Tensor, "*rest d_vocab"]:
        """The scores p_sigma(y) / p_sigma(z); of a head of logits, those that follow from p(x_0)."""
        assert self.noise is not None
        p_clean = self.clean_logits(output, present, sigma).softmax(dim=-1)
        return self.noise.scores(p_clean, present, sigma)


@dataclass(frozen=True)
class PlainLogits(Head):
    """Softmax over all columns is p(x_0), or the probability of the next token."""

    noise: Noise | None

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        return output


@dataclass(frozen=True)
class WithoutMask(Head):
    """Softmax over all columns but that of [MASK] is p(x_0) at masked positions."""

    noise: Absorbing

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        if self.noise.mask >= output.shape[-1]:
            return output
        never = max(NEVER, torch.finfo(output.dtype).min)
        return output.index_fill(-1, torch.tensor([self.noise.mask], device=output.device), never)


class _ScoresHead(Head):
    """A head of log scores."""

    def scores(self, output: Raw, present: Ids, sigma: Amount) -> OverTokens:
        return self.log_scores(output, present, sigma).exp()


@dataclass(frozen=True)
class AbsorbingScores(_ScoresHead):
    """Log scores, before the authors subtract the constant that depends on sigma.

    At a masked position the score of a token is p(x_0) / (e^sigma - 1), so p(x_0) is proportional to the scores.
    """

    noise: Absorbing

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        return WithoutMask(self.noise).clean_logits(output)

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Raw:
        n_others = output.shape[-1] - 1
        scaled = output - torch.log(torch.expm1(sigma) * n_others)[..., None]
        return scaled.scatter(-1, present[..., None], 0.0)


@dataclass(frozen=True)
class UniformScores(_ScoresHead):
    """Log scores under uniform noise. p(x_0) is the analytic step that removes all noise (Tweedie), normalised."""

    noise: Uniform
    needs_canvas: bool = True

    def clean_logits(self, output: Raw, present: Ids | None = None, sigma: Amount | None = None) -> Raw:
        if present is None or sigma is None:
            raise ValueError(f"{_NEEDS} the present tokens and on the noise: pass present= and sigma=")
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        p = self.noise.analytic(self.scores(wide, present, sigma), present, sigma)
        # Entries far from the data are negative; the smallest positive number has a finite logarithm.
        return p.clamp(min=torch.finfo(p.dtype).tiny).log()

    def log_scores(self, output: Raw, present: Ids, sigma: Amount) -> Raw:
        return output.scatter(-1, present[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class HeadAt:
    """A head at some positions of canvases, with the tokens there and the noise where the head needs these."""

    head: Head
    present: Int[Tensor, "#sample selected"] | None = None
    sigma: float | None = None

    @classmethod
    def of(cls, model: Any, present: Int[Tensor, "#sample selected"] | None = None) -> "HeadAt":
        """The head of a model in the time of the current step or of `model.at_time`, at positions with these tokens."""
        head = model.head
        if not head.needs_canvas:
            return cls(head)
        sigma = model.time.known_sigma()
        return cls(head, present, None if sigma is None else float(sigma))

    def clean_logits(
        self, output: Float[Tensor, "batch selected d_vocab_out"], indices: Int[Tensor, "selected"] | None = None
    ) -> Float[Tensor, "batch selected d_vocab_out"]:
        """Logits whose softmax is p(x_0), from the head's output in whole copies of the samples, at the positions with
        these indices; by default at all."""
        if not self.head.needs_canvas:
            return self.head.clean_logits(output)
        if self.present is None or self.sigma is None:
            raise ValueError(
                f"{_NEEDS} the canvas and on its time: make queries' metrics and read probabilities inside "
                "`with model.at_time(t):`"
            )
        present = self.present if indices is None else self.present[:, indices]
        present = present.to(output.device).repeat(len(output) // len(present), 1)
        return self.head.clean_logits(output, present, output.new_full(present.shape, self.sigma))


def head_of(variant: Variant, meaning: str, n_tokens: int) -> Head:
    """The head of a kind of model, by its meaning in the config ("logits", "subs" or "log_scores") and its columns."""
    noise = None if variant.noise is None else noise_of(variant, n_tokens)
    if meaning == "logits":
        return PlainLogits(noise)
    if isinstance(noise, Absorbing):
        return WithoutMask(noise) if meaning == "subs" else AbsorbingScores(noise)
    if isinstance(noise, Uniform) and meaning == "log_scores":
        return UniformScores(noise)
    raise ValueError(f"a head of {meaning!r} does not fit noise {variant.noise!r}; it must be 'logits'")


class Schedule(ABC):
    """A schedule of noise over the times 0 (none) to 1 (all tokens are noise)."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Total noise at each time."""

    @abstractmethod
    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Derivative of sigma by the time."""

    @abstractmethod
    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """The time of each total noise, the inverse of `sigma`."""

    def chance(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        """Probability that a token has been noised by each time, 1 - exp(-sigma)."""
        return -torch.expm1(-self.sigma(t))

    def sigma_at(self, t: float) -> float:
        """Total noise at one time."""
        return float(self.sigma(torch.tensor(t, dtype=torch.float64)))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """sigma = -log(1 - (1 - eps) t): a token is noised with probability (1 - eps) t."""

    eps: float = 1e-3

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.log1p(-(1 - self.eps) * t)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.expm1(-sigma) / (1 - self.eps)

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)


@dataclass(frozen=True)
class Linear(Schedule):
    """A token is noised with probability t; sigma = -log(1 - t) is at most -log(eps) (Arriola et al. 2025)."""

    eps: float = 1e-3

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.log1p(-t).clamp(min=math.log(self.eps))

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return 1 / (1 - t)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return -torch.expm1(-sigma)

    def chance(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return t


@dataclass(frozen=True)
class Geometric(Schedule):
    """sigma = sigma_min^(1 - t) · sigma_max^t."""

    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def sigma(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return self.sigma_min ** (1 - t) * self.sigma_max**t

    def rate(self, t: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)

    def time(self, sigma: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
        return torch.log(sigma / self.sigma_min) / math.log(self.sigma_max / self.sigma_min)


def schedule_of(described: NoiseSchedule | None) -> Schedule:
    """The schedule of a description; where a checkpoint says nothing of it, the log-linear one."""
    if described is None:
        return LogLinear()
    if described.kind == "geometric":
        return Geometric(float(described.sigma_min), float(described.sigma_max))
    return {"log_linear": LogLinear, "linear": Linear}[described.kind](float(described.eps))


# The terms of losses. A `LossTerm` is one of these functions with its head (`functools.partial`).


def clean_cross_entropy(
    head: Head, output: Output, clean: SelectedIds, present: SelectedIds, t: Numbers, sigma: Numbers
) -> Numbers:
    """-log p(x_0)."""
    return F.cross_entropy(head.clean_logits(output, present, sigma), clean, reduction="none")


def score_entropy(
    head: Head, output: Output, clean: SelectedIds, present: SelectedIds, t: Numbers, sigma: Numbers
) -> Numbers:
    """Score entropy for dsigma/dt = 1 (Lou et al. 2023, arXiv 2310.16834)."""
    assert head.noise is not None
    return head.noise.score_entropy(head.log_scores(output, present, sigma), sigma, present, clean)


def uniform_bound(
    head: Head, output: Output, clean: SelectedIds, present: SelectedIds, t: Numbers, sigma: Numbers
) -> Numbers:
    """The bound under uniform noise, of which a token is left with probability 1 - t (Schiff et al. 2024,
    arXiv 2412.10193, eq. 18); with -log p of clean text at time 0 added, it bounds the likelihood.

    At time 1 it is 0/0, whose limit is 0; times after 1 - 1e-5 count as this one.
    """
    p = head.clean_logits(output, present, sigma).softmax(dim=-1)
    n, alpha = p.shape[-1], (1 - t).clamp(min=1e-5)[:, None]
    true, model = (n * alpha * x + 1 - alpha for x in (F.one_hot(clean, n).to(p.dtype), p))
    true_here, model_here = (x.gather(-1, present[:, None]) for x in (true, model))
    ratio = true / true_here * (model_here.log() - model.log() + true.log() - true_here.log())
    return -((n / true_here - n / model_here)[:, 0] - ratio.sum(dim=-1)) / (n * alpha[:, 0])


def hidden_tokens(cfg: DiffusionConfig, n: int, key: str = "", seed: int = 0) -> list[int]:
    """`n` ids that hide tokens: [MASK]; under uniform noise, tokens drawn from all, by the seed and the text's `key`.

    A model whose text grows at its end has nothing there, which is a `ValueError`.
    """
    if not cfg.uniform_noise:
        if cfg.is_autoregressive:
            raise ValueError(f"{cfg.model_name!r} has no id for positions that its text has not reached")
        return [cfg.blank] * n
    generator = torch.Generator().manual_seed(own_seed(seed, key))
    ids: list[int] = torch.randint(cfg.d_vocab_out, (n,), generator=generator).tolist()
    return ids
