"""A sampler under uniform noise that writes canvas after canvas, each in many steps (DiffusionGemma).

Every step draws a token at every position of the open canvas and accepts the surest of them: those of the lowest
entropy, as long as the entropies of the ones before add up to no more than a bound, so that they are nearly independent
(Ben-Hamu et al. 2025, arXiv 2505.24857). All other positions become noise again. The canvas ends with the likeliest
token at each position, in its last step or as soon as the prediction is stable and sure.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffusion_lens.denoising.sampler import Plan, PositionNoise, Prediction, Proposal, Sampler
from diffusion_lens.hooks.step import Handed, StepState
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.settings import at_least, checked_arguments, not_negative
from weight_conversion import Variant

STEPS = 48  # of a canvas, as in the authors' code


@checked_arguments
@dataclass(frozen=True)
class EntropyBound(Sampler):
    """Accepts tokens by a bound on their entropies; `steps` of a run are those of one canvas.

    The temperature falls linearly from `t_max` to `t_min`, with the steps that are left.

    Attributes:
        entropy_bound: Nats that the entropies of the accepted tokens add up to at most, without the largest of them.
        t_min, t_max: Temperatures, of the prediction that is drawn from, ranked and handed to the next step.
        stability_threshold: Number of steps before it that predicted the same tokens, for a row to be finished.
        confidence_threshold: Mean entropy in nats below which a row is finished, if it is stable too.
    """

    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    name = "entropy_bound"
    noises = frozenset({"uniform"})
    writes = "block"
    reads_confidence = False
    hands_on = True
    proposal = Proposal(score="entropy", scored_on="sampled")

    def __post_init__(self) -> None:
        for name in ("entropy_bound", "confidence_threshold", "t_min"):
            not_negative(name, getattr(self, name))
        at_least(0, "stability_threshold", self.stability_threshold)
        if not 0 < self.t_min < self.t_max:
            raise ValueError(
                f"t_min={self.t_min}, t_max={self.t_max}; the temperature falls from t_max to t_min above 0"
            )

    def misfit(self, variant: Variant) -> str | None:
        if problem := super().misfit(variant):
            return problem
        if variant.opens_blocks and variant.uniform_noise:
            return None
        return "writes canvas after canvas under uniform noise, and this model does not"

    def n_steps_by_blocks(self, steps: int | None, blanks: PosMask, blocks: Int[Tensor, "batch pos"], size: int) -> int:
        """Number of steps of the run: those of a canvas times the canvases of the row that has most.

        Raises:
            ValueError: A canvas would not have its full length, with which the model was trained.
        """
        to_write = (F.one_hot(blocks) * blanks[..., None]).sum(dim=1)
        if bool(((to_write != 0) & (to_write != size)).any()):
            raise ValueError(
                f"this model writes canvases of {size} positions behind the prompt: give max_new_tokens={size}, or a "
                f"multiple of it"
            )
        return (STEPS if steps is None else steps) * int((to_write > 0).sum(dim=1).max())

    def temperature(self, step: StepState, temperature: float) -> float:
        assert step.block is not None
        n_steps = step.block.steps_of_all(step.n_steps)
        left = n_steps - int(step.block.step.min())
        return self.t_min + (self.t_max - self.t_min) * left / n_steps

    def plan(self, step: StepState, noise: PositionNoise, confidence: Float[Tensor, "batch pos"]) -> Plan:
        assert step.handed is not None
        positions = step.masked & ~step.handed.finished[:, None]
        counts = positions.any(dim=1).long()
        return Plan(positions, counts, bound=self.entropy_bound, crosses=True)

    def transition(self, step: StepState, prediction: Prediction) -> Float[Tensor, "selected d_vocab"]:
        return prediction.p_clean

    def finishes(self, step: StepState, handed: Handed, entropy: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch"]:
        n_open = step.masked.sum(dim=1).clamp(min=1)
        stable = handed.streak > self.stability_threshold
        return stable & (entropy.sum(dim=1) / n_open < self.confidence_threshold)
