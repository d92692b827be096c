"""Studies over facts that may stop at any moment, and be split among processes.

A folder holds `run.json`, which describes the study (its settings, the facts, the model with the hash of its weights
and the hooks on it), and one file per fact, which is written whole or not at all. So whatever ends a call, the next one
continues where it ended. Each file is marked with a hash of its study and its fact: a file that another study left, or
that was renamed, is refused.

Several processes may fill one folder, each with its shard of the facts: facts i, i + n, i + 2n, ... of n shards.

The random numbers of a fact come from its own seed, made from the study's seed and the fact's id. So no number depends
on who computes it, in what order, or beside which other facts. Facts that share a forward pass come in batches that are
planned for the whole study, and a batch is always computed whole: its numbers keep their last bit too.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from tqdm.auto import tqdm

from diffusion_lens.facts import Fact
from diffusion_lens.identity import require_identified
from diffusion_lens.records import NOT_COMPARED, mark_of, part_of_run, read_run, require_same_run
from diffusion_lens.seeds import own_seed
from weight_conversion import as_json, write_json

Shard = tuple[int, int] | str


@runtime_checkable
class Result(Protocol):
    """What is saved of a fact: anything that writes itself into one file, by `records.save_result`."""

    def save(self, path: str | Path) -> Path: ...


R = TypeVar("R", bound=Result)
T = TypeVar("T")


@dataclass(frozen=True)
class FactFolder:
    """The folder of one study.

    Attributes:
        path: The folder.
        record: What the study is, as `run.json` holds it; under "facts" are all its facts, by id.
    """

    path: Path
    record: dict[str, Any]

    @classmethod
    def start(cls, path: str | Path, record: Mapping[str, Any]) -> "FactFolder":
        """Make a folder for this study, or continue the one that is there.

        Raises:
            ValueError: The folder holds another study; the message says how they differ. Or a hook cannot be told from
                others.
            TypeError: The record has an entry that JSON cannot hold.
        """
        require_identified(record, str(path))
        file, described = Path(path) / "run.json", as_json(record)
        if not file.exists():
            write_json(described, file)
        folder = cls.open(path)
        require_same_run(folder.record, described, str(path))
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "FactFolder":
        """The folder of a study that was started.

        Raises:
            FileNotFoundError: No study was started in it.
            ValueError: Its `run.json` does not describe a study over facts.
        """
        file = Path(path) / "run.json"
        if not file.exists():
            raise FileNotFoundError(f"{path} holds no run: there is no {file}")
        record = read_run(file)
        if not isinstance(record.get("facts"), dict):
            raise ValueError(f"{file} does not describe a run over facts: it names none. Name another folder")
        return cls(Path(path), record)

    def file(self, fact_id: str) -> Path:
        """The file of a fact, named after its id, as far as a file name can hold it, and a hash of the whole id."""
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", fact_id)[:60]
        return self.path / f"{name}.{_digest(fact_id)[:12]}.safetensors"

    def save(self, fact_id: str, result: Result) -> None:
        """Save a fact's result, marked as this study's."""
        with part_of_run(self._mark(fact_id)):
            result.save(self.file(fact_id))

    def has(self, fact_id: str) -> bool:
        """Whether a fact's result is there.

        Raises:
            ValueError: The file is cut off, or belongs to another study or fact.
        """
        file = self.file(fact_id)
        if not file.exists():
            return False
        if (mark := mark_of(file)) != self._mark(fact_id):
            whose = "does not say of which run it is" if mark is None else "is of another run or another fact"
            raise ValueError(
                f"{file} {whose}: its settings, facts, weights or hooks are not those of {self.path / 'run.json'}. "
                "Delete the file, and the fact is computed again, or name another folder"
            )
        return True

    def results(self, load: Callable[[Path], R]) -> Iterator[tuple[str, R]]:
        """The results that are there so far, by id, in the order of the study's facts.

        Raises:
            ValueError: A file is cut off, or belongs to another study or fact.
        """
        return ((fact_id, load(self.file(fact_id))) for fact_id in self.record["facts"] if self.has(fact_id))

    def _mark(self, fact_id: str) -> str:
        return _digest([self._study_digest, fact_id])

    @cached_property
    def _study_digest(self) -> str:
        return _digest({name: value for name, value in self.record.items() if name not in NOT_COMPARED})


def work_through_batches(
    batches: Sequence[Sequence[str]],
    compute: Callable[[Sequence[str]], Sequence[R]],
    load: Callable[[Path], R],
    folder: FactFolder | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, R]]:
    """Each fact's result: read where the folder has it, otherwise computed and, if there is a folder, saved there.

    The facts of a batch are computed together, and each is saved in a file of its own. A batch that was saved in part
    is computed again as a whole, and the missing files are written.

    Raises:
        ValueError: A file is cut off or belongs to another study; raised before anything is computed.
    """
    if folder:
        for fact_id in chain.from_iterable(batches):
            folder.has(fact_id)
    with tqdm(total=sum(map(len, batches)), desc="facts", unit="fact", disable=not progress) as bar:
        for batch in batches:
            missing = [fact_id for fact_id in batch if not folder or not folder.has(fact_id)]
            results = compute(batch) if missing or not folder else [load(folder.file(fact_id)) for fact_id in batch]
            for fact_id, result in zip(batch, results, strict=True):
                if folder and fact_id in missing:
                    folder.save(fact_id, result)
            bar.update(len(batch))
            yield from zip(batch, results, strict=True)


def name_facts(facts: Sequence[Fact]) -> dict[str, Fact]:
    """Facts by id, in their order; a fact without an id is named after a hash of its content.

    Raises:
        ValueError: There are no facts, or two have one id.
    """
    if not facts:
        raise ValueError("no facts were given")
    named: dict[str, Fact] = {}
    for fact in facts:
        fact_id = fact.id or f"fact-{_digest(content(fact))[:16]}"
        if fact_id in named:
            raise ValueError(
                f"two facts are called {fact_id!r}: {named[fact_id].prompt!r} and {fact.prompt!r}. Give each an id of "
                "its own, and each fact once"
            )
        named[fact_id] = replace(fact, id=fact_id)
    return named


def content(fact: Fact) -> dict[str, Any]:
    """A fact without its id, for a record."""
    return {name: value for name, value in asdict(fact).items() if name != "id"}


def fact_seed(seed: int, fact_id: str) -> int:
    """The fact's own seed, below 2^32, as `numpy.random.RandomState` takes it; the same on every machine."""
    return own_seed(seed, fact_id, bits=32)


