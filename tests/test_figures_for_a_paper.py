"""Figures for a paper: their size, fonts, colours, files and captions."""

import re
import zlib
from dataclasses import replace
from inspect import signature
from itertools import combinations

import numpy as np
import pytest
import torch
from results import HEADS, LAYERS, NAMES, POS, RECORD, STEPS, every_result

from diffusion_lens import plots
from diffusion_lens.analysis import (
    CausalTrace,
    Comparisons,
    Faithfulness,
    LogitLens,
    LoopSettings,
    ReversalSignatures,
    SteeringVectors,
    average_indirect_effect,
    average_trajectory_effect,
    trace_trajectory,
)
from diffusion_lens.plots.axes import LINES, MARKERS
from diffusion_lens.records.results import PicturedResult

COLUMN = (3.3, 2.2)  # inches
# Linear RGB as people without one kind of cones see it: Machado, Oliveira & Fernandes 2009, severity 1.
SEEN = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "a grey print": np.tile([0.2126, 0.7152, 0.0722], (3, 1)),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return [each for each in every_result(tmp_path_factory.mktemp("results")) if hasattr(each, "plot")]


def drawn(result, **settings):
    """The axes of the picture of a result, for the signatures one of each panel."""
    with plots.style(**settings):
        if isinstance(result, ReversalSignatures):
            return [result.plot(show=panel) for panel in plots.SIGNATURES]
        return [result._picture() if isinstance(result, PicturedResult) else result.plot()]


@pytest.fixture(scope="module")
def plain(results):
    """All pictures as they are by default."""
    return pictures(results)


@pytest.fixture(scope="module")
def in_a_column(results):
    """All pictures in a column of a paper."""
    return pictures(results, size=COLUMN, font_size=7)


@pytest.fixture(scope="module")
def changed(results):
    """All pictures with texts of twice the size, in other colours."""
    return pictures(results, font_size=18, cmap="cividis")


def pictures(results, **settings):
    return [(type(result).__name__, ax) for result in results for ax in drawn(result, **settings)]


