"""A study that traces many facts, and the checks before its first trace."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from diffusion_lens.analysis.average_effects.fact_average import FactAverage
from diffusion_lens.analysis.average_effects.fact_tracer import TraceJob
from diffusion_lens.analysis.average_effects.loop_runs import LoopRuns, refuse_step_hooks
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.causal_tracing.trace import noise_scale
from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.facts import Fact
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import pick_indices

A = TypeVar("A", bound=FactAverage)


@begins_run
def average_facts(
    result_type: type[A],
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: TraceSettings,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> A:
    """Trace many facts and average them, with settings given as objects.

    Args:
        result_type: `AverageEffect`, or `AverageTrajectoryEffect` if `settings.canvas` is set.
        model: Masked diffusion model or causal model.
        facts: Facts to trace.
        settings: Settings with which every fact is traced.
        out: Folder for one file per fact. A call that finds facts there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": trace the facts i, i + n, i + 2n, ... only.
        progress: Whether to show a progress bar.
        executor: Executor or `Workers` that trace the facts; by default this process does.

    Raises:
        ValueError: The same as in `average_indirect_effect`; or the type of the result does not fit the settings.

    Warns:
        UserWarning: The rule leaves out all facts, so that nothing is averaged.
    """
    if (settings.canvas is not None) != result_type.BY_STEP:
        raise ValueError(
            f"settings.canvas={settings.canvas!r}: AverageTrajectoryEffect needs a canvas, 'forced' or 'free', and "
            "AverageEffect has none"
        )
    return plan(model, facts, settings).collect(result_type, out, shard, progress, executor)


def plan(model: DiffusionTransformer, facts: Sequence[Fact], settings: TraceSettings) -> Study:
    """Lay out the facts, measure the noise, and plan a trace for each fact.

    Raises:
        ValueError: A setting is out of range, two facts have one id, a hook would choose the facts by another network
            than is traced, or the model can be queried for none of the facts.
    """
    # 1. Resolve the settings that depend on the model, and refuse those that the traces would refuse.
    layers = pick_indices("layers", settings.layers, model.cfg.n_layers)
    settings = replace(settings, layout=settings.layout.on(model), layers=layers)
    if settings.canvas is None and settings.known.rule == "recalled":
        refuse_step_hooks(model)

    # 2. Lay out the facts, and set aside those that the model cannot be queried for.
    usable = UsableFacts.of(facts, partial(settings.query, model))
    queries = usable.prepared
    settings.known.check_ids([*queries, *usable.set_aside])

    # 3. Measure the noise. Sort by id so that the result is bit-identical for any order of the facts.
    if settings.measures_noise and "noise" in settings.corruption.describe():
        settings = settings.with_noise(noise_scale(model, [queries[fact_id] for fact_id in sorted(queries)]))
    settings.corruption.hooks(model, next(iter(queries.values())))  # refuses a corruption that this model cannot have

    # 4. Plan one trace per fact.
    runs = LoopRuns(model, queries, settings.loop) if settings.loop else None
    together = runs.batches if runs else []
    record = {**settings.describe(model.cfg), **usable.describe(), **provenance(model, model.cfg)}
    job = TraceJob(queries, settings, together)
    return Study(model, record, [[fact_id] for fact_id in queries], job, neighbours=together)
