"""The trace of one fact among many: a grid if the fact is averaged, otherwise the clean run alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.answer import Answer
from diffusion_lens.analysis.average_effects.loop_runs import LoopRuns
from diffusion_lens.analysis.average_effects.token_roles import step_roles, token_roles
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, trace_query
from diffusion_lens.analysis.causal_tracing.trajectory_result import TrajectoryTrace
from diffusion_lens.analysis.causal_tracing.trajectory_trace import trace_steps
from diffusion_lens.analysis.resumable import fact_seed
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.facts import Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance


@dataclass(frozen=True)
class TraceJob:
    """The traces of facts, one by one.

    Attributes:
        queries: The facts on their canvases, by id.
        settings: Settings of the traces, with layers counted from 0.
        denoised_together: Ids of the facts whose denoising runs share batches; empty if the settings do not use the
            loop.
    """

    queries: Mapping[str, Query]
    settings: TraceSettings
    denoised_together: Sequence[Sequence[str]]

    def part(self, ids: Sequence[str]) -> "TraceJob":
        """The job with these facts, and those whose denoising runs share their batches."""
        chosen = set(ids)
        together = [batch for batch in self.denoised_together if not chosen.isdisjoint(batch)]
        needed = chosen.union(*together)
        return replace(
            self,
            queries={fact_id: query for fact_id, query in self.queries.items() if fact_id in needed},
            denoised_together=together,
        )

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that traces some facts."""
        runs = LoopRuns(model, self.queries, self.settings.loop) if self.settings.loop else None
        tracer = FactTracer(model, self.queries, self.settings, runs)
        return lambda batch: [tracer.trace(fact_id) for fact_id in batch]


@dataclass(frozen=True)
class FactTracer:
    """Traces facts with the same settings; each fact has its own seed.

    Attributes:
        queries: The facts on their canvases, by id.
        settings: Settings of the traces, with layers counted from 0.
        runs: Denoising runs that write the answers; `None` if the settings do not use the loop.
    """

    model: DiffusionTransformer
    queries: Mapping[str, Query]
    settings: TraceSettings
    runs: LoopRuns | None

    def trace(self, fact_id: str) -> CausalTrace | TrajectoryTrace:
        """The trace of a fact on one canvas, or at the steps of its denoising run, depending on the settings.

        The grid of a fact that is not averaged has no row: only the clean run on its first canvas is computed. The
        record also contains the fact's id and the role of each position, for each step if there are several.
        """
        return self._on_canvas(fact_id) if self.settings.canvas is None else self._on_trajectory(fact_id)

    def _on_canvas(self, fact_id: str) -> CausalTrace:
        query = self.queries[fact_id]
        trace = self._clean_run(query)
        if self._is_averaged(fact_id, trace.known):
            settings = self.settings
            trace = trace_query(
                self.model,
                query,
                settings.restoration,
                self._corruption(fact_id),
                self._selection(query),
                max_bytes=settings.max_bytes,
            )
        return replace(trace, record={**trace.record, "fact": fact_id, "roles": token_roles(query)})

    def _on_trajectory(self, fact_id: str) -> TrajectoryTrace:
        """Traces the steps from t1 to t2.

        If some answer positions are still masked after the last step, t2 is undefined and the fact is excluded from the
        average.
        """
        settings = self.settings
        assert self.runs is not None
        assert settings.canvas is not None
        query = self.queries[fact_id]
        run = TracedTrajectory.of(self.model, query, self.runs[fact_id])
        known = settings.known.rule == "one_canvas" and self._knows(run)
        if min(run.revealed_at) >= 0 and self._is_averaged(fact_id, known):
            trace = trace_steps(
                run,
                None,
                settings.canvas,
                settings.restoration,
                self._corruption(fact_id),
                self._selection(query),
                max_bytes=settings.max_bytes,
            )
        else:
            trace = self._first_canvas(run)
        canvases = [run.canvas(step) for step in trace.steps]
        is_open = [run.trajectory.is_open(canvas[None])[0] for canvas in canvases]
        roles = [step_roles(query, *at_step) for at_step in zip(canvases, is_open, strict=True)]
        return replace(trace, record={**trace.record, "fact": fact_id, "roles": roles})

    def _is_averaged(self, fact_id: str, known_on_canvas: bool) -> bool:
        known = self.settings.known
        if known.rule == "recalled":
            assert self.runs is not None
            return self.runs.recalled(fact_id)
        return {"one_canvas": known_on_canvas, "all": True, "ids": fact_id in (known.ids or ())}[known.rule]

    def _corruption(self, fact_id: str) -> Corruption:
        """The corruption with the fact's own seed."""
        corruption = self.settings.corruption
        return replace(corruption, seed=fact_seed(corruption.seed, fact_id))

    def _selection(self, query: Query) -> Selection:
        """The positions of the selected roles; a fact that has none of them still has its total effect."""
        roles = set(self.settings.roles or ())
        roles |= {"answer"} if "answer_revealed" in roles else set()
        positions = [position for position, role in enumerate(token_roles(query)) if role in roles]
        return Selection(positions or [query.subject[0]], self.settings.layers)

    @torch.no_grad()
    def _clean_run(self, query: Query) -> CausalTrace:
        """A trace without rows, from one forward pass: enough to tell whether the model knows the answer."""
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
        """Whether the answer is the likeliest on a run's first canvas, as the run reads it: hooks see that step, and
        under guidance the logits are guided."""
        step = run.trajectory.first_step
        canvas = run.canvas(step)[None]
        answer = run.reading(step, canvas)
        with self.model.clock.at(run.state(step, canvas)):
            return answer.is_likeliest(self.model, self.model(run.seen(canvas), logits_at=answer.rows))

    @torch.no_grad()
    def _first_canvas(self, run: TracedTrajectory) -> TrajectoryTrace:
        """A trace of the run's first step without rows."""
        step = run.trajectory.first_step
        canvas = run.canvas(step)[None]
        answer = run.answer(step, canvas)
        with self.model.clock.at(run.state(step, canvas)):
            scores = answer.probabilities(self.model(run.seen(canvas), logits_at=answer.rows), 1)[0].cpu()
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
            str_canvases=[self.model.words(canvas[0].tolist())],
            subject=run.query.subject,
            positions=[],
            layers=self._layers,
            record={
                **run.trajectory.record,
                **self._record(run.query),
                "canvas": self.settings.canvas,
                "trajectory": canvas_provenance(run.trajectory.record),
            },
        )

    def _nothing_restored(self, scores: Float[Tensor, "selected"]) -> dict[str, Any]:
        return {
            "scores": scores.new_empty(0, len(self._layers)),
            "token_scores": scores.new_empty(0, len(self._layers), len(scores)),
            "positions": [],
            "layers": self._layers,
        }

    @property
    def _layers(self) -> list[int]:
        return list(self.settings.layers or ())

    def _record(self, query: Query) -> dict[str, Any]:
        answer = self.model.words(query.answer_tokens)
        return {**self.settings.restoration.describe(), "answer": answer, **provenance(self.model, self.model.cfg)}
