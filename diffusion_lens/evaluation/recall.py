"""Recall of facts by number of denoising steps.

A fact counts as recalled when its answer is contained in the text that the model wrote after the prompt, SMDM's measure
(Nie et al. 2024, arXiv 2410.18514, section 4.3). Stricter scores are computed as well.

A cell of the reversal experiment has two names, both of which are printed: Berglund et al. 2023 (arXiv 2309.12288) name
it after the TRAINED direction, as in "p2d reverse", and SMDM after the QUERIED one, "DtN reverse". The table in
`data.reversal_curse` compares them.

Published numbers are printed next to a measured table for comparison, each with the certainty of its source. They come
from other weights and other facts than those of the bundled models. Numbers that nobody has read in a text that states
them are left out. A replication with the same checkpoint can be 7 points below the paper when it queries descriptions
in reverse, as Rai's is.

The scores of a text are those of SMDM's reversal evaluation, and the standard ones. ML-GSAI/SMDM `evaluate_reverse.py`
strips both texts and lowers their case. It then checks whether the generation contains the reference, and passes both
to nltk's `sentence_bleu`. nltk expects lists of tokens, but the script passes strings, so its BLEU counts characters.
This score is available as `character_bleu`, for comparison with the published numbers. The standard BLEU scores are
`word_bleu` and `corpus_word_bleu`.

All scores lie between 0 and 1 (papers print percent).
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.layout import say_set_aside
from diffusion_lens.analysis.over_facts.intervals import share_interval
from diffusion_lens.analysis.over_facts.study import StudyResult
from diffusion_lens.facts.fact import Fact
from diffusion_lens.records.results import Saved, Table, one_line, shaped, shown_model
from diffusion_lens.settings import checked_arguments
from diffusion_lens.settings.figures import styled

SCORES = {
    "contained": "answer contained in what was written (SMDM's accuracy)",
    "exact": "what was written is the answer (exact match)",
    "character_bleu": "character_bleu (SMDM)",
    "word_bleu": "sentence BLEU on words (sacrebleu)",
}


def check_score(score: str) -> None:
    """Raise a `ValueError` unless the score is one of `SCORES`."""
    if score not in SCORES:
        raise ValueError(f"there is no score {score!r}; choose one of {', '.join(SCORES)}")


@checked_arguments
def contained(reference: str, generation: str) -> bool:
    """Whether the generation contains the reference, ignoring case and outer spaces (SMDM's accuracy)."""
    return _plain(reference) in _plain(generation)


@checked_arguments
def exact(reference: str, generation: str) -> bool:
    """Whether the generation equals the reference, ignoring outer spaces."""
    return generation.strip() == reference.strip()


@checked_arguments
def character_bleu(reference: str, generation: str) -> float:
    """SMDM's BLEU: nltk's `sentence_bleu([reference], generation)` on two strings, ignoring case and outer spaces.

    The score is the geometric mean of the precisions of 1 to 4 characters, times the brevity penalty. As in nltk
    without smoothing (`SmoothingFunction.method0`), a precision of 0 counts as the smallest normal float, so the score
    is almost 0; without a common character it is exactly 0. Equal texts score 1 only if they have 4 characters or more.
    """
    expected, written = _plain(reference), _plain(generation)
    precisions = [_precision(expected, written, n) for n in (1, 2, 3, 4)]
    if not precisions[0]:
        return 0.0
    logs = [math.log(precision or sys.float_info.min) / len(precisions) for precision in precisions]
    return min(1.0, math.exp(1 - len(expected) / len(written))) * math.exp(math.fsum(logs))


@checked_arguments
def word_bleu(reference: str, generation: str) -> float:
    """sacrebleu's BLEU of one text, with tokenizer 13a and exponential smoothing, up to the order that the text allows.

    Raises:
        ImportError: The extra `eval` is not installed.
    """
    score: float = _sacrebleu().sentence_score(generation, [reference]).score
    return min(1.0, score / 100)


@checked_arguments
def corpus_word_bleu(references: Sequence[str], generations: Sequence[str]) -> float:
    """sacrebleu's BLEU of a corpus, with the same settings; n-grams are counted over all texts together.

    Orders that no text reaches are left out: among names, for example, no text may have four words, and sacrebleu's
    default would then score perfect answers 0.

    Raises:
        ValueError: There is not one generation for each reference, or there are none.
        ImportError: The extra `eval` is not installed.
    """
    if len(references) != len(generations) or not references:
        given = f"{len(generations)} generations for {len(references)} references"
        raise ValueError(f"{given}; give one generation for each reference, and at least one")
    score: float = _sacrebleu().corpus_score(list(generations), [list(references)]).score
    return min(1.0, score / 100)


def _plain(text: str) -> str:
    return text.strip().lower()


def _precision(reference: str, generation: str, n: int) -> float:
    """Share of the generation's n-grams of characters that the reference has too (clipped counts, as in BLEU)."""
    texts = (reference, generation)
    expected, written = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in texts)
    return (written & expected).total() / max(1, written.total())


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ImportError("BLEU on words needs sacrebleu: pip install 'diffusion-lens[eval]'") from error
    return BLEU(effective_order=True)


