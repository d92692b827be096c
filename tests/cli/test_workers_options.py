"""--workers, --dask and --slurm: which workers a command gets, and what it says of them."""

import json
import shutil
import sys
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_this_process import InThisProcess
from typer.testing import CliRunner

from diffusion_lens.analysis.causal_tracing import average
from diffusion_lens.cli import app
from diffusion_lens.cli.workers import SlurmOptions, WorkerChoice, minutes

AIE = ["aie", "tiny-mdm", "--trained", "p2d", "--asked", "d2p", "--limit", "2", "--samples", "1"]
GPUS = "partition=gpu,gres=gpu:1,time=2:00:00"


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `cluster` is installed."""
    monkeypatch.setattr("diffusion_lens.cli.report.find_spec", lambda name: object())


# From the manual page of sbatch: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours",
# "days-hours:minutes" and "days-hours:minutes:seconds".
@pytest.mark.parametrize(
    ("written", "expected"),
    [("90", 90), ("90:30", 91), ("1:30:00", 90), ("2-12", 3600), ("2-12:30", 3630), ("2-12:30:59", 3631), ("0:10", 1)],
)
def test_a_time_is_read_as_slurm_reads_it(written: str, expected: int) -> None:
    assert minutes(written) == expected


@pytest.mark.parametrize("written", ["two hours", "1:2:3:4", "UNLIMITED", "1-"])
def test_another_time_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"2:00:00 for two hours"):
        minutes(written)


def test_options_of_slurm_are_read_as_they_are_written() -> None:
    options = SlurmOptions.read("partition=gpu,nodelist=n1,n2,--mem=16G,cpus_per_task=8,time=30")
    assert options.given == {
        "partition": "gpu", "nodelist": "n1,n2", "mem": "16G", "cpus-per-task": "8", "time": "30"
    }  # fmt: skip
    assert (options.n_cores, options.minutes, options.has_gpus) == (8, 30, False)
    for text in (GPUS, "gpus=1,time=5", "gpus-per-node=2,time=5"):
        assert SlurmOptions.read(text).has_gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partiton=gpu,time=5", r"'partiton', which is unknown here; known are account, .*partition"),
        ("partition=gpu", "has no time, the limit of one job"),
        ("time=5,time=6", "give 'time' once"),
        ("partition=,time=5", "give 'partition' once, with a value"),
        ("time=5,cpus-per-task=many", "has 'many' cores"),
    ],
)
def test_other_options_of_slurm_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SlurmOptions.read(text)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("number", "dask", "slurm", "device", "of_model", "of_layout"),
    [
        (None, None, None, None, None, None),
        (None, None, None, "cuda:1", "cuda:1", "cuda:1"),
        (2, None, None, None, None, "cpu"),
        (2, None, None, "cuda", "cuda", "cpu"),
        (None, "node:8786", None, "cuda", "cuda", "cpu"),
        (2, None, GPUS, None, "cuda", "cpu"),
        (2, None, "time=5", None, "cpu", "cpu"),
        (2, None, GPUS, "cpu", "cpu", "cpu"),
    ],
)
def test_the_device_is_that_of_the_workers(
    number: Any, dask: Any, slurm: Any, device: Any, of_model: Any, of_layout: Any
) -> None:
    choice = WorkerChoice(number, dask, slurm, device)
    assert (choice.model_device, choice.layout) == (of_model, of_layout)


def test_processes_share_the_threads_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_lens.analysis.LocalWorkers", InThisProcess)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for number, threads in ((1, 8), (3, 2), (16, 1)):
        with WorkerChoice(number, None, None, "cpu").open(tmp_path) as workers:
            assert workers is not None
            assert (workers.threads, workers.tasks, workers.device) == (threads, 4 * number, "cpu")


@pytest.mark.usefixtures("clusters")
def test_jobs_of_slurm_get_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlurmExecutor:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def update_parameters(self, **given: Any) -> None:
            self.given = given

        def submit(self, fn: Any, *args: Any) -> None: ...

    choice = WorkerChoice(16, None, f"{GPUS},cpus-per-task=4")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="on a login node of the cluster"), choice.open(tmp_path):
        pass
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(SlurmExecutor=SlurmExecutor))
    with choice.open(tmp_path) as workers:
        assert workers is not None
        executor: Any = workers.executor
    assert (workers.threads, workers.tasks, workers.device) == (4, 64, "cuda")
    assert executor.folder == tmp_path / "jobs"
    assert executor.given == {
        "job_name": "diffusion-lens",
        "time": 120,
        "array_parallelism": 16,
        "additional_parameters": {"partition": "gpu", "gres": "gpu:1", "cpus-per-task": "4"},
    }


@pytest.mark.usefixtures("clusters")
def test_a_cluster_of_dask_says_what_its_workers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[Any] = []
    pool = InThisProcess(0)

    class Client(AbstractContextManager[Any]):
        def __init__(self, *address: str, **named: str) -> None:
            connected.append(address or named)

        def __exit__(self, *error: object) -> None:
            connected.append("closed")

        def submit(self, fn: Any, *args: Any, pure: bool) -> Any:
            return pool.submit(lambda: "cuda")

        def nthreads(self) -> dict[str, int]:
            return {f"tcp://node{i}": 2 + i % 2 for i in range(20)}

        def get_executor(self) -> InThisProcess:
            return pool

    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=Client))
    (tmp_path / "scheduler.json").touch()
    for address, device in (("tcp://node:8786", None), (str(tmp_path / "scheduler.json"), "cpu")):
        with WorkerChoice(None, address, None, device).open(tmp_path) as workers:
            assert workers is not None
            assert (workers.threads, workers.tasks, workers.device) == (2, 80, device or "cuda")
    assert connected == [("tcp://node:8786",), "closed", {"scheduler_file": str(tmp_path / "scheduler.json")}, "closed"]


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--workers", "1"], "workers: 1 process on this machine, "),
        (["--dask", "node:8786"], "workers: those of the Dask cluster at node:8786\n"),
        (
            ["--workers", "16", "--slurm", GPUS],
            "workers: at most 16 Slurm jobs at a time (partition gpu, gres gpu:1, time 2:00:00), on cuda\n",
        ),
    ],
)
def test_a_dry_run_names_the_workers(asked: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*AIE, *asked, "--dry-run", "--flops", "1e12", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn_figures")
def test_facts_that_failed_are_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, n_traced = average.causal_trace, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_traced
        n_traced += 1
        if n_traced == 1:
            raise MemoryError("too long a text")
        return trace(*args, **kwargs)

    monkeypatch.setattr("diffusion_lens.analysis.LocalWorkers", InThisProcess)
    monkeypatch.setattr(average, "causal_trace", failing)
    asked = [*AIE, "--workers", "2", "--known", "all", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, asked).stdout
    assert "1 fact failed and is left out (" in first
    assert "MemoryError: too long a text); the same command tries again" in first
    assert len(json.loads((tmp_path / "command.json").read_text())["record"]["failed"]) == 1
    assert "left out" not in CliRunner().invoke(app, asked).stdout


def test_workers_that_die_are_a_failure_and_not_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mortal(InThisProcess):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(OSError("the node went away"))
            return future

    monkeypatch.setattr("diffusion_lens.analysis.LocalWorkers", Mortal)
    asked = ["recall", "tiny-mdm", "--limit", "1", "--steps", "1", "--workers", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("Error: the worker of the task that still has to compute ")
    assert "died 3 times, last with OSError: the node went away. What was computed is kept under --out: " in line
    assert line.endswith("the same command can compute the rest")
