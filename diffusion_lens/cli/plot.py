"""`diffusion-lens plot` draws a saved result."""

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import Report, require
from diffusion_lens.settings import at_least, setting
from diffusion_lens.settings.figures import check_colour_map, check_font_size, check_size


def _sides(name: str, value: str) -> tuple[float, float]:
    """Width and height from a text such as "3.3x2.2"."""
    try:
        return check_size(name, [float(side) for side in value.lower().split("x")])
    except ValueError as error:
        raise ValueError(f"{name}={value!r}; give width x height in inches, such as 3.3x2.2 ({error})") from None


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
    cmap: str | None = setting(
        None, "Colour map of matplotlib, such as cividis; of lines and bars, their colours.", check_colour_map
    ),
    size: str | None = setting(None, "Width x height of the figure in inches, such as 3.3x2.2.", _sides),
    font_size: float | None = setting(None, "Size of labels in points. Default: 9.", check_font_size),
) -> None:
    """Draw a saved result: a trajectory, trace, average effect, patch grid, logit lens, ROME value, edit, comparison,
    recall curve, signatures of reversal or one-layer study. Prints the caption.

    Example: diffusion-lens plot trace/trace.safetensors --out trace.png
    """
    require("pictures")
    from diffusion_lens.plots import save_figure
    from diffusion_lens.records.results import load

    loaded = load(result)
    kind = loaded.KIND
    if not hasattr(loaded, "plot"):
        why = getattr(loaded, "NO_PICTURE", "")
        raise ValueError(f"{result} contains a {kind}, which has no figure{why and f': {why[0].lower()}{why[1:-1]}'}")
    choices = {"step": step, "position": position, "head": head, "neuron": neuron}
    selected = {name: number for name, number in choices.items() if number is not None}
    parameters = signature(loaded.plot).parameters
    if unknown := selected.keys() - parameters.keys():
        raise ValueError(f"{result} contains a {kind}, whose figure does not depend on a {min(unknown)}")
    if kind == "trajectory trace" and step is None:
        raise ValueError(f"--step: say which step to draw, one of {loaded.steps}")
    drawn = loaded.plot(**selected, cmap=cmap, size=size, font_size=font_size)
    picture = save_figure(drawn, image or result.with_suffix(".png"))
    report.say(loaded.caption(), f"wrote {picture}")
    report.finish({"kind": kind, "caption": loaded.caption()}, picture=picture)
