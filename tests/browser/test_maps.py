"""Steps, lens, trace and attention in Chromium: their cells equal the library's results, by pointer and by keyboard."""

import re
from collections.abc import Callable
from typing import Any

import chromium
import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import ATTENTION, CANVAS, LENS, OVER, TRACE
from playwright.sync_api import expect

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Any:
    return explorer_pages.explored("site-mdm")


def step_to(page: Any, step: int) -> None:
    page.get_by_label("Step", exact=True).fill(str(step))
    page.wait_for_selector(chromium.DRAWN)


def test_canvas_cells_say_token_step_and_confidence(opened: Open, run: Any) -> None:
    page, trajectory = opened("mdm", fragment="#view=canvas&step=0"), run.trajectory
    shown = maps.cells(page, CANVAS)
    for step in range(trajectory.n_steps):
        for position, token in enumerate(trajectory.canvases[step + 1, 0].tolist()):
            cell = shown[step][position]
            assert cell["label"].startswith(f"step {step}, position {position}, ")
            if token == trajectory.blank:
                assert cell["label"].endswith("masked")
                assert "masked" in cell["kind"]
                continue
            word = trajectory.words[token]
            assert f"“{word.replace(' ', '␣')}”" in cell["label"]
            assert cell["text"] == word.strip()
            at, confidence = trajectory.revealed_at[0, position], trajectory.confidence[0, position]
            assert ("new" in cell["kind"]) == (step == at)
            if trajectory.given[0, position]:
                assert cell["label"].endswith("given")
            else:
                assert f"revealed at step {at} with confidence {confidence:.3f}" in cell["label"]
                assert cell["value"] == pytest.approx(float(confidence), abs=1e-6)


def test_steps_that_write_nothing_are_one_thin_row(opened: Open, run: Any, tmp_path: Any) -> None:
    from diffusion_lens.analysis import commitment

    trajectory = run.model.denoise(run.fact.prompt, max_new_tokens=4, steps=24, predictions=2)
    address = explorer_pages.write(trajectory.explore(), tmp_path, "folded").as_uri()
    wrote = {step for step in trajectory.revealed_at[0].tolist() if step >= 0}
    expected: list[list[int]] = []
    for step in range(trajectory.n_steps):
        if step in wrote or step == 0 or step - 1 in wrote:
            expected.append([step, step])
        else:
            expected[-1][1] = step
    page = opened(f"{address}#view=canvas&step=0")
    names = maps.rows(page, CANVAS)
    assert names == [str(first) if first == last else f"{first}–{last}" for first, last in expected]
    assert len(names) < 12
    heights = [maps.asked(page, CANVAS, "map.heightOf(values[0])", row) for row in range(len(names))]
    assert [height < max(heights) for height in heights] == [first < last for first, last in expected]
    folded = next(row for row, (first, last) in enumerate(expected) if first < last)
    maps.click(page, CANVAS, folded, 2)
    assert page.get_by_label("Step", exact=True).input_value() == str(expected[folded][0])
    step_to(page, expected[folded][1])  # the row stands for this step too
    assert maps.asked(page, CANVAS, "map.marked")[0] == folded
    assert maps.label(page, CANVAS, folded, 2).startswith(f"step {expected[folded][1]}, position 2")
    # A step that commits to a token does not look as the one before, even where it writes nothing.
    page.get_by_label("Colours show").select_option("commitment")
    page.wait_for_selector(chromium.DRAWN)
    apart = {int(name) for name in maps.rows(page, CANVAS) if "–" not in name}
    steps = commitment(trajectory.predictions(run.model, top_k=2)).committed_at[0].tolist()
    assert {step for step in steps if step >= 0} <= apart


