"""`diffusion-lens trace` and `aie`: causal traces of one fact, and their average over many.

Both trace one canvas on which the answer is masked, or the canvases of a denoising run.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import LoopOptions, ModelChoice, canvas_of, default_folder, denoised
from diffusion_lens.cli.options import LENGTH_OF_STUDY, FactOptions, FactsOptions, command
from diffusion_lens.cli.report import PictureReport, StudyReport, progress, strongest
from diffusion_lens.cli.workers import FactStudy, WorkerChoice
from diffusion_lens.settings import at_least, setting
from diffusion_lens.settings.shared import AverageFields, CanvasFields, TraceFields

if TYPE_CHECKING:
    from torch import Tensor

    from diffusion_lens.analysis import AverageEffect, AverageTrajectoryEffect, CausalTrace, TrajectoryTrace
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

CANVAS = setting(
    None,
    "Canvases that the corrupted runs read at each step: forced, those of the clean run (the default), or free, those "
    "that each corrupted run writes itself.",
)


@command(
    at_step="Step to trace, counted from 0. Repeat the option for several. Default: from the step that reveals the "
    "first token of the answer to the one that reveals the last.",
    n_masks=None,
)
def trace(
    fact: FactOptions,
    layout: CanvasFields,
    given: TraceFields,
    loop: LoopOptions,
    chosen: ModelChoice,
    report: PictureReport,
    canvas: str | None = CANVAS,
) -> None:
    """Trace one fact: corrupt the subject, restore one state at a time, and measure the probability of the answer.

    With --steps, the fact is traced at the steps at which a denoising run writes the answer: tokens that the run has
    revealed are context, and p(answer) is that of the tokens still masked. OUT then has an explorer page.

    Example: diffusion-lens trace site-mdm --prompt "Plerrick Baupling plays" --subject "Plerrick Baupling"
    --answer " bassoon" --length 16 --out trace
    """
    from diffusion_lens.analysis import CanvasLayout, TracedTrajectory, TraceSettings, causal_trace, trace_trajectory
    from diffusion_lens.analysis.causal_tracing.trajectory import CANVASES
    from diffusion_lens.settings import one_of, pick_indices

    # 1. Check the settings before the model is loaded.
    settings = TraceSettings(**vars(given))
    shape, of_step = chosen.known_shape(), one_of(*CANVASES)("canvas", canvas or "forced")
    if settings.corruption == "mask" and shape is not None and not shape.has_mask:
        raise ValueError(
            f"corruption='mask' replaces the subject by [MASK], which {chosen.model!r} does not have; use gaussian, "
            "uniform, replace or swap"
        )
    if shape is not None:
        pick_indices("layers", settings.layers, shape.n_layers)
    run_settings = loop.settings(chosen, canvas=canvas)
    asked, length = fact.fact(layout.occurrence), chosen.length(layout.length)
    laid_out = CanvasLayout(length, first_tokens=layout.first_tokens)
    report.note(length=length)

    def traced(loaded: "HookedDiffusionTransformer") -> Any:
        """The trace, and the run whose steps it traces, if there is one."""
        query, shown = laid_out.query(loaded, asked), progress() and not report.dry_run
        if run_settings is None:
            return causal_trace(loaded, query, settings, progress=shown), None
        run = denoised(loaded, canvas_of(loaded, query), run_settings)
        last = TracedTrajectory.of(loaded, query, run).last_step
        for at in loop.reads(last, None, report.dry_run):
            result = trace_trajectory(loaded, query, at, of_step, trajectory=run, settings=settings, progress=shown)
        return result, run

    # 2. Refuse a folder of another run; for a dry run, print the cost.
    report.begin()
    cost.dry_run(report, chosen, traced, cost.texts_of([asked]))
    result, run = traced(chosen.load())
    if run is None:
        _finish_one_canvas(report, result)
    else:
        _finish_steps_of_a_run(report, result, run)


@command(
    length=LENGTH_OF_STUDY,
    first_tokens="Score only this many first tokens of the answer. Default: 1, as in ROME; with --by-step all.",
    known="Facts to average: recalled (a denoising run writes the answer), one-canvas (the answer is the most likely "
    "one on the traced canvas), or all. Default: one-canvas for the first token without --steps, otherwise recalled.",
    occurrence=None,
    n_masks=None,
)
def aie(
    chosen_facts: FactsOptions,
    given: AverageFields,
    spread: WorkerChoice,
    chosen: ModelChoice,
    report: StudyReport,
    steps: int | None = setting(
        None,
        "Number of steps of the denoising run for --known recalled and --by-step. Default: that of the sampler, 32.",
        partial(at_least, 1),
    ),
    by_step: bool = setting(
        False,
        "Trace each fact at the steps of its denoising run that write the answer, and average step by step, counted "
        "from the one that reveals the last token.",
    ),
    canvas: str | None = CANVAS,
) -> None:
    """Average causal traces over many facts by token role, with confidence intervals.

    The average excludes facts that the model does not know (see --known) and facts that cannot be laid out as a query.
    OUT/facts contains one file per fact, so an interrupted run resumes, and --shard can split the work.

    Example: diffusion-lens aie site-mdm --data site-attributes --length 16 --limit 3 --out aie
    """
    from diffusion_lens import analysis
    from diffusion_lens.analysis.causal_tracing.trajectory import CANVASES
    from diffusion_lens.analysis.engine.layout import say_set_aside
    from diffusion_lens.records.results import shown_model
    from diffusion_lens.settings import one_of

    # 1. Read the facts, and check the settings before the model is loaded.
    chosen, out = spread.placed(chosen), report.folder(default_folder("aie", [chosen.label]))
    source = chosen_facts.source(chosen.model, report.dry_run)
    facts = source.pick(chosen_facts.trained, chosen_facts.asked, chosen_facts.limit)
    of_step = one_of(*CANVASES)("canvas", canvas or "forced")
    if canvas is not None and not by_step:
        raise ValueError("--canvas is a setting of --by-step; without it, each fact is traced on one canvas")
    # What is not given has the function's own default.
    own = {name: value for name, value in vars(given).items() if value is not None}
    own |= {"length": chosen.length(given.length, source.length)}
    own |= {} if steps is None else {"loop": analysis.LoopSettings(steps=steps)}
    settings: Any = (
        analysis.AverageTrajectorySettings(**own, canvas=of_step) if by_step else analysis.AverageSettings(**own)
    )
    average_effect: Any = analysis.average_trajectory_effect if by_step else analysis.average_indirect_effect
    result_type: Any = analysis.AverageTrajectoryEffect if by_step else analysis.AverageEffect

    report.note(data=source.name, facts=len(facts), length=settings.length, first_tokens=settings.first_tokens)

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    every = replace(settings, known="all", loop=settings.loop if by_step else None)

    n_facts = len(facts)

    def counted(network: "HookedDiffusionTransformer", facts: Any) -> None:
        report.say(f"at most, as if the model knew all facts; counted on {len(facts)} of the {n_facts}")
        average_effect(network, facts, settings=every)
        if settings.loop and not by_step:
            layout = {"length": settings.length, "first_tokens": settings.first_tokens}
            analysis.recalled_facts(network, facts, settings.loop, **layout)

    compute = partial(average_effect, facts=facts, settings=settings)
    study = FactStudy(chosen, out / "facts", compute, facts, settings, settings.query_of, counted)
    spread.plan([study], report)

    # 3. Trace the facts, or join the shards.
    (average,) = spread.compute([study], result_type, report)

    # 4. Show the average effects, and write the files.
    report.say(f"{shown_model(average.record)}, the average over {average.rule}")
    if average.set_aside:
        report.say(say_set_aside(average.set_aside))
    report.save("average", average)
    results: dict[str, Any] = {
        "known": len(average.ids),
        "unknown": len(average.unknown),
        "rule": average.rule,
        "set_aside": average.set_aside,
    }
    if average.ids:
        lows, highs = average.ate_interval()
        if by_step:
            for index, (offset, n_facts) in enumerate(zip(average.offsets, average.n_facts, strict=True)):
                when = f"{-offset} step{'s' * (offset < -1)} before it" if offset else "last token revealed"
                total = _with_interval(average.ate[index].item(), lows[index].item(), highs[index].item())
                report.say(f"{when}, n = {n_facts}: average total effect {total}", *_by_role(average, index))
                report.say(*_largest_share(average.at(offset)), *_controls(average.at(offset)))
            results |= {"offsets": average.offsets, "n_facts": average.n_facts, "ate": average.ate.tolist()}
        else:
            report.say(f"average total effect {_with_interval(average.ate, lows, highs)}", *_by_role(average, ...))
            report.say(*_largest_share(average), *_controls(average))
            results["ate"] = average.ate
        results["aie"] = _of_roles(average, average.aie)
        results["normalized_effect"] = _of_roles(average, average.normalized_effect)
        for name in average.controls:
            control = average.control(name)
            ate = control.ate.tolist() if by_step else control.ate
            results |= {name: {"facts": len(control.ids), "ate": ate, "aie": _of_roles(control, control.aie)}}
        report.draw("picture", "average.png", average.plot)
    report.finish(results, average.record)


def _finish_one_canvas(report: PictureReport, trace: "CausalTrace") -> None:
    """Print the strongest states of a trace, and write its files."""
    report.say(f"p(answer) {trace.clean:.3f}, with the subject corrupted {trace.corrupted:.3f}")
    if not trace.known:
        report.say(
            "the model does not know the fact: it would write something else, so the effects say nothing about recall"
        )
    for cell in strongest(trace.indirect_effect, 5):
        report.say(f"  {_cell(trace, trace.str_tokens, cell)}: restores {trace.indirect_effect[cell]:+.3f}")
    report.save("trace", trace)
    report.draw("picture", "trace.png", trace.plot)
    effects = trace.indirect_effect.tolist()
    results = {"known": trace.known, "clean": trace.clean, "corrupted": trace.corrupted, "indirect_effect": effects}
    report.finish(results, trace.record)


def _finish_steps_of_a_run(report: PictureReport, trace: "TrajectoryTrace", run: "Trajectory") -> None:
    """Print what each step reveals and its strongest state, and write an explorer page and figures."""
    from diffusion_lens.plots import readable

    # 1. When the answer is written, and the strongest state of each step.
    words = [readable(word) for word in trace.record["answer"]]
    revealed = [f"{words[token]} at step {trace.revealed_at[token]}" for token in trace.order]
    verb = "writes the answer" if trace.known else "writes something else than the answer"
    report.say(f"the run {verb}: {run.text[0]}", f"the answer's positions are revealed: {', '.join(revealed)}")
    for index, step in enumerate(trace.steps):
        report.say(
            f"step {step}: p(answer) {trace.clean[index]:.3f}, with the subject corrupted {trace.corrupted[index]:.3f}"
        )
        effect = trace.indirect_effect[index]
        for cell in strongest(effect, 1):
            report.say(f"  {_cell(trace, trace.str_canvases[index], cell)}: restores {effect[cell]:+.3f}")
    if trace.chained is not None:
        (cell,) = strongest(trace.chained, 1)
        report.say(
            "each token at the step that reveals it: with one state restored at all these steps, p(answer) is at most "
            f"{trace.chained[cell]:.3f}",
            f"  {_cell(trace, trace.str_canvases[0], cell)}",
        )

    # 2. The files.
    report.save("trace", trace)
    report.save("trajectory", run)
    if report.out is not None:
        report.files["page"] = run.explore(report.out / "trace.html", trace=trace)
    for step in trace.steps:
        report.draw(f"step_{step}", f"step_{step}.png", partial(trace.plot, step))
    results = {
        "known": trace.known,
        "steps": trace.steps,
        "revealed_at": trace.revealed_at,
        "clean": trace.clean.tolist(),
        "corrupted": trace.corrupted.tolist(),
        "indirect_effect": trace.indirect_effect.tolist(),
        "chained": None if trace.chained is None else trace.chained.tolist(),
    }
    report.finish(results, trace.record)


def _cell(trace: "CausalTrace | TrajectoryTrace", words: list[str], cell: tuple[int, ...]) -> str:
    """A state in words."""
    position = trace.positions[cell[0]]
    return f"{trace.record['kind']} at position {position} ({words[position].strip()}), layer {trace.layers[cell[1]]}"


def _by_role(average: "AverageEffect | AverageTrajectoryEffect", step: Any) -> Iterator[str]:
    """The average indirect effects at one step, with a line for each role that occurs."""
    for role, effects in zip(average.roles, average.aie[step].tolist(), strict=True):
        if not any(map(math.isnan, effects)):
            yield f"  {role:15} {' '.join(f'{effect:6.3f}' for effect in effects)}"


def _of_roles(average: "AverageEffect | AverageTrajectoryEffect", effects: "Tensor") -> dict[str, Any]:
    """Effects by the name of their role."""
    return {role: of_role.tolist() for role, of_role in zip(average.roles, effects.unbind(dim=-2), strict=True)}


def _largest_share(average: "AverageEffect") -> Iterator[str]:
    """The state that recovers the largest share of the total effect, of those whose share has an interval."""
    low, high = average.normalized_interval()
    shares = average.normalized_effect.masked_fill(low.isnan(), math.nan)
    for cell in strongest(shares, 1):
        share = _with_interval(shares[cell].item(), low[cell].item(), high[cell].item())
        yield f"  largest share of it: {share}, {average.roles[cell[0]]}, layer {average.layers[cell[1]]}"
        n_cells = int((~shares.isnan()).sum())
        yield f"  (the largest of {n_cells} cells, so likely too large; the interval is that of one cell alone)"


def _controls(average: "AverageEffect") -> Iterator[str]:
    """The average effects in each control, with a line for each role that occurs."""
    for name in average.controls:
        control = average.control(name)
        if not control.ids:
            yield f"control {name}: no prompt has room for another span as long as its subject"
            continue
        lows, highs = control.ate_interval()
        total = _with_interval(control.ate, lows, highs)
        yield f"control {name}, {len(control.ids)} facts: average total effect {total}"
        yield from _by_role(control, ...)


def _with_interval(effect: float, low: float, high: float) -> str:
    return f"{effect:.3f} ({'too few people: no interval' if math.isnan(low) else f'{low:.3f} to {high:.3f}'})"
