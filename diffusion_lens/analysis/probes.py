"""Linear probes: can the denoising time, or a number of your own, be read from the states, at each layer?

The probe is a ridge regression of a label on the state at a hook point. It is fitted on some texts or runs, and R² is
computed on others, so that no canvas contributes to both. With centred X and y, the weights are

    w = (XᵀX + λ I)⁻¹ Xᵀy,

from sums over rows in float64: neither rows nor predictions are kept. The penalty λ is relative: a `penalty` times the
mean variance of a feature times the number of rows, so that one grid suits every hook point.

`probe_time` reads the denoising time t. Masked diffusion models are not conditioned on the time, and yet their states
encode it (Rulli et al. 2026, arXiv 2607.01774, who probe the residual stream of LLaDA and Dream). t is `hook.step.t` on
the canvases of trajectories, and the probability with which tokens were masked, or replaced under uniform noise, in
texts that are noised at random. A time-conditioned network gets that of each canvas. `probe` reads any label of the
texts or runs on the same canvases.

Two predictors set the scale. The first is the probe itself with the labels permuted (R² of about 0 or below). The
second knows the position only: the mean label where this position was selected. Where the position determines the
time, as in the states of an AR baseline that predict the next token, its R² is high although no state is read.

The canvas alone reveals t, because the number of [MASK]s does. Averaged over all positions, the embedding before the
first layer is a linear function of the share of [MASK], so `rows="canvas"` with `positions="all"` gives a high R² at
every layer and shows nothing about the model. One state of a masked position says more: before the first layer it is
the same vector at every step, and what it contains about t at a later layer was brought there by attention.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
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
from diffusion_lens.analysis.steering_vectors import Positions, check_positions, nothing_selected, select, short_name
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hooks.names import Hook, NamesFilter, nearest, resid_post, resid_pre
from diffusion_lens.model.loss import noised
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.settings import (
    Settings,
    Whole,
    at_least,
    checked_arguments,
    one_of,
    plain_number,
    positive,
    setting,
    whole_number,
)
from diffusion_lens.settings.arguments import check_type

PARTS = ("train", "validation", "held_out")
_CONSTANT = 1e-9  # Variance below this share of the mean square counts as none: it is rounding.
_REGRESSION_MATRICES = 8  # d x d matrices in float64 that `_fit` computes from the sums.
LinearFits = tuple[Tensor, Tensor]  # weights Float[d axis] and bias Float[axis] of a linear function for each target


def _penalties(name: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(positive("a penalty", penalty) for penalty in check_type(Iterable[float], name, value))
    if not numbers:
        raise ValueError(f"{name}={value}; give at least one, all above 0")
    return numbers


@dataclass(frozen=True)
class RidgeSettings(Settings):
    """How a probe is fitted and tested."""

    penalties: tuple[float, ...] = setting(
        (1e-6, 1e-4, 1e-2, 1.0),
        "Relative penalties; the one with the highest R² on the validation units is used.",
        _penalties,
    )
    validation: float = setting(
        0.2, "Share of the units (texts, or rows of trajectories) on which the penalty is chosen.", plain_number
    )
    held_out: float = setting(0.2, "Share of the units on which the probe is tested.", plain_number)
    seed: int = setting(0, "Seed of the split, of the shuffled control and of the noise.", whole_number)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.validation > 0 and self.held_out > 0 and self.validation + self.held_out < 1):
            raise ValueError(
                f"validation={self.validation}, held_out={self.held_out}; both must be above 0, and their sum below 1"
            )

    def split(self, n_units: int) -> list[str]:
        """The part of each unit, "train", "validation" or "held_out", in random order; each part has at least one.

        Raises:
            ValueError: There are fewer than three units.
        """
        if n_units < 3:
            raise ValueError(
                f"there {'is' if n_units == 1 else 'are'} {n_units} text{'s' * (n_units != 1)} (or rows of "
                "trajectories); a probe needs at least 3: to fit, to choose the penalty and to test"
            )
        n_validation, n_held_out = (max(1, round(share * n_units)) for share in (self.validation, self.held_out))
        n_train = max(1, n_units - n_validation - n_held_out)
        n_validation = min(n_validation, n_units - n_train - 1)
        parts = ["train"] * n_train + ["validation"] * n_validation
        parts += ["held_out"] * (n_units - len(parts))
        order = torch.randperm(n_units, generator=torch.Generator().manual_seed(self.seed)).tolist()
        return [parts[i] for i in order]


@dataclass(frozen=True, eq=False)
class TimeProbe(PicturedResult, Saved):
    """Linear probes of one label, by default of the denoising time, one for each hook point.

    Columns of the data frame: point, r2, r2_fitted, r2_shuffled, penalty.

    Attributes:
        weights: The weights by hook point, with the axes of the hook point after its positions, such as d_model.
        bias: Float[point].
        r2: Float[point], R² on the held-out texts or runs; NaN if they all have the same label.
        r2_fitted: Float[point], R² on the rows that the probe was fitted to.
        r2_shuffled: Float[point], R² on the held-out part of a probe of permuted labels.
        penalty: Float[point], relative penalty of each probe.
        r2_position: R² on the held-out part of the mean label of each position; NaN for `rows="canvas"`.
        record: Hook points, label, positions, kind of rows, split, penalties, seed, units and rows in each part,
            inputs, model, hash of the weights, hooks, versions.
    """

    KIND: ClassVar[str] = "time probe"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"rows": str}

    weights: dict[str, Tensor]
    bias: Float[Tensor, "point"]
    r2: Float[Tensor, "point"]
    r2_fitted: Float[Tensor, "point"]
    r2_shuffled: Float[Tensor, "point"]
    penalty: Float[Tensor, "point"]
    r2_position: float
    record: dict[str, Any]

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("point", self.names),)

    def _check(self) -> None:
        if not self.weights:
            raise ValueError("there is no hook point")

    @property
    def names(self) -> tuple[str, ...]:
        """The hook points."""
        return tuple(self.weights)

    def predict(self, name: str, activations: Tensor) -> Float[Tensor, "*rest"]:
        """The label that the probe of a hook point reads from activations [... d_model], one for each state."""
        if name not in self.weights:
            raise KeyError(f"there is no probe of {name!r}; nearest are: {nearest(name, self.names)}")
        weights = self.weights[name].to(activations.device)
        if activations.shape[-weights.dim() :] != weights.shape:
            raise ValueError(
                f"the activations are {list(activations.shape)}; the probe of {name!r} reads [... {weights.shape[-1]}]"
            )
        states = activations.float().flatten(activations.dim() - weights.dim())
        labels: Tensor = states @ weights.flatten() + self.bias[self.names.index(name)].to(activations.device)
        return labels

    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """R² by hook point with both controls; returns the matplotlib axes."""
        label = self.record.get("label", "time")
        lines = {"probe": self.r2, f"{label}s permuted": self.r2_shuffled}
        if self.record["rows"] == "position":
            lines["position only"] = torch.full_like(self.r2, self.r2_position)
        labels = [short_name(name) for name in self.names]
        title = title or f"Linear probe of the {'denoising time' if label == 'time' else label}"
        values = torch.stack(list(lines.values()))
        return plots.labelled_lines(values, list(lines), labels, "hook point", "R² on held-out runs", title, ax)

    def _table(self) -> Table:
        values = {name: getattr(self, name) for name in ("r2", "r2_fitted", "r2_shuffled", "penalty")}
        return Table({"point": self.names, **values})

    def __repr__(self) -> str:
        best = int(self.r2.nan_to_num(nan=-torch.inf).argmax())
        return f"TimeProbe({len(self.names)} hook points, best R² {float(self.r2[best]):.3f} at {self.names[best]!r})"


@checked_arguments
def probe_time(
    model: DiffusionTransformer, inputs: TextsOrRuns, names_filter: NamesFilter = None, **settings: Any
) -> TimeProbe:
    """Fit a linear probe of the denoising time at each hook point, and test it on held-out texts or runs.

    Args:
        model, inputs, names_filter: Those of `probe`.
        settings: Other arguments of `probe`, which has the errors too.
    """
    return probe(model, inputs, None, names_filter, **settings)


@begins_run
@torch.no_grad()
@checked_arguments
def probe(
    model: DiffusionTransformer,
    inputs: TextsOrRuns,
    labels: Sequence[float] | None,
    names_filter: NamesFilter = None,
    *,
    positions: Positions = "masked",
    rows: str = "position",
    samples: Whole = 8,
    ridge: RidgeSettings | None = None,
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**31,
) -> TimeProbe:
    """Fit a linear probe of a label at each hook point, and test it on held-out texts or runs.

    Args:
        model: Model that reads the states; the caller's hooks act.
        inputs: Trajectories (each of their rows is a unit), or on a diffusion model, texts, facts or tokens, which are
            masked at random, or replaced under uniform noise (each is a unit). If units share most of their words, the
            test is easier.
        labels: A number for each unit, such as 1 for a true fact and 0 for a false one; `None` probes the time.
        names_filter: Hook points; by default the residual stream before the first block and after every block.
        positions: Positions whose states are read, as in `analysis.steering_vectors`.
        rows: "position", where each selected position is a row of the regression, or "canvas", where a row is the mean
            over the selected positions of a canvas.
        samples: Number of times that each text is masked; their times cover (0, 1) evenly.
        ridge: Penalties, split and seed.
        attention_mask: [batch pos], 1 at real tokens, 0 at the padding of tokens.
        max_bytes: Most memory for the sums, three d x d matrices in float64 for each hook point, and for the regression
            or a forward pass beside them. The samples of a text are read in as many passes as this requires, the rows
            of a trajectory together, as they were denoised.

    Raises:
        KeyError: There is no such hook point.
        ValueError: Texts for a model of next tokens, or with [MASK] in them, fewer than three units, labels for another
            number of units, a part of the split without a row, validation rows of one label only, a budget that is too
            small, or texts inside `model.at_time`.
    """
    one_of("position", "canvas")("rows", rows)
    chosen, settings = check_positions(positions), ridge or RidgeSettings()
    blocks = range(model.cfg.n_layers)
    names = readable_points(model, [resid_pre(0), *map(resid_post, blocks)] if names_filter is None else names_filter)
    given, n_samples = texts_or_runs(model, inputs, attention_mask), at_least(1, "samples", samples)
    if isinstance(given, CleanTexts):
        model.time.require_own("a linear probe of texts")
    n_at_once = _samples_at_once(model, names, given, n_samples, max_bytes)
    passes = list(_passes(model, given, n_samples, n_at_once, settings.seed))

    # 1. Assign each unit to a part, and permute the labels within each part for the control.
    units = sorted({unit for one in passes for unit in one.units})
    part_of = dict(zip(units, settings.split(len(units)), strict=True))
    if labels is None:
        own = [one.times for one in passes]
        parts = [part_of[unit] for one in passes for _ in one.times for unit in one.units]
        permuted_times = _permuted(torch.cat([times.flatten() for times in own]), parts, settings.seed)
        split = permuted_times.split([times.numel() for times in own])
        shuffled = [each.view_as(times) for each, times in zip(split, own, strict=True)]
    elif len(labels) != len(units):
        raise ValueError(f"{len(labels)} labels for {len(units)} texts or rows of trajectories; give each its own")
    else:
        of_units = torch.tensor(list(map(float, labels)))
        both = (of_units, _permuted(of_units, list(part_of.values()), settings.seed))
        own, shuffled = (_of_units(passes, dict(zip(units, each.tolist(), strict=True))) for each in both)

    # 2. Read the states, and add them to the sums of their part.
    sums = _ProbeSums(names, rows, model.cfg.n_ctx)
    for one, true, permuted in zip(passes, own, shuffled, strict=True):
        canvases, parts = one.shared.served.values(), [part_of[unit] for unit in one.units]
        selected = [one.shared.on_read(select(canvas, chosen)) for canvas in canvases]
        targets = torch.stack([true, permuted], dim=2)
        one.shared.read.run(sums.hooks(selected, parts, targets))
        for of_canvas, values in zip(selected, true, strict=True):
            sums.count(of_canvas, parts, values)
    first = sums.moments[names[0]]
    if empty := [part for part in PARTS if part not in first]:
        if len(empty) == len(PARTS):
            raise nothing_selected(model, positions, "inputs")
        raise ValueError(
            f"positions={positions!r} selects no position in the {' and '.join(empty)} part of the split: give more "
            "texts or runs, or other positions"
        )

    # 3. Choose each penalty on the validation part, fit on training and validation together, and test.
    fitted = {name: _fit(sums.moments[name], settings.penalties) for name in names}
    record = {
        "names": names,
        "label": "time" if labels is None else "label",
        "positions": chosen,
        "rows": rows,
        "samples": n_samples if isinstance(given, CleanTexts) else None,
        "penalties": list(settings.penalties),
        **{name: getattr(settings, name) for name in ("validation", "held_out", "seed")},
        "units": {part: list(part_of.values()).count(part) for part in PARTS},
        "n_rows": {part: first[part].n for part in PARTS},
        "inputs": given.describe(),
        **provenance(model, model.cfg),
    }
    return TimeProbe(
        weights={name: w[:, 0].reshape(sums.shapes[name]).float() for name, ((w, _), *_) in fitted.items()},
        bias=torch.stack([bias[0] for (_, bias), *_ in fitted.values()]).float(),
        r2=torch.stack([r2[0] for _, _, r2, _ in fitted.values()]).float(),
        r2_fitted=torch.stack([r2[0] for *_, r2 in fitted.values()]).float(),
        r2_shuffled=torch.stack([r2[1] for _, _, r2, _ in fitted.values()]).float(),
        penalty=torch.tensor([penalty for _, penalty, *_ in fitted.values()], dtype=torch.float64),
        r2_position=sums.position_r2() if rows == "position" else float("nan"),
        record=record,
    )


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass with the times of the rows of each canvas that it serves, and the unit (text or run) of each row."""

    shared: SharedPass
    times: Float[Tensor, "canvas batch"]
    units: tuple[int, ...]


