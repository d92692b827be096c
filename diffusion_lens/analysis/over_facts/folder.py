"""Studies over facts that can be interrupted at any moment, and split among processes.

The folder of a study contains `run.json`, which describes the study (its settings, its facts, the model with the hash
of its weights, and the hooks on it), and one file per fact. Files are written atomically, so a call resumes where the
last one was interrupted. Each file is marked with a hash of its study and its fact. A file that belongs to another
study, or that was renamed, is refused.

Several processes may fill one folder, each with its shard of the facts. The random numbers of a fact come from its own
seed, which is derived from the study's seed and the fact's id, and facts that share a forward pass form batches, which
are planned for the whole study and always computed completely. So results are identical to the last bit.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from diffusion_lens.facts.fact import Fact
from diffusion_lens.records.identity import require_named_hooks
from diffusion_lens.records.results import NOT_COMPARED, mark_of, part_of_run, read_run, require_same_run
from diffusion_lens.settings import own_seed
from weight_conversion import as_json, write_json

Shard = tuple[int, int] | str

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class FactFolder:
    """The folder of one study, and its description, the content of `run.json`; "facts" lists all its facts, by id."""

    path: Path
    record: dict[str, Any]

    @classmethod
    def start(cls, path: str | Path, record: Mapping[str, Any]) -> "FactFolder":
        """Make a folder for this study, or open the one that exists; errors are those of `begin_folder`."""
        if (Path(path) / "run.json").exists():
            cls.open(path)  # the error of a folder that is no study over facts comes first
        begin_folder(path, record)
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> "FactFolder":
        """The folder of a study that was started; a `FileNotFoundError` if none was, a `ValueError` if its `run.json`
        does not describe a study over facts."""
        file = Path(path) / "run.json"
        if not file.exists():
            raise FileNotFoundError(f"{path} contains no study: there is no {file}")
        record = read_run(file)
        if not isinstance(record.get("facts"), dict):
            raise ValueError(f"{file} does not describe a study over facts: it lists none. Name another folder")
        return cls(Path(path), record)

    def file(self, fact_id: str) -> Path:
        """The file of a fact; its name has the id's permitted characters and a hash of the complete id."""
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", fact_id)[:60]
        return self.path / f"{name}.{_digest(fact_id)[:12]}.safetensors"

    def save(self, fact_id: str, result: Any) -> None:
        """Save a fact's result with the mark of this study and fact, by its `save(path)`."""
        with part_of_run(self._mark(fact_id)):
            result.save(self.file(fact_id))

    def has(self, fact_id: str) -> bool:
        """Whether the folder has a fact's result; a `ValueError` if its file is truncated, or of another study or
        fact."""
        file = self.file(fact_id)
        if not file.exists():
            return False
        if (mark := mark_of(file)) != self._mark(fact_id):
            problem = "does not name its study" if mark is None else "belongs to another study or another fact"
            raise ValueError(
                f"{file} {problem}: its settings, facts, weights or hooks are not those of {self.path / 'run.json'}. "
                "Delete the file to compute the fact again, or name another folder"
            )
        return True

    def results(self, load: Callable[[Path], R]) -> Iterator[tuple[str, R]]:
        """The ids and results of the facts computed so far, in the order of the study's facts."""
        return ((fact_id, load(self.file(fact_id))) for fact_id in self.record["facts"] if self.has(fact_id))

    def _mark(self, fact_id: str) -> str:
        return _digest([self._study_digest, fact_id])

    @cached_property
    def _study_digest(self) -> str:
        return study_digest(self.record)


@dataclass(frozen=True)
class SharedFolder:
    """The folder of a call, for workers that may see it: they recognise it by the digest of the call's record."""

    path: Path  # absolute
    digest: str

    @classmethod
    def of(cls, path: Path, record: Mapping[str, Any]) -> "SharedFolder":
        """The folder at this path, whose `run.json` has this record."""
        return cls(path.absolute(), study_digest(record))

    @property
    def is_here(self) -> bool:
        """Whether this machine has this folder, and not another one or none at its path."""
        try:
            return study_digest(read_run(self.path / "run.json")) == self.digest
        except (OSError, ValueError):
            return False

    def facts(self) -> FactFolder | None:
        """The folder of a study over facts, or `None` where it is not seen."""
        return FactFolder.open(self.path) if self.is_here else None


