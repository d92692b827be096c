"""Causal tracing over denoising steps: by which states is the answer carried, and when?

In the loop of a masked diffusion model the tokens of an answer appear at different steps, from t1, which reveals the
first of them, to t2, which reveals the last. At every step between, a causal trace asks the canvas of that step:
p(answer) is the joint probability of the tokens still masked, those already revealed being context. The first step
isolates the flow from the subject; later ones also show the flow from the tokens already revealed. A causal model takes
the same call; what it has not reached is continued with the answer's tokens (teacher forcing).

Two readings of the corrupted run. *Forced*: it sees the canvases of the clean run. *Free*: each draw reveals what it
likes, from the start. In both an answer token that has been revealed counts 1, another one in its place 0.

Under guidance the subject is corrupted and the state restored in the conditional branch; the other sees no subject.

Hooks of the caller inside the network act here as in the loop, and are told the step. Those on the loop's own hook
points (`denoise.hook_*`) do not pass: what they changed in the clean run is in its canvases.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.restored_runs import CanvasRun, RestoredRuns
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, check_steps
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_network, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields
from diffusion_lens.settings import Real, Whole


@dataclass(frozen=True, eq=False)
class TrajectoryTrace:
    """One query traced at several steps of one run.

    Attributes:
        scores: Float[step pos layer], p(answer) with that state restored at that step, mean over the draws: the product
            over the tokens still masked, times 0 where another token than the answer's has been revealed. NaN at places
            that the canvas of a causal model does not hold yet.
        token_scores: Float[step pos layer selected], the same for each token of the answer alone.
        chained: Float[pos layer], p(answer) by the chain rule: each token read at the step that committed it, with the
            state restored at all these steps. `None` for free canvases, and where not all of these steps were traced.
        clean: Float[step], of the clean run.
        corrupted: Float[step], of the corrupted run.
        clean_token_scores: Float[step selected].
        corrupted_token_scores: Float[step selected].
        steps: the step of each grid.
        revealed_at: the step in which the clean run revealed each answer token for good.
        known: whether the clean run wrote the answer.
        str_canvases: the canvas of each step, a string a place.
        subject: first and one past the last place of the subject.
        positions: the place of each row of the grids.
        layers: the layer of each column.
        record: the settings of the trace and of the run, model, weights' hash, hooks, modules, versions; under
            "trajectory", by what weights, hooks and modules the clean run's canvases were written.
    """

    scores: Float[Tensor, "step pos layer"]
    token_scores: Float[Tensor, "step pos layer selected"]
    chained: Float[Tensor, "pos layer"] | None
    clean: Float[Tensor, "step"]
    corrupted: Float[Tensor, "step"]
    clean_token_scores: Float[Tensor, "step selected"]
    corrupted_token_scores: Float[Tensor, "step selected"]
    steps: list[int]
    revealed_at: list[int]
    known: bool
    str_canvases: list[list[str]]
    subject: tuple[int, int]
    positions: list[int]
    layers: list[int]
    record: dict[str, Any]

    @property
    def indirect_effect(self) -> Float[Tensor, "step pos layer"]:
        """How much of the answer a state brings back: scores - corrupted."""
        return self.scores - self.corrupted[:, None, None]

    @property
    def order(self) -> list[int]:
        """The answer's tokens in the order in which the model committed them; from left to right within a step."""
        return sorted(range(len(self.revealed_at)), key=lambda token: self.revealed_at[token])

    def at_step(self, step: int) -> CausalTrace:
        """The grid of one step as a `CausalTrace`."""
        if step not in self.steps:
            raise KeyError(f"step {step} was not traced; the steps are {self.steps}")
        i = self.steps.index(step)
        return CausalTrace(
            scores=self.scores[i],
            token_scores=self.token_scores[i],
            clean_token_scores=self.clean_token_scores[i],
            corrupted_token_scores=self.corrupted_token_scores[i],
            clean=self.clean[i].item(),
            corrupted=self.corrupted[i].item(),
            known=self.known,
            str_tokens=self.str_canvases[i],
            subject=self.subject,
            positions=self.positions,
            layers=self.layers,
            record={**self.record, "step": step},
        )

    def plot(self, step: int, ax: Any = None, title: str | None = None) -> Any:
        """The heat map of one step, on the colour scale of all of them; returns the matplotlib axes."""
        limits = float(self.corrupted.min()), float(self.scores.nan_to_num().max())
        return self.at_step(step).plot(ax=ax, title=title or f"step {step}", limits=limits)

    def page(self, title: str | None = None) -> Any:
        """The heat maps with a slider over the steps, as a plotly figure; `plots.write_page` writes it."""
        return plots.step_slider(
            self.scores,
            str_canvases=self.str_canvases,
            subject=self.subject,
            steps=self.steps,
            layers=self.layers,
            positions=self.positions,
            kind=self.record["kind"],
            answer=self.record["answer"],
            clean=self.clean,
            corrupted=self.corrupted,
            title=title or f"{self.record['model']}: {' '.join(map(plots.readable, self.str_canvases[-1]))}",
        )

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "trajectory trace", self)

    @classmethod
    def load(cls, path: str | Path) -> "TrajectoryTrace":
        """Read what `save` wrote."""
        return load_fields(path, "trajectory trace", cls)


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
    """A causal trace at every step at which an answer token is open.

    Args:
        steps: which steps; by default from t1, which unmasks the first answer token, to t2, which reveals the last.
        canvas: "forced" or "free", what the corrupted run sees.
        trajectory: the clean run, `model.denoise(query.tokens[None], ...)` with the settings you study (on a causal
            model of the prompt); by default with those of `denoise`. Forced canvases may be another network's, such as
            the plain run's for a model under a hook: all scores are then of the model as it is now, but `known`,
            `revealed_at` and the canvases are of the one that wrote them.

    The other arguments are those of `causal_trace`.

    Raises:
        ValueError: a setting out of range, a trajectory of another prompt or architecture, a step at which no answer
            token is open. With canvas="free", a trajectory made by another checkpoint or under other hooks, weights or
            modules: the free runs are those of the model as it is now, which may write something else without any
            corruption.

    Warns:
        UserWarning: canvases that were made by another checkpoint, or under other hooks, weights, modules or dtype.
    """
    return trace_steps(
        TracedTrajectory.of(model, fact_or_query, trajectory),
        steps,
        canvas,
        Restoration.of(kind, window, severed),
        Corruption.of(corruption, noise, samples, seed, swap),
        Selection.of(positions, layers),
        max_bytes,
        progress,
    )


