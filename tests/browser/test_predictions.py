"""Predictions as colours of the canvas and in the view of a token: what Chromium shows equals the library's tables."""

import re
from collections.abc import Callable
from typing import Any

import chromium
import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import CANVAS
from playwright.sync_api import expect

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Any:
    return explorer_pages.explored("site-mdm")


@pytest.fixture(scope="module")
def predictions(run: Any) -> Any:
    return run.trajectory.predictions(run.model)


def cells(page: Any) -> dict[tuple[int, int], tuple[str, str, str]]:
    """Label, marks and text of every cell of the canvas, by step and position."""
    return {
        (step, pos): (cell["label"], cell.get("kind", ""), cell["text"])
        for step, line in enumerate(maps.cells(page, CANVAS))
        for pos, cell in enumerate(line)
    }


def test_cells_say_what_the_step_predicted(opened: Open, predictions: Any) -> None:
    page = opened("mdm", fragment="#view=canvas&step=0")
    page.get_by_label("Colours show").select_option("entropy")
    page.wait_for_selector(chromium.DRAWN)
    assert "canvas=entropy" in page.url
    assert page.locator(".dl-map-pane .dl-legend span").all_inner_texts()[::2] == [
        "entropy (nats); italics: not yet written",
        "0",
    ]
    for (step, pos), (label, kind, text) in cells(page).items():
        numbers = re.search(r"; predicted “(.*)” (\S+), margin (\S+), entropy (\S+) nats", label)
        assert (numbers is not None) == bool(predictions.masked[step, 0, pos]) == ("plain" not in kind)
        if numbers is None:
            continue
        word = predictions.words[int(predictions.likeliest[step, 0, pos])]
        assert numbers[1] == word.replace(" ", "␣")
        expected = (predictions.probabilities[step, 0, pos, 0], predictions.margin[step, 0, pos])
        for shown, number in zip(numbers.groups()[1:], (*expected, predictions.entropy[step, 0, pos]), strict=True):
            assert float(shown) == pytest.approx(float(number), abs=6e-4)
        if "guess" in kind:
            assert text == word.strip()


def test_commitment_is_marked_where_it_begins(opened: Open, run: Any, predictions: Any) -> None:
    from diffusion_lens.analysis import commitment

    page = opened("mdm", fragment="#view=canvas&step=0&canvas=commitment")
    steps = commitment(predictions).committed_at[0].tolist()
    shown = cells(page)
    marked = {pos: step for (step, pos), (_, kind, _) in shown.items() if "commits" in kind}
    assert marked == {pos: step for pos, step in enumerate(steps) if step >= 0}
    assert any(step < run.trajectory.revealed_at[0, pos] for pos, step in marked.items())
    for (step, pos), (label, _, _) in shown.items():
        assert ("; commits here" in label) == (steps[pos] == step)
        assert (f"; committed since step {steps[pos]}" in label) == (0 <= steps[pos] < step)


def test_a_masked_cell_shows_its_tokens_and_their_course(opened: Open, run: Any, predictions: Any) -> None:
    page, step, pos = opened("mdm", fragment="#view=canvas&step=0&canvas=probability"), 1, 9
    maps.click(page, CANVAS, step, pos)
    expect(page.get_by_role("status")).to_contain_text(f"step {step}, position {pos}, masked; predicted “")
    # By keyboard: down to the next step.
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("status")).to_contain_text(f"step {step + 1}, position {pos}, masked; predicted “")
    page.locator(".dl-map-pane").get_by_role("button", name="as Python").click()
    code = page.get_by_role("dialog").locator("pre").inner_text()
    assert "predictions = trajectory.predictions(model, top_k=5)" in code
    assert f"predictions.steps.index({step + 1})" in code
    page.keyboard.press("Escape")
    page.keyboard.press("[")
    page.wait_for_selector(chromium.DRAWN)
    page.locator("[data-view=token]").click()
    card = page.locator(".dl-token .dl-card").first
    expect(card.locator("h4")).to_have_text(f"Predictions of step {step}")
    rows = card.locator(".dl-bars li:visible")
    assert [row.locator("span").inner_text() for row in rows.all()] == [
        f"{p:.3f}" for p in predictions.probabilities[step, 0, pos].tolist()
    ]
    expect(card).to_contain_text(
        f"Entropy {predictions.entropy[step, 0, pos]:.3f} nats. Margin {predictions.margin[step, 0, pos]:.3f}."
    )
    course = card.get_by_role("img").get_attribute("aria-label")
    final = run.trajectory.tokens[0, pos]
    for place in range(run.trajectory.n_steps):
        top = predictions.tokens[place, 0, pos] == final
        wanted = f"step {place}: {predictions.probabilities[place, 0, pos][top].item():.3f}" if top.any() else None
        assert wanted in course if wanted else f"step {place}:" not in course