def _passes(
    model: DiffusionTransformer, given: CleanTexts | Inputs, samples: int, n_at_once: int, seed: int
) -> Iterator[_Pass]:
    """The passes over every canvas of the runs, or over every text under its random masks."""
    if isinstance(given, Inputs):
        first = [0, *accumulate(len(run) for run in given.trajectories)]
        for one in passes_of(given, given.pick_steps(None)):
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


def _of_units(passes: list[_Pass], values: Mapping[int, float]) -> list[Float[Tensor, "canvas batch"]]:
    """A value of each unit, for the rows of all canvases."""
    return [torch.tensor([float(values[unit]) for unit in one.units]).expand_as(one.times) for one in passes]


def _permuted(labels: Float[Tensor, "entry"], parts: Sequence[str], seed: int) -> Float[Tensor, "entry"]:
    """The labels, permuted among all of the same part."""
    permuted, noise = labels.clone(), torch.Generator().manual_seed(seed)
    for part in PARTS:
        rows = torch.tensor([i for i, own in enumerate(parts) if own == part], dtype=torch.long)
        permuted[rows] = labels[rows[torch.randperm(len(rows), generator=noise)]]
    return permuted


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over rows of features x and one or more targets y: of x, x xᵀ, y, y² and x yᵀ."""

    n: int
    x: Float[Tensor, "d"]
    xx: Float[Tensor, "d d"]
    y: Float[Tensor, "axis"]
    yy: Float[Tensor, "axis"]
    xy: Float[Tensor, "d axis"]

    @classmethod
    def of(cls, x: Float[Tensor, "entry d"], y: Float[Tensor, "entry axis"]) -> "Moments":
        """The sums over some rows."""
        x, y = x.double(), y.double()
        return cls(len(x), x.sum(0), x.mT @ x, y.sum(0), (y * y).sum(0), x.mT @ y)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def fit(self, penalties: tuple[float, ...]) -> list[LinearFits]:
        """The regressions of every target, one for each penalty."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        covariance = self.xx - self.n * torch.outer(mean_x, mean_x)
        target = self.xy - self.n * torch.outer(mean_x, mean_y)
        scale = float(covariance.trace()) / len(mean_x)
        if scale * len(mean_x) <= _CONSTANT * float(self.xx.trace()):
            weights = [torch.zeros_like(target)] * len(penalties)
        else:
            values, vectors = torch.linalg.eigh(covariance)
            projected = vectors.mT @ target
            # Without `clamp`, rounding would give a few eigenvalues of a singular matrix below zero.
            weights = [vectors @ (projected / (values.clamp(min=0) + p * scale)[:, None]) for p in penalties]
        return [(w, mean_y - mean_x @ w) for w in weights]

    def r2(self, fits: LinearFits) -> Float[Tensor, "axis"]:
        """R² on these rows, 1 - Σ (y - ŷ)² / Σ (y - ȳ)²; NaN if their targets are all equal."""
        w, b = fits
        squared = (w * (self.xx @ w)).sum(0) + 2 * b * (self.x @ w) + self.n * b * b
        residual = self.yy - 2 * ((w * self.xy).sum(0) + b * self.y) + squared
        spread = self.yy - self.y * self.y / max(1, self.n)
        share = 1 - residual / spread
        return share.masked_fill(spread <= _CONSTANT * self.yy.clamp(min=1e-12), torch.nan)


