"""The live page of the real command: runs are computed, changed, undone and compared, and equal the library's."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from explorer_walk import (
    apply,
    ask,
    difference,
    drawer,
    final_words,
    labels,
    press_run,
    prompt_box,
    select,
    settings,
    settled,
    step_to,
    words,
)
from playwright.sync_api import expect

Open = Callable[..., Any]
PROMPT = "Tilda Drusser is the"
SUBJECT = "Subject: first position, one past its last"


@pytest.fixture(scope="module")
def address(served: Callable[..., str]) -> str:
    """Address of a live page that `diffusion-lens explore` serves."""
    return served("tiny-mdm", "--steps", "5")


@pytest.fixture(scope="module")
def model() -> Any:
    from diffusion_lens import HookedDiffusionTransformer

    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


def prompt_of(page: Any) -> str:
    return str(prompt_box(page).input_value())


def said_differences(page: Any) -> list[str]:
    """What differs between the two runs that are shown, from the changed one."""
    return page.locator(".dl-differs button").all_inner_texts()


def forcing(model: Any, position: int, step: int, token: int) -> list[tuple[str, Any]]:
    from diffusion_lens.interventions import at_steps

    def force(tokens: Any, hook: Any) -> Any:
        tokens = tokens.clone()
        tokens[:, position] = token
        return tokens

    return [("denoise.hook_tokens", at_steps(force, step))]


def test_the_first_run_is_that_of_the_library(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    assert final_words(page) == [words(model, model.denoise(prompt_of(page), steps=5))]


def test_a_forced_token_changes_the_run_from_its_step(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    step, position = 2, int(base.given[0].sum()) + 1
    token = int(model.to_tokens(" the", prepend_bos=False)[0, 0])
    step_to(page, step - 1)  # the canvas after that step, which the next one reads
    select(page, position)
    drawer(page).get_by_label("Token", exact=True).fill(model.words([token])[0])
    drawer(page).get_by_role("button", name="Write it").click()
    settled(page)
    expect(page.locator(".dl-run .dl-edit")).to_contain_text(f"position {position} set to “the” before step {step}")
    changed = model.denoise(prompt_of(page), steps=5, fwd_hooks=forcing(model, position, step, token))
    assert final_words(page) == [words(model, base), words(model, changed)]  # side by side
    said = difference(changed, base, model)
    assert said
    assert said_differences(page) == said
    page.locator(".dl-differs button").first.click()  # goes to where they differ first
    settled(page)
    assert page.get_by_label("Step", exact=True).input_value() == said[0].rpartition(" ")[2]
    at = re.search(r"; the base run has (.*)", labels(page, 1)[position])
    assert at is not None


def test_a_token_forced_over_a_revealed_one_is_not_called_revealed(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    position = int((base.revealed_at[0] == 0).nonzero()[0])
    page.locator(".dl-more").click()
    step_to(page, 2)
    select(page, position)
    drawer(page).get_by_label("Token", exact=True).fill("the")
    drawer(page).get_by_role("button", name="Write it").click()
    settled(page)
    step_to(page, 3)
    assert "set by an intervention in place of the token of step 0" in labels(page, 1)[position]
    step_to(page, 1)
    assert "revealed at step 0 with confidence" in labels(page, 1)[position]


def test_a_token_is_masked_again(opened: Open, address: str) -> None:
    page = opened(address)
    step_to(page, 4)
    select(page, 0)
    drawer(page).get_by_role("button", name="Mask it instead").click()
    settled(page)
    expect(page.locator(".dl-run .dl-edit")).to_contain_text("position 0 masked before step 4")


def test_a_change_is_made_and_undone_with_the_keyboard(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import at_steps, zero_ablate

    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    step_to(page, 1)
    select(page, 5)
    page.locator(".dl-layers button").nth(2).focus()
    page.keyboard.press("Enter")
    settled(page)
    page.get_by_role("button", name="Change block 2…").focus()
    page.keyboard.press("Enter")
    drawer(page).get_by_label("Site", exact=True).select_option("mlp")
    drawer(page).get_by_label("Steps", exact=True).select_option("this")
    expect(drawer(page)).to_contain_text("block 2 MLP set to zero at all positions, step 1")
    press = drawer(page).get_by_role("button", name="Apply", exact=True)
    press.focus()
    page.keyboard.press("Enter")
    settled(page)
    expect(page.locator(".dl-run .dl-edit")).to_contain_text("block 2 MLP set to zero at all positions, step 1")
    expect(press).to_be_focused()
    ablated = model.denoise(prompt_of(page), steps=5, fwd_hooks=[("blocks.2.hook_mlp_out", at_steps(zero_ablate(), 1))])
    assert final_words(page) == [words(model, base), words(model, ablated)]
    assert said_differences(page) == difference(ablated, base, model)
    page.keyboard.press("Escape")
    page.locator(".dl-run").get_by_role("button", name=re.compile("^Undo:")).focus()
    page.keyboard.press("Enter")
    settled(page)
    expect(page.locator(".dl-edit:visible")).to_have_count(0)
    assert final_words(page) == [words(model, base)]


def test_a_block_without_its_attention_at_all_steps(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import zero_ablate

    page = opened(address)
    base = model.denoise(prompt_of(page), steps=5)
    apply(page, Block="0", Site="attn")
    ablated = model.denoise(prompt_of(page), steps=5, fwd_hooks=[("blocks.0.hook_attn_out", zero_ablate())])
    assert final_words(page) == [words(model, base), words(model, ablated)]
    said = difference(ablated, base, model)
    assert said
    assert said_differences(page) == said
    apply(page, Block="1", Site="mlp")  # one more change is one more sentence
    expect(page.locator(".dl-run .dl-edit")).to_have_count(2)
    hooks = [("blocks.0.hook_attn_out", zero_ablate()), ("blocks.1.hook_mlp_out", zero_ablate())]
    both = model.denoise(prompt_of(page), steps=5, fwd_hooks=hooks)
    assert final_words(page) == [words(model, base), words(model, both)]
    page.locator(".dl-run").get_by_role("button", name=re.compile("^Undo: block 0")).click()
    settled(page)
    expect(page.locator(".dl-run .dl-edit")).to_have_count(1)
    left = model.denoise(prompt_of(page), steps=5, fwd_hooks=hooks[1:])
    assert final_words(page) == [words(model, base), words(model, left)]


def test_an_undone_change_leaves_the_focus_near(opened: Open, address: str) -> None:
    page = opened(address)
    apply(page, Site="mlp")
    drawer(page).get_by_role("button", name="Close").click()
    page.locator(".dl-run").get_by_role("button", name=re.compile("^Undo:")).focus()
    page.keyboard.press("Enter")
    settled(page)
    expect(page.locator(".dl-run .dl-edit")).to_have_count(0)
    expect(page.locator(".dl-run").get_by_role("button", name="Change…")).to_be_focused()


def test_a_state_of_another_prompt_is_patched(opened: Open, address: str, model: Any) -> None:
    from diffusion_lens.interventions import swap

    page = opened(address)
    source = prompt_of(page)
    of_source = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('run')")
    ask(page, PROMPT)
    assert final_words(page) == [words(model, model.denoise(PROMPT, steps=5))]
    select(page, 1)
    drawer(page).get_by_label("Change", exact=True).select_option("patch")
    expect(drawer(page)).to_contain_text("a patch from it changes nothing")
    expect(drawer(page).get_by_role("button", name="Apply", exact=True)).to_be_disabled()
    apply(page, From=of_source, Block="1", Site="resid", Positions="this")
    expect(page.locator(".dl-run .dl-edit")).to_contain_text("patched from")
    point = "blocks.1.hook_resid_post"
    _, cache = model.denoise_with_cache(source, names_filter=point, steps=5)
    patched = model.denoise(PROMPT, steps=5, fwd_hooks=[(point, swap(cache, [1]))])
    base = model.denoise(PROMPT, steps=5)
    assert final_words(page) == [words(model, base), words(model, patched)]
    assert said_differences(page) == difference(patched, base, model)


def test_two_runs_of_a_model_stand_beside_each_other(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    first = prompt_of(page)
    ask(page, PROMPT)
    page.get_by_label("beside", exact=True).select_option(label=f"tiny-mdm 1: {first}")
    settled(page)
    expect(page.locator(".dl-run")).to_have_count(2)
    shown = final_words(page)
    assert sorted(shown) == sorted(words(model, model.denoise(prompt, steps=5)) for prompt in (PROMPT, first))


def test_the_settings_are_those_of_the_next_run(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    settings(page, Steps=3, Temperature=0.7, Seed=4)
    press_run(page)
    expect(page.get_by_label("Step", exact=True)).to_have_attribute("max", "2")
    run = model.denoise(prompt_of(page), steps=3, temperature=0.7, seed=4)
    assert final_words(page) == [words(model, run)]


def test_a_long_run_shows_its_progress_and_is_cancelled(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    before = final_words(page)
    settings(page, Steps=4000)
    page.get_by_role("button", name="Run", exact=True).click()
    progress = page.locator(".dl-progress")
    expect(progress).to_contain_text(re.compile(r"denoising \d+ of 4000 · \d+ s"))
    done = [float(progress.locator("progress").get_attribute("value"))]
    page.wait_for_timeout(400)
    done.append(float(progress.locator("progress").get_attribute("value")))
    assert 0 <= done[0] < done[1] < 4000
    begun = time.monotonic()
    progress.get_by_role("button", name="Cancel").click()
    settled(page)
    expect(progress).to_be_hidden()
    assert time.monotonic() - begun < 2
    expect(page.get_by_role("status")).to_have_text("Cancelled: computing the run.")
    assert final_words(page) == before
    settings(page, Steps=5)
    ask(page, PROMPT)
    assert final_words(page) == [words(model, model.denoise(PROMPT, steps=5))]


def test_errors_of_the_library_are_alerts_above_the_runs(opened: Open, address: str, model: Any) -> None:
    page = opened(address)
    before, alert, prompt = final_words(page), page.get_by_role("alert"), prompt_of(page)
    page.locator("form.dl-form").evaluate("(form) => (form.noValidate = true)")
    for values, message in (
        (
            {"Answer": " nobody knows <b>this</b>", SUBJECT: "3, 900"},
            "does not know 'nobody', 'knows', '<b>this</b>'",
        ),
        ({"Answer": "", SUBJECT: "", "Steps": 0}, "steps=0"),
        ({"Steps": 5, "Guidance": "1e300"}, "cfg_scale"),
    ):
        settings(page, **values)
        press_run(page)
        expect(alert).to_contain_text(message)
        assert final_words(page) == before
        expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()
    settings(page, Guidance=0)
    ask(page, "")
    expect(alert).to_contain_text("text of row 0 is empty")
    assert final_words(page) == before
    ask(page, prompt)
    expect(alert).to_be_hidden()
    assert final_words(page) == [words(model, model.denoise(prompt, steps=5))]
    opened.problems[:] = [problem for problem in opened.problems if "400 (Bad Request)" not in problem]


def test_without_the_token_nothing_is_served(browser: Any, address: str) -> None:
    page = browser.new_page()
    answer = page.goto(address.partition("?")[0])
    assert answer.status == 403
    page.close()
