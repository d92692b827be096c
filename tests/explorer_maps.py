"""Heat maps of an explorer page, which are drawn on a canvas: what their cells say, colours, and clicks on them."""

from typing import Any

import chromium

CANVAS, LENS, TRACE, ATTENTION = "Canvas by step", "Lens", "Causal trace", "Attention"
OVER = "Lens of the selected position, layer by step"
VIEWS = {CANVAS: "canvas", LENS: "lens", TRACE: "trace", ATTENTION: "attention", OVER: "lens"}
_FOUND = """(map) => [...document.querySelectorAll(".dl-map")]
    .find((one) => one.checkVisibility() && one.querySelector("[role=grid]").ariaLabel === map).heatMap"""


def asked(page: Any, name: str, what: str, *values: Any) -> Any:
    """The value of a JavaScript expression of `map` and `values`, for the map of a name that is shown."""
    return page.evaluate(f"([name, values]) => {{ const map = ({_FOUND})(name); return {what}; }}", [name, values])


def label(page: Any, name: str, row: int, column: int) -> str:
    text: str = asked(page, name, "map.label(...values)", row, column)
    return text


def cells(page: Any, name: str) -> list[list[dict[str, Any]]]:
    """Every cell, with its label and its colours, by row and column."""
    found: list[list[dict[str, Any]]] = asked(
        page,
        name,
        """map.shown.rows.map((_, r) => map.shown.columns.map((_, c) =>
            ({ ...map.shown.cell(r, c), label: map.label(r, c), paint: map.paintOf(r, c) })))""",
    )
    return found


def rows(page: Any, name: str) -> list[str]:
    names: list[str] = asked(page, name, "map.shown.rows")
    return names


def middle(page: Any, name: str, row: int, column: int) -> tuple[float, float]:
    """A place on the screen, after the page and the map have scrolled to the cell."""
    page.locator(f"[role=grid][aria-label='{name}'] [role=gridcell]:visible").first.scroll_into_view_if_needed()
    asked(page, name, "map.reveal(...values)", row, column)
    box = asked(page, name, "map.rectangle(...values).toJSON()", row, column)
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def click(page: Any, name: str, row: int, column: int) -> None:
    page.mouse.click(*middle(page, name, row, column))
    page.wait_for_selector(chromium.DRAWN)


def hover(page: Any, name: str, row: int, column: int) -> None:
    page.mouse.move(*middle(page, name, row, column))


def open_view(page: Any, name: str) -> None:
    page.locator(f"[data-view={VIEWS[name]}]").click()
    page.wait_for_selector(chromium.DRAWN)