class _ProbeSums:
    """Sums by hook point and part, and those of the predictor that knows the position only."""

    def __init__(self, names: list[str], rows: str, n_ctx: int) -> None:
        self.names, self.rows = names, rows
        self.moments: dict[str, dict[str, Moments]] = {name: {} for name in names}
        self.shapes: dict[str, torch.Size] = {}
        # By part: number of rows, sum of labels, and sum of their squares, at each position.
        self._positions = {part: torch.zeros(3, n_ctx, dtype=torch.float64) for part in PARTS}

    def hooks(
        self, selected: Sequence[PosMask], parts: list[str], targets: Float[Tensor, "canvas batch axis"]
    ) -> list[tuple[str, Hook]]:
        """Hooks of a pass that add the rows of each of its canvases."""

        def add(activation: Tensor, hook: Any) -> None:
            self.shapes[hook.name] = activation.shape[2:]
            for inside, labels in zip(selected, targets, strict=True):
                for part in set(parts):
                    own = torch.tensor([each == part for each in parts], device=inside.device)
                    x, y = self._rows(activation.flatten(2), inside & own[:, None], labels)
                    if len(x):
                        moments, before = Moments.of(x, y), self.moments[hook.name].get(part)
                        self.moments[hook.name][part] = moments if before is None else before + moments

        return [(name, add) for name in self.names]

    def _rows(
        self, states: Float[Tensor, "batch pos d"], inside: PosMask, labels: Float[Tensor, "batch axis"]
    ) -> tuple[Float[Tensor, "entry d"], Float[Tensor, "entry axis"]]:
        # Apple's GPUs have no float64.
        device = torch.device("cpu") if states.device.type == "mps" else states.device
        inside, labels = inside.to(states.device), labels.to(device)
        if self.rows == "position":
            return states[inside].to(device).double(), labels[inside.nonzero()[:, 0].to(device)].double()
        some = inside.any(dim=1).nonzero()[:, 0].tolist()
        means = [states[row, inside[row]].to(device).double().mean(dim=0) for row in some]
        return torch.stack(means) if some else states.new_empty(0, states.shape[2]), labels[some].double()

    def count(self, selected: PosMask, parts: list[str], labels: Float[Tensor, "batch"]) -> None:
        """Add the selected positions of a pass with their labels."""
        inside, n_pos = selected.cpu().double(), selected.shape[1]
        powers = torch.stack([torch.ones_like(labels), labels, labels * labels]).double()
        for part in set(parts):
            rows = torch.tensor([own == part for own in parts])
            self._positions[part][:, :n_pos] += powers[:, rows] @ inside[rows]

    def position_r2(self) -> float:
        """R² on the held-out part of the mean label of each position, or of all positions where it was never seen."""
        n, total, _ = self._positions["train"] + self._positions["validation"]
        mean = torch.where(n > 0, total / n, total.sum() / n.sum())
        count, y, yy = self._positions["held_out"]
        residual = (yy - 2 * mean * y + count * mean * mean).sum()
        spread = yy.sum() - y.sum() ** 2 / count.sum()
        return float(1 - residual / spread) if spread > 0 else float("nan")


