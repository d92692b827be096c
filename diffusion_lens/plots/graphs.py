"""The graph of a run: steps from top to bottom, layers from left to right, heavy lines for decisions; and its test."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import colour_map, label_axes, look, one_axes, points, readable
from diffusion_lens.plots.curves import legend_outside
from diffusion_lens.settings.figures import styled

_MARKERS = {"token": "s", "embed": "s", "head": "o", "mlp": "D", "decision": ">", "target": "*", "error": "x"}
_MARKERS |= {"feature": "^"}
_ROW = 0.2  # inches of a position


@styled
def run_graph(
    nodes: Sequence[Mapping[str, Any]],
    edges: Sequence[tuple[int, int, float, bool]],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw nodes as dots, as large as their effects, and edges as lines, as wide as their weights.

    Args:
        nodes: Of each node its kind, x, index of its step, label of the step, position, the word that the step reads
            there, the word that it writes there, and its effect.
        edges: Source, target, weight, and whether the edge is a decision.
    """
    # 1. A row for each position of a step that has a node.
    rows: dict[tuple[int, int], float] = {}
    for step, position in sorted({(node["step"], node["position"]) for node in nodes}):
        before = next(reversed(rows), None)
        rows[step, position] = 0.0 if before is None else rows[before] + (1.0 if before[0] == step else 2.5)
    places = [(node["x"], rows[node["step"], node["position"]]) for node in nodes]
    ax = one_axes(ax, width=6.4, height=1.2 + _ROW * (max(rows.values(), default=0.0) + 1))

    # 2. Edges below the nodes; the ends of the colour map are negative and positive effects.
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    chosen = colour_map("RdBu")
    mapped = colormaps[chosen] if isinstance(chosen, str) else chosen
    colours = to_hex(mapped(0.1)), to_hex(mapped(0.9))
    largest = max((abs(weight) for *_, weight, _ in edges), default=1.0) or 1.0
    for source, target, weight, decision in edges:
        (x, y), (to_x, to_y) = places[source], places[target]
        strength = abs(weight) / largest
        look = {"color": colours[weight > 0], "alpha": 0.15 + 0.75 * strength, "solid_capstyle": "round"}
        if decision:
            ax.plot([x, to_x], [y, to_y], linewidth=2.5, zorder=2, **{**look, "color": "0.4", "alpha": 0.8})
        else:
            ax.plot([x, to_x], [y, to_y], linewidth=0.3 + 2.2 * strength, zorder=1, **look)

    # 3. Nodes, and the words of the positions.
    most = max((abs(node["effect"]) for node in nodes), default=1.0) or 1.0
    for node, (x, y) in zip(nodes, places, strict=True):
        size, colour = 8 + 110 * abs(node["effect"]) / most, colours[node["effect"] > 0]
        ax.scatter([x], [y], s=size, marker=_MARKERS[node["kind"]], color=colour, zorder=3, linewidths=1)
        if node["kind"] in ("decision", "target"):
            ax.annotate(readable(node["word"]), (x, y), (7, 0), textcoords="offset points", va="center", size=points(7))
    words = {
        (node["step"], node["position"]): f"{node['label']}:{node['position']} {readable(node['read'])}"
        for node in nodes
    }
    ax.margins(x=0.16)
    ax.set_yticks(list(rows.values()), [words[key] for key in rows], fontsize=points(7))
    across = sorted({int(node["x"]) for node in nodes if node["kind"] in ("head", "mlp", "feature")})
    ends = [-1, max((node["x"] for node in nodes), default=0)]
    ax.set_xticks([ends[0], *across, ends[1]], ["embed", *map(str, across), "writes"], fontsize=points(7))
    ax.invert_yaxis()
    features = ", features △" if any(node["kind"] == "feature" for node in nodes) else ""
    label_axes(ax, f"layer: heads ○, MLPs ◇{features}", "step:position", title)
    return ax


@styled
def predicted_changes(changes: Mapping[str, Float[Tensor, "cell 2"]], title: str, ax: Any = None) -> Any:
    """Scatter plot of predicted and measured changes, with the line on which they are equal.

    Args:
        changes: The predicted and the measured change of each cell, by the label of its kind.
    """
    ax = one_axes(ax, 4.6, 4.2)
    ax.axline((0, 0), slope=1, color="0.75", linewidth=0.8, zorder=1)
    for i, (label, cells) in enumerate(changes.items()):
        drawn = look(i, len(changes))
        ax.scatter(*cells.T.tolist(), s=14, color=drawn.colour, marker=drawn.marker, label=label, zorder=2)
    label_axes(ax, "predicted change", "measured change", title)
    legend_outside(ax)
    return ax
