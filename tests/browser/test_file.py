"""The explorer page of a run, in Chromium: what is selected is shown and said, by pointer and by keyboard."""

import re
from collections.abc import Callable
from typing import Any

import chromium
import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import LENS, TRACE
from playwright.sync_api import expect

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Any:
    return explorer_pages.explored("site-mdm")


def test_a_masked_token_shows_its_predictions(opened: Open, run: Any) -> None:
    page, step, position = opened("mdm", fragment="#step=1"), 1, 4
    tokens, card = page.locator(".dl-text button"), page.locator(".dl-token .dl-card").first
    tokens.nth(position).hover()
    expect(page.get_by_role("status")).to_contain_text("step 1, position 4, masked")
    tokens.nth(position).click()
    expect(card.locator("h3")).to_contain_text("Position 4")
    p = run.cache[step]["denoise.hook_logits"][0, position].softmax(dim=-1)
    shown = card.locator(".dl-bars li:visible")
    expect(shown.first.locator("span")).to_have_text(f"{p.max():.3f}")
    ranked = p[: run.model.cfg.d_vocab_out].topk(shown.count() + 1)
    writable = [
        (i, x)
        for i, x in zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
        if i != run.trajectory.blank
    ]
    for (token, probability), row in zip(writable, shown.all(), strict=False):
        assert row.locator("b").inner_text() == f"“{run.model.to_string([token])}”"
        assert float(row.locator("span").inner_text()) == pytest.approx(probability, abs=6e-4)


def test_brackets_change_the_step_except_in_a_select(opened: Open) -> None:
    page = opened("mdm", fragment="#step=2")
    slider = page.get_by_label("Step", exact=True)
    page.locator(".dl-text button").first.focus()
    page.keyboard.press("]")
    assert slider.input_value() == "3"
    page.keyboard.press("[")
    page.keyboard.press("[")
    assert slider.input_value() == "1"
    page.get_by_label("Colours show", exact=True).focus()
    page.keyboard.press("]")
    assert slider.input_value() == "1"


def test_play_goes_on_to_the_last_step(opened: Open) -> None:
    page = opened("mdm", fragment="#step=4")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("5")
    page.get_by_role("button", name="Play").wait_for()


def test_code_of_a_view_gives_its_number(opened: Open, run: Any) -> None:
    page = opened("mdm", fragment="#view=lens&step=2&layer=3&position=4")
    page.locator(".dl-lens").get_by_role("button", name="as Python").click()
    dialog = page.get_by_role("dialog", name="Lens as Python")
    code = dialog.locator("pre").inner_text()
    assert not re.search(r"\{(step|layer|head|position|name)\}", code)
    compile(code, "lens", "exec")
    page.keyboard.press("Escape")
    assert dialog.count() == 0


def test_a_pair_stands_side_by_side(opened: Open) -> None:
    page = opened("pair", fragment="#view=lens&step=2")
    runs = page.locator(".dl-run:visible")
    assert runs.count() == 2
    assert runs.locator("h2").all_inner_texts() == ["site-mdm", "site-ar"]
    left, right = (one.bounding_box() for one in runs.all())
    assert left["y"] == right["y"]
    panes = page.locator(".dl-panel > .dl-pane")
    panes.nth(1).get_by_role("grid", name="Lens", exact=True).locator("[role=gridcell]").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(chromium.DRAWN)
    assert runs.locator("h2").all_inner_texts() == ["site-mdm", "site-ar"]
    assert "run=run1" in page.url


def test_hostile_tokens_are_text(opened: Open) -> None:
    page = opened("hostile", fragment="#view=lens&step=0")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0
    page.get_by_label("Step", exact=True).fill("2")
    page.wait_for_selector(chromium.DRAWN)
    text = page.locator(".dl-text").inner_text() + "".join(maps.label(page, LENS, 0, p) for p in range(12))
    assert "<script>window.hacked = 1</script>" in text
    assert "\\u{202e}\\n\\t" in text
    assert page.evaluate("window.hacked") is None


def test_a_page_of_traced_steps_only(opened: Open, run: Any, tmp_path: Any) -> None:
    from diffusion_lens.pages import write_page

    address = write_page(run.trace.page(), tmp_path / "trace.html").as_uri()
    page = opened(f"{address}#view=trace&step=0")
    assert page.get_by_label("Step", exact=True).get_attribute("max") == str(len(run.trace.steps) - 1)
    assert f"p {run.trace.scores[0, 0, run.trace.layers[-1]]:.3f}" in maps.label(page, TRACE, 0, 0)
    page.locator("[data-view=lens]").click()
    expect(page.locator(".dl-lens .dl-note:visible")).to_contain_text("trajectory.explore(path, trace=...)")


@pytest.mark.parametrize("view", ["lens", "trace", "attention"])
def test_a_view_says_which_canvas_it_reads(opened: Open, view: str) -> None:
    text = opened("mdm", fragment=f"#view={view}&step=2").locator(f".dl-{view} .dl-reading").inner_text()
    said = f"The {view} at step 2 reads the canvas before it, where the columns in italics are not yet written."
    assert text.endswith(said)


def test_an_unknown_choice_in_the_address_is_the_default(opened: Open) -> None:
    page = opened("mdm", fragment="#view=lens&colour=toString&step=99&layer=77&head=33&position=999&run=nobody")
    assert page.get_by_label("Lens shows").input_value() == "top"
    assert len(maps.rows(page, LENS)) == 7
