"""Linear probes: the rows that are read for them, in forward passes over texts or runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.engine.batching import reserved, row_bytes
from diffusion_lens.analysis.engine.inputs import (
    CleanTexts,
    ForwardPass,
    Inputs,
    SharedPass,
    TextsOrRuns,
    passes_of,
    readable_points,
    texts_or_runs,
)
from diffusion_lens.analysis.probes.fit import (
    CLASS_COPIES,
    PARTS,
    REGRESSION_MATRICES,
    ClassFit,
    RidgeSettings,
    fit_classes,
    fit_numbers,
    require_sklearn,
)
from diffusion_lens.analysis.probes.result import LinearProbe
from diffusion_lens.analysis.probes.rows import (
    ROW_BYTES,
    GivenLabels,
    KeptRows,
    Labels,
    Rows,
    Sums,
    permuted,
    require_finite,
)
from diffusion_lens.analysis.steering_vectors import Positions, check_positions, nothing_selected, select
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.names import NamesFilter, resid_post, resid_pre
from diffusion_lens.model.loss import noised
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import Whole, at_least, checked_arguments, one_of

_TOKEN_BYTES = 16  # of each token of a pass that waits to be read: its id, flags, and the class of its row


@checked_arguments
def probe_time(
    model: DiffusionTransformer, inputs: TextsOrRuns, names_filter: NamesFilter = None, **settings: Any
) -> LinearProbe:
    """Fit a linear probe of the denoising time at each hook point, and test it on held-out texts or runs.

    Args:
        model, inputs, names_filter: Those of `probe`.
        settings: Other arguments of `probe`, which has the errors too.
    """
    return probe(model, inputs, "time", names_filter, **settings)


@begins_run
@torch.no_grad()
@checked_arguments
def probe(
    model: DiffusionTransformer,
    inputs: TextsOrRuns,
    labels: GivenLabels,
    names_filter: NamesFilter = None,
    *,
    positions: Positions = "masked",
    steps: Whole | Iterable[Whole] | None = None,
    rows: str = "position",
    samples: Whole = 8,
    ridge: RidgeSettings | None = None,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**31,
) -> LinearProbe:
    """Fit a linear probe of a label at each hook point, and test it on held-out texts or runs.

    Args:
        model: Model that reads the states; the caller's hooks act.
        inputs: Trajectories (each of their rows is a unit), or on a diffusion model, texts, facts or tokens, which are
            masked at random, or replaced under uniform noise (each is a unit). If units share most of their words, the
            test is easier.
        labels: "time"; "token", the token that the text has, or the run ends with, at a position; or labels of your
            own, one for each unit, or [batch pos], one for each position of the text or the final canvas. Real numbers
            are regressed on; strings, whole numbers and `True` and `False` are classes, which needs the extra `probes`.
            `None`, NaN and the whole number -1 mean that there is no label. Whether the tokens of a run are right is
            `(run.tokens == truth).int().masked_fill(run.given | ~run.real, -1)`, with truth [batch pos]. A state has
            the label of its position, and with `positions="predicting"` that of the position that it predicts.
        names_filter: Hook points; by default the residual stream before the first block and after every block.
        positions: Positions whose states are read, as in `analysis.steering_vectors`.
        steps: Steps of the trajectories, negative ones from the end, which are read together; by default all. The
            course over the steps is one call for each.
        rows: "position", where each selected position is a row of the regression, or "canvas", where a row is the mean
            over the selected positions of a canvas.
        samples: Number of times that each text is masked; their times cover (0, 1) evenly.
        ridge: Penalties, split and seed.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the sums, three d x d matrices in float64 for each hook point, or of classes for the
            rows in float32, and for the regression or a forward pass beside them. Beside sums the held-out rows are
            kept if they fit, for `interval`. The samples of a text are read in as many passes as this requires, the
            rows of a trajectory together, as they were denoised.

    Raises:
        KeyError: There is no such hook point.
        ImportError: Labels are classes, and scikit-learn is not installed.
        TypeError: Labels of several kinds.
        ValueError: Texts for a model of next tokens, or with [MASK] in them, fewer than three units, labels for another
            number of units or positions, labels at given positions, which are never masked, or of positions for
            `rows="canvas"`, one class only, a part of the split without a row or without a row of some class,
            validation rows of one number only, states that are not finite, a budget that is too small, or texts inside
            `model.at_time`.
    """
    one_of("position", "canvas")("rows", rows)
    chosen, settings = check_positions(positions), ridge or RidgeSettings()
    blocks = range(model.cfg.n_layers)
    names = readable_points(model, [resid_pre(0), *map(resid_post, blocks)] if names_filter is None else names_filter)
    given, n_samples = texts_or_runs(model, inputs, attention_mask), at_least(1, "samples", samples)
    picked = _pick_steps(given, steps, model)

    # 1. Assign each unit to a part, and read its labels.
    n_units = len(given.tokens) if isinstance(given, CleanTexts) else sum(map(len, given.trajectories))
    parts = settings.split(n_units)
    real = model.padding.checked(inputs, attention_mask)[1] if isinstance(inputs, Tensor) else None
    label = Labels.of(labels, given, chosen, real)
    if label.by_position and rows == "canvas":
        raise ValueError(
            "a row of rows='canvas' is a whole canvas, and the labels are those of positions: give one label for each "
            "text or run, or rows='position'"
        )
    draw = partial(_passes, model, given, picked, n_samples, settings.seed)
    rows_of = partial(_rows_of, chosen=chosen, rows=rows, parts=parts, moves=label.by_position)
    widths = {name: torch.Size(activation_shape(name, model.cfg, 1, 1)[2:]) for name in names}

    # 2. Count the rows. Numbers need their sums, and for intervals the held-out rows; classes need all rows.
    if label.classes is not None:
        require_sklearn()
    passes = list(draw(n_samples))
    targets = _targets(label, passes, parts, settings.seed)
    counts: Counter[tuple[int, int]] = Counter()  # by part and class; a number is of class 0
    for one in passes:
        for each in rows_of(one, targets(one)):
            classes = each.labels[:, 0].long() if label.classes else torch.zeros_like(each.parts)
            pairs, n = torch.stack([each.parts, classes]).unique(dim=1, return_counts=True)
            counts.update(dict(zip(map(tuple, pairs.T.tolist()), n.tolist(), strict=True)))
    n_rows = {part: sum(n for (i, _), n in counts.items() if i == index) for index, part in enumerate(PARTS)}
    _require_rows(n_rows, model, positions)
    if label.classes and (in_all := _classes_of_all_parts(label, counts)):
        label = label.only(in_all)
        n_rows = {part: sum(counts[index, each] for each in in_all) for index, part in enumerate(PARTS)}

    # 3. Plan the memory. Without a place for the held-out rows of numbers, there is no interval.
    plan = _plan(model, given, n_samples, widths, n_rows, label.classes)
    n_kept = n_rows
    if label.classes is None:
        n_kept = {**dict.fromkeys(PARTS, 0), "held_out": n_rows["held_out"]}
        with_rows = replace(plan, kept=plan.kept + _bytes_of_rows(n_kept, widths))
        interval_bytes = with_rows.needed
        plan, n_kept = (with_rows, n_kept) if interval_bytes <= max_bytes else (plan, dict.fromkeys(PARTS, 0))
    n_at_once = plan.samples_at_once(n_samples, max_bytes)

    # 4. Read the states, and fit.
    passes = passes if n_at_once >= n_samples else list(draw(n_at_once))
    targets = _targets(label, passes, parts, settings.seed)
    kept = KeptRows(widths, n_kept)
    sums = None if label.classes else Sums(names, model.cfg.n_ctx, kept)
    for one in passes:
        _read(one, list(rows_of(one, targets(one))), names, sums or kept)
    found = _fitted_rows(kept, label, settings, rows) if sums is None else _fitted_sums(sums, settings, rows)

    # 5. Join what was fitted and tested.
    record = {
        "names": names,
        "label": label.name,
        "classes": label.classes,
        "by_position": label.by_position,
        "positions": chosen,
        "steps": picked,
        "rows": rows,
        "samples": n_samples if isinstance(given, CleanTexts) else None,
        "penalties": list(settings.penalties),
        **{name: getattr(settings, name) for name in ("validation", "held_out", "seed")},
        "units": {part: parts.count(part) for part in PARTS},
        "n_rows": n_rows,
        "interval_bytes": None if label.classes else interval_bytes,
        "inputs": given.describe(),
        **provenance(model, model.cfg),
    }
    return LinearProbe(**found, record=record)


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass with the times of the rows of each canvas that it serves, and the unit (text or run) of each row."""

    shared: SharedPass
    times: Float[Tensor, "canvas batch"]
    units: tuple[int, ...]


