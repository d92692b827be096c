"""What `diffusion-lens patch` prints and writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.cells import strongest
from diffusion_lens.cli.report import Report, save_figure

if TYPE_CHECKING:
    from diffusion_lens.analysis import PatchGrid

SHOWN = 5  # cells of a grid


def say(report: Report, grids: "Mapping[str, PatchGrid]", metric: str) -> None:
    """Print the metric of both runs, and the cells of each site with the largest effects."""
    grid = next(iter(grids.values()))
    for step, clean, corrupted in zip(_steps(grid), grid.clean.view(-1), grid.corrupted.view(-1), strict=True):
        report.say(f"{step}{metric} {clean:.3f} in the clean run, {corrupted:.3f} in the corrupted one")
    for site, grid in grids.items():
        report.say(f"largest effects of {site}:")
        for cell in strongest(grid.effect, SHOWN):
            report.say(f"  {_cell(grid, cell)}: {grid.effect[cell]:+.3f}")
        if grid.error is not None:
            report.say(
                f"  these are estimates; {len(grid.error.exact)} cells were also patched exactly, and differ by at "
                f"most {grid.error.max_abs:.3f}"
            )


def results_of(grids: "Mapping[str, PatchGrid]") -> dict[str, Any]:
    """The numbers of the JSON object, by site."""
    return {
        site: {
            "axes": grid.axes,
            "coordinates": grid.coordinates,
            "clean": grid.clean.tolist(),
            "corrupted": grid.corrupted.tolist(),
            "effect": grid.effect.tolist(),
        }
        for site, grid in grids.items()
    }


def save(grids: "Mapping[str, PatchGrid]", out: Path) -> dict[str, Path]:
    """Write each grid, and the figure of the step and head with its largest effect."""
    from diffusion_lens.records import shown_model

    files = {}
    for site, grid in grids.items():
        files[site] = grid.save(out / f"{site}.safetensors")
        (cell,) = strongest(grid.effect, 1)
        chosen = {axis: grid.coordinates[axis][index] for axis, index in zip(grid.axes, cell, strict=True)}
        drawn = {axis: chosen[axis] for axis in ("step", "head") if axis in chosen}
        if "pos" not in chosen:
            drawn.pop("head", None)  # The heads are the rows of the figure.
        title = ", ".join([shown_model(grid.record), *(f"{axis} {number}" for axis, number in drawn.items())])
        files[f"{site}_picture"] = save_figure(grid.plot(**drawn, title=title), out / f"{site}.png")
    return files


def _steps(grid: "PatchGrid") -> list[str]:
    return [f"step {step}: " for step in grid.coordinates.get("step", ())] or [""]


def _cell(grid: "PatchGrid", cell: tuple[int, ...]) -> str:
    """A cell in words."""
    index = dict(zip(grid.axes, cell, strict=True))
    words = []
    for axis in ("step", "layer", "head", "pos"):
        if axis in index:
            place = grid.coordinates[axis][index[axis]]
            several = f"positions {', '.join(str(clean) for clean, _ in place)}" if isinstance(place, list) else ""
            words.append(several or f"{'position' if axis == 'pos' else axis} {place}")
    if "pos" in index:
        words[-1] += f" ({grid.labels[index.get('step', 0)][index['pos']]})"
    return ", ".join(words)
