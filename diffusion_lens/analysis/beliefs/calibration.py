"""Does a run know when it is right? Confidence, entropy and margin of its predictions against the truth.

Each measure is read at every step, and its course is summed up over the steps that predict a position: first, last and
mean value, slope (least squares, per step) and variance. Two questions are asked of each reading.

The AUROC is the probability that the measure is larger for something right than for something wrong, ties counted half:
Mann and Whitney's U divided by the number of pairs. It is 1/2 for a measure that knows nothing, and below where larger
values speak against being right, as those of entropy do.

The ECE is the expected calibration error of the confidence, the probability of the likeliest token (Guo et al. 2017,
arXiv 1706.04599), over bins b of equal width. The reliability diagram shows the two by bin.

    ECE = Σ_b n_b / n · |share of bin b that is right - mean confidence of bin b|

Positions of a row are not independent, so the intervals of both are those of a bootstrap over rows: the quantiles of
resamples, at the tails that Student's law gives for so few rows (the expanded percentile interval, Hesterberg 2015,
arXiv 1411.5279). Chance moves the bins of few examples away from the diagonal, and the ECE of a resample lies above
that of the data by about as much as the latter lies above the true one; so its quantiles are reflected at the ECE. In
simulations with 10 to 100 rows of 12 positions, intervals of 95 % cover the AUROC in 94 to 97 %, and the ECE in 87 to
94 % of the samples.

What is right is the text that was finally written, at all steps. TraceDet (Chang et al. 2025, arXiv 2510.01274) and
DynHD (Qian et al. 2026, arXiv 2603.16459) detect hallucinations by the course of such numbers rather than by the last
step, and Vazhentsev et al. 2026 (arXiv 2605.14570) compare signals of the trajectory by how well they predict errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.beliefs.runs import Answer, Read, Runs, answer_of, title_of
from diffusion_lens.denoising.predictions import Predictions
from diffusion_lens.records.results import PicturedResult, Saved, Table, shown_model
from diffusion_lens.settings import (
    Real,
    Whole,
    at_least,
    check_level,
    check_seed,
    checked_arguments,
    one_of,
    whole_number,
)
from diffusion_lens.settings.arguments import kind_of
from diffusion_lens.settings.figures import styled

MEASURES = ("confidence", "entropy", "margin")
COURSES = ("first", "last", "mean", "slope", "variance")
MOST_BINS = 1000
FEWEST_ROWS = 10  # with an interval
_FEWEST_IN_BIN = 10  # examples with an interval of the ECE, in a bin on average
_RESAMPLES = 2000
_PROBABILITIES = ("first", "last", "mean")  # courses of the confidence that are probabilities
_COPIES = 6  # of all numbers that live at once
_ROUNDING = 1e-12  # of a variance, relative to the square of the mean
Labels = Bool[Tensor, "batch *pos"] | Callable[[Predictions], Tensor]


@dataclass(frozen=True, eq=False)
class Calibration(PicturedResult, Saved):
    """How well the predictions of a run say whether it is right.

    A reading is a step, by its number, or one of the courses "first", "last", "mean", "slope", "variance".

    Columns of the data frame: reading, measure, auroc, ece (of the confidence), n, right; a row for each measure and
    reading.

    Attributes:
        auroc: Float[measure reading], of confidence, entropy and margin; NaN where all or none are right, and where a
            measure was not recorded.
        ece: Float[reading], of the confidence; NaN for slope and variance.
        n: Int[reading], number of examples: positions, or rows if these are labelled.
        n_right: Int[reading], number of those that are right.
        bin_counts: Int[reading bin], number of examples by confidence.
        bin_confidence: Float[reading bin], their mean confidence; NaN in an empty bin.
        bin_right: Float[reading bin], the share that is right; NaN in an empty bin.
        values: Float[measure reading entry], the measures of each example; NaN where a step does not predict it.
        right: Bool[entry], whether it is right.
        rows: Int[entry], its row, counted over all runs.
        readings: Name of each reading.
        record: What is labelled ("positions" or "rows"), number of runs, and the network that wrote them.
    """

    KIND = "calibration"
    SHOWS = "how well confidence, entropy and margin of the predictions tell right from wrong"
    AXES = (("measure", len(MEASURES)), ("reading", "readings"))

    auroc: Float[Tensor, "measure reading"]
    ece: Float[Tensor, "reading"]
    n: Int[Tensor, "reading"]
    n_right: Int[Tensor, "reading"]
    bin_counts: Int[Tensor, "reading bin"]
    bin_confidence: Float[Tensor, "reading bin"]
    bin_right: Float[Tensor, "reading bin"]
    values: Float[Tensor, "measure reading entry"]
    right: Bool[Tensor, "entry"]
    rows: Int[Tensor, "entry"]
    readings: list[str]
    record: dict[str, Any]

    @styled
    def plot(self, show: str = "auroc", reading: str = "last", ax: Any = None, title: str | None = None) -> Any:
        """Draw AUROC by step, or a reliability diagram; returns the matplotlib axes.

        Args:
            show: "auroc", a line for each measure; or "reliability".
            reading: Reading of the reliability diagram, a step or "first", "last" or "mean".
        """
        one_of("auroc", "reliability")("show", show)
        title = title or title_of(self.record, "does it know when it is right")
        if show == "auroc":
            steps = [name for name in self.readings if name not in COURSES]
            by_step = self.auroc[:, : len(steps)]
            return plots.labelled_lines(by_step, MEASURES, steps, "denoising step", "AUROC", title, ax)
        index = self.readings.index(one_of(*self._of_probabilities)("reading", str(reading)))
        kept = self.bin_counts[index] > 0
        return plots.reliability(
            self.bin_confidence[index, kept], self.bin_right[index, kept], self.bin_counts[index, kept], ax, title
        )

    @checked_arguments
    def interval(
        self,
        of: str = "auroc",
        *,
        measure: str = "confidence",
        reading: str | Whole = "last",
        level: Real = 0.95,
        seed: Whole = 0,
    ) -> tuple[float, float]:
        """Ends of the interval of one AUROC or ECE, by a bootstrap over rows.

        Both are NaN for fewer than ten rows, and those of the ECE for fewer than ten examples a bin.

        Args:
            of: "auroc" or "ece".
            measure: "confidence", "entropy" or "margin"; the ECE is that of the confidence.
            reading: A step, or one of the courses; those of the ECE are probabilities.
            level: Probability that such an interval covers the AUROC; it covers the ECE somewhat less often.
            seed: Seed of the resamples.
        """
        from scipy.stats import norm, t  # imported here because it takes half a second

        one_of("auroc", "ece")("of", of)
        measures, readings = (MEASURES, self.readings) if of == "auroc" else (MEASURES[:1], self._of_probabilities)
        place = measures.index(one_of(*measures)("measure", measure))
        index = self.readings.index(one_of(*readings)("reading", str(reading)))
        share, seed = check_level(level), check_seed("seed", seed)
        known = ~self.values[place, index].isnan()
        scores, right = self.values[place, index, known].double(), self.right[known].double()
        names, row = self.rows[known].unique(return_inverse=True)
        n_rows, n_bins = len(names), self.bin_counts.shape[1]
        if n_rows < FEWEST_ROWS or (of == "ece" and len(scores) < _FEWEST_IN_BIN * n_bins):
            return float("nan"), float("nan")
        # How often each resample contains each row
        chances = [1 / n_rows] * n_rows
        counts = torch.from_numpy(np.random.default_rng(seed).multinomial(n_rows, chances, size=_RESAMPLES)).double()
        if of == "auroc":
            rank = scores.unique(return_inverse=True)[1]
            found = torch.stack([_auroc(rank, right * each[row], (1 - right) * each[row]) for each in counts])
        else:
            gaps = scores.new_zeros(n_rows, n_bins)
            gaps.index_put_((row, _bin_of(scores, n_bins)), right - scores, accumulate=True)
            found = (counts @ gaps).abs().sum(dim=1) / (counts @ torch.bincount(row).double())
            found = 2 * float(self.ece[index]) - found
        tail = float(norm.cdf(t.ppf((1 - share) / 2, n_rows - 1) * (n_rows / (n_rows - 1)) ** 0.5))
        low, high = found.nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).clamp(0, 1).tolist()
        return low, high

    @property
    def _of_probabilities(self) -> list[str]:
        return [name for name in self.readings if name not in COURSES or name in _PROBABILITIES]

    def _table(self) -> Table:
        of_confidence = torch.full_like(self.auroc, torch.nan)
        of_confidence[0] = self.ece
        values = {"auroc": self.auroc, "ece": of_confidence, "n": self.n, "right": self.n_right}
        return Table.of_cells({"measure": MEASURES, "reading": self.readings}, values)

    def __repr__(self) -> str:
        last = self.readings.index("last")
        said = ", ".join(f"{name} {float(self.auroc[i, last]):.3f}" for i, name in enumerate(MEASURES))
        n = f"{int(self.n_right[last])} of {int(self.n[last])} {self.record['examples']} right"
        return f"Calibration({shown_model(self.record)}, {n}, AUROC when written: {said})"


@checked_arguments
def calibration(
    runs: Runs,
    right: Labels | None = None,
    *,
    reference: Int[Tensor, "batch pos"] | None = None,
    answer: Answer | None = None,
    bins: Whole = 10,
    max_bytes: Whole = 2**31,
) -> Calibration:
    """How well confidence, entropy and margin, at each step and over their course, predict that the text is right.

    Args:
        runs: A trajectory with predictions, its `predictions`, or several, which are read one after the other.
        right: What is right: Bool[batch], whether each row is, or Bool[batch pos], whether each written token is, with
            the rows of all runs one after the other; or a function of the `Predictions` of a run that returns this of
            its rows. The number of a row at a step is the mean over its positions.
        reference: Int[batch pos], the right canvases, in place of `right`.
        answer: Positions to read in every row, or Bool[batch pos]; by default all that were predicted.
        bins: Number of bins of the confidence, between 0 and 1.
        max_bytes: Most memory for the numbers of all examples and steps, beside the tables of the predictions.

    Raises:
        ValueError: There are no labels, or of other rows than the runs; all examples are right, or all wrong; nothing
            is known of the probabilities; or the numbers exceed `max_bytes`.
    """
    n_bins, limit = at_least(1, "bins", bins), whole_number("max_bytes", max_bytes)
    if n_bins > MOST_BINS:
        raise ValueError(f"bins={n_bins}; give at most {MOST_BINS}, so that bins contain examples")
    if (right is None) == (reference is None):
        raise ValueError(
            "say what is right, once: right=, labels of rows or positions, or reference=, the right canvases"
        )
    read, n, steps = Read(runs), 0, list[int]()
    kept: list[tuple[list[int], Tensor]] = []
    labelled: list[tuple[Tensor, Tensor]] = []  # whether each example is right, and its row
    kinds: set[str] = set()
    for predictions in read:
        labels = _labels_of(predictions, right, reference, read.n_rows)
        chosen = answer_of(answer, predictions, read.n_rows)
        steps = sorted({*steps, *predictions.steps})
        n += len(labels) if labels.dim() == 1 else int(chosen.sum())
        # Bytes of a reading of all examples, and of the measures of this run; several copies live at once.
        needed = _COPIES * 4 * len(MEASURES) * max((len(steps) + len(COURSES)) * n, predictions.masked.numel())
        if needed > limit:
            raise ValueError(
                f"the numbers of {read.n_rows + len(predictions)} rows take up to {needed:,} bytes, and {limit:,} are "
                "allowed: label rows instead of positions, read fewer positions (answer=), or raise max_bytes"
            )
        values = _measured(predictions, chosen)
        kinds.add("rows" if labels.dim() == 1 else "positions")
        if labels.dim() == 1:
            values, rows = values.nanmean(dim=3), torch.arange(len(labels))
        else:
            values, labels, rows = values[:, :, chosen], labels[chosen], chosen.nonzero()[:, 0]
        kept.append((predictions.steps, values))
        labelled.append((labels, rows + read.n_rows))
    if isinstance(answer, Tensor) and answer.dtype == torch.bool:
        read.require_rows("answer", answer)
    read.require_rows("reference" if right is None else "right", reference if right is None else right)
    if len(kinds) > 1:
        raise ValueError("right: some labels are of rows, others of positions; label all runs in one way")
    examples = torch.cat([_on(steps, own, values) for own, values in kept], dim=2)
    is_right, rows = map(torch.cat, zip(*labelled, strict=True))
    if bool(examples[:2].isnan().all()):
        raise ValueError("the runs have no probabilities: they were read from a file without them")
    if int(is_right.sum()) in (0, n):
        raise ValueError(
            f"all {n} examples are {'right' if bool(is_right.any()) else 'wrong'}, and the AUROC compares right ones "
            "with wrong ones: give more runs, or check the labels"
        )
    courses = torch.cat([_courses(each[None], torch.tensor(steps)) for each in examples])
    readings = torch.cat([examples, courses], dim=1)
    names = [*map(str, steps), *COURSES]
    confidence = readings[0].clone()
    confidence[[name in COURSES and name not in _PROBABILITIES for name in names]] = torch.nan
    counts, mean, share = map(torch.stack, zip(*(_bins(each, is_right, n_bins) for each in confidence), strict=True))
    known = ~readings[:2].isnan().all(dim=0)
    return Calibration(
        auroc=torch.stack([torch.stack([auroc(each, is_right) for each in measure]) for measure in readings]),
        ece=(counts * (share - mean).abs().nan_to_num()).sum(dim=1) / counts.sum(dim=1),
        n=known.sum(dim=1),
        n_right=(known & is_right).sum(dim=1),
        bin_counts=counts,
        bin_confidence=mean,
        bin_right=share,
        values=readings,
        right=is_right,
        rows=rows,
        readings=names,
        record=read.record(examples=kinds.pop()),
    )


def auroc(scores: Float[Tensor, "entry"], is_right: Bool[Tensor, "entry"]) -> Float[Tensor, ""]:
    """The probability that a right example has a larger score than a wrong one, ties counted half.

    Examples without a score (NaN) are left out. It is NaN if all of the others are right, or none.
    """
    known = ~scores.isnan()
    rank, hits = scores[known].unique(return_inverse=True)[1], is_right[known].double()
    return _auroc(rank, hits, 1 - hits).float()


def _auroc(rank: Int[Tensor, "entry"], right: Float[Tensor, "entry"], wrong: Float[Tensor, "entry"]) -> Tensor:
    """The same of examples that count several times, by how often each is right and wrong; equal scores have one
    rank."""
    n_right, n_wrong = torch.bincount(rank, weights=right), torch.bincount(rank, weights=wrong)
    below = n_wrong.cumsum(dim=0) - n_wrong / 2
    return (n_right * below).sum() / (n_right.sum() * n_wrong.sum())


def _labels_of(
    predictions: Predictions, right: Labels | None, reference: Tensor | None, first_row: int
) -> Bool[Tensor, "batch *pos"]:
    """Which rows or positions of a run are right."""
    n_rows, n_pos = predictions.written.shape
    name = "reference" if right is None else "right"
    given: Any = reference if right is None else right
    if callable(given):
        given, first_row = given(predictions), 0
    last = first_row + n_rows
    if not isinstance(given, Tensor) or given.dim() not in (1, 2) or (right is None and given.dim() != 2):
        shown = list(given.shape) if isinstance(given, Tensor) else kind_of(given)
        raise ValueError(f"{name} is {shown}; it must be a tensor, a row for each row of the runs")
    if len(given) < last or (given.dim() == 2 and given.shape[1] < n_pos):
        raise ValueError(
            f"{name} is of shape {list(given.shape)}, but the runs have {last} rows or more, of up to {n_pos} positions"
        )
    of_rows = given[first_row:last].cpu()
    of_rows = of_rows[:, :n_pos] if of_rows.dim() == 2 else of_rows
    if right is None:
        return of_rows == predictions.written
    if of_rows.dtype != torch.bool:
        raise ValueError(f"right is of {of_rows.dtype}; it must be true or false (torch.bool)")
    return of_rows


def _measured(predictions: Predictions, chosen: Bool[Tensor, "batch pos"]) -> Float[Tensor, "measure step batch pos"]:
    """The measures at some positions, NaN where nothing is predicted."""
    where = predictions.masked & chosen
    confidence = predictions.probabilities[..., 0] if predictions.top_k else torch.full(where.shape, torch.nan)
    margin = predictions.margin if predictions.top_k > 1 else torch.full(where.shape, torch.nan)
    measures = torch.stack([each.float() for each in (confidence, predictions.entropy, margin)])
    return measures.masked_fill(~where, torch.nan)


def _on(steps: list[int], own: list[int], values: Tensor) -> Float[Tensor, "measure step entry"]:
    """The measures on the steps of all runs, NaN at steps that a run does not have."""
    whole = values.new_full((len(values), len(steps), values.shape[2]), torch.nan)
    whole[:, [steps.index(step) for step in own]] = values
    return whole


def _courses(
    values: Float[Tensor, "measure step entry"], steps: Int[Tensor, "step"]
) -> Float[Tensor, "measure reading entry"]:
    """The course of each example over its steps, in the order of `COURSES`; the slope of a single step is NaN."""
    known = ~values.isnan()
    place = torch.arange(values.shape[1])[:, None]
    first = torch.where(known, place, values.shape[1] - 1).amin(dim=1, keepdim=True)
    last = torch.where(known, place, 0).amax(dim=1, keepdim=True)
    time = steps.float()[:, None].expand_as(values).where(known, torch.nan)
    mean = values.nanmean(dim=1, keepdim=True)
    of_time, of_values = time - time.nanmean(dim=1, keepdim=True), values - mean
    # A constant measure gives 0, or what rounding leaves of it, which would break ties.
    of_values = of_values.masked_fill(of_values.square().nanmean(dim=1, keepdim=True) < _ROUNDING * mean.square(), 0.0)
    slope = (of_time * of_values).nansum(dim=1, keepdim=True) / of_time.square().nansum(dim=1, keepdim=True)
    variance = of_values.square().nanmean(dim=1, keepdim=True)
    return torch.cat([values.gather(1, first), values.gather(1, last), mean, slope, variance], dim=1)


def _bins(
    confidence: Float[Tensor, "entry"], is_right: Bool[Tensor, "entry"], n_bins: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Number of examples in each bin of equal width, their mean confidence and the share that is right."""
    known = ~confidence.isnan()
    p, hits = confidence[known].double(), is_right[known].double()
    index = _bin_of(p, n_bins)
    counts = torch.bincount(index, minlength=n_bins)
    sums = [torch.bincount(index, weights=each, minlength=n_bins) / counts for each in (p, hits)]
    return counts, sums[0].float(), sums[1].float()


def _bin_of(p: Float[Tensor, "entry"], n_bins: int) -> Int[Tensor, "entry"]:
    return (p * n_bins).long().clamp(max=n_bins - 1)
