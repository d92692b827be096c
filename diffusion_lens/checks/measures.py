"""How wrong a model is, on a page or against a reference, and whether a change of it undoes the mistake."""

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

# "explains": the mistake is undone. "helps": better, and still wrong. "same": what was measured cannot tell the two
# apart. "worse": the model is better as it is.
Verdict = Literal["explains", "helps", "same", "worse"]

# Standard errors of the difference of two losses on the same tokens under the same noise.
LEAST_Z = 3.0
# Of the loss. A right model may gain a little from a reading that is not its own, so a mistake that nothing else shows
# must cost a hundredth. A model that is wrong elsewhere may gain a fifth from another wrong reading.
QUIET_SHARE = 0.01
LEAST_SHARE = 0.3
# Of the way to the right loss.
MOST_OF_IT = 0.95
# What a machine rounds, of a loss.
ROUNDING = 1e-5
# How near the right loss a change that gains little must come: what two machines round.
EXACT = 3 * ROUNDING
# Of the spread of logits. Without a foreign block a reference is nearer; leaving out a right one takes it farther away.
NEARER = 0.02

Parts = Float[Tensor, "*parts"]


@dataclass(frozen=True)
class Trial:
    """One alternative, tried.

    Attributes:
        name: of the alternative.
        score: what was measured under it.
        verdict: what it did to the model.
        cause: what is likely wrong if it explains what is off.
    """

    name: str
    score: float
    verdict: Verdict
    cause: str


class Measure(ABC):
    """How wrong a model is, in parts; the lower their sum the better."""

    what: str

    @abstractmethod
    def of(self, model: DiffusionTransformer) -> Parts:
        """Measure a model as it is now."""

    @abstractmethod
    def judge(self, before: Parts, after: Parts) -> Verdict:
        """What a change did that took the parts from `before` to `after`."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether a change that explains is the right one, so that no other need be tried."""

    def found(self, trials: Iterable[Trial]) -> bool:
        """Whether the right change is among these."""
        return self.exact and any(trial.verdict == "explains" for trial in trials)


@dataclass(frozen=True, eq=False)
class PageMeasure(Measure):
    """The loss on rows of clean text, in what each token adds.

    Attributes:
        rows: Int[batch pos].
        vocabulary: tokens that the model writes.
        right: the least and the largest loss of the right model, where that is known.
        share: of the loss, what undoing a mistake must gain.
    """

    rows: Tensor
    vocabulary: int
    right: tuple[float, float] | None = None
    share: float = LEAST_SHARE
    what: str = "the loss on the page"

    @property
    def exact(self) -> bool:
        """Only the right model has its loss."""
        return self.right is not None

    def of(self, model: DiffusionTransformer) -> Parts:
        return page_losses(model, self.rows)

    def judge(self, before: Parts, after: Parts) -> Verdict:
        """Paired by token: both losses are of the same tokens under the same noise."""
        was, now = float(before.sum()), float(after.sum())
        if no_better_than_chance(now, self.vocabulary):
            return "same" if no_better_than_chance(was, self.vocabulary) else "worse"
        difference = before - after
        noise = LEAST_Z * float(difference.std()) * difference.numel() ** 0.5
        if was - now < -max(noise, ROUNDING * was):
            return "worse"
        if self.right is not None and self._is_right(was) != self._is_right(now):
            if not self._is_right(now):
                return "worse"
            # Out of many small changes some come near the right loss by chance. What gains little has to meet it.
            little = was - now < min(noise, QUIET_SHARE * was)
            return "same" if little and not self._meets(now) else "explains"
        if self.right is not None and was < self.right[0]:
            return "same"
        # A loss that was no number compares with nothing, and any number is better. Where the right one is known, what
        # gains little is no explanation anyway.
        least = self.share * was if self.right is None else 0.0
        if was - now < max(noise, least):
            return "same"
        if self.right is None:
            return "explains"
        # Rows of a vocabulary that were lost in a mistake do not come back when the others are put right.
        return "explains" if was - now > MOST_OF_IT * (was - self.right[1]) else "helps"

    def _meets(self, loss: float) -> bool:
        return self.right is not None and abs(2 * loss / sum(self.right) - 1) <= EXACT

    def _is_right(self, loss: float) -> bool:
        return self.right is not None and self.right[0] <= loss <= self.right[1]


@dataclass(frozen=True, eq=False)
class ReferenceMeasure(Measure):
    """The distance to a reference: of the logits, and of the revealed tokens that differ."""

    reference: Reference
    tolerance: tuple[float, float]
    what: str = "the distance to the reference"

    @property
    def exact(self) -> bool:
        return True

    def of(self, model: DiffusionTransformer) -> Parts:
        return self.parts(self.reference.distance(model))

    @staticmethod
    def parts(found: Distance) -> Parts:
        return torch.tensor([found.apart, 1 - found.same, 1 - found.hidden])

    def judge(self, before: Parts, after: Parts) -> Verdict:
        apart, same = self.tolerance
        if float(after.sum()) <= apart + (1 - same):
            return "explains"
        nearer = float(before[0] - after[0])
        return "helps" if nearer > NEARER else "worse" if nearer < -NEARER else "same"
