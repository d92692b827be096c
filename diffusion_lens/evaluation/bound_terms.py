"""What each position adds to the diffusion bound of a negative log-likelihood, where noise hits it with probability p.

The bound is the integral over p from 0 to 1 of the expected sum, over the answer, of

    logits, absorbing      -log p(x_0) / p at masked positions                  Nie et al. 2024, arXiv 2410.18514, eq. 4
    log scores             score entropy / (1 - p)                               Lou et al. 2023, arXiv 2310.16834
    logits, uniform        the term of Schiff et al. 2024, arXiv 2412.10193, eq. 18, which leaves a token with 1 - p;
                           to the integral, -log p(x_0) of the clean answer at time 0 is added

None depends on a schedule: it says only which p the network meets at which time, which it is told where it listens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.noise import CleanCrossEntropy, LossTerm, ScoreEntropy, Uniform, UniformBound
from diffusion_lens.shapes import PosMask

# At p = 1 nothing is left of the text, and its noise level is infinite.
MOST = 1 - 1e-6


@dataclass(frozen=True)
class BoundTerm:
    """A loss at each position, and its weight by p.

    Attributes:
        term: The loss.
        weight: Function from p to the weight.
        reconstructs: Whether the surprisal of the clean answer at time 0 is added.
    """

    term: LossTerm
    weight: Callable[[Float[Tensor, "*rest"]], Float[Tensor, "*rest"]]
    reconstructs: bool = False


@dataclass(frozen=True)
class NoisyCanvases:
    """Canvases of a text under noise.

    Attributes:
        tokens: Int[sample pos], the canvases.
        scored: Bool[sample pos], positions whose own token is scored.
        chances: Float[sample], probability of noise on each, by which a network that listens is told the time.
    """

    tokens: Int[Tensor, "sample pos"]
    scored: PosMask
    chances: Float[Tensor, "sample"]

    def rows(self, rows: slice | Bool[Tensor, "sample"]) -> "NoisyCanvases":
        """Some of the canvases."""
        return NoisyCanvases(self.tokens[rows], self.scored[rows], self.chances[rows])


def bound_term(model: DiffusionTransformer) -> BoundTerm:
    """The term of a model with noise."""
    head = model.head
    if model.cfg.head == "log_scores":
        return BoundTerm(ScoreEntropy(head), lambda p: 1 / (1 - p.clamp(max=MOST)))
    if isinstance(head.noise, Uniform):
        return BoundTerm(UniformBound(head, head.noise), torch.ones_like, reconstructs=True)
    return BoundTerm(CleanCrossEntropy(head), torch.reciprocal)


def told(model: DiffusionTransformer, p: Float[Tensor, "batch"]) -> dict[str, Float[Tensor, "batch"]]:
    """The noise level that a network is told, as an argument; see `model.sigma_told_of`."""
    sigma = model.sigma_told_of(p)
    return {} if sigma is None else {"sigma": sigma}


def sigma_of_chance(p: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest"]:
    """The noise level at which a token is noised with probability p."""
    return -torch.log1p(-p.double().clamp(max=MOST))
