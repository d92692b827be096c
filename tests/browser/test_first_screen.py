"""The first ten seconds: two models write an answer, right or wrong; nothing that is selected is out of sight."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_pages
import pytest
from explorer_walk import SIZES, final_words, labels, select, settled, slider, step_to, token, words
from playwright.sync_api import expect

Open = Callable[..., Any]

# The values of the slider, from the first drawing until it has been at its end for a second, and the seconds to there.
WATCHED = """window.watched = new Promise((done) => {
    const seen = [];
    let began = 0, reached = 0;
    const look = () => {
        const range = document.querySelector("[data-state] input[type=range]"), now = performance.now();
        if (range && Number(range.value) !== seen.at(-1)) seen.push(Number(range.value));
        if (range) began ||= now;
        if (range && range.value === range.max) reached ||= now;
        if (now - (reached || began || now) > (reached ? 1000 : 15000)) done([seen, (reached - began) / 1000]);
        else requestAnimationFrame(look);
    };
    look();
})"""
# Select positions and steps one after the other; what of the selection is out of the window, or covered by something.
HIDDEN = """async ([positions, steps]) => {
    const root = document.querySelector(".dl-explorer"), range = document.querySelector("input[type=range]");
    const ready = async () => {
        do await new Promise((done) => requestAnimationFrame(done)); while (root.dataset.state !== "ready");
    };
    const hidden = [];
    const look = (when) => {
        const { innerWidth, innerHeight } = window;
        const parts = { slider: range, tab: document.querySelector("[role=tab][aria-selected=true]") };
        document.querySelectorAll(".dl-run").forEach((run, i) => {
            parts[`token of run ${i}`] = run.querySelector("[data-position][aria-pressed=true]");
        });
        document.querySelectorAll(".dl-layers").forEach((layers, i) => {
            const band = layers.checkVisibility() && layers.querySelector("[aria-pressed=true]");
            if (band) parts[`layer of run ${i}`] = band;
        });
        for (const [name, part] of Object.entries(parts)) {
            const { left, right, top, bottom } = part.getBoundingClientRect();
            const at = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
            const isOutside = left < -0.5 || right > innerWidth + 0.5 || top < 0 || bottom > innerHeight;
            if (isOutside) hidden.push(`${when}: ${name} is outside`);
            else if (!part.contains(at)) hidden.push(`${when}: ${name} is covered by ${at?.outerHTML.slice(0, 80)}`);
        }
        document.querySelectorAll(".dl-text").forEach((text, i) => {
            const token = text.querySelector("[aria-pressed=true]"), box = text.getBoundingClientRect();
            const shadows = getComputedStyle(token).boxShadow.matchAll(/([\\d.]+)px(?=,|$)/g);
            const ring = Math.max(...[...shadows].map(([, spread]) => Number(spread)));
            const { left, right, top, bottom } = token.getBoundingClientRect();
            const inside = { left: box.left + text.clientLeft, top: box.top + text.clientTop };
            const room = [left - inside.left, inside.left + text.clientWidth - right, top - inside.top,
                inside.top + text.clientHeight - bottom];
            if (!(ring >= 3)) hidden.push(`${when}: the token of run ${i} has a frame of ${ring} pixels`);
            if (Math.min(...room) < ring) hidden.push(`${when}: the frame of run ${i} is cut: ${room}`);
        });
        if (!parts["layer of run 0"]) hidden.push(`${when}: no layer is seen`);
        const { top, bottom } = document.querySelector("[role=tabpanel]").getBoundingClientRect();
        if (Math.min(bottom, innerHeight) - top < 60) hidden.push(`${when}: the view has ${bottom - top} pixels`);
        if (scrollY || document.documentElement.scrollHeight > innerHeight) hidden.push(`${when}: the page scrolls`);
    };
    for (const position of positions) {
        document.querySelector(`.dl-run [data-position="${position}"]`).click();
        await ready();
        look(`position ${position}`);
    }
    for (const step of steps) {
        range.value = step;
        range.dispatchEvent(new Event("input"));
        await ready();
        look(`step ${step}`);
    }
    return hidden;
}"""


@pytest.fixture(scope="module")
def address(served: Callable[..., str]) -> str:
    return served("site-mdm", "--against", "pair")


@pytest.fixture(scope="module")
def pair() -> Any:
    from diffusion_lens import load_pair

    return load_pair("site-mdm", device="cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the file that `diffusion-lens explore --out` writes of the pair."""
    path = tmp_path_factory.mktemp("written") / "pair.html"
    command = ["explore", "site-mdm", "--against", "pair", "--limit", "1", "--out", str(path)]
    subprocess.run([sys.executable, "-m", "diffusion_lens", *command], check=True, stdout=subprocess.DEVNULL)
    return path.as_uri()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a page of 256 positions."""
    page = explorer_pages.large_page(256, 4, 4)
    return explorer_pages.write(page, tmp_path_factory.mktemp("long"), "long").as_uri()


def test_a_pair_opens_on_the_reverse_question(opened: Open, address: str, pair: Any) -> None:
    from diffusion_lens.data import site_facts

    page = opened(address)
    prompt = page.get_by_label("Prompt", exact=True).input_value()
    (person,) = [one for one in site_facts.load().people if prompt == f"the {one.description} is"]
    assert person.trained == "p2d"  # name first: the prompt asks in reverse
    runs = [model.denoise(prompt, length=16, steps=11) for model in pair]
    assert final_words(page) == [words(model, run) for model, run in zip(pair, runs, strict=True)]
    assert [person.name in run.text[0] for run in runs] == [True, False]
    assert page.locator("h2").all_inner_texts() == ["site-mdm", "site-ar"]
    said = page.locator(".dl-verdict").all_inner_texts()
    assert said == [f"✓ right: {person.name}.", f"✗ wrong: the answer is {person.name}."]


def test_a_written_page_opens_on_the_same_question(opened: Open, address: str, written: str) -> None:
    live, page = opened(address), opened(written)
    for part in (".dl-verdict", "h2", ".dl-text"):
        assert page.locator(part).all_inner_texts() == live.locator(part).all_inner_texts()
    assert page.locator(".dl-prompt-text").inner_text() == live.get_by_label("Prompt", exact=True).input_value()


def test_the_runs_play_once_by_themselves(opened: Open, address: str) -> None:
    page = opened(address, moves=True, script=WATCHED)
    seen, seconds = page.evaluate("window.watched")
    assert seen == list(range(seen[0], 11))
    assert seen[0] < 3
    assert seconds < 8
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_a_pointer_stops_what_plays(opened: Open, pages: dict[str, Path]) -> None:
    page = opened("pair", moves=True)
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    token(page, 1).click()
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    stopped = slider(page).input_value()
    page.wait_for_timeout(1200)
    assert slider(page).input_value() == stopped != slider(page).get_attribute("max")


def test_who_prefers_reduced_motion_sees_the_whole_text_at_once(opened: Open) -> None:
    page = opened("pair")
    assert slider(page).input_value() == slider(page).get_attribute("max")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_play_goes_on_to_the_last_step_and_begins_again(opened: Open) -> None:
    page = opened("mdm", fragment="#step=4")
    page.get_by_role("button", name="Play", exact=True).click()
    expect(slider(page)).to_have_value("5")
    page.get_by_role("button", name="Play", exact=True).click()
    expect(slider(page)).to_have_value("0")
    page.get_by_role("button", name="Pause", exact=True).click()


def test_tokens_say_text_step_and_confidence(opened: Open) -> None:
    page = opened("pair")
    for index, name in enumerate(("site-mdm", "site-ar")):
        run = explorer_pages.explored(name).trajectory
        for step in range(run.n_steps):
            step_to(page, step)
            for position, text in enumerate(labels(page, index)):
                token = int(run.canvases[step + 1, 0, position])
                assert text.startswith(f"step {step}, position {position}, ")
                if token == run.blank or (name == "site-ar" and position >= 4 + step + 1):
                    assert re.search("masked|not reached", text)
                elif run.given[0, position]:
                    assert text.endswith(f"“{run.words[token]}”, given")
                else:
                    at, confidence = run.revealed_at[0, position], run.confidence[0, position]
                    assert f"“{run.words[token]}”, revealed at step {at} with confidence {confidence:.3f}" in text


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_follow_the_confidence(opened: Open, theme: str) -> None:
    page, run = opened("pair", theme=theme), explorer_pages.explored("site-ar").trajectory
    page.locator(".dl-more").nth(1).click()
    colours = (
        page.locator(".dl-run")
        .nth(1)
        .locator("[data-position]")
        .evaluate_all(
            "tokens => tokens.map((token) => getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number))"
        )
    )
    written = sorted((float(run.confidence[0, p]), sum(colours[p][:3])) for p in range(4, len(colours)))
    assert len({round(confidence, 1) for confidence, _ in written}) > 2
    brightness = [colour for _, colour in written]
    assert brightness == sorted(brightness, reverse=theme == "light")
    assert all(len(colour) == 4 and colour[3] == 0 for colour in colours[:4])  # what was given has no confidence


def test_the_text_ends_at_the_end_token(opened: Open) -> None:
    page, run = opened("mdm"), explorer_pages.explored("site-mdm").trajectory
    tokens = [run.words[token] for token in run.tokens[0].tolist()]
    end = tokens.index("<eos>")
    shown, more = page.locator(".dl-text [data-position]:visible"), page.locator(".dl-more")
    assert shown.all_inner_texts() == tokens[: end + 1]
    expect(more).to_have_text(f"+ {len(tokens) - end - 1} after the end")
    more.click()
    assert shown.all_inner_texts() == tokens
    select(page, end + 2)
    more.click()
    assert shown.all_inner_texts() == [*tokens[: end + 1], tokens[end + 2]]  # what is selected stays
    select(page, 0)
    assert shown.all_inner_texts() == tokens[: end + 1]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", ["pair", "large", "long"])
def test_what_is_selected_is_in_sight(opened: Open, long: str, name: str, width: int, height: int) -> None:
    page = opened(long if name == "long" else name, width, height=height)
    n_pos, last = page.locator(".dl-run").first.locator("[data-position]").count(), slider(page).get_attribute("max")
    positions = range(0, n_pos, 15) if name == "long" else range(n_pos)
    assert page.evaluate(HIDDEN, [list(positions), list(range(int(last) + 1))]) == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_what_is_selected_on_the_live_page_is_in_sight(opened: Open, address: str, width: int, height: int) -> None:
    page = opened(address, width, height=height)
    assert page.evaluate(HIDDEN, [list(range(16)), list(range(11))]) == []


def test_the_keyboard_alone_reaches_everything(opened: Open) -> None:
    page = opened("pair", fragment="#step=1&position=4&layer=3")
    page.locator("h1").click()
    press = page.keyboard.press

    def tab_to(selector: str) -> Any:
        for _ in range(40):
            press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return page.locator(":focus")
        raise AssertionError(f"Tab does not reach {selector}")

    tab_to(".dl-text [data-position]")
    for key, expected in (
        ("ArrowRight", 5),
        ("ArrowDown", 6),
        ("ArrowLeft", 5),
        ("End", 8),
        ("Home", 0),
        ("ArrowUp", 0),
    ):
        press(key)
        settled(page)
        expect(page.locator(":focus")).to_have_attribute("data-position", str(expected))
        assert token(page, expected).get_attribute("aria-pressed") == "true"
    for key, expected in (("]", "2"), ("]", "3"), ("[", "2")):
        press(key)
        expect(slider(page)).to_have_value(expected)
    press(" ")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    press(" ")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    tab_to(".dl-layers button")
    for key, expected in (("ArrowRight", "4_pre"), ("End", "final_post"), ("ArrowLeft", "5_pre"), ("Home", "0_pre")):
        press(key)
        settled(page)
        assert page.locator(":focus").get_attribute("aria-label").startswith(f"layer {expected}: ")
        expect(page.locator(":focus")).to_have_attribute("aria-pressed", "true")
    tabs = page.get_by_role("tab").all_inner_texts()
    tab_to("[role=tab]")
    for key, expected in (("ArrowRight", tabs[1]), ("End", tabs[-1]), ("ArrowRight", tabs[0]), ("ArrowLeft", tabs[-1])):
        press(key)
        settled(page)
        expect(page.locator(":focus")).to_have_text(expected)
        expect(page.get_by_role("tab", selected=True)).to_have_text(expected)


def test_brackets_do_not_change_the_step_in_a_select(opened: Open) -> None:
    page = opened("mdm", fragment="#step=2")
    page.get_by_label("Colours show").focus()
    page.keyboard.press("]")
    assert slider(page).input_value() == "2"
