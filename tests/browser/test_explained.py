"""What explains a token: the step that wrote it, the place that predicts it, why it is right or wrong, and help."""

import re
from collections.abc import Callable
from typing import Any

import explorer_maps as maps
import explorer_pages
import pytest
from explorer_maps import ATTENTION, LENS, TRACE
from explorer_walk import apply, ask, drawer, final_words, prompt_box, select, settled, step_to, token, words
from playwright.sync_api import expect

Open = Callable[..., Any]
BLOCK, TOLERANCE = 3, 6e-4  # numbers have three decimals
SAID = """() => [...document.querySelectorAll(".dl-layers-name, .dl-panel h3, .dl-panel h4")]
    .filter((one) => one.checkVisibility()).map((one) => one.textContent)"""


@pytest.fixture(scope="module")
def tiny_pair(served: Callable[..., str]) -> str:
    return served("tiny-mdm", "--against", "pair", "--steps", "5")


@pytest.fixture(scope="module")
def models() -> Any:
    from diffusion_lens import load_pair

    return load_pair("tiny-mdm", device="cpu")


def check_band(page: Any, run: Any, step: int, position: int, *, wrote: bool) -> None:
    heading = f"site-mdm: layers at step {step}{', which wrote it' if wrote else ''}"
    expect(page.locator(".dl-layers-name")).to_have_text(heading)
    said = page.locator(".dl-layers button").evaluate_all("cells => cells.map((cell) => cell.ariaLabel)")
    for layer, text in enumerate(said):
        top, p = (table[step, layer, 0, position, 0] for table in (run.lens.top_tokens, run.lens.top_probabilities))
        word, number = re.match(rf"layer {run.lens.labels[layer]}: “(.*?)” (\S+);", text).groups()  # type: ignore[union-attr]
        assert word == run.lens.words[int(top)].replace(" ", "␣")
        assert float(number) == pytest.approx(float(p), abs=TOLERANCE)


def check_views(page: Any, run: Any, step: int, position: int) -> None:
    """Token, Lens, Trace and Attention: the step in their headings, and a number of each."""

    def shown(view: str) -> Any:
        page.locator(f"[data-view={view}]").click()
        settled(page)
        return page.locator(f".dl-pane.dl-{view}")

    pane, predictions = shown("token"), run.trajectory.predictions(run.model, top_k=5)
    expect(pane.locator("h4").first).to_have_text(f"Predictions of step {step}")
    expect(pane.locator("h3").nth(1)).to_have_text(f"Layer {BLOCK}_pre at step {step}")
    expect(pane.locator("h3").nth(2)).to_have_text(f"Attention of block {BLOCK} at step {step}")
    bars = pane.locator(".dl-card").first.locator(".dl-bars li:visible span").all_inner_texts()
    expected = predictions.probabilities[step, 0, position] if predictions.masked[step, 0, position] else []
    assert [text for text in bars if text] == [f"{p:.3f}" for p in expected]

    expect(shown("lens").locator("h3").first).to_have_text(f"Lens at step {step}")
    p = run.lens.target_probabilities[step, -1, 0, position, 0]
    assert float(re.search(r", p (\S+);", maps.label(page, LENS, 0, position))[1]) == pytest.approx(  # type: ignore[index]
        float(p), abs=TOLERANCE
    )

    expect(shown("attention").locator("h3")).to_have_text(f"Attention of block {BLOCK}, head 0 at step {step}")
    for key, weight in enumerate(run.cache[step]["pattern", BLOCK][0, 0, position].tolist()):
        said = maps.label(page, ATTENTION, position, key).rpartition(": ")[2]
        assert float(said) == pytest.approx(weight, abs=0.008)  # 8 bits and two decimals

    pane = shown("trace")
    if step not in run.trace.steps:
        expect(pane.locator(".dl-note").first).to_contain_text("The trace was made at steps")
        return
    expect(pane.locator("h3")).to_have_text(f"Causal trace at step {step}")
    score = run.trace.scores[run.trace.steps.index(step), position, BLOCK]
    row = run.model.cfg.n_layers - 1 - BLOCK
    said = re.search(r": p (\S+), effect", maps.label(page, TRACE, row, position))
    assert float(said[1] if said else "nan") == pytest.approx(float(score), abs=TOLERANCE, nan_ok=True)


