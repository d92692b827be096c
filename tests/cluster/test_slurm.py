"""A real Slurm of two nodes on this machine."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
from engines import STUDIES, Accident, assert_same

from diffusion_lens.analysis import Workers

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    subprocess.run([SCRIPT, "start", folder], check=True)
    yield folder
    subprocess.run([SCRIPT, "stop", folder], check=True)


def jobs(folder: Path) -> submitit.SlurmExecutor:
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(partition="main", time=5, cpus_per_task=1, array_parallelism=2)
    return executor


@pytest.mark.parametrize("name", STUDIES)
def test_numbers(model: Any, serial: dict[str, Any], slurm: Path, tmp_path: Path, name: str) -> None:
    workers = Workers(jobs(tmp_path / "jobs"), facts_per_task=3)
    assert_same(STUDIES[name](model, executor=workers, out=tmp_path / "study"), serial[name])


def lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


class DeadNode(Accident):
    """Ends the daemon of the node too, so that Slurm finds the node dead and gives its job to the other."""

    def __init__(self, folder: Path, slurm: Path) -> None:
        super().__init__(folder)
        self.slurm = slurm

    def _kill(self) -> None:
        while not self.marker.exists() or not (pid := self.marker.read_text()):
            time.sleep(0.1)
        node = dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line)[
            "SLURMD_NODENAME"
        ]
        os.kill(int((self.slurm / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        group = os.getpgid(int(pid))
        step = int(Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[1])
        for process in (step, int(pid)):
            os.kill(process, signal.SIGKILL)
        # Slurm starts a job again two minutes after its node died; an administrator may hurry it.
        while not (again := [job for job in lines("squeue", "--noheader", "--format", "%i %r") if "BeginTime" in job]):
            time.sleep(0.5)
        lines("scontrol", "update", f"JobId={again[0].split()[0]}", "StartTime=now")


def test_a_node_is_killed(model: Any, serial: dict[str, Any], slurm: Path, tmp_path: Path) -> None:
    with DeadNode(tmp_path, slurm).on(model):
        workers = Workers(jobs(tmp_path / "jobs"), facts_per_task=2)
        result = STUDIES["aie"](model, executor=workers, out=tmp_path / "study")
    assert_same(result, serial["aie"])
    assert "down" in [state.strip("*") for state in lines("sinfo", "--noheader", "--Node", "--format", "%t")]
