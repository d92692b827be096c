"""The live page of the real command: runs are computed, forced, ablated and compared, and equal the library's."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def address(served: Callable[..., str]) -> str:
    """Address of a live page that `diffusion-lens explore` serves."""
    return served("tiny-mdm", "--steps", "5")


@pytest.fixture(scope="module")
def model() -> Any:
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


def at(page: Any, step: int, position: int) -> None:
    page.get_by_label("Step", exact=True).fill(str(step))
    page.locator(".dl-text button").nth(position).click()
    page.wait_for_selector("[data-state=ready]")


def final_words(page: Any) -> list[str]:
    """The tokens of the last row of the canvas, read from the labels."""
    labels = (
        page.locator(".dl-canvas [role=row]")
        .last.locator("[role=gridcell]")
        .evaluate_all("cells => cells.map((cell) => cell.ariaLabel)")
    )
    return [re.search(r"“(.*?)”", label)[1] for label in labels]


def words(model: Any, trajectory: Any) -> list[str]:
    return [re.sub(r"^ | $", "␣", word) for word in model.words(trajectory.tokens[0].tolist())]


def prompt_of(page: Any) -> str:
    return page.get_by_label("Prompt", exact=True).input_value()


def test_the_first_run_is_that_of_the_library(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    assert final_words(page) == words(model, model.denoise(prompt_of(page), steps=5))


def test_a_forced_token_changes_the_run_from_its_step(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import at_steps

    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    step, position = 2, int(base.given[0].sum()) + 1
    token = next(iter(model.to_tokens(" the", prepend_bos=False)[0].tolist()))
    at(page, step - 1, position)  # the canvas after that step, which the next one reads
    page.get_by_label("Token", exact=True).fill(model.words([token])[0])
    page.get_by_role("button", name="Force and go on").click()
    expect(page.get_by_role("status")).to_contain_text("Done: ")
    expect(page.locator(".dl-edit")).to_have_count(1)

    def force(tokens: Any, hook: Any) -> Any:
        tokens = tokens.clone()
        tokens[:, position] = token
        return tokens

    forced = model.denoise(prompt_of(page), steps=5, fwd_hooks=[("denoise.hook_tokens", at_steps(force, step))])
    assert final_words(page) == words(model, forced)
    differing = [i for i, (a, b) in enumerate(zip(words(model, base), words(model, forced), strict=True)) if a != b]
    shown = page.locator(".dl-changes button").all_inner_texts()
    assert [int(text.partition(":")[0]) for text in shown] == differing
    assert page.locator(".dl-changes span").inner_text().startswith(f"{len(differing)} token")


def test_a_token_forced_over_a_revealed_one_is_not_called_revealed(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    position = int((base.revealed_at[0] == 0).nonzero()[0])
    at(page, 2, position)
    page.get_by_label("Token", exact=True).fill(
        model.words([model.to_tokens(" the", prepend_bos=False)[0, 0].item()])[0]
    )
    page.get_by_role("button", name="Force and go on").click()
    expect(page.locator(".dl-edit")).to_have_count(1)
    cell = page.locator(f'.dl-canvas [data-row="3"][data-column="{position}"]')
    expect(cell).to_have_attribute("aria-label", re.compile("set by an intervention in place of the token of step 0"))
    row_before = page.locator(f'.dl-canvas [data-row="1"][data-column="{position}"]')
    expect(row_before).to_have_attribute("aria-label", re.compile("revealed at step 0 with confidence"))


def test_a_token_is_masked_again(opened: Open, address: str) -> None:
    page = opened(address)
    at(page, 4, 0)
    page.get_by_role("button", name="Mask it and go on").click()
    expect(page.get_by_role("status")).to_contain_text(re.compile("Done: |step"))
    expect(page.locator(".dl-edit")).to_contain_text("position 0 masked before step 4")


def test_an_ablation_by_clicking_is_that_of_the_library(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import at_steps, zero_ablate

    page = opened(address)
    at(page, 1, 5)
    page.locator('.dl-lens [role=gridcell][data-row="2"][data-column="5"]').click()
    page.wait_for_selector("[data-state=ready]")
    layer = int(page.get_by_label("Layer", exact=True).input_value())
    page.get_by_label("Site").select_option("mlp")
    page.get_by_label("Steps", exact=True).last.select_option("this")
    page.get_by_role("button", name="Apply").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".dl-edit")).to_contain_text(f"block {layer} MLP set to zero at all positions, step 1")
    page.wait_for_selector("[data-state=ready]")
    expect(page.get_by_role("button", name="Apply")).to_be_focused()
    hooks = [(f"blocks.{layer}.hook_mlp_out", at_steps(zero_ablate(), 1))]
    ablated = model.denoise(prompt_of(page), steps=5, fwd_hooks=hooks)
    assert final_words(page) == words(model, ablated)
    page.get_by_label("Lens shows").select_option("change of probability")
    page.wait_for_selector("[data-state=ready]")
    assert page.locator(".dl-lens .dl-legend span").first.inner_text() == "change of probability"
    label = page.locator('.dl-lens [role=gridcell][data-row="0"][data-column="5"]').get_attribute("aria-label")
    assert "; change of probability " in label
    page.get_by_role("button", name=re.compile("^Remove:")).click()
    expect(page.locator(".dl-edit")).to_have_count(0)
    assert final_words(page) == words(model, model.denoise(prompt_of(page), steps=5))


def test_a_state_of_another_prompt_is_patched_by_clicking(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import swap

    page = opened(address)
    source, prompt = prompt_of(page), "Tilda Drusser is the"
    of_source = page.get_by_label("Run", exact=True).input_value()
    assert model.to_tokens(prompt).shape == model.to_tokens(source).shape
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("Done: ")
    assert final_words(page) == words(model, model.denoise(prompt, steps=5))
    page.locator('.dl-lens [role=gridcell][data-row="2"][data-column="1"]').click()
    page.wait_for_selector("[data-state=ready]")
    layer = int(page.get_by_label("Layer", exact=True).input_value())
    page.get_by_label("Change", exact=True).select_option("patch")
    expect(page.locator(".dl-actions")).to_contain_text("a patch from it changes nothing")
    expect(page.get_by_role("button", name="Apply")).to_be_hidden()
    page.get_by_label("From", exact=True).select_option(of_source)
    page.get_by_label("Site").select_option("resid")
    page.get_by_label("Positions", exact=True).select_option("this")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".dl-edit")).to_contain_text("patched")
    page.wait_for_selector("[data-state=ready]")
    point = f"blocks.{layer}.hook_resid_post"
    _, cache = model.denoise_with_cache(source, names_filter=point, steps=5)
    patched = model.denoise(prompt, steps=5, fwd_hooks=[(point, swap(cache, [1]))])
    assert final_words(page) == words(model, patched)


def test_the_form_computes_another_run(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    prompt = prompt_of(page)
    page.get_by_text("Settings").click()
    page.get_by_label("Steps", exact=True).first.fill("3")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("4")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".dl-canvas [role=rowheader]")).to_have_count(3)
    assert final_words(page) == words(model, model.denoise(prompt, steps=3, temperature=0.7, seed=4))


def test_errors_of_the_library_are_alerts(opened: Open, address: str) -> None:
    page = opened(address)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Subject positions").fill("3, 900")
    page.get_by_label("Answer").fill(" nobody knows <b>this</b>")
    page.get_by_role("button", name="Run", exact=True).click()
    alert = page.get_by_role("alert")
    expect(alert).not_to_be_empty()
    assert page.get_by_role("button", name="Run", exact=True).is_enabled()
    opened.problems[:] = [problem for problem in opened.problems if "400 (Bad Request)" not in problem]


def test_without_the_token_nothing_is_served(browser: Any, address: str) -> None:
    page = browser.new_page()
    answer = page.goto(address.partition("?")[0])
    assert answer.status == 403
    page.close()


def test_the_live_page_is_accessible(opened: Open, address: str, axe: str) -> None:
    for width, theme in ((1280, "light"), (400, "dark")):
        page = opened(address, width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.evaluate(axe)
        found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")] == []