def _pick_steps(
    given: CleanTexts | Inputs, steps: Whole | Iterable[Whole] | None, model: DiffusionTransformer
) -> list[int] | None:
    """The steps to read; `None` for texts, which have none."""
    if isinstance(given, Inputs):
        return given.pick_steps(steps)
    model.time.require_own("a linear probe of texts")
    if steps is not None:
        raise ValueError("steps= requires trajectories of model.denoise(...): texts are masked at times of their own")
    if model.cfg.is_autoregressive:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so texts cannot be masked for it: give trajectories of "
            "model.denoise(...)"
        )
    return None


def _passes(
    model: DiffusionTransformer,
    given: CleanTexts | Inputs,
    steps: list[int] | None,
    samples: int,
    seed: int,
    n_at_once: int,
) -> Iterator[_Pass]:
    """The passes over the canvases of the runs, or over every text under its random masks."""
    if isinstance(given, Inputs):
        first = [0, *accumulate(len(run) for run in given.trajectories)]
        for one in passes_of(given, steps):
            times = [canvas.step.t for canvas in one.served.values() if canvas.step is not None]
            units = range(first[one.run], first[one.run + 1])
            yield _Pass(one, torch.tensor(times)[:, None].repeat(1, len(units)), tuple(units))
        return
    noise = torch.Generator().manual_seed(seed)
    for unit, row in enumerate(given.tokens):
        # The times of one text are spread evenly, like those of a batch in training, and every position may be masked.
        noisy, p_mask = noised(model, row.repeat(samples, 1), generator=noise)
        for tokens, times in zip(noisy.split(n_at_once), p_mask[:, 0].clone().split(n_at_once), strict=True):
            tokens = tokens.to(model.cfg.device)
            real = torch.ones_like(tokens, dtype=torch.bool)
            read = ForwardPass.under_noise(model, row.to(tokens.device).expand_as(tokens), tokens, real, times)
            yield _Pass(SharedPass(read, {0: read}), times[None], (unit,) * len(tokens))


