"""The site that `make docs` has built, in Chromium: narrow screens, what axe-core finds, what a button copies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "docs" / "_build"
PAGES = sorted(path for path in SITE.rglob("*.html") if "_modules" not in path.parts)

# The width of a page that scrolls sideways, with elements that reach too far although no box around them scrolls.
TOO_WIDE = """() => document.scrollingElement.scrollWidth <= innerWidth ? [] :
  [`${document.scrollingElement.scrollWidth} pixels`,
  ...[...document.querySelectorAll("article *")].filter((element) => {
    if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let box = element.parentElement; box; box = box.parentElement)
      if (getComputedStyle(box).overflowX !== "visible") return false;
    return true;
  }).slice(0, 3).map((element) => element.outerHTML.slice(0, 120))]"""

AUDIT = """async (rules) => {
  const found = await axe.run(document, { resultTypes: ["violations"], preload: false, ...rules });
  return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => `${one.id}: ${one.nodes.slice(0, 2).map((node) => node.html.slice(0, 120))}`);
}"""


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of the site in a browser of some width and theme, always in the same tab."""
    assert PAGES, "the site is missing: run `make docs` first"
    tabs: dict[tuple[int, str], Any] = {}

    def visit_page(path: Path, width: int = 1280, theme: str = "light") -> Any:
        if (width, theme) not in tabs:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
            tabs[width, theme] = context.new_page()
        tabs[width, theme].goto(path.as_uri())
        return tabs[width, theme]

    yield visit_page
    for tab in tabs.values():
        tab.context.close()


def test_no_page_scrolls_sideways_at_400_pixels(visit: Callable[..., Any]) -> None:
    everything = sorted(SITE.rglob("*.html"))
    wide = {path.name: found for path in everything if (found := visit(path, 400).evaluate(TOO_WIDE))}
    assert wide == {}


@pytest.mark.parametrize(
    ("theme", "rules"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})], ids=["light", "dark"]
)
def test_axe_finds_nothing_serious(visit: Callable[..., Any], axe: str, theme: str, rules: dict[str, Any]) -> None:
    found = {}
    for path in PAGES:
        page = visit(path, theme=theme)
        page.evaluate(axe)
        if violations := page.evaluate(AUDIT, rules):
            found[path.relative_to(SITE).as_posix()] = violations
    assert found == {}


def test_a_copy_button_copies_commands_without_prompt_and_output(visit: Callable[..., Any]) -> None:
    page = visit(SITE / "your_own_model.html")
    page.evaluate("addEventListener('copy', () => { window.copied = document.activeElement.value })")
    block = page.locator("div.highlight-console").first
    block.hover()
    block.locator("button.copybtn").click()
    copied = page.evaluate("window.copied")
    assert copied.startswith("diffusion-lens check")
    assert "\nok " not in copied
    assert page.locator("div.highlight-output button.copybtn").count() == 0
