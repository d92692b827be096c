"""The address contains all of it: what a link opens elsewhere, what a reload keeps, and what a cut link shows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from explorer_walk import apply, ask, drawer, labels, prompt_box, select, settings, settled, slider, step_to
from page_reader import PageFile
from playwright.sync_api import expect

Open = Callable[..., Any]
# All that a person sees of the selection, and of the runs.
SEEN = """() => {
    const shown = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
    return {
        runs: shown(".dl-run h2, .dl-run .dl-edit").map((one) => one.textContent),
        texts: shown(".dl-verdict, .dl-differs, .dl-text, .dl-layers-name, .dl-layers-reading")
            .map((one) => one.textContent),
        selected: shown("[aria-pressed=true], [aria-selected=true]").map((one) => one.ariaLabel ?? one.textContent),
        step: document.querySelector("input[type=range]").value,
        active: shown(".dl-run").findIndex((one) => one.matches(".dl-active")),
        choices: shown("select").map((one) => one.selectedOptions[0]?.textContent),
    };
}"""


@pytest.fixture(scope="module")
def pair(served: Callable[..., str]) -> str:
    return served("tiny-mdm", "--against", "pair", "--steps", "5")


@pytest.fixture(scope="module")
def single(served: Callable[..., str]) -> str:
    return served("tiny-mdm", "--steps", "5")


def changed(page: Any) -> None:
    """Another prompt with settings, a change of the second model, and something selected in it."""
    settings(page, Temperature=0.3, Seed=2, Steps=6)
    ask(page, "Tilda Drusser is the")
    select(page, 5, 1)
    apply(page, Block="2", Site="mlp")
    drawer(page).get_by_role("button", name="Close").click()
    page.locator(".dl-layers").nth(1).locator("button").nth(3).click()
    settled(page)
    step_to(page, 3)
    page.get_by_label("Colours show").select_option("entropy")
    settled(page)
    page.get_by_role("tab", name="Lens").click()
    settled(page)


def test_a_link_opens_the_same_runs_and_selection(opened: Open, pair: str) -> None:
    page = opened(pair)
    changed(page)
    before = page.evaluate(SEEN)
    assert before["step"] == "3"
    assert any("MLP set to zero" in text for text in before["runs"])
    other = opened(page.url)  # a browser that knows nothing of the first one
    assert other.evaluate(SEEN) == before
    assert prompt_box(other).input_value() == prompt_box(page).input_value()
    settings(other)
    assert [other.get_by_label(name, exact=True).first.input_value() for name in ("Temperature", "Seed")] == [
        "0.3",
        "2",
    ]


def test_a_link_to_a_server_that_knows_none_of_its_runs(opened: Open, pair: str, single: str) -> None:
    """As after the server was started anew: it computes the runs of the link."""
    page = opened(single)
    ask(page, "Gustav Geisser")
    apply(page, Block="1", Site="attn")
    select(page, 4, 1)
    before = page.evaluate(SEEN)
    other = opened(f"{pair}#{urlsplit(page.url).fragment}")  # has the same model, and not these runs
    after = other.evaluate(SEEN)
    for part in ("runs", "texts", "selected", "step", "active"):
        assert after[part] == before[part]


def test_a_reload_keeps_everything(opened: Open, pair: str) -> None:
    page = opened(pair)
    changed(page)
    before = page.evaluate(SEEN)
    page.reload()
    settled(page)
    assert page.evaluate(SEEN) == before


def test_an_older_address_selects_what_it_names(opened: Open) -> None:
    """Back, and a link that is pasted into the same tab, change the part after #."""
    page = opened("pair", fragment="#step=1&position=4")
    older = page.url
    step_to(page, 4)
    select(page, 6)
    page.evaluate("address => { location.href = address; }", older)
    expect(slider(page)).to_have_value("1")
    expect(page.locator(".dl-run").first.locator("[data-position='4']")).to_have_attribute("aria-pressed", "true")


def test_a_page_keeps_its_place_when_it_is_left_and_come_back_to(opened: Open, pages: dict[str, Path]) -> None:
    page = opened("pair")
    step_to(page, 2)
    select(page, 6)
    before = page.evaluate(SEEN)
    page.goto("about:blank")
    page.go_back()
    settled(page)
    assert page.evaluate(SEEN) == before


@pytest.mark.parametrize("left", [0.98, 0.7, 0.4, 0.2])
def test_a_link_that_was_cut_off_still_opens(opened: Open, pair: str, left: float) -> None:
    page = opened(pair)
    changed(page)
    start, _, fragment = page.url.partition("#")
    other = opened(f"{start}#{fragment[: int(left * len(fragment))]}")
    assert other.locator(".dl-run:visible").count() >= 1
    assert len(labels(other)) == 14


def test_an_unknown_choice_in_the_address_is_the_default(opened: Open) -> None:
    page = opened(
        "mdm",
        fragment="#colour=toString&canvas=constructor&view=hasOwnProperty&step=99&layer=77&head=33&position=999&run=nobody",
    )
    assert page.get_by_label("Colours show").input_value() == "confidence"
    expect(page.get_by_role("tab", selected=True)).to_have_text("Token")
    assert slider(page).input_value() == slider(page).get_attribute("max")
    assert page.locator(".dl-text [aria-pressed=true]").get_attribute("data-position") == "15"


def test_a_written_page_opens_at_the_same_place(opened: Open, pair: str, tmp_path: Path) -> None:
    page = opened(pair)
    changed(page)
    before = page.evaluate(SEEN)
    page.get_by_role("button", name=re.compile("^Share")).click()
    with page.expect_download() as download:
        page.get_by_role("button", name=re.compile("page", re.IGNORECASE)).last.click()
    path = tmp_path / "page.html"
    download.value.save_as(path)
    other = opened(path.as_uri())
    after = other.evaluate(SEEN)
    for part in ("texts", "selected", "step", "active"):
        assert after[part] == before[part]
    assert after["runs"] == [text.removesuffix("×") for text in before["runs"]]  # the change too; there is no undoing
    manifest = PageFile(path.read_text(encoding="utf-8")).manifest
    layers = [list(range(model["n_layers"])) for model in manifest["models"]]
    assert [run["attention"]["layers"] for run in manifest["runs"][:2]] == layers
    expect(other.get_by_role("tab", selected=True)).to_have_text("Lens")
