"""The two kinds of noise, absorbing and uniform: what they do to tokens, and the formulas that undo them.

Absorbing noise replaces a token by [MASK]; uniform noise replaces it by a token drawn from all n, itself included. The
reverse process needs one of two descriptions of the clean tokens x_0, given the noisy token z of a position at noise
sigma:

- their probabilities p(x_0 | z), as a network with logits gives them, or
- the scores s(y) = p_sigma(y) / p_sigma(z), ratios of the probabilities of noisy tokens, as a network trained with
  score entropy gives them (Lou et al. 2023, arXiv 2310.16834).

Each determines the other. A step from sigma to sigma - d takes the token y with probability
(exp(-d Q) s)(y) · exp(d Q)(z, y), where Q is the matrix of rates (Tweedie; the authors' "analytic" step). For d = sigma
this is p(x_0 | z) itself.

Probabilities below are not normalised where the authors' are not, and may be negative by rounding or far from the data:
a draw ignores both.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from weight_conversion import Variant

Ids = Int[Tensor, "*rest"]
Amount = Float[Tensor, "*#rest"]
Predicted = Float[Tensor, "*rest d_vocab_out"]
# One number, or one for each row, with an axis for the columns.
Chance = float | Float[Tensor, "*#rest 1"]
# With a column for [MASK], also where the head has none.
OverTokens = Float[Tensor, "*rest d_vocab"]


class Noise(ABC):
    """A kind of noise. All arguments have one row for each position; the columns of a matrix are the tokens."""

    @abstractmethod
    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        """The token that each position has once it is noised."""

    @abstractmethod
    def scores(self, p_clean: Predicted, present: Ids, sigma: Amount) -> OverTokens:
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
    def posterior(self, p_clean: Predicted, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
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
    a token that is not masked is clean.

    Attributes:
        mask: Id of [MASK].
    """

    mask: int

    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        return torch.full_like(tokens, self.mask)

    def scores(self, p_clean: Predicted, present: Ids, sigma: Amount) -> OverTokens:
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

    def posterior(self, p_clean: Predicted, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
        p = self._with_mask(p_clean * (chance_t - chance_s))
        p[..., self.mask : self.mask + 1] = chance_s
        return p

    def score_entropy(self, log_scores: OverTokens, sigma: Amount, present: Ids, clean: Ids) -> Float[Tensor, "*rest"]:
        ratio = 1 / torch.expm1(sigma)
        others = log_scores.exp().sum(dim=-1) - log_scores[..., self.mask].exp()
        of_clean = log_scores.gather(-1, clean[..., None])[..., 0]
        loss = others - ratio * of_clean + ratio * (ratio.log() - 1)
        return torch.where(present == self.mask, loss, 0.0)

    def _with_mask(self, p: Predicted) -> OverTokens:
        """A copy with a column for [MASK], also where the head has none."""
        return F.pad(p, (0, max(0, self.mask + 1 - p.shape[-1])))


@dataclass(frozen=True)
class Uniform(Noise):
    """Noise that replaces tokens by tokens drawn from all.

    Attributes:
        n: Number of tokens.
    """

    n: int

    def replacements(self, tokens: Ids, generator: torch.Generator | None) -> Ids:
        device = torch.device("cpu") if generator is None else generator.device
        return torch.randint(self.n, tokens.shape, generator=generator, device=device).to(tokens.device)

    def scores(self, p_clean: Predicted, present: Ids, sigma: Amount) -> OverTokens:
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

    def posterior(self, p_clean: Predicted, present: Ids, chance_t: Chance, chance_s: Chance) -> OverTokens:
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
    """The noise of a kind of model with this number of tokens.

    Raises:
        ValueError: The model predicts next tokens, without noise.
    """
    if variant.noise == "absorbing":
        assert variant.mask_token_id is not None
        return Absorbing(variant.mask_token_id)
    if variant.noise == "uniform":
        return Uniform(n_tokens)
    raise ValueError("a model of next tokens is trained without noise")


def draw(p: Float[Tensor, "selected d_vocab"], uniform: Float[Tensor, "selected d_vocab"]) -> Int[Tensor, "selected"]:
    """A token for each row, with probability proportional to its entry (Gumbel-max, as in the authors' code)."""
    return (p / (1e-10 - torch.log(uniform + 1e-10))).argmax(dim=-1)