def test_a_written_token_has_the_predictions_of_its_step(opened: Open, run: Any, predictions: Any) -> None:
    pos = int(run.trajectory.revealed_at[0].eq(0).nonzero()[0])
    page = opened("mdm", fragment=f"#view=token&step=4&position={pos}&written=1")
    card = page.locator(".dl-token .dl-card").first
    expect(card.locator("h4")).to_have_text("Predictions of step 0")
    card.get_by_role("button", name="as Python").click()
    assert "predictions.steps.index(0)" in page.get_by_role("dialog").locator("pre").inner_text()


def test_under_uniform_noise_each_step_has_its_own(opened: Open, tmp_path: Any) -> None:
    from diffusion_lens import HookedDiffusionTransformer

    model = HookedDiffusionTransformer.from_pretrained("tiny-uniform")
    run = model.denoise("Gustav Geisser is the", length=14, steps=8, seed=2, predictions=5)
    changed = int(run.revealed_at[0][(run.revealed_at[0] >= 0) & (run.revealed_at[0] < 7)].max())
    pos, path = run.revealed_at[0].tolist().index(changed), explorer_pages.write(run.explore(), tmp_path, "uniform")
    page = opened(f"{path.as_uri()}#view=token&step={changed + 1}&position={pos}")
    card = page.locator(".dl-token .dl-card").first
    expect(card.locator("h4")).to_have_text(f"Predictions of step {changed + 1}")
    expect(card.locator(".dl-state")).to_contain_text(f"last changed at step {changed}")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("layer", ["entropy", "commitment"])
def test_layers_are_readable(opened: Open, axe: str, layer: str, theme: str) -> None:
    page = opened("mdm", 400 if layer == "entropy" else 1280, theme, f"#view=canvas&step=2&canvas={layer}")
    page.add_script_tag(content=axe)
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_damaged_predictions_hide_their_layers_only(opened: Open, pages: Any, tmp_path: Any) -> None:
    path = tmp_path / "damaged.html"
    text = pages["mdm"].read_text(encoding="utf-8")
    path.write_text(re.sub(r'(data-chunk="predictions">)[^<]{40}', r"\1", text), encoding="utf-8")
    page = opened("mdm")
    page.goto(f"{path.as_uri()}#view=canvas&step=2&canvas=entropy")
    expect(page.locator(".dl-panel .dl-note:visible")).to_contain_text("could not be read")
    page.get_by_label("Colours show").select_option("confidence")
    expect(page.locator(".dl-panel .dl-map")).to_be_visible()
    expect(page.locator(".dl-panel .dl-note:visible")).to_have_count(0)


def test_a_page_without_predictions_says_what_to_record(opened: Open, run: Any, tmp_path: Any) -> None:
    page = opened(explorer_pages.write(run.trajectory.explore(), tmp_path, "plain").as_uri())
    assert not page.get_by_label("Colours show").is_visible()
    assert not page.get_by_role("img").is_visible()
    expect(page.locator(".dl-token .dl-card").first).to_contain_text("denoise(..., predictions=5)")
    page.goto(f"{page.url.partition('#')[0]}#view=canvas&step=2&canvas=entropy")
    page.reload()
    page.wait_for_selector(chromium.DRAWN)
    assert page.locator(".dl-map-pane .dl-legend span").first.inner_text() == "confidence"
