"""The commands of the command line on real engines: the results are those of one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

AIE = ["aie", "tiny-mdm", "--trained", "p2d", "--limit", "2", "--samples", "2", "--device", "cpu"]
RECALL = ["recall", "tiny-mdm", "--limit", "3", "--steps", "1", "--steps", "4", "--device", "cpu"]


def results(*arguments: str, out: Path) -> dict[str, Any]:
    """The numbers that a command reports."""
    asked = [sys.executable, "-m", "diffusion_lens", *arguments, "--out", str(out), "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads(done.stdout)["results"]
    return numbers


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The numbers of both commands in one process."""
    return {each[0]: results(*each, out=tmp_path_factory.mktemp(each[0])) for each in (AIE, RECALL)}


def test_processes_of_this_machine(serial: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    assert results(*AIE, "--workers", "2", out=tmp_path) == serial["aie"]


def test_a_cluster_of_dask(serial: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.write_scheduler_file(str(tmp_path / "scheduler.json"))
        assert results(*RECALL, "--dask", cluster.scheduler_address, out=tmp_path / "address") == serial["recall"]
        assert results(*AIE, "--dask", str(tmp_path / "scheduler.json"), out=tmp_path / "file") == serial["aie"]


def test_jobs_of_slurm(serial: dict[str, dict[str, Any]], slurm: Path, tmp_path: Path) -> None:
    options = "partition=main,time=0:05:00,cpus-per-task=1"
    assert results(*AIE, "--slurm", options, "--workers", "2", out=tmp_path / "aie") == serial["aie"]
    assert len(list((tmp_path / "aie" / "jobs").glob("*_log.out"))) > 2
