"""The explorer page of a run, in Chromium: what it says equals the library's results, by pointer and by keyboard."""

import re
from collections.abc import Callable
from typing import Any

import chromium
import explorer_pages
import pytest
from playwright.sync_api import expect

Open = Callable[..., Any]
CELL = '.dl-{view} [role=gridcell][data-row="{row}"][data-column="{column}"]'


def cell(page: Any, view: str, row: int, column: int) -> Any:
    return page.locator(CELL.format(view=view, row=row, column=column))


def label(page: Any, view: str, row: int, column: int) -> str:
    text = cell(page, view, row, column).get_attribute("aria-label")
    assert text is not None
    return text


def choose(page: Any, name: str, value: str) -> None:
    page.get_by_label(name, exact=True).select_option(value)
    page.wait_for_selector(chromium.DRAWN)


def step_to(page: Any, step: int) -> None:
    page.get_by_label("Step", exact=True).fill(str(step))
    page.wait_for_selector(chromium.DRAWN)


@pytest.fixture(scope="module")
def run() -> Any:
    return explorer_pages.explored("site-mdm")


def test_canvas_cells_say_token_step_and_confidence(opened: Open, run: Any) -> None:
    page, trajectory = opened("mdm"), run.trajectory
    for step in range(trajectory.n_steps):
        for position, token in enumerate(trajectory.canvases[step + 1, 0].tolist()):
            text = label(page, "canvas", step, position)
            assert text.startswith(f"step {step}, position {position}, ")
            if token == trajectory.blank:
                assert text.endswith("masked")
                continue
            assert f"“{trajectory.words[token].replace(' ', '␣')}”" in text
            if trajectory.given[0, position]:
                assert text.endswith("given")
            else:
                at, confidence = trajectory.revealed_at[0, position], trajectory.confidence[0, position]
                assert f"revealed at step {at} with confidence {confidence:.3f}" in text


@pytest.mark.parametrize("step", [0, 3, 5])
def test_lens_cells_equal_the_logit_lens(opened: Open, run: Any, step: int) -> None:
    page, lens = opened("mdm", fragment=f"#step={step}"), run.lens
    rows = page.locator(".dl-lens [role=rowheader]").all_inner_texts()
    assert rows == lens.labels[::-1]
    for row, name in enumerate(rows):
        layer = lens.labels.index(name)
        for position in (0, 4, 11, 15):
            word = lens.words[int(lens.top_tokens[step, layer, 0, position, 0])]
            text = label(page, "lens", row, position)
            assert text.startswith(f"{name}, position {position}: “{word}” ")
            numbers = re.search(r"” (\S+); target “(.*)” rank (\d+), p (\S+); entropy (\S+) nats$", text)
            assert numbers is not None
            assert float(numbers[1]) == pytest.approx(
                float(lens.top_probabilities[step, layer, 0, position, 0]), abs=6e-4
            )
            assert numbers[2] == lens.words[int(lens.targets[0, position, 0])]
            assert int(numbers[3]) == lens.target_ranks[step, layer, 0, position, 0]
            assert float(numbers[4]) == pytest.approx(
                float(lens.target_probabilities[step, layer, 0, position, 0]), abs=6e-4
            )
            assert float(numbers[5]) == pytest.approx(float(lens.entropy[step, layer, 0, position]), abs=6e-4)


def test_attention_cells_equal_the_cached_pattern(opened: Open, run: Any) -> None:
    page = opened("mdm", fragment="#step=2&layer=3&head=1")
    pattern = run.cache[2]["pattern", 3][0]
    assert page.locator(".dl-attention h3").inner_text() == "Attention of block 3, head 1 at step 2"
    for head in (1, 4):
        page.get_by_role("button", name=f"head {head}", exact=True).click()
        page.wait_for_selector(chromium.DRAWN)
        for query in range(16):
            for key in range(16):
                shown = float(label(page, "attention", query, key).rpartition(": ")[2])
                assert shown == pytest.approx(float(pattern[head, query, key]), abs=0.008)  # 8 bits and two decimals


def test_trace_cells_equal_the_trace(opened: Open, run: Any) -> None:
    page, trace = opened("mdm"), run.trace
    for step in trace.steps[:2]:
        step_to(page, step)
        scores, corrupted = trace.scores[trace.steps.index(step)], trace.corrupted[trace.steps.index(step)]
        for row, layer in enumerate(reversed(trace.layers)):
            for position in (0, 1, 4):
                numbers = re.search(r": p (\S+), effect (\S+)$", label(page, "trace", row, position))
                assert numbers is not None
                assert float(numbers[1]) == pytest.approx(float(scores[position, layer]), abs=6e-4)
                effect = float(numbers[2].replace("−", "-"))
                assert effect == pytest.approx(float(scores[position, layer] - corrupted), abs=6e-4)


def test_hovering_a_masked_token_shows_its_predictions(opened: Open, run: Any) -> None:
    page, step, position = opened("mdm"), 1, 9
    step_to(page, step)
    page.locator(".dl-text button").nth(position).hover()
    expect(page.locator(".dl-inspector h3")).to_contain_text("Position 9")
    p = run.cache[step]["denoise.hook_logits"][0, position].softmax(dim=-1)
    shown = page.locator(".dl-inspector .dl-bars").first.locator("li:visible")
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
    page.locator("h1").hover()
    expect(page.locator(".dl-inspector h3")).to_contain_text("Position 4")


def test_clicking_a_lens_cell_selects_its_layer_and_position(opened: Open) -> None:
    page = opened("mdm", fragment="#step=1")
    cell(page, "lens", 1, 6).click()
    page.wait_for_selector(chromium.DRAWN)
    assert page.get_by_label("Layer", exact=True).input_value() == "5"
    assert page.locator(".dl-inspector h3").inner_text().startswith("Position 6")
    expect(page.get_by_role("status")).to_have_text(label(page, "lens", 1, 6))
    assert "position=6" in page.url
    assert "layer=5" in page.url