def pick_shard(ids: Sequence[T], shard: Shard) -> list[T]:
    """The ids, or batches of ids, i, i + n, i + 2n, ... of shard (i, n), also written "i/n"; i counts from 0.

    Raises:
        ValueError: There is no such shard.
    """
    if isinstance(shard, str):
        numbers = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
        index, count = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    else:
        index, count = shard
    if not 0 <= index < count:
        raise ValueError(f"shard={shard!r}; of 4 shards the first is '0/4' or (0, 4), the last '3/4' or (3, 4)")
    return list(ids[index::count])


def join_parts(
    parts: Sequence[tuple[str, Mapping[str, Any], Mapping[str, T]]], same: Callable[[T, T], bool]
) -> tuple[dict[str, Any], dict[str, T]]:
    """The record of the study that all parts belong to, and their results by fact, in the order of its facts.

    Args:
        parts: The name of each part for messages, its record, and its results by fact.
        same: Whether two results of one fact are the same.

    Raises:
        ValueError: There are no parts, they belong to different studies, a fact is in none of them, or two parts differ
            in a fact.
    """
    if not parts:
        raise ValueError("there is nothing to merge")
    record = dict(parts[0][1])
    joined: dict[str, T] = {}
    for where, own_record, results in parts:
        require_same_run(record, own_record, where)
        for fact_id, result in results.items():
            if not same(result, joined.setdefault(fact_id, result)):
                raise ValueError(f"the fact {fact_id!r} came out differently in {where} than in a part before it")
    if missing := [fact_id for fact_id in record["facts"] if fact_id not in joined]:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{len(missing)} of {len(record['facts'])} facts are not there: {shown}. Run their shards, or go on with "
            "those that were interrupted"
        )
    return record, {fact_id: joined[fact_id] for fact_id in record["facts"]}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(as_json(value), sort_keys=True).encode()).hexdigest()
