"""The canvas by step as a page of its own: no script, no font, nothing fetched."""

from collections.abc import Sequence
from html import escape

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; }
table { border-collapse: collapse; }
th { text-align: right; padding-right: .8em; font-weight: normal; color: #888; white-space: nowrap; }
td { padding: .15em .5em; text-align: center; border: 1px solid #eee; }
td.given { color: #777; }
td.blank { color: #ccc; }
td.new { font-weight: bold; outline: 2px solid #333; outline-offset: -2px; }
p { color: #555; max-width: 50em; }
"""


def canvas_table(
    title: str,
    canvases: Sequence[Sequence[str]],
    hidden: Sequence[Sequence[bool]],
    revealed_at: Sequence[int],
    confidence: Sequence[float],
    first_step: int = 0,
) -> str:
    """A page with a row a step; a token is coloured by the probability it had when it was revealed.

    Args:
        canvases: the text of each place, for each canvas.
        hidden: whether each place is blank, for each canvas.
        revealed_at: step in which a place was revealed for good, -1 where it was given.
        confidence: probability of the token when it was revealed.
        first_step: the step before which the first canvas stands.
    """
    rows = []
    for row, canvas in enumerate(canvases):
        step = first_step + row
        label = "start" if step == 0 else f"after step {step - 1}"
        columns = zip(canvas, hidden[row], revealed_at, confidence, strict=True)
        cells = [_cell(word, blank, at, p, step) for word, blank, at, p in columns]
        rows.append(f"<tr><th>{label}</th>{''.join(cells)}</tr>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        "<p>The canvas before the first step and after each. A token is framed in the row of its reveal; the darker "
        "its green, the surer the model was of it then (hover for the probability). Dots are still masked.</p>"
        f"<table>{''.join(rows)}</table></body></html>"
    )


def _cell(word: str, blank: bool, revealed_at: int, confidence: float, step: int) -> str:
    if blank:
        return '<td class="blank">·</td>'
    if revealed_at < 0:
        return f'<td class="given">{escape(word)}</td>'
    if step <= revealed_at:  # written, and masked again later
        return f"<td>{escape(word)}</td>"
    new = ' class="new"' if step == revealed_at + 1 else ""
    shade = f"background: rgba(60, 160, 80, {0.08 + 0.6 * confidence:.2f})"
    return f'<td{new} style="{shade}" title="p = {confidence:.3f}">{escape(word) or "&nbsp;"}</td>'
