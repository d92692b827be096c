"""Colours, markers and font sizes: the defaults of all figures, and what `style` puts in their place.

The default colours of lines are those of Okabe & Ito (2008), without yellow, which is too light on white. Readers with
any kind of colour blindness can tell them apart, and so can a reader of a grey print by the markers and line styles.
"""

from typing import Any, NamedTuple

from diffusion_lens.settings.figures import STYLE

FONT_SIZE = 9.0  # points of the labels of axes
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "", "////", "....")
BASELINE = "0.55"
CELLS: dict[str, Any] = {"interpolation": "none"}  # Cells of a map keep their colours, also at their edges.
_LISTED = 20  # colours of the largest map that is a list to choose from
_LIGHTEST = 0.6  # relative luminance of a line that is seen on white


class Look(NamedTuple):
    """How one of several lines or groups of bars is drawn."""

    colour: Any
    marker: str
    dash: str
    hatch: str


def points(size: int) -> float:
    """A font size that is `size` where labels have the default of 9 points."""
    chosen = STYLE.get().font_size
    return size * (1.0 if chosen is None else float(chosen) / FONT_SIZE)


def figure_size(width: float, height: float) -> tuple[float, float]:
    """The chosen size of a figure in inches, or this one."""
    chosen = STYLE.get().size
    return (width, height) if chosen is None else (chosen[0], chosen[1])


def colour_map(default: str) -> Any:
    """The chosen colour map, or this one."""
    chosen = STYLE.get().cmap
    return default if chosen is None else chosen


def look(index: int, n: int | None = None) -> Look:
    """How the line `index` of `n` is drawn; without `n`, of a number that is not known yet."""
    colours = _colours(index, n)
    # Where colours repeat, and where they are many, dashes differ as well.
    turn = max(index // len(colours), index // len(LINES))
    return Look(
        colours[index % len(colours)],
        MARKERS[index % len(MARKERS)],
        DASHES[turn % len(DASHES)],
        HATCHES[index % len(HATCHES)],
    )


def n_curves(ax: Any) -> int:
    """How many curves axes have. Curves have markers, and other lines have none."""
    return sum(line.get_marker() not in ("", "None", None) for line in ax.lines)


def _colours(index: int, n: int | None) -> list[Any]:
    """The colours to choose from, as many as it takes for the line `index`."""
    if STYLE.get().cmap is None:
        return list(LINES)
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    chosen = STYLE.get().cmap
    mapped = colormaps[chosen] if isinstance(chosen, str) else chosen
    if mapped.N <= _LISTED:
        return [to_hex(mapped(i)) for i in range(mapped.N)]
    colours = mapped(np.arange(mapped.N))
    visible = colours[luminance(colours) <= _LIGHTEST]
    visible = visible if len(visible) else colours
    places = [_spread(i) for i in range(index + 1)] if n is None else np.linspace(0, 1, max(n, index + 1))
    return [to_hex(visible[round(float(place) * (len(visible) - 1))]) for place in places]


def _spread(i: int) -> float:
    """The place of a colour on a map, away from those of the colours before it: 0, 1, 1/2, 1/4, 3/4, 1/8, ..."""
    if i < 2:
        return float(i)
    halves = 1 << ((i - 1).bit_length() - 1)
    return (2 * (i - 1 - halves) + 1) / (2 * halves)


def luminance(colours: Any) -> Any:
    """Relative luminance of colours by WCAG 2, between 0 (black) and 1 (white).

    Args:
        colours: Array with red, green and blue between 0 and 1 on its last axis, and perhaps an opacity.
    """
    import numpy as np

    parts = np.asarray(colours, dtype=float)[..., :3]
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])
