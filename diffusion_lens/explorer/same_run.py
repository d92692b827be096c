"""Whether a result is of a trajectory: made under the network that wrote it, on its canvases."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.same_network import COMPARED, canvas_provenance, without_canvas_hooks
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.records.results import differences, network_of


def require_network(what: str, record: dict[str, Any], trajectory: Trajectory) -> None:
    """Raise a `ValueError` unless a result was made under the network that wrote the trajectory."""
    ours = without_canvas_hooks(network_of(record))
    wrote = without_canvas_hooks(
        {name: value for name, value in canvas_provenance(trajectory.record).items() if name in ours}
    )
    compared = [name for name in COMPARED if wrote.get(name) is not None and ours.get(name) is not None]
    if different := "; ".join(differences(wrote, ours, compared)):
        raise ValueError(
            f"the {what} is of another network than the one that wrote the trajectory ({different}), and a page shows "
            "them as one"
        )


def cached_steps(argument: str, cache: TrajectoryCache, trajectory: Trajectory) -> tuple[int, ...]:
    """The steps of a cache that the trajectory has, if it is of a run with as many steps."""
    n_steps = len(trajectory.record["times"]) - 1
    if cache.n_steps != n_steps:
        raise ValueError(f"{argument}= is of a run of {cache.n_steps} steps, and the trajectory has {n_steps}")
    steps = tuple(step for step in cache.steps if step >= trajectory.first_step)
    if (written := cache.canvases) is not None and written.shape[1:] == trajectory.canvases.shape[1:]:
        for step in steps:
            if not torch.equal(written[step].cpu(), trajectory.canvases[step - trajectory.first_step].cpu()):
                raise ValueError(
                    f"{argument}= is of another run: its canvas at step {step} is another one than the trajectory's"
                )
    return steps


def require_shape(argument: str, shape: Sequence[int], trajectory: Trajectory) -> None:
    """Raise a `ValueError` unless activations [batch pos ...] have the rows and positions of the trajectory."""
    if tuple(shape) != tuple(trajectory.tokens.shape):
        raise ValueError(
            f"{argument}= has {shape[0]} rows of {shape[1]} positions, and the trajectory "
            f"{list(trajectory.tokens.shape)} [batch pos]; pos_slice must be left out"
        )