def lab(colours, seen="all cones"):
    """CIE L*a*b* (D65) of sRGB colours, as they are seen."""
    rgb = np.asarray(colours, dtype=float)[..., :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ np.transpose(SEEN[seen])
    xyz = linear.clip(0, 1) @ TO_XYZ.T / TO_XYZ.sum(axis=1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)


def shown_texts(figure):
    """The texts of a figure without labels of ticks outside the axes, which matplotlib has and does not draw."""
    from matplotlib.text import Text

    unseen = []
    for ax in figure.axes + [inner for outer in figure.axes for inner in outer.child_axes]:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            unseen += [
                text for tick in ticks if not low <= tick.get_loc() <= high for text in (tick.label1, tick.label2)
            ]
    hidden = set(map(id, unseen))
    texts = figure.findobj(Text)
    return [text for text in texts if text.get_text().strip() and text.get_visible() and id(text) not in hidden]


def overlapping(labels, shown):
    boxes = [label.get_window_extent() for label in labels if any(label is each for each in shown)]
    return [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_labels_have_room_in_a_column_of_a_paper(in_a_column):
    for name, ax in in_a_column:
        figure = ax.figure
        figure.draw_without_rendering()
        assert tuple(figure.get_size_inches()) == COLUMN
        shown = shown_texts(figure)
        for each in figure.axes + [inner for outer in figure.axes for inner in outer.child_axes]:
            for axis in (each.xaxis, each.yaxis):
                assert not overlapping(axis.get_ticklabels(), shown), (name, axis)
        assert not overlapping([ax.title, ax.xaxis.label, *ax.get_xticklabels()], shown), name
        page = figure.bbox
        for text in shown:
            box = text.get_window_extent()
            inside = page.x0 <= box.x0 and page.y0 <= box.y0 and box.x1 <= page.x1 and box.y1 <= page.y1
            assert inside, (name, text.get_text(), box)
        # Something is left for the picture.
        assert ax.get_window_extent().width > 0.3 * page.width, name
        assert ax.get_window_extent().height > 0.25 * page.height, name


def test_a_small_figure_draws_every_row_and_column(results, in_a_column, plain):
    """Without room for texts, the texts are left out and not the numbers."""
    shapes = {
        "CausalTrace": (POS, LAYERS),
        "TrajectoryTrace": (POS, LAYERS),
        "TemporalEffect": (POS, LAYERS),
        "PatchGrid": (POS, LAYERS),
        "NodeScores": (HEADS + 1, LAYERS),
        "NeuronScores": (POS, 2),
        "EdgeScores": (2 * LAYERS + 1, 4 * LAYERS + 1),
        "LogitLens": (POS, LAYERS),
        "AttentionSinks": (POS, STEPS),
        "CacheDrift": (LAYERS, STEPS),
        "AttentionRollout": (3, 3),
        "RetrievalHeads": (LAYERS, HEADS),
        "StateDrift": (LAYERS, STEPS - 1),
        "Projection": (len(NAMES), STEPS),
        "RemaskEffect": (3, POS),
        "RankStability": (2, 2),
        "AverageTrajectoryEffect": (STEPS, LAYERS),
        "AverageRunGraph": (20, 6),
        "Predictions": (17, STEPS),
    }
    seen = set()
    for name, ax in in_a_column:
        if name in shapes:
            (image,) = ax.get_images()
            assert image.get_array().shape == shapes[name], name
            seen.add(name)
    with_maps = {name for name, ax in plain if ax.get_images()}
    assert with_maps - {"Trajectory", "RunDifference"} == shapes.keys()
    assert seen == shapes.keys()
    (lens,) = [result for result in results if isinstance(result, LogitLens)]
    for settings in ({"step": 0}, {"step": 0, "size": (7.0, 3.0)}, {"step": 0, "size": COLUMN, "font_size": 7}):
        assert lens.plot(**settings).get_images()[0].get_array().shape == (POS, LAYERS)
    assert lens.plot(position=3, size=COLUMN).get_images()[0].get_array().shape == (STEPS, LAYERS)


def test_cells_keep_their_colours(tmp_path):
    """Also those of a map with more cells than dots, and in vector graphics at any scale."""
    from matplotlib import colormaps
    from matplotlib.image import imread

    n_rows, n_columns = 256, 80
    values = torch.zeros(n_rows, n_columns)
    values[100, 41] = values[180, 7] = 1.0
    labels = {"rows": ["t"] * n_rows, "layers": range(n_columns), "xlabel": "x", "bar": "b", "title": "t"}
    ax = plots.labelled_map(values, **labels, hue="Purples", limits=(0.0, 1.0), size=COLUMN)
    picture = imread(plots.save_figure(ax, tmp_path / "map.png"))[..., :3]
    box = ax.get_window_extent()
    scale = picture.shape[0] / ax.figure.bbox.height
    inside = picture[
        int(picture.shape[0] - scale * box.y1) + 2 : int(picture.shape[0] - scale * box.y0) - 2,
        int(scale * box.x0) + 2 : int(scale * box.x1) - 2,
    ].reshape(-1, 3)
    ends = colormaps["Purples"]([0.0, 1.0])[:, :3]
    distances = np.abs(inside[:, None] - ends).max(axis=-1)
    assert distances.min(axis=1).max() < 0.01  # no other colours
    assert (distances.argmin(axis=1) == 1).sum() >= 2
    pdf = plots.save_figure(ax, tmp_path / "map.pdf").read_bytes()
    assert re.search(rb"/Height 256", pdf)
    assert re.search(rb"/Width 80", pdf)


@pytest.mark.parametrize("n_pos", [4, 24, 120])
def test_labels_are_left_out_by_the_room_there_is(n_pos):
    def labels(height):
        values = torch.rand(n_pos, 3)
        rows = [f"row {i}" for i in range(n_pos)]
        ax = plots.labelled_map(
            values,
            rows=rows,
            layers=[0, 1, 2],
            xlabel="x",
            hue="Blues",
            limits=(0.0, 1.0),
            bar="b",
            title="t",
            size=(3.3, height),
        )
        ax.figure.draw_without_rendering()
        at, texts = ax.get_yticks().astype(int).tolist(), [label.get_text() for label in ax.get_yticklabels()]
        assert texts == [rows[i] for i in at]
        every = at[1] - at[0]
        assert at == list(range(0, n_pos, every))
        return len(at)

    assert 1 < labels(2.0) <= labels(4.0) <= labels(60.0) == n_pos


def test_sizes_follow_the_font_size(changed, plain):
    """All texts of a picture change in the same proportion, and all of them change."""
    for (name, ax), (_, larger) in zip(plain, changed, strict=True):
        if name in ("Trajectory", "Predictions", "LogitLens", "RankStability"):  # tokens in cells of a fixed size
            continue
        for one, other in zip(
            [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.get_yticklabels()[:1]],
            [larger.title, larger.xaxis.label, larger.yaxis.label, *larger.get_yticklabels()[:1]],
            strict=True,
        ):
            assert other.get_fontsize() == pytest.approx(2 * one.get_fontsize()), (name, one.get_text())


def test_a_colour_map_reaches_every_picture(changed):
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_hex

    cividis = {to_hex(colour) for colour in colormaps["cividis"](range(256))}
    for name, ax in changed:
        images = ax.get_images()
        if name == "RunDifference":  # three colours
            (image,) = images
            assert {to_hex(colour) for colour in image.get_cmap().colors} - {"#ffffff"} <= cividis
        elif images:
            assert {image.get_cmap().name for image in images} == {"cividis"}, name
        if images:
            continue
        coloured = [line.get_color() for line in ax.lines if line.get_marker() not in ("None", ".", "x", "+", "_", "|")]
        coloured += [patch.get_facecolor() for patch in ax.patches]
        coloured += [
            colour for each in ax.collections if not isinstance(each, LineCollection) for colour in each.get_facecolor()
        ]
        greys = {"#999999", "#666666", "#8c8c8c", "#cccccc", "#bfbfbf", "#404040"}
        colours = {to_hex(colour) for colour in coloured} - greys
        assert colours, name
        assert colours <= cividis, name


def test_a_map_that_lists_its_colours_gives_the_first_ones(results):
    (curves,) = [result for result in results if isinstance(result, Faithfulness)]
    own = [line.get_color() for line in curves.plot(cmap="Set1").lines if line.get_marker() == "o"]
    assert own == ["#e41a1c"]
    both = [line.get_color() for line in curves.plot(cmap="Set1").lines if line.get_label().startswith("step")]
    assert both == ["#e41a1c", "#377eb8"]


def test_curves_that_are_drawn_on_the_same_axes_differ(results):
    (similarity,) = [result for result in results if isinstance(result, Comparisons)]
    ax = similarity.plot(label="one", font_size=8)
    similarity.plot(ax=ax, label="other")
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["one"].get_color() == lines["one, by chance"].get_color() == LINES[0]
    assert lines["other"].get_color() == lines["other, by chance"].get_color() == LINES[1]
    assert lines["one"].get_marker() != lines["other"].get_marker()


def test_curves_of_a_chosen_map_have_colours_of_their_own():
    curves = {f"step {i}": torch.rand(3) for i in range(8)}
    for cmap in ("viridis", None):
        ax = plots.kept_by_size(curves, [0, 10, 100], cmap=cmap)
        own = [line for line in ax.lines if line.get_marker() != "None"]
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in own}
        assert len(looks) == 8
        assert len({line.get_color() for line in own}) == (8 if cmap else len(LINES))
    _, [ax] = plots.panels(1, 1, 4, 3)
    with plots.style(cmap="viridis"):
        assert len({plots.look(i).colour for i in range(20)}) == 20
        for _ in range(6):
            plots.reliability(torch.rand(4), torch.rand(4), torch.ones(4, dtype=torch.long), ax=ax)
    dots = [(tuple(each.get_facecolor()[0]), each.get_paths()[0].vertices.tobytes()) for each in ax.collections]
    assert len(set(dots)) == len({colour for colour, _ in dots}) == len({marker for _, marker in dots}) == 6


def test_default_maps_are_safe(plain):
    """Sequential maps get darker, or lighter, all the way, for all readers and in grey; diverging ones to both ends."""
    from matplotlib import colormaps

    kinds = {"sequential": set(), "diverging": set()}
    names = {image.get_cmap().name for name, ax in plain if name != "RunDifference" for image in ax.get_images()} | {
        *plots.HUES.values()
    }
    for name in sorted(names):
        for seen in SEEN:
            lightness = lab(colormaps[name](np.arange(256)), seen)[:, 0]
            change = np.diff(lightness)
            # A colour of eight bits is up to a third of a unit of lightness away.
            monotone = (change <= 0.35).all() or (change >= -0.35).all()
            if monotone:
                kinds["sequential"].add(name)
                assert abs(lightness[-1] - lightness[0]) > 50, (name, seen)
                continue
            kinds["diverging"].add(name)
            middle = int(lightness.argmax())
            assert abs(middle - 127.5) < 3, (name, seen)
            assert (change[:middle] >= -0.35).all(), (name, seen)
            assert (change[middle:] <= 0.35).all(), (name, seen)
            assert abs(lightness[0] - lightness[-1]) < 12, (name, seen)
            if seen != "a grey print":
                ends = lab(colormaps[name]([0.0, 1.0]), seen)
                assert np.linalg.norm(ends[0] - ends[1]) > 30, (name, seen)
    assert not kinds["sequential"] & kinds["diverging"]
    assert kinds["diverging"] == {"RdBu", "RdBu_r"}


@pytest.mark.parametrize("seen", ["all cones", "protanopia", "deuteranopia", "tritanopia"])
def test_default_lines_can_be_told_apart(seen):
    from matplotlib.colors import to_rgb

    colours = lab([to_rgb(colour) for colour in LINES], seen)
    assert min(np.linalg.norm(one - other) for one, other in combinations(colours, 2)) > 10
    assert colours[:, 0].max() < 80  # on white


def test_lines_of_one_picture_differ_without_colour():
    looks = [plots.look(i, 20) for i in range(20)]
    assert len({(each.marker, each.dash) for each in looks}) == 20
    assert len(set(MARKERS)) == len(LINES)
    bars = [plots.look(i, 4).hatch for i in range(1, 4)]
    assert len(set(bars)) == 3


def test_text_of_vector_graphics_is_text(results, tmp_path):
    (trace,) = [result for result in results if isinstance(result, CausalTrace)]
    ax = trace.plot(size=COLUMN, font_size=7, title="Pläne & <b>")
    written = plots.save_figure(ax, tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert re.search(r"<text [^>]*>layer \(hidden state restored\)</text>", written)
    assert "Pläne &amp; &lt;b&gt;" in written
    pdf = plots.save_figure([ax], str(tmp_path / "figure.pdf")).read_bytes()
    assert b"/Type3" not in pdf
    assert b"/Subtype /Type0" in pdf or b"/Subtype /TrueType" in pdf
    assert b"/FontFile2" in pdf  # a TrueType font
    streams = [zlib.decompress(found) for found in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", pdf, re.DOTALL)]
    assert any(b"TJ" in stream or b"Tj" in stream for stream in streams)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["figure.pdf", "figure.svg"]
    with pytest.raises(ValueError, match=r"figure\.word.*not supported"):
        plots.save_figure(ax.figure, tmp_path / "figure.word")


def test_captions_are_sentences(results):
    for result in results:
        caption = result.caption()
        first, *rest = caption.split(". ")
        assert first.startswith("For toy, the figure shows "), caption
        assert caption.endswith(".")
        assert len(rest) <= 1
        assert not re.search(r"[\[\]{}<>='\"]|None|True|False|tensor|\bdict\b", caption.replace("prompt's", "")), (
            caption
        )
        if "weights_sha256" in result._settings():
            assert "weights begins with 0123456789ab" in caption
            assert "samples 10" in caption


def test_a_caption_has_the_settings_that_decide_the_numbers():
    from diffusion_lens.records.captions import caption_of

    record = {
        "dtype": "float32",
        "loop": {"steps": None, "temperature": 0.5, "seed": 3, "batch_size": 32},
        "sampler": {"name": "confidence", "eps": 1e-5, "proposal": {"top_k": 4, "top_p": None}},
        "steps": [0, 1, 2],
        "cfg_scale": 0.5,
        "seconds": 3.0,
        "forward_passes": 12,
        "mask_entities": True,
        "swap": None,
        "seed": 1,
        "facts": {"a": {}, "b": {}},
        "hooks": {"blocks.0.hook_resid_post": ["steer"]},
        "model": "llada",
        "mode": "diffusion",
    }
    assert caption_of("the loss", record) == (
        "For llada@diffusion, the figure shows the loss. The settings are 2 facts, sampler confidence (eps 1e-05, "
        "top k 4), steps 0 to 2, cfg scale 0.5, temperature 0.5, seed of the loop 3, seed 1, 1 hook "
        "(blocks.0.hook_resid_post), dtype float32, mask entities."
    )
    assert caption_of("the loss", {}) == "The figure shows the loss."


@pytest.fixture(scope="module")
def site():
    """A model with real facts, a fact as a query, and a run that is guided and draws its tokens."""
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.data import site_facts

    model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
    facts = site_facts.load().facts("attribute")
    query = facts[3].to_query(model, n_masks=3)
    return model, facts, query, model.denoise(query.tokens[None], steps=3, cfg_scale=1.0, temperature=0.5, seed=[3])


def test_no_deciding_setting_of_a_real_result_is_left_out(site):
    model, facts, query, run = site
    some = {"length": 12, "first_tokens": 1, "roles": ["subject_last"], "samples": 2, "seed": 7}
    trace = {"noise": 0.5, "samples": 2, "kind": "mlp", "window": 3, "seed": 9, "layers": [1], "positions": [2]}
    drawn = ["sampler confidence (", "steps 3", "cfg scale 1", "temperature 0.5", f"seed {run.record['seeds'][0]}"]
    traced = ["kind mlp", "corruption gaussian", "noise 0.5", "window 3", "samples 2", "seed 9", *drawn[:-1]]
    for result, said in (
        (run, drawn),
        (
            trace_trajectory(model, query, trajectory=run, **trace),
            [*traced, f"seed of the run {run.record['seeds'][0]}"],
        ),
        (
            average_indirect_effect(model, facts[::1500], severed="mlp", occurrence=0, **some),
            ["severed mlp", "corruption gaussian", "samples 2", "5 facts", "occurrence 0", "length 12", "seed 7"],
        ),
        (
            average_trajectory_effect(model, facts[::2500], noise=0.9, loop=LoopSettings(temperature=0.25), **some),
            ["noise 0.9", "3 facts", "seed 7", "sampler confidence (", "temperature 0.25", "seed of the loop 1"],
        ),
    ):
        caption = result.caption()
        parts = re.split(r", (?![^(]*\))|; |[.] The settings are ", caption)
        for each in said:
            assert any(part.startswith(each) for part in parts), (each, caption)
        for name in ("forward passes", "batch size", "replayed", "compared", "step 0 first"):
            assert name not in caption


def test_the_caption_of_a_difference_describes_both_runs(site):
    model, _, query, run = site
    zero = [("blocks.3.hook_attn_out", lambda activation, hook: activation * 0)]
    other = run.diff(model.denoise(query.tokens[None], steps=5, temperature=0.5, seed=[3], fwd_hooks=zero))
    assert other.caption() == (
        "For site-mdm, the figure shows two runs of one prompt after each denoising step, with both texts where they "
        "differ. The settings are sampler confidence (scope row, eps 1e-05, choice temperature 0, score probability, "
        f"scored on model), temperature 0.5, seed {run.record['seeds'][0]}, dtype float32, in the first run steps 3 "
        "and cfg scale 1 and no hooks, in the second run steps 5 and cfg scale 0 and 1 hook (blocks.3.hook_attn_out); "
        "the SHA-256 of the weights begins with 5f195bd5187a."
    )
    record = {**run.record, "model": "another", "weights_sha256": "abcdefabcdefabcdef"}
    caption = run.diff(replace(run, record=record)).caption()
    assert caption.startswith("For site-mdm and another, the figure shows two runs")
    assert caption.endswith("the SHA-256 of the weights begin with 5f195bd5187a and abcdefabcdef.")


def test_a_caption_says_what_is_drawn(results):
    by_name = {type(result).__name__: result for result in results}
    for name, selected, said in (
        ("Predictions", {"show": "margin"}, "with the margin between the two likeliest tokens."),
        ("Predictions", {}, "with the entropy of the prediction."),
        ("LogitLens", {"step": 2, "show": "probability", "target": 1}, "with the probability of target 1, step 2."),
        (
            "RankStability",
            {"statistic": "kendall"},
            "how alike several results rank the same sites, by the rank correlation τ of Kendall.",
        ),
        ("PatchGrid", {"step": 2, "head": 1}, "by position and layer, step 2 and head 1."),
        ("TrajectoryTrace", {"step": 3}, "at one denoising step, step 3."),
        ("Trajectory", {"row": 0}, "when it was written, row 0."),
    ):
        caption = by_name[name].caption(**selected)
        assert said in caption, caption
        with pytest.raises(TypeError, match=r"caption\(\) got 'stepp', which does not choose what is drawn; "):
            by_name[name].caption(stepp=1)
    steering = [result for result in results if isinstance(result, SteeringVectors)]
    assert {result.plot().get_ylabel() == "norm" for result in steering} == {
        "shows the norm of" in result.caption() for result in steering
    }


def test_a_caption_needs_no_more_of_a_record_than_the_file_must_have(results):
    (stability,) = [result for result in results if type(result).__name__ == "RankStability"]
    record = {name: value for name, value in stability.record.items() if name in type(stability).ENTRIES}
    assert replace(stability, record=record).caption().startswith("The figure shows how alike")


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"cmap": "virdis"}, ValueError, r"cmap='virdis' is no colour map of matplotlib; nearest are viridis"),
        ({"cmap": 3}, TypeError, r"cmap=3 is an int; it must be the name of a colour map.*Colormap"),
        ({"size": (3.3,)}, ValueError, r"size=\(3.3,\); give width and height in inches, such as size=\(3.3, 2.2\)"),
        ({"size": (3.3, -1)}, ValueError, r"size=\(3.3, -1.0\); it is width and height in inches, each from 0.5"),
        ({"size": (240, 160)}, ValueError, r"inches, each from 0.5 to 100"),
        ({"font_size": 0}, ValueError, r"font_size=0.0; it must be from 3 to 72 points"),
        ({"font_sise": 7}, TypeError, r"unexpected keyword argument 'font_sise'; the nearest is 'font_size'"),
    ],
)
def test_errors_say_what_fits(results, settings, error, said):
    (trace,) = [result for result in results if isinstance(result, CausalTrace)]
    with pytest.raises(error, match=said):
        trace.plot(**settings)
    assert trace.plot().figure.get_size_inches().tolist() != list(COLUMN)