Targets = Float[Tensor, "canvas batch #pos 2"]  # a label and that of the control task; NaN where there is none


def _targets(label: Labels, passes: list[_Pass], parts: Sequence[str], seed: int) -> Callable[[_Pass], Targets]:
    """The labels of the canvases of a pass."""
    if label.name == "time":
        flat = torch.cat([one.times.flatten() for one in passes])
        of_entries = [parts[unit] for one in passes for _ in one.times for unit in one.units]
        new = permuted(flat, of_entries, seed).split([one.times.numel() for one in passes])
        pairs = {
            id(one): torch.stack([one.times, own.view_as(one.times)], dim=-1)[:, :, None]
            for one, own in zip(passes, new, strict=True)
        }
        return lambda one: pairs[id(one)]
    control = label.control(parts, seed)
    of_units = [torch.stack(pair, dim=-1) for pair in zip(label.of_units, control, strict=True)]

    def of_pass(one: _Pass) -> Targets:
        own = [of_units[unit] for unit in one.units]
        of_rows = own[0].expand(len(own), -1, -1) if len(set(one.units)) == 1 else torch.stack(own)
        return of_rows.expand(len(one.times), -1, -1, -1)

    return of_pass


def _rows_of(
    one: _Pass, targets: Targets, chosen: str | list[int], rows: str, parts: Sequence[str], moves: bool
) -> Iterator[Rows]:
    """The rows of each canvas of a pass.

    Args:
        moves: Whether the label of a row that predicts another position is the label of that position.
    """
    units = torch.tensor(one.units)
    part_of = torch.tensor([PARTS.index(parts[unit]) for unit in one.units])
    for canvas, labels in zip(one.shared.served.values(), targets, strict=True):
        labels = labels.expand(-1, canvas.tokens.shape[1], -1)
        if moves and chosen == "predicting":
            labels = _of_predicted(canvas, labels)
        inside = one.shared.on_read(select(canvas, chosen)).cpu()
        inside = inside & ~labels[:, : inside.shape[1], 0].isnan()
        if rows == "position":
            batch, pos = inside.nonzero(as_tuple=True)
        else:
            batch = inside.any(dim=1).nonzero()[:, 0]
            pos = inside.int().argmax(dim=1)[batch]
        means = inside if rows == "canvas" else None
        yield Rows(batch, pos, labels[batch, pos], part_of[batch], units[batch], means)


