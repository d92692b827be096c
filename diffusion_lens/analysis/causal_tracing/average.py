"""Average effects over facts (Meng et al. 2022, arXiv 2202.05262, section 2.2): where is factual recall located?

Every fact that the model knows is traced. The total effect of a fact is p_clean - p_corrupted, and its mean over facts
the ATE; the indirect effect of a state is p_restored - p_corrupted. Sentences differ in length, so within a fact the
indirect effect is averaged over the positions of one role (`token_roles`), and then over the facts that have such a
token:

    AIE(role, layer) = mean over facts of ( mean over the fact's positions i with that role of IE(i, layer) )

so every fact counts once, however long its subject. Confidence intervals come from resampling the facts.

The rule `known` says which facts are averaged (see `causal_tracing.average_result`): by default those whose answer the
denoising loop writes; for the first token alone, ROME's question, those whose token is the likeliest on the traced
canvas. No grid is computed for the others, and the result lists them in `unknown`.

Average effects by denoising step: which states carry the answer before it is written, and which while it is?

Every fact is traced at all steps from t1, which unmasks the first token of its answer, to t2, which reveals the last
one finally, on the canvases of its own denoising run (`trace_trajectory`). Runs differ in length, so they are aligned
at their ends, and a column of the average is an offset from t2:

    AIE(offset, role, layer) = mean over the facts that have a step t2 + offset >= t1 of their IE at that step

The first step of a fact isolates the flow from the subject. p(answer) at a step is the joint probability of the tokens
that are still masked. Few facts have a step far from t2: `n_facts` counts them, and their answers are the longest.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.causal_tracing.average_result import (
    ROLES,
    STEP_ROLES,
    AverageEffect,
    AverageTrajectoryEffect,
    Known,
    described_control,
    pick_roles,
    random_sites,
    step_roles,
    token_roles,
)
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, Swap, TraceSettings, causal_trace, record_of_trace
from diffusion_lens.analysis.causal_tracing.trajectory import CANVASES, TrajectoryTrace, record_of_run, trace_trajectory
from diffusion_lens.analysis.engine.answer import Answer
from diffusion_lens.analysis.engine.layout import CanvasLayout, UsableFacts
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory, loop_prompt
from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard, fact_seed
from diffusion_lens.analysis.over_facts.study import (
    Compute,
    FactsJob,
    LoopSettings,
    Study,
    in_batches_of,
    say_failed,
    spread,
)
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.names import loop_hook
from diffusion_lens.interventions import acts_by_step
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run, name_of, run_of
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import (
    INHERITED,
    checked_arguments,
    fields_of,
    one_of,
    own_seed,
    pick_indices,
    setting,
    takes,
    whole_numbers,
)
from diffusion_lens.settings.shared import FIRST_TOKENS, AverageFields, CanvasFields
from weight_conversion import Architecture

_TRACED = tuple(fields_of(TraceSettings))


def _known(name: str, value: Any) -> "str | frozenset[str]":
    """The name of a rule, or the ids of facts."""
    known = Known.of({"one-canvas": "one_canvas"}.get(value, value) if isinstance(value, str) else value)
    return known.rule if known.ids is None else known.ids


@dataclass(frozen=True)
class AverageSettings(AverageFields, CanvasLayout, TraceSettings):
    """Settings with which every fact of an average is traced, on one canvas each.

    Each fact has its own seed, made of `seed` and its id. The swap has to fit: facts whose subject has another number
    of tokens, or is that subject, are set aside.
    """

    BY_STEP = False

    swap: Swap = INHERITED
    known: str | Collection[str] | Known | None = INHERITED
    first_tokens: int | None = copy(FIRST_TOKENS)
    loop: LoopSettings | None = setting(
        None, "Settings of the loop that writes the answers; by default those of `denoise`.", option=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = None if self.known is None else _known("known", self.known)
        vars(self).update(known=known, roles=None if self.roles is None else tuple(self.selected_roles))
        if self.loop is not None and self.used_loop is None:
            raise ValueError(f"loop= requires known='recalled'; known={self.rule.rule!r} does not use the loop")

    @property
    def rule(self) -> Known:
        """The rule that selects the facts."""
        one_canvas = not self.BY_STEP and self.first_tokens == 1 and self.loop is None
        return Known.of(("one_canvas" if one_canvas else "recalled") if self.known is None else self.known)

    @property
    def used_loop(self) -> LoopSettings | None:
        """Settings of the loop, if its steps are traced or the rule depends on it."""
        return (self.loop or LoopSettings()) if self.BY_STEP or self.rule.rule == "recalled" else None

    @property
    def selected_roles(self) -> list[str]:
        """The roles of the result, in their usual order."""
        return pick_roles(self.roles, STEP_ROLES if self.BY_STEP else ROLES)

    def query_of(self, model: DiffusionTransformer, fact: Fact) -> Query:
        """A fact on the canvas on which it is traced; a `ValueError` if it has to be set aside."""
        query = self.query(model, fact, self.used_loop.check if self.used_loop else None)
        if self.swap is not None:
            self.hooks(model, query)
            if self.swapped(model) == query.tokens[slice(*query.subject)].tolist():
                raise ValueError("swap= is the subject of this fact itself")
        return query

    def for_fact(self, fact_id: str, query: Query, steps: Iterable[Sequence[str]] = ()) -> TraceSettings:
        """The settings of one fact's trace: its own seed, and the positions of the selected roles, with the random
        sites of the canvases of these steps, given by the role of each position.

        A fact that has none of the roles still has its total effect.
        """
        positions, seed = list(range(len(query.tokens))), fact_seed(self.seed, fact_id)
        if self.roles is not None:
            roles = {"answer" if role == "answer_revealed" else role for role in self.roles}
            positions = [at for at, role in enumerate(token_roles(query)) if role in roles] or [query.subject[0]]
            if "random_site" in (self.controls or ()):
                drawn = (random_sites(row, role, query.subject, seed) for row in steps for role in self.roles)
                positions = sorted({*positions, *chain.from_iterable(drawn)})
        shared = zip(_TRACED, attrgetter(*_TRACED)(self), strict=True)
        return TraceSettings(**{**dict(shared), "seed": seed, "positions": positions})

    def describe_on(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """The settings for the record of a study; without an architecture, as before the model is loaded, those that
        depend on it are left out: the layers, the sampler, and what is measured."""
        described = self.describe() | {"roles": self.selected_roles} | self.rule.describe()
        del described["positions"], described["loop"]
        if self.controls is None:
            del described["controls"]
        if self.is_noisy and self.noise is None:
            del described["noise"]
        if shape is None:
            del described["layers"]
            return {name: value for name, value in described.items() if (name, value) != ("length", None)}
        described["layers"] = pick_indices("layers", self.layers, shape.n_layers)
        return {**described, **({} if self.used_loop is None else {"loop": self.used_loop.describe_on(shape)})}


@dataclass(frozen=True)
class AverageTrajectorySettings(AverageSettings):
    """Settings with which the steps of every fact's denoising run are traced; see `AverageSettings`.

    The facts that are averaged are by default those whose answer the traced run itself writes. For the others p(answer)
    is 0 once a wrong token is revealed in the answer. "one_canvas" reads the canvas of the run's first step as the
    traces do: hooks see that step, and under guidance the logits are guided.
    """

    BY_STEP = True

    first_tokens: int | None = copy(cast(Any, fields_of(CanvasFields)["first_tokens"]))
    canvas: str = setting(
        "forced",
        'Canvases that the corrupted runs read at each step: "forced", those of the clean run, or "free", those that '
        "each corrupted run writes itself.",
        one_of(*CANVASES),
    )


@takes(AverageSettings)
def average_indirect_effect(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: AverageSettings,
    *,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
    executor: Executes | None = None,
) -> AverageEffect:
    """Trace many facts on either variant, and average.

    Args:
        model: Masked diffusion model or causal model.
        facts: Facts to trace.
        settings: Settings of all traces.
        out: Folder for one file per fact, which `CausalTrace.load` reads. A call that finds facts there computes only
            the others. By default nothing is written.
        shard: (i, n) or "i/n": trace the facts i, i + n, i + 2n, ... only; `AverageEffect.merge` joins the shards, bit
            for bit what one process gives on the same machine.
        max_bytes: Memory to use in addition to the weights.
        executor: `concurrent.futures.Executor`, or `Workers`, that traces the facts; by default this process does. The
            numbers are the same to the bit on the same kind of machine.

    "recalled" is refused under a hook of the network that acts at some steps only (`at_steps`, `on_branch`,
    `while_masked`): it would act in the loop and not in the traces. If a hook of your own reads `hook.step`, make sure
    that it does the same where that is `None`. Hooks on the loop's own hook points (`denoise.hook_*`) act in the loop
    alone, and decide what is recalled as `loop` does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study, a hook acts by
            step with "recalled", or the model can be queried for none of the facts. A single fact that it cannot be
            queried for (its answer is merged into the prompt, its sentence does not fit, ...) is set aside, with the
            reason in `AverageEffect.set_aside`.

    Warns:
        UserWarning: The rule leaves out all facts, so that nothing is averaged.
    """
    with run_of(model, edits=False):
        return plan(model, facts, settings, max_bytes).collect(AverageEffect, out, shard, progress, executor)


@takes(AverageTrajectorySettings)
@begins_run
def average_trajectory_effect(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: AverageTrajectorySettings,
    *,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
    executor: Executes | None = None,
) -> AverageTrajectoryEffect:
    """Trace many facts at the steps that write their answers, on either variant, and average step by step.

    Args:
        settings: Settings of all traces.
        out: Folder for one file per fact, which `TrajectoryTrace.load` reads.
        model, facts, shard, max_bytes, progress, executor: The same as in `average_indirect_effect`, which also
            describes errors and warnings.
    """
    return plan(model, facts, settings, max_bytes).collect(AverageTrajectoryEffect, out, shard, progress, executor)


@checked_arguments
def merge(parts: str | Path | AverageEffect | Sequence[str | Path | AverageEffect]) -> AverageEffect:
    """The same as `AverageEffect.merge`."""
    return AverageEffect.merge(parts)


@takes(CanvasLayout)
def recalled_facts(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    loop: LoopSettings | None = None,
    *,
    settings: CanvasLayout,
    executor: Executes | None = None,
) -> list[str]:
    """The ids of the facts whose answers the model's own loop writes, in the order of `facts`.

    To average two models over the facts that both recall:

        both = set(recalled_facts(model, facts, loop)) & set(recalled_facts(baseline, facts, loop))
        average_indirect_effect(model, facts, known=both)
        average_indirect_effect(baseline, facts, known=both)

    Args:
        loop: Settings of the loop; by default those of `denoise`.
        settings: Layout of the facts.
        executor: The same as in `average_indirect_effect`.

    Raises:
        ValueError: A setting is out of range, two facts have one id, a worker does not get the network, or the model
            can be queried for none of the facts. A single fact that it cannot be queried for is not recalled.
        RuntimeError: A fact failed on a worker, or a task was given up after its workers died.
    """
    loop = loop or LoopSettings()
    usable = UsableFacts.of(facts, lambda fact: settings.query(model, fact, loop.check))
    runs = LoopRuns(model, usable.prepared, loop)
    if executor is None:
        return [fact_id for fact_id in usable.prepared if runs.recalled(fact_id)]
    job = FactsJob(usable.prepared, partial(_recalled, loop=loop))
    results, failed = spread(Study(model, {}, runs.batches, job), executor)
    if failed:
        raise RuntimeError(say_failed(failed))
    recalled = dict(results)
    return [fact_id for fact_id in usable.prepared if recalled[fact_id]]


def _recalled(model: DiffusionTransformer, queries: Mapping[str, Query], loop: LoopSettings) -> list[bool]:
    """Whether the loop writes the answers of a batch of facts, given on their canvases by id."""
    runs = LoopRuns(model, queries, loop)
    return [runs.recalled(fact_id) for fact_id in queries]


def plan(model: DiffusionTransformer, facts: Sequence[Fact], settings: AverageSettings, max_bytes: int) -> Study:
    """Lay out the facts, measure the noise, and plan a trace for each fact."""
    # 1. Resolve the settings that depend on the model, and refuse those that the traces would refuse.
    layers = pick_indices("layers", settings.layers, model.cfg.n_layers)
    settings = replace(settings, length=settings.on(model).length, layers=layers)
    if not settings.BY_STEP and settings.rule.rule == "recalled":
        refuse_step_hooks(model)

    # 2. Lay out the facts, and set aside those that the model cannot be queried for.
    usable = UsableFacts.of(facts, partial(settings.query_of, model))
    queries = usable.prepared
    settings.rule.check_ids([*queries, *usable.set_aside])

    # 3. Measure the noise. Sort by id so that the result is bit-identical for any order of the facts.
    if settings.noise is None:
        settings = settings.with_noise(model, [queries[fact_id] for fact_id in sorted(queries)])
    settings.hooks(model, next(iter(queries.values())))  # refuses a corruption that this model cannot have

    # 4. Plan one trace per fact.
    runs = LoopRuns(model, queries, settings.used_loop) if settings.used_loop else None
    together = runs.batches if runs else []

    def record() -> dict[str, Any]:
        return {**settings.describe_on(model.cfg), **usable.describe(), **provenance(model, model.cfg)}

    return Study(model, record, list(zip(queries)), TraceJob(queries, settings, max_bytes, together), together)


@dataclass(frozen=True)
class TraceJob:
    """The facts of a study on their canvases, how they are traced, and which denoising runs share batches, if any."""

    queries: Mapping[str, Query]
    settings: AverageSettings
    max_bytes: int
    denoised_together: Sequence[Sequence[str]]

    def part(self, ids: Sequence[str]) -> "TraceJob":
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
        loop = self.settings.used_loop
        runs = LoopRuns(model, self.queries, loop) if loop else None
        trace = _trace_of_steps if isinstance(self.settings, AverageTrajectorySettings) else _trace_of_canvas
        return lambda batch: [trace(model, self, runs, fact_id) for fact_id in batch]


@torch.no_grad()
def _trace_of_canvas(model: DiffusionTransformer, job: TraceJob, runs: "LoopRuns | None", fact_id: str) -> CausalTrace:
    """The trace of a fact on one canvas, its id and the role of each position in the record.

    The grid of a fact that is not averaged has no row: one forward pass tells whether the model knows the answer.
    """
    query, study = job.queries[fact_id], job.settings
    settings = study.for_fact(fact_id, query, [token_roles(query)] if study.controls else ())
    controls: dict[str, Any] = {}
    answer = Answer.of(model, query)
    logits = model(query.tokens.to(model.cfg.device)[None], logits_at=answer.rows)
    known = answer.is_likeliest(model, logits)
    if _is_averaged(study.rule, runs, fact_id, known):
        trace = causal_trace(model, query, settings, max_bytes=job.max_bytes)
        if "random_subject" in (study.controls or ()) and (other := random_subject(model, query, settings.seed)):
            at_other = causal_trace(model, other, study.for_fact(fact_id, other), max_bytes=job.max_bytes)
            controls = described_control(at_other, [token_roles(other)], study.selected_roles)
    else:
        scores, layers = answer.probabilities(logits, 1)[0].cpu(), whole_numbers("layers", settings.layers or ())
        trace = CausalTrace(
            **{name: grid[0] for name, grid in _no_cells(scores, layers).items()},
            clean=scores.prod().item(),
            corrupted=torch.nan,
            known=known,
            str_tokens=model.words(query.tokens.tolist()),
            subject=query.subject,
            positions=[],
            layers=layers,
            record=record_of_trace(model, query, settings, [], layers),
        )
    return replace(trace, record={**trace.record, "fact": fact_id, "roles": token_roles(query), **controls})


@torch.no_grad()
def _trace_of_steps(
    model: DiffusionTransformer, job: TraceJob, runs: "LoopRuns | None", fact_id: str
) -> TrajectoryTrace:
    """The trace of a fact from t1 to t2 of its denoising run, its id and the roles at each step in the record.

    The grid of a fact that is not averaged has no row, and its step is the first one. If some answer positions are
    still masked after the last step, t2 is undefined, and the fact is not averaged.
    """
    assert runs is not None
    assert isinstance(job.settings, AverageTrajectorySettings)
    query, study = job.queries[fact_id], job.settings
    run, controls = TracedTrajectory.of(model, query, runs[fact_id]), dict[str, Any]()
    known = study.rule.rule == "one_canvas" and _knows(run)
    is_averaged = min(run.revealed_at) >= 0 and _is_averaged(study.rule, runs, fact_id, known)
    steps = range(run.answered_from, run.last_step + 1) if is_averaged else [run.trajectory.first_step]

    def roles_of(query: Query) -> list[list[str]]:
        canvases = [run.canvas(step) for step in steps]
        return [step_roles(query, canvas, run.trajectory.is_open(canvas[None])[0]) for canvas in canvases]

    def traced(query: Query) -> TrajectoryTrace:
        settings = study.for_fact(fact_id, query, roles_of(query))
        given = {"trajectory": run.trajectory, "settings": settings, "max_bytes": job.max_bytes}
        return trace_trajectory(model, query, None, study.canvas, **given)

    if is_averaged:
        trace = traced(query)
        if "random_subject" in (study.controls or ()) and (
            other := random_subject(model, query, fact_seed(study.seed, fact_id))
        ):
            controls = described_control(traced(other), roles_of(other), study.selected_roles)
    else:
        trace = _first_canvas(run, study.for_fact(fact_id, query), study.canvas)
    return replace(trace, record={**trace.record, "fact": fact_id, "roles": roles_of(query), **controls})


def random_subject(model: DiffusionTransformer, query: Query, seed: int) -> Query | None:
    """The query with another span of its prompt as the subject; `None` if there is no room for one."""
    start, stop = query.subject
    length, end = stop - start, min(query.answer_positions)
    starts = range(len(model.encode("")), end - length + 1)  # behind a BOS
    spans = [(first, first + length) for first in starts if first + length <= start or first >= stop]
    if not spans:
        return None
    drawn = np.random.RandomState(own_seed(seed, "random_subject", bits=32)).randint(len(spans))
    return replace(query, subject=spans[drawn])


def _is_averaged(known: Known, runs: "LoopRuns | None", fact_id: str, known_on_canvas: bool) -> bool:
    if known.rule == "recalled":
        assert runs is not None
        return runs.recalled(fact_id)
    return {"one_canvas": known_on_canvas, "all": True, "ids": fact_id in (known.ids or ())}[known.rule]


def _knows(run: TracedTrajectory) -> bool:
    """Whether the answer is the likeliest on a run's first canvas, as the run reads it: hooks see that step, and under
    guidance the logits are guided."""
    step = run.trajectory.first_step
    canvas = run.canvas(step)[None]
    answer = run.reading(step, canvas)
    with run.model.clock.at(run.state(step, canvas)):
        return answer.is_likeliest(run.model, run.model(run.seen(canvas), logits_at=answer.rows))


def _first_canvas(run: TracedTrajectory, settings: TraceSettings, canvas_of: str) -> TrajectoryTrace:
    """A trace of the run's first step without rows."""
    model, step = run.model, run.trajectory.first_step
    canvas = run.canvas(step)[None]
    answer = run.answer(step, canvas)
    with model.clock.at(run.state(step, canvas)):
        scores = answer.probabilities(model(run.seen(canvas), logits_at=answer.rows), 1)[0].cpu()
    layers = whole_numbers("layers", settings.layers or ())
    return TrajectoryTrace(
        **_no_cells(scores, layers),
        chained=None,
        clean=scores.prod(dim=1),
        corrupted=torch.full((1,), torch.nan),
        steps=[step],
        revealed_at=run.revealed_at,
        known=run.wrote_the_answer,
        str_canvases=[model.words(canvas[0].tolist())],
        subject=run.query.subject,
        positions=[],
        layers=layers,
        record={**record_of_run(run, settings, [], layers), "canvas": canvas_of},
    )


