"""Results show themselves: as one line, in a notebook as a picture and a table, and as a data frame."""

import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from figures import PNG, blank_figures
from results import HEADS, LAYERS, POS, STEPS, TEXTS, every_result

import diffusion_lens
from diffusion_lens.analysis import (
    AverageEffect,
    CausalTrace,
    Comparison,
    Comparisons,
    EdgeScores,
    LogitLens,
    PatchGrid,
    TrajectoryTrace,
    ValueResult,
)
from diffusion_lens.denoising.trajectory import RunPredictions, Trajectory
from diffusion_lens.evaluation import Recall
from diffusion_lens.records.results import PicturedResult, Result, Table, shaped


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {type(result): result for result in every_result(tmp_path_factory.mktemp("store"))}


def test_every_type_of_result_is_tried_here(results):
    found = set()
    for module in pkgutil.walk_packages(diffusion_lens.__path__, "diffusion_lens."):
        if not module.name.endswith("__main__"):
            values = vars(importlib.import_module(module.name)).values()
            found |= {value for value in values if inspect.isclass(value) and issubclass(value, Result)}
    found = {value for value in found if not inspect.isabstract(value)}
    # Predictions that know their run are saved as predictions.
    assert set(results) == found - {RunPredictions}


class Page(HTMLParser):
    """The elements of a page as a browser sees them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attrs]
        self.open += [tag] if tag != "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_results_show_a_line_and_a_picture_and_few_rows(results):
    for kind, result in results.items():
        with blank_figures():
            page = Page(result._repr_html_())
        assert page.text.startswith(repr(result))
        assert "\n" not in repr(result)
        assert ("img" in page.tags) == issubclass(kind, PicturedResult)
        assert not {"script", "link", "iframe"} & set(page.tags)
        assert not any(name == "id" or name.startswith("on") for _, name, _ in page.attributes)
        n_rows = len(result.to_dataframe())
        own_rows = STEPS + 1 if isinstance(result, Trajectory) else 0
        assert page.tags.count("tr") == 1 + own_rows + min(n_rows, 10)
        more = re.findall(r"and ([\d,]+) more rows", page.text)
        assert more == ([f"{n_rows - 10:,}"] if n_rows > 10 else [])


def test_tokens_are_escaped(results):
    for kind in (CausalTrace, LogitLens, Recall, Trajectory):
        with blank_figures():
            page = results[kind]._repr_html_()
        assert "<script" not in page
        assert "<b>" not in page
        assert "<eos>" not in page
    assert "&lt;script&gt;" in results[Trajectory]._repr_html_()


def test_descriptions_name_the_columns(results):
    for kind, result in results.items():
        described = {Comparisons: Comparison}.get(kind, kind)
        sentence = re.search(r"Columns of the data frame: (.*?)\n\n", inspect.getdoc(described) + "\n\n", re.DOTALL)
        assert sentence is not None, kind
        words = set(re.findall(r"\w+", sentence[1])) | ({"layer"} if kind is Comparisons else set())
        columns = {name for name in result.to_dataframe().columns if not re.match(r"target_\d", name)}
        assert columns <= words, kind


def test_tables_have_the_numbers_of_the_tensors(results):
    trace = results[CausalTrace].to_dataframe()
    assert list(zip(trace.pos, trace.layer, strict=True)) == list(itertools.product(range(POS), range(LAYERS)))
    row = trace[(trace.pos == 7) & (trace.layer == 3)].iloc[0]
    assert row.token == TEXTS[7]
    assert row.score == results[CausalTrace].scores[7, 3].item()
    assert row.indirect_effect == pytest.approx(results[CausalTrace].scores[7, 3].item() - 0.1)

    grid = results[PatchGrid]
    frame = grid.to_dataframe().set_index(["step", "layer", "pos", "head"])
    cell = frame.loc[(2, 5, 11, 1)]
    assert cell.score == grid.scores[2, 5, 11, 1].item()
    assert cell.effect == pytest.approx((grid.scores[2, 5, 11, 1] - grid.corrupted[2]).item())
    assert (cell.corrupted_pos, cell.token) == (12, TEXTS[11])
    assert len(frame) == STEPS * LAYERS * POS * HEADS
    coordinates = {**grid.coordinates, "pos": [[[pos, pos], [pos + 1, 0]] for pos in range(POS - 1)] + [7]}
    frame = replace(grid, coordinates=coordinates).to_dataframe().set_index(["step", "layer", "pos", "head"])
    assert frame.loc[(2, 5, "11, 12", 1)].tolist() == [*cell.tolist()[:2], "11, 0", TEXTS[11]]
    assert frame.loc[(2, 5, "7", 1)].tolist()[1:] == [
        (grid.scores[2, 5, -1, 1] - grid.corrupted[2]).item(),
        "7",
        TEXTS[-1],
    ]

    lens = results[LogitLens]
    cell = lens.to_dataframe().set_index(["step", "layer", "batch", "pos"]).loc[(1, 4, 0, 9)]
    assert (cell.state, cell.token, cell.likeliest, cell.target) == ("4_pre", "[MASK]", TEXTS[1], "<eos>")
    assert cell.entropy == lens.entropy[1, 4, 0, 9].item()
    assert bool(cell.masked)
    assert cell.target_1_probability == lens.target_probabilities[1, 4, 0, 9, 1].item()

    edges = results[EdgeScores]
    frame = edges.to_dataframe()
    assert len(frame) == 2 * int(edges.exists.sum())
    last = frame[frame.step == 1].iloc[-1]
    assert (last.writer, last.reader) == (edges.writers[-1], "logits")
    assert last.score == edges.scores[1, -1, -1].item()

    average = results[AverageEffect]
    means = average.to_dataframe().groupby(["role", "layer"]).effect.mean().unstack().loc[average.roles]
    assert torch.allclose(torch.tensor(means.to_numpy()), average.aie)


def test_rows_without_an_effect_are_left_out(results):
    average = results[AverageEffect]
    effects = average.effects.clone()
    effects[3] = torch.nan
    fields = {**vars(average), "effects": effects}
    assert set(average.to_dataframe().fact) - set(AverageEffect(**fields).to_dataframe().fact) == {"fact 3"}


def test_an_excerpt_has_the_largest_values_first():
    values = torch.tensor([[0.1, -3.0, torch.nan], [0.2, 1.0, 0.0]])
    table = Table.of_cells({"row": range(2), "column": ["a", "b", "c"]}, {"value": values.repeat(1, 1)}, most="value")
    many = Table({name: list(column) * 4 for name, column in table.columns.items()}, most="value")
    shown = re.findall(r">(-?[\d.]+|–)</td></tr>", many.to_html())
    assert shown == ["-3"] * 4 + ["1"] * 4 + ["0.2"] * 2
    assert "The rows with the largest value. ... and 14 more rows" in many.to_html()


def test_a_table_of_nothing_is_empty():
    empty = Table.of_cells({"pos": [], "layer": [0, 1]}, {"token": shaped([], -1, 1), "score": torch.zeros(0, 2)})
    assert len(empty) == 0
    assert list(empty.frame().columns) == ["pos", "layer", "token", "score"]


def test_without_matplotlib_the_table_remains(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = Page(results[CausalTrace]._repr_html_())
    assert "No picture: plots need matplotlib: pip install 'diffusion-lens[plot]'" in page.text
    assert "tr" in page.tags
    assert results[CausalTrace]._repr_png_() is None


def test_a_result_says_why_it_has_no_picture(results):
    trace = results[CausalTrace]
    nothing = {"scores": torch.zeros(0, LAYERS), "token_scores": torch.zeros(0, LAYERS, 2), "positions": []}
    assert "No picture: this trace has no cells" in CausalTrace(**{**vars(trace), **nothing})._repr_html_()


def test_a_table_remains_when_a_picture_fails(results):
    trace = results[TrajectoryTrace]
    page = Page(replace(trace, steps=[7] * STEPS, record={**trace.record, "kind": "no such kind"})._repr_html_())
    assert "No picture: KeyError: 'no such kind'" in page.text
    assert "tr" in page.tags


def test_an_answer_may_look_like_a_formula(results):
    value = results[ValueResult]
    record = {**value.record, "object": [r" $\oops$"]}
    assert "No picture" not in replace(value, record=record)._repr_html_()


def test_a_picture_is_a_png_of_the_figure(results):
    trace = results[CausalTrace]
    picture = trace._repr_png_()
    assert picture is not None
    assert picture.startswith(PNG)
    width = int.from_bytes(picture[16:20], "big")
    assert width == pytest.approx(trace.plot().figure.get_size_inches()[0] * 120, abs=1)