def _of_predicted(canvas: ForwardPass, labels: Float[Tensor, "batch pos 2"]) -> Float[Tensor, "batch pos 2"]:
    """The labels of the positions that the rows of a canvas predict, at these rows."""
    moved = torch.full_like(labels, torch.nan)
    if canvas.model.cfg.is_autoregressive:
        moved[:, :-1] = labels[:, 1:]
        return moved
    masked, block = canvas.masked, None if canvas.step is None else canvas.step.block
    batch, at = canvas.model.readout.locate(masked, canvas.real, block)
    batch, at, pos, of_masked = batch.cpu(), at.cpu(), masked.nonzero()[:, 1].cpu(), labels[masked.cpu()]
    # A first token without a row before it is read in its own, which also predicts the next and has its label.
    for chosen in (at == pos, at != pos):
        moved[batch[chosen], at[chosen]] = of_masked[chosen]
    return moved


def _read(one: _Pass, of_canvases: list[Rows], names: list[str], read_rows: Sums | KeptRows) -> None:
    """Run a pass, whose rows are added to the sums or the kept rows."""
    begun = [(each, read_rows.place(each)) for each in of_canvases if len(each.batch)]

    def read(activation: Tensor, hook: Any) -> None:
        for each, places in begun:
            read_rows.add(hook.name, each, places, each.states(activation))

    if begun:
        one.shared.read.run([(name, read) for name in names])


def _require_rows(n_rows: dict[str, int], model: DiffusionTransformer, positions: Positions) -> None:
    """Raise a `ValueError` if a part has no row."""
    if empty := [part for part, n in n_rows.items() if not n]:
        if len(empty) == len(PARTS):
            raise nothing_selected(model, positions, "inputs, or none that has a label")
        raise ValueError(
            f"positions={positions!r} selects no position in the {' and '.join(empty)} part of the split: give more "
            "texts or runs, or other positions"
        )


def _classes_of_all_parts(label: Labels, counts: Counter[tuple[int, int]]) -> list[int]:
    """Indices of the tokens that every part has; a `ValueError` if a part lacks a class that the caller gave."""
    assert label.classes is not None
    of_parts = [{own for index, own in counts if index == part} for part in range(len(PARTS))]
    kept = sorted(set.intersection(*of_parts))
    if label.name == "token" and len(kept) > 1:
        return kept
    for part, own in zip(PARTS, of_parts, strict=True):
        if missing := [label.classes[index] for index in range(len(label.classes)) if index not in own]:
            shown = ", ".join(map(repr, missing[:3])) + (" and others" if len(missing) > 3 else "")
            raise ValueError(
                f"the {part} part of the split has no row of {len(missing)} of the {len(label.classes)} classes: "
                f"{shown}. Give more texts or runs, another seed, ridge=RidgeSettings(seed=...), or None as the label "
                "of rare classes, which leaves them out"
            )
    return []


def _fitted_sums(sums: Sums, settings: RidgeSettings, rows: str) -> dict[str, Any]:
    """The fields of a probe of numbers."""
    for name, of_parts in sums.moments.items():
        require_finite(name, torch.stack([each.x.sum() for each in of_parts.values()]))
    kept, fitted = sums.kept, {name: fit_numbers(own, settings.penalties) for name, own in sums.moments.items()}
    widths = kept.widths
    of_units = kept.squares({name: fits for name, (fits, *_) in fitted.items()}) if sum(kept.sizes) else {}
    return {
        **of_units,
        "weights": {name: w[:, 0].reshape(widths[name]).float() for name, ((w, _), *_) in fitted.items()},
        "bias": torch.stack([bias[0] for (_, bias), *_ in fitted.values()]).float(),
        "score": torch.stack([r2[0] for _, _, r2, _ in fitted.values()]).float(),
        "score_fitted": torch.stack([r2[0] for *_, r2 in fitted.values()]).float(),
        "score_control": torch.stack([r2[1] for _, _, r2, _ in fitted.values()]).float(),
        "penalty": torch.tensor([penalty for _, penalty, *_ in fitted.values()], dtype=torch.float64),
        "score_position": sums.position_r2() if rows == "position" else float("nan"),
    }


