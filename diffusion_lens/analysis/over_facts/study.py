"""Studies over facts: the procedure, the result type and the denoising settings that they share.

A study has a record that describes it, batches of facts that are computed together, and a job that computes a batch.
`Study.collect` reads the facts that are in the folder already, computes the others and saves each when it is done: in
this process or on the workers of an executor, which write to the folder if they see it. `intervals` has the confidence
intervals of means over facts.
"""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.engine.trajectory import loop_prompt
from diffusion_lens.analysis.over_facts.executor import Executes, Workers, run_tasks, with_device
from diffusion_lens.analysis.over_facts.folder import (
    FactFolder,
    Shard,
    SharedFolder,
    fact_seed,
    join_parts,
    pick_shard,
    work_through_batches,
)
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import prepare
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import LeftToRight
from diffusion_lens.denoising.settings import DenoiseSettings, resolve_sampler
from diffusion_lens.facts.fact import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import PicturedResult, Saved
from diffusion_lens.records.schema import require_entries
from diffusion_lens.settings import INHERITED, at_least, setting, warn_user, whole_number
from diffusion_lens.settings.shared import DenoiseFields
from weight_conversion import Variant

_LOOK = 1.0  # seconds between two looks at the folder for the progress bar
_SHARE = 0.05  # of the time, at most, that a slow file system is read for it
_NAMED = 5  # facts of a task in an error message

Compute = Callable[[Sequence[str]], Sequence[Any]]


C = TypeVar("C", bound="StudyResult[Any]")
F = TypeVar("F")
R = TypeVar("R", bound="FactResult")


class FactResult:
    """Base of dataclasses with the result of one fact."""

    def equals(self: R, other: R) -> bool:
        """Whether both are identical to the bit, NaN included."""
        mine, theirs = vars(self), vars(other)
        return all(_same(value, theirs[name]) for name, value in mine.items())


class StudyResult(PicturedResult, Saved, Generic[F]):
    """The result of a study over facts, or of a part of one; F is the type of the result of one fact, with `equals`.

    It is loaded from its own file or from the folder of its study, and shards can be merged.
    """

    FACT_FILE: ClassVar[type[Any]]  # Class of the saved result of one fact, with `save` and `load`.
    UNIT = "fact"  # What messages and the progress bar call one row.
    CLUSTER: ClassVar[str] = "person"  # What a fact is about, in the record.
    ENTRIES: ClassVar[Mapping[str, Any]] = {"facts": dict[str, Any], "set_aside": dict[str, str]}
    AXES: ClassVar[tuple[tuple[str, str | int], ...]] = (("fact", "ids"),)

    ids: list[str]

    @classmethod
    @abstractmethod
    def of(cls: type[C], results: Mapping[str, F], record: dict[str, Any]) -> C:
        """The result with these facts of a study."""

    @abstractmethod
    def by_fact(self) -> dict[str, F]:
        """The inverse of `of`."""

    @classmethod
    def from_file(cls, saved: Any, record: Mapping[str, Any]) -> F:
        """The result of a fact, from an instance of `FACT_FILE`."""
        result: F = saved
        return result

    @property
    def clusters(self) -> list[str]:
        """The person of each row, of whom other rows may be too, so that they are not independent; intervals resample
        persons. A fact that names none is alone."""
        named = [self.record["facts"].get(fact_id, {}).get(self.CLUSTER) for fact_id in self.ids]
        return [str(name) if name else f"fact {fact_id}" for name, fact_id in zip(named, self.ids, strict=True)]

    @property
    def set_aside(self) -> dict[str, str]:
        """Facts that the study leaves out because the model cannot be queried for them, with the reasons."""
        reasons: dict[str, str] = self.record["set_aside"]
        return reasons

    @property
    def failed(self) -> dict[str, str]:
        """Facts whose computation on a worker ended with an error, with the errors. The same call tries them again."""
        errors: dict[str, str] = self.record.get("failed", {})
        return errors

    def _check(self) -> None:
        if unknown := [fact_id for fact_id in self.ids if fact_id not in self.record["facts"]]:
            raise ValueError(f"the {self.UNIT} {unknown[0]!r} is not among those of its record")

    def warn_of_gaps(self) -> None:
        """Warn if the facts of a whole study leave nothing to report."""

    @classmethod
    def load(cls: type[C], path: str | Path) -> C:
        """Read what `save` wrote, or the facts that are in the folder `out` of a study so far."""
        if Path(path).is_file() or Path(path).suffix == ".safetensors":
            return super().load(path)
        folder = FactFolder.open(path)
        require_entries(cls, folder.record, str(folder.path / "run.json"))
        return cls.from_files(folder.results(cls.FACT_FILE.load), folder.record)

    @classmethod
    def from_files(cls: type[C], saved: Iterable[tuple[str, Any]], record: dict[str, Any]) -> C:
        """The result with these facts, from saved results by id; in the order of the study's facts."""
        results = {}
        for fact_id, each in saved:
            results[fact_id] = cls.from_file(each, record)
        return cls.of({fact_id: results[fact_id] for fact_id in record["facts"] if fact_id in results}, record)

    @classmethod
    def merge(cls: type[C], parts: str | Path | C | Sequence[str | Path | C]) -> C:
        """Merge the shards of one study. The result is bit-identical to that of one process on the same machine.

        The parts are folders given as `out`, saved results, or results; one folder may contain all shards. A
        `ValueError` if they belong to different studies, a fact is in none of them, or two of them differ in a fact.
        """
        given = list(parts) if isinstance(parts, Sequence) and not isinstance(parts, str) else [parts]
        opened = []
        for part in given:
            name, result = (str(part), cls.load(part)) if isinstance(part, str | Path) else ("one of the results", part)
            opened.append((name, result.record, result.by_fact()))
        record, results = join_parts(opened, lambda one, other: one.equals(other), cls.UNIT)
        merged = cls.of(results, record)
        merged.warn_of_gaps()
        return merged