@pytest.mark.parametrize("step", [0, 3, 5])
def test_lens_cells_equal_the_logit_lens(opened: Open, run: Any, step: int) -> None:
    page, lens = opened("mdm", fragment=f"#view=lens&step={step}"), run.lens
    rows, shown = maps.rows(page, LENS), maps.cells(page, LENS)
    assert rows == lens.labels[::-1]
    for row, name in enumerate(rows):
        layer = lens.labels.index(name)
        for position in (0, 4, 11, 15):
            word = lens.words[int(lens.top_tokens[step, layer, 0, position, 0])]
            cell = shown[row][position]
            assert cell["label"].startswith(f"{name}, position {position}: “{word}” ")
            assert cell["text"] == word
            numbers = re.search(r"” (\S+); target “(.*)” rank (\d+), p (\S+); entropy (\S+) nats$", cell["label"])
            assert numbers is not None
            p = float(lens.top_probabilities[step, layer, 0, position, 0])
            assert float(numbers[1]) == pytest.approx(p, abs=6e-4)
            assert cell["value"] == pytest.approx(p, abs=1e-5)
            assert numbers[2] == lens.words[int(lens.targets[0, position, 0])]
            rank = int(lens.target_ranks[step, layer, 0, position, 0])
            assert int(numbers[3]) == rank
            assert (cell["kind"] == "hit") == (rank == 0)
            assert float(numbers[4]) == pytest.approx(
                float(lens.target_probabilities[step, layer, 0, position, 0]), abs=6e-4
            )
            assert float(numbers[5]) == pytest.approx(float(lens.entropy[step, layer, 0, position]), abs=6e-4)


def test_the_lens_shows_the_selected_position_over_all_steps(opened: Open, run: Any) -> None:
    page, lens = opened("mdm", fragment="#view=lens&step=2&position=6&colour=entropy"), run.lens
    expect(page.get_by_text("Position 6 over all steps: entropy (nats)")).to_be_visible()
    page.wait_for_function("() => !document.querySelectorAll('.dl-map')[1].heatMap.label(0, 5).endsWith('being read')")
    for row, name in enumerate(maps.rows(page, OVER)):
        for step in range(6):
            text = maps.label(page, OVER, row, step)
            entropy = float(lens.entropy[step, lens.labels.index(name), 0, 6])
            assert text.startswith(f"{name}, step {step}, position 6: ")
            assert float(text.split()[-2]) == pytest.approx(entropy, abs=6e-4)
    maps.click(page, OVER, 1, 4)
    assert page.get_by_label("Step", exact=True).input_value() == "4"
    assert "layer=5" in page.url


def test_attention_cells_equal_the_cached_pattern(opened: Open, run: Any) -> None:
    page = opened("mdm", fragment="#view=attention&step=2&layer=3&head=1&position=4")
    pattern = run.cache[2]["pattern", 3][0]
    assert page.locator(".dl-attention h3").inner_text() == "Attention of block 3, head 1 at step 2"
    for head in (1, 4):
        page.get_by_role("button", name=f"head {head}", exact=True).click()
        page.wait_for_selector(chromium.DRAWN)
        for query, line in enumerate(maps.cells(page, ATTENTION)):
            for key, cell in enumerate(line):
                shown = float(cell["label"].rpartition(": ")[2])
                assert shown == pytest.approx(float(pattern[head, query, key]), abs=0.008)  # 8 bits and two decimals


def test_attention_in_words_names_the_strongest(opened: Open, run: Any) -> None:
    page = opened("mdm", fragment="#view=attention&step=2&layer=3&head=1&position=4")
    pattern, words = run.cache[2]["pattern", 3][0], page.locator(".dl-attention .dl-reads p")
    reads, is_read, heads = (line.locator("button").all_inner_texts() for line in words.all())
    for texts, weights in ((reads, pattern[1, 4]), (is_read, pattern[1, :, 4])):
        strongest = weights.topk(len(texts))
        for text, place, weight in zip(texts, strongest.indices.tolist(), strongest.values.tolist(), strict=True):
            assert re.search(rf"(position {place} \(masked\)|\({place}\)) ", text)
            assert float(text.split()[-1]) == pytest.approx(weight, abs=0.008)
    key = int(pattern[1, 4].topk(2).indices[0 if pattern[1, 4].argmax() != 4 else 1])
    weights = pattern[:, 4, key]
    assert heads[0].startswith(f"head {int(weights.argmax())} ")
    words.nth(2).get_by_role("button").first.click()
    page.wait_for_selector(chromium.DRAWN)
    assert f"head={int(weights.argmax())}" in page.url
    assert maps.asked(page, ATTENTION, "map.marked") == [4, key]


