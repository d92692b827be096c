"""Causal tracing over denoising steps: which states carry the answer, and when?

In the loop of a masked diffusion model the tokens of an answer appear at different steps, from t1, which reveals the
first of them, to t2, which reveals the last. A causal trace is made on the canvas of every step from t1 to t2:
p(answer) is the joint probability of the tokens still masked, and the tokens already revealed are context. The first
step isolates the flow from the subject; later steps also show the flow from the tokens already revealed. A causal model
takes the same call; the answer's tokens that it has not reached are filled in (teacher forcing).

There are two kinds of corrupted canvases. *Forced*: the corrupted run reads the canvases of the clean run. *Free*: each
sample reveals its own tokens from the start. In both, an answer token that has been revealed counts 1, and another
token in its position counts 0.

Under guidance the subject is corrupted and the state restored in the conditional branch; the unconditional branch does
not see the subject.

The caller's hooks inside the network act here as in the loop, and can read the step. Hooks on the loop's own hook
points (`denoise.hook_*`) do not act here; their changes to the clean run are in its canvases.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.causal_tracing.answer_canvases import AnswerCanvas, ScoredStep, scored_steps
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.shared_canvases import can_share_beginnings, run_canvases
from diffusion_lens.analysis.causal_tracing.trajectory_result import TrajectoryTrace
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Real, Whole


@begins_run
def trace_trajectory(
    model: DiffusionTransformer,
    fact_or_query: Fact | Query,
    steps: Iterable[Whole] | None = None,
    canvas: str = "forced",
    *,
    trajectory: Trajectory | None = None,
    kind: str | Restoration = "resid",
    window: Whole = 10,
    noise: Real | None = None,
    samples: Whole = 10,
    seed: Whole = 1,
    corruption: str | Corruption = "gaussian",
    swap: Query | Iterable[Whole] | None = None,
    severed: str | None = None,
    positions: Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TrajectoryTrace:
    """Make a causal trace at every step at which an answer token is masked.

    `trace_steps` takes the settings as objects: a `Restoration`, a `Corruption` and a `Selection`.

    Args:
        steps: Steps to trace; by default from t1, which unmasks the first answer token, to t2, which reveals the last.
        canvas: "forced" or "free", canvases that the corrupted run reads.
        trajectory: Clean run, `model.denoise(query.tokens[None], ...)` with the settings you study (on a causal model,
            of the prompt); by default a run with the default settings of `denoise`. Forced canvases may be another
            network's, such as the plain run's for a model under a hook. All scores are then of the model as it is now,
            but `known`, `revealed_at` and the canvases are of the network that wrote them.

    The other arguments are those of `causal_trace`.

    Raises:
        ValueError: A setting out of range, a trajectory of another prompt or architecture, a step at which no answer
            token is masked. With canvas="free", a trajectory made by another checkpoint or under other hooks, weights
            or modules: the free runs are those of the model as it is now, which may write something else without any
            corruption.

    Warns:
        UserWarning: Canvases that were made by another checkpoint, or under other hooks, weights, modules or dtype.
    """
    return trace_steps(
        TracedTrajectory.of(model, fact_or_query, trajectory),
        steps,
        canvas,
        Restoration.of(kind, window, severed),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection(positions, layers),
        max_bytes=max_bytes,
        progress=progress,
    )


@begins_run
@torch.no_grad()
def trace_steps(
    run: TracedTrajectory,
    steps: Iterable[Whole] | None,
    canvas: str,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    *,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TrajectoryTrace:
    """Make a causal trace at steps of one denoising run, like `trace_trajectory`, with settings given as objects.

    Args:
        run: Clean run and its query, `TracedTrajectory.of(model, query, trajectory)`.
        steps: Steps to trace; `None` selects those from t1 to t2.
        canvas: "forced" or "free", canvases that the corrupted run reads.
        restoration: States that each cell restores.
        corruption: Corruption of the subject.
        selection: Positions and layers of the cells; by default all.
        max_bytes: Memory to use in addition to the weights.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The same as in `trace_trajectory`.

    Warns:
        UserWarning: The same as in `trace_trajectory`.
    """
    # 1. Check the settings; with free canvases, denoise the corrupted runs.
    model = run.model
    check_canvas(canvas)
    if canvas == "free":
        require_same_network(run.trajectory.record, model, "trace_trajectory(canvas='free')")
    else:
        warn_of_another_network({"trajectory": (run.trajectory.record, model)})
    selected_steps = check_steps(run, range(run.answered_from, run.last_step + 1) if steps is None else steps)
    positions, layers = (selection or Selection()).within(run.n_pos, model.cfg.n_layers)
    if canvas == "free":
        run.require_loop_memory(corruption, max_bytes)
    free = run.corrupted(corruption) if canvas == "free" else None

    # 2. Group the steps at which the network reads the same tokens, since these share their passes: steps that reveal
    # nothing and, on a causal model, all steps whose tokens are the answer's. Steps are not grouped under the caller's
    # hooks, which may act by step, on free canvases, or where the network is told different times. Canvases with common
    # beginnings are computed together.
    can_share = free is None and not model.is_hooked
    groups: dict[Hashable, list[int]] = {}
    for step in selected_steps:
        told = run.trajectory.state_at(step).sigma if model.cfg.is_told_time else None
        seen = (told, *run.seen(run.canvas(step)[None])[0].tolist())
        groups.setdefault(seen if can_share else step, []).append(step)
    bundles = [list(groups.values())] if can_share_beginnings(run) else [[members] for members in groups.values()]

    # 3. Score every cell of each canvas.
    traced: dict[int, ScoredStep] = {}
    with tqdm(total=len(groups), desc=f"trace {restoration.kind}", unit="canvas", disable=not progress) as bar:
        for bundle in bundles:
            canvases = [AnswerCanvas.of(run, members, free, corruption.rows) for members in bundle]
            inputs = [each.canvas for each in canvases]
            for runs in run_canvases(run, inputs, restoration, corruption, layers, (max_bytes, 0)):
                traced |= scored_steps(run, runs, canvases[runs.first :], positions, free)
                bar.update(len(runs.canvases))
                del runs  # their activations are freed before the next runs

    # 4. Average over the samples.
    by_step = [traced[step] for step in selected_steps]
    scores = torch.stack([traced_step.grid for traced_step in by_step])
    clean = torch.stack([traced_step.clean for traced_step in by_step])
    corrupted = torch.stack([traced_step.corrupted for traced_step in by_step])
    return TrajectoryTrace(
        scores=scores.prod(dim=4).mean(dim=3),
        token_scores=scores.mean(dim=3),
        chained=_chain(scores, corrupted, selected_steps, run.revealed_at) if free is None else None,
        clean=clean.prod(dim=1),
        corrupted=corrupted.prod(dim=2).mean(dim=1),
        clean_token_scores=clean,
        corrupted_token_scores=corrupted.mean(dim=1),
        steps=selected_steps,
        revealed_at=run.revealed_at,
        known=run.wrote_the_answer,
        str_canvases=[model.words(run.canvas(step).tolist()) for step in selected_steps],
        subject=run.query.subject,
        positions=positions,
        layers=layers,
        record={
            **run.trajectory.record,
            **restoration.describe(),
            **corruption.describe(),
            "canvas": canvas,
            "answer": model.words(run.query.answer_tokens),
            "query": run.query.describe(),
            **provenance(model, model.cfg),
            "trajectory": canvas_provenance(run.trajectory.record),
        },
    )


def check_canvas(canvas: str) -> None:
    """Raise a `ValueError` unless `canvas` is "forced" or "free"."""
    if canvas not in ("forced", "free"):
        raise ValueError(
            f"canvas={canvas!r}; it must be 'forced' (the clean run's canvases) or 'free' (each sample's own)"
        )


def _chain(
    scores: Float[Tensor, "step pos layer sample selected"],
    corrupted: Float[Tensor, "step sample selected"],
    steps: Sequence[int],
    revealed_at: Sequence[int],
) -> Float[Tensor, "pos layer"] | None:
    """p(answer) by the chain rule, with each token read at the step that committed it.

    A position that was not on the canvas of that step could not be restored: its token keeps the corrupted score.
    """
    if not set(revealed_at) <= set(steps):
        return None
    indices = [steps.index(step) for step in revealed_at]
    restored = torch.stack([scores[index, ..., token] for token, index in enumerate(indices)], dim=-1)
    unrestored = torch.stack([corrupted[index, :, token] for token, index in enumerate(indices)], dim=-1)
    return torch.where(restored.isnan(), unrestored, restored).prod(dim=3).mean(dim=2)
