"""Measures of how wrong a model is, on a page or against a reference, and of whether a change undoes the mistake."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.page import no_better_than_chance, page_losses
from diffusion_lens.checks.reference import Distance, Reference
from diffusion_lens.model.transformer import DiffusionTransformer

# "explains": the change undoes the mistake. "helps": the model is better and still wrong. "same": the measure does not
# distinguish the two. "worse": the unchanged model is better.
Verdict = Literal["explains", "helps", "same", "worse"]

# Least difference of two losses on the same tokens under the same noise, in standard errors.
LEAST_Z = 3.0
# Least gain as a share of the loss. A correct model may gain a little from a wrong setting, so a mistake that no other
# check shows must cost a hundredth. A model that is wrong elsewhere may gain a fifth from another wrong setting.
QUIET_SHARE = 0.01
LEAST_SHARE = 0.3
# Least gain of an explanation as a share of the difference from the correct loss.
MOST_OF_IT = 0.95
# Rounding of a loss on one machine, relative to the loss.
ROUNDING = 1e-5
# Largest distance from the correct loss of an explanation that gains little: the rounding of two machines.
EXACT = 3 * ROUNDING
# Least change of the distance to a reference, in the spread of the logits. It falls if a foreign block is omitted, and
# rises if a correct one is.
NEARER = 0.02

# Losses of one text have another shape where there is no noise, so the shape is not named.
Parts = Float[Tensor, "..."]


@dataclass(frozen=True)
class Trial:
    """The result of one alternative.

    Attributes:
        name: Name of the alternative.
        score: Measure under the alternative.
        verdict: Effect of the alternative on the model.
        cause: Likely mistake, if the alternative explains the failure.
    """

    name: str
    score: float
    verdict: Verdict
    cause: str


class Measure(ABC):
    """A measure of how wrong a model is, as a sum of parts; lower is better."""

    what: str

    @abstractmethod
    def of(self, model: DiffusionTransformer) -> Parts:
        """The measure of the model in its current state."""

    @abstractmethod
    def judge(self, before: Parts, after: Parts) -> Verdict:
        """The effect of a change that takes the parts from `before` to `after`."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether a change with the verdict "explains" is certainly the right one, so that the search can end."""

    def found(self, trials: Iterable[Trial]) -> bool:
        """Whether the right change is certainly among these trials."""
        return self.exact and any(trial.verdict == "explains" for trial in trials)


@dataclass(frozen=True, eq=False)
class PageMeasure(Measure):
    """The loss on rows of clean text; its parts are the losses of the tokens, in each sample of noise.

    Attributes:
        rows: Int[batch pos], clean text.
        vocabulary: Number of tokens that the model can predict.
        right: Least and largest loss of the correct model, if known.
        share: Least gain of an alternative that explains a mistake, as a share of the loss.
    """

    rows: Tensor
    vocabulary: int
    right: tuple[float, float] | None = None
    share: float = LEAST_SHARE
    what: str = "the loss on the page"

    @property
    def exact(self) -> bool:
        """Only the correct model has its loss."""
        return self.right is not None

    def of(self, model: DiffusionTransformer) -> Parts:
        return page_losses(model, self.rows)

    def judge(self, before: Parts, after: Parts) -> Verdict:
        """Compare the losses token by token: both are of the same tokens under the same noise."""
        # 1. Losses of a model that knows nothing are not compared.
        loss_before, loss_after = float(before.sum()), float(after.sum())
        gain = loss_before - loss_after
        if no_better_than_chance(loss_after, self.vocabulary):
            return "same" if no_better_than_chance(loss_before, self.vocabulary) else "worse"
        # 2. A loss that rises by more than the noise is worse.
        if before.shape != after.shape:  # one of them without noise: next tokens
            before, after = (x.unflatten(0, (len(self.rows), -1)).sum(dim=1) for x in (before, after))
        difference = before - after
        noise = LEAST_Z * float(difference.std()) * difference.numel() ** 0.5
        if gain < -max(noise, ROUNDING * loss_before):
            return "worse"
        # 3. Only one of the two losses is the correct one.
        if self.right is not None and self._is_right(loss_before) != self._is_right(loss_after):
            if not self._is_right(loss_after):
                return "worse"
            # Of many small changes some come near the correct loss by chance, so a small gain has to meet it exactly.
            gains_little = gain < min(noise, QUIET_SHARE * loss_before)
            return "same" if gains_little and not self._meets(loss_after) else "explains"
        if self.right is not None and loss_before < self.right[0]:
            return "same"
        # 4. Otherwise the size of the gain decides. Comparisons with NaN are false, so any number improves on NaN.
        least = self.share * loss_before if self.right is None else 0.0
        if gain < max(noise, least):
            return "same"
        if self.right is None:
            return "explains"
        # Rows of a vocabulary that a mistake dropped do not come back when the others are corrected.
        return "explains" if gain > MOST_OF_IT * (loss_before - self.right[1]) else "helps"

    def _meets(self, loss: float) -> bool:
        return self.right is not None and abs(2 * loss / sum(self.right) - 1) <= EXACT

    def _is_right(self, loss: float) -> bool:
        return self.right is not None and self.right[0] <= loss <= self.right[1]


@dataclass(frozen=True, eq=False)
class ReferenceMeasure(Measure):
    """The distance to a reference: of the logits, and of the revealed tokens."""

    reference: Reference
    tolerance: tuple[float, float]
    what: str = "the distance to the reference"

    @property
    def exact(self) -> bool:
        return True

    def of(self, model: DiffusionTransformer) -> Parts:
        return self.parts(self.reference.distance(model))

    @staticmethod
    def parts(distance: Distance) -> Parts:
        return torch.tensor([distance.apart, 1 - distance.same, 1 - distance.hidden])

    def judge(self, before: Parts, after: Parts) -> Verdict:
        most_apart, least_same = self.tolerance
        if float(after.sum()) <= most_apart + (1 - least_same):
            return "explains"
        gain = float(before[0] - after[0])
        return "helps" if gain > NEARER else "worse" if gain < -NEARER else "same"
