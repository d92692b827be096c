"""The losses by which networks are trained, as a number at each position from the output of the head there."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.noise.heads import Head
from diffusion_lens.noise.kinds import Uniform

Output = Float[Tensor, "selected d_vocab_out"]
Ids = Int[Tensor, "selected"]
Numbers = Float[Tensor, "selected"]


class LossTerm(ABC):
    """A loss at each position, before it is weighted."""

    @abstractmethod
    def __call__(self, output: Output, clean: Ids, present: Ids, t: Numbers, sigma: Numbers) -> Numbers:
        """The loss at each position.

        Args:
            output: Output of the head.
            clean: The clean tokens.
            present: The tokens on the noisy canvas.
            t: Time of the canvas.
            sigma: Noise of the canvas.
        """


@dataclass(frozen=True)
class CleanCrossEntropy(LossTerm):
    """-log p(x_0)."""

    head: Head

    def __call__(self, output: Output, clean: Ids, present: Ids, t: Numbers, sigma: Numbers) -> Numbers:
        return F.cross_entropy(self.head.clean_logits(output, present, sigma), clean, reduction="none")


@dataclass(frozen=True)
class ScoreEntropy(LossTerm):
    """Score entropy for dsigma/dt = 1 (Lou et al. 2023, arXiv 2310.16834)."""

    head: Head

    def __call__(self, output: Output, clean: Ids, present: Ids, t: Numbers, sigma: Numbers) -> Numbers:
        assert self.head.noise is not None
        return self.head.noise.score_entropy(self.head.log_scores(output, present, sigma), sigma, present, clean)


@dataclass(frozen=True)
class UniformBound(LossTerm):
    """The bound under uniform noise, of which a token is left with probability 1 - t (Schiff et al. 2024,
    arXiv 2412.10193, eq. 18); with -log p of clean text at time 0 added, it bounds the likelihood.

    At time 1 it is 0/0, whose limit is 0; times after 1 - 1e-5 count as this one.

    Attributes:
        head: A head whose p(x_0) is read.
        noise: The noise.
        steps: Number T of steps of a process in discrete time, whose bound is T times the divergence of its posteriors;
            `None` for continuous time.
    """

    head: Head
    noise: Uniform
    steps: int | None = None

    def __call__(self, output: Output, clean: Ids, present: Ids, t: Numbers, sigma: Numbers) -> Numbers:
        p = self.head.clean_logits(output, present, sigma).softmax(dim=-1)
        exact = F.one_hot(clean, self.noise.n).to(p.dtype)
        if self.steps is not None:
            end = t.clamp(max=1 - 1e-4)
            chances = end[:, None], (end - 1 / self.steps)[:, None]
            true, model = (self.noise.posterior(x, present, *chances) for x in (exact, p))
            return self.steps * (true * (true.clamp(min=1e-12).log() - model.clamp(min=1e-12).log())).sum(dim=-1)
        n, alpha = self.noise.n, (1 - t).clamp(min=1e-5)[:, None]
        true, model = (n * alpha * x + 1 - alpha for x in (exact, p))
        true_here, model_here = (x.gather(-1, present[:, None]) for x in (true, model))
        ratio = true / true_here * (model_here.log() - model.log() + true.log() - true_here.log())
        return -((n / true_here - n / model_here)[:, 0] - ratio.sum(dim=-1)) / (n * alpha[:, 0])