def _fitted_rows(kept: KeptRows, label: Labels, settings: RidgeSettings, rows: str) -> dict[str, Any]:
    """The fields of a probe of classes."""
    assert label.classes is not None
    n_fitted, n_classes = kept.sizes[0] + kept.sizes[1], len(label.classes)
    units, unit = kept.units[n_fitted:].unique(return_inverse=True)
    weights, biases = {}, []
    of_label: list[ClassFit] = []
    of_control: list[ClassFit] = []
    for name, shape in kept.widths.items():
        x, mean, scale = kept.normalised(name)
        for fits, y in zip((of_label, of_control), kept.labels.long().T.contiguous(), strict=True):
            fits.append(fit_classes(x, y, kept.sizes, n_classes, settings.penalties))
        w = of_label[-1].weights / scale
        weights[name] = w.reshape(n_classes, *shape)
        biases.append(of_label[-1].bias - w @ mean)
    n_tested = unit.bincount(minlength=len(units))
    # Of one label, the control task has nothing to learn.
    of_one = len(kept.labels[:, 1].unique()) == 1
    right, right_control = (
        torch.stack([unit[each.right].bincount(minlength=len(units)) for each in fits])
        for fits in (of_label, of_control)
    )
    return {
        "weights": weights,
        "bias": torch.stack(biases),
        "score": right.sum(dim=1) / n_tested.sum(),
        "score_fitted": torch.tensor([each.accuracy_fitted for each in of_label]),
        "score_control": right_control.sum(dim=1) / (torch.nan if of_one else n_tested.sum()),
        "penalty": torch.tensor([each.penalty for each in of_label], dtype=torch.float64),
        "score_position": kept.position_accuracy() if rows == "position" else float("nan"),
        "n_tested": n_tested,
        "right": right,
        "right_control": right_control,
    }


@dataclass(frozen=True)
class _Plan:
    """The bytes of a call: what is kept, what a regression takes beside it, and what a pass does."""

    what: str  # which is kept, in words
    kept: int
    regression: int
    reading: int
    one_sample: int

    @property
    def needed(self) -> int:
        """The bytes of a call that reads one sample of a text in a pass."""
        return self.kept + max(self.regression, self.reading + self.one_sample)

    def samples_at_once(self, samples: int, max_bytes: int) -> int:
        """Number of samples of a text in one pass, so that a call takes at most `max_bytes`."""
        if self.needed > max_bytes:
            fewer = "" if self.what.startswith("sums") else "fewer texts, runs, positions or steps, "
            raise ValueError(
                f"the {self.what} take {self.needed:,} bytes with what is computed from them and one sample of a text, "
                f"but max_bytes is {max_bytes:,}: give {fewer}fewer hook points in one call (names_filter), or a "
                "larger max_bytes"
            )
        return max(1, min(samples, (max_bytes - self.kept - self.reading) // max(1, self.one_sample)))


def _plan(
    model: DiffusionTransformer,
    given: CleanTexts | Inputs,
    samples: int,
    widths: dict[str, torch.Size],
    n_rows: dict[str, int],
    classes: list[Any] | None,
) -> _Plan:
    """The plan of a probe of numbers, which keeps sums alone, or of classes, which keeps the rows."""
    texts = given.tokens if isinstance(given, CleanTexts) else []
    n_pos, widest = max(map(len, texts), default=0), max(width.numel() for width in widths.values())
    # Tokens and flags of all samples are kept, because times are permuted before anything is read.
    tokens = _TOKEN_BYTES * samples * sum(map(len, texts))
    n_read = n_pos if model.cfg.causal_block is None else 2 * n_pos
    states = n_pos * widest * (8 + model.cfg.dtype.itemsize)
    one_sample = reserved(model.cfg, row_bytes(model.cfg, n_read, 0) + states)
    if classes is not None:
        regression = 8 * CLASS_COPIES * sum(n_rows.values()) * len(classes)
        kept = tokens + _bytes_of_rows(n_rows, widths)
        return _Plan(f"rows of {len(widths)} hook points", kept, regression, 0, one_sample)
    matrix, matrices = 8 * widest**2, sum(8 * width.numel() ** 2 for width in widths.values())
    kept = tokens + len(PARTS) * matrices
    return _Plan(f"sums of {len(widths)} hook points", kept, REGRESSION_MATRICES * matrix, 2 * matrix, one_sample)


def _bytes_of_rows(n_rows: dict[str, int], widths: dict[str, torch.Size]) -> int:
    return sum(n_rows.values()) * (4 * sum(width.numel() for width in widths.values()) + ROW_BYTES)
