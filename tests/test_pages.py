"""The page with a slider: its frames carry the numbers, and it needs nothing beside itself."""

import json
import re
import sys

import pytest
import torch

from diffusion_lens import pages

NAN = float("nan")
CANVASES = [
    ["▁Ada", "▁is", "[MASK]", "<eos>", "[MASK]"],
    ["▁Ada", "▁is", "$x$", "<eos>", "</script><b>"],
    ["▁Ada", "▁is", "$x$", "<eos>", "▁a&b"],
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


def written(figure, folder):
    """The page's text, and the arguments of its calls to plotly.js, as a browser would read them."""
    text = pages.write_page(figure, folder / "page.html").read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    start = re.search(r'Plotly\.newPlot\(\s*"figure",\s*', text).end()
    data, end = decoder.raw_decode(text, start)
    layout, _ = decoder.raw_decode(text, re.compile(r",\s*").match(text, end).end())
    frames, _ = decoder.raw_decode(text, re.search(r"Plotly\.addFrames\(\s*'figure',\s*", text).end())
    return text, data, layout, frames


def numbers(z):
    return torch.tensor([[NAN if p is None else p for p in row] for row in z])


def test_frames_carry_the_scores(tmp_path):
    p = scores()
    _, (first,), layout, frames = written(slider(p), tmp_path)
    assert [frame["name"] for frame in frames] == ["4", "5", "7"]
    for i, frame in enumerate(frames):
        torch.testing.assert_close(numbers(frame["data"][0]["z"]), p[i], rtol=0, atol=0, equal_nan=True)
    assert first["z"] == frames[0]["data"][0]["z"]
    assert first["z"][3] == [None, None]
    assert (first["zmin"], first["zmax"]) == (0.0625, 0.875)
    assert not any({"zmin", "zmax"} & set(frame["data"][0]) for frame in frames)
    assert layout["xaxis"]["ticktext"] == ["6", "2"]
    assert first["customdata"] == [[6, 2]] * 4
    assert "MLP outputs" in layout["xaxis"]["title"]["text"]


def test_labels_follow_the_canvas(tmp_path):
    _, (first,), layout, frames = written(slider(scores()), tmp_path)
    labels = [frame["layout"]["yaxis"]["ticktext"] for frame in frames]
    assert labels == [
        ["[MASK]", "[MASK]", "Ada*", "&lt;eos&gt;"],
        ["&lt;/script&gt;&lt;b&gt;", "$x$", "Ada*", "&lt;eos&gt;"],
        ["a&amp;b", "$x$", "Ada*", "&lt;eos&gt;"],
    ]
    assert layout["yaxis"]["ticktext"] == labels[0]
    assert layout["yaxis"]["tickvals"] == first["y"] == [0, 1, 2, 3]
    assert layout["yaxis"]["autorange"] == "reversed"
    for frame, column in zip(frames, labels, strict=True):
        assert frame["data"][0]["text"] == [[label, label] for label in column]
    assert all(part in first["hovertemplate"] for part in ("%{text}", "layer %{customdata}", "%{z"))
    assert first["colorbar"]["title"]["text"] == "p(x &lt;eos&gt;)"


def test_the_slider_goes_through_the_steps(tmp_path):
    _, _, layout, frames = written(slider(scores()), tmp_path)
    (bar,) = layout["sliders"]
    assert [(move["label"], move["method"], move["args"][0]) for move in bar["steps"]] == [
        (name, "animate", [name]) for name in ("4", "5", "7")
    ]
    # Without it a browser moves the slider and leaves the heat map as it was.
    assert all(move["args"][1]["frame"]["redraw"] for move in bar["steps"])
    titles = [frame["layout"]["title"]["text"] for frame in frames]
    assert layout["title"]["text"] == titles[0]
    assert all(title.startswith("one &lt;fact&gt;<br>") for title in titles)
    assert "step 5: clean 0.95, corrupted 0.06" in titles[1]


@pytest.mark.parametrize(("kind", "darkest"), [("resid", (63, 0, 125)), ("mlp", (0, 68, 27)), ("attn", (103, 0, 13))])
def test_hues_are_those_of_the_plots(kind, darkest):
    from matplotlib import colormaps

    from diffusion_lens.plots import HUES

    assert tuple(round(255 * part) for part in colormaps[HUES[kind]](1.0)[:3]) == darkest
    end, colour = slider(scores(), kind=kind).data[0].colorscale[-1]
    assert (end, colour.replace(" ", "")) == (1.0, "rgb({},{},{})".format(*darkest))


def test_a_page_needs_no_network(tmp_path):
    text, *_ = written(slider(scores()), tmp_path)
    assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)\s*=", text) == []
    assert "plotly.js v" in text
    assert "Plotly.animate(" not in text.rsplit("Plotly.newPlot(", 1)[1]  # it stands still until it is moved
    assert pages.write_page(slider(scores()), tmp_path / "again.html").read_text(encoding="utf-8") == text


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "new" / "page.html"
    figure = slider(scores())
    assert pages.write_page(figure, target) == target
    before = target.read_bytes()

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        pages.write_page(slider(scores(), title="another"), target)
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert target.read_bytes() == before


def test_a_page_is_an_html_file(tmp_path):
    with pytest.raises(ValueError, match=r"page\.png should end in \.html"):
        pages.write_page(slider(scores()), tmp_path / "page.png")
    assert list(tmp_path.iterdir()) == []


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pages need plotly: pip install 'diffusion-lens\[plot\]'"):
        slider(scores())