def test_hovering_marks_the_column_in_every_map(opened: Open) -> None:
    page = opened("mdm", fragment="#step=0")
    cell(page, "lens", 2, 7).hover()
    bands = page.locator(".dl-scroll .dl-band-hover:visible")
    assert bands.count() == 4
    left = {round(band.bounding_box()["x"]) for band in bands.all()}
    assert len(left) == 1
    assert left.pop() == round(cell(page, "trace", 0, 7).bounding_box()["x"]) - 1


def test_arrow_keys_move_in_a_map(opened: Open) -> None:
    page = opened("mdm", fragment="#step=2&layer=3&position=4")
    page.locator(".dl-lens [role=gridcell][tabindex='0']").focus()
    focused = "[document.activeElement.dataset.row, document.activeElement.dataset.column].map(Number)"
    assert page.evaluate(focused) == [3, 4]
    for key, expected in (
        ("ArrowRight", [3, 5]),
        ("ArrowUp", [2, 5]),
        ("Home", [2, 0]),
        ("ArrowLeft", [2, 0]),
        ("End", [2, 15]),
        ("PageDown", [6, 15]),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == expected
    page.wait_for_selector(chromium.DRAWN)
    assert page.locator(".dl-lens [tabindex='0']").count() == 1
    expect(page.get_by_role("status")).to_contain_text("0_pre, position 15")


def test_brackets_change_the_step_except_in_a_select(opened: Open) -> None:
    page = opened("mdm", fragment="#step=2")
    slider = page.get_by_label("Step", exact=True)
    page.locator(".dl-text button").first.focus()
    page.keyboard.press("]")
    assert slider.input_value() == "3"
    page.keyboard.press("[")
    page.keyboard.press("[")
    assert slider.input_value() == "1"
    page.get_by_label("Layer", exact=True).focus()
    page.keyboard.press("]")
    assert slider.input_value() == "1"


def test_play_goes_on_to_the_last_step(opened: Open) -> None:
    page = opened("mdm", fragment="#step=4")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("5")
    page.get_by_role("button", name="Play").wait_for()


def test_code_of_a_view_gives_its_number(opened: Open, run: Any) -> None:
    page = opened("mdm", fragment="#step=2&layer=3&position=4")
    page.locator(".dl-lens").get_by_role("button", name="as Python").click()
    dialog = page.get_by_role("dialog", name="Lens as Python")
    code = dialog.locator("pre").inner_text()
    assert not re.search(r"\{(step|layer|head|position|name)\}", code)
    compile(code, "lens", "exec")
    page.keyboard.press("Escape")
    assert dialog.count() == 0


@pytest.mark.parametrize(
    ("colour", "ends"), [("rank", (None, "0")), ("probability", ("0", "1")), ("entropy", (None, "0"))]
)
def test_colours_of_the_lens_have_numbers(opened: Open, colour: str, ends: tuple[str | None, str]) -> None:
    page = opened("mdm")
    choose(page, "Lens shows", colour)
    low, high = page.locator(".dl-lens .dl-legend span").all_inner_texts()[1:]
    assert float(low) > 0 if ends[0] is None else low == ends[0]
    assert high == ends[1]


def test_a_pair_stands_side_by_side(opened: Open) -> None:
    page = opened("pair")
    runs = page.locator(".dl-run:visible")
    assert runs.count() == 2
    assert runs.locator("h2").all_inner_texts() == ["site-mdm", "site-ar"]
    left, right = (one.bounding_box() for one in runs.all())
    assert left["y"] == right["y"]
    runs.nth(1).locator(".dl-lens [role=gridcell]").nth(3).click()
    page.wait_for_selector(chromium.DRAWN)
    assert runs.locator("h2").all_inner_texts() == ["site-mdm", "site-ar"]
    assert page.get_by_label("Run", exact=True).input_value() == "run1"


def test_hostile_tokens_are_text(opened: Open) -> None:
    page = opened("hostile")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0
    page.get_by_label("Step", exact=True).fill("2")
    page.wait_for_selector(chromium.DRAWN)
    text = page.locator(".dl-text").inner_text()
    assert "<script>window.hacked = 1</script>" in text
    assert "\\u{202e}\\n\\t" in text
    assert page.evaluate("window.hacked") is None


def test_a_page_of_traced_steps_only(opened: Open, run: Any, tmp_path: Any) -> None:
    from diffusion_lens.pages import write_page

    path = write_page(run.trace.page(), tmp_path / "trace.html")
    page = opened(path.as_uri())
    assert page.get_by_label("Step", exact=True).get_attribute("max") == str(len(run.trace.steps) - 1)
    assert page.locator(".dl-lens .dl-note").is_visible()
    assert not page.get_by_label("Head", exact=True).is_visible()
    assert not page.get_by_label("Lens shows", exact=True).is_visible()
    first = label(page, "trace", 0, 0)
    assert f"p {run.trace.scores[0, 0, run.trace.layers[-1]]:.3f}" in first


def test_the_page_says_which_canvas_each_view_reads(opened: Open) -> None:
    page = opened("mdm")
    text = page.locator(".dl-reading").inner_text()
    assert "Lens, trace, attention and predictions at a step read the canvas before it" in text
    assert "guided" not in text


def test_an_unknown_choice_in_the_address_is_the_default(opened: Open) -> None:
    page = opened("mdm", fragment="#colour=toString&step=99&layer=77&head=33&position=999&run=nobody")
    assert page.get_by_label("Lens shows").input_value() == "top"
    assert page.locator(".dl-lens [role=gridcell]").count() > 0