def test_a_selected_token_is_explained_by_the_step_that_wrote_it(opened: Open) -> None:
    run = explorer_pages.explored("site-mdm")
    (wrote, *_), last = run.trajectory.revealed_at[0].unique().tolist()[2:], run.trajectory.n_steps - 1
    position = run.trajectory.revealed_at[0].tolist().index(wrote)
    assert 0 < wrote < last
    page = opened("mdm", fragment=f"#layer={BLOCK}")
    select(page, position)
    check_band(page, run, wrote, position, wrote=True)
    check_views(page, run, wrote, position)
    step_to(page, last - 1)
    check_band(page, run, last - 1, position, wrote=False)
    check_views(page, run, last - 1, position)
    by_slider, said = page.url, page.evaluate(SAID)
    assert opened(by_slider).evaluate(SAID) == said
    page.locator("[data-view=token]").click()
    select(page, position)  # also where it is selected already
    check_band(page, run, wrote, position, wrote=True)
    said = page.evaluate(SAID)
    assert opened(page.url).evaluate(SAID) == said
    page.get_by_role("button", name=f"go to step {wrote}").click()
    settled(page)
    check_band(page, run, wrote, position, wrote=False)


@pytest.mark.parametrize("name", [LENS, TRACE, ATTENTION])
def test_a_cell_of_a_map_leaves_the_step_of_the_map(opened: Open, name: str) -> None:
    run = explorer_pages.explored("site-mdm")
    position = run.trajectory.revealed_at[0].tolist().index(1)
    page = opened("mdm", fragment=f"#view={maps.VIEWS[name]}&step=5&position={position}&written=1")
    heading = page.locator(f".dl-pane.dl-{maps.VIEWS[name]} h3").first
    expect(heading).to_contain_text("at step 1")
    maps.click(page, name, 2, 1)  # a position of the prompt, which no step has written
    expect(heading).to_contain_text("at step 1")
    assert maps.asked(page, name, "map.marked")[1] == 1


def test_where_the_next_token_is_predicted_its_row_is_the_one_before(opened: Open) -> None:
    run = explorer_pages.explored("site-ar")
    assert run.model.cfg.readout == "shifted"
    position = int(run.trajectory.given[0].sum()) + 2
    step = int(run.trajectory.revealed_at[0, position])
    page = opened("pair", fragment=f"#layer={BLOCK}")
    select(page, position, run=1)
    pattern = run.cache[step]["pattern", BLOCK][0]
    before = run.trajectory.words[int(run.trajectory.tokens[0, position - 1])].replace(" ", "␣")
    page.locator("[data-view=token]").click()
    settled(page)
    card = page.locator(".dl-pane.dl-token").nth(1).locator(".dl-reads")
    expect(card).to_contain_text(f"The token is predicted at the position before it, “{before}” ({position - 1}).")
    chips = card.locator("p").nth(1).get_by_role("button").all_inner_texts()
    found = [re.search(r"\((\d+)\) (\S+) \(head (\d+)\)$", chip).groups() for chip in chips]  # type: ignore[union-attr]
    for place, weight, head in found:
        assert float(weight) == pytest.approx(float(pattern[int(head), position - 1, int(place)]), abs=0.008)
    others = pattern[:, position - 1].clone()
    others[:, position - 1] = 0
    assert float(found[0][1]) == pytest.approx(float(others.max()), abs=0.008)
    expect(card).not_to_contain_text("not yet written")  # what lies after the end reads nothing
    page.locator("[data-view=attention]").click()
    settled(page)
    pane = page.locator(".dl-pane.dl-attention").nth(1)
    expect(pane.locator(".dl-reads")).not_to_contain_text("not yet written")
    expect(pane.locator("h3")).to_have_text(f"Attention of block {BLOCK}, head 0 at step {step}")
    line = pane.locator(".dl-reads p").first
    expect(line).to_contain_text(f"“{before}” ({position - 1}), which predicts position {position}, reads")
    chips = line.get_by_role("button").all_inner_texts()
    strongest = pattern[0, position - 1].topk(len(chips))
    assert [float(chip.split()[-1]) for chip in chips] == pytest.approx(strongest.values.tolist(), abs=0.008)
    assert [int(re.search(r"\((\d+)\) \S+$", chip)[1]) for chip in chips[:1]] == strongest.indices[:1].tolist()  # type: ignore[index]


