"""submitit's local executor: the same jobs as on Slurm, as processes of this machine."""

from pathlib import Path
from typing import Any

import submitit
from engines import STUDIES, Accident, assert_same

from diffusion_lens.analysis import Workers


def test_numbers_and_a_killed_job(model: Any, serial: dict[str, Any], tmp_path: Path) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=5)
    assert_same(STUDIES["recall"](model, executor=Workers(executor, facts_per_task=2)), serial["recall"])
    with Accident(tmp_path).on(model):
        result = STUDIES["aie"](model, executor=Workers(executor, facts_per_task=3), out=tmp_path / "study")
    assert_same(result, serial["aie"])