def test_a_figure_has_one_size(results):
    trace, *_ = results
    _, [left, right] = plots.panels(1, 2, 7.0, 2.4)
    with pytest.raises(ValueError, match=r"size=\(3.3, 2.2\) is that of a new figure, and ax= draws.*one of the two"):
        trace.plot(ax=left, size=COLUMN)
    assert trace.plot(ax=right, font_size=6, cmap="cividis") is right
    assert trace.plot().get_images()[0].get_cmap().name == "Purples"  # the settings end with the call


def test_signatures_and_help_have_the_settings(results):
    for result in results:
        names = list(signature(result.plot).parameters)
        assert {"cmap", "size", "font_size", "ax"} <= set(names), type(result)
        assert "cmap, size, font_size: " in result.plot.__doc__
    for name in plots.__all__:
        draws = getattr(plots, name)
        if "ax" in getattr(getattr(draws, "__code__", None), "co_varnames", ()):
            assert "cmap" in signature(draws).parameters, name


def test_four_panels_need_room(results):
    (signatures,) = [result for result in results if isinstance(result, ReversalSignatures)]
    with pytest.raises(ValueError, match=r"too small for four panels, which need 6.4 x 1.8 inches; .*show="):
        signatures.plot(size=COLUMN)
    _, [ax] = plots.panels(1, 1, 3.3, 2.2)
    with pytest.raises(ValueError, match="ax= is one panel, and there are four: give show="):
        signatures.plot(ax=ax)
    with pytest.raises(ValueError, match="show='route' is unknown, nearest is routes"):
        signatures.plot(show="route")
    with pytest.raises(ValueError, match="draws the panel of one model"):
        signatures.plot(against=[signatures], show="routes")
    assert signatures.plot(show="routes", ax=ax) is ax
    four = signatures.plot(size=(7.0, 2.5), font_size=6)
    assert len(four) == 4
    assert tuple(four[0].figure.get_size_inches()) == (7.0, 2.5)


def test_a_single_steering_vector_shows_its_largest_components():
    positive, negative = torch.zeros(40), torch.zeros(40)
    positive[[3, 17]], negative[17] = torch.tensor([1.0, -2.0]), 3.0
    record = {**RECORD, "steps": None, "n_steps": None}
    vectors = SteeringVectors({NAMES[0]: positive}, {NAMES[0]: negative}, torch.tensor(5), torch.tensor(6), record)
    ax = vectors.plot()
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["component 17", "component 3"]
    widths = [[bar.get_width() for bar in group][:2] for group in ax.containers]
    assert widths == [[-2.0, 1.0], [3.0, 0.0]]
    assert [bar.get_hatch() or "" for bar in (group[0] for group in ax.containers)] == ["", "////"]
    assert "norm 5.1" in ax.get_title()
