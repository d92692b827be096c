"""The temporal indirect effect: does one state at one denoising step decide what is written in the end?

Each draw of the corrupted run takes the loop freely, and loses the answer. The run is branched off before step k, one
state is put back to its value in the clean run at step k, in this step alone, and the loop goes on, corrupted, to its
end. The score is the share of draws whose final text holds the answer; the temporal indirect effect is that share minus
the corrupted runs' own. A state without effect here may still move the probabilities of its step (`trace_trajectory`):
what counts here is what is revealed for good.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.batching import in_batches
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import SITES, Restoration
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network
from diffusion_lens.denoising.step_hooks import at_steps, on_branch
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.interventions import restore
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Real, Whole, pick_indices


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
@torch.no_grad()
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
    run = TracedTrajectory.of(model, fact_or_query, trajectory)
    require_same_network(run.trajectory.record, model, "temporal_effect")
    restoration = Restoration.of(kind, window)
    if restoration.severed:
        raise ValueError("temporal_effect severs nothing; give a Restoration without severed")
    corrupt = Corruption.of(corruption, noise, samples, seed, swap)
    rows = run.loop_rows(corrupt, max_bytes)
    own = run.corrupted(corrupt)
    chosen = check_steps(run, range(own.first_step, max(run.revealed_at) + 1) if steps is None else steps)
    places = pick_indices("positions", positions, run.n_pos)
    blocks = pick_indices("layers", layers, model.cfg.n_layers)

    token_scores = torch.full((len(chosen), len(places), len(blocks), len(run.query.answer_tokens)), torch.nan)
    scores = token_scores[..., 0].clone()
    for i, step in enumerate(tqdm(chosen, desc="temporal effect", unit="step", disable=not progress)):
        site = SITES[restoration.kind]
        names = [site(block) for block in range(model.cfg.n_layers)]
        canvas = run.canvas(step)[None]
        with model.clock.at(run.state(step, canvas)):
            _, clean = model.run_with_cache(run.seen(canvas), names_filter=names, return_type=None)
        on_canvas = set(run.on_canvas(step))
        reached = [place for place in places if place in on_canvas]
        for j, layer in enumerate(blocks):
            kept = {name: clean[name] for name in map(site, restoration.span(layer, model.cfg.n_layers))}
            ends = partial(_ends, run, corrupt, own.from_step(step), kept)
            for batch, right in in_batches(ends, reached, rows // corrupt.rows):
                where = [places.index(place) for place in batch]
                token_scores[i, where, j] = right.mean(dim=1)
                scores[i, where, j] = right.prod(dim=2).mean(dim=1)

    return TemporalEffect(
        scores=scores,
        token_scores=token_scores,
        clean=float(run.wrote_the_answer),
        corrupted=run.written(own).all(dim=1).float().mean().item(),
        steps=chosen,
        positions=places,
        layers=blocks,
        str_tokens=model.words(run.trajectory.tokens[0].tolist()),
        subject=run.query.subject,
        record={
            **run.trajectory.record,
            **restoration.describe(),
            **corrupt.describe(),
            "answer": model.words(run.query.answer_tokens),
            **provenance(model, model.cfg),
            "trajectory": canvas_provenance(run.trajectory.record),
        },
    )


def _ends(
    run: TracedTrajectory, corrupt: Corruption, branch: Trajectory, clean: Mapping[str, Tensor], places: Sequence[int]
) -> Float[Tensor, "cell sample selected"]:
    """Which answer tokens (1 or 0) the branches end with, a cell a place, restored in the branch's first step."""
    each = torch.tensor(places).repeat_interleave(corrupt.rows)
    hooks = corrupt.hooks(run.model, run.query, runs=len(places))
    hooks += [(site, at_steps(restore(value, each), branch.first_step)) for site, value in clean.items()]
    ended = branch.repeat(len(places)).replay(
        run.model, canvas="free", fwd_hooks=[(name, on_branch(hook, "conditional")) for name, hook in hooks]
    )
    return run.written(ended).view(len(places), corrupt.rows, -1).float().cpu()
