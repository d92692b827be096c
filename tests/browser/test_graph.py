"""The graph of a run, in Chromium: its nodes and edges, what is pinned and grouped, and the files of both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import explorer_pages
import pytest
from explorer_walk import saved, select, settled, violations
from PIL import Image
from playwright.sync_api import expect

Open = Callable[..., Any]
HEAD, MLP = "head 0 of block 3 at position 4 (masked), step 4", "MLP of block 1 at “Krasser” (1), step 4"


@pytest.fixture(scope="module")
def graph() -> Any:
    return explorer_pages.graphed()[1]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the graph; it opens there."""
    run, graph = explorer_pages.graphed()
    folder = tmp_path_factory.mktemp("graph")
    return f"{explorer_pages.write(run.explore(graph=graph), folder, 'graph').as_uri()}#view=graph"


def amount(number: float) -> str:
    """A number as the page says it."""
    return f"{number:.{3 if abs(number) < 1 else 1}f}".replace("-", "−")


def press(page: Any, name: str) -> None:
    page.locator(".dl-graph").get_by_role("button", name=name).first.click()
    settled(page)


def pin(page: Any, *names: str) -> None:
    for name in names:
        press(page, name)
        page.get_by_role("button", name="Pin", exact=True).click()
        settled(page)


def group(page: Any, name: str) -> None:
    page.get_by_label("Group them as").fill(name)
    page.get_by_role("button", name="Group", exact=True).click()
    settled(page)


def flows(page: Any, heading: str) -> list[tuple[str, str]]:
    """The entries of a list, as text and amount."""
    entries = page.locator(f".dl-graph h4:has-text('{heading}') + ol button").all()
    return [tuple(entry.locator(part).inner_text() for part in ("span", "b")) for entry in entries]


def node(graph: Any, name: str, step: int, position: int) -> int:
    nodes = graph.nodes
    found = nodes[(nodes.name == name) & (nodes.step == step) & (nodes.position == position)]
    return int(found.index[0])


def test_a_node_says_its_effect_and_lists_its_edges(opened: Open, address: str, graph: Any) -> None:
    page = opened(address)
    nodes, edges = graph.nodes, graph.edges
    assert page.locator(".dl-graph h3").inner_text() == "The margin of “Plergate” at step 5"
    assert (
        page.locator(".dl-graph header .dl-numbers").inner_text()
        == f"60 of {len(nodes)} nodes, 300 of {len(edges):,} edges"
    )
    listed = flows(page, "Largest effects")
    assert [said for _, said in listed] == [amount(effect) for effect in nodes.effect[:40]]
    press(page, HEAD)
    whole = amount(graph.clean - graph.corrupted)
    at = node(graph, "a3.h0", 4, 4)
    assert page.get_by_role("status").inner_text() == f"{HEAD}: {amount(nodes.effect[at])} of {whole}"
    for heading, end in (("into", "target"), ("out of", "source")):
        expected = [amount(weight) for weight in edges[edges[end] == at].weight[:40]]
        assert [said for _, said in flows(page, f"Flows {heading} it")] == expected
    assert flows(page, "Flows into it")[0][0] == MLP
    # Token, step, block and head are selected with it.
    assert all(part in page.url for part in ("step=4", "position=4", "layer=3", "head=0"))
    assert page.locator(".dl-text [aria-pressed=true]").get_attribute("data-position") == "4"


def test_the_picture_is_selected_by_pointer_and_arrows(opened: Open, address: str) -> None:
    page = opened(address)
    page.locator(".dl-graph [data-place]").filter(has_text="a4.h2").click()
    settled(page)
    status = page.get_by_role("status")
    assert status.inner_text().startswith("head 2 of block 4 at position 6 (masked), step 5: ")
    lit = page.locator(".dl-graph .dl-flow[opacity='0.9']").count()
    assert 0 < lit < 300
    page.locator(".dl-graph .dl-circuit-picture").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        settled(page)
    assert status.inner_text().startswith("MLP of block 5 at position 6 (masked), step 5: ")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert status.inner_text().startswith("target “Plergate” (6), not “Firholm”, step 5: ")


def test_the_slider_prunes_by_influence(opened: Open, address: str, graph: Any) -> None:
    page = opened(address)
    shown = page.locator(".dl-graph [data-place]")
    for share in (0.5, 0.9, 1):
        page.get_by_label("Influence").fill(str(share))
        settled(page)
        ranked = graph.influence.sort(descending=True).values
        fewest = int((ranked.cumsum(0) / ranked.sum() <= share + 1e-9).sum())
        assert abs(shown.count() - fewest) <= 2  # those of a given token share an entry
    assert shown.count() == len(graph)


