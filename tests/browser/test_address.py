"""The address contains all of it: what a link opens elsewhere, what a reload keeps, and what a cut link shows."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

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


def linked(address: str, *specs: dict[str, Any], **state: str) -> str:
    """A link to runs, written by hand."""
    runs = base64.urlsafe_b64encode(json.dumps(specs).encode()).decode().rstrip("=")
    return f"{address}#{''.join(f'{name}={quote(value)}&' for name, value in state.items())}runs={runs}"


def alert(page: Any) -> Any:
    return page.get_by_role("alert")


def test_a_link_of_another_model_says_which_one_it_needs(opened: Open, single: str, served: Callable[..., str]) -> None:
    page = opened(single)
    fragment = urlsplit(page.url).fragment
    other = opened(f"{served('tiny-ar', '--steps', '5')}#{fragment}")
    expect(alert(other)).to_have_text(
        "This link is of tiny-mdm, and this page shows tiny-ar. To open it, start diffusion-lens explore tiny-mdm."
    )
    assert other.locator(".dl-run h2").all_inner_texts() == ["tiny-ar"]
    weights = re.search("model=0%3A([0-9a-f]{12})%3Atiny-mdm", fragment)
    changed = opened(f"{single}#{fragment.replace(weights[1], '0123456789ab')}")
    expect(alert(changed)).to_contain_text("tiny-mdm with other weights: their SHA-256 begins with 0123456789ab")


def test_a_link_in_the_same_tab_keeps_nothing_of_what_was_shown(opened: Open) -> None:
    page = opened("pair", fragment="#step=1&key=3&trace=resid&canvas=entropy")
    assert page.locator(".dl-run:visible").count() == 2
    page.evaluate("location.hash = 'run=run1&step=2'")
    expect(page.locator(".dl-run:visible")).to_have_count(1)
    settled(page)
    fragment = urlsplit(page.url).fragment
    assert "run=run1" in fragment
    assert "canvas=confidence" in fragment
    assert not re.search("key=|trace=|compare=", fragment)


def test_runs_of_a_link_that_fail_are_named(opened: Any, single: str) -> None:
    good = {"prompt": "Tilda Drusser is the", "steps": 2, "interventions": []}
    page = opened(linked(single, {**good, "steps": 0}, {**good, "length": 0}, good, run="gone"))
    expect(alert(page)).to_contain_text("A run of this link could not be computed: steps=0; it must be at least 1")
    expect(alert(page)).to_contain_text("A run of this link could not be computed: length=0")
    assert all("400 (Bad Request)" in problem for problem in opened.problems)  # of the two runs
    opened.problems.clear()


def test_a_link_is_cancelled_as_a_whole_and_bounded(opened: Open, single: str) -> None:
    page = opened(single)
    before = page.evaluate(SEEN)
    asked = []
    page.route("**/api/run", lambda route: (asked.append(1), page.wait_for_timeout(700), route.continue_()))
    specs = [{"prompt": "Tilda Drusser is the", "steps": 2, "seed": seed, "interventions": []} for seed in range(33)]
    page.evaluate("address => { location.href = address; }", linked(single, *specs[:4], run="gone"))
    page.locator(".dl-progress").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_have_text("Cancelled: opening the link.")
    settled(page)
    assert len(asked) == 1
    assert page.evaluate(SEEN) == before
    page.evaluate("address => { location.href = address; }", linked(single, *specs, run="gone"))
    expect(alert(page)).to_contain_text("This link names 33 runs, and a link opens at most 32.")
    page.evaluate("address => { location.href = address; }", linked(single, {"prompt": "x" * 200_000}, run="gone"))
    expect(alert(page)).to_contain_text("characters, and a link opens at most 262,144.")
    assert len(asked) == 1
    page.unroute_all(behavior="wait")


def test_back_and_forward_show_the_runs_before(opened: Open, single: str) -> None:
    page = opened(single)
    ask(page, "Tilda Drusser is the")
    first, entries = page.evaluate(SEEN), page.evaluate("history.length")
    step_to(page, 2)
    select(page, 5)
    step_to(page, first["step"])
    before = page.evaluate(SEEN)
    assert page.evaluate("history.length") == entries
    apply(page, Site="attn")
    assert page.evaluate("history.length") == entries + 1
    drawer(page).get_by_role("button", name="Close").click()
    after = page.evaluate(SEEN)
    prompt_box(page).fill("people say")
    page.go_back()
    expect(page.locator(".dl-run:visible")).to_have_count(1)
    settled(page)
    assert page.evaluate(SEEN) == before
    expect(prompt_box(page)).to_have_value("Tilda Drusser is the")
    page.go_forward()
    expect(page.locator(".dl-run:visible")).to_have_count(2)
    settled(page)
    assert page.evaluate(SEEN) == after


def test_a_copied_link_says_where_it_opens(opened: Open, single: str) -> None:
    page = opened(single, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Share", exact=True).click()
    copy = page.get_by_role("button", name=re.compile("^Copy link"))
    expect(copy).to_contain_text("token")
    copy.click()
    expect(page.get_by_role("status")).to_have_text("Copied the link. It opens on this machine while the server runs.")


def test_the_drawer_changes_the_run_that_was_touched_last(opened: Open, pair: str) -> None:
    page = opened(pair)
    heading = drawer(page).get_by_role("heading", name=re.compile("^Change the run of"))
    expect(heading).to_have_text("Change the run of tiny-mdm")
    page.locator(".dl-layers").nth(1).locator("button:visible").first.dispatch_event("pointerdown")
    expect(heading).to_have_text("Change the run of tiny-ar")
    drawer(page).get_by_role("button", name="Apply", exact=True).click()
    settled(page)
    expect(page.locator(".dl-run").nth(1).locator(".dl-edit")).to_contain_text("attention set to zero")
    expect(page.locator(".dl-run").nth(0).locator(".dl-edit")).to_have_count(0)


def test_a_run_that_is_opened_is_in_the_form(opened: Open, served: Callable[..., str]) -> None:
    page = opened(served("tiny-mdm", "--against", "pair", "--steps", "5", "--limit", "2"))
    prompt_box(page).fill("people say")
    step_to(page, 1)
    expect(prompt_box(page)).to_have_value("people say")
    page.get_by_role("button", name="Facts", exact=True).click()
    facts = page.get_by_role("complementary", name="Facts").locator(".dl-fact")
    for fact in facts.all()[:2]:
        prompt_box(page).fill("people say")
        fact.click()
        settled(page)
        expect(prompt_box(page)).to_have_value(str(fact.inner_text()).partition(" → ")[0])
