"""Long work over facts that may stop at any moment, and be split among processes.

A folder holds `run.json`, which says what the work is (its settings, the facts, the model with the hash of its weights
and the hooks on it), and one file a fact, which is there whole or not at all. So whatever ends a run, the next one goes
on where it ended. Each file is marked with a hash of its run and its fact: one that another run has left, or that was
renamed, is refused.

Several processes may fill one folder, each with its shard of the facts: facts i, i + n, i + 2n, ... of n shards.

What is drawn for a fact is drawn from its own seed, made from the run's seed and the fact's id. So no number depends on
who computes it, in what order, or beside which other facts. Facts that share a forward pass come in batches planned for
the whole run, and a batch is always computed whole: its numbers keep their last bit too, whoever computes it.
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
    """What work on a fact leaves: anything that writes itself into one file, by `records.save_result`."""

    def save(self, path: str | Path) -> Path: ...


R = TypeVar("R", bound=Result)
T = TypeVar("T")


@dataclass(frozen=True)
class FactFolder:
    """One folder of results.

    Attributes:
        path: the folder.
        run: what the work is, as `run.json` holds it; under "facts" are all facts of it, by id.
    """

    path: Path
    run: dict[str, Any]

    @classmethod
    def start(cls, path: str | Path, run: Mapping[str, Any]) -> "FactFolder":
        """Make a folder for this run, or go on with the one that is there.

        Raises:
            ValueError: the folder holds another run; the text says in what it differs. Or a hook cannot be told from
                others.
            TypeError: the run is told by something that no JSON holds.
        """
        require_identified(run, str(path))
        record, asked = Path(path) / "run.json", as_json(run)
        if not record.exists():
            write_json(asked, record)
        folder = cls.open(path)
        require_same_run(folder.run, asked, str(path))
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "FactFolder":
        """A folder that is there.

        Raises:
            FileNotFoundError: no run was started in it.
            ValueError: its `run.json` does not describe a run over facts.
        """
        record = Path(path) / "run.json"
        if not record.exists():
            raise FileNotFoundError(f"{path} holds no run: there is no {record}")
        run = read_run(record)
        if not isinstance(run.get("facts"), dict):
            raise ValueError(f"{record} does not describe a run over facts: it names none. Name another folder")
        return cls(Path(path), run)

    def file(self, fact_id: str) -> Path:
        """Where a fact's result is kept: its id as far as a file name can hold it, and a hash of the whole."""
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", fact_id)[:60]
        return self.path / f"{name}.{_digest(fact_id)[:12]}.safetensors"

    def save(self, fact_id: str, result: Result) -> None:
        """Keep a fact's result, marked as this run's."""
        with part_of_run(self._mark(fact_id)):
            result.save(self.file(fact_id))

    def has(self, fact_id: str) -> bool:
        """Whether a fact's result is there.

        Raises:
            ValueError: the file is cut off, or it is of another run or fact.
        """
        file = self.file(fact_id)
        if not file.exists():
            return False
        if (found := mark_of(file)) != self._mark(fact_id):
            whose = "does not say of which run it is" if found is None else "is of another run or another fact"
            raise ValueError(
                f"{file} {whose}: its settings, facts, weights or hooks are not those of {self.path / 'run.json'}. "
                "Delete the file, and the fact is computed again, or name another folder"
            )
        return True

    def results(self, load: Callable[[Path], R]) -> Iterator[tuple[str, R]]:
        """What is there so far, by id, in the order of the run's facts.

        Raises:
            ValueError: as in `has`.
        """
        return ((fact_id, load(self.file(fact_id))) for fact_id in self.run["facts"] if self.has(fact_id))

    def _mark(self, fact_id: str) -> str:
        return _digest([self._run_digest, fact_id])

    @cached_property
    def _run_digest(self) -> str:
        return _digest({name: value for name, value in self.run.items() if name not in NOT_COMPARED})


def work_through(
    ids: Sequence[str],
    work: Callable[[str], R],
    load: Callable[[Path], R],
    folder: FactFolder | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, R]]:
    """Each fact's result: read where the folder has it, otherwise made and, if there is a folder, saved there."""
    return work_through_batches([[fact_id] for fact_id in ids], lambda one: [work(one[0])], load, folder, progress)


def work_through_batches(
    batches: Sequence[Sequence[str]],
    work: Callable[[Sequence[str]], Sequence[R]],
    load: Callable[[Path], R],
    folder: FactFolder | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, R]]:
    """As `work_through`, with the facts of a batch computed together and each saved as a file of its own.

    A batch that was saved in part is computed again as a whole, and what was missing of it is saved.

    Raises:
        ValueError: a file of another run, or one that is cut off; before any work.
    """
    if folder:
        for fact_id in chain.from_iterable(batches):
            folder.has(fact_id)
    with tqdm(total=sum(map(len, batches)), desc="facts", unit="fact", disable=not progress) as bar:
        for batch in batches:
            missing = [fact_id for fact_id in batch if not folder or not folder.has(fact_id)]
            results = work(batch) if missing or not folder else [load(folder.file(fact_id)) for fact_id in batch]
            for fact_id, result in zip(batch, results, strict=True):
                if folder and fact_id in missing:
                    folder.save(fact_id, result)
            bar.update(len(batch))
            yield from zip(batch, results, strict=True)


def name_facts(facts: Sequence[Fact]) -> dict[str, Fact]:
    """Facts by id, in their order; one without an id is named after a hash of its content.

    Raises:
        ValueError: no facts, or two with one id.
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
    """Ids, or batches of them, i, i + n, i + 2n, ... of shard (i, n), also written "i/n"; i counts from 0.

    Raises:
        ValueError: no such shard.
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
    """The run that all parts belong to, and what they hold together, by fact in the order of the run.

    Args:
        parts: of each, its name for messages, its run, and what it holds by fact.
        same: whether two results of one fact are one.

    Raises:
        ValueError: no parts, parts of different runs, facts that no part holds, or a fact that came out in two ways.
    """
    if not parts:
        raise ValueError("there is nothing to merge")
    run = dict(parts[0][1])
    found: dict[str, T] = {}
    for where, made, held in parts:
        require_same_run(run, made, where)
        for fact_id, result in held.items():
            if not same(result, found.setdefault(fact_id, result)):
                raise ValueError(f"the fact {fact_id!r} came out differently in {where} than in a part before it")
    if missing := [fact_id for fact_id in run["facts"] if fact_id not in found]:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{len(missing)} of {len(run['facts'])} facts are not there: {shown}. Run their shards, or go on with "
            "those that were interrupted"
        )
    return run, {fact_id: found[fact_id] for fact_id in run["facts"]}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(as_json(value), sort_keys=True).encode()).hexdigest()
