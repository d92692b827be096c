"""Interactive pages as plotly figures. Functions build and return them, and never show them. Requires the extra `plot`.

`write_page` writes one HTML file that contains plotly.js, so it opens without a network. A page does not store its
numbers in a readable form; the result that drew it does, and `save` writes them.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import ABSENT, HUES, RESTORED, row_labels, short_answer
from weight_conversion import renamed_when_whole

Figure = Any  # A plotly figure. Plotly is imported on first use.

_AT_ONCE = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}


def step_slider(
    scores: Float[Tensor, "step pos layer"],
    *,
    str_canvases: Sequence[Sequence[str]],
    subject: tuple[int, int],
    steps: Sequence[int],
    layers: Sequence[int],
    positions: Sequence[int],
    kind: str,
    answer: Sequence[str],
    clean: Float[Tensor, "step"],
    corrupted: Float[Tensor, "step"],
    title: str,
) -> Figure:
    """`plots.heat_map` for each denoising step, with a slider over the steps and one colour scale for all.

    The scale goes from the lowest corrupted run to the highest score. Positions that the canvas does not contain yet
    (NaN) are grey.

    Args:
        str_canvases: Text of every position of the canvas, for each step.
        subject: First position of the subject, and one past its last. These rows get a star.
        steps: Number of each step.
        layers: Layer of each column.
        positions: Position of each row.
        kind: Kind of state that was restored, "resid", "mlp" or "attn"; it selects the hue.
        answer: Text of each answer token.
        clean, corrupted: p(answer) in the clean and in the corrupted run, written above the map.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ImportError("pages need plotly: pip install 'diffusion-lens[plot]'") from error
    rows, columns = list(range(len(positions))), list(range(len(layers)))
    frames = []
    for i, step in enumerate(steps):
        labels = [_literal(label) for label in row_labels(str_canvases[i], subject, positions)]
        cells = go.Heatmap(z=scores[i].tolist(), text=[[label] * len(layers) for label in labels])
        subtitle = f"step {step}: clean {clean[i]:.2f}, corrupted {corrupted[i]:.2f}"
        layout = {"title": {"text": f"{_literal(title)}<br><sup>{subtitle}</sup>"}, "yaxis": {"ticktext": labels}}
        frames.append(go.Frame(name=str(step), data=[cells], layout=layout))

    figure = go.Figure(data=frames[0].data, layout=frames[0].layout, frames=frames)
    figure.update_traces(
        x=columns,
        y=rows,
        customdata=[list(layers)] * len(rows),
        zmin=float(corrupted.min()),
        zmax=float(scores.nan_to_num().max()),
        colorscale=HUES[kind],
        colorbar={"title": {"text": _literal(f"p({short_answer(answer)})")}},
        hovertemplate="%{text}<br>layer %{customdata}<br>p = %{z:.4f}<extra></extra>",
        hoverongaps=False,
    )
    no_grid = {"showgrid": False, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(title=RESTORED[kind], tickvals=columns, ticktext=[str(layer) for layer in layers], **no_grid)
    figure.update_yaxes(tickvals=rows, autorange="reversed", automargin=True, **no_grid)
    moves = [{"label": frame.name, "method": "animate", "args": [[frame.name], _AT_ONCE]} for frame in frames]
    figure.update_layout(
        sliders=[{"steps": moves, "currentvalue": {"prefix": "denoising step "}, "pad": {"t": 60}}],
        plot_bgcolor=ABSENT,
        width=360 + max(240, 30 * len(columns)),
        height=260 + 22 * len(rows),
    )
    return figure


def write_page(figure: Figure, path: str | Path) -> Path:
    """Write a plotly figure as one `.html` file that needs no network. An interrupted write leaves no partial file."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"pages are HTML files; {target} should end in .html")
    # A fixed id makes the file depend on the figure only.
    page = figure.to_html(include_plotlyjs=True, auto_play=False, div_id="figure")
    with renamed_when_whole(target) as part:
        part.write_text(page, encoding="utf-8")
    return target


def _literal(text: str) -> str:
    """Text escaped for plotly, which interprets some HTML: it would take "<eos>" for a tag."""
    return escape(text, quote=False).replace("\n", "<br>")
