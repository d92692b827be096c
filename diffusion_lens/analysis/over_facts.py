"""Studies over facts: the procedure and the result type that all of them share.

A study has a record that describes it, batches of facts that are computed together, and a job that computes a batch.
`Study.collect` reads the facts that are in the folder already, computes the others and saves each when it is done: in
this process (`analysis.resumable`) or on the workers of an executor (`analysis.workers`). The result is a
`StudyResult`: its shards can be merged, and it can be loaded from its own file or from the folder of its study.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from diffusion_lens.analysis.resumable import FactFolder, Shard, join_parts, pick_shard, work_through_batches
from diffusion_lens.analysis.workers.executor import Executes, with_device
from diffusion_lens.analysis.workers.job import Job
from diffusion_lens.analysis.workers.spread import Work, spread
from diffusion_lens.display import PicturedResult
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, save_fields
from diffusion_lens.user_warnings import warn_user


@runtime_checkable
class FactResult(Protocol):
    """The part of a study's result that belongs to one fact."""

    def equals(self, other: Any) -> bool:
        """Whether both are identical to the bit."""


C = TypeVar("C", bound="StudyResult[Any]")
F = TypeVar("F", bound=FactResult)


class StudyResult(PicturedResult, Generic[F]):
    """The result of a study over facts, or of a part of one; F is the type of the result of one fact.

    Attributes:
        ids: The fact of each row.
        record: Settings, all facts of the study by id, those `set_aside`, model, weights' hash, versions.
    """

    KIND: ClassVar[str]  # Kind of result that is written in its file.
    FACT_FILE: ClassVar[type[Any]]  # Class of the saved result of one fact, with `save` and `load`.
    UNIT: ClassVar[str] = "fact"  # What messages and the progress bar call one row.

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
    def set_aside(self) -> dict[str, str]:
        """Facts that the study leaves out because the model cannot be queried for them, with the reasons."""
        reasons: dict[str, str] = self.record["set_aside"]
        return reasons

    @property
    def failed(self) -> dict[str, str]:
        """Facts whose computation on a worker ended with an error, with the errors. The same call tries them again."""
        errors: dict[str, str] = self.record.get("failed", {})
        return errors

    def warn_of_gaps(self) -> None:
        """Warn if the facts of a whole study leave nothing to report."""

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, self.KIND, self)

    @classmethod
    def load(cls: type[C], path: str | Path) -> C:
        """Read what `save` wrote, or the facts that are in the folder `out` of a study so far."""
        if Path(path).is_file() or Path(path).suffix == ".safetensors":
            return load_fields(path, cls.KIND, cls)
        folder = FactFolder.open(path)
        return cls.from_files(folder.results(cls.FACT_FILE.load), folder.record)

    @classmethod
    def from_files(cls: type[C], saved: Iterable[tuple[str, Any]], record: dict[str, Any]) -> C:
        """The result with these facts, from saved results by id; in the order of the study's facts."""
        results = {fact_id: cls.from_file(each, record) for fact_id, each in saved}
        return cls.of({fact_id: results[fact_id] for fact_id in record["facts"] if fact_id in results}, record)

    @classmethod
    def merge(cls: type[C], parts: str | Path | C | Sequence[str | Path | C]) -> C:
        """Merge the shards of one study. The result is bit-identical to that of one process on the same machine.

        Args:
            parts: Folders given as `out`, saved results, or results; one folder may contain all shards.

        Raises:
            ValueError: The parts belong to different studies, a fact is in none of them, or two of them differ in a
                fact.
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


@dataclass(frozen=True)
class Study:
    """The plan of a study, of which nothing is computed yet.

    Attributes:
        model: Model of the study; `None` if it trains its own.
        record: Description of the study, the content of `run.json` in its folder.
        batches: Ids of the facts that are computed together; shards consist of whole batches.
        job: What is computed of each batch.
        neighbours: Groups of facts that share work although they are not computed together.
    """

    model: DiffusionTransformer | None
    record: dict[str, Any]
    batches: Sequence[Sequence[str]]
    job: Job
    neighbours: Sequence[Sequence[str]] = ()

    def collect(
        self, result_type: type[C], out: str | Path | None, shard: Shard, progress: bool, executor: Executes | None
    ) -> C:
        """The result of a shard. Each fact is read from the folder if it is there, and computed otherwise.

        Args:
            out: Folder for one file per fact; by default nothing is written.
            shard: (i, n) or "i/n": the batches i, i + n, i + 2n, ...
            progress: Whether to show a progress bar.
            executor: Executor whose workers compute; by default this process does.

        Raises:
            RuntimeError: Every fact failed on the workers, or as in `workers.spread`.

        Warns:
            UserWarning: Some facts failed on the workers.
        """
        own = pick_shard(self.batches, shard)
        record = self.record if self.model is None else with_device(self.record, executor)
        folder = None if out is None else FactFolder.start(out, record)
        load = result_type.FACT_FILE.load
        saved: Iterable[tuple[str, Any]]
        if executor is None:
            saved = work_through_batches(own, self.job.on(self.model), load, folder, progress, result_type.UNIT)
        else:
            work = Work(self.model, self.job, own, self.neighbours, folder, result_type.UNIT)
            saved, failed = spread(work, executor, load, progress)
            if failed:
                record = {**record, "failed": failed}
                first = next(iter(failed))
                message = f"{len(failed)} {result_type.UNIT}s failed on the workers; {first!r}: {failed[first]}"
                if len(failed) == sum(map(len, own)):
                    raise RuntimeError(message)
                warn_user(f"{message}. The result lists them in `failed`; the same call tries them again")
        result = result_type.from_files(saved, record)
        result.warn_of_gaps()
        return result