def test_pinned_nodes_are_grouped_and_stay_by_address(opened: Open, address: str, graph: Any) -> None:
    page = opened(address)
    pin(page, HEAD, MLP)
    assert page.locator(".dl-graph .dl-chip").all_inner_texts() == [HEAD, MLP]
    before = page.locator(".dl-graph [data-place]").count()
    group(page, "reads the <b>name</b>")
    page.get_by_label("Name of group 1").fill("reads the name")
    page.keyboard.press("Enter")
    settled(page)

    page = opened(page.url)
    assert page.locator(".dl-graph [data-place]").count() == before - 1
    assert page.get_by_label("Name of group 1").input_value() == "reads the name"
    members = [node(graph, "a3.h0", 4, 4), node(graph, "m1", 4, 1)]
    edges = graph.edges
    inside, outside = edges.target.isin(members), ~edges.source.isin(members)
    summed = edges[inside & outside].groupby("source").weight.sum().sort_values(key=abs, ascending=False)
    assert [said for _, said in flows(page, "Flows into it")] == [amount(weight) for weight in summed[:40]]
    page.locator(".dl-graph [data-place]").filter(has_text="m3").click()
    settled(page)
    press(page, HEAD)  # it is listed, and its group is selected
    assert page.get_by_role("status").inner_text().startswith(f"“reads the name”, 2 nodes, the largest {HEAD}: ")
    press(page, "Ungroup")
    assert page.locator(".dl-graph [data-place]").count() == before
    assert page.locator(".dl-graph .dl-chip").all_inner_texts() == [HEAD, MLP]
    press(page, HEAD)
    press(page, "Unpin")
    assert page.locator(".dl-graph .dl-chip").all_inner_texts() == [MLP]


def test_the_file_is_that_of_python_with_pins_and_groups_and_is_loaded(
    opened: Open, address: str, graph: Any, tmp_path: Path
) -> None:
    page = opened(address)
    pin(page, HEAD, MLP)
    group(page, "reads the name")
    page.get_by_label("Influence").fill("0.5")
    settled(page)
    file = saved(page, r"Graph \(.json\)", tmp_path)
    document, expected = (json.loads(each.read_text()) for each in (file, graph.to_json(tmp_path / "graph.json")))
    chosen = document.pop("qParams")
    of_python = expected.pop("qParams")
    assert document == expected
    labels = {one["node_id"]: one["clerp"] for one in expected["nodes"]}
    assert [labels[one] for one in chosen["pinnedIds"]] == ["step 4: a3.h0", "step 4: m1"]
    assert chosen["supernodes"] == [["reads the name", *chosen["pinnedIds"]]]
    assert chosen.keys() == of_python.keys() | {"pruningThreshold"}

    page = opened(address)
    page.locator(".dl-graph input[type=file]").set_input_files(file)
    page.get_by_text("Pins: 2, groups: 1.").wait_for()
    assert page.get_by_label("Name of group 1").input_value() == "reads the name"
    assert page.get_by_label("Influence").input_value() == "0.5"
    other = tmp_path / "other.json"
    for text, said in (
        ("[1]", "other.json is no graph"),
        ('{"qParams": {"pinnedIds": ["9_9_9", 7]}}', "1 of their nodes"),
    ):
        other.write_text(text)
        page.locator(".dl-graph input[type=file]").set_input_files(other)
        page.get_by_text(said).wait_for()


def test_the_graph_is_saved_as_pictures(opened: Open, address: str, tmp_path: Path) -> None:
    page = opened(address)
    root = ElementTree.parse(saved(page, r"Graph \(.svg\)", tmp_path)).getroot()
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"step 4", "step 5", "Krasser 1", "singer", "Plergate", "a3.h0"} <= set(texts)
    with Image.open(saved(page, r"Graph \(.png\)", tmp_path)) as picture:
        assert picture.width == 2 * float(root.attrib["width"])
        assert len(picture.convert("RGB").getcolors(2**20)) > 100


def test_nodes_of_an_unknown_kind_have_their_names(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusion_lens.explorer import learned

    run, graph = explorer_pages.graphed()
    chunk = learned.views.graph_chunk

    def with_gadgets(graph: Any, document: Any, ids: Any, kinds: list[str], words: Any) -> bytes:
        return chunk(graph, document, ids, ["gadget" if kind == "mlp" else kind for kind in kinds], words)

    monkeypatch.setattr(learned.views, "graph_chunk", with_gadgets)
    page = opened(f"{explorer_pages.write(run.explore(graph=graph), tmp_path, 'graph').as_uri()}#view=graph")
    press(page, "m1 at “Krasser” (1), step 4")
    assert page.get_by_role("status").inner_text().startswith("m1 at “Krasser” (1), step 4: 10.9 of ")


def test_a_live_page_explains_the_selected_token(
    opened: Open, served: Callable[..., str], axe: str, tmp_path: Path
) -> None:
    page = opened(f"{served('site-mdm', '--prompt', 'Brosser Krasser is the', '--length', '10', '--steps', '6')}")
    select(page, 6)
    page.get_by_role("tab", name="Graph").click()
    prompt = page.get_by_label("Why “Plergate” (6)? Change words of the prompt:")
    assert prompt.input_value() == "Brosser Krasser is the"
    prompt.fill("Plerrick Skusser is the")
    page.keyboard.press("Enter")
    heading = page.locator(".dl-graph h3")
    expect(heading).to_have_text("The log probability of “Plergate” at step 5")
    pin(page, HEAD)
    assert violations(page, axe) == []
    # A link asks the same again, about the token that is selected, and a page contains what is shown.
    page.reload()
    settled(page)
    expect(heading).to_be_hidden()
    assert page.locator(".dl-graph form input").input_value() == "Plerrick Skusser is the"
    page.get_by_role("button", name="Explain").click()
    expect(heading).to_have_text("The log probability of “singer” at step 4")
    file = saved(page, "Page", tmp_path)
    assert opened(file.as_uri()).locator(".dl-graph h3").inner_text() == heading.inner_text()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")])
def test_axe_finds_nothing_serious(opened: Open, address: str, axe: str, width: int, theme: str) -> None:
    page = opened(address, width, theme)
    pin(page, HEAD, MLP)
    assert violations(page, axe) == []
    group(page, "reads the name")
    assert violations(page, axe) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