def _fit(
    moments: dict[str, Moments], penalties: tuple[float, ...]
) -> tuple[LinearFits, float, Float[Tensor, "axis"], Float[Tensor, "axis"]]:
    """The regressions with their best penalty, that penalty, and R² on the held-out and on the fitted rows.

    Column 0 is the label, column 1 the permuted one. Each has its own penalty; that of the label is returned.
    """
    train, validation, held_out = (moments[part] for part in PARTS)
    on_validation = torch.stack([validation.r2(fits) for fits in train.fit(penalties)])
    if bool(on_validation.isnan().any()):
        raise ValueError(
            f"the penalty cannot be chosen: R² on the validation part is not defined, because its {validation.n} rows "
            "all have the same time or label. Give more texts with samples= of at least 2, more steps or runs, or a "
            "larger share, ridge=RidgeSettings(validation=...)"
        )
    best = on_validation.argmax(dim=0).tolist()
    together = train + validation
    fits = together.fit(penalties)
    weights = torch.stack([fits[index][0][:, column] for column, index in enumerate(best)], dim=1)
    bias = torch.stack([fits[index][1][column] for column, index in enumerate(best)])
    r2_held_out, r2_fitted = (rows.r2((weights, bias)).cpu() for rows in (held_out, together))
    return (weights.cpu(), bias.cpu()), penalties[best[0]], r2_held_out, r2_fitted


