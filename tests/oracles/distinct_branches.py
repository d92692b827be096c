"""The distinct continuations of branches of a corrupted run, found by denoising every branch of every cell alone."""

from typing import Any

from torch import Tensor

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import temporal_effect
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.interventions import named


def continued_positions(
    model: HookedDiffusionTransformer, query: Query, run: Trajectory, is_causal: bool, settings: dict[str, Any]
) -> int:
    """Positions to compute after restored steps: the canvas or, on a causal model, its new position, for each distinct
    (step, sample, canvas) that is not the corrupted run's.

    A hook on the loop makes `temporal_effect` denoise every branch alone, in copies of all samples, and sees canvases.
    """
    n_samples, last = settings["samples"], int(run.revealed_at[0, list(query.answer_positions)].max())
    seen: list[tuple[int, list[list[int]]]] = []

    def look(tokens: Tensor, hook: Any) -> None:
        seen.append((hook.step.index, tokens.tolist()))

    with model.hooks(fwd_hooks=[("denoise.hook_tokens", named("look", look))]):
        hooked = run.replay(model, canvas="free")
        seen.clear()
        temporal_effect(model, query, trajectory=hooked, **settings)
    # The first steps that were seen are those of the corrupted runs.
    own = {(step, i, tuple(row)) for step, rows in seen[: run.n_steps] for i, row in enumerate(rows)}
    branches = {(step, i % n_samples, tuple(row)) for step, rows in seen for i, row in enumerate(rows)}
    new = [step for step, _, _ in branches - own if not is_causal or step <= last]
    return len(new) * (1 if is_causal else run.tokens.shape[1])
