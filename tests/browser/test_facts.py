"""The table of facts beside the canvas: measured, sorted, filtered, averaged, and each row a click away."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from explorer_walk import final_words, press_run, prompt_box, settings, settled, words
from playwright.sync_api import expect

Open = Callable[..., Any]
MEASURES = ("recalled", "p(answer)", "decided")
NAMES = ("tiny-mdm", "tiny-ar")


@pytest.fixture(scope="module")
def address(served: Callable[..., str]) -> str:
    return served("tiny-mdm", "--against", "pair", "--steps", "5", "--limit", "2")


@pytest.fixture(scope="module")
def models() -> Any:
    from diffusion_lens import load_pair

    return load_pair("tiny-mdm", device="cpu")


def table(page: Any) -> Any:
    """The table, opened."""
    element = page.get_by_role("complementary", name="Facts")
    if not element.is_visible():
        page.get_by_role("button", name="Facts", exact=True).click()
        settled(page)
    return element


def measured(page: Any, name: str = "Measure") -> Any:
    """The table, with everything measured."""
    element = table(page)
    element.get_by_role("button", name=name, exact=True).click()
    settled_slowly(page)
    return element


def settled_slowly(page: Any) -> None:
    page.wait_for_selector(".dl-explorer[data-state=ready]:not(.dl-computing)", timeout=90_000)


def rows(page: Any) -> list[list[str]]:
    """The texts of each row: its fact, then the values by measure and model."""
    texts = (
        table(page)
        .locator("tbody tr")
        .evaluate_all("rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))")
    )
    return [row[1:] for row in texts]


def number(text: str) -> float:
    """The number in a cell, by which it is sorted; NaN if it has none."""
    found = re.search(r"[−\d.]+", text.replace("✓", "1").replace("✗", "0"))
    return float(found[0].replace("−", "-")) if found else float("nan")


def fact_of(text: str) -> Any:
    from diffusion_lens import Fact

    prompt, answer = text.split(" → ")
    return Fact(prompt, "", f" {answer}")


def test_measured_facts_are_those_of_the_library(opened: Open, address: str, models: Any) -> None:
    """Against runs and probabilities that are computed one by one."""
    from diffusion_lens.analysis import commitment

    page = opened(address)
    measured(page)
    shown = rows(page)
    assert len(shown) == 12  # two of each pair of directions
    for text, *values in shown[::3]:
        fact = fact_of(text)
        for index, model in enumerate(models):
            run = model.denoise(fact.prompt, steps=5, predictions=1)
            recalled, p, committed = values[index::2][:3]
            written = run.text[0].removeprefix(fact.prompt).partition("<eos>")[0]
            assert recalled == ("✓" if fact.answer.strip() in written else "✗")
            prompt, answer = fact.tokenize(model)
            probability = 1.0
            for i, token in enumerate(answer):
                tokens = run.canvases[0].clone()
                if model.cfg.is_autoregressive:
                    tokens = np.array([[*prompt, *answer[:i]]])
                    logits = model(run.tokens.new_tensor(tokens))[0, -1]
                else:
                    logits = model(tokens)[0, len(prompt) + i]
                probability *= float(logits.detach().softmax(dim=-1)[token])
            assert number(p) == pytest.approx(probability, abs=6e-4)
            at = int(commitment(run.recorded).committed_at[0, len(prompt) + len(answer) - 1])
            assert committed == ("" if at < 0 else f"step {at}")


def test_every_column_sorts_both_ways(opened: Open, address: str) -> None:
    page = opened(address)
    measured(page, "With effects")
    by_column = [
        np.array([number(text) for text in column]) for column in zip(*(row[1:] for row in rows(page)), strict=True)
    ]
    assert len(by_column) == 8
    for column, values in enumerate(by_column):
        name = f"Sort by {(*MEASURES, 'effect')[column // 2]}, {NAMES[column % 2]}"
        for order in ("descending", "ascending"):
            page.get_by_role("button", name=name, exact=True).click()
            header = table(page).locator("th[aria-sort]").nth(column)
            expect(header).to_have_attribute("aria-sort", order)
            now = np.array([number(row[1 + column]) for row in rows(page)])
            known = np.sort(values[~np.isnan(values)])
            np.testing.assert_array_equal(now[: len(known)], known if order == "ascending" else known[::-1])
            assert np.isnan(now[len(known) :]).all()  # what is not known comes last
    assert np.isfinite(by_column[-1]).any()


def test_averages_are_means_of_the_rows(opened: Open, address: str) -> None:
    page = opened(address)
    measured(page)
    foot = table(page).locator("tfoot")
    selects = table(page).get_by_role("checkbox", name=re.compile("^Select (?!all)"))
    for chosen in ((), (0, 2, 5), range(12)):
        for row in range(12):
            selects.nth(row).set_checked(row in chosen)
        over = [row for i, row in enumerate(rows(page)) if not chosen or i in chosen]
        text = f"mean of {len(chosen)} selected" if chosen else "mean of all 12"
        expect(foot).to_contain_text(text)
        means = foot.locator("td").all_inner_texts()[1:]
        for column, said in enumerate(means):
            values = np.array([number(row[1 + column]) for row in over])
            scale, digits = (100, 0.51) if column < 2 else (1, 0.0011 if column < 4 else 0.051)
            assert number(said) == pytest.approx(scale * np.nanmean(values), abs=digits)


def test_the_filter_leaves_the_rows_that_contain_it(opened: Open, address: str) -> None:
    page = opened(address)
    table(page).get_by_label("Filter").fill("THE ")
    all_facts = [row[0] for row in rows(page)]
    word = all_facts[0].split()[-1].strip(".")
    table(page).get_by_label("Filter").fill(word.upper())
    left = [row[0] for row in rows(page)]
    assert left == [text for text in all_facts if word.lower() in text.lower()]
    expect(table(page).locator("tfoot")).to_contain_text(f"mean of all {len(left)}")
    table(page).get_by_label("Filter").fill("nobody")
    assert rows(page) == []


def test_a_click_opens_the_runs_of_a_fact(opened: Open, address: str, models: Any) -> None:
    page = opened(address)
    for index in (7, 2):
        text = rows(page)[index][0]
        table(page).get_by_role("button", name=text, exact=True).click()
        settled(page)
        fact = fact_of(text)
        expect(prompt_box(page)).to_have_value(fact.prompt)
        assert final_words(page) == [words(model, model.denoise(fact.prompt, steps=5)) for model in models]
        verdicts = page.locator(".dl-verdict").all_inner_texts()
        marks = [values[0] for values in (rows(page)[index][1:3][i : i + 1] for i in range(2))]
        assert [verdict[0] for verdict in verdicts] == marks
        assert all(fact.answer.strip() in verdict for verdict in verdicts)
        expect(table(page).locator("tr.dl-open")).to_contain_text(fact.prompt)


def test_the_keyboard_sorts_and_opens(opened: Open, address: str) -> None:
    page = opened(address)
    measured(page)
    press = page.keyboard.press
    page.get_by_role("button", name="Sort by p(answer), tiny-mdm", exact=True).focus()
    press("Enter")
    expect(table(page).locator("th[aria-sort]").nth(2)).to_have_attribute("aria-sort", "descending")
    expect(page.get_by_role("button", name="Sort by p(answer), tiny-mdm", exact=True)).to_be_focused()
    text = rows(page)[4][0]
    table(page).get_by_role("button", name=text, exact=True).focus()
    press("Enter")
    settled(page)
    expect(prompt_box(page)).to_have_value(fact_of(text).prompt)
    expect(table(page).get_by_role("button", name=text, exact=True)).to_be_focused()
    press("Escape")
    settled(page)
    expect(page.get_by_role("complementary", name="Facts")).to_be_hidden()
    expect(page.get_by_role("button", name="Facts", exact=True)).to_be_focused()


def test_measuring_is_cancelled(opened: Open, served: Callable[..., str]) -> None:
    page = opened(served("tiny-mdm", "--against", "pair", "--steps", "5"))
    table(page).get_by_role("button", name="With effects").click()
    progress = page.locator(".dl-progress")
    expect(progress).to_contain_text(re.compile(r"facts measured \d+ of \d+"))
    progress.get_by_role("button", name="Cancel").click()
    settled(page)
    expect(page.get_by_role("status")).to_have_text("Cancelled: measuring facts.")
    known = [row for row in rows(page) if row[1]]
    assert len(known) < len(rows(page))
    expect(table(page).get_by_role("button", name="Measure", exact=True)).to_be_enabled()


def test_a_written_page_has_the_table_and_its_runs(opened: Open, models: Any, tmp_path: Any) -> None:
    from diffusion_lens import Fact
    from diffusion_lens.explorer import explore

    facts = [
        Fact("Tilda Drusser is the", "Tilda Drusser", " famous miner of Tanmoor."),
        Fact("Gustav Geisser is the", "Gustav Geisser", " shy tailor."),
    ]
    page = opened(explore(models, facts, tmp_path / "facts.html", steps=3).as_uri())
    marks = [row[1:3] for row in rows(page)]
    runs = [[model.denoise(fact.prompt, steps=3) for model in models] for fact in facts]
    texts = [[run.text[0].partition("<eos>")[0] for run in each] for each in runs]
    assert marks == [
        ["✓" if fact.answer.strip() in text else "✗" for text in each] for fact, each in zip(facts, texts, strict=True)
    ]
    expect(table(page).get_by_role("button", name="Measure", exact=True)).to_be_hidden()
    table(page).get_by_role("button", name="Gustav Geisser is the → shy tailor.").click()
    settled(page)
    assert final_words(page) == [words(model, run) for model, run in zip(models, runs[1], strict=True)]
    assert page.locator(".dl-verdict").all_inner_texts() == ["✗ wrong: the answer is shy tailor."] * 2


def test_a_fact_opens_the_run_that_its_row_measured(opened: Open, address: str, models: Any) -> None:
    """Also after the same prompt and answer were run with other settings."""
    page = opened(address)
    measured(page)
    text = rows(page)[3][0]
    table(page).get_by_role("button", name=text, exact=True).click()
    settled(page)
    settings(page, Steps=1, Temperature=4)
    press_run(page)
    prompt, steps = fact_of(text).prompt, page.locator(".dl-step-text")
    other, expected = (
        [words(model, model.denoise(prompt, **how)) for model in models]
        for how in ({"steps": 1, "temperature": 4.0}, {"steps": 5})
    )
    assert final_words(page) == other != expected
    expect(steps).not_to_contain_text("–4")
    table(page).get_by_role("button", name=rows(page)[5][0], exact=True).click()
    settled(page)
    table(page).get_by_role("button", name=text, exact=True).click()
    settled(page)
    assert final_words(page) == expected


def test_a_fact_that_cannot_be_measured_says_why_and_the_others_are(opened: Open, served: Callable[..., str]) -> None:
    address = served("tiny-mdm", "--against", "pair", "--steps", "4", "--limit", "1")
    page, text = opened(address), "the tokenizer does not know 'Xylo'"

    def refuse(route: Any) -> None:
        bad = route.request.post_data_json["id"] == 2
        route.fulfill(status=400, json={"error": text}) if bad else route.continue_()

    page.route("**/api/fact", refuse)
    button = table(page).get_by_role("button", name="Measure", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    settled_slowly(page)
    expect(button).to_be_focused()
    expect(page.get_by_role("status")).to_have_text(
        re.compile(r"2 of 12 could not be measured, and their rows \(⚠\) say why")
    )
    marks = [row[1:3] for row in rows(page)]
    assert marks[2] == ["⚠", "⚠"]
    assert all(mark in "✓✗" for row in (*marks[:2], *marks[3:]) for mark in row)
    expect(table(page).get_by_role("button", name=rows(page)[2][0], exact=True)).to_have_attribute(
        "title", f"tiny-mdm: {text}\ntiny-ar: {text}"
    )
    page.unroute("**/api/fact")
    button.click()
    settled_slowly(page)
    assert rows(page)[2][1] in "✓✗"
    opened.problems[:] = [problem for problem in opened.problems if "400 (Bad Request)" not in problem]


def test_the_table_is_used_while_it_is_measured(opened: Open, served: Callable[..., str]) -> None:
    page, waiting = opened(served("tiny-mdm", "--against", "pair", "--steps", "3", "--limit", "1")), list[Any]()
    page.route("**/api/fact", lambda route: waiting.append(route))
    element = table(page)
    element.get_by_role("button", name="Measure", exact=True).click()
    element.get_by_role("checkbox", name=re.compile("^Select (?!all)")).nth(1).hover()
    page.mouse.down()
    for known in (1, 2):  # Values come in between pointer down and up.
        while not waiting:
            page.wait_for_timeout(20)
        waiting.pop().continue_()
        page.wait_for_function(
            "n => document.querySelectorAll('.dl-facts :is(.dl-good, .dl-bad)').length === n", arg=known
        )
    page.mouse.up()
    expect(element.get_by_role("checkbox", name=re.compile("^Select (?!all)")).nth(1)).to_be_checked()
    element.get_by_role("button", name=rows(page)[5][0], exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("wait until it has finished, or cancel it")
    page.locator(".dl-progress").get_by_role("button", name="Cancel").click()
    settled_slowly(page)


def test_a_page_takes_the_facts_of_the_open_table(opened: Open, address: str) -> None:
    page, asked = opened(address), []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json["facts"])
        route.fulfill(status=400, json={"error": "the page would have 20 MB: select fewer rows"})

    page.route("**/api/page", answer)

    def written() -> str:
        page.get_by_role("button", name="Share").click()
        item = page.get_by_role("button", name="Page (.html)")
        said = item.inner_text()
        item.click()
        settled(page)
        expect(page.get_by_role("alert")).to_contain_text("select fewer rows")
        return str(said)

    element = measured(page)
    n_facts = len(rows(page))
    assert f"and {n_facts} facts" in written()
    for row in (1, 4):
        element.get_by_role("checkbox", name=re.compile("^Select (?!all)")).nth(row).check()
    assert "and 2 facts" in written()
    element.get_by_role("button", name="Close").click()
    settled(page)
    assert "open the table of facts to add them" in written()
    # The fact that is shown and the same one asked the other way round are always there: "Why?" names them.
    assert [sorted(facts) for facts in asked] == [list(range(n_facts)), [0, 1, 4], [0, 1]]
    opened.problems[:] = [problem for problem in opened.problems if "400 (Bad Request)" not in problem]


def test_columns_say_what_comes_from_a_study(opened: Open, models: Any, tmp_path: Any) -> None:
    from diffusion_lens import Fact
    from diffusion_lens.evaluation import recall_by_steps
    from diffusion_lens.explorer import explore

    model, facts = (
        models[0],
        [
            Fact("Tilda Drusser is the", "Tilda Drusser", " famous miner of Tanmoor."),
            Fact("Gustav Geisser is the", "Gustav Geisser", " shy tailor."),
        ],
    )
    study = recall_by_steps(model, facts[:1], steps=[3], cfg_scale=0.0)
    page = opened(explore(model, facts, tmp_path / "study.html", results=study, steps=3).as_uri())
    sort = table(page).get_by_role("button", name="Sort by recalled, tiny-mdm")
    expect(sort).to_have_text("recalled*")
    expect(sort).to_have_attribute("title", re.compile("^\\* 1 of 2 rows come from a saved result"))
    expect(table(page).get_by_role("button", name="Sort by p(answer), tiny-mdm")).to_have_text("p(answer)")
    expect(table(page).locator("tfoot")).to_contain_text("* with rows from a saved result")
    assert all(row[2] for row in rows(page))
