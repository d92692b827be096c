"""Lines over labelled columns, such as denoising steps or hook points."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import one_axes, spaced


def labelled_lines(
    values: Float[Tensor, "entry axis"],
    labels: Sequence[str],
    columns: Sequence[str],
    xlabel: str,
    ylabel: str,
    title: str,
    ax: Any = None,
) -> Any:
    """Draw one line for each row of `values`; a NaN interrupts it.

    Args:
        values: A row for each line.
        labels: Name of each line.
        columns: Label of each column.
    """
    ax = one_axes(ax, width=7.0, height=3.4)
    positions = range(len(columns))
    for i, (row, label) in enumerate(zip(values, labels, strict=True)):
        # Ten colours, then the same ones dashed.
        ax.plot(positions, row.tolist(), color=f"C{i % 10}", linestyle="-" if i < 10 else "--", marker=".", label=label)
    shown = spaced(len(columns))
    crowded = max(map(len, columns)) > 4
    ax.set_xticks(
        list(shown), [columns[i] for i in shown], rotation=30 if crowded else 0, ha="right" if crowded else "center"
    )
    ax.tick_params(labelsize=8)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.set_title(title, fontsize=10)
    if len(labels) > 1:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
