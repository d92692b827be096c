"""Curves by training step: a group of panels for each variant, one line for each kind of network."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import panels

_COLUMNS = 3
Panels = Mapping[str, Mapping[str, Float[Tensor, "run step"]]]


def training_panels(rows: Mapping[str, Panels], steps: Sequence[int]) -> list[Any]:
    """Draw means with the range over the runs; returns the axes in reading order.

    Args:
        rows: By the title of a group, by the title of a panel, by the label of a line: a curve for each run. A line
            that is NaN is left out, and a panel without lines says that there are none.
        steps: Number of training steps of each column, drawn at equal distances.
    """
    n_panels = _COLUMNS * -(-max(map(len, rows.values())) // _COLUMNS)
    n_lines = n_panels // _COLUMNS * len(rows)
    _, axes = panels(n_lines, _COLUMNS, width=2.6 * _COLUMNS, height=2.3 * n_lines)
    at = range(len(steps))
    for row, (row_title, row_panels) in enumerate(rows.items()):
        for unused in axes[row * n_panels + len(row_panels) : (row + 1) * n_panels]:
            unused.set_axis_off()
        for column, (title, lines) in enumerate(row_panels.items()):
            ax = axes[row * n_panels + column]
            ax.axhline(0, color="0.8", linewidth=0.8, zorder=0)
            for i, (label, curves) in enumerate(lines.items()):
                if bool(curves.isnan().all()):
                    continue
                ax.plot(at, curves.mean(dim=0).tolist(), color=f"C{i}", marker=".", label=label)
                low, high = curves.amin(dim=0).tolist(), curves.amax(dim=0).tolist()
                ax.fill_between(at, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
            if not ax.lines[1:]:
                ax.text(0.5, 0.5, "not defined", ha="center", transform=ax.transAxes, fontsize=8)
            ax.set_ylim(-1.05 if "correlation" in title or "cosine" in title else -0.03, 1.05)
            ax.set_xticks(list(at), [str(step) for step in steps], rotation=45)
            ax.tick_params(labelsize=7)
            ax.set_title(f"{row_title}: {title}", fontsize=8)
            if row + 1 == len(rows):
                ax.set_xlabel("training step", fontsize=8)
    axes[0].legend(fontsize=7)
    return axes
