"""A Dask cluster of two worker processes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from engines import FACTS, STUDIES, accident, assert_same, files, interrupt, until

from diffusion_lens.analysis import Workers
from diffusion_lens.analysis.over_facts import executor


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("dask")
    with (
        LocalCluster(2, threads_per_worker=1, dashboard_address=None, local_directory=str(folder)) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", STUDIES)
def test_numbers(model: Any, serial: dict[str, Any], client: Client, name: str) -> None:
    assert_same(STUDIES[name](model, executor=Workers(client.get_executor(), facts_per_task=2)), serial[name])


def test_a_worker_is_killed_in_the_middle(model: Any, serial: dict[str, Any], client: Client, tmp_path: Path) -> None:
    with accident(model, tmp_path):
        workers = Workers(client.get_executor(), facts_per_task=1)
        result = STUDIES["aie"](model, executor=workers, out=tmp_path / "study")
    assert_same(result, serial["aie"])


def fails_once(marker: str) -> Callable[[bytes], bytes]:
    def run(task: bytes) -> bytes:
        import os

        from diffusion_lens.analysis.over_facts.executor import run_task

        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return run_task(task)
        raise OSError("the network went away")

    return run


def test_a_second_attempt_is_not_answered_by_the_error_of_the_first(
    model: Any, serial: dict[str, Any], client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "run_task", fails_once(str(tmp_path / "failed")))
    workers = Workers(client.get_executor(), facts_per_task=2, retries=1)
    assert_same(STUDIES["recall"](model, executor=workers), serial["recall"])


def test_ctrl_c_cancels_the_tasks(model: Any, serial: dict[str, Any], client: Client, tmp_path: Path) -> None:
    out = tmp_path / "study"
    workers = Workers(client.get_executor(), facts_per_task=1)
    with interrupt(model, out), pytest.raises(KeyboardInterrupt):
        STUDIES["aie"](model, executor=workers, out=out)
    until(lambda: not any(client.processing().values()), "the end of the tasks")
    assert 0 < len(files(out)) < len(FACTS)