@runtime_checkable
class Job(Protocol):
    """The computation of a study, which `pickle` can store. Its numbers depend on the ids of a batch alone."""

    def part(self, ids: Sequence[str]) -> "Job":
        """The same job with what these facts need and nothing else, so that little is sent."""

    def on(self, model: Any) -> Compute:
        """The function that computes the results of a batch of facts, in order, on the model of the study, if it has
        one."""


@dataclass(frozen=True)
class FactsJob:
    """The usual job: `compute(model, inputs)` gives the results of a batch from what its facts need, by id."""

    inputs: Mapping[str, Any]
    compute: Callable[[Any, dict[str, Any]], Sequence[Any]]

    def part(self, ids: Sequence[str]) -> "FactsJob":
        """The job with these facts."""
        return FactsJob({fact_id: self.inputs[fact_id] for fact_id in ids}, self.compute)

    def on(self, model: Any) -> Compute:
        """The function that computes a batch."""
        return lambda batch: self.compute(model, {fact_id: self.inputs[fact_id] for fact_id in batch})


@dataclass(frozen=True)
class Study:
    """The plan of a study, of which nothing is computed yet.

    Attributes:
        model: Model of the study; `None` if it trains its own.
        record: Description of the study, the content of `run.json` in its folder; or a function that makes it, which is
            called with the first result where the study neither writes nor sends anything.
        batches: Ids of the facts that are computed together; shards consist of whole batches.
        job: What is computed of each batch.
        neighbours: Groups of facts that share work although they are not computed together; a task of a worker contains
            whole groups, if it can.
    """

    model: DiffusionTransformer | None
    record: dict[str, Any] | Callable[[], dict[str, Any]]
    batches: Sequence[Sequence[str]]
    job: Job
    neighbours: Sequence[Sequence[str]] = ()

    def collect(
        self, result_type: type[C], out: str | Path | None, shard: Shard, progress: bool, executor: Executes | None
    ) -> C:
        """The result of a shard, the batches i, i + n, i + 2n, ... Each fact is read from the folder `out` if it is
        there, and computed otherwise: on the executor's workers, or in this process.

        Raises:
            RuntimeError: Every fact failed on the workers, or as in `spread`.

        Warns:
            UserWarning: Some facts failed on the workers.
        """
        own, unit = replace(self, batches=pick_shard(self.batches, shard)), result_type.UNIT
        load = result_type.FACT_FILE.load
        saved: Iterable[tuple[str, Any]]
        folder = None
        if executor is None:
            record = {} if out is None else self._described()
            folder = None if out is None else FactFolder.start(out, record)
            saved = work_through_batches(own.batches, self.job.on(self.model), load, folder, progress, unit)
            if out is None:
                begun = list(islice(saved, 1))
                record, saved = self._described(), chain(begun, saved)
        else:
            record = self._described() if self.model is None else with_device(self._described(), executor)
            folder = None if out is None else FactFolder.start(out, record)
            saved, failed = spread(own, executor, folder, load, progress, unit)
            if failed:
                record = {**record, "failed": failed}
                message = say_failed(failed, unit)
                if len(failed) == sum(map(len, own.batches)):
                    raise RuntimeError(message)
                warn_user(f"{message}. The result lists them in `failed`; the same call tries them again")
        result = result_type.from_files(saved, record)
        result.warn_of_gaps()
        return result

    def _described(self) -> dict[str, Any]:
        return self.record() if callable(self.record) else self.record


