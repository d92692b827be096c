"""Which likely mistake explains what is off: every alternative is run on what the model failed.

With a reference, an alternative explains it when the logits become those of the reference. Without one, when the loss
on the page falls by a clear margin, to the right model's where that is known: a right model is at its best as it is.
Where no alternative explains anything, rows of the vocabulary may be off from some id on, gate and up exchanged in one
block, or a block foreign to the others: its weights tell, or that the model comes nearer without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch

from diffusion_lens.checks.alternatives import (
    Alternative,
    alternatives,
    exchanged_in,
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
# Digits of a score that count when two are put in order; what differs less is listed in the order of the trials.
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
    """Try what may be wrong, and say what that tells.

    Args:
        before: what the measure says of the model as it is.
        mask_ids: ids that may be [MASK]'s.
        foreign: the parts that look foreign by their weights.
        something_off: whether there is something to explain; then mistakes in parts of the model are tried, too.
        config_known: whether every number of the config is the catalogue's, so that no text need tell it.
    """
    a = model.cfg.architecture
    trials = _try(model, measure, before, alternatives(a, mask_ids))
    if not measure.found(trials):
        trials += _without_foreign(model, measure, before, foreign)
    # What explains may be no more than what helps most, so what may help more is tried.
    something_off = something_off or any(trial.verdict == "explains" for trial in trials)
    if something_off and not measure.found(trials):
        trials += _try(model, measure, before, [exchanged_in(a, block) for block in range(a.n_layers)])
        for try_parts in (_moved, _without_each):
            if not measure.found(trials):
                trials += try_parts(model, measure, before)
    return _conclude(measure, before, sorted(trials, key=_order), something_off, config_known)


def _conclude(measure: Measure, before: Parts, trials: list[Trial], something_off: bool, config_known: bool) -> Finding:
    name, was = "diagnosis", float(before.sum())
    numbers = {"measure": measure.what, "as_loaded": was, "trials": [asdict(trial) for trial in trials]}
    best: dict[Verdict, Trial] = {}
    for trial in trials:
        best.setdefault(trial.verdict, trial)
    if found := best.get("explains"):
        said = f"{measure.what}, {was:.3g} as loaded, is {found.score:.3g} {found.name}"
        if also := [each.name for each in trials if each.name != found.name and _order(each) == _order(found)]:
            said += f", and the same {also[0]}"
        return Finding(name, "off", said, found.cause, numbers)
    if something_off:
        said = f"none of {len(trials)} likely mistakes explains {measure.what}, {was:.3g}"
        if found := best.get("helps"):
            said += f"; it is {found.score:.3g} {found.name}, which helps and is still wrong"
        return Finding(name, "noted", said, numbers=numbers)
    said = f"none of {len(trials)} likely mistakes, undone, makes {measure.what} better"
    untold = [trial.name.removeprefix("with ") for trial in trials if trial.verdict == "same"]
    numbers |= {"untold": untold}
    if config_known or not untold:
        return Finding(name, "ok", said, numbers=numbers)
    said += f"; it hardly changes with {', '.join(untold)}, so only the config can tell (--as NAME)"
    return Finding(name, "noted", said, numbers=numbers)


def _without_foreign(
    model: DiffusionTransformer, measure: Measure, before: Parts, foreign: list[Composition]
) -> list[Trial]:
    """Left out what the weights accuse. A part belongs to the model after all if it is worse without it."""
    a = model.cfg.architecture
    trials = _try(model, measure, before, [without(a, each.block, each.part) for each in foreign])
    return [trial if trial.verdict == "worse" else replace(trial, verdict="explains") for trial in trials]


def _without_each(model: DiffusionTransformer, measure: Measure, before: Parts) -> list[Trial]:
    """Each block left out. Against a reference, the one whose absence helps most is foreign; the next may help, too.

    A text may get likelier without a right block that reads what is wrong elsewhere.
    """
    a = model.cfg.architecture
    trials = sorted(_try(model, measure, before, [without(a, block) for block in range(a.n_layers)]), key=_order)
    trials = [replace(trial, verdict="helps") if trial.verdict == "explains" else trial for trial in trials]
    if isinstance(measure, ReferenceMeasure) and trials[0].verdict == "helps":
        trials[0] = replace(trials[0], verdict="explains")
    return trials


def _moved(model: DiffusionTransformer, measure: Measure, before: Parts) -> list[Trial]:
    """Rows of one end of the vocabulary moved back from some id on: a few ids, then those around the best of them.

    The nearer the first id is to the true one, the fewer tokens are read wrongly: there is one minimum to search.
    """
    a = model.cfg.architecture
    tried: dict[tuple[str, int, bool, int], Trial] = {}

    def at(end: str, shift: int, round_the_end: bool, first: int) -> tuple[bool, float]:
        cut = end, shift, round_the_end, first
        if cut not in tried:
            (tried[cut],) = _try(model, measure, before, [moved_from(a, end, shift, first, round_the_end)])
        return _order(tried[cut])

    eighth = a.d_vocab // 8
    for end, shift, round_the_end, n in product(vocabulary_ends(a), (-1, 1), (False, True), (0, 2, 4, 6, 7)):
        at(end, shift, round_the_end, n * eighth)
    end, shift, round_the_end, first = min(tried, key=lambda cut: _order(tried[cut]))
    if tried[end, shift, round_the_end, first].verdict in ("helps", "explains"):
        _minimum(
            partial(at, end, shift, round_the_end), max(0, first - 2 * eighth), min(first + 2 * eighth, a.d_vocab - 2)
        )
    return list(tried.values())


def _minimum(of: Callable[[int], tuple[bool, float]], low: int, high: int) -> None:
    """Golden-section search of an interval of whole numbers (Kiefer 1953)."""
    while high - low > 3:
        inner = round((high - low) * GOLDEN_RATIO)
        if of(high - inner) <= of(low + inner):
            high = low + inner
        else:
            low = high - inner
    for each in range(low, high + 1):
        of(each)


def _try(model: DiffusionTransformer, measure: Measure, before: Parts, changes: Iterable[Alternative]) -> list[Trial]:
    """Each change, in order; the first that an exact measure says to be right ends it."""
    trials = []
    for change in changes:
        after = _under(model, change, measure.of)
        trials.append(Trial(change.name, float(after.sum()), measure.judge(before, after), change.cause))
        if measure.exact and trials[-1].verdict == "explains":
            break
    return trials


@torch.no_grad()
def _under(model: DiffusionTransformer, change: Alternative, measure: Callable[[DiffusionTransformer], Parts]) -> Parts:
    """What is measured of the model with a change."""
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    with lent_weights(model, _config(model.cfg, change), change.change(tensors, change.architecture)):
        return measure(model)


def _order(trial: Trial) -> tuple[bool, float]:
    """Scores that are no numbers last."""
    return trial.score != trial.score, round(trial.score, DIGITS)


def _config(cfg: DiffusionConfig, change: Alternative) -> DiffusionConfig:
    return DiffusionConfig.from_architecture(
        change.architecture,
        device=cfg.device,
        dtype=cfg.dtype,
        model_name=cfg.model_name,
        default_prepend_bos=cfg.default_prepend_bos,
    )
