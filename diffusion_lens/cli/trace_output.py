"""What `diffusion-lens trace` prints and writes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.cells import strongest
from diffusion_lens.cli.report import Report, save_figure

if TYPE_CHECKING:
    from diffusion_lens.analysis import CausalTrace, TrajectoryTrace
    from diffusion_lens.denoising.trajectory import Trajectory

Output = tuple[dict[str, Any], dict[str, Any]]


def one_canvas(report: Report, trace: "CausalTrace", out: Path | None) -> Output:
    """Print the strongest states of a trace, and write its files; returns the results and the files of the report."""
    report.say(f"p(answer) {trace.clean:.3f}, with the subject corrupted {trace.corrupted:.3f}")
    for cell in strongest(trace.indirect_effect, 5):
        report.say(f"  {_cell(trace, trace.str_tokens, cell)}: restores {trace.indirect_effect[cell]:+.3f}")
    files: dict[str, Any] = {}
    if out is not None:
        files = {
            "trace": trace.save(out / "trace.safetensors"),
            "picture": save_figure(trace.plot(), out / "trace.png"),
        }
    results = {"clean": trace.clean, "corrupted": trace.corrupted, "indirect_effect": trace.indirect_effect.tolist()}
    return results, files


def steps_of_a_run(report: Report, trace: "TrajectoryTrace", run: "Trajectory", out: Path | None) -> Output:
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
    files: dict[str, Any] = {}
    if out is not None:
        files = {
            "trace": trace.save(out / "trace.safetensors"),
            "trajectory": run.save(out / "trajectory.safetensors"),
            "page": run.explore(out / "trace.html", trace=trace),
            **{f"step_{step}": save_figure(trace.plot(step), out / f"step_{step}.png") for step in trace.steps},
        }
    results = {
        "known": trace.known,
        "steps": trace.steps,
        "revealed_at": trace.revealed_at,
        "clean": trace.clean.tolist(),
        "corrupted": trace.corrupted.tolist(),
        "indirect_effect": trace.indirect_effect.tolist(),
        "chained": None if trace.chained is None else trace.chained.tolist(),
    }
    return results, files


def _cell(trace: "CausalTrace | TrajectoryTrace", words: list[str], cell: tuple[int, ...]) -> str:
    """A state in words."""
    position = trace.positions[cell[0]]
    return f"{trace.record['kind']} at position {position} ({words[position].strip()}), layer {trace.layers[cell[1]]}"