def in_batches_of(size: int, ids: Iterable[str]) -> list[list[str]]:
    """Ids in batches of this size."""
    listed = list(ids)
    return [listed[start : start + size] for start in range(0, len(listed), size)]


def say_failed(failed: Mapping[str, str], unit: str = "fact") -> str:
    """How many facts failed, and the error of the first."""
    fact_id, error = next(iter(failed.items()))
    return f"{len(failed)} {unit}s failed on the workers; {fact_id!r}: {error}"


def spread(
    study: Study,
    executor: Executes,
    folder: FactFolder | None = None,
    load: Callable[[Path], Any] = Path,
    progress: bool = False,
    unit: str = "fact",
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Compute what is not in the folder yet on the workers; the errors are those of `run_tasks`.

    Returns the results of all facts with their ids, which `load` reads from a folder, and the errors of those that
    failed.
    """
    workers = Workers.of(executor)
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tasks = _tasks(study, folder, workers)
    all_ids = list(chain.from_iterable(study.batches))
    with tqdm(total=len(all_ids), desc=f"{unit}s", unit=unit, disable=not progress) as shown:
        bar = _FactsBar(shown, all_ids, folder if progress else None)
        bar.update(len(all_ids) - sum(task.size for task in tasks))
        ended = run_tasks(tasks, study.model, workers, bar, while_waiting=bar.look)
        for fact_id, result, error in (done for _, of_task in ended for done in of_task):
            if error is not None:
                failed[fact_id] = error
            elif folder is None:
                results[fact_id] = result
            elif result is not None and not folder.has(fact_id):
                folder.save(fact_id, result)
    if folder is None:
        return list(results.items()), failed
    ids = [fact_id for fact_id in all_ids if fact_id not in failed]
    if unseen := [fact_id for fact_id in ids if not folder.has(fact_id)]:
        raise RuntimeError(
            f"workers have written {len(unseen)} {unit}s to {folder.path} that this process does not see, "
            f"first {unseen[0]!r}. A network file system may show them later: call again"
        )
    return [(fact_id, load(folder.file(fact_id))) for fact_id in ids], failed


def _tasks(study: Study, folder: FactFolder | None, workers: Workers) -> list["_FactsTask"]:
    """The tasks of a study, of batches that are not in the folder yet."""
    batches = [batch for batch in study.batches if not folder or not all(map(folder.has, batch))]
    place = {fact_id: i for i, group in enumerate(study.neighbours) for fact_id in group}
    batches.sort(key=lambda batch: place.get(batch[0], 0))
    size = workers.facts_per_task or -(-sum(map(len, batches)) // workers.tasks)
    shared = SharedFolder.of(folder.path, folder.record) if folder else None
    chunks: list[list[Sequence[str]]] = []
    for batch in batches:  # consecutive batches with at least so many facts
        if not chunks or sum(map(len, chunks[-1])) >= size:
            chunks.append([])
        chunks[-1].append(batch)
    return [_FactsTask(study.job.part(list(chain.from_iterable(chunk))), chunk, shared) for chunk in chunks]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return bool(one == other)


@dataclass(frozen=True)
class _FactsTask:
    """Some batches of a study. A fact that raises an error does not stop the others.

    Facts that are in the folder already, from an earlier attempt, are not computed again.
    """

    job: Job
    batches: Sequence[Sequence[str]]
    folder: SharedFolder | None

    @property
    def name(self) -> str:
        left = [repr(fact_id) for fact_id in self._left()]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"that still has to compute {', '.join(left[:_NAMED])}{more}"

    @property
    def size(self) -> int:
        return sum(map(len, self.batches))

    @property
    def n_kept(self) -> int:
        return self.size - len(self._left())

    def compute(self, model: Any) -> list[tuple[str, Any, str | None]]:
        """Of each fact its id, its result (`None` if this worker has written it, or it failed), and its error."""
        folder, compute = self.folder.facts() if self.folder else None, self.job.on(model)
        done: list[tuple[str, Any, str | None]] = []
        for batch in self.batches:
            missing = [fact_id for fact_id in batch if folder is None or not folder.has(fact_id)]
            try:
                results = compute(batch) if missing else [None] * len(batch)
            except Exception as error:  # whatever it is, it belongs to these facts and not to the others
                done += [(fact_id, None, f"{type(error).__name__}: {error}") for fact_id in batch]
                continue
            for fact_id, result in zip(batch, results, strict=True):
                if folder is not None and fact_id in missing:
                    folder.save(fact_id, result)
                done.append((fact_id, result if folder is None else None, None))
        return done

    def _left(self) -> list[str]:
        folder = self.folder.facts() if self.folder else None
        ids = chain.from_iterable(self.batches)
        return [fact_id for fact_id in ids if folder is None or not folder.file(fact_id).exists()]


class _FactsBar:
    """A bar that also moves while long tasks run: it counts the files that workers write to the study's folder."""

    def __init__(self, bar: Any, ids: Sequence[str], folder: FactFolder | None) -> None:
        self._bar, self._folder = bar, folder
        self._files = {folder.file(fact_id).name for fact_id in ids} if folder else set()
        self._ended, self._next_look = 0, 0.0

    def update(self, n_facts: int) -> None:
        """Count facts of a task that has ended, or that are in the folder from an earlier call."""
        self._ended += n_facts
        self._show(self._ended)

    def look(self) -> None:
        """Count the files in the folder, unless that was done a moment ago."""
        now = time.monotonic()
        if self._folder is not None and now >= self._next_look:
            with os.scandir(self._folder.path) as entries:
                self._show(sum(entry.name in self._files for entry in entries))
            self._next_look = now + max(_LOOK, (time.monotonic() - now) / _SHARE)

    def _show(self, n_facts: int) -> None:
        # Facts that failed have no file, and tasks that still run have files: what is larger counts.
        self._bar.update(max(0, n_facts - self._bar.n))


@dataclass(frozen=True)
class LoopSettings(DenoiseFields):
    """How the loop writes answers. On a causal model guidance is left out."""

    sampler: str | Sampler | None = INHERITED
    seed: int = setting(1, "Seed of the study; each fact has its own seed, made of this one and its id.", whole_number)
    batch_size: int = setting(
        32,
        "Largest number of facts in one batch. Only facts whose prompts are equally long share one, as do their "
        "canvases. A sampler by which the runs of a batch depend on one another gets one fact at a time: one that "
        "ranks a batch as one pool, or gives the network the time of the last change to any of its rows.",
        partial(at_least, 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(vars(self.denoise))

    @cached_property
    def denoise(self) -> DenoiseSettings:
        """The settings of the loop alone."""
        return DenoiseSettings(self.steps, self.sampler, self.cfg_scale, self.temperature, self.seed)

    def for_facts(self, fact_ids: Sequence[str], variant: Variant) -> DenoiseSettings:
        """The settings of a batch of these facts on a model of this variant, with a seed for each fact."""
        seeds = tuple(fact_seed(self.seed, fact_id) for fact_id in fact_ids)
        return replace(self.denoise.fitted_to(variant), seed=seeds)

    def writes_in_order(self, variant: Variant) -> bool:
        """Whether answers are written from left to right, one step per token."""
        return isinstance(resolve_sampler(self.denoise.sampler, variant), LeftToRight)

    def facts_together(self, variant: Variant) -> int:
        """The largest number of facts in one batch on a model of this variant."""
        return 1 if resolve_sampler(self.denoise.sampler, variant).couples_rows(variant) else self.batch_size

    def describe_on(self, variant: Variant) -> dict[str, Any]:
        """The settings for a record."""
        fitted = self.denoise.fitted_to(variant)
        described = replace(fitted, sampler=resolve_sampler(fitted.sampler, variant, self.steps)).describe()
        steps = {"steps": None} if self.writes_in_order(variant) else {}
        return {**described, **steps, "batch_size": self.batch_size}

    def check(self, model: DiffusionTransformer, query: Query) -> None:
        """Raise a `ValueError` unless the loop can write on this canvas."""
        prompt, length = loop_prompt(model, query)
        prepare(model, lay_out(model, prompt[None], length), self.denoise.fitted_to(model.cfg))
