"""Recall of facts by number of denoising steps.

A fact counts as recalled when its answer is contained in the text that the model wrote after the prompt, SMDM's measure
(Nie et al. 2024, arXiv 2410.18514, section 4.3). Stricter scores are computed as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffusion_lens.analysis.bootstrap import bootstrap_interval
from diffusion_lens.analysis.over_facts import StudyResult
from diffusion_lens.display import Table, shaped
from diffusion_lens.evaluation.naming import DirectionPair
from diffusion_lens.evaluation.recall_curves import recall_curves
from diffusion_lens.evaluation.recall_table import Share, recall_table
from diffusion_lens.evaluation.scores import (
    character_bleu,
    check_score,
    contained,
    corpus_word_bleu,
    exact,
    word_bleu,
)
from diffusion_lens.facts import Fact
from diffusion_lens.records import load_fields, one_line, save_fields, shown_model


@dataclass(frozen=True, eq=False)
class Reply:
    """The texts that a model wrote for one fact, one for each number of steps, and their scores.

    Attributes:
        fact: Id of the fact.
        written: Texts after the prompt, without special tokens.
        contained, exact, character_bleu: Scores of each text, see `evaluation.scores`.
    """

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

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "reply", self)

    @classmethod
    def load(cls, path: str | Path) -> "Reply":
        """Read what `save` wrote."""
        return load_fields(path, "reply", cls)

    def equals(self, other: "Reply") -> bool:
        """Whether the texts are the same."""
        return self.written == other.written


@dataclass(frozen=True, eq=False, repr=False)
class Recall(StudyResult[Reply]):
    """The texts that a model wrote for its facts, and their scores.

    Columns of the data frame: fact, steps, trained, asked, prompt, answer, written, contained, exact,
    character_bleu.

    Attributes:
        ids: The fact of each row.
        steps: Number of denoising steps of each column; `None` is from left to right, one step per token.
        written: Texts after the prompt by fact and number of steps, without special tokens.
        contained: Bool[fact step], whether the text contains the answer.
        exact: Bool[fact step], whether the text is the answer.
        character_bleu: Float[fact step], SMDM's BLEU of the text.
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

    KIND: ClassVar[str] = "recall"
    FACT_FILE: ClassVar[type[Any]] = Reply

    @classmethod
    def of(cls, results: Mapping[str, Reply], record: dict[str, Any]) -> "Recall":
        """One result from the replies to all facts."""
        rows = list(results.values())
        empty = torch.empty(0, len(record["steps"]))
        return cls(
            ids=list(results),
            steps=record["steps"],
            written=[reply.written for reply in rows],
            contained=torch.stack([reply.contained for reply in rows]) if rows else empty.bool(),
            exact=torch.stack([reply.exact for reply in rows]) if rows else empty.bool(),
            character_bleu=torch.stack([reply.character_bleu for reply in rows]) if rows else empty.double(),
            record=record,
        )

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
        """A score of every text, between 0 and 1.

        Args:
            score: "contained", "exact", "character_bleu", or "word_bleu", which needs the extra `eval`.

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

        Questions about one person are not independent. So people are resampled if all facts of a cell name their
        person, and questions otherwise.
        """
        scores, facts = self.scores(score), self.facts
        table: dict[DirectionPair, dict[int | None, Share]] = {}
        for cell, rows in self.cells.items():
            units = _by_person(scores[rows], [facts[row].person for row in rows])
            # If people have different numbers of questions, a resampled share may be above 1.
            low, high = (end.clamp(0, 1) for end in bootstrap_interval(units, level, self.record["seed"]))
            columns = zip(scores[rows].mean(dim=0).tolist(), low.tolist(), high.tolist(), strict=True)
            table[cell] = {
                steps: Share(*column, len(rows), len(units)) for steps, column in zip(self.steps, columns, strict=True)
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
        """The table with both names of each cell, intervals, counts, and the published numbers."""
        return recall_table(self.table(score, level), self.steps, score, level, self.record)

    def plot(self, score: str = "contained", level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """The table as curves over steps, with published numbers dashed. Returns the matplotlib axes.

        Raises:
            ValueError: The result contains no fact.
        """
        return recall_curves(
            self.table(score, level),
            self.steps,
            score,
            ax=ax,
            title=title or f"{shown_model(self.record)}: recall by steps",
        )


def _by_person(scores: Float[Tensor, "entry step"], people: Sequence[str]) -> Float[Tensor, "fact step"]:
    """Scores with one row per person and an unchanged mean; the scores as given if a question names no person."""
    if not all(people):
        return scores
    names = list(dict.fromkeys(people))
    totals = scores.new_zeros(len(names), scores.shape[1])
    totals.index_add_(0, torch.tensor([names.index(person) for person in people]), scores)
    # Divided by the mean number of questions per person, so that people with more questions count more.
    return totals * (len(names) / len(people))
