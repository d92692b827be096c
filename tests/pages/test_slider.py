"""The page with a slider: its chunks carry the numbers, its manifest the texts, and it needs nothing beside itself."""

import json

import numpy as np
import pytest
import torch
from page_reader import PageFile

from diffusion_lens import pages, plots

NAN = float("nan")
CANVASES = [
    ["▁Ada", "▁is", "[MASK]", "<eos>", "[MASK]"],
    ["▁Ada", "▁is", "$x$", "<eos>", "</script><b>"],
    ["▁Ada", "▁is", "$x$", "<eos>", "▁a&b\u2028<!--"],
]


def scores():
    p = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25
    p[1, 2, 1] = 0.875
    p[0, 3] = NAN
    return p


def slider(p, **changes):
    settings = dict(
        str_canvases=CANVASES,
        subject=(0, 1),
        steps=[4, 5, 7],
        layers=[6, 2],
        positions=[4, 2, 0, 3],
        kind="mlp",
        answer=["▁x", "<eos>"],
        clean=torch.tensor([0.9, 0.95, 1.0]),
        corrupted=torch.tensor([0.125, 0.0625, 0.5]),
        title="one <fact>",
    )
    return pages.step_slider(p, **{**settings, **changes})


def written(page, folder):
    return PageFile(pages.write_page(page, folder / "page.html").read_text(encoding="utf-8"))


def test_chunks_contain_the_scores_of_each_step(tmp_path):
    p, page = scores(), written(slider(scores()), tmp_path)
    for i, step in enumerate([4, 5, 7]):
        header, arrays = page.read(f"trace/mlp/{step}")
        np.testing.assert_array_equal(arrays["scores"].astype(np.float32), p[i].numpy())
        assert header == {
            "clean": pytest.approx([0.9, 0.95, 1.0][i]),
            "corrupted": [0.125, 0.0625, 0.5][i],
            "highest": 0.875,
        }
    (trace,) = page.run()["traces"]
    assert (trace["positions"], trace["layers"], trace["steps"]) == ([4, 2, 0, 3], [6, 2], [4, 5, 7])
    assert (trace["kind"], trace["subject"], trace["chunk"]) == ("mlp", [0, 1], "trace/mlp/{step}")
    assert (trace["corrupted"], trace["highest"]) == ([0.125, 0.0625, 0.5], 0.875)


def test_texts_of_tokens_survive_the_page(tmp_path):
    page = written(slider(scores()), tmp_path)
    blank_is_none = [[None if word == "[MASK]" else word for word in canvas] for canvas in CANVASES]
    assert page.texts(page.run()["canvases"]) == blank_is_none
    assert page.run()["steps"] == [4, 5, 7]
    assert page.manifest["title"] == "one <fact>"
    assert "<title>one &lt;fact&gt;</title>" in page.text


def test_a_page_makes_no_request(tmp_path):
    page = written(slider(scores()), tmp_path)
    assert page.requests() == []
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'")
    assert page.module.strip().endswith('mountFile(document.getElementById("explorer"));')
    assert len(page.text) < 320_000


def test_the_same_numbers_give_the_same_file(tmp_path):
    again = written(slider(scores()), tmp_path / "again")
    assert written(slider(scores()), tmp_path).text == again.text


def test_a_notebook_shows_the_page_in_a_frame():
    page = slider(scores())
    (frame,) = (attributes for tag, attributes in elements(page._repr_html_()) if tag == "iframe")
    assert frame["srcdoc"] == page.html()
    assert frame["sandbox"] == "allow-scripts allow-downloads"
    assert json.dumps(repr(page)).startswith('"Page(')


def elements(text):
    from page_reader import Scripts

    return Scripts(text).elements


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "new" / "page.html"
    assert pages.write_page(slider(scores()), target) == target
    before = target.read_bytes()

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        pages.write_page(slider(scores(), title="another"), target)
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert target.read_bytes() == before


def test_a_page_is_an_html_file_of_limited_size(tmp_path):
    with pytest.raises(ValueError, match=r"page\.png should end in \.html"):
        pages.write_page(slider(scores()), tmp_path / "page.png")
    with pytest.raises(ValueError, match=r"would have [\d,]+ bytes, and max_bytes is 100: trace takes .* fewer steps"):
        pages.write_page(slider(scores()), tmp_path / "page.html", max_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_both_import_paths_give_the_same_functions():
    assert (plots.step_slider, plots.write_page) == (pages.step_slider, pages.write_page)