DirectionPair = tuple[str | None, str | None]  # trained, queried

QUESTION = {"p2d": "NtD", "d2p": "DtN"}
TRAINED = {"p2d": "trained name first", "d2p": "trained description first", "both": "trained both ways"}
QUERIED = {"p2d": "queried for the description", "d2p": "queried for the name"}


def cell_name(trained: str | None, queried: str | None) -> str:
    """Both names: `cell_name("p2d", "d2p")` is "p2d reverse = DtN reverse"; facts without directions are "facts".

    Raises:
        ValueError: A direction of training is not "p2d", "d2p", "both" or `None`, or the queried one is "both".
    """
    _check_cell(trained, queried)
    if trained is None and queried is None:
        return "facts"
    if trained is None or queried is None:
        return f"trained {trained or '?'}, queried {queried or '?'}"
    if trained == "both":
        return f"both {queried} = {QUESTION[queried]} both"
    way = "same" if trained == queried else "reverse"
    return f"{trained} {way} = {QUESTION[queried]} {way}"


def cell_meaning(trained: str | None, queried: str | None) -> str:
    """The same in words: "trained name first, queried for the name"; empty for facts without directions."""
    _check_cell(trained, queried)
    if trained is None and queried is None:
        return ""
    training = "trained in a direction not recorded" if trained is None else TRAINED[trained]
    return f"{training}, {'queried in a direction not recorded' if queried is None else QUERIED[queried]}"


def _check_cell(trained: str | None, queried: str | None) -> None:
    if (trained is not None and trained not in TRAINED) or (queried is not None and queried not in QUERIED):
        raise ValueError(
            f"there is no cell (trained={trained!r}, asked={queried!r}): trained= is one of "
            f"{', '.join(map(repr, TRAINED))}, and asked=, the queried direction, is {' or '.join(map(repr, QUERIED))}"
        )


MARKS = {"verified": "", "second-hand": "*"}
SOURCES = {
    "Rai 2025": (
        "Ashish Rai, raishish.github.io, 2025-07-14: SMDM-1028M reverse checkpoint, guidance 0.8, length 52; an "
        "independent replication, 300 questions per cell"
    ),
    "Nie 2024": (
        "Nie et al. 2024, arXiv 2410.18514, as a review of the paper quotes it; SMDM with guidance 0.8, assumed to use "
        "32 steps, the default of evaluate_reverse.py"
    ),
}


@dataclass(frozen=True)
class PublishedNumber:
    """One number of a table.

    Attributes:
        source: Key of `SOURCES`.
        model: Name of the model that was measured.
        cell: Trained direction and queried direction.
        steps: Number of denoising steps; `None` for models that write from left to right.
        score: "contained" or "character_bleu", as SMDM's numbers are computed; for other models that is not known.
        value: Share between 0 and 1.
        certainty: "verified" (read in the source) or "second-hand" (another public text quotes it).
    """

    source: str
    model: str
    cell: DirectionPair
    steps: int | None
    score: str
    value: float
    certainty: str

    @property
    def label(self) -> str:
        """The model and the source."""
        return f"{self.model} ({self.source})"


NTD_SAME, DTN_REVERSE = ("p2d", "p2d"), ("p2d", "d2p")
DTN_SAME, NTD_REVERSE = ("d2p", "d2p"), ("d2p", "p2d")

