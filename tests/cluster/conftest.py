"""Studies on real engines. These tests need the extra `cluster`, and those of Slurm Debian's slurm-wlm and munge."""

import os
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of the workers too

import pytest
import torch
from engines import STUDIES

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.interventions import steer

torch.set_num_threads(1)


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
