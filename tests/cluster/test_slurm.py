"""A real Slurm of two nodes on this machine, which keeps no accounts."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import submitit
from engines import (
    AIE,
    FACTS,
    PATIENCE,
    STUDIES,
    accident,
    assert_same,
    files,
    interrupt,
    kill,
    processes,
    reported,
    until,
)

from diffusion_lens.analysis import Workers

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setattr(submitit.Job, "_results_timeout_s", 1)  # no slow file system here
        try:
            run(str(SCRIPT), "start", str(folder))
            yield folder
        finally:
            run(str(SCRIPT), "stop", str(folder))


def run(*command: str) -> list[str]:
    """The lines that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def environ(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")


def two_nodes(folder: Path, facts_per_task: int) -> Workers:
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(partition="main", time=30, cpus_per_task=1, array_parallelism=2)
    return Workers(executor, facts_per_task=facts_per_task)


@pytest.mark.parametrize("name", STUDIES)
def test_numbers(model: Any, serial: dict[str, Any], slurm: Path, tmp_path: Path, name: str) -> None:
    workers = two_nodes(tmp_path / "jobs", 3)
    assert_same(STUDIES[name](model, executor=workers, out=tmp_path / "study"), serial[name])


def test_ctrl_c_empties_the_queue(model: Any, slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    with interrupt(model, out), pytest.raises(KeyboardInterrupt):
        STUDIES["aie"](model, executor=two_nodes(tmp_path / "jobs", 2), out=out)
    until(lambda: not run("squeue", "--noheader"), "an empty queue")
    assert 0 < len(files(out)) < len(FACTS)


def test_a_node_is_killed(model: Any, serial: dict[str, Any], slurm: Path, tmp_path: Path) -> None:
    def kill_node(pid: int) -> None:
        """Kill all that runs on the node: Slurm finds it dead, and gives its job to the other."""
        environment = dict(each.split("=", 1) for each in environ(pid) if "=" in each)
        kill(int((slurm / f"slurmd-{environment['SLURMD_NODENAME']}.pid").read_text()))
        step = f"slurmstepd: [{environment['SLURM_JOB_ID']}."
        for process, command in processes(f"SLURM_CONF={slurm / 'slurm.conf'}").items():
            with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                if command.startswith(step) or f"SLURM_JOB_ID={environment['SLURM_JOB_ID']}" in environ(process):
                    kill(process)
        # Slurm starts a job again two minutes after its node died; an administrator may hurry it.
        again = until(lambda: [line for line in run("squeue", "-ho", "%i %r") if "BeginTime" in line], "a second start")
        run("scontrol", "update", f"JobId={again[0].split()[0]}", "StartTime=now")

    with accident(model, tmp_path, kill_node):
        workers = two_nodes(tmp_path / "jobs", 2)
        result = STUDIES["aie"](model, executor=workers, out=tmp_path / "study")
    assert_same(result, serial["aie"])
    assert "down" in [state.strip("*") for state in run("sinfo", "--noheader", "--Node", "--format", "%t")]


def test_a_command_on_two_nodes(slurm: Path, tmp_path: Path) -> None:
    options = "partition=main,time=0:30:00,cpus-per-task=1"
    spread = reported(*AIE, "--slurm", options, "--workers", "2", out=tmp_path / "spread")
    assert len(list((tmp_path / "spread" / "jobs").glob("*_log.out"))) > 2
    assert spread == reported(*AIE, out=tmp_path / "serial")
