"""`LocalWorkers`, the executor behind --workers, and the process pool of the standard library."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from engines import FACTS, STUDIES, Accident, assert_same

from diffusion_lens.analysis import LocalWorkers, Workers
from diffusion_lens.analysis.resumable import FactFolder


def test_numbers_of_both_studies(model: Any, serial: dict[str, Any]) -> None:
    with LocalWorkers(2) as pool:
        for name, study in STUDIES.items():
            assert_same(study(model, executor=Workers(pool, facts_per_task=1)), serial[name])


def test_a_killed_process_costs_its_task(model: Any, serial: dict[str, Any], tmp_path: Path) -> None:
    with LocalWorkers(2) as pool, Accident(tmp_path).on(model):
        result = STUDIES["aie"](model, executor=Workers(pool, facts_per_task=2), out=tmp_path / "study")
    assert_same(result, serial["aie"])


def test_a_standard_pool_breaks_and_the_folder_resumes(model: Any, serial: dict[str, Any], tmp_path: Path) -> None:
    accident = Accident(tmp_path)
    with accident.on(model), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.raises(RuntimeError, match=r"the executor takes no more tasks.*LocalWorkers does not"):
            STUDIES["aie"](model, executor=Workers(pool, facts_per_task=1), out=tmp_path / "study")
        assert_same(STUDIES["aie"](model, out=tmp_path / "study"), serial["aie"])


SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from engines import STUDIES
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import LocalWorkers, Workers

def slowly(activation, hook):
    import time
    time.sleep(0.02)

if __name__ == "__main__":
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with model.hooks(fwd_hooks=[("hook_embed", slowly)]), LocalWorkers(2) as pool:
        STUDIES["aie"](model, executor=Workers(pool, facts_per_task=1), out={out!r})
"""


def members(group: int) -> list[str]:
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append((stat.parent / "cmdline").read_text())
    return found


def test_ctrl_c_ends_the_processes_and_leaves_a_folder_that_resumes(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "study"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), out=str(out)))
    process = subprocess.Popen([sys.executable, script], start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not list(out.glob("*.safetensors")):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    deadline = time.monotonic() + 30
    while left := members(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    folder = FactFolder.open(out)
    assert 0 < sum(folder.has(fact.id) for fact in FACTS) < len(FACTS)
    subprocess.run([sys.executable, script], check=True)
    assert all(FactFolder.open(out).has(fact.id) for fact in FACTS)
