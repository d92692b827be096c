"""How figures look: three settings that every function that draws takes as keywords.

`styled` adds the keywords to a function, and keeps what a call gives in a context variable while it draws. The parts
of figures read it there (`diffusion_lens.plots.axes`), so no function hands the settings on.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from diffusion_lens.settings import Real, Settings, fields_of, plain_number, setting
from diffusion_lens.settings.arguments import kind_of, shown

R = TypeVar("R")
SMALLEST, LARGEST = 0.5, 100.0  # inches of a side
_FONTS = (3.0, 72.0)
ENTRY = "cmap, size, font_size: Colour map, size in inches and font size, see `diffusion_lens.plots.style`."
STYLED = "_takes_settings_of_figures"


def check_colour_map(name: str, value: Any) -> Any:
    """`value`, the name of a colour map of matplotlib or a `Colormap`; a `ValueError` names the nearest."""
    try:
        from matplotlib import colormaps
        from matplotlib.colors import Colormap
    except ImportError:  # the function that draws says what to install
        return value
    if isinstance(value, Colormap):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"{name}={shown(value)} is {kind_of(value)}; it must be the name of a colour map, such as 'viridis', or a "
            "matplotlib Colormap"
        )
    if value not in colormaps:
        spelt = {each.lower(): each for each in colormaps}
        near = [spelt[each] for each in get_close_matches(value.lower(), spelt, n=3, cutoff=0.0)]
        raise ValueError(
            f"{name}={value!r} is no colour map of matplotlib; nearest are {', '.join(near)}. "
            "matplotlib.colormaps lists all"
        )
    return value


def check_size(name: str, value: Any) -> tuple[float, float]:
    """Width and height of a figure in inches."""
    sides = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(sides, Sequence) or isinstance(sides, str) or len(sides) != 2:
        raise ValueError(f"{name}={shown(value)}; give width and height in inches, such as {name}=(3.3, 2.2)")
    width, height = (plain_number(name, side) for side in sides)
    if not all(SMALLEST <= side <= LARGEST for side in (width, height)):
        raise ValueError(
            f"{name}={(width, height)}; it is width and height in inches, each from {SMALLEST} to {LARGEST:g}, such as "
            "(3.3, 2.2) for a column of a paper"
        )
    return width, height


def check_font_size(name: str, value: Any) -> float:
    """Points of the labels of axes."""
    number = plain_number(name, value)
    if not _FONTS[0] <= number <= _FONTS[1]:
        raise ValueError(f"{name}={number}; it must be from {_FONTS[0]:g} to {_FONTS[1]:g} points")
    return number


@dataclass(frozen=True)
class FigureSettings(Settings):
    """How a figure looks. `None` leaves a choice to the function that draws."""

    cmap: Any = setting(
        None,
        'Colour map of matplotlib, by name such as "cividis" or as a Colormap. Where a picture has lines, points or '
        "bars and no map, their colours are taken from it.",
        check_colour_map,
    )
    size: Sequence[float] | None = setting(
        None, "Width and height of the figure in inches, such as (3.3, 2.2) for one column of a paper.", check_size
    )
    font_size: Real | None = setting(
        None,
        "Size of the labels of axes in points; by default 9. Titles are a tenth larger, tick labels and legends a "
        "tenth smaller.",
        check_font_size,
    )


STYLE: ContextVar[FigureSettings] = ContextVar("STYLE", default=FigureSettings())  # noqa: B039  it is frozen


@contextmanager
def style(cmap: Any = None, size: Sequence[float] | None = None, font_size: Real | None = None) -> Iterator[None]:
    """Draw all figures inside with these settings. What a call is given itself goes before.

    Args:
        cmap: Colour map of matplotlib, by name such as "cividis" or as a Colormap. Where a picture has lines, points
            or bars and no map, their colours are taken from it: the first ones of a map that lists at most 20 colours,
            of any other evenly spaced ones that are dark enough to be seen on white.
        size: Width and height in inches of each figure that is made inside, also by `panels`.
        font_size: Size of the labels of axes in points; by default 9. Titles are a tenth larger, tick labels and
            legends a tenth smaller.

    Raises:
        ValueError: There is no such colour map, or a size is not two numbers or out of range.
    """
    given = {"cmap": cmap, "size": size, "font_size": font_size}
    chosen = {name: value for name, value in given.items() if value is not None}
    token = STYLE.set(replace(STYLE.get(), **chosen))
    try:
        yield
    finally:
        STYLE.reset(token)


def styled(draw: Callable[..., R]) -> Callable[..., R]:
    """Let a function that draws take `cmap`, `size` and `font_size`. They stand in its signature and docstring.

    A size is refused beside `ax=`, whose figure has one.
    """
    if STYLED in vars(draw):
        return draw
    own = signature(draw)
    keywords = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=each.type)
        for name, each in fields_of(FigureSettings).items()
    ]
    known = sorted([*own.parameters.values(), *keywords], key=lambda each: each.kind)

    @wraps(draw)
    def drawn(*args: Any, **given: Any) -> Any:
        chosen = {each.name: given.pop(each.name) for each in keywords if each.name in given}
        if chosen.get("size") is not None and own.bind_partial(*args, **given).arguments.get("ax") is not None:
            raise ValueError(
                f"size={chosen['size']} is that of a new figure, and ax= draws on axes of a figure that has a size: "
                "give one of the two, or plots.panels(rows, columns, width, height)"
            )
        if not any(value is not None for value in chosen.values()):
            return draw(*args, **given)
        with style(**chosen):
            return draw(*args, **given)

    vars(drawn)[STYLED] = True
    vars(drawn)["__signature__"] = own.replace(parameters=known)
    drawn.__doc__ = _with_entry(draw.__doc__ or "")
    return cast(Callable[..., R], drawn)


def _with_entry(text: str) -> str:
    """A docstring with an entry on the settings, in its list of arguments or as a new one."""
    lines = text.rstrip().split("\n")
    indent = min((re.match(" *", line)[0] for line in lines[1:] if line.strip()), default="        ")  # type: ignore[index]
    entry = f"{indent}    {ENTRY}"
    places = [i for i, line in enumerate(lines) if line == f"{indent}Args:"]
    if places:
        at = next((i for i in range(places[0] + 1, len(lines)) if not lines[i].strip()), len(lines))
        lines.insert(at, entry)
    else:
        section = ("Raises:", "Returns:", "Yields:")
        at = next((i for i, line in enumerate(lines) if line.strip() in section), len(lines))
        lines[at:at] = ["", f"{indent}Args:", entry] if at == len(lines) else [f"{indent}Args:", entry, ""]
    return "\n".join([*lines, indent])
