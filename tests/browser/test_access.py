"""The page for everybody: axe-core, light and dark, 1280 and 400 pixels, no sideways scrolling, in any frame."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_maps as maps
import pytest
from explorer_maps import LENS
from explorer_walk import SIZES, apply, ask, drawer, settings, settled, step_to, violations
from playwright.sync_api import expect

Open = Callable[..., Any]
WIDTHS, THEMES = (1280, 400), ("light", "dark")


@pytest.fixture(scope="module")
def live(served: Callable[..., str]) -> str:
    """Address of a pair that `diffusion-lens explore` serves."""
    return served("tiny-mdm", "--against", "pair", "--steps", "5")


def scrolls_sideways(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mdm", "pair"])
def test_axe_finds_nothing_serious_in_a_file(opened: Open, axe: str, name: str, width: int, theme: str) -> None:
    page = opened(name, width, theme, "#step=3")
    assert violations(page, axe) == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_serious_in_what_opens(opened: Open, axe: str, live: str, width: int, theme: str) -> None:
    """Settings, the form of the answer, the drawer, two runs that differ, an alert, the table of facts, dialogs."""
    page = opened(live, width, theme)
    found = {"at first": violations(page, axe)}

    def look(name: str) -> None:
        settled(page)
        found[name] = [*violations(page, axe), *["the page scrolls sideways"] * scrolls_sideways(page)]

    settings(page, Steps=4)
    look("settings")
    ask(page, "Tilda Drusser is the")
    page.get_by_role("button", name="Mark the answer…").first.click()
    page.get_by_role("form", name="Answer and subject").get_by_role(
        "button", name="Tilda Drusser", exact=True
    ).wait_for()
    look("answer")
    page.keyboard.press("Escape")
    apply(page, Block="0", Site="attn")
    look("drawer")
    drawer(page).get_by_role("button", name="Close").click()
    look("changed")
    ask(page, "")
    expect(page.get_by_role("alert")).to_be_visible()
    look("alert")
    page.get_by_role("button", name="Facts", exact=True).click()
    look("facts")
    page.get_by_role("complementary", name="Facts").get_by_role("button", name="Close").click()
    for button in ("as Python", "Help"):
        page.locator(".dl-tools").get_by_role("button", name=button).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        look(button)
        page.keyboard.press("Escape")
    assert {name: what for name, what in found.items() if what} == {}
    opened.problems[:] = [problem for problem in opened.problems if "400 (Bad Request)" not in problem]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mdm", "pair", "large", "hostile"])
def test_the_page_does_not_scroll_sideways(opened: Open, name: str, width: int) -> None:
    page = opened(name, width)
    for tab in page.get_by_role("tab").all():
        if tab.is_visible():
            tab.click()
            settled(page)
            assert not scrolls_sideways(page), tab.inner_text()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", ["mdm", "pair", "large"])
def test_no_text_is_cut(opened: Open, name: str, width: int, height: int) -> None:
    """Except where an ellipsis says so, and labels for screen readers alone."""
    page = opened(name, width, fragment="#step=3", height=height)
    cut = page.evaluate(
        """() => [...document.querySelectorAll("button, h1, h2, h3, h4, p, label, select, .dl-verdict, .dl-status")]
            .filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1)
            .filter((one) => getComputedStyle(one).display !== "inline" && getComputedStyle(one).clipPath === "none")
            .filter((one) => getComputedStyle(one).textOverflow !== "ellipsis")
            .map((one) => one.outerHTML.slice(0, 200))"""
    )
    assert cut == []


@pytest.mark.parametrize("view", ["token", "canvas", "lens", "trace", "attention"])
def test_a_chosen_step_moves_nothing(opened: Open, view: str) -> None:
    page = opened("mdm", fragment=f"#view={view}&step=1")
    parts = "h2, .dl-text, .dl-transport, .dl-layers, .dl-tabs, .dl-panel"
    tops = f"[...document.querySelectorAll('{parts}')].map((one) => one.getBoundingClientRect().top)"
    before = page.evaluate(tops)
    for _ in range(3):
        page.get_by_role("button", name="next step").click()
        settled(page)
        assert page.evaluate(tops) == before


def test_colours_follow_the_theme_of_the_page(opened: Open) -> None:
    page = opened("mdm", fragment="#step=5")
    parts = ".dl-new, .dl-layers button, .dl-panel, .dl-explorer"
    colour = f"""() => [...document.querySelectorAll('{parts}')].map((one) => getComputedStyle(one).backgroundColor)"""
    light = page.evaluate(colour)
    page.evaluate("document.body.dataset.theme = 'dark'")
    settled(page)
    page.wait_for_function(f"before => JSON.stringify(({colour})()) !== JSON.stringify(before)", arg=light)
    dark = opened("mdm", theme="dark", fragment="#step=5")
    assert page.evaluate(colour) == dark.evaluate(colour)
    page.evaluate("document.body.dataset.theme = 'light'")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"before => JSON.stringify(({colour})()) === JSON.stringify(before)", arg=light)


def test_maps_follow_the_theme_of_the_page(opened: Open) -> None:
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


@pytest.mark.parametrize("theme", THEMES)
def test_ink_contrasts_with_every_colour(opened: Open, theme: str) -> None:
    """WCAG 2: the ratio of the luminances is at least 4.5 in every token and layer that is coloured."""
    page = opened("large", theme=theme)
    pairs = []
    for overlay in ("confidence", "entropy", "probability", "commitment"):
        page.get_by_label("Colours show").select_option(overlay)
        step_to(page, 12)
        pairs += page.evaluate(
            """() => [...document.querySelectorAll(".dl-text [data-position], .dl-layers button")]
                .filter((one) => one.style.color)
                .map((one) => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor])
                .map((colours) => colours.map((colour) => colour.match(/[\\d.]+/g).map(Number)))"""
        )
    assert len(pairs) > 150
    for ink, paper in pairs:
        light, dark = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper)


def luminance(rgb: list[float]) -> float:
    r, g, b = (x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_hostile_tokens_are_text(opened: Open) -> None:
    page = opened("hostile")
    for tab in page.get_by_role("tab").all():
        if tab.is_visible():
            tab.click()
            step_to(page, 2)
            assert page.locator("main img, main script").count() == 0
    text = page.locator(".dl-text").inner_text()
    assert "<script>window.hacked = 1</script>" in text
    assert "\\u{202e}\\n\\t" in text
    assert page.evaluate("window.hacked") is None


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
    step = frame.get_by_label("Step", exact=True)
    frame.get_by_role("button", name="previous step").click()
    before = int(step.input_value())
    frame.get_by_role("button", name="next step").click()
    frame.locator("[data-state=ready]").wait_for()
    assert int(step.input_value()) == before + 1