def _samples_at_once(
    model: DiffusionTransformer, names: list[str], given: CleanTexts | Inputs, samples: int, max_bytes: int
) -> int:
    """Number of samples of a text in one pass, so that a call takes at most `max_bytes`."""
    texts = given.tokens if isinstance(given, CleanTexts) else []
    if texts and model.cfg.is_autoregressive:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so texts cannot be masked for it: give trajectories of "
            "model.denoise(...)"
        )
    widths = [torch.Size(activation_shape(name, model.cfg, 1, 1)).numel() for name in names]
    matrix, n_pos = 8 * max(widths) ** 2, max(map(len, texts), default=0)
    # Tokens and flags of all samples are kept, because times are permuted before anything is read.
    kept = sum(len(PARTS) * 8 * width * width for width in widths) + 16 * samples * sum(map(len, texts))
    n_read = n_pos if model.cfg.causal_block is None else 2 * n_pos
    states = n_pos * max(widths) * (8 + model.cfg.dtype.itemsize)
    one_sample = reserved(model.cfg, row_bytes(model.cfg, n_read, 0) + states)
    needed = kept + max(_REGRESSION_MATRICES * matrix, 2 * matrix + one_sample)
    if needed > max_bytes:
        raise ValueError(
            f"the sums of {len(names)} hook points take {needed:,} bytes with what is computed from them and one "
            f"sample of a text, but max_bytes is {max_bytes:,}: give fewer hook points in one call (names_filter), or "
            "a larger max_bytes"
        )
    return max(1, min(samples, (max_bytes - kept - 2 * matrix) // max(1, one_sample)))