# Percent by number of steps, in the order of the table.
_RAI_CELLS = (DTN_SAME, NTD_REVERSE, NTD_SAME, DTN_REVERSE)
_RAI = {
    1: (91.3, 0, 0, 40.3),
    2: (97, 0.7, 2.3, 79),
    4: (96.3, 17, 25, 87.7),
    8: (97.3, 27.3, 37.7, 87.3),
    16: (98, 31, 42, 88.3),
    32: (97.7, 29.7, 43, 90),
}
_NIE = (
    ("SMDM-1028M", DTN_REVERSE, 32, "contained", 0.92),
    ("SMDM-1028M", NTD_REVERSE, 32, "contained", 0.37),
    ("SMDM-1028M", NTD_REVERSE, 32, "character_bleu", 0.67),
    ("GPT-3 175B", DTN_REVERSE, None, "contained", 0.0),
    ("GPT-3 175B", NTD_REVERSE, None, "contained", 0.0),
    ("Llama-2 13B", DTN_REVERSE, None, "contained", 0.0),
)
PUBLISHED = (
    *(
        PublishedNumber("Rai 2025", "SMDM-1028M", cell, steps, "contained", round(percent / 100, 3), "verified")
        for steps, row in _RAI.items()
        for cell, percent in zip(_RAI_CELLS, row, strict=True)
    ),
    *(
        PublishedNumber("Nie 2024", model, cell, steps, score, value, "second-hand")
        for model, cell, steps, score, value in _NIE
    ),
)


def published_rows(cell: DirectionPair, score: str) -> dict[str, dict[int | None, PublishedNumber]]:
    """The published numbers of a cell: a row for each model and source, by number of steps."""
    rows: dict[str, dict[int | None, PublishedNumber]] = {}
    for number in PUBLISHED:
        if number.cell == cell and number.score == score:
            rows.setdefault(number.label, {})[number.steps] = number
    return rows


class Share(NamedTuple):
    """The mean of a score over the questions of a cell, the ends of its interval, and the numbers behind them."""

    mean: float
    low: float
    high: float
    questions: int
    units: int  # People whom the questions are about; a question that names nobody counts as one.


def steps_label(steps: int | None) -> str:
    """The head of a column."""
    return "left to right" if steps is None else f"{steps} step{'s' * (steps > 1)}"


@dataclass(frozen=True, eq=False)
class Reply(Saved):
    """The texts that a model wrote for one fact, one for each number of steps, and their scores.

    Attributes:
        fact: Id of the fact.
        written: Texts after the prompt, without special tokens.
        contained, exact, character_bleu: Scores of each text, see `evaluation.scores`.
    """

    KIND = "reply"
    AXES = (("step", "written"),)

    fact: str
    written: list[str]
    contained: Bool[Tensor, "step"]
    exact: Bool[Tensor, "step"]
    character_bleu: Float[Tensor, "step"]

    __repr__ = one_line

    @classmethod
    def to(cls, fact: Fact, written: Sequence[str]) -> "Reply":
        """The reply to a fact, with its scores."""
        return cls(
            fact=fact.id,
            written=list(written),
            contained=torch.tensor([contained(fact.answer, text) for text in written]),
            exact=torch.tensor([exact(fact.answer, text) for text in written]),
            character_bleu=torch.tensor([character_bleu(fact.answer, text) for text in written], dtype=torch.float64),
        )

    def equals(self, other: "Reply") -> bool:
        """Whether the texts are the same."""
        return self.written == other.written


