"""A person writes prompts into the live page of a pair, and reads what the page shows of them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

Open = Callable[..., Any]
PROMPTS = ("Tilda Drusser is the", "Gustav Geisser", "Tilda Drusser")


@pytest.fixture(scope="module")
def single(served: Callable[..., str]) -> str:
    """Address of the page of one model, whose first prompt has an answer and a subject."""
    return served("tiny-mdm", "--steps", "5")


@pytest.fixture(scope="module")
def pair(served: Callable[..., str]) -> str:
    """Address of the page of a diffusion model and its AR baseline."""
    return served("tiny-mdm", "--against", "pair", "--steps", "5")


@pytest.fixture(scope="module")
def models() -> Any:
    from diffusion_lens import load_pair

    return load_pair("tiny-mdm", device="cpu")


def prompt_box(page: Any) -> Any:
    return page.get_by_label("Prompt", exact=True)


def press_run(page: Any) -> None:
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".dl-computing")).to_have_count(0)
    page.wait_for_selector("[data-state=ready]")


def texts(page: Any) -> list[list[str]]:
    """The tokens of the last step of each run that is shown, from left to right."""
    canvases = page.locator(".dl-run .dl-canvas").all()
    rows = [canvas.locator("[role=row]").last.locator("[role=gridcell]") for canvas in canvases]
    labels = [row.evaluate_all("cells => cells.map((cell) => cell.ariaLabel)") for row in rows]
    return [[re.search("“(.*?)”", label)[1] for label in row] for row in labels]


def words(model: Any, prompt: str, **settings: Any) -> list[str]:
    run = model.denoise(prompt, steps=5, **settings)
    return [re.sub(r"^ | $", "␣", word) for word in model.words(run.tokens[0].tolist())]


def test_the_prompt_that_was_run_stays_in_its_box(opened: Open, single: str, models: Any) -> None:
    page = opened(single)
    for prompt in PROMPTS:
        prompt_box(page).fill(prompt)
        press_run(page)
        expect(prompt_box(page)).to_have_value(prompt)
        assert texts(page) == [words(models[0], prompt)]
    press_run(page)
    assert texts(page) == [words(models[0], PROMPTS[-1])]


def test_a_run_that_is_chosen_shows_its_own_prompt(opened: Open, single: str) -> None:
    page = opened(single)
    first = prompt_box(page).input_value()
    prompt_box(page).fill(PROMPTS[0])
    press_run(page)
    prompt_box(page).fill("not run")
    page.get_by_label("Run", exact=True).select_option(label=f"tiny-mdm 1: {first}")
    expect(prompt_box(page)).to_have_value(first)
    page.get_by_text("Settings", exact=True).click()
    expect(page.get_by_label("Subject positions")).to_have_value("0, 2")


def test_what_is_typed_while_a_run_computes_is_kept(opened: Open, single: str) -> None:
    page = opened(single)
    page.route("**/api/run", lambda route: (page.wait_for_timeout(300), route.continue_()))
    prompt_box(page).fill(PROMPTS[0])
    page.get_by_role("button", name="Run", exact=True).click()
    prompt_box(page).fill(PROMPTS[1])
    expect(page.get_by_role("status")).to_contain_text("Done: Tilda Drusser")
    expect(prompt_box(page)).to_have_value(PROMPTS[1])


def test_a_new_prompt_is_not_traced_with_the_old_answer(opened: Open, single: str) -> None:
    page = opened(single)
    trace = page.get_by_role("region", name="Causal trace")
    expect(trace.get_by_role("button", name="Compute the trace")).to_be_visible()
    page.get_by_text("Settings", exact=True).click()
    first, answer = prompt_box(page).input_value(), page.get_by_label("Answer")
    asked = answer.input_value()
    assert asked
    prompt_box(page).fill(PROMPTS[0])
    expect(answer).to_have_value("")
    prompt_box(page).fill(first)  # who takes the change back has the fact back
    expect(answer).to_have_value(asked)
    expect(page.get_by_label("Subject positions")).to_have_value("0, 2")
    prompt_box(page).fill(PROMPTS[0])
    press_run(page)
    expect(trace).to_contain_text("Give the answer and the subject's positions")
    expect(trace.get_by_role("button", name="Compute the trace")).to_have_count(0)
    expect(page.locator(".dl-inspector")).not_to_contain_text(f"“{asked.split()[0]}”: rank")


def test_an_answer_of_the_new_prompt_is_traced(opened: Open, single: str, models: Any) -> None:
    from diffusion_lens import Fact

    page = opened(single)
    fact = Fact("Tilda Drusser is the", "Tilda Drusser", " famous miner")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Answer").fill(fact.answer)
    prompt_box(page).fill(fact.prompt)
    page.get_by_label("Subject positions").fill("0, 2")
    press_run(page)
    expect(prompt_box(page)).to_have_value(fact.prompt)
    expect(page.get_by_label("Answer")).to_have_value(fact.answer)
    page.get_by_label("Step", exact=True).fill("0")
    page.get_by_role("button", name="Compute the trace").click()
    label = page.locator('.dl-trace [role=gridcell][data-row="0"][data-column="0"]')
    expect(label).to_have_attribute("aria-label", re.compile(r"\(subject\): p \d"))


def test_run_computes_both_models_of_a_pair(opened: Open, pair: str, models: Any) -> None:
    page = opened(pair)
    for prompt in PROMPTS[:2]:
        prompt_box(page).fill(prompt)
        press_run(page)
        assert texts(page) == [words(model, prompt) for model in models]
        expect(prompt_box(page)).to_have_value(prompt)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Sampler").select_option("ancestral")
    page.get_by_label("Guidance").fill("0.5")
    press_run(page)
    guided = words(models[0], PROMPTS[1], sampler="ancestral", cfg_scale=0.5)
    assert texts(page) == [guided, words(models[1], PROMPTS[1])]
    page.get_by_label("Model").select_option("tiny-ar")
    page.get_by_label("Guidance").fill("0")
    press_run(page)
    assert texts(page) == [words(models[1], PROMPTS[1])]


def test_an_edit_of_one_model_keeps_the_other_beside_it(opened: Open, pair: str, models: Any) -> None:
    from diffusion_lens.interventions import zero_ablate

    page = opened(pair)
    prompt = prompt_box(page).input_value()
    for side, model in enumerate(models):
        page.locator(".dl-run").nth(side).locator(".dl-text button").nth(1).click()
        page.wait_for_selector("[data-state=ready]")
        layer = page.get_by_label("Layer", exact=True).input_value()
        page.get_by_role("button", name="Apply").click()
        expect(page.locator(".dl-edit")).to_contain_text(f"block {layer} attention set to zero")
        expect(page.locator(".dl-computing")).to_have_count(0)
        shown = [words(each, prompt) for each in models]
        shown[side] = words(model, prompt, fwd_hooks=[(f"blocks.{layer}.hook_attn_out", zero_ablate())])
        assert texts(page) == shown
        page.get_by_role("button", name=re.compile("^Remove:")).click()
        expect(page.locator(".dl-edit")).to_have_count(0)
        assert texts(page) == [words(each, prompt) for each in models]


def test_after_a_refused_prompt_nothing_is_being_computed(opened: Open, single: str, models: Any) -> None:
    page = opened(single)
    before, status = texts(page), page.get_by_role("status")
    page.get_by_text("Settings", exact=True).click()
    for refused, message in (("steps", "steps=0"), ("", "text of row 0 is empty"), ("guidance", "cfg_scale")):
        if refused == "steps":
            page.locator("form").evaluate("(form) => (form.noValidate = true)")
            page.get_by_label("Steps", exact=True).first.fill("0")
        elif refused == "":
            page.get_by_label("Steps", exact=True).first.fill("5")
            prompt_box(page).fill("")
        else:
            prompt_box(page).fill(PROMPTS[0])
            page.get_by_label("Guidance").fill("1e300")
        press_run(page)
        expect(page.get_by_role("alert")).to_contain_text(message)
        expect(status).to_have_text("No run was computed.")
        assert texts(page) == before
    page.get_by_label("Guidance").fill("0")
    press_run(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert texts(page) == [words(models[0], PROMPTS[0])]
    refusals = [problem for problem in opened.problems if "400 (Bad Request)" in problem]
    assert len(refusals) == 3
    opened.problems[:] = [problem for problem in opened.problems if problem not in refusals]
