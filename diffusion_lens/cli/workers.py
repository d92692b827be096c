"""The workers of a study over facts, as options say them, and studies split among processes.

Workers are processes of this machine (--workers), those of a Dask cluster (--dask), or jobs of Slurm, submitted by
submitit (--slurm). --shard computes a part of a study, and --merge joins parts.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cli.report import StudyReport, progress, require
from diffusion_lens.settings import Settings, at_least, setting

if TYPE_CHECKING:
    from diffusion_lens.analysis import Workers
    from diffusion_lens.analysis.planned_work import PlannedWork
    from diffusion_lens.facts.fact import Fact
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

TASKS_PER_WORKER = 4  # so that fast workers do more, and a worker that dies costs little
# Options of sbatch that mean something for jobs of one process.
# fmt: off
OPTIONS = (
    "account", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "exclude", "gpus",
    "gpus-per-node", "gpus-per-task", "gres", "licenses", "mail-type", "mail-user", "mem", "mem-per-cpu",
    "mem-per-gpu", "nice", "nodelist", "partition", "qos", "reservation", "time", "tmp", "wckey",
)
# fmt: on


@dataclass(frozen=True)
class WorkerChoice(Settings):
    """The workers of a study, and its part. Without workers, the command computes in its own process."""

    workers: int | None = setting(
        None,
        "Number of processes on this machine that compute the study; each loads the model, takes a GPU of its own if "
        "there are several, and gets its share of the threads. With --slurm, the largest number of jobs at a time.",
        partial(at_least, 1),
    )
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Compute on all workers of a Dask cluster: the address of its scheduler, e.g. tcp://node1:8786, or "
            "its scheduler file. --device is that of the workers.",
        ),
    ] = None
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Compute in jobs of Slurm with these options of sbatch, e.g. "
            '"partition=gpu,gres=gpu:1,time=2:00:00", at most --workers at a time. OUT, on a file system that the '
            "nodes share, gets their logs. --device is that of the jobs; the default is cuda if they have GPUs.",
        ),
    ] = None
    device: str | None = None  # --device of the command
    shard: str | None = setting(
        None, 'Process only one part of the facts, e.g. "0/4" for the first of four. --merge joins the parts.'
    )
    merge: list[Path] | None = setting(
        None, "Join shards instead of computing: the --out folder of a shard. Repeat it for each."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge and self.shard is not None:
            raise ValueError("--shard computes a part of the study and --merge joins parts; give one of them")
        if not self.given:
            return
        dask, slurm = self.dask is not None, self.slurm_options is not None
        if self.merge:
            raise ValueError("--merge joins what was computed before: leave out --workers, --dask and --slurm")
        if dask and slurm:
            raise ValueError("--dask and --slurm are two clusters: give one of them")
        if dask and self.workers is not None:
            raise ValueError(
                "--dask uses all workers of its cluster, and --workers starts processes on this machine: give one of "
                "them"
            )
        if self.dask and self.dask.endswith(".json") and not Path(self.dask).expanduser().is_file():
            raise FileNotFoundError(
                f"--dask {self.dask}: there is no such scheduler file. `dask scheduler --scheduler-file FILE` writes "
                "it when it starts"
            )
        if slurm and self.workers is None:
            raise ValueError(
                "--slurm needs --workers, the largest number of jobs that run at a time, e.g. --workers 16"
            )
        require(*["Dask"] * dask, *["Slurm"] * slurm)

    @property
    def given(self) -> bool:
        """Whether there are workers."""
        return any(option is not None for option in (self.workers, self.dask, self.slurm))

    @property
    def slurm_options(self) -> "SlurmOptions | None":
        """What --slurm says."""
        return None if self.slurm is None else SlurmOptions.read(self.slurm)

    @property
    def model_device(self) -> str | None:
        """The device of the model: --device, or that of Slurm's jobs; `None` means the best one where it is loaded."""
        if self.device is None and (options := self.slurm_options) is not None:
            return "cuda" if options.has_gpus else "cpu"
        return self.device

    def placed(self, model: ModelChoice) -> ModelChoice:
        """The model on the device of the workers."""
        return replace(model, device=self.model_device)

    @property
    def layout(self) -> str | None:
        """The device on which this process loads the model: with workers it lays out the study only."""
        return "cpu" if self.given else self.model_device

    @property
    def local_threads(self) -> int:
        """Number of torch's threads in each process on this machine: its share of those that one process would use."""
        import torch

        return max(1, torch.get_num_threads() // (self.workers or 1))

    def lines(self) -> list[str]:
        """A line about the workers; none if there are no workers."""
        if not self.given:
            return []
        if self.dask is not None:
            return [f"workers: those of the Dask cluster at {self.dask}"]
        if (options := self.slurm_options) is not None:
            asked = ", ".join(f"{name} {value}" for name, value in options.given.items())
            return [f"workers: at most {self.workers} Slurm jobs at a time ({asked}), on {self.model_device}"]
        processes = f"{self.workers} process{'es' if self.workers != 1 else ''}"
        threads = f"{self.local_threads} thread{'s' if self.local_threads > 1 else ''}"
        return [f"workers: {processes} on this machine, {threads} each"]

    @contextmanager
    def open(self, out: Path) -> Iterator["Workers | None"]:
        """The workers, until the block ends; `None` if there are none.

        Args:
            out: Folder of the command, which gets the scripts and logs of Slurm's jobs.
        """
        if not self.given:
            yield None
            return
        from diffusion_lens.analysis import LocalWorkers, Workers
        from diffusion_lens.model.config import kind_of_device

        tasks = TASKS_PER_WORKER * (self.workers or 1)
        if self.dask is not None:
            with _client(self.dask) as client:
                # The first worker answers. A cluster that grows by demand starts one now, the others with the study.
                device = self.model_device or client.submit(kind_of_device, None, pure=False).result()
                of_workers = client.nthreads().values()
                tasks, threads = max(64, TASKS_PER_WORKER * len(of_workers)), min(of_workers, default=1)
                yield Workers(client.get_executor(), device=device, threads=threads, tasks=tasks)
        elif (options := self.slurm_options) is not None:
            executor = options.executor(self.workers or 1, out / "jobs")
            yield Workers(executor, device=self.model_device, threads=options.n_cores, tasks=tasks)
        else:
            with LocalWorkers(self.workers or 1) as pool:
                yield Workers(
                    pool, device=self.model_device or kind_of_device(None), threads=self.local_threads, tasks=tasks
                )

    def share(self, n_facts: int) -> int:
        """Number of facts this call will process, before rounding to whole batches; 0 when merging."""
        from diffusion_lens.analysis.over_facts.folder import pick_shard

        return 0 if self.merge else len(pick_shard(range(n_facts), self.shard or "0/1"))

    def require_parts(self, *parts: str) -> None:
        """Check that each folder to merge contains all these folders, one per study, before anything is merged."""
        for folder in self.merge or ():
            for part in parts:
                if not (folder / part / "run.json").is_file():
                    raise FileNotFoundError(
                        f"--merge {folder} contains nothing of {part} to join: give the --out folders of the shards"
                    )

    def plan(self, studies: "Sequence[FactStudy]", report: StudyReport, *compared: str) -> None:
        """Refuse folders that hold other studies; for a dry run, print the cost, and end the command.

        Args:
            compared: Settings that the records of the studies do not have, to compare as `FolderReport.begin` does.
        """
        from diffusion_lens.records.results import require_same_settings

        self.require_parts(*(each.folder.name for each in studies))
        n_facts = self.share(len(studies[0].facts))
        for each in () if self.merge else studies:
            require_same_settings(each.folder, each.describe(of_facts=report.dry_run))
        report.begin(compared)
        report.say(*self.lines())
        if report.dry_run:
            cost.show(report, [(each.model, each.planned(n_facts)) for each in studies])

    def compute(self, studies: "Sequence[ModelStudy]", kind: Any, report: StudyReport) -> list[Any]:
        """The studies of a command: computed, or joined from the folders to merge. After a shard, the command ends.

        Args:
            kind: Class of the results.
        """
        results = []
        with self.open(studies[0].folder.parent) as executor:
            for each in studies:
                if self.merge:
                    result = kind.merge([folder / each.folder.name for folder in self.merge])
                    require_model(each.model, result.record)
                else:
                    more: Any = {"shard": self.shard or "0/1", "progress": progress(), "executor": executor}
                    # No name holds the model, so that it is gone before the next one is loaded.
                    result = each.compute(each.model.load(on=self.layout), out=each.folder, **more)
                    report.notes.extend(failed_facts(result))
                results.append(result)
        if self.shard is not None:
            n_done = sum(len(result.ids) + len(getattr(result, "unknown", ())) for result in results)
            report.say(f"shard {self.shard}: {n_done} facts done in {report.out}; join the shards with --merge")
            report.finish({"shard": self.shard, "facts": n_done})
            raise typer.Exit
        return results


@dataclass(frozen=True)
class ModelStudy:
    """What a command computes of one model.

    Attributes:
        folder: Folder of its files, in --out.
        compute: Function of the model, and of the `out`, `shard`, `progress` and `executor` of a study.
    """

    model: ModelChoice
    folder: Path
    compute: Callable[..., Any]


@dataclass(frozen=True)
class FactStudy(ModelStudy):
    """A study of one model over facts.

    Attributes:
        settings: Settings of the study.
        prepare: Lays out a fact for the model, and refuses one for which it cannot be queried.
        counted: Function of a model and `facts` whose work a dry run counts. Default: `compute`.
        together: Number of facts in a batch, where it depends on nothing else.
    """

    facts: "Sequence[Fact]"
    settings: Any
    prepare: "Callable[[HookedDiffusionTransformer, Fact], object]"
    counted: Callable[..., Any] | None = None
    together: int | None = None

    def describe(self, of_facts: bool) -> dict[str, Any]:
        """What the record says before the model is loaded; of the facts and the model, if texts and model are here."""
        from diffusion_lens.analysis.engine.layout import UsableFacts

        described = {**self.settings.describe_on(self.model.known_shape()), "dtype": self.model.dtype}
        outline = self.model.without_weights() if of_facts else None
        if outline is None or not any(fact.prompt for fact in self.facts):
            return described
        usable = UsableFacts.of(self.facts, partial(self.prepare, outline))
        return {**described, **usable.describe(), "model": outline.cfg.model_name}

    def planned(self, n_facts: int) -> "PlannedWork":
        """The work of this number of the facts, of which some are counted."""
        some = cost.some_of(self.facts, self.model)
        work = cost.planned(self.model, partial(self.counted or self.compute, facts=some), cost.texts_of(some))
        if self.together is not None:
            work = replace(work, batch_bytes=work.batch_bytes * min(self.together, n_facts) // len(some))
        return work * (n_facts / len(some))


@dataclass(frozen=True)
class SlurmOptions:
    """What --slurm says: options of sbatch as they were written, the time limit of a job, and its number of cores."""

    given: Mapping[str, str]
    minutes: int
    n_cores: int

    @classmethod
    def read(cls, text: str) -> "SlurmOptions":
        """Read "partition=gpu,gres=gpu:1,time=2:00:00". A value may contain commas: "nodelist=n1,n2,time=30"."""
        given: dict[str, str] = {}
        name = ""
        for piece in text.split(","):
            before, equals, value = piece.partition("=")
            if not equals and name:
                given[name] += f",{piece}"
                continue
            name = before.strip().removeprefix("--").replace("_", "-")
            if name not in OPTIONS:
                raise ValueError(
                    f"--slurm has the option {name!r}, which is unknown here; known are {', '.join(OPTIONS)}"
                )
            if name in given or not value:
                raise ValueError(f"--slurm {text!r}: give {name!r} once, with a value, e.g. partition=gpu")
            given[name] = value
        if "time" not in given:
            raise ValueError(
                f"--slurm {text!r} has no time, the limit of one job, e.g. time=2:00:00. A job computes a part of the "
                "study; what it has computed is kept if its time is over"
            )
        cores = given.get("cpus-per-task", given.get("cpus-per-gpu", "1"))
        if not cores.isdecimal() or not int(cores):
            raise ValueError(f"--slurm has {cores!r} cores; it must be a number, e.g. cpus-per-task=8")
        return cls(given, minutes(given["time"]), int(cores))

    @property
    def has_gpus(self) -> bool:
        """Whether the jobs have GPUs."""
        return "gpu" in self.given.get("gres", "") or any(name.startswith("gpus") for name in self.given)

    def executor(self, n_jobs: int, folder: Path) -> Any:
        """An executor whose tasks are jobs of Slurm, at most `n_jobs` at a time, with scripts and logs in a folder."""
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise ValueError(
                "--slurm needs sbatch and srun, which are not on this machine: call the command on a login node of the "
                "cluster, or without --slurm inside a job"
            )
        import logging

        import submitit

        logger = logging.getLogger("submitit")
        for handler in [each for each in logger.handlers if each.name == "submitit_out"]:
            logger.removeHandler(handler)  # it warns on standard error as well; --json prints on standard output
        executor = submitit.SlurmExecutor(folder)
        more = {name: value for name, value in self.given.items() if name != "time"}
        executor.update_parameters(
            job_name="diffusion-lens", time=self.minutes, array_parallelism=n_jobs, additional_parameters=more
        )
        return executor


def minutes(time: str) -> int:
    """A time as Slurm writes it ("90", "90:30", "1:30:00", "2-12", "2-12:30", "2-12:30:00"), in minutes, rounded up."""
    days, dash, clock = time.strip().rpartition("-")
    numbers = [*([days] if dash else []), *clock.split(":")]
    units = (86400, 3600, 60, 1) if dash else (3600, 60, 1) if len(numbers) == 3 else (60, 1)
    if len(numbers) > len(units) or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"--slurm has the time {time!r}; Slurm writes a time as minutes, minutes:seconds, hours:minutes:seconds or "
            "days-hours:minutes, e.g. 2:00:00 for two hours"
        )
    seconds = sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))
    return max(1, -(-seconds // 60))


def failed_facts(study: Any) -> list[str]:
    """A line about the facts of a study that failed on the workers; none if no fact did."""
    from diffusion_lens.records.results import shown_model

    if not study.failed:
        return []
    first, reason = next(iter(study.failed.items()))
    several, are = ("s", "are") if len(study.failed) > 1 else ("", "is")
    of_model = f"{shown_model(study.record)}: " if "model" in study.record else ""
    return [
        f"{of_model}{len(study.failed)} {study.UNIT}{several} failed and {are} left out ({first}: {reason}); the same "
        "command tries again"
    ]


def require_model(model: ModelChoice, record: Mapping[str, Any]) -> None:
    """Check that the parts come from this model. The name of a hub repository cannot be checked."""
    from diffusion_lens.model.config import name_with_mode
    from diffusion_lens.records.results import shown_model
    from weight_conversion import mode_read

    here = Path(model.name).expanduser().exists()
    if not here and "/" in model.name:
        return
    shape = model.known_shape()
    name = shape.name if here and shape is not None else model.name.lower()
    mode = None if shape is None else mode_read(shape.family, shape.attention_dir)
    if name != record["model"] or mode not in (None, record.get("mode")):
        raise ValueError(
            f"the parts to merge were made by {shown_model(record)!r}, not by {name_with_mode(model.name, mode)!r}"
        )


def _client(address: str) -> Any:
    """The client of the Dask cluster at an address or in a scheduler file."""
    from distributed import Client

    file = Path(address).expanduser()
    try:
        return Client(scheduler_file=str(file)) if file.is_file() else Client(address)
    except (OSError, ValueError) as error:
        raise ValueError(f"--dask {address}: no scheduler answers there ({error})") from error
