"""Pages to move in, as plotly figures: built, returned, never shown. Needs the extra `plot`.

A page written by `write_page` is one HTML file with plotly.js inside: nothing is fetched. It holds the picture; the
numbers lie in the result that drew it, whose own `save` writes them.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.plots.axes import ABSENT, HUES, RESTORED, row_labels, short_answer
from weight_conversion import renamed_when_whole

Figure = Any  # plotly's; the library is imported when something is drawn

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

    The scale goes from the lowest corrupted run to the highest score. What the canvas does not hold yet (NaN) is grey.

    Args:
        str_canvases: the whole canvas of each step, a string a place.
        subject: first and one past the last place of the subject, starred.
        steps: the number of each step.
        layers: the layer of each column.
        positions: the place of each row.
        kind: what was restored, "resid", "mlp" or "attn"; it chooses the hue.
        answer: the text of each of its tokens.
        clean, corrupted: p(answer) in those runs, shown above the map.
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
        runs = f"step {step}: clean {clean[i]:.2f}, corrupted {corrupted[i]:.2f}"
        named = {"title": {"text": f"{_literal(title)}<br><sup>{runs}</sup>"}, "yaxis": {"ticktext": labels}}
        frames.append(go.Frame(name=str(step), data=[cells], layout=named))

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
    bare = {"showgrid": False, "zeroline": False, "ticks": "outside"}
    figure.update_xaxes(title=RESTORED[kind], tickvals=columns, ticktext=[str(layer) for layer in layers], **bare)
    figure.update_yaxes(tickvals=rows, autorange="reversed", automargin=True, **bare)
    moves = [{"label": frame.name, "method": "animate", "args": [[frame.name], _AT_ONCE]} for frame in frames]
    figure.update_layout(
        sliders=[{"steps": moves, "currentvalue": {"prefix": "denoising step "}, "pad": {"t": 60}}],
        plot_bgcolor=ABSENT,
        width=360 + max(240, 30 * len(columns)),
        height=260 + 22 * len(rows),
    )
    return figure


def write_page(figure: Figure, path: str | Path) -> Path:
    """Write a plotly figure as one `.html` file that needs no network: whole, or not at all."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"pages are HTML files; {target} should end in .html")
    # A fixed id, so that the same figure is the same file.
    page = figure.to_html(include_plotlyjs=True, auto_play=False, div_id="figure")
    with renamed_when_whole(target) as part:
        part.write_text(page, encoding="utf-8")
    return target


def _literal(text: str) -> str:
    """Text that plotly, which reads a little HTML, shows as it is; "<eos>" would be a tag."""
    return escape(text, quote=False).replace("\n", "<br>")
