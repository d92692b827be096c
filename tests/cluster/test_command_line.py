"""The commands of the command line on real engines: the results are those of one process."""

from pathlib import Path

from distributed import Client, LocalCluster
from engines import AIE, RECALL, reported


def test_processes_of_this_machine(tmp_path: Path) -> None:
    spread = reported(*AIE, "--workers", "2", out=tmp_path / "spread")
    assert spread == reported(*AIE, out=tmp_path / "serial")


def test_a_cluster_of_dask(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        spread = reported(*RECALL, "--dask", client.scheduler.address, out=tmp_path / "spread")
    assert spread == reported(*RECALL, out=tmp_path / "serial")
