"""Jobs of Slurm for --slurm, submitted by submitit."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options of sbatch that mean something for jobs of one process.
OPTIONS = (
    "account",
    "comment",
    "constraint",
    "cpus-per-gpu",
    "cpus-per-task",
    "dependency",
    "exclude",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "licenses",
    "mail-type",
    "mail-user",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "nice",
    "nodelist",
    "partition",
    "qos",
    "reservation",
    "time",
    "tmp",
    "wckey",
)
# Slurm's ways to write a time: "90", "90:30", "1:30:00", "2-12", "2-12:30", "2-12:30:00".
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)??(\d+)(?::(\d+))?)")


@dataclass(frozen=True)
class SlurmOptions:
    """What --slurm says.

    Attributes:
        given: Options of sbatch by name, as they were written.
        minutes: The time limit of a job.
        n_cores: Number of cores of a job.
    """

    given: Mapping[str, str]
    minutes: int
    n_cores: int

    @classmethod
    def read(cls, text: str) -> "SlurmOptions":
        """Read "partition=gpu,gres=gpu:1,time=2:00:00". A value may contain commas: "nodelist=n1,n2,time=30".

        Raises:
            ValueError: An option is unknown, given twice or without a value, the number of cores is none, or the time
                is missing or unlimited.
        """
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


def minutes(time: str) -> int:
    """A time as Slurm writes it, in minutes, rounded up.

    Raises:
        ValueError: It is not such a time.
    """
    matched = TIME.fullmatch(time.strip())
    if matched is None:
        raise ValueError(
            f"--slurm has the time {time!r}; Slurm writes a time as minutes, minutes:seconds, hours:minutes:seconds or "
            "days-hours:minutes, e.g. 2:00:00 for two hours"
        )
    days, hours, of_hour, seconds, alone_hours, alone_minutes, alone_seconds = (int(n or 0) for n in matched.groups())
    in_seconds = 60 * (60 * (24 * days + hours + alone_hours) + of_hour + alone_minutes) + seconds + alone_seconds
    return max(1, -(-in_seconds // 60))


def slurm_executor(options: SlurmOptions, n_jobs: int, folder: Path) -> Any:
    """An executor whose tasks are jobs of Slurm.

    Args:
        n_jobs: The largest number of jobs that run at a time.
        folder: Folder for scripts and logs of the jobs.

    Raises:
        ValueError: This machine has no commands of Slurm.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise ValueError(
            "--slurm needs sbatch and srun, which are not on this machine: call the command on a login node of the "
            "cluster, or without --slurm inside a job"
        )
    import submitit

    executor = submitit.SlurmExecutor(folder)
    more = {name: value for name, value in options.given.items() if name != "time"}
    executor.update_parameters(
        job_name="diffusion-lens", time=options.minutes, array_parallelism=n_jobs, additional_parameters=more
    )
    return executor
