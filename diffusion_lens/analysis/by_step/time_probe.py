"""A linear probe of the denoising time: can t be read from the states, at each layer?

Masked diffusion models are not told the time, and yet their states encode it (Rulli et al. 2026, arXiv 2607.01774, who
probe the residual stream of LLaDA and Dream). The probe is a ridge regression of t on the state at a hook point. It is
fitted on some texts or runs, and R² is computed on others, so that no canvas contributes to both.

t is `hook.step.t` on the canvases of trajectories, and the probability with which tokens were masked in texts that are
masked at random.

Two predictors set the scale. The first is the probe itself with t permuted among the canvases (R² of about 0 or below).
The second knows the position only: the mean t at which this position was selected. Where the position determines the
time, as in the states of an AR baseline that predict the next token, its R² is high although no state is read.

The canvas alone reveals t, because the number of [MASK]s does. Averaged over all positions, the embedding before the
first layer is a linear function of the share of [MASK], so `rows="canvas"` with `positions="all"` gives a high R² at
every layer and shows nothing about the model. One state of a masked position says more: before the first layer it is
the same vector at every step, and what it contains about t at a later layer was brought there by attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.by_step.positions import Positions, check_positions, nothing_selected, select
from diffusion_lens.analysis.by_step.ridge import LinearFits, Moments, RidgeSettings
from diffusion_lens.analysis.by_step.time_probe_result import TimeProbe
from diffusion_lens.analysis.inputs import CleanTexts, ForwardPass, Inputs, TextsOrRuns, readable_points, texts_or_runs
from diffusion_lens.denoising.cache import activation_shape
from diffusion_lens.hook_names import Hook, NamesFilter, resid_post, resid_pre
from diffusion_lens.identity import begins_run
from diffusion_lens.losses import hide
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least
from diffusion_lens.shapes import PosMask

PARTS = ("train", "validation", "held_out")
ROWS = ("position", "canvas")


@begins_run
@torch.no_grad()
def probe_time(
    model: DiffusionTransformer,
    inputs: TextsOrRuns,
    names_filter: NamesFilter = None,
    *,
    positions: Positions = "masked",
    rows: str = "position",
    samples: Whole = 8,
    ridge: RidgeSettings | None = None,
    max_bytes: int = 2**31,
) -> TimeProbe:
    """Fit a linear probe of the denoising time at each hook point, and test it on held-out texts or runs.

    Args:
        model: Model that reads the states; the caller's hooks act.
        inputs: Trajectories (each of their rows is a unit), or on a model with [MASK], texts, facts or tokens, which
            are masked at random (each is a unit). If units share most of their words, the test is easier.
        names_filter: Hook points; by default the residual stream before the first block and after every block.
        positions: Positions whose states are read, as in `analysis.by_step.positions`.
        rows: "position", where each selected position is a row of the regression, or "canvas", where a row is the mean
            over the selected positions of a canvas.
        samples: Number of times that each text is masked; their times cover (0, 1) evenly.
        ridge: Penalties, split and seed.
        max_bytes: Most memory for the sums, three d x d matrices in float64 for each hook point.

    Raises:
        KeyError: There is no such hook point.
        ValueError: Texts for a model without [MASK], or with [MASK] in them, fewer than three units, a part of the
            split without a row, or a budget that is too small.
    """
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r}; it must be 'position' or 'canvas'")
    chosen, settings = check_positions(positions), ridge or RidgeSettings()
    blocks = range(model.cfg.n_layers)
    names = readable_points(model, [resid_pre(0), *map(resid_post, blocks)] if names_filter is None else names_filter)
    _require_memory(model, names, max_bytes)
    given, n_samples = texts_or_runs(model, inputs), at_least(1, "samples", samples)
    canvases = list(_canvases(model, given, n_samples, settings.seed))

    # 1. Assign each unit to a part, and permute the times among the canvases of each part for the control.
    units = sorted({unit for canvas in canvases for unit in canvas.units})
    part_of = dict(zip(units, settings.split(len(units)), strict=True))
    shuffled = _shuffled(canvases, part_of, settings.seed)

    # 2. Read the states, and add them to the sums of their part.
    sums = _ProbeSums(names, rows, model.cfg.n_ctx)
    for canvas, permuted in zip(canvases, shuffled, strict=True):
        selected = select(canvas.read, chosen)
        parts = [part_of[unit] for unit in canvas.units]
        targets = torch.stack([canvas.times, permuted], dim=1)
        canvas.read.run(sums.hooks(selected, parts, targets))
        sums.count(selected, parts, canvas.times)
    if empty := [part for part in PARTS if not sums.n_rows(part)]:
        if len(empty) == len(PARTS):
            raise nothing_selected(model, positions, "inputs")
        raise ValueError(
            f"positions={positions!r} selects no position in the {' and '.join(empty)} part of the split: give more "
            "texts or runs, or other positions"
        )

    # 3. Choose each penalty on the validation part, fit on training and validation together, and test.
    fitted = {name: _fit(sums.moments[name], settings.penalties) for name in names}
    first = next(iter(sums.moments.values()))
    record = {
        "names": names,
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
        weights={name: fit.weights[:, 0].reshape(sums.shapes[name]).float() for name, (fit, *_) in fitted.items()},
        bias=torch.stack([fit.bias[0] for fit, *_ in fitted.values()]).float(),
        r2=torch.stack([r2[0] for _, _, r2, _ in fitted.values()]).float(),
        r2_fitted=torch.stack([r2[0] for *_, r2 in fitted.values()]).float(),
        r2_shuffled=torch.stack([r2[1] for _, _, r2, _ in fitted.values()]).float(),
        penalty=torch.tensor([penalty for _, penalty, *_ in fitted.values()], dtype=torch.float64),
        r2_position=sums.position_r2() if rows == "position" else float("nan"),
        record=record,
    )


@dataclass(frozen=True, eq=False)
class _Canvas:
    """A pass with the time of each row, and the unit (text or run) that each row belongs to."""

    read: ForwardPass
    times: Float[Tensor, "batch"]
    units: tuple[int, ...]


def _canvases(model: DiffusionTransformer, given: CleanTexts | Inputs, samples: int, seed: int) -> Iterator[_Canvas]:
    """Every canvas of the runs, or every text under its random masks."""
    if isinstance(given, Inputs):
        for step in given.pick_steps(None) or ():
            first = 0
            for read in given.at(step):
                assert read.step is not None
                n_rows = len(read.tokens)
                yield _Canvas(read, torch.full((n_rows,), read.step.t), tuple(range(first, first + n_rows)))
                first += n_rows
        return
    if not model.cfg.has_mask:
        raise ValueError(
            f"{model.cfg.model_name!r} has no [MASK], so texts cannot be masked for it: give trajectories of "
            "model.denoise(...)"
        )
    noise = torch.Generator().manual_seed(seed)
    for unit, row in enumerate(given.tokens):
        # The times of one text are spread evenly, like those of a batch in training, and every position may be masked.
        noisy, p_mask = hide(row.repeat(samples, 1), model.cfg.blank, generator=noise)
        noisy = noisy.to(model.cfg.device)
        read = ForwardPass(model, noisy, torch.ones_like(noisy, dtype=torch.bool))
        yield _Canvas(read, p_mask[:, 0], (unit,) * samples)


def _shuffled(canvases: list[_Canvas], part_of: dict[int, str], seed: int) -> list[Float[Tensor, "batch"]]:
    """The times, permuted among all canvases of the same part."""
    times = torch.cat([canvas.times for canvas in canvases])
    parts = [part_of[unit] for canvas in canvases for unit in canvas.units]
    noise = torch.Generator().manual_seed(seed)
    permuted = times.clone()
    for part in PARTS:
        rows = torch.tensor([i for i, own in enumerate(parts) if own == part])
        permuted[rows] = times[rows[torch.randperm(len(rows), generator=noise)]]
    return list(permuted.split([len(canvas.times) for canvas in canvases]))


class _ProbeSums:
    """Sums by hook point and part, and those of the predictor that knows the position only."""

    def __init__(self, names: list[str], rows: str, n_ctx: int) -> None:
        self.names, self.rows = names, rows
        self.moments: dict[str, dict[str, Moments]] = {name: {} for name in names}
        self.shapes: dict[str, torch.Size] = {}
        # By part: number of rows, sum of t, and sum of t², at each position.
        self._positions = {part: torch.zeros(3, n_ctx, dtype=torch.float64) for part in PARTS}

    def n_rows(self, part: str) -> int:
        """Number of rows of a part."""
        moments = self.moments[self.names[0]].get(part)
        return 0 if moments is None else moments.n

    def hooks(
        self, selected: PosMask, parts: list[str], targets: Float[Tensor, "batch axis"]
    ) -> list[tuple[str, Hook]]:
        """Hooks of a pass that add its rows."""
        rows_of = {part: torch.tensor([own == part for own in parts]) for part in set(parts)}

        def add(activation: Tensor, hook: Any) -> None:
            self.shapes[hook.name] = activation.shape[2:]
            # Apple's GPUs have no float64.
            device = torch.device("cpu") if activation.device.type == "mps" else activation.device
            states = activation.flatten(2).to(device).double()
            inside, times = selected.to(device), targets.to(device)
            for part, rows in rows_of.items():
                x, own, y = (each[rows.to(device)] for each in (states, inside, times))
                if self.rows == "canvas":
                    count = own.sum(dim=1)
                    x = (x * own[..., None]).sum(dim=1)[count > 0] / count[count > 0][:, None]
                    y = y[count > 0]
                else:
                    x, y = x[own], y[own.nonzero()[:, 0]]
                if len(x):
                    moments, before = Moments.of(x, y), self.moments[hook.name].get(part)
                    self.moments[hook.name][part] = moments if before is None else before + moments

        return [(name, add) for name in self.names]

    def count(self, selected: PosMask, parts: list[str], times: Float[Tensor, "batch"]) -> None:
        """Add the selected positions of a pass with their times."""
        inside, n_pos = selected.cpu().double(), selected.shape[1]
        powers = torch.stack([torch.ones_like(times), times, times * times]).double()
        for part in set(parts):
            rows = torch.tensor([own == part for own in parts])
            self._positions[part][:, :n_pos] += powers[:, rows] @ inside[rows]

    def position_r2(self) -> float:
        """R² on the held-out part of the mean t of each position, or of all positions where it was never seen."""
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

    Column 0 is t, column 1 t permuted. Each has its own penalty; the penalty that is returned is that of t.
    """
    train, validation, held_out = (moments[part] for part in PARTS)
    on_validation = torch.stack([fit.r2(validation) for fit in train.fit(penalties)]).nan_to_num(nan=-torch.inf)
    best = on_validation.argmax(dim=0).tolist()
    together = train + validation
    fits = together.fit(penalties)
    weights = torch.stack([fits[index].weights[:, column] for column, index in enumerate(best)], dim=1)
    bias = torch.stack([fits[index].bias[column] for column, index in enumerate(best)])
    fit = LinearFits(weights, bias)
    return LinearFits(weights.cpu(), bias.cpu()), penalties[best[0]], fit.r2(held_out).cpu(), fit.r2(together).cpu()


def _require_memory(model: DiffusionTransformer, names: list[str], max_bytes: int) -> None:
    """Raise a `ValueError` if the sums of all hook points take more than `max_bytes`."""
    widths = [torch.Size(activation_shape(name, model.cfg, 1, 1)).numel() for name in names]
    needed = sum(len(PARTS) * 8 * width * width for width in widths)
    if needed > max_bytes:
        raise ValueError(
            f"the sums of {len(names)} hook points take {needed:,} bytes, but max_bytes is {max_bytes:,}: give fewer "
            "hook points in one call (names_filter), or a larger max_bytes"
        )
