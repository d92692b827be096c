"""What a person does on an explorer page, and what the page then says, for the tests in the browser."""

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

SETTLED = ".dl-explorer[data-state=ready]:not(.dl-computing)"
SIZES = ((1280, 800), (700, 640), (400, 800))  # of the window, in pixels


def settled(page: Any) -> Any:
    """The page, as soon as everything that was asked for is computed and drawn."""
    page.wait_for_selector(SETTLED)
    return page


def slider(page: Any) -> Any:
    return page.get_by_label("Step", exact=True)


def step_to(page: Any, step: int | str) -> None:
    """Move the slider; the steps of all shown runs are counted from 0."""
    slider(page).fill(str(step))
    settled(page)


def token(page: Any, position: int, run: int = 0) -> Any:
    return page.locator(".dl-run").nth(run).locator(f".dl-text [data-position='{position}']")


def select(page: Any, position: int, run: int = 0) -> None:
    token(page, position, run).click()
    settled(page)


def labels(page: Any, run: int = 0) -> list[str]:
    """What screen readers hear of each position of a run, those after the end included."""
    tokens = page.locator(".dl-run").nth(run).locator("[data-position]")
    return [str(text) for text in tokens.evaluate_all("tokens => tokens.map((token) => token.ariaLabel)")]


def final_words(page: Any) -> list[list[str]]:
    """The tokens after the last step of each run that is shown, from left to right."""
    step_to(page, slider(page).get_attribute("max"))
    runs = [labels(page, run) for run in range(page.locator(".dl-run").count())]
    return [[str(re.search("“(.*?)”", label)[1]) for label in run] for run in runs]


def words(model: Any, trajectory: Any) -> list[str]:
    """The tokens of a run of the library, as a page writes them."""
    return [re.sub("^ | $", "␣", word) for word in model.words(trajectory.tokens[0].tolist())]


def prompt_box(page: Any) -> Any:
    return page.get_by_label("Prompt", exact=True)


def press_run(page: Any) -> None:
    page.get_by_role("button", name="Run", exact=True).click()
    settled(page)


def ask(page: Any, prompt: str) -> None:
    """Type a prompt, and press Enter."""
    prompt_box(page).fill(prompt)
    prompt_box(page).press("Enter")
    settled(page)


def settings(page: Any, **values: Any) -> None:
    """Set what stands under Settings, by label."""
    summary = page.get_by_text("Settings", exact=True)
    if page.locator(".dl-settings[open]").count() == 0:
        summary.click()
    for name, value in values.items():
        box = page.locator(".dl-settings").get_by_label(name.replace("_", " "), exact=True)
        if box.evaluate("box => box.tagName") == "SELECT":
            box.select_option(value)
        else:
            box.fill(str(value))


def drawer(page: Any) -> Any:
    """The drawer in which a change is written, opened for what is selected."""
    element = page.get_by_role("complementary", name="Change the run")
    if not element.is_visible():
        page.locator(".dl-run.dl-active").get_by_role("button", name="Change…").click()
    return element


def apply(page: Any, **sentence: str) -> None:
    """Choose the words of the sentence about a block, by label, and apply it."""
    for name, value in sentence.items():
        drawer(page).get_by_label(name, exact=True).select_option(value)
    drawer(page).get_by_role("button", name="Apply", exact=True).click()
    settled(page)


def difference(changed: Any, base: Any, model: Any) -> list[str]:
    """How two runs of the library differ, in the words of a page: each stretch of positions, and the step since which
    they do. What stands after an end token is no text."""
    texts = []
    for run in (base, changed):
        text = words(model, run)
        end = text.index("<eos>") + 1 if "<eos>" in text else len(text)
        texts.append(text[:end] + [""] * (len(text) - end))
    equal, stretches = (changed.canvases == base.canvases)[1:, 0], list[list[int]]()
    for position, (was, now) in enumerate(zip(*texts, strict=True)):
        if was != now and stretches and stretches[-1][-1] == position - 1:
            stretches[-1].append(position)
        elif was != now:
            stretches.append([position])
    last = len(equal) - 1
    since = [min(last, max([-1, *equal[:, p].nonzero().flatten().tolist()]) + 1) for p in range(equal.shape[1])]
    return [
        " → ".join(" ".join(text[p] for p in places).strip() or "nothing" for text in texts)
        + f", from step {min(since[p] for p in places)}"
        for places in stretches
    ]


def share(page: Any, name: str) -> None:
    page.get_by_role("button", name="Share", exact=True).click()
    page.get_by_role("button", name=re.compile(f"^{name}")).click()


def saved(page: Any, name: str, folder: Path) -> Path:
    """The file that an entry of the menu saves."""
    with page.expect_download(timeout=60_000) as download:
        share(page, name)
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    expect(page.get_by_role("status")).to_contain_text(f"as {path.name}.")
    return path


def violations(page: Any, axe: str) -> list[str]:
    """What axe-core calls serious or critical, with the elements."""
    page.evaluate(axe)  # what the page's policy does not admit as an element
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:4]}, {one['nodes'][0].get('any')}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
