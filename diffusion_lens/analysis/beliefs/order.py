"""Order of revealing: which words come first?

The tokens that a run writes are ranked within their row by the step that wrote them, tokens of one step alike. The
normalised rank r = (rank - 1/2) / n of the n tokens is between 0 (first) and 1 (last), and 1/2 on average, so a class
of words with a mean below 1/2 comes first. Lu 2026, Measuring Temporal Linguistic Emergence in Diffusion Language
Models (arXiv 2604.23235), finds on LLaDA that content words stabilise before function words.

Two orders are compared. Under a random order every token has an expected rank of 1/2; the p value of a class is the
share of random permutations within rows whose mean is at least as far from 1/2 as the one that is found. Left to right,
a class that ends sentences is late because of its place; `later_than_in_text` is how much later a class is revealed
than its place in the text says. The intervals are those of `over_facts.intervals`, with rows, or what `clusters`
says, as the independent units.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.beliefs.runs import Read, Runs, stacked, title_of
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.denoising.predictions import NOTHING, Predictions
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.records.results import PicturedResult, Saved, Table, shaped, shown_model, texts_of
from diffusion_lens.settings import Real, Whole, at_least, check_level, check_seed, checked_arguments
from diffusion_lens.settings.figures import styled

Tagger = Callable[[str], str | None] | Sequence[Sequence[str | None]]
Frequencies = Mapping[int, Real] | Tensor


@dataclass(frozen=True, eq=False)
class RevealOrder(PicturedResult, Saved):
    """The order in which runs write their tokens, and the mean place of each class of words in it.

    Columns of the data frame: batch, pos, token, class, revealed_at, rank; a row for each written token.

    Attributes:
        rank: Float[batch pos], normalised rank between 0 and 1; NaN where the run wrote nothing.
        revealed_at: Int[batch pos], the step that wrote the token; -1 where it was given.
        written: Int[batch pos], the final canvas; -1 beyond the end of a row.
        class_of: Int[batch pos], index of the class of the token; -1 where it has none.
        left_to_right: Float[batch], Spearman's rank correlation of step and position; NaN if all are of one step.
        by_frequency: Float[batch], Spearman's rank correlation of step and frequency of the token, negative if frequent
            tokens come first; NaN without frequencies.
        mean: Float[class], mean rank.
        low, high: Float[class], ends of its interval, NaN for fewer than four clusters.
        p_random: Float[class], p value of the mean under random order; NaN where clusters have several rows, whose
            orders are not independent: their interval says whether the mean is 1/2.
        later_than_in_text: Float[class], mean of the rank minus the rank that left-to-right order would give.
        later_low, later_high: Float[class], ends of its interval.
        classes: Names of the classes.
        words: Text of every id that occurs.
        record: Level of the intervals, seed, number of permutations and of runs, and the network that wrote the runs.
    """

    KIND = "order of revealing"
    SHOWS = "how early the tokens of each class are written, as a mean rank with its interval"
    AXES = (("class", "classes"),)

    rank: Float[Tensor, "batch pos"]
    revealed_at: Int[Tensor, "batch pos"]
    written: Tokens
    class_of: Int[Tensor, "batch pos"]
    left_to_right: Float[Tensor, "batch"]
    by_frequency: Float[Tensor, "batch"]
    mean: Float[Tensor, "class"]
    low: Float[Tensor, "class"]
    high: Float[Tensor, "class"]
    p_random: Float[Tensor, "class"]
    later_than_in_text: Float[Tensor, "class"]
    later_low: Float[Tensor, "class"]
    later_high: Float[Tensor, "class"]
    classes: list[str]
    words: dict[int, str]
    record: dict[str, Any]

    def _check(self) -> None:
        if unknown := set(self.written[~self.rank.isnan()].tolist()) - self.words.keys():
            raise ValueError(f"words lacks the token {min(unknown)}")
        if bool(((self.class_of < NOTHING) | (self.class_of >= len(self.classes))).any()):
            raise ValueError("class_of has an index outside classes")

    @cached_property
    def n(self) -> Int[Tensor, "class"]:
        """Number of written tokens of each class."""
        return torch.bincount(self.class_of[self.class_of >= 0], minlength=len(self.classes))

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """Mean rank of each class with its interval, the earliest first, and without classes the mean rank by position;
        returns the matplotlib axes."""
        if not self.classes:
            labels = [str(pos) for pos in range(self.rank.shape[1])]
            title = title or title_of(self.record, "order of revealing")
            mean = self.rank.nanmean(dim=0)[None]
            return plots.labelled_lines(mean, ["mean"], labels, "position", "mean rank (0 is first)", title, ax)
        order = self.mean.argsort().tolist()
        return plots.ranked_means(
            self.mean[order],
            torch.stack([self.low, self.high], dim=1)[order],
            [f"{self.classes[i]} ({int(self.n[i])})" for i in order],
            expected=0.5,
            xlabel="mean rank of revealing (0 is first)",
            ax=ax,
            title=title or title_of(self.record, "which words come first"),
        )

    def _table(self) -> Table:
        axes = {"batch": range(len(self.rank)), "pos": range(self.rank.shape[1])}
        names = shaped([*self.classes, ""], -1)[self.class_of.numpy()]
        values = {"token": texts_of(self.written, self.words), "class": names, "revealed_at": self.revealed_at}
        return Table.of_cells(axes, {**values, "rank": self.rank}).where(~self.rank.isnan())

    def __repr__(self) -> str:
        size = f"{len(self.rank)} rows, {len(self.classes)} classes"
        return (
            f"RevealOrder({shown_model(self.record)}, {size}, left to right {float(self.left_to_right.nanmean()):.2f})"
        )


@checked_arguments
def reveal_order(
    runs: Runs,
    *,
    tagger: Tagger | None = None,
    frequencies: Frequencies | None = None,
    clusters: Sequence[str] | None = None,
    permutations: Whole = 1000,
    level: Real = 0.95,
    seed: Whole = 0,
) -> RevealOrder:
    """The order in which runs write their tokens: by position, by frequency and by class of word.

    Under uniform noise, the step that wrote a token is the last one that changed it.

    Args:
        runs: A trajectory with predictions, its `predictions`, or several, which are read one after the other.
        tagger: The class of each token: a function from its text to a name, or `None` for no class; or a list for each
            row of all runs, with a name or `None` for each position, `None` where the token was given.
        frequencies: Frequency of each token, by id (0 for ids that are missing) or Float[d_vocab].
        clusters: Name of the cluster of each row, such as the person that it is about; by default each row is one.
        permutations: Number of random orders for the p values.
        level: Probability that an interval covers the mean.
        seed: Seed of random orders and resamples.

    Raises:
        ValueError: A label at a position that was given, an empty class or none at all, or lists of wrong lengths.
    """
    n_orders, seed = at_least(1, "permutations", permutations), check_seed("seed", seed)
    share = check_level(level)
    read, parts = Read(runs), list[dict[str, Tensor]]()
    names: dict[str, int] = {}
    for predictions in read:
        part = _ranks(predictions)
        part["class_of"] = _classes_of(predictions, part["rank"], tagger, read.n_rows, names)
        part["frequency"] = _frequencies_of(predictions, frequencies)
        parts.append(part)
    fills = {"rank": torch.nan, "place": torch.nan, "frequency": torch.nan}
    tables = {name: stacked([part[name] for part in parts], fills.get(name, NOTHING)) for name in parts[0]}
    if tagger is not None and not names:
        raise ValueError("tagger: no written token has a class; it returned None for all of them")
    if tagger is not None and not callable(tagger) and len(tagger) != read.n_rows:
        raise ValueError(
            f"tagger has labels of {len(tagger)} rows, and the runs have {read.n_rows}: give one list a row"
        )
    owners = list(map(str, range(read.n_rows))) if clusters is None else list(clusters)
    if len(owners) != read.n_rows:
        raise ValueError(f"clusters has {len(owners)} names, and the runs have {read.n_rows} rows: give one a row")

    rank, place, class_of = tables["rank"], tables.pop("place"), tables["class_of"]
    frequency = tables.pop("frequency")
    intervals: dict[str, list[Tensor]] = {"mean": [], "low": [], "high": [], "later_than_in_text": []}
    intervals |= {"later_low": [], "later_high": []}
    for index in range(len(names)):
        rows, positions = (class_of == index).nonzero(as_tuple=True)
        own, of_rows = [owners[row] for row in rows.tolist()], rank[rows, positions]
        later = of_rows - place[rows, positions]
        for values, (mean, low, high), within in (
            (of_rows, ("mean", "low", "high"), (0.0, 1.0)),
            (later, ("later_than_in_text", "later_low", "later_high"), (-1.0, 1.0)),
        ):
            ends = mean_interval(values, own, share, seed, within)
            intervals[mean].append(values.mean())
            intervals[low].append(ends[0])
            intervals[high].append(ends[1])
    of_classes = {name: torch.stack(values) if values else torch.empty(0) for name, values in intervals.items()}
    if len(set(owners)) < len(owners):
        p_random = torch.full_like(of_classes["mean"], torch.nan)
    else:
        p_random = _p_random(rank, class_of, of_classes["mean"], n_orders, seed)
    return RevealOrder(
        **tables,
        left_to_right=_spearman(rank, place),
        by_frequency=_spearman(rank, frequency),
        **of_classes,
        p_random=p_random,
        classes=list(names),
        words=read.words,
        record=read.record(level=share, seed=seed, permutations=n_orders),
    )


def _ranks(predictions: Predictions) -> dict[str, Tensor]:
    """The normalised rank of each written token by step, and by its place in the text."""
    from scipy.stats import rankdata  # imported here because it takes half a second

    was_written = predictions.revealed_at >= 0
    rank, place = (torch.full(was_written.shape, torch.nan) for _ in range(2))
    for row, own in enumerate(was_written):
        n = int(own.sum())
        if n:
            steps = predictions.revealed_at[row, own].numpy()
            rank[row, own] = torch.from_numpy((rankdata(steps) - 0.5) / n).float()
            place[row, own] = (torch.arange(n) + 0.5) / n
    return {"rank": rank, "place": place, "revealed_at": predictions.revealed_at, "written": predictions.written}


def _classes_of(
    predictions: Predictions, rank: Tensor, tagger: Tagger | None, first_row: int, names: dict[str, int]
) -> Int[Tensor, "batch pos"]:
    """The class of each written token, an index in `names`, to which new ones are added."""
    class_of = torch.full(rank.shape, NOTHING)
    if tagger is None:
        return class_of
    if callable(tagger):
        tags = {
            token: tagger(predictions.words[token]) for token in predictions.written[~rank.isnan()].unique().tolist()
        }
        labels = [[tags.get(token) for token in row] for row in predictions.written.tolist()]
    else:
        labels = [list(row) for row in tagger[first_row : first_row + len(predictions)]]
    for row, of_row in enumerate(labels):
        if len(of_row) > rank.shape[1]:
            raise ValueError(
                f"tagger[{first_row + row}] has {len(of_row)} labels, and the row {rank.shape[1]} positions"
            )
        for pos, name in enumerate(of_row):
            if name is None or (callable(tagger) and bool(rank[row, pos].isnan())):
                continue
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"tagger: the class of {predictions.words[int(predictions.written[row, pos])]!r} is {name!r}; give "
                    "a name, or None for no class"
                )
            if bool(rank[row, pos].isnan()):
                raise ValueError(
                    f"tagger[{first_row + row}][{pos}] is {name!r}, but the run did not write this position: it was "
                    "given; label only what the run wrote, and give None elsewhere"
                )
            class_of[row, pos] = names.setdefault(name, len(names))
    return class_of


def _frequencies_of(predictions: Predictions, frequencies: Frequencies | None) -> Float[Tensor, "batch pos"]:
    written = predictions.written
    if frequencies is None:
        return torch.full(written.shape, torch.nan)
    if isinstance(frequencies, Mapping):
        return torch.tensor([[float(frequencies.get(token, 0.0)) for token in row] for row in written.tolist()])
    if frequencies.dim() != 1 or int(written.max()) >= len(frequencies):
        raise ValueError(
            f"frequencies is of shape {list(frequencies.shape)}, and the runs contain the id {int(written.max())}; "
            "give Float[d_vocab], a number for each id"
        )
    return frequencies.float().cpu()[written]


def _spearman(a: Float[Tensor, "batch pos"], b: Float[Tensor, "batch pos"]) -> Float[Tensor, "batch"]:
    """Spearman's rank correlation within each row, over the positions at which both are numbers; NaN if one of the two
    is constant."""
    from scipy.stats import rankdata

    found = torch.full((len(a),), torch.nan)
    for row, (x, y) in enumerate(zip(a, b, strict=True)):
        known = ~(x.isnan() | y.isnan())
        if int(known.sum()) > 1:
            ranks = torch.stack([torch.from_numpy(rankdata(each[known].numpy())) for each in (x, y)])
            if bool((ranks.std(dim=1) > 0).all()):
                found[row] = torch.corrcoef(ranks)[0, 1]
    return found


def _p_random(
    rank: Float[Tensor, "batch pos"],
    class_of: Int[Tensor, "batch pos"],
    mean: Float[Tensor, "class"],
    n_orders: int,
    seed: int,
) -> Float[Tensor, "class"]:
    """The share of random orders within rows in which the mean rank of a class is as far from 1/2, this one among
    them."""
    if not len(mean):
        return mean
    generator = torch.Generator().manual_seed(seed)
    sums, counts = torch.zeros(n_orders, len(mean), dtype=torch.float64), torch.zeros(len(mean))
    for ranks, classes in zip(rank, class_of, strict=True):
        own = ranks[~ranks.isnan()].double()
        tagged = classes[~ranks.isnan()]
        chosen = tagged >= 0
        shuffled = own[torch.rand(n_orders, len(own), generator=generator).argsort(dim=1)]
        sums.index_add_(1, tagged[chosen], shuffled[:, chosen])
        counts += torch.bincount(tagged[chosen], minlength=len(mean))
    distance = (sums / counts - 0.5).abs()
    as_far = distance >= (mean - 0.5).abs() - 1e-6
    p: Tensor = (1 + as_far.sum(dim=0)) / (1 + n_orders)
    return p
