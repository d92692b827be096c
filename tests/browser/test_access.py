"""The page for everybody: axe-core, light and dark, 1280 and 400 pixels, no sideways scrolling, in any frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_maps as maps
import pytest
from explorer_maps import LENS

Open = Callable[..., Any]
WIDTHS, THEMES = (1280, 400), ("light", "dark")


def violations(page: Any, axe: str) -> list[str]:
    """What axe-core calls serious or critical, with the elements."""
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:4]}, {one['nodes'][0].get('any')}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mdm", "pair"])
def test_axe_finds_nothing_serious(opened: Open, axe: str, name: str, width: int, theme: str) -> None:
    page = opened(name, width, theme, "#step=3")
    assert violations(page, axe) == []


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_serious_in_a_dialog(opened: Open, axe: str, theme: str) -> None:
    page = opened("mdm", 1280, theme)
    page.get_by_role("button", name="as Python").first.click()
    assert violations(page, axe) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mdm", "pair", "large", "hostile"])
def test_the_page_does_not_scroll_sideways(opened: Open, name: str, width: int) -> None:
    page = opened(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mdm", "pair", "large"])
def test_no_text_is_cut(opened: Open, name: str, width: int) -> None:
    """Except where an ellipsis says so."""
    page = opened(name, width, fragment="#step=3")
    cut = page.evaluate(
        """() => [...document.querySelectorAll("button, h1, h2, h3, h4, p, label, .dl-status, [role=rowheader]")]
            .filter((one) => one.checkVisibility() && one.clientWidth > 1 && one.scrollWidth > one.clientWidth + 1)
            .filter((one) => getComputedStyle(one).display !== "inline")
            .filter((one) => getComputedStyle(one).textOverflow !== "ellipsis")
            .map((one) => one.outerHTML.slice(0, 200))"""
    )
    assert cut == []


@pytest.mark.parametrize("view", ["token", "canvas", "lens", "trace", "attention"])
def test_a_chosen_step_moves_nothing(opened: Open, view: str) -> None:
    page = opened("mdm", fragment=f"#view={view}&step=1")
    tops = "[...document.querySelectorAll('h3, .dl-map, .dl-card')].map((one) => one.getBoundingClientRect().top)"
    before = page.evaluate(tops)
    page.get_by_role("button", name="next step").click()
    page.wait_for_selector("[data-state=ready]")
    assert page.evaluate(tops) == before


def test_colours_follow_the_theme_of_the_page(opened: Open) -> None:
    page = opened("mdm", fragment="#view=lens&step=3")

    def colour() -> str:
        page.wait_for_timeout(200)
        painted: str = maps.asked(page, LENS, "map.paintOf(0, 0).background")
        return painted

    light = colour()
    page.evaluate("document.body.dataset.theme = 'dark'")
    assert colour() != light
    page.evaluate("document.body.dataset.theme = 'light'")
    page.emulate_media(color_scheme="dark")
    assert colour() == light


def test_a_sandboxed_frame_shows_the_page(opened: Open, pages: dict[str, Path], browser: Any) -> None:
    """As in a notebook: without an origin there is no history and no storage."""
    page = opened("mdm")
    page.goto("about:blank")
    page.set_content('<iframe sandbox="allow-scripts" style="width: 900px; height: 600px"></iframe>')
    page.evaluate(
        "text => { document.querySelector('iframe').srcdoc = text }", pages["mdm"].read_text(encoding="utf-8")
    )
    frame = page.frame_locator("iframe")
    frame.locator("[data-state=ready]").wait_for()
    frame.get_by_label("Step", exact=True).fill("3")
    frame.get_by_role("button", name="next step").click()
    frame.locator("[data-state=ready]").wait_for()
    assert frame.get_by_label("Step", exact=True).input_value() == "4"
