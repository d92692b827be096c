"""Which likely mistake explains what is off: every alternative is run on what the model failed.

With a reference, an alternative explains it when the logits become those of the reference. Without one, when the loss
on the page falls by a clear margin: a right model is at its best as it is, and no other reading of it does better.
Where no alternative explains anything, a block may be foreign to the others: its weights tell, or that the model comes
nearer without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from diffusion_lens.checks.alternatives import Alternative, alternatives, without_layer
from diffusion_lens.checks.composition import compositions, foreign_blocks
from diffusion_lens.checks.finding import Finding
from diffusion_lens.checks.page import no_better_than_chance, page_loss
from diffusion_lens.checks.reference import Distance, Reference
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.lent_weights import lent_weights
from diffusion_lens.model.transformer import DiffusionTransformer

# Nats, and of the loss: neighbouring rotary bases differ by a hundredth of a nat on short texts, real mistakes by more.
# Where much is tried because something is off, the best of it falls by some percent by chance.
LEAST_FALL = 0.05
QUIET_SHARE = 0.02
LEAST_SHARE = 0.1
# Of the spread of logits. Without a foreign block a reference is nearer; leaving out a right one takes it farther away.
NEARER = 0.02


class Measure(ABC):
    """How wrong a model is, lower is better. Only the right alternative meets an `exact` one; the rest is spared."""

    what: str
    exact: bool

    @abstractmethod
    def of(self, model: DiffusionTransformer) -> float:
        """Measure a model as it is now."""

    @abstractmethod
    def explains(self, before: float, after: float) -> bool:
        """Whether a change from `before` to `after` says that the mistake is undone."""

    @abstractmethod
    def helps(self, before: float, after: float) -> bool:
        """Whether leaving a block out did good, by `smooth`."""

    def smooth(self, model: DiffusionTransformer) -> float:
        """A measure that small improvements move."""
        return self.of(model)


@dataclass(frozen=True, eq=False)
class PageMeasure(Measure):
    """The loss on rows of clean text."""

    rows: Tensor
    vocabulary: int
    share: float = LEAST_SHARE
    what: str = "the loss on the page"
    exact: bool = False

    def of(self, model: DiffusionTransformer) -> float:
        return page_loss(model, self.rows)

    def explains(self, before: float, after: float) -> bool:
        fell = not after > before - max(LEAST_FALL, self.share * before)
        return fell and not no_better_than_chance(after, self.vocabulary)

    def helps(self, before: float, after: float) -> bool:
        return self.explains(before, after)


@dataclass(frozen=True, eq=False)
class ReferenceMeasure(Measure):
    """The distance to a reference, revealed tokens that differ counted on top."""

    reference: Reference
    tolerance: tuple[float, float]
    what: str = "the distance to the reference"
    exact: bool = True

    def of(self, model: DiffusionTransformer) -> float:
        return self.sum(self.reference.distance(model))

    @staticmethod
    def sum(found: Distance) -> float:
        """One number."""
        return found.apart + (1 - found.same) + (1 - found.hidden)

    def explains(self, before: float, after: float) -> bool:
        apart, same = self.tolerance
        return after <= apart + (1 - same)

    def helps(self, before: float, after: float) -> bool:
        return after < before - NEARER

    def smooth(self, model: DiffusionTransformer) -> float:
        return self.reference.distance(model).apart


@dataclass(frozen=True)
class Trial:
    """One alternative, tried.

    Attributes:
        name: of the alternative.
        score: what was measured under it.
        explains: whether that says the mistake is undone.
        cause: what is then likely wrong.
    """

    name: str
    score: float
    explains: bool
    cause: str


def try_all(model: DiffusionTransformer, measure: Measure, before: float, mask_ids: list[int]) -> list[Trial]:
    """Every alternative, the best first; and, where none explains anything, every block left out."""
    a = model.cfg.architecture
    trials = _try(model, measure, before, alternatives(a, mask_ids))
    if any(trial.explains for trial in trials):
        return trials
    left_out = _leave_out(model, measure)
    strangers = [f"without block {block}" for block in foreign_blocks(compositions(model))]
    # Without weights that tell, the block whose absence helps most; the one after a foreign one may help a little, too.
    accused = strangers or [trial.name for trial in left_out[:1] if trial.explains]
    left_out = [replace(trial, explains=trial.name in accused) for trial in left_out]
    return sorted(left_out + trials, key=_order)


def try_quiet(model: DiffusionTransformer, measure: Measure, before: float) -> list[Trial]:
    """The alternatives whose mistakes little else would show."""
    return _try(model, measure, before, [each for each in alternatives(model.cfg.architecture) if each.quiet])


def conclude(measure: Measure, before: float, trials: list[Trial], something_off: bool) -> Finding:
    """What the trials say."""
    name = "diagnosis"
    numbers = {"measure": measure.what, "as_loaded": before, "trials": [asdict(trial) for trial in trials]}
    explaining = [trial for trial in trials if trial.explains]
    if explaining:
        best = explaining[0]
        said = f"{measure.what} goes from {before:.3g} to {best.score:.3g} {best.name}"
        if not measure.explains(before, best.score):
            said = f"no other reading explains {measure.what}, {before:.3g}; {best.name} it is {best.score:.3g}"
        return Finding(name, "off", said, best.cause, numbers)
    if not something_off:
        return Finding(
            name, "ok", f"none of {len(trials)} likely mistakes would make {measure.what} better", numbers=numbers
        )
    said = f"none of {len(trials)} likely mistakes explains {measure.what}, {before:.3g}"
    return Finding(name, "noted", said, numbers=numbers)


@torch.no_grad()
def _try(model: DiffusionTransformer, measure: Measure, before: float, changes: Iterable[Alternative]) -> list[Trial]:
    trials = []
    for change in changes:
        score = _under(model, change, measure.of)
        trials.append(Trial(change.name, score, measure.explains(before, score), change.cause))
        if measure.exact and trials[-1].explains:
            break
    return sorted(trials, key=_order)


@torch.no_grad()
def _leave_out(model: DiffusionTransformer, measure: Measure) -> list[Trial]:
    before, trials = measure.smooth(model), []
    for layer in range(model.cfg.n_layers):
        change = without_layer(model.cfg.architecture, layer)
        score = _under(model, change, measure.smooth)
        trials.append(Trial(change.name, score, measure.helps(before, score), change.cause))
    return sorted(trials, key=_order)


def _under(model: DiffusionTransformer, change: Alternative, measure: Callable[[DiffusionTransformer], float]) -> float:
    """What is measured of the model with a change."""
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    with lent_weights(model, _config(model.cfg, change), change.change(tensors, change.architecture)):
        return measure(model)


def _order(trial: Trial) -> tuple[bool, float]:
    """Scores that are no numbers last."""
    return trial.score != trial.score, trial.score


def _config(cfg: DiffusionConfig, change: Alternative) -> DiffusionConfig:
    return DiffusionConfig.from_architecture(
        change.architecture,
        device=cfg.device,
        dtype=cfg.dtype,
        model_name=cfg.model_name,
        default_prepend_bos=cfg.default_prepend_bos,
    )
