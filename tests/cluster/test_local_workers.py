"""Processes of this machine: `LocalWorkers`, the executor behind --workers, and two other pools."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import loky
import pytest
from engines import (
    FACTS,
    PATIENCE,
    STUDIES,
    accident,
    assert_same,
    files,
    processes,
    stop_after_a_fact,
    tally,
    until,
)

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import LocalWorkers, Workers
from diffusion_lens.evaluation import recall_by_steps


@pytest.mark.parametrize("name", STUDIES)
def test_numbers(model: Any, serial: dict[str, Any], pool: LocalWorkers, name: str) -> None:
    assert_same(STUDIES[name](model, executor=Workers(pool, facts_per_task=1)), serial[name])


def test_a_killed_process_costs_its_task(
    model: Any, serial: dict[str, Any], pool: LocalWorkers, tmp_path: Path
) -> None:
    with accident(model, tmp_path):
        result = STUDIES["aie"](model, executor=Workers(pool, facts_per_task=2), out=tmp_path / "study")
    assert_same(result, serial["aie"])


@pytest.fixture
def wide(model: Any, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of 100 MB."""
    config = replace(model.cfg, d_model=512, n_layers=8, d_mlp=1408, n_heads=8, d_head=64, n_key_value_heads=8)
    folder = HookedDiffusionTransformer(config, model.tokenizer).save_pretrained(tmp_path / "wide")
    yield folder
    shutil.rmtree(folder)


def kilobytes(pids: set[int]) -> int:
    """The memory of processes, in which each page counts once, however many of them map it."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(kb) for text in texts for kb in re.findall(r"^Pss: +(\d+)", text, re.M))


def test_workers_load_a_model_once_and_share_its_weights(
    model: Any, pool: LocalWorkers, wide: Path, tmp_path: Path
) -> None:
    def passes(model: Any, log: Path) -> dict[int, list[int]]:
        """The numbers of the forward passes of each worker's copy."""
        with model.hooks(fwd_hooks=[("hook_embed", tally(str(log)))]):
            recall_by_steps(model, FACTS, [1], batch_size=1, executor=Workers(pool, facts_per_task=1))
        numbers: dict[int, list[int]] = {}
        for line in log.read_text().splitlines():
            pid, number = map(int, line.split())
            numbers.setdefault(pid, []).append(number)
        return numbers

    pids = set(passes(model, tmp_path / "tiny"))
    before = kilobytes(pids)
    numbers = passes(HookedDiffusionTransformer.from_pretrained(wide, device="cpu"), tmp_path / "log")
    more, size = (kilobytes(pids) - before) * 1024, (wide / "model.safetensors").stat().st_size
    assert set(numbers) == pids
    assert len(pids) == 2
    assert all(ran == list(range(1, len(ran) + 1)) for ran in numbers.values())  # a second copy would begin at 1 again
    assert sum(map(len, numbers.values())) >= len(FACTS)
    assert size > 90e6
    assert 0.9 * size < more < 1.4 * size


def test_a_standard_pool_breaks_and_the_folder_resumes(model: Any, serial: dict[str, Any], tmp_path: Path) -> None:
    with accident(model, tmp_path), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(RuntimeError, match=r"the executor takes no more tasks.*LocalWorkers does not"):
            STUDIES["aie"](model, executor=Workers(pool, facts_per_task=1), out=tmp_path / "study")
        assert_same(STUDIES["aie"](model, out=tmp_path / "study"), serial["aie"])


def test_numbers_of_loky(model: Any, serial: dict[str, Any]) -> None:
    with loky.ProcessPoolExecutor(2) as pool:
        assert_same(STUDIES["recall"](model, executor=Workers(pool, facts_per_task=2)), serial["recall"])


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from engines import STUDIES, stop_after_a_fact
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import LocalWorkers, Workers

if __name__ == "__main__":
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with model.hooks(fwd_hooks=[("hook_embed", stop_after_a_fact({out!r}, {on!r}))]), LocalWorkers(2) as pool:
        STUDIES["aie"](model, executor=Workers(pool, facts_per_task=1), out={out!r})
"""


@pytest.mark.parametrize("ended_by", ["Ctrl-C", "SIGKILL"])
def test_the_end_of_a_study_ends_its_processes_and_its_folder_resumes(tmp_path: Path, ended_by: str) -> None:
    script, out, on = tmp_path / "script.py", tmp_path / "study", tmp_path / "go on"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), out=str(out), on=str(on)))
    mark = f"STUDY_OF={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, **dict([mark.split("=", 1)])},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: files(out) or process.poll() is not None, "a result")
        assert len(processes(mark)) > 2
        if ended_by == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of its processes
        else:
            process.kill()
        _, errors = process.communicate(timeout=PATIENCE)
        until(lambda: not processes(mark), "the end of the workers")
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert process.returncode != 0
    assert ended_by == "SIGKILL" or "KeyboardInterrupt" in errors
    assert 0 < len(files(out)) < len(FACTS)
    on.touch()
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with model.hooks(fwd_hooks=[("hook_embed", stop_after_a_fact(str(out), str(on)))]):
        resumed, again = STUDIES["aie"](model, out=out), STUDIES["aie"](model)
    assert_same(resumed, again)
