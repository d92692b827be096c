"""What is learned about a run, in Chromium: each view says the numbers of the library; a view of one's own works."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chromium
import explorer_pages
import pytest
from explorer_walk import violations
from snippets import run_python, same_output

Open = Callable[..., Any]
DOCS = Path(__file__).parents[2] / "docs"
LABEL = "([view, row, column]) => document.querySelector(`.dl-${view} .dl-map`).heatMap.label(row, column)"


def spoken(number: float) -> str:
    """A number as a page says it."""
    return f"{number:+.3f}".replace("-", "−")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of the pages."""
    folder = tmp_path_factory.mktemp("learned")
    handed = explorer_pages.handed_on()
    made = {
        "learned": explorer_pages.explored().trajectory.explore(**explorer_pages.learned()),
        "handed": handed.trajectory.explore(experts=handed.cache),
    }
    return {name: explorer_pages.write(page, folder, name).as_uri() for name, page in made.items()}


def test_circuit_lists_its_strongest_edges_and_selects_their_ends(opened: Open, files: dict[str, str]) -> None:
    page, circuit = (
        opened(f"{files['learned']}#step=2&view=circuit&layer=5&head=5"),
        explorer_pages.learned()["circuit"],
    )
    scores = circuit.at_step(2).to_dataframe().sort_values("score", key=abs, ascending=False)
    listed = page.locator(".dl-circuit-edges button").all_inner_texts()
    assert len(listed) == 12
    for text, score in zip(listed, scores.score[:12], strict=True):
        assert text.endswith(spoken(score))
    assert page.locator(".dl-circuit path").count() == 30
    page.get_by_label("Edges", exact=True).fill("7")
    assert page.locator(".dl-circuit path").count() == 7

    first = scores.iloc[0]
    layer, head = re.match(r"a(\d+)\.h(\d+)<", first.reader).groups()  # type: ignore[union-attr]
    page.locator(".dl-circuit-edges button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(chromium.DRAWN)
    assert f"layer={layer}" in page.url
    assert f"head={head}" in page.url or head == "0"
    said = page.locator(".dl-circuit .dl-numbers").all_inner_texts()
    assert any(f"{float(circuit.clean[1]):.3f} in the clean run" in text for text in said)


def test_circuit_of_the_step_before_is_shown_where_a_step_has_none(opened: Open, files: dict[str, str]) -> None:
    page = opened(f"{files['learned']}#step=4&view=circuit")
    assert page.locator(".dl-circuit h3").inner_text() == "Circuit at step 2, the last of steps 0, 2 before this one"


def test_signatures_say_mean_interval_and_fact(opened: Open, files: dict[str, str]) -> None:
    page, signatures = opened(f"{files['learned']}#view=signatures"), explorer_pages.learned()["signatures"]
    low, high = signatures.interval("edge_cut")
    bars = page.locator("[data-measure=edge_cut] .dl-track")
    n_layers = signatures.cuts.shape[-1]
    assert bars.count() == 2 * n_layers
    mean, own = float(signatures.edge_cut[1, 3]), float(signatures.cuts[0, 1, 3])
    ends = f"[{float(low[1, 3]):.3f}, {float(high[1, 3]):.3f}]"
    assert bars.nth(n_layers + 3).get_attribute("aria-label") == (
        f"block 3, reverse: {mean:.3f} {ends}; this fact {own:.3f}"
    )
    width = "(one) => one.getBoundingClientRect().width"
    bar = page.locator("[data-measure=probability] .dl-mean").first.evaluate(width)
    track = page.locator("[data-measure=probability] .dl-track").first.evaluate(width)
    assert bar / (track - 2) == pytest.approx(float(signatures.probability[0]), abs=0.01)


def test_experts_are_those_of_the_cache(opened: Open, files: dict[str, str]) -> None:
    page, run = opened(f"{files['handed']}#step=3&view=experts"), explorer_pages.handed_on()
    for layer, position in ((0, 0), (2, 5), (1, 8)):
        chosen = run.cache[3][f"blocks.{layer}.mlp.hook_experts"][0, position].tolist()
        weights = run.cache[3][f"blocks.{layer}.mlp.hook_router_weights"][0, position]
        text = page.evaluate(LABEL, ["experts", 2 - layer, position])
        assert text.startswith(f"block {layer}, position {position} ")
        assert text.endswith(", ".join(f"expert {expert} (weight {float(weights[expert]):.3f})" for expert in chosen))
    page.locator(".dl-experts [role=gridcell]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(chromium.DRAWN)
    assert "position=0" in page.url


def test_conditioning_says_what_each_step_was_handed(opened: Open, files: dict[str, str]) -> None:
    page, run = opened(f"{files['handed']}#step=3&view=conditioning"), explorer_pages.handed_on().trajectory
    assert page.evaluate(LABEL, ["conditioning", 0, 4]) == "step 0, position 4: nothing was handed on"
    for step, position in ((1, 3), (4, 8), (7, 9)):
        token = int(run.handed.likeliest[step, 0, (position - 3) % 6])
        text = page.evaluate(LABEL, ["conditioning", step, position])
        assert f"step {step}, position {position}: reads “{run.words[token]}” of the step before, for " in text
        assert f"stayed for {int(run.handed.streak[step, 0])} step" in text


def test_views_that_a_run_cannot_have_are_not_offered(opened: Open, files: dict[str, str]) -> None:
    tabs = opened(files["learned"]).get_by_role("tab").all_inner_texts()
    assert {"Circuit", "Signatures"} <= set(tabs)
    assert not {"Experts", "Self-conditioning"} & {text for text in tabs if text}


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize(
    ("name", "view"),
    [("learned", "circuit"), ("learned", "signatures"), ("handed", "experts"), ("handed", "conditioning")],
)
def test_axe_finds_nothing_serious_in_the_views(
    opened: Open, files: dict[str, str], axe: str, name: str, view: str, width: int, theme: str
) -> None:
    page = opened(f"{files[name]}#step=2&view={view}", width, theme)
    page.wait_for_selector(f".dl-{view}:not([aria-busy])")
    assert violations(page, axe) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.usefixtures("families")
def test_the_view_of_the_docs_shows_its_margins(
    opened: Open, axe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block, said in run_python(DOCS / "extend.md"):
        assert same_output(said, block.output or "")
    page = opened(f"{(tmp_path / 'margin.html').as_uri()}#step=1&position=6")
    page.get_by_role("tab", name="Margin").click()
    page.wait_for_selector(chromium.DRAWN)
    assert "view=margin" in page.url
    assert page.locator(".dl-margin h3").inner_text() == "Margin of the likeliest token at position 6"
    said = page.locator(".dl-margin .dl-numbers").inner_text()
    assert re.match(r"step 0: 0\.93\d, step 1: 0\.93\d, step 2: 0\.97\d", said)
    page.get_by_role("button", name="Kaurgate").first.click()
    page.wait_for_selector(chromium.DRAWN)
    assert page.locator(".dl-margin .dl-numbers").inner_text() == "No step predicts anything here."
    assert violations(page, axe) == []
