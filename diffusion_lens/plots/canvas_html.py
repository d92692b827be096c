"""The canvas by denoising step as a self-contained HTML page, without scripts, fonts or downloads."""

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
    """An HTML page with one row per step. A token is coloured by its probability when it was revealed.

    Args:
        canvases: Text of each position, for each canvas.
        hidden: Whether each position is still masked, for each canvas.
        revealed_at: Step that revealed each position for good; -1 for positions of the prompt.
        confidence: Probability of each token when it was revealed.
        first_step: Number of the step that follows the first canvas.
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
        "<p>The canvas before the first step and after each step. A frame marks the step that revealed a token. A "
        "darker green means a higher probability at that step (hover to read it). Dots are masked positions.</p>"
        f"<table>{''.join(rows)}</table></body></html>"
    )


def _cell(word: str, blank: bool, revealed_at: int, confidence: float, step: int) -> str:
    if blank:
        return '<td class="blank">·</td>'
    if revealed_at < 0:
        return f'<td class="given">{escape(word)}</td>'
    if step <= revealed_at:  # The token was revealed here, masked again later and revealed for good after that.
        return f"<td>{escape(word)}</td>"
    new = ' class="new"' if step == revealed_at + 1 else ""
    shade = f"background: rgba(60, 160, 80, {0.08 + 0.6 * confidence:.2f})"
    return f'<td{new} style="{shade}" title="p = {confidence:.3f}">{escape(word) or "&nbsp;"}</td>'
