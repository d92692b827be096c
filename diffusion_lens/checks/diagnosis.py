"""Finds the mistake that explains a failed check, by measuring the model under every alternative.

With a reference, an alternative explains the failure if the logits become those of the reference. Without one, it does
if the loss on the page falls by a clear margin, and to the correct model's loss if that is known: no alternative
improves a correct model. If no alternative explains the failure, three more mistakes are tried: rows of the vocabulary
shifted from some id on, gate and up exchanged in one block, and a block that is foreign to the others, which its
weights show, or an improvement without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.checks.alternatives import (
    Alternative,
    alternatives,
    exchanged_in_each,
    moved_from,
    vocabulary_ends,
    without,
)
from diffusion_lens.checks.reference import Distance, Reference
from diffusion_lens.checks.report import Finding
from diffusion_lens.checks.texts import no_better_than_chance, page_losses
from diffusion_lens.checks.weights import Composition
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.model.weights import lent_weights

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
GOLDEN_RATIO = (5**0.5 - 1) / 2
# Digits to which scores are compared; trials with equal scores are listed in the order in which they were made.
DIGITS = 4


@dataclass(frozen=True)
class Trial:
    """The measure under one alternative, its effect, and the likely mistake if it explains the failure."""

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


@dataclass(frozen=True, eq=False)
class PageMeasure(Measure):
    """The loss on rows of clean text, Int[batch pos]; its parts are the losses of the tokens, in each sample of noise.

    Attributes:
        vocabulary: Number of tokens that the model can predict.
        right: Least and largest loss of the correct model, if known; only that model has it.
        share: Least gain of an alternative that explains a mistake, as a share of the loss.
    """

    rows: Tensor
    vocabulary: int
    right: tuple[float, float] | None = None
    share: float = LEAST_SHARE
    what: str = "the loss on the page"

    @property
    def exact(self) -> bool:
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
        # 3. Without a known loss, the size of the gain decides. Comparisons with NaN are false, so any number improves
        #    on NaN.
        if self.right is None:
            return "same" if gain < max(noise, self.share * loss_before) else "explains"
        # 4. Otherwise a change explains the mistake if it alone gives the correct loss.
        least, most = self.right
        if (least <= loss_before <= most) != (least <= loss_after <= most):
            if not least <= loss_after <= most:
                return "worse"
            # Of many small changes some come near the correct loss by chance, so a small gain has to meet it exactly.
            gains_little = gain < min(noise, QUIET_SHARE * loss_before)
            meets = abs(2 * loss_after / (least + most) - 1) <= EXACT
            return "same" if gains_little and not meets else "explains"
        if loss_before < least or gain < noise:
            return "same"
        # Rows of a vocabulary that a mistake dropped do not come back when the others are corrected.
        return "explains" if gain > MOST_OF_IT * (loss_before - most) else "helps"


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


@dataclass(frozen=True, eq=False)
class Search:
    """A search for the alternative under which the measure of a model is better than `before`, as it was loaded."""

    model: DiffusionTransformer
    measure: Measure
    before: Parts

    def over(self, candidates: Iterable[Alternative]) -> list[Trial]:
        """Measure the model under each alternative in order, until an exact measure finds the explanation."""
        cfg, trials = self.model.cfg, list[Trial]()
        tensors = {name: weight.detach() for name, weight in self.model.named_parameters()}
        for alternative in candidates:
            changed = DiffusionConfig.from_architecture(
                alternative.architecture,
                device=cfg.device,
                dtype=cfg.dtype,
                model_name=cfg.model_name,
                default_prepend_bos=cfg.default_prepend_bos,
            )
            weights = alternative.change(tensors, alternative.architecture)
            with torch.no_grad(), lent_weights(self.model, changed, weights):
                after = self.measure.of(self.model)
            verdict = self.measure.judge(self.before, after)
            trials.append(Trial(alternative.name, float(after.sum()), verdict, alternative.cause))
            if self.has_found(trials[-1:]):
                break
        return trials

    def has_found(self, trials: Iterable[Trial]) -> bool:
        """Whether the right change is certainly among these trials."""
        return self.measure.exact and any(trial.verdict == "explains" for trial in trials)


def diagnose(
    search: Search, mask_ids: list[int], foreign: list[Composition], *, off: bool, config_known: bool
) -> Finding:
    """Try the alternatives, and report the one that explains a failure.

    Args:
        mask_ids: Candidates for the id of [MASK].
        foreign: Parts that are foreign by their composition scores.
        off: Whether another check failed; then mistakes in single parts of the model are tried too.
        config_known: Whether the config was compared with the catalogue's, so that the text need not confirm it.
    """
    # 1. Alternatives of the whole model.
    a, measure = search.model.cfg.architecture, search.measure
    trials = search.over(one for one in alternatives(a, mask_ids) if measure.exact or not one.sees_more)
    # 2. Parts that are foreign by their weights. If the model is worse without one, it is not foreign.
    if not search.has_found(trials):
        for trial in search.over(without(a, score.block, score.part) for score in foreign):
            trials.append(trial if trial.verdict == "worse" else replace(trial, verdict="explains"))
    # 3. Mistakes in single parts. They are tried even if an alternative explains the failure inexactly, because one of
    #    them may improve more.
    off = off or any(trial.verdict == "explains" for trial in trials)
    if off and not search.has_found(trials):
        trials += search.over(exchanged_in_each(a))
        for try_parts in (_shifted, _without_each):
            if not search.has_found(trials):
                trials += try_parts(search)
    return _conclude(measure, float(search.before.sum()), sorted(trials, key=_order), off, config_known)


def _conclude(measure: Measure, loaded_score: float, trials: list[Trial], off: bool, config_known: bool) -> Finding:
    """The finding for all trials, which are sorted by score."""
    name = "diagnosis"
    numbers = {"measure": measure.what, "as_loaded": loaded_score, "trials": [asdict(trial) for trial in trials]}
    best_by_verdict: dict[Verdict, Trial] = {}
    for trial in trials:
        best_by_verdict.setdefault(trial.verdict, trial)
    if best := best_by_verdict.get("explains"):
        said = f"{measure.what}, {loaded_score:.3g} as loaded, is {best.score:.3g} {best.name}"
        if equal := [trial.name for trial in trials if trial.name != best.name and _order(trial) == _order(best)]:
            said += f", and the same {equal[0]}"
        return Finding(name, "off", said, best.cause, numbers)
    if off:
        said = f"none of {len(trials)} likely mistakes explains {measure.what}, {loaded_score:.3g}"
        if best := best_by_verdict.get("helps"):
            said += f"; it is {best.score:.3g} {best.name}, which helps and is still wrong"
        return Finding(name, "noted", said, numbers=numbers)
    said = f"undoing any of {len(trials)} likely mistakes does not improve {measure.what}"
    indistinct = [trial.name.removeprefix("with ") for trial in trials if trial.verdict == "same"]
    numbers |= {"untold": indistinct}
    if config_known or not indistinct:
        return Finding(name, "ok", said, numbers=numbers)
    said += f"; it hardly changes with {', '.join(indistinct)}, so only the config can tell (--as NAME)"
    return Finding(name, "noted", said, numbers=numbers)


def _without_each(search: Search) -> list[Trial]:
    """Omit each block in turn. With a reference, the block whose omission helps most is foreign.

    Without a reference none is accused: a text may get likelier without a correct block that reads the output of a
    wrong one.
    """
    a = search.model.cfg.architecture
    trials = sorted(search.over(without(a, block) for block in range(a.n_layers)), key=_order)
    trials = [replace(trial, verdict="helps") if trial.verdict == "explains" else trial for trial in trials]
    if isinstance(search.measure, ReferenceMeasure) and trials[0].verdict == "helps":
        trials[0] = replace(trials[0], verdict="explains")
    return trials


def _shifted(search: Search) -> list[Trial]:
    """Shift the rows of one matrix of the vocabulary from some id on: for a few ids, then around the best of these.

    The nearer that id is to the true one, the fewer tokens are wrong, so the score has one minimum.
    """
    a = search.model.cfg.architecture
    trials: dict[tuple[str, int, bool, int], Trial] = {}

    def score(end: str, shift: int, round_the_end: bool, first: int) -> tuple[bool, float]:
        key = end, shift, round_the_end, first
        if key not in trials:
            (trials[key],) = search.over([moved_from(a, end, shift, first, round_the_end)])
        return _order(trials[key])

    eighth = a.d_vocab // 8
    for end, shift, round_the_end, n in product(vocabulary_ends(a), (-1, 1), (False, True), (0, 2, 4, 6, 7)):
        score(end, shift, round_the_end, n * eighth)
    end, shift, round_the_end, first = min(trials, key=lambda key: _order(trials[key]))
    if trials[end, shift, round_the_end, first].verdict in ("helps", "explains"):
        low, high = max(0, first - 2 * eighth), min(first + 2 * eighth, a.d_vocab - 2)
        _search_minimum(partial(score, end, shift, round_the_end), low, high)
    return list(trials.values())


def _search_minimum(score: Callable[[int], tuple[bool, float]], first: int, last: int) -> None:
    """Golden-section search of an interval of whole numbers (Kiefer 1953)."""
    while last - first > 3:
        inner = round((last - first) * GOLDEN_RATIO)
        if score(last - inner) <= score(first + inner):
            last = first + inner
        else:
            first = last - inner
    for number in range(first, last + 1):
        score(number)


def _order(trial: Trial) -> tuple[bool, float]:
    """Sort key of a trial: by score, NaN last."""
    return trial.score != trial.score, round(trial.score, DIGITS)
