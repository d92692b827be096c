"""A Dask cluster of two worker processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from engines import STUDIES, Accident, assert_same

from diffusion_lens.analysis import Workers


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", STUDIES)
def test_numbers(model: Any, serial: dict[str, Any], client: Client, name: str) -> None:
    assert_same(STUDIES[name](model, executor=Workers(client.get_executor(), facts_per_task=2)), serial[name])


def test_a_worker_is_killed_in_the_middle(model: Any, serial: dict[str, Any], client: Client, tmp_path: Path) -> None:
    with Accident(tmp_path).on(model):
        workers = Workers(client.get_executor(), facts_per_task=1)
        result = STUDIES["aie"](model, executor=workers, out=tmp_path / "study")
    assert_same(result, serial["aie"])
