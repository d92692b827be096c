"""submitit's local executor: the same jobs as on Slurm, as processes of this machine."""

from pathlib import Path
from typing import Any

import pytest
import submitit
from engines import FACTS, STUDIES, accident, assert_same, files, interrupt, processes, until

from diffusion_lens.analysis import Workers


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> submitit.LocalExecutor:
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 1)  # no slow file system here
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=10)
    return executor


def test_numbers_and_a_killed_job(
    model: Any, serial: dict[str, Any], executor: submitit.LocalExecutor, tmp_path: Path
) -> None:
    with accident(model, tmp_path):
        result = STUDIES["recall"](model, executor=Workers(executor, facts_per_task=4), out=tmp_path / "study")
    assert_same(result, serial["recall"])


@pytest.mark.filterwarnings("ignore:.*Popen:pytest.PytestUnraisableExceptionWarning")  # submitit awaits no process
def test_ctrl_c_ends_the_jobs(model: Any, executor: submitit.LocalExecutor, tmp_path: Path) -> None:
    out = tmp_path / "study"
    with interrupt(model, out), pytest.raises(KeyboardInterrupt):
        STUDIES["aie"](model, executor=Workers(executor, facts_per_task=3), out=out)
    until(lambda: not processes("SUBMITIT_EXECUTOR=local"), "the end of the jobs")
    assert 0 < len(files(out)) < len(FACTS)