def test_trace_cells_equal_the_trace(opened: Open, run: Any) -> None:
    page, trace = opened("mdm", fragment="#view=trace&step=0"), run.trace
    for step in trace.steps[:2]:
        step_to(page, step)
        scores, corrupted = trace.scores[trace.steps.index(step)], trace.corrupted[trace.steps.index(step)]
        shown = maps.cells(page, TRACE)
        for row, layer in enumerate(reversed(trace.layers)):
            for position in (0, 1, 4):
                numbers = re.search(r": p (\S+), effect (\S+)$", shown[row][position]["label"])
                assert numbers is not None
                assert float(numbers[1]) == pytest.approx(float(scores[position, layer]), abs=6e-4)
                effect = float(numbers[2].replace("−", "-"))
                assert effect == pytest.approx(float(scores[position, layer] - corrupted), abs=6e-4)


def test_clicking_a_lens_cell_selects_its_layer_and_position(opened: Open) -> None:
    page = opened("mdm", fragment="#view=lens&step=1")
    maps.click(page, LENS, 1, 6)
    assert "position=6" in page.url
    assert "layer=5" in page.url
    expect(page.get_by_role("status")).to_have_text(maps.label(page, LENS, 1, 6))
    active = page.get_by_role("grid", name="Lens", exact=True).locator("[role=gridcell]")
    expect(active).to_have_attribute("aria-label", maps.label(page, LENS, 1, 6))
    expect(active).to_be_focused()


def test_hovering_marks_the_column_and_says_the_cell(opened: Open) -> None:
    page = opened("mdm", fragment="#view=lens&step=0")
    maps.hover(page, LENS, 2, 7)
    expect(page.get_by_role("status")).to_have_text(maps.label(page, LENS, 2, 7))
    band = page.locator(".dl-mark-hover:visible").first.bounding_box()
    left = maps.asked(page, LENS, "map.rectangle(2, 7).x")
    assert band["x"] == pytest.approx(left - 1)
    page.locator(".dl-text button").nth(3).hover()
    expect(page.locator(".dl-mark-hover:visible").first).to_be_visible()
    left = maps.asked(page, LENS, "map.rectangle(2, 3).x")
    assert page.locator(".dl-mark-hover:visible").first.bounding_box()["x"] == pytest.approx(left - 1)


