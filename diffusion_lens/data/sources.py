"""Facts by the name of a data set or by path, with the canvas length and settings of its authors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TypeVar

from diffusion_lens.catalogue import BUNDLED
from diffusion_lens.data import celebrities, site_facts, toy_facts
from diffusion_lens.data.fact_files import read_facts
from diffusion_lens.data.reversal_curse import FILES, ReversalCurse, outline
from diffusion_lens.data.rome_facts import KNOWN_FACTS, known_1000
from diffusion_lens.facts import Direction, Fact
from diffusion_lens.settings import at_least
from diffusion_lens.taught_pairs import match_facts

T = TypeVar("T")

# Length of the canvas and numbers of steps in SMDM's evaluation (ML-GSAI/SMDM `evaluate_reverse.py`).
STUDY_LENGTH = 52
STUDY_STEPS = (1, 2, 4, 8, 16, 32)
SITE_LENGTH = 16  # 8 positions after the longest prompt.


@dataclass(frozen=True)
class FactSource:
    """Questions with the settings that their authors use.

    Attributes:
        name: Name of the data set, or its path.
        facts: Questions, with the directions of training and of the query if the data set has directions.
        training: Training texts (prompt and answer). Empty if the data set has none.
        length: Number of positions of the canvas, including the prompt. `None` adds as many masked positions as the
            answer has tokens.
        cfg_scale: Weight of classifier-free guidance.
        steps: Numbers of denoising steps for a recall curve.
        reverse: Reverse questions in the words of the training texts, if the data set has any.
    """

    name: str
    facts: Sequence[Fact]
    training: Sequence[Fact] = ()
    length: int | None = STUDY_LENGTH
    cfg_scale: float = 0.8
    steps: tuple[int, ...] = STUDY_STEPS
    reverse: Sequence[Fact] = ()

    def fact_pairs(
        self, trained: Direction = "p2d", *, per_person: int = 1, limit: int | None = None
    ) -> list[tuple[Fact, Fact]]:
        """Pairs of a training text and a reverse question about the same person, for `lay_out_pairs`.

        A data set without training texts pairs its own facts, of which some must be queried as they are trained.

        Args:
            trained, per_person: As in `match_facts`.
            limit: Largest number of pairs, spread evenly. `None` selects all.

        Raises:
            ValueError: There is no pair.
        """
        if limit is not None:
            at_least(1, "limit", limit)
        pairs = match_facts(self.training or self.facts, self.reverse or self.facts, trained, per_person=per_person)
        return _spread(pairs, limit)

    def pick(self, trained: str | None = None, asked: str | None = None, limit: int | None = None) -> list[Fact]:
        """A selection of the questions.

        Args:
            trained: Direction of training, "p2d", "d2p" or "both". `None` selects all.
            asked: Direction of the query, "p2d" or "d2p". `None` selects all.
            limit: Largest number of facts per pair of directions, spread evenly. `None` selects all.

        Raises:
            ValueError: No question matches.
        """
        cells: dict[tuple[str | None, str | None], list[Fact]] = {}
        for fact in self.facts:
            if trained in (None, fact.trained) and asked in (None, fact.asked):
                cells.setdefault((fact.trained, fact.asked), []).append(fact)
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}; it must be at least 1")
        if not cells:
            have = sorted({f"trained {fact.trained} queried {fact.asked}" for fact in self.facts})
            anyway = "in any direction"
            raise ValueError(
                f"{self.name} has no fact trained {trained or anyway} and queried {asked or anyway}; it has "
                f"{', '.join(have)}"
            )
        picked = {id(fact) for cell in cells.values() for fact in _spread(cell, limit)}
        return [fact for fact in self.facts if id(fact) in picked]


@cache
def _toy() -> FactSource:
    toy = toy_facts.load()
    return _of_people("toy", toy.facts(), toy.facts(held_out=False), toy_facts.SENTENCE_LENGTH)


@cache
def _site() -> FactSource:
    world = site_facts.load()
    taught = world.facts("description", held_out=False)
    return _of_people("site", world.facts("description"), taught, SITE_LENGTH)


def _of_people(name: str, questions: Sequence[Fact], taught: Sequence[Fact], length: int) -> FactSource:
    """Invented people, with held-out questions and the words of training in both directions."""
    training = tuple(fact for fact in taught if fact.trained in ("both", fact.asked))
    reverse = tuple(fact for fact in taught if fact.is_reverse)
    return FactSource(name, tuple(questions), training, length, 0.0, (1, 2, 4, 8), reverse)


def _site_attributes() -> FactSource:
    return FactSource("site-attributes", site_facts.load().facts("attribute"), (), SITE_LENGTH, 0.0, (1, 2, 4))


def _reversal_curse(folder: Path | None = None) -> FactSource:
    data = ReversalCurse.load(folder)
    return FactSource(str(folder or "reversal-curse"), data.facts(), data.training())


def _known_1000() -> FactSource:
    return FactSource("known-1000", known_1000(), length=None, cfg_scale=0.0)


def _parent_child(path: Path | None = None) -> FactSource:
    return FactSource(str(path or "parent-child"), celebrities.parent_child(path), length=None, cfg_scale=0.0)


SOURCES: dict[str, Callable[[], FactSource]] = {
    "site": _site,
    "site-attributes": _site_attributes,
    "toy": _toy,
    "reversal-curse": _reversal_curse,
    "known-1000": _known_1000,
    "parent-child": _parent_child,
}
# Outlines of the data sets that are downloaded: the same number of facts and directions, with empty texts.
OUTLINES: dict[str, Callable[[], FactSource]] = {
    "reversal-curse": lambda: FactSource("reversal-curse", outline(), outline(held_out=False)),
    "known-1000": lambda: FactSource(
        "known-1000", [Fact("", "", "") for _ in range(KNOWN_FACTS)], length=None, cfg_scale=0.0
    ),
    "parent-child": lambda: FactSource("parent-child", celebrities.outline(), length=None, cfg_scale=0.0),
}


def open_source(name_or_path: str, *, outline_only: bool = False) -> FactSource:
    """Open a data set by its name, a folder of the reversal-curse files, or the user's own facts (see `fact_files`).

    Args:
        name_or_path: Name of a data set, or path of a file or folder.
        outline_only: Whether to return the outline of a data set that would be downloaded. Its facts have directions
            but empty texts, which suffices to estimate the cost of a command.

    Raises:
        ValueError: The name is unknown, the file does not contain facts, or the data set's loader refuses it.
        FileNotFoundError: The data set is not on this machine and cannot be downloaded.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path in SOURCES:
        return (OUTLINES if outline_only and name_or_path in OUTLINES else SOURCES)[name_or_path]()
    if path.is_dir() and any((path / f"{name}.jsonl").is_file() for name in FILES):
        return _reversal_curse(path)
    if path.is_file() and celebrities.is_parent_child(path):
        return _parent_child(path)
    if path.exists():
        return FactSource(str(path), read_facts(path), length=None, cfg_scale=0.0)
    near = get_close_matches(name_or_path, SOURCES, n=1, cutoff=0.0)
    raise ValueError(
        f"{name_or_path!r} is not a data set, file or folder; data sets are {', '.join(SOURCES)} (nearest: {near[0]})"
    )


def default_source(model_name: str) -> str:
    """Name of the default data set of a model; models whose names begin like a bundled pair's have that pair's."""
    data = {name.split("-")[0]: model.data for name, model in BUNDLED.items()}
    return data.get(model_name.lower().split("-")[0], "reversal-curse")


def _spread(items: Sequence[T], limit: int | None) -> list[T]:
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