@torch.no_grad()
def trace_steps(
    run: TracedTrajectory,
    steps: Iterable[Whole] | None,
    canvas: str,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection,
    max_bytes: int,
    progress: bool = False,
) -> TrajectoryTrace:
    """Trace the steps of one run; `trace_trajectory` describes the arguments."""
    model = run.model
    check_canvas(canvas)
    if canvas == "free":
        require_same_network(run.trajectory.record, model, "trace_trajectory(canvas='free')")
    else:
        warn_of_another_network({"trajectory": (run.trajectory.record, model)})
    chosen = check_steps(run, range(run.answered_from, max(run.revealed_at) + 1) if steps is None else steps)
    places, blocks = selection.within(run.n_pos, model.cfg.n_layers)
    if canvas == "free":
        run.loop_rows(corruption, max_bytes)
    own = run.corrupted(corruption) if canvas == "free" else None

    grids, clean_scores, low_scores = [], [], []
    for step in tqdm(chosen, desc=f"trace {restoration.kind}", unit="step", disable=not progress):
        clean = run.canvas(step)[None]
        asked = run.answer(step, clean)
        low = clean.expand(corruption.rows, -1) if own is None else own.canvases[step - own.first_step]
        runs = RestoredRuns(
            model,
            clean=CanvasRun(run.seen(clean), asked, step=run.state(step, clean)),
            corrupted=CanvasRun(
                run.seen(low),
                asked if own is None else run.answer(step, low),
                corruption.hooks(model, run.query),
                run.state(step, low),
            ),
            touched=range(*run.query.subject),
            restoration=restoration,
            layers=blocks,
            max_bytes=max_bytes,
        )
        on_canvas = set(run.on_canvas(step))
        held = [place for place in places if place in on_canvas]
        grid = runs.grid(held)
        by_draw = grid.new_full((len(places), *grid.shape[1:]), torch.nan)
        by_draw[[place in held for place in places]] = grid
        grids.append(by_draw)
        clean_scores.append(runs.clean_scores[0].cpu())
        low_scores.append(runs.corrupted_scores.cpu())

    scores, low = torch.stack(grids), torch.stack(low_scores)
    return TrajectoryTrace(
        scores=scores.prod(dim=4).mean(dim=3),
        token_scores=scores.mean(dim=3),
        chained=_chain(scores, low, chosen, run.revealed_at) if own is None else None,
        clean=torch.stack(clean_scores).prod(dim=1),
        corrupted=low.prod(dim=2).mean(dim=1),
        clean_token_scores=torch.stack(clean_scores),
        corrupted_token_scores=low.mean(dim=1),
        steps=chosen,
        revealed_at=run.revealed_at,
        known=run.wrote_the_answer,
        str_canvases=[model.words(run.canvas(step).tolist()) for step in chosen],
        subject=run.query.subject,
        positions=places,
        layers=blocks,
        record={
            **run.trajectory.record,
            **restoration.describe(),
            **corruption.describe(),
            "canvas": canvas,
            "answer": model.words(run.query.answer_tokens),
            **provenance(model, model.cfg),
            "trajectory": canvas_provenance(run.trajectory.record),
        },
    )


def check_canvas(canvas: str) -> None:
    """Raise a `ValueError` unless this is something that the corrupted runs can see."""
    if canvas not in ("forced", "free"):
        raise ValueError(f"canvas={canvas!r}; it is 'forced' (the clean run's canvases) or 'free' (each draw its own)")


def _chain(
    scores: Float[Tensor, "step pos layer sample selected"],
    corrupted: Float[Tensor, "step sample selected"],
    steps: Sequence[int],
    revealed_at: Sequence[int],
) -> Float[Tensor, "pos layer"] | None:
    """Each token at the step that committed it; where there was no such place yet, nothing could be restored."""
    if not set(revealed_at) <= set(steps):
        return None
    at = [steps.index(step) for step in revealed_at]
    own = torch.stack([scores[step, ..., token] for token, step in enumerate(at)], dim=-1)
    low = torch.stack([corrupted[step, :, token] for token, step in enumerate(at)], dim=-1)
    return torch.where(own.isnan(), low, own).prod(dim=3).mean(dim=2)
