"""Tick labels that have room: every second, third, ... of them is drawn where all would collide.

How much room there is depends on the size of the axes, which is known when the figure is laid out. So the ticks are
chosen then, as matplotlib chooses those of numbers.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any
from unicodedata import east_asian_width

import numpy as np

LETTER, _WIDE_LETTER = 0.62, 1.0  # mean widths of letters in font sizes
_LINE = 1.25  # height of a line, and of the space to the next, in font sizes
_SPACE = 0.8  # between neighbouring labels of one row, in font sizes
_SAFE = 0.6  # share of the width of axes that is left to the map when row labels and a colour bar have their room


class Names:
    """The label of each place, as a function of the tick."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def __call__(self, x: Any, pos: int | None = None) -> str:
        return self.names.get(round(x), "")


def places_with_room(places: Sequence[int], apart: float, most: int | None) -> Any:
    """A locator of matplotlib: ticks at every place, or at every second, third, ... where labels would collide.

    Args:
        places: Coordinates of the ticks, ascending.
        apart: Least distance of two ticks in points.
        most: Largest number of ticks.
    """
    return _locator()(places, apart, most)


@cache
def _locator() -> type[Any]:
    from matplotlib.ticker import Locator

    class PlacesWithRoom(Locator):
        def __init__(self, places: Sequence[int], apart: float, most: int | None) -> None:
            self.places: Any = np.asarray(places, dtype=float)
            self.apart, self.most = apart, most

        def __call__(self) -> Any:
            axis: Any = self.axis
            ax, n = axis.axes, len(self.places)
            if n < 2:
                return self.places
            along = np.zeros((n, 2))
            side = int(axis.axis_name == "y")
            along[:, side] = self.places
            along[:, 1 - side] = (ax.get_ylim if side == 0 else ax.get_xlim)()[0]
            at = ax.transData.transform(along)[:, side] * 72 / ax.figure.dpi
            first = 1 if self.most is None else -(-n // self.most)
            every = next((k for k in range(first, n) if np.abs(np.diff(at[::k])).min() >= self.apart), n)
            return self.places[::every]

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return self()

        def __reduce__(self) -> Any:  # Figures can be pickled and copied.
            return places_with_room, (self.places.astype(int).tolist(), self.apart, self.most), vars(self)

    return PlacesWithRoom


def label_places(
    axis: Any,
    places: Sequence[int],
    labels: Sequence[str],
    size: float,
    most: int | None = None,
    *,
    all: bool = False,
) -> None:
    """Label the places of an axis. Names that would collide across are turned upright; of more, some are left out.

    Args:
        axis: `ax.xaxis` or `ax.yaxis`.
        labels: Text of each place. None is taken for a formula.
        size: Font size in points.
        most: Largest number of labels.
        all: Whether each label is needed, such as those of bars.
    """
    across = axis.axis_name == "x"
    widest = max((width_of(label, size) for label in labels), default=0.0)
    names = any(not _is_number(label) for label in labels)
    upright = across and names and len(labels) * (widest + _SPACE * size) > _SAFE * room_of(axis.axes)[0]
    n_lines = max((label.count("\n") + 1 for label in labels), default=1)
    apart = widest + _SPACE * size if across and not upright else _LINE * size * n_lines
    axis.set_major_locator(places_with_room(places, 0.0 if all else apart, most))
    axis.set_major_formatter(Names(dict(zip(places, labels, strict=True))))
    axis.set_tick_params(labelsize=size, labelrotation=90 if upright else 0)
    for tick in axis.get_major_ticks(
        min(len(places), most or len(places))
    ):  # Without parse_math=False a "$" in a token would begin a formula.
        tick.label1.set_parse_math(False)


def width_of(text: str, size: float) -> float:
    """About how wide the longest line of a text is, in points."""
    lines = (sum(_WIDE_LETTER if east_asian_width(c) in "WF" else LETTER for c in line) for line in text.split("\n"))
    return size * max(lines)


def letters_in(width: float, size: float) -> int:
    """About how many letters fit in this width in points, at least 4."""
    return max(4, int(width / (LETTER * size)))


def room_of(ax: Any) -> tuple[float, float]:
    """Width and height in points of the part of the figure that axes and their labels have for themselves."""
    width, height = (72 * float(side) / ax.figure.dpi for side in (ax.figure.bbox.width, ax.figure.bbox.height))
    place = ax.get_subplotspec()
    if place is None:
        box = ax.get_position()
        return width * min(1.0, 1.3 * box.width), height * min(1.0, 1.3 * box.height)
    grid = place.get_gridspec()
    widths, heights = grid.get_width_ratios(), grid.get_height_ratios()
    of_columns = sum(widths[place.colspan.start : place.colspan.stop]) / sum(widths)
    of_rows = sum(heights[place.rowspan.start : place.rowspan.stop]) / sum(heights)
    return width * of_columns, height * of_rows


def _is_number(label: str) -> bool:
    return label.lstrip("-").replace(".", "", 1).isdigit()
