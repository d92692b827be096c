"""A linear probe of the denoising time: can t be read from the states, at each layer?

Masked diffusion models are not told the time, and yet their states encode it (Rulli et al. 2026, arXiv 2607.01774, who
probe the residual stream of LLaDA and Dream). The probe is a ridge regression of t on the state at a hook point. It is
fitted on some texts or runs, and R² is computed on others, so that no canvas contributes to both.

t is `hook.step.t` on the canvases of trajectories, and the probability with which tokens were masked, or replaced under
uniform noise, in texts that are noised at random. A network that is told the time is told that of each canvas.

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
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.batching import reserved, row_bytes
from diffusion_lens.analysis.by_step.positions import Positions, check_positions, nothing_selected, select
from diffusion_lens.analysis.by_step.ridge import LinearFits, Moments, RidgeSettings
from diffusion_lens.analysis.by_step.time_probe_result import TimeProbe
from diffusion_lens.analysis.by_step.time_probe_sums import PARTS, ProbeSums
from diffusion_lens.analysis.inputs import (
    CleanTexts,
    ForwardPass,
    Inputs,
    SharedPass,
    TextsOrRuns,
    passes_of,
    readable_points,
    texts_or_runs,
)
from diffusion_lens.denoising.activation_shapes import activation_shape
from diffusion_lens.hook_names import NamesFilter, resid_post, resid_pre
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.scheduled_loss import noised
from diffusion_lens.settings import Whole, at_least

ROWS = ("position", "canvas")
# d x d matrices in float64 that `_fit` computes from the sums.
_REGRESSION_MATRICES = 8


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
    attention_mask: Tensor | None = None,
    max_bytes: int = 2**31,
) -> TimeProbe:
    """Fit a linear probe of the denoising time at each hook point, and test it on held-out texts or runs.

    Args:
        model: Model that reads the states; the caller's hooks act.
        inputs: Trajectories (each of their rows is a unit), or on a diffusion model, texts, facts or tokens, which are
            masked at random, or replaced under uniform noise (each is a unit). If units share most of their words, the
            test is easier.
        names_filter: Hook points; by default the residual stream before the first block and after every block.
        positions: Positions whose states are read, as in `analysis.by_step.positions`.
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
        ValueError: Texts for a model of next tokens, or with [MASK] in them, fewer than three units, a part of the
            split without a row, validation rows of one time only, a budget that is too small, or texts inside
            `model.at_time`.
    """
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r}; it must be 'position' or 'canvas'")
    chosen, settings = check_positions(positions), ridge or RidgeSettings()
    blocks = range(model.cfg.n_layers)
    names = readable_points(model, [resid_pre(0), *map(resid_post, blocks)] if names_filter is None else names_filter)
    given, n_samples = texts_or_runs(model, inputs, attention_mask), at_least(1, "samples", samples)
    if isinstance(given, CleanTexts):
        model.require_own_times("probe_time")
    n_at_once = _samples_at_once(model, names, given, n_samples, max_bytes)
    passes = list(_passes(model, given, n_samples, n_at_once, settings.seed))

    # 1. Assign each unit to a part, and permute the times among the canvases of each part for the control.
    units = sorted({unit for one in passes for unit in one.units})
    part_of = dict(zip(units, settings.split(len(units)), strict=True))
    shuffled = _shuffled(passes, part_of, settings.seed)

    # 2. Read the states, and add them to the sums of their part.
    sums = ProbeSums(names, rows, model.cfg.n_ctx)
    for one, permuted in zip(passes, shuffled, strict=True):
        canvases, parts = one.shared.served.values(), [part_of[unit] for unit in one.units]
        selected = [one.shared.on_read(select(canvas, chosen)) for canvas in canvases]
        targets = torch.stack([one.times, permuted], dim=2)
        one.shared.read.run(sums.hooks(selected, parts, targets))
        for of_canvas, times in zip(selected, one.times, strict=True):
            sums.count(of_canvas, parts, times)
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


def _shuffled(passes: list[_Pass], part_of: dict[int, str], seed: int) -> list[Float[Tensor, "canvas batch"]]:
    """The times, permuted among all canvases of the same part."""
    times = torch.cat([one.times.flatten() for one in passes])
    parts = [part_of[unit] for one in passes for _ in one.times for unit in one.units]
    noise = torch.Generator().manual_seed(seed)
    permuted = times.clone()
    for part in PARTS:
        rows = torch.tensor([i for i, own in enumerate(parts) if own == part])
        permuted[rows] = times[rows[torch.randperm(len(rows), generator=noise)]]
    parts_of_passes = permuted.split([one.times.numel() for one in passes])
    return [own.view_as(one.times) for own, one in zip(parts_of_passes, passes, strict=True)]


def _fit(
    moments: dict[str, Moments], penalties: tuple[float, ...]
) -> tuple[LinearFits, float, Float[Tensor, "axis"], Float[Tensor, "axis"]]:
    """The regressions with their best penalty, that penalty, and R² on the held-out and on the fitted rows.

    Column 0 is t, column 1 t permuted. Each has its own penalty; the penalty that is returned is that of t.
    """
    train, validation, held_out = (moments[part] for part in PARTS)
    on_validation = torch.stack([fit.r2(validation) for fit in train.fit(penalties)])
    if bool(on_validation.isnan().any()):
        raise ValueError(
            f"the penalty cannot be chosen: R² on the validation part is not defined, because its {validation.n} rows "
            "all have the same time. Give more texts with samples= of at least 2, more steps or runs, or a larger "
            "share, ridge=RidgeSettings(validation=...)"
        )
    best = on_validation.argmax(dim=0).tolist()
    together = train + validation
    fits = together.fit(penalties)
    weights = torch.stack([fits[index].weights[:, column] for column, index in enumerate(best)], dim=1)
    bias = torch.stack([fits[index].bias[column] for column, index in enumerate(best)])
    fit = LinearFits(weights, bias)
    return LinearFits(weights.cpu(), bias.cpu()), penalties[best[0]], fit.r2(held_out).cpu(), fit.r2(together).cpu()


def _samples_at_once(
    model: DiffusionTransformer, names: list[str], given: CleanTexts | Inputs, samples: int, max_bytes: int
) -> int:
    """Number of samples of a text in one pass, so that a call takes at most `max_bytes`.

    Raises:
        ValueError: The budget does not suffice for one sample, or texts are given for a model of next tokens.
    """
    texts = given.tokens if isinstance(given, CleanTexts) else []
    if texts and model.cfg.grows:
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
