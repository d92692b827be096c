"""Large runs: small files, whose changes draw what is in view, and whose names can be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_changes as changes
import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import ATTENTION, CANVAS, LENS
from playwright.sync_api import expect

# 256 positions and 64 steps make 16,384 cells of the canvas, and 65,536 of attention. A window of 1280 × 800 pixels
# shows fewer cells and texts than this.
MOST_DRAWN = 10_000
MOST_NODES = 1_000  # The tokens of the canvas are two nodes each.
MOST_LAYOUTS = 50  # Drawing that measures a part after each that it writes takes one for each.


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of 256 positions, 64 steps and 32 layers, and of 64 positions and 512 steps."""
    folder = tmp_path_factory.mktemp("large")
    made = {
        "wide": explorer_pages.large_page(256, 64, 32, different=16),
        "long": explorer_pages.large_page(64, 512, 1),
    }
    return {name: explorer_pages.write(page, folder, name) for name, page in made.items()}


def test_the_files_are_below_three_megabytes(pages: dict[str, Path], sizes: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 3_000_000
    assert sizes["wide"].stat().st_size < 3_000_000


@pytest.mark.parametrize("view", ["token", "canvas", "lens", "trace", "attention"])
def test_a_change_draws_what_is_in_view(opened: Callable[..., Any], sizes: dict[str, Path], view: str) -> None:
    """Whatever the size of the run, so that a view, a step, a layer or other colours are there at once."""
    page = opened(f"{sizes['wide'].as_uri()}#view={view}&layer=10&step=1&position=40", script=changes.COUNTING)
    for name, costs in changes.costs_of_view(page, view).items():
        assert are_small(costs), (name, costs)


def test_512_steps_of_64_positions_stay_responsive(opened: Callable[..., Any], sizes: dict[str, Path]) -> None:
    page = opened(f"{sizes['long'].as_uri()}#view=canvas&layer=1&step=1&canvas=entropy", script=changes.COUNTING)
    for name in ("next step", "colours of the canvas"):
        costs = changes.costs(page, changes.CHANGES[name])
        assert are_small(costs), (name, costs)
    maps.click(page, CANVAS, 1, 20)
    page.keyboard.press("PageDown")
    page.wait_for_selector("[data-state=ready]")
    *_, last = maps.rows(page, CANVAS)  # steps up to 511
    assert last.endswith("511")
    expect(page.get_by_label("Step", exact=True)).to_have_value(last.partition("–")[0])
    inside = "map.y(values[0]) >= map.top && map.y(values[0] + 1) <= map.height + 1"
    assert maps.asked(page, CANVAS, inside, len(maps.rows(page, CANVAS)) - 1)


def test_the_rows_of_1200_facts_come_in_parts(opened: Callable[..., Any], tmp_path: Path) -> None:
    """So that the first ones, an order or a filter are there at once; a step and a selection leave the rows alone."""
    page = opened(changes.write_facts(tmp_path, 1200).as_uri(), script=changes.COUNTING)
    costs = changes.costs_of_facts(page)
    assert all(cost.layouts < MOST_LAYOUTS for several in costs.values() for cost in several), costs
    for name in ("opening", "orders", "filters"):
        assert all(0 < cost.rows <= 40 for cost in costs[name]), (name, costs[name])
    for name in ("steps", "all rows"):
        assert all(cost.nodes < 40 for cost in costs[name]), (name, costs[name])


def test_the_colours_of_4096_steps_cost_no_more_than_those_of_a_window(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    path = explorer_pages.write(explorer_pages.large_page(8, 4096, 1), tmp_path, "longest")
    page = opened(f"{path.as_uri()}#view=canvas&step=1", script=changes.COUNTING)
    page.wait_for_timeout(1_000)  # The steps that are near are decoded.
    costs = changes.costs(page, changes.CHANGES["colours of the canvas"])
    assert are_small(costs), costs


def are_small(costs: list[changes.Cost]) -> bool:
    """Whether something was drawn or changed, and never more than a window has room for."""
    return any(cost.drawn or cost.nodes for cost in costs) and all(
        cost.drawn < MOST_DRAWN and cost.nodes < MOST_NODES and cost.layouts < MOST_LAYOUTS for cost in costs
    )


def test_only_cells_in_view_are_painted(opened: Callable[..., Any], sizes: dict[str, Path]) -> None:
    page = opened(f"{sizes['wide'].as_uri()}#view=lens&layer=10&step=1&position=200&colour=top")
    counted = """(() => {
        const { cell } = map.shown, seen = [];
        map.shown.cell = (r, c) => { seen.push([r, c]); return cell(r, c); };
        map.repaint();
        map.shown.cell = cell;
        return seen;
    })()"""
    cells = maps.asked(page, LENS, counted)
    assert len(cells) < 33 * 90
    assert any(column == 200 for _, column in cells)  # the selected position has scrolled into view
    assert not any(column == 0 for _, column in cells)


@pytest.mark.parametrize("name", ["large", "wide"])
@pytest.mark.parametrize("view", [LENS, ATTENTION])
def test_names_of_many_columns_do_not_overlap(
    opened: Callable[..., Any], pages: dict[str, Path], sizes: dict[str, Path], view: str, name: str
) -> None:
    path = pages["large"] if name == "large" else sizes[name]
    page = opened(f"{path.as_uri()}#view={maps.VIEWS[view]}&layer=10&step=1")
    assert maps.asked(page, view, "map.isSlanted")
    apart = maps.asked(page, view, "map.cellWidth * Math.sin(55 * Math.PI / 180)")
    assert apart > 12  # pixels of a line of 11 pixel letters
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