def _no_cells(scores: Float[Tensor, "step selected"], layers: Sequence[int]) -> dict[str, Tensor]:
    """The scores of a trace of one step that restored nothing."""
    return {
        "scores": scores.new_empty(1, 0, len(layers)),
        "token_scores": scores.new_empty(1, 0, len(layers), scores.shape[1]),
        "clean_token_scores": scores,
        "corrupted_token_scores": torch.full_like(scores, torch.nan),
    }


class LoopRuns:
    """The denoising run of each fact, as a trajectory of one row, by id.

    `batches`, the ids of the facts that are denoised together, are planned for all facts of a study, and a whole batch
    is denoised when one of its facts is first needed, so that no number depends on the shard. Some whole batches of a
    study, given by themselves, are planned as the same batches.
    """

    def __init__(self, model: DiffusionTransformer, queries: Mapping[str, Query], settings: LoopSettings) -> None:
        self._model, self._settings, self._queries = model, settings, queries
        self._prompts = {fact_id: loop_prompt(model, query) for fact_id, query in queries.items()}
        self.batches = _equally_long(queries, self._shape, settings.facts_together(model.cfg))
        self._batch_of = {fact_id: batch for batch in self.batches for fact_id in batch}
        self._runs: dict[str, Trajectory] = {}

    def __getitem__(self, fact_id: str) -> Trajectory:
        if fact_id not in self._runs:
            batch = self._batch_of[fact_id]
            prompts = torch.stack([self._prompts[member][0] for member in batch])
            length = self._prompts[fact_id][1]
            canvas = lay_out(self._model, prompts, length, attention_mask=torch.ones_like(prompts))
            trajectory = denoise(self._model, canvas, self._settings.for_facts(batch, self._model.cfg))
            self._runs |= {member: trajectory.row(row) for row, member in enumerate(batch)}
        return self._runs[fact_id]

    def recalled(self, fact_id: str) -> bool:
        """Whether the run ends with the answer."""
        query = self._queries[fact_id]
        written = self[fact_id].tokens[0, list(query.answer_positions)].tolist()
        return written == list(query.answer_tokens)

    def _shape(self, fact_id: str) -> tuple[int, int, int]:
        prompt, length = self._prompts[fact_id]
        return length, len(prompt), int(prompt.eq(self._model.cfg.blank).sum() if self._model.cfg.has_mask else 0)


def refuse_step_hooks(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a hook of the network acts in the loop only, and so not on a canvas outside it."""
    for name, point in model.hook_dict.items():
        for handle in () if name.startswith(loop_hook("")) else point.fwd_hooks:
            if acts_by_step(handle.user_hook):
                raise ValueError(
                    "known='recalled' selects facts by running the denoising loop. Hook "
                    f"{name_of(handle.user_hook)} at {name!r} acts in that loop but not in the traces, so the two "
                    "would use different models. Trace the loop's steps (average_trajectory_effect), attach a hook "
                    "that acts outside the loop too, or select facts without the loop (known= with their ids, 'all' "
                    "or 'one_canvas')"
                )


def _equally_long(ids: Iterable[str], shape: Callable[[str], Any], size: int) -> list[list[str]]:
    """Batches of facts of one shape, ordered by id, so that they do not depend on the order of the facts."""
    ordered = sorted(ids, key=lambda fact_id: (shape(fact_id), fact_id))
    groups = [list(group) for _, group in groupby(ordered, key=shape)]
    return [batch for group in groups for batch in in_batches_of(size, group)]