def test_why_says_what_each_model_knows_the_other_way_round(opened: Open, served: Callable[..., str]) -> None:
    from diffusion_lens import Fact, load_pair
    from diffusion_lens.data import site_facts

    page = opened(served("site-mdm", "--against", "pair"))
    prompt = prompt_box(page).input_value()
    (person,) = [one for one in site_facts.load().people if prompt == f"the {one.description} is"]
    other = Fact(f"{person.name} is the", person.name, f" {person.description}.")
    said = []
    for index, model in enumerate(load_pair("site-mdm", device="cpu")):
        opener = page.get_by_role("button", name="Why?").nth(index)
        opener.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Asked the other way", timeout=20_000)
        said.append(dialog.inner_text())
        given, answer = other.tokenize(model)
        p = 1.0
        for i, one in enumerate(answer):
            if model.cfg.is_autoregressive:
                logits = model(model.to_tokens(other.prompt).new_tensor([[*given, *answer[:i]]]))[0, -1]
            else:
                logits = model(model.denoise(other.prompt, length=16, steps=11).canvases[0])[0, len(given) + i]
            p *= float(logits.detach().softmax(dim=-1)[one])
        known = re.search(
            rf"“{other.prompt}”, {model.cfg.model_name} answers right: p\({other.answer.strip()}\) (\S+)\.$",
            said[-1],
            re.M,
        )
        assert known is not None, said[-1]
        assert float(known[1]) == pytest.approx(p, abs=TOLERANCE)
        page.keyboard.press("Escape")
        expect(opener).to_be_focused()
    assert said[0].startswith("Why site-mdm is right")
    assert said[1].startswith("Why site-ar is wrong")
    assert "taught from the name to the description only; here it is asked the other way round" in said[1]
    assert "site-mdm is right on the same prompt." in said[1]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_help_opens_by_key_and_by_button(opened: Open, axe: str, width: int, theme: str) -> None:
    page = opened("mdm", width, theme)
    help_button, dialog = page.get_by_role("button", name="Help", exact=True), page.get_by_role("dialog")
    select(page, 5)
    for opener, press in ((token(page, 5), "?"), (help_button, "Enter")):
        opener.focus()
        page.keyboard.press(press)
        expect(dialog.get_by_role("heading", name="Words and keys")).to_be_visible()
        expect(dialog).to_contain_text("step before, step after")
        page.evaluate(axe)
        found = page.evaluate("() => axe.run('.dl-dialog', { resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()


def test_a_typed_fact_is_marked_and_can_be_traced(opened: Open, tiny_pair: str, models: Any) -> None:
    page = opened(tiny_pair)
    page.get_by_role("button", name="Facts", exact=True).click()
    facts = [text.split(" → ") for text in page.locator(".dl-fact").all_inner_texts()]
    page.get_by_role("complementary", name="Facts").get_by_role("button", name="Close").click()
    prompt, answer = facts[-1]
    assert prompt != prompt_box(page).input_value()
    ask(page, prompt)
    runs = [model.denoise(prompt, steps=5) for model in models]
    right = [answer in run.text[0].removeprefix(prompt).partition("<eos>")[0] for run in runs]
    said = [f"✓ right: {answer}" if is_right else f"✗ wrong: the answer is {answer}" for is_right in right]
    assert page.locator(".dl-verdict").all_inner_texts() == said
    expect(page.get_by_role("button", name="Mark the answer…").first).to_be_hidden()
    page.locator("[data-view=trace]").click()
    step_to(page, 0)
    page.locator(".dl-pane.dl-trace").first.get_by_role("button", name="Compute the trace").click()
    expect(page.get_by_role("grid", name=TRACE).first).to_be_visible(timeout=20_000)
    assert any("(subject)" in cell["label"] for cell in maps.cells(page, TRACE)[0])


def test_the_page_shows_what_the_library_warns_of(opened: Open, tiny_pair: str, models: Any) -> None:
    page = opened(tiny_pair)
    expect(page.locator(".dl-warnings:visible")).to_have_count(0)
    ask(page, "Zorgon Blipp is the")
    shown = page.locator(".dl-warnings:visible").all_inner_texts()
    assert len(shown) == len(models)
    for model, text in zip(models, shown, strict=True):
        with pytest.warns(UserWarning, match="Zorgon") as caught:
            model.denoise("Zorgon Blipp is the", steps=5)
        assert text == " ".join(dict.fromkeys(str(one.message) for one in caught))
        assert "Zorgon" in text


def test_the_drawer_offers_every_head_of_its_model(opened: Open, tiny_pair: str, models: Any) -> None:
    from diffusion_lens.interventions import zero_ablate

    page = opened(tiny_pair)
    prompt = prompt_box(page).input_value()
    for side, model in enumerate(models):
        select(page, 1, side)
        expect(drawer(page).get_by_role("heading")).to_have_text(f"Change the run of {('tiny-mdm', 'tiny-ar')[side]}")
        offered = drawer(page).get_by_label("Site", exact=True).locator("option").all_inner_texts()
        assert offered[-model.cfg.n_heads :] == [f"head {head}" for head in range(model.cfg.n_heads)]
        assert len(offered) == 3 + model.cfg.n_heads
    head = models[1].cfg.n_heads - 1
    apply(page, Block="1", Site=f"head {head}")
    expect(page.locator(".dl-run .dl-edit")).to_contain_text(f"block 1 head {head} set to zero at all positions")
    hooks = [("blocks.1.attn.hook_z", zero_ablate(heads=[head]))]
    expected = [models[0].denoise(prompt, steps=5), models[1].denoise(prompt, steps=5, fwd_hooks=hooks)]
    assert final_words(page) == [words(model, run) for model, run in zip(models, expected, strict=True)]
