"""The workers of a study over facts: processes of this machine, those of a Dask cluster, or jobs of Slurm."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.extras import require
from diffusion_lens.cli.slurm import SlurmOptions, slurm_executor

if TYPE_CHECKING:
    from diffusion_lens.analysis import Workers

TASKS_PER_WORKER = 4  # so that fast workers do more, and a worker that dies costs little
JOBS = "jobs"  # the folder of Slurm's logs, in OUT


@dataclass(frozen=True)
class WorkerChoice:
    """The workers of a command, as its options say them. Without any, the command computes in its own process.

    Attributes:
        number: --workers, the number of processes on this machine, or of Slurm jobs at a time.
        dask: --dask, the address of a scheduler or the path of its scheduler file.
        slurm: --slurm, options of sbatch.
        of_command: --device of the command.
        merge: --merge of the command, which computes nothing.

    Raises:
        ValueError: The options exclude each other, one of Slurm's is unknown or missing, or the package for this
            cluster is not installed.
        FileNotFoundError: The scheduler file does not exist.
    """

    number: int | None
    dask: str | None
    slurm: str | None
    of_command: str | None = None
    merge: Sequence[Path] | None = None

    def __post_init__(self) -> None:
        if not self.given:
            return
        if self.merge:
            raise ValueError("--merge joins what was computed before: leave out --workers, --dask and --slurm")
        if self.dask is not None and self.slurm is not None:
            raise ValueError("--dask and --slurm are two clusters: give one of them")
        if self.dask is not None and self.number is not None:
            raise ValueError(
                "--dask uses all workers of its cluster, and --workers starts processes on this machine: give one of "
                "them"
            )
        if self.dask is not None and self.dask.endswith(".json") and not Path(self.dask).expanduser().is_file():
            raise FileNotFoundError(
                f"--dask {self.dask}: there is no such scheduler file. `dask scheduler --scheduler-file FILE` writes "
                "it when it starts"
            )
        if self.slurm_options is not None and self.number is None:
            raise ValueError(
                "--slurm needs --workers, the largest number of jobs that run at a time, e.g. --workers 16"
            )
        require(*(["Dask"] if self.dask is not None else []), *(["Slurm"] if self.slurm is not None else []))

    @property
    def given(self) -> bool:
        """Whether there are workers."""
        return any(option is not None for option in (self.number, self.dask, self.slurm))

    @property
    def slurm_options(self) -> SlurmOptions | None:
        """What --slurm says."""
        return None if self.slurm is None else SlurmOptions.read(self.slurm)

    @property
    def device(self) -> str | None:
        """The device of the model: --device, or that of Slurm's jobs; `None` means the best one where it is loaded."""
        if self.of_command is None and (options := self.slurm_options) is not None:
            return "cuda" if options.has_gpus else "cpu"
        return self.of_command

    @property
    def layout(self) -> str | None:
        """The device on which this process loads the model: with workers it lays out the study only."""
        return "cpu" if self.given else self.device

    def describe(self) -> list[str]:
        """A line about the workers; none if there are no workers."""
        if not self.given:
            return []
        if self.dask is not None:
            return [f"workers: those of the Dask cluster at {self.dask}"]
        if (options := self.slurm_options) is not None:
            asked = ", ".join(f"{name} {value}" for name, value in options.given.items())
            return [f"workers: at most {self.number} Slurm jobs at a time ({asked}), on {self.device}"]
        threads = self.local_threads
        return [
            f"workers: {self.number} process{'es' if self.number != 1 else ''} on this machine, "
            f"{threads} thread{'s' if threads > 1 else ''} each"
        ]

    @property
    def local_threads(self) -> int:
        """Number of torch's threads in each process on this machine: its share of those that one process would use."""
        import torch

        return max(1, torch.get_num_threads() // (self.number or 1))

    @contextmanager
    def open(self, out: Path) -> Iterator["Workers | None"]:
        """The workers, until the block ends; `None` if there are none.

        Args:
            out: Folder of the command, which gets the logs of Slurm's jobs.

        Raises:
            ValueError: No scheduler answers, or this machine has no commands of Slurm.
        """
        if not self.given:
            yield None
        elif self.dask is not None:
            with self._on_dask(self.dask) as workers:
                yield workers
        elif (options := self.slurm_options) is not None:
            from diffusion_lens.analysis import Workers

            executor = slurm_executor(options, self.number or 1, out / JOBS)
            yield Workers(executor, device=self.device, threads=options.n_cores, tasks=self._tasks(self.number or 1))
        else:
            from diffusion_lens.analysis import LocalWorkers, Workers
            from diffusion_lens.cost import kind_of_device

            with LocalWorkers(self.number or 1) as pool:
                device = self.device or kind_of_device(None)
                yield Workers(pool, device=device, threads=self.local_threads, tasks=self._tasks(pool.number))

    @contextmanager
    def _on_dask(self, address: str) -> Iterator["Workers"]:
        from distributed import Client

        from diffusion_lens.analysis import Workers
        from diffusion_lens.cost import kind_of_device

        file = Path(address).expanduser()
        try:
            client = Client(scheduler_file=str(file)) if file.is_file() else Client(address)
        except (OSError, ValueError) as error:
            raise ValueError(f"--dask {address}: no scheduler answers there ({error})") from error
        with client:
            # The first worker answers. A cluster that grows by demand starts one now, and the others with the study.
            device = self.device or client.submit(kind_of_device, None, pure=False).result()
            threads = client.nthreads()
            tasks = max(64, self._tasks(len(threads)))
            yield Workers(client.get_executor(), device=device, threads=min(threads.values(), default=1), tasks=tasks)

    @staticmethod
    def _tasks(n_workers: int) -> int:
        return TASKS_PER_WORKER * n_workers


def failed_facts(study: Any) -> list[str]:
    """A line about the facts of a study that failed on the workers; none if no fact did."""
    from diffusion_lens.records import shown_model

    if not study.failed:
        return []
    first, reason = next(iter(study.failed.items()))
    several, are = ("s", "are") if len(study.failed) > 1 else ("", "is")
    of_model = f"{shown_model(study.record)}: " if "model" in study.record else ""
    return [
        f"{of_model}{len(study.failed)} {study.UNIT}{several} failed and {are} left out ({first}: {reason}); the same "
        "command tries again"
    ]
