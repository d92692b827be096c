"""Bars of shares without and with an intervention."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import one_axes

_COLOURS = ("0.75", "tab:purple", "tab:orange")


def share_bars(
    shares: Mapping[str, Sequence[float]],
    groups: Sequence[str],
    intervals: Mapping[str, Float[Tensor, "entry 2"]] | None = None,
    ax: Any = None,
    title: str | None = None,
    ylabel: str = "share of probes won",
) -> Any:
    """Plot shares by group as adjacent bars, one colour for each state of the model. Returns the axes.

    Args:
        shares: Share in each group, by state, such as "before" and "after".
        groups: Names of the groups.
        intervals: Ends of the interval of each share, by state; NaN draws none.
        ax: Matplotlib axes; by default those of a new figure.
        title: Title of the axes.
        ylabel: Label of the vertical axis.
    """
    ax = one_axes(ax, width=2.0 + 0.9 * len(groups), height=2.8)
    width = 0.8 / len(shares)
    for i, (state, heights) in enumerate(shares.items()):
        at = [group + (i - (len(shares) - 1) / 2) * width for group in range(len(groups))]
        ends = None
        if intervals is not None:
            lengths = (intervals[state] - torch.tensor(heights)[:, None]).abs()
            ends = lengths.nan_to_num(0.0).T.tolist()
        ax.bar(at, heights, width=width, label=state, color=_COLOURS[i], yerr=ends, capsize=2, error_kw={"lw": 0.8})
    ax.set_xticks(range(len(groups)), [group.replace("_", "\n") for group in groups])
    ax.tick_params(labelsize=8)
    ax.set_ylim(0, 1.02)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.set_title(title or "", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
