"""One run that many tests take up again, and when two runs count as the same."""

from functools import cache
from typing import Any

import torch

from diffusion_lens.denoising.samplers import Ancestral
from diffusion_lens.denoising.trajectory import Trajectory

RESID = "blocks.1.hook_resid_post"
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@cache
def record(source: Any, **more: Any) -> Trajectory:
    """A run of a fixture's model; the same run for all tests that do not change it."""
    settings = dict(length=10, steps=6, temperature=0.7, seed=3)
    if source.kind == "mdm":
        settings |= dict(cfg_scale=0.8, sampler=None if source.model.cfg.opens_blocks else Ancestral())
    return source.model.denoise(PROMPT, **settings | more)


def same(a: Trajectory, b: Trajectory) -> None:
    assert torch.equal(a.canvases, b.canvases)
    assert torch.equal(a.revealed_at, b.revealed_at)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=1e-5, atol=1e-6)
