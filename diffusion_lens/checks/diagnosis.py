"""Finds the mistake that explains a failed check, by measuring the model under every alternative.

With a reference, an alternative explains the failure if the logits become those of the reference. Without one, it does
if the loss on the page falls by a clear margin, and to the correct model's loss if that is known: no alternative
improves a correct model. If no alternative explains the failure, three more mistakes are tried: rows of the vocabulary
shifted from some id on, gate and up exchanged in one block, and a block that is foreign to the others, which its
weights show, or an improvement without it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from diffusion_lens.checks.alternatives import (
    Alternative,
    alternatives,
    exchanged_in_each,
    moved_from,
    vocabulary_ends,
    without,
)
from diffusion_lens.checks.composition import Composition
from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.measures import Measure, Parts, ReferenceMeasure, Trial, Verdict
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.lent_weights import lent_weights
from diffusion_lens.model.transformer import DiffusionTransformer

GOLDEN_RATIO = (5**0.5 - 1) / 2
# Digits to which scores are compared; trials with equal scores are listed in the order in which they were made.
DIGITS = 4


def diagnose(
    model: DiffusionTransformer,
    measure: Measure,
    before: Parts,
    *,
    mask_ids: list[int],
    foreign: list[Composition],
    something_off: bool,
    config_known: bool,
) -> Finding:
    """Try the alternatives, and report the one that explains a failure.

    Args:
        model: Model to diagnose.
        measure: Measure of how wrong the model is.
        before: Value of the measure for the unchanged model.
        mask_ids: Candidates for the id of [MASK].
        foreign: Parts that are foreign by their composition scores.
        something_off: Whether another check failed; then mistakes in single parts of the model are tried too.
        config_known: Whether the config was compared with the catalogue's, so that the text need not confirm it.
    """
    # 1. Alternatives of the whole model.
    a = model.cfg.architecture
    candidates = [one for one in alternatives(a, mask_ids) if measure.exact or not one.sees_more]
    trials = _try(model, measure, before, candidates)
    # 2. Parts that are foreign by their weights.
    if not measure.found(trials):
        trials += _without_foreign(model, measure, before, foreign)
    # 3. Mistakes in single parts. They are tried even if an alternative explains the failure inexactly, because one of
    #    them may improve more.
    something_off = something_off or any(trial.verdict == "explains" for trial in trials)
    if something_off and not measure.found(trials):
        trials += _try(model, measure, before, exchanged_in_each(a))
        for try_parts in (_shifted, _without_each):
            if not measure.found(trials):
                trials += try_parts(model, measure, before)
    return _conclude(measure, before, sorted(trials, key=_order), something_off, config_known)


def _conclude(measure: Measure, before: Parts, trials: list[Trial], something_off: bool, config_known: bool) -> Finding:
    """The finding for all trials, which are sorted by score."""
    name, loaded_score = "diagnosis", float(before.sum())
    numbers = {"measure": measure.what, "as_loaded": loaded_score, "trials": [asdict(trial) for trial in trials]}
    best_by_verdict: dict[Verdict, Trial] = {}
    for trial in trials:
        best_by_verdict.setdefault(trial.verdict, trial)
    if best := best_by_verdict.get("explains"):
        said = f"{measure.what}, {loaded_score:.3g} as loaded, is {best.score:.3g} {best.name}"
        if equal := [trial.name for trial in trials if trial.name != best.name and _order(trial) == _order(best)]:
            said += f", and the same {equal[0]}"
        return Finding(name, "off", said, best.cause, numbers)
    if something_off:
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


def _without_foreign(
    model: DiffusionTransformer, measure: Measure, before: Parts, foreign: list[Composition]
) -> list[Trial]:
    """Omit each part that is foreign by its weights. If the model is worse without it, the part is not foreign."""
    a = model.cfg.architecture
    trials = _try(model, measure, before, [without(a, score.block, score.part) for score in foreign])
    return [trial if trial.verdict == "worse" else replace(trial, verdict="explains") for trial in trials]


def _without_each(model: DiffusionTransformer, measure: Measure, before: Parts) -> list[Trial]:
    """Omit each block in turn. With a reference, the block whose omission helps most is foreign.

    Without a reference none is accused: a text may get likelier without a correct block that reads the output of a
    wrong one.
    """
    a = model.cfg.architecture
    trials = sorted(_try(model, measure, before, [without(a, block) for block in range(a.n_layers)]), key=_order)
    trials = [replace(trial, verdict="helps") if trial.verdict == "explains" else trial for trial in trials]
    if isinstance(measure, ReferenceMeasure) and trials[0].verdict == "helps":
        trials[0] = replace(trials[0], verdict="explains")
    return trials


def _shifted(model: DiffusionTransformer, measure: Measure, before: Parts) -> list[Trial]:
    """Shift the rows of one matrix of the vocabulary from some id on: for a few ids, then around the best of these.

    The nearer that id is to the true one, the fewer tokens are wrong, so the score has one minimum.
    """
    a = model.cfg.architecture
    trials: dict[tuple[str, int, bool, int], Trial] = {}

    def score(end: str, shift: int, round_the_end: bool, first: int) -> tuple[bool, float]:
        key = end, shift, round_the_end, first
        if key not in trials:
            (trials[key],) = _try(model, measure, before, [moved_from(a, end, shift, first, round_the_end)])
        return _order(trials[key])

    eighth = a.d_vocab // 8
    for end, shift, round_the_end, n in product(vocabulary_ends(a), (-1, 1), (False, True), (0, 2, 4, 6, 7)):
        score(end, shift, round_the_end, n * eighth)
    end, shift, round_the_end, first = min(trials, key=lambda key: _order(trials[key]))
    if trials[end, shift, round_the_end, first].verdict in ("helps", "explains"):
        _search_minimum(
            partial(score, end, shift, round_the_end),
            max(0, first - 2 * eighth),
            min(first + 2 * eighth, a.d_vocab - 2),
        )
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


def _try(
    model: DiffusionTransformer, measure: Measure, before: Parts, candidates: Iterable[Alternative]
) -> list[Trial]:
    """Measure the model under each alternative in order, until an exact measure finds the explanation."""
    trials = []
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    for alternative in candidates:
        after = _measured_under(model, tensors, alternative, measure.of)
        trials.append(Trial(alternative.name, float(after.sum()), measure.judge(before, after), alternative.cause))
        if measure.exact and trials[-1].verdict == "explains":
            break
    return trials


@torch.no_grad()
def _measured_under(
    model: DiffusionTransformer,
    tensors: Mapping[str, Tensor],
    alternative: Alternative,
    measure: Callable[[DiffusionTransformer], Parts],
) -> Parts:
    """The measure of the model, which has these weights, under an alternative."""
    changed = alternative.change(tensors, alternative.architecture)
    with lent_weights(model, _config(model.cfg, alternative), changed):
        return measure(model)


def _order(trial: Trial) -> tuple[bool, float]:
    """Sort key of a trial: by score, NaN last."""
    return trial.score != trial.score, round(trial.score, DIGITS)


def _config(cfg: DiffusionConfig, alternative: Alternative) -> DiffusionConfig:
    return DiffusionConfig.from_architecture(
        alternative.architecture,
        device=cfg.device,
        dtype=cfg.dtype,
        model_name=cfg.model_name,
        default_prepend_bos=cfg.default_prepend_bos,
    )
