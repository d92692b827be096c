"""Curves with confidence bands or standard errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import RESTORED, one_axes, spaced


def effect_curves(
    mean: Float[Tensor, "role layer"],
    low: Float[Tensor, "role layer"],
    high: Float[Tensor, "role layer"],
    roles: Sequence[str],
    layers: Sequence[int],
    kind: str,
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Plot the average indirect effect by layer, one curve with a confidence band for each token role.

    The colour of a role does not depend on which other roles occur.

    Args:
        mean: Average effect, a difference of probabilities; NaN where a role does not occur.
        low, high: Lower and upper end of the confidence band.
        roles: Name of each row.
        layers: Layer of each column.
        kind: Kind of state that was restored, as in `heat_map`.

    Raises:
        ValueError: No role occurs.
    """
    occurring = [row for row in range(len(roles)) if not mean[row].isnan().all()]
    if not occurring:
        raise ValueError(f"there is no curve to draw: the effect is NaN in every role of {', '.join(roles)}")
    ax = one_axes(ax, width=6.0, height=3.2)
    ax.axhline(0, color="0.8", linewidth=0.8)
    for row in occurring:
        colour = f"C{row}"
        ax.plot(layers, mean[row].numpy(), color=colour, label=roles[row], marker="o", markersize=3)
        ax.fill_between(layers, low[row].numpy(), high[row].numpy(), color=colour, alpha=0.2, linewidth=0)
    ax.set_xticks([layers[column] for column in spaced(len(layers))])
    ax.tick_params(labelsize=8)
    ax.set_xlabel(RESTORED[kind], fontsize=9)
    ax.set_ylabel("average indirect effect", fontsize=9)
    ax.set_title(title or "Average effect of restoring a state", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax


def level_curves(
    spans: Float[Tensor, "level axis"],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    ax: Any = None,
    title: str | None = None,
) -> Any:
    """Plot shares by noise level. Horizontal bars are ranges of levels, vertical bars are one standard error long.

    Args:
        spans: Lowest and highest noise level of each point.
        curves: Value and standard error of each point, by the label of the curve.
    """
    ax = one_axes(ax, width=6.0, height=3.2)
    middles, halves = spans.mean(dim=1).numpy(), (spans.diff(dim=1)[:, 0] / 2).numpy()
    ax.axhline(1, color="0.8", linewidth=0.8)
    for label, points in curves.items():
        values = [value for value, _ in points]
        errors = [0.0 if math.isnan(error) else error for _, error in points]
        ax.errorbar(middles, values, yerr=errors, xerr=halves, label=label, fmt="o", markersize=4, elinewidth=1)
    ax.tick_params(labelsize=8)
    ax.set_xlabel("noise level t (share of masked tokens)", fontsize=9)
    ax.set_ylabel("share", fontsize=9)
    ax.set_title(title or "Dictionary by noise level", fontsize=10, parse_math=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    return ax
