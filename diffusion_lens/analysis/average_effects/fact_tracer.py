"""One fact among many: asked whether it is averaged, and if so traced, on one canvas or on those of the loop."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.average_effects.known import Known, LoopRuns
from diffusion_lens.analysis.average_effects.token_roles import step_roles, token_roles
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, causal_trace
from diffusion_lens.analysis.causal_tracing.trajectory_trace import TrajectoryTrace, trace_trajectory
from diffusion_lens.analysis.resumable import fact_seed
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance


@dataclass(frozen=True)
class FactTracer:
    """Traces with the same settings for every fact; the draws are each fact's own.

    Attributes:
        queries: the facts on their canvases, by id.
        known: which of them are traced.
        runs: what the loop writes, where it is asked.
        restoration: what is put back.
        corruption: what is disturbed; each fact draws from a seed made of this one's and its id.
        roles: tokens whose states are restored.
        layers: layers whose states are restored.
        max_bytes: memory to use beside the weights.
        canvas: "forced" or "free", where the steps of the loop are traced.
    """

    model: DiffusionTransformer
    queries: Mapping[str, Query]
    known: Known
    runs: LoopRuns | None
    restoration: Restoration
    corruption: Corruption
    roles: list[str]
    layers: list[int]
    max_bytes: int
    canvas: str | None = None

    def on_canvas(self, fact_id: str) -> CausalTrace:
        """The trace of a fact's canvas; its record also holds the fact's id and the role of each place.

        The grid of a fact that is not averaged has no row: of it there is the clean run only.
        """
        query = self.queries[fact_id]
        roles = token_roles(query)
        trace = self._clean_run(query)
        if self._averaged(fact_id, trace.known):
            trace = causal_trace(self.model, query, positions=self._places(query), **self._settings(fact_id))
        return replace(trace, record={**trace.record, "fact": fact_id, "roles": roles})

    def on_trajectory(self, fact_id: str) -> TrajectoryTrace:
        """The traces of the steps from t1 to t2 of a fact's own run; the record also holds the roles of each step.

        Of a fact that is not averaged there is the clean run of its first canvas only. One of whose answer's places
        some are masked in the end has no t2, and is not averaged either.
        """
        assert self.runs is not None
        assert self.canvas is not None
        query = self.queries[fact_id]
        run = TracedTrajectory.of(self.model, query, self.runs[fact_id])
        known = self.known.rule == "one_canvas" and self._knows(run)
        if min(run.revealed_at) >= 0 and self._averaged(fact_id, known):
            trace = trace_trajectory(
                self.model,
                query,
                canvas=self.canvas,
                trajectory=run.trajectory,
                positions=self._places(query),
                **self._settings(fact_id),
            )
        else:
            trace = self._first_canvas(run)
        blank = run.trajectory.record["blank"]
        roles = [step_roles(query, run.canvas(step).tolist(), blank) for step in trace.steps]
        return replace(trace, record={**trace.record, "fact": fact_id, "roles": roles})

    def describe(self) -> dict[str, Any]:
        """For a record."""
        return {
            **self.restoration.describe(),
            **self.corruption.describe(),
            "seed": self.corruption.seed,
            "roles": self.roles,
            "layers": self.layers,
            **self.known.describe(),
        }

    def _averaged(self, fact_id: str, known_on_canvas: bool) -> bool:
        if self.known.rule == "recalled":
            assert self.runs is not None
            return self.runs.recalled(fact_id)
        return {"one_canvas": known_on_canvas, "all": True, "ids": fact_id in self.known.ids}[self.known.rule]

    def _places(self, query: Query) -> list[int]:
        """The places whose states are restored; without any of these roles a fact still has its total effect."""
        asked = {*self.roles, *(["answer"] if "answer_revealed" in self.roles else [])}
        places = [place for place, role in enumerate(token_roles(query)) if role in asked]
        return places or [query.subject[0]]

    def _settings(self, fact_id: str) -> dict[str, Any]:
        return {
            "kind": self.restoration.kind,
            "window": self.restoration.window,
            "noise": self.corruption.noise,
            "samples": self.corruption.samples,
            "seed": fact_seed(self.corruption.seed, fact_id),
            "corruption": self.corruption.kind,
            "severed": self.restoration.severed,
            "layers": self.layers,
            "max_bytes": self.max_bytes,
        }

    @torch.no_grad()
    def _clean_run(self, query: Query) -> CausalTrace:
        """A trace without rows, from one pass over one row: enough to tell whether the model knows the answer."""
        answer = Answer.of(self.model, query)
        logits = self.model(query.tokens.to(self.model.cfg.device)[None], logits_at=answer.rows)
        scores = answer.probabilities(logits, 1)[0, 0].cpu()
        return CausalTrace(
            **self._nothing_restored(scores),
            clean_token_scores=scores,
            corrupted_token_scores=torch.full_like(scores, torch.nan),
            clean=scores.prod().item(),
            corrupted=torch.nan,
            known=answer.is_likeliest(self.model, logits),
            str_tokens=self.model.words(query.tokens.tolist()),
            subject=query.subject,
            record=self._record(query),
        )

    @torch.no_grad()
    def _knows(self, run: TracedTrajectory) -> bool:
        """Whether the answer is the likeliest on a run's first canvas; hooks are told its step, as in the traces."""
        step, answer = run.trajectory.first_step, Answer.of(self.model, run.query)
        shown = run.canvas(step)[None]
        with self.model.clock.at(run.state(step, shown)):
            return answer.is_likeliest(self.model, self.model(run.seen(shown), logits_at=answer.rows))

    @torch.no_grad()
    def _first_canvas(self, run: TracedTrajectory) -> TrajectoryTrace:
        """A trace of the run's first step without rows."""
        step = run.trajectory.first_step
        shown = run.canvas(step)[None]
        answer = run.answer(step, shown)
        with self.model.clock.at(run.state(step, shown)):
            scores = answer.probabilities(self.model(run.seen(shown), logits_at=answer.rows), 1)[0].cpu()
        return TrajectoryTrace(
            **{name: grid[None] for name, grid in self._nothing_restored(scores[0]).items() if name.endswith("scores")},
            chained=None,
            clean=scores.prod(dim=1),
            corrupted=torch.full((1,), torch.nan),
            clean_token_scores=scores,
            corrupted_token_scores=torch.full_like(scores, torch.nan),
            steps=[step],
            revealed_at=run.revealed_at,
            known=run.wrote_the_answer,
            str_canvases=[self.model.words(shown[0].tolist())],
            subject=run.query.subject,
            positions=[],
            layers=list(self.layers),
            record={
                **run.trajectory.record,
                **self._record(run.query),
                "canvas": self.canvas,
                "trajectory": canvas_provenance(run.trajectory.record),
            },
        )

    def _nothing_restored(self, scores: Float[Tensor, "selected"]) -> dict[str, Any]:
        return {
            "scores": scores.new_empty(0, len(self.layers)),
            "token_scores": scores.new_empty(0, len(self.layers), len(scores)),
            "positions": [],
            "layers": list(self.layers),
        }

    def _record(self, query: Query) -> dict[str, Any]:
        answer = self.model.words(query.answer_tokens)
        return {**self.restoration.describe(), "answer": answer, **provenance(self.model, self.model.cfg)}