def test_a_grid_has_one_cell_that_arrow_keys_move(opened: Open) -> None:
    page = opened("mdm", fragment="#view=lens&step=2&layer=3&position=4")
    grid = page.get_by_role("grid", name="Lens", exact=True)
    assert grid.get_attribute("aria-rowcount") == "7"
    assert grid.get_attribute("aria-colcount") == "16"
    grid.locator("[role=gridcell]").focus()
    focused = (
        """() => [document.activeElement.parentNode.ariaRowIndex, document.activeElement.ariaColIndex].map(Number)"""
    )
    assert page.evaluate(focused) == [4, 5]
    for key, expected in (
        ("ArrowRight", [4, 6]),
        ("ArrowUp", [3, 6]),
        ("Home", [3, 1]),
        ("ArrowLeft", [3, 1]),
        ("End", [3, 16]),
        ("PageDown", [7, 16]),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == expected
    page.wait_for_selector(chromium.DRAWN)
    assert grid.locator("[tabindex='0']").count() == 1
    expect(page.get_by_role("status")).to_contain_text("0_pre, position 15")


@pytest.mark.parametrize(
    ("colour", "ends"), [("rank", (None, "0")), ("probability", ("0", "1")), ("entropy", (None, "0"))]
)
def test_colours_of_the_lens_have_numbers(opened: Open, colour: str, ends: tuple[str | None, str]) -> None:
    page = opened("mdm", fragment="#view=lens")
    page.get_by_label("Lens shows", exact=True).select_option(colour)
    page.wait_for_selector(chromium.DRAWN)
    low, high = page.locator(".dl-lens .dl-legend span").all_inner_texts()[1:]
    assert float(low) > 0 if ends[0] is None else low == ends[0]
    assert high == ends[1]


@pytest.mark.parametrize("name", ["mdm", "large"])
def test_scales_hold_still_over_steps(opened: Open, name: str) -> None:
    page = opened(name, fragment="#view=lens&step=0&colour=entropy&layer=1")
    page.wait_for_function("() => !document.querySelectorAll('.dl-map')[1].heatMap.label(0, 3).endsWith('being read')")
    legend = page.locator(".dl-lens .dl-legend span")
    ends = legend.all_inner_texts()
    for step in (1, 3, 2):
        step_to(page, step)
        assert legend.all_inner_texts() == ends


@pytest.mark.parametrize(
    ("view", "chosen"),
    [(CANVAS, "confidence"), (CANVAS, "entropy"), (CANVAS, "commitment"), (LENS, ""), (TRACE, ""), (ATTENTION, "")],
)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ink_contrasts_with_every_colour(opened: Open, view: str, chosen: str, theme: str) -> None:
    """WCAG 2: the ratio of the luminances is at least 4.5."""
    page = opened("mdm", theme=theme, fragment=f"#view={maps.VIEWS[view]}&step=2&canvas={chosen}")
    paints = [cell["paint"] for line in maps.cells(page, view) for cell in line if cell["paint"]]
    assert len({paint["background"] for paint in paints}) > 1
    for paint in paints:
        ink = {"#000": (0, 0, 0), "#fff": (255, 255, 255)}[paint["ink"]]
        light, dark = sorted((luminance(ink), luminance(paint["rgb"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, paint


def luminance(rgb: Any) -> float:
    r, g, b = (x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("view", ["canvas", "lens", "trace", "attention"])
def test_axe_finds_nothing_in_a_view(opened: Open, axe: str, view: str, width: int) -> None:
    page = opened("pair", width, "dark" if width == 400 else "light", f"#view={view}&step=2")
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run('.dl-panel', { resultTypes: ['violations'] })")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []


def test_what_a_map_paints_are_its_cells(opened: Open) -> None:
    page = opened("large", fragment="#view=lens&step=2&layer=10&position=40")
    painted = """(({ left, top }, { data, width }) => values.map(([row, column]) => {
        const { x, y } = map.rectangle(row, column), inside = (at) => Math.round(at) + 4;
        const at = 4 * (inside(y - top) * width + inside(x - left));
        return [[...data.slice(at, at + 3)], map.paintOf(row, column).rgb];
    }))(map.canvas.getBoundingClientRect(), map.context.getImageData(0, 0, map.canvas.width, map.canvas.height))"""
    pairs = maps.asked(page, LENS, painted, (0, 0), (3, 17), (7, 30), (7, 31))
    assert all(shown == said for shown, said in pairs), pairs
    assert len({tuple(shown) for shown, _ in pairs}) > 1


def test_a_map_in_a_hidden_tab_is_painted_when_it_is_shown(opened: Open) -> None:
    page = opened("large", fragment="#view=lens&step=2&position=1&layer=1")
    width = maps.asked(page, LENS, "map.width")
    page.evaluate("document.querySelector('.dl-panel').hidden = true")
    page.get_by_role("button", name="next step").click()
    page.locator(".dl-text button").nth(50).click()
    page.wait_for_selector(chromium.DRAWN)
    page.set_viewport_size({"width": 600, "height": 900})
    page.evaluate("document.querySelector('.dl-panel').hidden = false")
    for _ in range(50):  # until it is painted
        if shown := maps.asked(page, LENS, "map.x(50) >= map.gutter && map.x(51) <= map.width"):
            break
        page.wait_for_timeout(100)
    assert shown
    assert 0 < maps.asked(page, LENS, "map.width") < width
    assert maps.asked(page, LENS, "map.canvas.clientWidth") == maps.asked(page, LENS, "map.width")


def test_a_trace_is_computed_when_somebody_asks(opened: Open, served: Callable[..., str]) -> None:
    page = opened(f"{served('tiny-mdm', '--steps', '5')}#view=trace&step=0")
    compute, grid = page.get_by_role("button", name="Compute the trace"), page.get_by_role("grid", name=TRACE)
    expect(grid).to_be_hidden()
    compute.click()
    expect(grid).to_be_visible()
    assert re.search(r"layer \d, position 1, .* \(subject\): p \d", maps.label(page, TRACE, 0, 1))
    page.get_by_label("Restored states").select_option("mlp")
    expect(grid).to_be_hidden()
    expect(compute).to_be_visible()
    page.get_by_label("Restored states").select_option("resid")
    expect(grid).to_be_visible()
