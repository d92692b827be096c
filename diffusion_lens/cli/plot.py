"""`diffusion-lens plot` draws a saved result."""

from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_lens.cli import options
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.report import Report, save_figure


@app.command()
def plot(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A .safetensors file that a command wrote.")],
    out: Annotated[Path | None, typer.Option(help="Image file. Default: RESULT with the suffix .png.")] = None,
    json: options.Json = False,
) -> None:
    """Draw a saved result: a trajectory, trace, average effect, patch grid, ROME value, edit, comparison, recall
    curve, signatures of reversal or one-layer study.

    Example: diffusion-lens plot trace/trace.safetensors --out trace.png
    """
    require("pictures")
    from diffusion_lens.records import kind_of

    kind, classes = kind_of(result), _result_classes()
    if kind not in classes:
        raise ValueError(
            f"{result} contains a {kind}, which has no figure; results with a figure: {', '.join(classes)}"
        )
    report = Report("plot", {"result": result}, None, json)
    picture = save_figure(classes[kind].load(result).plot(), out or result.with_suffix(".png"))
    report.say(f"wrote {picture}")
    report.finish({"kind": kind}, picture=picture)


def _result_classes() -> dict[str, Any]:
    """Classes of results that have a figure, by the kind in their file."""
    from diffusion_lens import analysis
    from diffusion_lens.analysis.rome import EditReport
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.evaluation import Recall
    from diffusion_lens.one_layer import OneLayerStudy

    return {
        "trajectory": Trajectory,
        "causal trace": analysis.CausalTrace,
        "average effect": analysis.AverageEffect,
        "average trajectory effect": analysis.AverageTrajectoryEffect,
        "patch grid": analysis.PatchGrid,
        "ROME value": analysis.ValueResult,
        "edit report": EditReport,
        "edit study": analysis.EditStudy,
        "comparison": analysis.Comparison,
        "comparisons": analysis.Comparisons,
        "key and value study": analysis.KeyValueStudy,
        "recall": Recall,
        "reversal signatures": analysis.ReversalSignatures,
        "one-layer study": OneLayerStudy,
    }
