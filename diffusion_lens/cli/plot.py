"""`diffusion-lens plot` draws a saved result."""

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import Report, require, save_figure
from diffusion_lens.settings import at_least, setting


@command()
def plot(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A .safetensors file that a command wrote.")],
    report: Report,
    image: Annotated[
        Path | None, typer.Option("--out", help="Image file. Default: RESULT with the suffix .png.")
    ] = None,
    step: int | None = setting(None, "Step to draw, of a result with several.", partial(at_least, 0)),
    position: int | None = setting(None, "Position of a logit lens to draw at all its steps."),
    head: int | None = setting(None, "Head of a patch grid to draw.", partial(at_least, 0)),
    neuron: int | None = setting(None, "Neuron of a patch grid to draw.", partial(at_least, 0)),
) -> None:
    """Draw a saved result: a trajectory, trace, average effect, patch grid, logit lens, ROME value, edit, comparison,
    recall curve, signatures of reversal or one-layer study.

    Example: diffusion-lens plot trace/trace.safetensors --out trace.png
    """
    require("pictures")
    from diffusion_lens.records.results import load

    loaded = load(result)
    kind = loaded.KIND
    if not hasattr(loaded, "plot"):
        raise ValueError(f"{result} contains a {kind}, which has no figure")
    drawn = {"step": step, "position": position, "head": head, "neuron": neuron}
    selected = {name: number for name, number in drawn.items() if number is not None}
    parameters = signature(loaded.plot).parameters
    if unknown := selected.keys() - parameters.keys():
        raise ValueError(f"{result} contains a {kind}, whose figure does not depend on a {min(unknown)}")
    if kind == "trajectory trace" and step is None:
        raise ValueError(f"--step: say which step to draw, one of {loaded.steps}")
    picture = save_figure(loaded.plot(**selected), image or result.with_suffix(".png"))
    report.say(f"wrote {picture}")
    report.finish({"kind": kind}, picture=picture)
