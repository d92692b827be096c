"""A person writes prompts into the live page of a pair, says what the answer is, and reads what the page shows."""

from collections.abc import Callable
from typing import Any

import pytest
from explorer_walk import (
    apply,
    ask,
    difference,
    final_words,
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


def run_of(model: Any, prompt: str, **settings: Any) -> list[str]:
    return words(model, model.denoise(prompt, steps=5, **settings))


def test_a_typed_prompt_is_run_on_both_models(opened: Open, pair: str, models: Any) -> None:
    page = opened(pair)
    for prompt in PROMPTS[:2]:
        ask(page, prompt)
        expect(prompt_box(page)).to_have_value(prompt)
        assert final_words(page) == [run_of(model, prompt) for model in models]
        assert page.locator("h2").all_inner_texts() == ["tiny-mdm", "tiny-ar"]
    settings(page, Sampler="ancestral", Guidance=0.5)
    press_run(page)
    guided = run_of(models[0], PROMPTS[1], sampler="ancestral", cfg_scale=0.5)
    assert final_words(page) == [guided, run_of(models[1], PROMPTS[1])]
    settings(page, Guidance=0, Model="1")
    press_run(page)
    assert final_words(page) == [run_of(models[1], PROMPTS[1])]


def test_a_new_prompt_plays_where_motion_is_allowed(opened: Open, pair: str) -> None:
    page = opened(pair, fragment="#step=4", moves=True)
    ask(page, PROMPTS[0])
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    last = str(page.get_by_label("Step", exact=True).get_attribute("max"))
    expect(page.get_by_label("Step", exact=True)).to_have_value(last, timeout=10_000)


def test_the_prompt_that_was_run_stays_in_its_box(opened: Open, single: str, models: Any) -> None:
    page = opened(single)
    for prompt in PROMPTS:
        ask(page, prompt)
        expect(prompt_box(page)).to_have_value(prompt)
        assert final_words(page) == [run_of(models[0], prompt)]
    press_run(page)
    assert final_words(page) == [run_of(models[0], PROMPTS[-1])]


def test_a_run_that_is_chosen_shows_its_own_prompt(opened: Open, single: str) -> None:
    page = opened(single)
    first = prompt_box(page).input_value()
    settings(page)
    subject = page.get_by_label("Subject: first position").input_value()
    assert subject
    ask(page, PROMPTS[0])
    page.get_by_label("Run", exact=True).select_option(label=f"tiny-mdm 1: {first}")
    settled(page)
    expect(prompt_box(page)).to_have_value(first)
    settings(page)
    expect(page.get_by_label("Subject: first position")).to_have_value(subject)


def test_what_is_typed_while_a_run_computes_is_kept(opened: Open, single: str) -> None:
    page = opened(single)
    page.route("**/api/run", lambda route: (page.wait_for_timeout(300), route.continue_()))
    prompt_box(page).fill(PROMPTS[0])
    page.get_by_role("button", name="Run", exact=True).click()
    prompt_box(page).fill(PROMPTS[1])
    settled(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    expect(prompt_box(page)).to_have_value(PROMPTS[1])


def test_answer_and_subject_belong_to_their_prompt(opened: Open, single: str) -> None:
    page = opened(single)
    settings(page)
    first, answer = prompt_box(page).input_value(), page.get_by_label("Answer", exact=True)
    asked = answer.input_value()
    assert asked
    prompt_box(page).fill(PROMPTS[0])
    expect(answer).to_have_value("")
    prompt_box(page).fill(first)  # who takes the change back has the fact back
    expect(answer).to_have_value(asked)


def test_a_new_prompt_is_asked_for_its_answer_and_subject(opened: Open, pair: str, models: Any) -> None:
    """Suggestions are what the models write and the names in the prompt; then there are verdicts, and traces."""
    from diffusion_lens import Fact
    from diffusion_lens.analysis import trace_trajectory

    page, prompt = opened(pair), PROMPTS[0]
    ask(page, prompt)
    expect(page.locator(".dl-verdict:visible")).to_have_count(0)
    page.get_by_role("button", name="Mark the answer…").first.click()
    form = page.get_by_role("form", name="Answer and subject")
    expect(form.get_by_label("What is the right answer?")).to_be_focused()
    runs = [model.denoise(prompt, steps=5) for model in models]
    answer = " " + runs[0].text[0].removeprefix(prompt).partition("<eos>")[0].strip()
    chip = form.get_by_role("button", name=answer.strip(), exact=True)
    assert "tiny-mdm wrote this" in chip.get_attribute("title")
    chip.click()
    expect(form.get_by_label("What is the right answer?")).to_have_value(answer)
    form.get_by_role("button", name="Tilda Drusser", exact=True).click()
    expect(form.get_by_label("Which positions are the subject")).to_have_value("0, 2")
    form.get_by_role("button", name="Mark and trace").click()
    settled(page)
    expect(form).to_be_hidden()
    is_right = [answer.strip() in run.text[0].partition("<eos>")[0] for run in runs]
    verdicts = [
        f"✓ right: {answer.strip()}" if right else f"✗ wrong: the answer is {answer.strip()}" for right in is_right
    ]
    assert page.locator(".dl-verdict").all_inner_texts() == verdicts
    step_to(page, 0)
    select(page, 1)
    page.get_by_role("tab", name="Token", exact=True).click()
    settled(page)
    page.locator(".dl-layers").first.locator("button").nth(2).click()
    settled(page)
    pane = page.locator(".dl-pane.dl-token").first
    pane.get_by_role("button", name="What does restoring the residual stream do?").click()
    fact = Fact(prompt, "Tilda Drusser", answer)
    trace = trace_trajectory(models[0], fact, steps=[0], trajectory=runs[0], window=1, samples=10)
    score, effect = float(trace.scores[0, 1, 2]), float(trace.scores[0, 1, 2] - trace.corrupted[0])
    effect_text = f"{effect:+.3f}".replace("-", "−")
    said = f"Restoring the residual stream of block 2 here: p(answer) {score:.3f}, effect {effect_text}."
    expect(pane).to_contain_text(said, timeout=20_000)


def test_each_model_has_the_subject_where_its_own_tokens_are(opened: Open, pair: str) -> None:
    page, asked = opened(pair), []
    subjects = [{"text": "Drusser", "spans": {"0": [1, 2], "1": [2, 4]}, "why": "capitalised"}]
    page.route("**/api/suggest", lambda route: route.fulfill(json={"answers": [], "subjects": subjects}))
    ask(page, PROMPTS[0])
    page.on("request", lambda one: asked.append(one.post_data_json) if one.url.endswith("/api/run") else None)
    for typed in (None, "0, 2"):
        page.get_by_role("button", name="Mark the answer…").first.click()
        form = page.get_by_role("form", name="Answer and subject")
        form.get_by_role("button", name="Drusser", exact=True).click()
        if typed:
            form.get_by_label("Which positions are the subject").fill(typed)
        form.get_by_role("button", name="Mark and trace").click()
        settled(page)
    assert [spec["subject"] for spec in asked] == [[1, 2], [2, 4], [0, 2], [0, 2]]


def test_the_facts_suggest_answers(opened: Open, pair: str) -> None:
    """To somebody who has named a subject alone."""
    page = opened(pair)
    page.get_by_role("button", name="Facts", exact=True).click()
    settled(page)
    facts = [text.split(" → ") for text in page.locator(".dl-fact").all_inner_texts()]
    prompt, answer = next(fact for fact in facts if fact[0] != prompt_box(page).input_value())
    page.get_by_role("complementary", name="Facts").get_by_role("button", name="Close").click()
    prompt_box(page).fill(prompt)
    settings(page, **{"Subject: first position, one past its last": "0, 1"})
    press_run(page)
    page.get_by_role("button", name="Mark the answer…").first.click()
    chip = page.get_by_role("form", name="Answer and subject").get_by_role("button", name=answer, exact=True)
    assert "an answer of the table" in chip.get_attribute("title")
    page.keyboard.press("Escape")
    expect(page.get_by_role("form", name="Answer and subject")).to_be_hidden()


def test_a_change_of_one_model_keeps_the_other_beside_it(opened: Open, pair: str, models: Any) -> None:
    from diffusion_lens.interventions import zero_ablate

    page = opened(pair)
    prompt = prompt_box(page).input_value()
    bases = [model.denoise(prompt, steps=5) for model in models]
    for side, model in enumerate(models):
        select(page, 1, side)
        page.locator(".dl-run").nth(side).get_by_role("button", name="Change…").click()
        apply(page, Block="1", Site="attn")
        changed = model.denoise(prompt, steps=5, fwd_hooks=[("blocks.1.hook_attn_out", zero_ablate())])
        shown = [words(each, base) for each, base in zip(models, bases, strict=True)]
        shown[side] = words(model, changed)
        assert final_words(page) == shown
        run = page.locator(".dl-run").nth(side)
        assert run.locator(".dl-differs button").all_inner_texts() == difference(changed, bases[side], model)
        run.get_by_role("button", name="Undo: ").click()
        settled(page)
        expect(page.locator(".dl-run .dl-edit")).to_have_count(0)
        assert final_words(page) == [words(each, base) for each, base in zip(models, bases, strict=True)]
