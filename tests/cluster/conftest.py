"""Studies on real engines, run by `make cluster`. The tests of Slurm need what `.ci/cluster` installs.

No test waits for ever, and no process may be left at the end.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the workers too
os.environ["CLUSTER_TESTS"] = str(os.getpid())  # marks all that these tests start

import pytest
import torch
from engines import STUDIES, processes, until

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import LocalWorkers
from diffusion_lens.interventions import steer

torch.set_num_threads(1)
# A shell lets its jobs in the background ignore Ctrl-C, and their children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = 600  # seconds of a test; one takes a minute on a machine that has nothing else to do


def why_no_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} missing; .ci/cluster installs slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "its daemons are started by root only"


collect_ignore = ["test_slurm.py"] if why_no_slurm() else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if reason := why_no_slurm():
        terminalreporter.write_line(f"LEFT OUT: tests/cluster/test_slurm.py ({reason})", red=True, bold=True)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End a test that hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"the test took more than {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process that was started by these tests outlives them."""

    def left() -> list[str]:
        found = processes(f"CLUSTER_TESTS={os.getpid()}").values()
        return [command for command in found if "resource_tracker" not in command]  # these end with this process

    yield
    until(lambda: not left(), f"the end of {left()}")


@pytest.fixture(scope="session")
def model() -> Iterator[Any]:
    """A model with a hook, which is sent along."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    direction = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", steer(direction, 0.1))]):
        yield model


@pytest.fixture(scope="session")
def serial(model: Any) -> dict[str, Any]:
    """The studies in one process."""
    return {name: study(model) for name, study in STUDIES.items()}


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalWorkers]:
    """Two processes of this machine."""
    with LocalWorkers(2) as pool:
        yield pool