@dataclass(frozen=True, eq=False, repr=False)
class Recall(StudyResult[Reply]):
    """The texts that a model wrote for its facts, and their scores, see `evaluation.scores`.

    Columns of the data frame: fact, steps, trained, asked, prompt, answer, written, contained, exact,
    character_bleu.

    Attributes:
        ids: The fact of each row.
        steps: Number of denoising steps of each column; `None` is from left to right, one step per token.
        written: Texts after the prompt by fact and number of steps, without special tokens.
        record: Settings, all facts of the study by id, those whose answer is longer than its canvas (`too_long`), those
            that the model cannot be queried for (`set_aside`), model, weights' hash, versions.
    """

    ids: list[str]
    steps: list[int | None]
    written: list[list[str]]
    contained: Bool[Tensor, "fact step"]
    exact: Bool[Tensor, "fact step"]
    character_bleu: Float[Tensor, "fact step"]
    record: dict[str, Any]

    KIND = "recall"
    SHOWS = "the share of facts that the model recalls, by the number of denoising steps"
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        "facts": dict[str, dict[str, Any]],
        "set_aside": dict[str, str],
        "too_long": list[str],
        "seed": int,
        "model": str,
    }
    FACT_FILE = Reply
    AXES = (("fact", "ids"), ("step", "steps"), ("fact step", "written"))

    def _check(self) -> None:
        super()._check()
        for fact in self.facts:
            hash((fact.trained, fact.asked, fact.person))

    @classmethod
    def of(cls, results: Mapping[str, Reply], record: dict[str, Any]) -> "Recall":
        """One result from the replies to all facts."""
        steps, written = record["steps"], [reply.written for reply in results.values()]
        dtypes = {"contained": torch.bool, "exact": torch.bool, "character_bleu": torch.float64}
        scores = {
            name: torch.stack([torch.empty(len(steps), dtype=dtype), *(getattr(r, name) for r in results.values())])[1:]
            for name, dtype in dtypes.items()
        }
        return cls(ids=list(results), steps=steps, written=written, **scores, record=record)

    def by_fact(self) -> dict[str, Reply]:
        """The inverse of `of`."""
        columns = (self.ids, self.written, self.contained, self.exact, self.character_bleu)
        return {row[0]: Reply(*row) for row in zip(*columns, strict=True)}

    @property
    def facts(self) -> list[Fact]:
        """The fact of each row."""
        return [Fact(**self.record["facts"][fact_id], id=fact_id) for fact_id in self.ids]

    @property
    def cells(self) -> dict[DirectionPair, list[int]]:
        """The rows of each (trained direction, queried direction)."""
        cells: dict[DirectionPair, list[int]] = {}
        for row, fact in enumerate(self.facts):
            cells.setdefault((fact.trained, fact.asked), []).append(row)
        return cells

    def scores(self, score: str = "contained") -> Float[Tensor, "fact step"]:
        """A score of every text, between 0 and 1: a key of `SCORES`, of which "word_bleu" needs the extra `eval`.

        Raises:
            ValueError: There is no such score.
        """
        check_score(score)
        if score == "word_bleu":
            rows = zip(self.facts, self.written, strict=True)
            bleu = [[word_bleu(fact.answer, text) for text in texts] for fact, texts in rows]
            return torch.tensor(bleu, dtype=torch.float64).reshape(self.contained.shape)
        scores: Tensor = getattr(self, score)
        return scores.double()

    def table(self, score: str = "contained", level: float = 0.95) -> dict[DirectionPair, dict[int | None, Share]]:
        """The mean of a score by cell and steps, with its confidence interval.

        It is Wilson's interval, in which questions about one person count as much as their answers are independent.
        """
        scores, clusters = self.scores(score), self.clusters
        table: dict[DirectionPair, dict[int | None, Share]] = {}
        for cell, rows in self.cells.items():
            people = [clusters[row] for row in rows]
            low, high = share_interval(scores[rows], people, level)
            columns = zip(scores[rows].mean(dim=0).tolist(), low.tolist(), high.tolist(), strict=True)
            table[cell] = {
                steps: Share(*column, len(rows), len(set(people)))
                for steps, column in zip(self.steps, columns, strict=True)
            }
        return table

    def corpus_bleu(self) -> dict[DirectionPair, dict[int | None, float]]:
        """sacrebleu's corpus BLEU by cell and steps, between 0 and 1; needs the extra `eval`."""
        facts = self.facts
        return {
            cell: {
                steps: corpus_word_bleu([facts[row].answer for row in rows], [self.written[row][i] for row in rows])
                for i, steps in enumerate(self.steps)
            }
            for cell, rows in self.cells.items()
        }

    def _table(self) -> Table:
        facts = self.facts
        of_facts = {
            name: shaped([getattr(fact, name) for fact in facts], -1, 1)
            for name in ("trained", "asked", "prompt", "answer")
        }
        texts = shaped([text for row in self.written for text in row], len(facts), len(self.steps))
        scores = {name: getattr(self, name) for name in ("contained", "exact", "character_bleu")}
        return Table.of_cells({"fact": self.ids, "steps": self.steps}, {**of_facts, "written": texts, **scores})

    def to_text(self, score: str = "contained", level: float = 0.95) -> str:
        """The table in percent, with both names of each cell, intervals, counts, and the published numbers."""
        table, steps, record = self.table(score, level), self.steps, self.record
        lines = [
            f"{shown_model(record)}: {SCORES[score]}, percent, with {100 * level:g} % intervals",
            f"length {record['length']}, sampler {record['sampler']['name']}, guidance {record['cfg_scale']:g}, "
            f"temperature {record['temperature']:g}, seed {record['seed']}, {record['dtype']}, "
            f"weights {record['weights_sha256'][:12]}",
        ]
        if record["too_long"]:
            lines.append(f"{len(record['too_long'])} of {len(record['facts'])} answers do not fit on the canvas")
        if record["set_aside"]:
            lines.append(say_set_aside(record["set_aside"]))
        shown: dict[str, PublishedNumber] = {}
        for cell, shares in table.items():
            first = next(iter(shares.values()))
            people = f" about {first.units} people" if first.units < first.questions else ""
            meaning = f" ({cell_meaning(*cell)})" if cell_meaning(*cell) else ""
            lines += ["", f"{cell_name(*cell)}{meaning}, n = {first.questions}{people}"]
            lines.append(_line("", [steps_label(column) for column in steps]))
            lines.append(_line(shown_model(record), [f"{100 * shares[column].mean:.1f}" for column in steps]))
            lines.append(_line("", [_interval(shares[column]) for column in steps]))
            for label, row in published_rows(cell, score).items():
                if any(column in row for column in steps):
                    lines.append(_line(label, [_published(row.get(column)) for column in steps]))
                    shown |= {f"{number.source} {number.certainty}": number for number in row.values()}
                elif list(steps) == [None]:
                    # The published number at most steps, beside a model that writes in order.
                    last = row[max(filter(None, row))]
                    lines.append(_line(label, [f"{_published(last)} at {steps_label(last.steps)}"]))
                    shown[f"{last.source} {last.certainty}"] = last
        if any(math.isnan(share.low) for shares in table.values() for share in shares.values()):
            lines += ["", "A cell of one fact or one person has no interval: there is nothing to compare it with"]
        sources = {number.source: SOURCES[number.source] for number in shown.values()}
        marks = {MARKS[number.certainty]: number.certainty for number in shown.values() if MARKS[number.certainty]}
        if sources:
            lines += ["", "Published numbers, of the models named, on Berglund's facts:"]
            lines += [f"  {source}: {text}" for source, text in sources.items()]
            lines += [f"  {mark} {certainty}, not read in the source" for mark, certainty in marks.items()]
        return "\n".join(lines)

    @styled
    def plot(self, score: str = "contained", level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """One line per cell over equally spaced steps, with its intervals; published numbers are dashed.

        Returns the matplotlib axes.

        Raises:
            ValueError: The result contains no fact.
        """
        table, steps = self.table(score, level), self.steps
        if not table:
            raise ValueError("there is no curve to draw: the table is empty, because the model was queried for no fact")
        ax = plots.one_axes(ax, width=7.2, height=3.6)
        legend: dict[str, Any] = {}
        markers: dict[str, str] = {}
        for i, (cell, shares) in enumerate(table.items()):
            look, plotted = plots.look(i, len(table)), [shares[column] for column in steps]
            # Shifts the cells, so that equal values do not hide one another.
            offset = 0.06 * (i - (len(table) - 1) / 2)
            legend[f"{cell_name(*cell)} (n = {plotted[0].questions})"] = ax.errorbar(
                [x + offset for x in range(len(steps))],
                [share.mean for share in plotted],
                # NaN ends and negative lengths, which rounding can give, become bars of length 0.
                yerr=[
                    [max(0.0, share.mean - share.low) for share in plotted],
                    [max(0.0, share.high - share.mean) for share in plotted],
                ],
                color=look.colour,
                marker=look.marker,
                markersize=4,
                capsize=2,
            )
            for label, row in published_rows(cell, score).items():
                if points := [(x + offset, row[column].value) for x, column in enumerate(steps) if column in row]:
                    marker = markers.setdefault(label, "x+*12"[len(markers) % 5])
                    ax.plot(*zip(*points, strict=True), color=look.colour, linestyle="--", marker=marker, alpha=0.6)
        for label, marker in markers.items():
            (legend[label],) = ax.plot([], [], color="0.4", linestyle="--", marker=marker)
        ax.set_xlim(-0.5, len(steps) - 0.5)
        ax.set_ylim(-0.03, 1.03)
        plots.label_columns(ax, [steps_label(column) for column in steps])
        title = title or f"{shown_model(self.record)}: recall by steps"
        plots.label_axes(ax, "", SCORES[score], title, parse_math=False)
        plots.legend_outside(ax, legend)
        return ax


def _line(name: str, entries: Sequence[str]) -> str:
    return f"  {name:<26}{''.join(f'{entry:>15}' for entry in entries)}".rstrip()


def _interval(share: Share) -> str:
    """The ends of the interval, or why there is none: a single fact or person."""
    if math.isnan(share.low):
        return "one fact" if share.questions == 1 else "one person"
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def _published(number: PublishedNumber | None) -> str:
    return "-" if number is None else f"{100 * number.value:.1f}{MARKS[number.certainty]}"