def begin_folder(path: str | Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write the description of a study to the `run.json` of its folder, or compare it with the one that is there.

    Returns its content. A `ValueError` if the folder belongs to another study (the message lists the differences), or a
    hook cannot be identified.
    """
    require_named_hooks(record, str(path))
    file, described = Path(path) / "run.json", as_json(record)
    if not file.exists():
        write_json(described, file)
    saved = read_run(file)
    require_same_run(saved, described, str(path))
    return saved


def study_digest(record: Mapping[str, Any]) -> str:
    """Hash of a study's description, with which its files are marked."""
    return _digest({name: value for name, value in record.items() if name not in NOT_COMPARED})


def work_through_batches(
    batches: Sequence[Sequence[str]],
    compute: Callable[[Sequence[str]], Sequence[R]],
    load: Callable[[Path], R],
    folder: FactFolder | None = None,
    progress: bool = False,
    unit: str = "fact",
) -> Iterator[tuple[str, R]]:
    """The result of each fact: read from the folder if it is there, otherwise computed and saved there.

    If only some facts of a batch are saved, the whole batch is computed again and the missing files are written. A file
    that is truncated or belongs to another study is refused before anything is computed.
    """
    if folder:
        for fact_id in chain.from_iterable(batches):
            folder.has(fact_id)
    with tqdm(total=sum(map(len, batches)), desc=f"{unit}s", unit=unit, disable=not progress) as bar:
        for batch in batches:
            missing = batch if not folder else [fact_id for fact_id in batch if not folder.has(fact_id)]
            results = compute(batch) if missing or not folder else [load(folder.file(fact_id)) for fact_id in batch]
            for fact_id, result in zip(batch, results, strict=True):
                if folder and fact_id in missing:
                    folder.save(fact_id, result)
            bar.update(len(batch))
            yield from zip(batch, results, strict=True)


def name_facts(facts: Sequence[Fact]) -> dict[str, Fact]:
    """Facts by id, in their order. A fact without an id gets one from a hash of its content."""
    if not facts:
        raise ValueError("no facts were given")
    named: dict[str, Fact] = {}
    for fact in facts:
        fact_id = fact.id or f"fact-{_digest(content(fact))[:16]}"
        if fact_id in named:
            raise ValueError(
                f"two facts are called {fact_id!r}: {named[fact_id].prompt!r} and {fact.prompt!r}. Give each fact its "
                "own id, and each once"
            )
        named[fact_id] = replace(fact, id=fact_id)
    return named


def content(fact: Fact) -> dict[str, Any]:
    """A fact without its id, for a record."""
    return {field.name: getattr(fact, field.name) for field in fields(fact) if field.name != "id"}


def fact_seed(seed: int, fact_id: str) -> int:
    """The fact's own seed, the same on every machine; below 2^32, which `numpy.random.RandomState` requires."""
    return own_seed(seed, fact_id, bits=32)


def pick_shard(ids: Sequence[T], shard: Shard) -> list[T]:
    """The ids, or batches of ids, i, i + n, i + 2n, ... of shard (i, n), also written "i/n"; i counts from 0."""
    if isinstance(shard, str):
        numbers = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
        index, count = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    else:
        index, count = shard
    if not 0 <= index < count:
        raise ValueError(
            f"shard={shard!r} is not a shard; of 4 shards the first is '0/4' or (0, 4), the last '3/4' or (3, 4)"
        )
    return list(ids[index::count])


def join_parts(
    parts: Sequence[tuple[str, Mapping[str, Any], Mapping[str, T]]], same: Callable[[T, T], bool], unit: str = "fact"
) -> tuple[dict[str, Any], dict[str, T]]:
    """The record of the study that all parts belong to, and their results by fact, in the order of its facts.

    A part is its name for messages, its record, and its results by fact; `unit` is what messages call a fact.
    """
    if not parts:
        raise ValueError("there is nothing to merge: name at least one part")
    record = dict(parts[0][1])
    joined: dict[str, T] = {}
    for where, own_record, results in parts:
        require_same_run(record, own_record, where)
        for fact_id, result in results.items():
            if not same(result, joined.setdefault(fact_id, result)):
                raise ValueError(f"the {unit} {fact_id!r} has another result in {where} than in an earlier part")
    if missing := [fact_id for fact_id in record["facts"] if fact_id not in joined]:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"{len(missing)} of {len(record['facts'])} {unit}s are missing: {shown}. Compute their shards, or resume "
            "those that were interrupted"
        )
    return record, {fact_id: joined[fact_id] for fact_id in record["facts"]}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(as_json(value), sort_keys=True).encode()).hexdigest()
