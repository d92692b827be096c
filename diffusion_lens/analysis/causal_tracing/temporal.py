"""The temporal indirect effect: does one state at one denoising step decide what is written in the end?

Each draw of the corrupted run takes the loop freely, and loses the answer. The run is branched off before step k, one
state is put back to its value in the clean run at step k, in this step alone, and the loop goes on, corrupted, to its
end. The score is the share of draws whose final text holds the answer; the temporal indirect effect is that share minus
the corrupted runs' own. A state without effect here may still move the probabilities of its step (`trace_trajectory`):
what counts here is what is revealed for good.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import RestoredRuns, RunPair
from diffusion_lens.analysis.kept_run import NetworkInput
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.predictor import guide
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network
from diffusion_lens.denoising.step_hooks import on_branch
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Real, Whole


@dataclass(frozen=True, eq=False)
class TemporalEffect:
    """What one state at one step changes in the end.

    Attributes:
        scores: Float[step pos layer], share of draws that end with the answer when that state is restored at that step;
            NaN at places that the canvas of a causal model does not hold yet.
        token_scores: Float[step pos layer selected], the same for each token of the answer alone.
        clean: 1 if the clean run ends with the answer, else 0.
        corrupted: share of the corrupted runs that do.
        steps: the step of each grid.
        positions: the place of each row of the grids.
        layers: the layer of each column.
        str_tokens: the clean run's final canvas, a string a place.
        subject: first and one past the last place of the subject.
        record: as in `TrajectoryTrace`.
    """

    scores: Float[Tensor, "step pos layer"]
    token_scores: Float[Tensor, "step pos layer selected"]
    clean: float
    corrupted: float
    steps: list[int]
    positions: list[int]
    layers: list[int]
    str_tokens: list[str]
    subject: tuple[int, int]
    record: dict[str, Any]

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """scores - corrupted."""
        return self.scores - self.corrupted

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "temporal effect", self)

    @classmethod
    def load(cls, path: str | Path) -> "TemporalEffect":
        """Read what `save` wrote."""
        return load_fields(path, "temporal effect", cls)


@begins_run
def temporal_effect(
    model: DiffusionTransformer,
    fact_or_query: Fact | Query,
    steps: Iterable[Whole] | None = None,
    *,
    trajectory: Trajectory | None = None,
    kind: str | Restoration = "resid",
    window: Whole = 10,
    noise: Real | None = None,
    samples: Whole = 10,
    seed: Whole = 1,
    corruption: str | Corruption = "gaussian",
    swap: Query | Iterable[Whole] | None = None,
    positions: Iterable[Whole] | None = None,
    layers: Iterable[Whole] | None = None,
    max_bytes: int = 2**30,
    progress: bool = False,
) -> TemporalEffect:
    """Restore each state at each step alone, and see what is written in the end.

    Every cell and draw takes the loop from its step to the end: choose `steps`, `positions` and `layers` on a large
    model.

    Args:
        steps: steps at which states are restored; by default all up to the one that reveals the answer's last token.
        trajectory: the clean run, as in `trace_trajectory`, made under the hooks, weights and modules that the model
            has now: its ending is compared with the model's corrupted runs.

    The other arguments are those of `causal_trace`.

    Raises:
        ValueError: as in `trace_trajectory`, or a trajectory made by another checkpoint or under other hooks, weights
            or modules.

    Warns:
        UserWarning: a trajectory that begins on a canvas which another network wrote (a free replay from the middle).
            The corrupted runs begin on it too, so the scores are of this network alone.
    """
    return restore_in_loop(
        TracedTrajectory.of(model, fact_or_query, trajectory),
        steps,
        Restoration.of(kind, window),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection.of(positions, layers),
        max_bytes,
        progress,
    )


@torch.no_grad()
def restore_in_loop(
    run: TracedTrajectory,
    steps: Iterable[Whole] | None,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection,
    max_bytes: int,
    progress: bool = False,
) -> TemporalEffect:
    """Restore states of one run at single steps; `temporal_effect` describes the arguments."""
    model = run.model
    if restoration.severed:
        raise ValueError("temporal_effect severs nothing; give a Restoration with severed=None")
    require_same_network(run.trajectory.record, model, "temporal_effect")
    run.require_loop_memory(corruption, max_bytes)
    own = run.corrupted(corruption)
    chosen = check_steps(run, range(own.first_step, max(run.revealed_at) + 1) if steps is None else steps)
    positions, layers = selection.within(run.n_pos, model.cfg.n_layers)

    by_sample = torch.full(
        (len(chosen), len(positions), len(layers), corruption.rows, len(run.query.answer_tokens)), torch.nan
    )
    for i, step in enumerate(tqdm(chosen, desc="temporal effect", unit="step", disable=not progress)):
        on_canvas = [index for index, position in enumerate(positions) if position in run.on_canvas(step)]
        branch = _Branch(run, corruption, own, step)
        runs = RestoredRuns(branch.pair(), restoration, layers)
        engine = runs.engine(branch.endings, run.written(own).float(), max_bytes, run.loop_row_bytes())
        by_sample[i, on_canvas] = runs.grid(engine, [positions[index] for index in on_canvas])

    return TemporalEffect(
        scores=by_sample.prod(dim=4).mean(dim=3),
        token_scores=by_sample.mean(dim=3),
        clean=float(run.wrote_the_answer),
        corrupted=run.written(own).all(dim=1).float().mean().item(),
        steps=chosen,
        positions=positions,
        layers=layers,
        str_tokens=model.words(run.trajectory.tokens[0].tolist()),
        subject=run.query.subject,
        record={
            **run.trajectory.record,
            **restoration.describe(),
            **corruption.describe(),
            "answer": model.words(run.query.answer_tokens),
            **provenance(model, model.cfg),
            "trajectory": canvas_provenance(run.trajectory.record),
        },
    )


class _Branch:
    """The corrupted runs of the loop before one step, to be branched off with one state restored in that step.

    The step itself is a restored run of the branch's own canvases, so it is computed from the restored layer on; its
    logits, guided if the run is, are given to the loop, which takes the steps after it.
    """

    def __init__(self, run: TracedTrajectory, corruption: Corruption, own: Trajectory, step: int) -> None:
        self.run, self.corruption, self.before = run, corruption, own.from_step(step)
        self.step, self.canvases = step, own.canvases[step - own.first_step]
        masked = (self.canvases == run.trajectory.record["blank"]).any(dim=0).nonzero().flatten()
        # On a causal canvas the loop proposes a token for the next position only.
        self.positions: list[int] = (masked[:1] if run.model.cfg.is_causal else masked).tolist()
        self.rows: list[int] = run.model.readout.rows(torch.tensor(self.positions)).tolist()
        self.scale = run.trajectory.record["cfg_scale"]
        self.unconditional = run.unconditional(step, self.canvases, self.rows) if self.scale else None

    def pair(self) -> RunPair:
        """The clean and the corrupted run of the step."""
        run, model, clean = self.run, self.run.model, self.run.canvas(self.step)[None]
        return RunPair(
            clean=NetworkInput(model, run.seen(clean), self.rows, step=run.state(self.step, clean)),
            corrupted=NetworkInput(
                model,
                self.canvases.clamp(min=0),
                self.rows,
                step=run.state(self.step, self.canvases),
                hooks=self.corruption.hooks(model, run.query),
            ),
            subject=run.query.subject,
        )

    def endings(
        self, logits: Float[Tensor, "batch selected d_vocab_out"], computed: Int[Tensor, "selected"]
    ) -> Float[Tensor, "cell sample answer"]:
        """Which answer tokens (1 or 0) the branches end with, whose step has these logits."""
        samples, model, query = self.corruption.rows, self.run.model, self.run.query
        if self.unconditional is not None:
            conditional = logits.unflatten(0, (-1, samples))
            logits = guide(conditional, self.unconditional.expand_as(conditional), self.scale).flatten(0, 1)
        n_cells = len(logits) // samples
        hooks = [
            (name, on_branch(hook, "conditional")) for name, hook in self.corruption.hooks(model, query, runs=n_cells)
        ]
        ended = self.before.repeat(n_cells).replay_from_logits(model, logits, self.positions, hooks)
        return self.run.written(ended).view(n_cells, samples, -1).float()
