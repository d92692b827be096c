"""Pictures carry the numbers and the texts they were given."""

import io
import sys
from itertools import combinations, pairwise

import pytest
import torch

from diffusion_lens import plots
from diffusion_lens.analysis import CausalTrace
from diffusion_lens.plots.axes import short_answer, shortened

WORDS = ["<s>", "▁Daphne", "▁Bar", "ring", "ton", "▁was", "[MASK]", "[MASK]"]
NAN = float("nan")


def trace_of(scores, *, kind="resid", corrupted=0.1, positions=None, layers=None, words=None, answer=(" the",)):
    n_pos, n_layers = scores.shape
    return CausalTrace(
        scores=scores,
        token_scores=scores[..., None],
        clean_token_scores=torch.tensor([0.75]),
        corrupted_token_scores=torch.tensor([corrupted]),
        clean=0.75,
        corrupted=corrupted,
        known=True,
        str_tokens=list(words or WORDS),
        subject=(1, 5),
        positions=list(positions or range(n_pos)),
        layers=list(layers or range(n_layers)),
        record={"kind": kind, "answer": list(answer), "model": "toy"},
    )


def grid(n_pos, n_layers, *, top=1.0, seed=0):
    """Scores between 0.1 and `top`, which is reached in one cell."""
    scores = torch.rand(n_pos, n_layers, generator=torch.Generator().manual_seed(seed)) * (top - 0.1) + 0.1
    scores[0, 0] = top
    return scores


def drawn(figure):
    """The figure as it would be saved; text that is taken for a broken formula raises here."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=40)
    return target.getvalue()


def y_labels(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def x_labels(ax):
    return {int(at): label.get_text() for at, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)}


def shown_scores(ax):
    return torch.from_numpy(ax.get_images()[0].get_array().filled(NAN))


def bar_of(ax):
    return ax.get_images()[0].colorbar.ax


@pytest.mark.parametrize(
    ("kind", "hue", "restored"),
    [("resid", "Purples", "hidden state"), ("mlp", "Greens", "MLP outputs"), ("attn", "Reds", "attention outputs")],
)
def test_a_heat_map_carries_its_trace(kind, hue, restored):
    scores = grid(8, 4)
    ax = trace_of(scores, kind=kind).plot()
    assert torch.equal(shown_scores(ax), scores)
    assert y_labels(ax) == ["<s>", "Daphne*", "Bar*", "ring*", "ton*", "was", "[MASK]", "[MASK]"]
    assert x_labels(ax) == {0: "0", 1: "1", 2: "2", 3: "3"}
    (image,) = ax.get_images()
    assert image.get_cmap().name == hue
    assert image.get_clim() == (0.1, 1.0)
    assert restored in ax.get_xlabel()
    assert ax.get_title() == "toy\nclean 0.75, corrupted 0.10"
    assert [text.get_text() for text in bar_of(ax).texts] == ["p(the)"]


def test_rows_and_columns_are_those_that_were_traced():
    scores = grid(3, 2)
    ax = trace_of(scores, positions=[6, 4, 0], layers=[17, 3]).plot(title="mine", limits=(0.0, 0.5))
    assert torch.equal(shown_scores(ax), scores)
    assert y_labels(ax) == ["[MASK]", "ton*", "<s>"]
    assert x_labels(ax) == {0: "17", 1: "3"}
    assert ax.get_images()[0].get_clim() == (0.0, 0.5)
    assert ax.get_title() == "mine"


@pytest.mark.parametrize("n_layers", [12, 13, 20, 48])
def test_many_layers_are_numbered_sparsely(n_layers):
    layers = [2 * layer + 5 for layer in range(n_layers)]
    labels = x_labels(trace_of(grid(2, n_layers), layers=layers).plot())
    assert 6 < len(labels) <= 12
    assert labels == {column: str(layers[column]) for column in labels}


def test_absent_positions_are_blank():
    scores = grid(4, 3)
    scores[2:] = NAN
    for ax in (trace_of(scores).plot(), *plots.trace_panels([[trace_of(scores)]]).axes):
        torch.testing.assert_close(shown_scores(ax), scores, equal_nan=True)
        (image,) = ax.get_images()
        assert image.get_clim() == (0.1, 1.0)
        assert ax.get_facecolor() not in (image.get_cmap()(0.0), (1.0, 1.0, 1.0, 1.0))  # grey is no probability


def test_a_scale_has_an_extent_where_nothing_came_back():
    ax = trace_of(torch.full((2, 2), 0.05), corrupted=0.1).plot()
    low, high = ax.get_images()[0].get_clim()
    assert low == 0.1 < high
    assert drawn(ax.figure)


FORMULAS = ["$", r"$\oops$", r"\$", "a$b$c", "$$"]  # to matplotlib, all but the first are, or may be, formulas


def test_tokens_are_no_formulas():
    ax = trace_of(grid(5, 2), words=FORMULAS, answer=[r"$\oops$"]).plot()
    assert [label.rstrip("*") for label in y_labels(ax)] == FORMULAS
    assert bar_of(ax).texts[0].get_text() == r"p($\oops$)"
    assert drawn(ax.figure)

    n_pos = len(FORMULAS)
    canvas = plots.denoising_grid([FORMULAS, FORMULAS], [[False] * n_pos] * 2, [0] * n_pos, [1.0] * n_pos)
    assert [text.get_text() for text in canvas.texts] == FORMULAS * 2
    assert drawn(canvas.figure)


def test_the_rest_of_a_run_is_drawn_with_its_own_steps(tiny):
    """A picture from step 2 on is the lower part of the whole picture."""
    run = tiny.denoise("the", length=5, **({"steps": 4} if tiny.cfg.has_mask else {}))
    whole, rest = run.plot(), run.from_step(2).plot()
    assert [label.get_text() for label in whole.get_yticklabels()][2:] == [
        label.get_text() for label in rest.get_yticklabels()
    ]
    texts = [[(text.get_text(), text.get_color(), text.get_fontweight()) for text in ax.texts] for ax in (whole, rest)]
    assert texts[0][-len(texts[1]) :] == texts[1]
    colours = [ax.images[0].get_array().filled(-1) for ax in (whole, rest)]
    assert (colours[0][-len(colours[1]) :] == colours[1]).all()


def test_steps_that_write_nothing_share_a_thin_row(several):
    """32 steps for a few tokens, and the default number for networks with a number of their own."""
    options = {} if several.model.cfg.opens_blocks else {"steps": 32}
    run = several.model.denoise(several.tokens[:1, :4] % 500, length=10, **options)
    canvases, labels, first = run.canvases[:, 0].tolist(), ["start"], None
    for step in range(run.n_steps):
        if canvases[step + 1] != canvases[step]:
            labels.append(f"step {step}")
            first = None
        elif first is None:
            first = step
            labels.append(f"step {step} …")
        else:
            labels[-1] = f"steps {first}-{step} …"
    ax = run.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == labels
    full = [label for label in labels if not label.endswith("…")]
    assert len(ax.texts) == 10 * len(full)
    assert run.to_html().count("<tr") == len(labels)
    assert run._repr_html_().count("<tr") == run.to_html().count("<tr") + 11
    everything = ["start", *(f"step {step}" for step in range(run.n_steps))]
    assert [label.get_text() for label in run.plot(folded=False).get_yticklabels()] == everything
    assert run.to_html(folded=False).count("<tr") == len(everything)


def test_steps_that_predict_the_same_share_a_column(several):
    options = {} if several.model.cfg.opens_blocks else {"steps": 12}
    told = several.model.denoise(several.tokens[:1, :4] % 500, length=10, predictions=2, **options).predictions
    columns = [str((told.likeliest[i, 0].tolist(), told.entropy[i, 0].tolist())) for i in range(len(told.steps))]
    starts = [i for i in range(len(columns)) if i == 0 or columns[i] != columns[i - 1]]
    labels = [str(i) if j - i == 1 else f"{i}-{j - 1}" for i, j in pairwise([*starts, len(columns)])]
    for folded, expected in ((True, labels), (False, list(map(str, told.steps)))):
        ax = told.plot(folded=folded)
        assert ax.get_images()[0].get_array().shape[1] == len(expected)
        assert [label.get_text() for label in ax.get_xticklabels()] == expected[:: -(-len(expected) // 12)]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
@pytest.mark.parametrize("size", [(3.3, 2.2), (7.0, 4.0)])
def test_texts_of_a_canvas_do_not_collide(tiny, size):
    """At the width of a column and of a page."""
    run = tiny.denoise("Gustav Geisser is the", length=9, steps=5)
    for result in (run, run.diff(tiny.denoise("Gustav Geisser is the", length=9, steps=5, temperature=3.0, seed=4))):
        figure, [ax] = plots.panels(1, 1, *size)
        result.plot(ax=ax)
        assert drawn(figure)
        boxes = [text.get_window_extent() for text in (*ax.texts, *ax.get_yticklabels()) if text.get_text().strip(" →")]
        # Boxes have the height of the highest letters.
        collisions = [
            pair for pair in combinations(boxes, 2) if overlap(*pair, "x") > 1 and overlap(*pair, "y") > 0.4 * 8
        ]
        assert collisions == []


def overlap(one, other, axis):
    """Pixels that two boxes have in common along an axis; negative if there is room between them."""
    return min(getattr(one, f"{axis}1"), getattr(other, f"{axis}1")) - max(
        getattr(one, f"{axis}0"), getattr(other, f"{axis}0")
    )


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("▁the", "the"),
        (" the", "the"),
        ("the", "the"),
        ("▁", "␣"),
        ("  ", "␣␣"),
        ("", ""),
        ("\n", r"\n"),
        ("a\tb", r"a\tb"),
        ("\x00", r"\x00"),
        ("\u200b", r"\u200b"),
        ("<0x0A>", "<0x0A>"),
        ("é", "é"),
    ],
)
def test_tokens_are_readable(token, label):
    assert plots.readable(token) == label


@pytest.mark.parametrize(
    ("text", "longest", "label"),
    [
        ("n = 100", 7, "n = 100"),
        ("n = 100", 6, "n =…"),
        ("step 12 of 1.25", 13, "step 12 of…"),
        ("100", 2, "…"),
        ("2001 a", 5, "2001…"),
        ("日本語トークン", 7, "日本語…"),  # of double width
        ("日本語", 5, "日本語"),
    ],
)
def test_shortened_labels_keep_numbers_whole_and_have_room(text, longest, label):
    assert shortened(text, longest) == label


def test_a_long_answer_is_cut():
    assert short_answer([" the", " acclaimed"]) == "the acclaimed"
    assert short_answer(["▁the", "▁acclaimed", "▁director", "."]) == "the acclaimed dir…"


def test_panels_of_a_row_share_a_scale():
    rows = [
        [
            trace_of(grid(8, 4, top=0.9), kind="resid"),
            trace_of(grid(8, 4, top=0.6, seed=1), kind="mlp", corrupted=0.05),
        ],
        [trace_of(grid(3, 4, top=0.4, seed=2), kind="attn", corrupted=0.2)],
    ]
    figure = plots.trace_panels(rows)
    upper_left, upper_right, lower = figure.axes
    for ax, trace in zip(figure.axes, [*rows[0], *rows[1]], strict=True):
        assert torch.equal(shown_scores(ax), trace.scores)
    scales = [pytest.approx(ax.get_images()[0].get_clim()) for ax in figure.axes]
    assert scales == [(0.05, 0.9), (0.05, 0.9), (0.2, 0.4)]
    assert [ax.get_images()[0].get_cmap().name for ax in figure.axes] == ["Purples", "Greens", "Reds"]
    assert upper_left.get_title() == "toy\nclean 0.75, corrupted 0.10"

    figure.draw_without_rendering()
    boxes = [ax.get_window_extent() for ax in figure.axes]
    assert boxes[0].x1 < boxes[1].x0
    assert boxes[2].y1 < boxes[0].y0
    assert boxes[2].x0 == pytest.approx(boxes[0].x0)
    assert boxes[2].height / 3 == pytest.approx(boxes[0].height / 8, rel=0.05)
    assert lower.get_subplotspec().rowspan.start == 1
    assert upper_right.get_subplotspec().colspan.start == 1


def test_panels_take_one_scale_and_titles():
    rows = [[trace_of(grid(4, 3))], [trace_of(grid(4, 3, top=0.3))]]
    figure = plots.trace_panels(rows, [["above"], ["below"]], limits=(0.0, 1.0))
    assert [ax.get_title() for ax in figure.axes] == ["above", "below"]
    assert [ax.get_images()[0].get_clim() for ax in figure.axes] == [(0.0, 1.0), (0.0, 1.0)]


def test_a_position_has_the_same_height_in_every_panel():
    """MDM beside its twin, whose canvas ends with the prompt."""
    figure = plots.trace_panels([[trace_of(grid(8, 4)), trace_of(grid(3, 4))]])
    figure.draw_without_rendering()
    longer, shorter = figure.axes
    for place in range(3):
        heights = [ax.transData.transform((0, place))[1] for ax in (longer, shorter)]
        assert heights[0] == pytest.approx(heights[1])
    assert len(y_labels(shorter)) == 3


def test_long_canvases_keep_their_labels_apart():
    words = ["[MASK]"] * 40
    figure = plots.trace_panels([[trace_of(grid(40, 2), words=words), trace_of(grid(4, 2), words=words)]])
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 40
    assert all(above.y0 - below.y0 > 1.3 * above.height for above, below in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0


def test_bars_and_their_names_have_room():
    answer = [" the", " acclaimed", " director"]
    figure = plots.trace_panels([[trace_of(grid(8, 4), answer=answer), trace_of(grid(8, 4), answer=answer)]])
    figure.draw_without_rendering()
    ends = [figure.axes[1].get_tightbbox().x0, figure.bbox.x1]
    for ax, end in zip(figure.axes, ends, strict=True):
        bar = bar_of(ax)
        assert ax.get_window_extent().x1 < bar.get_window_extent().x0
        assert bar.texts[0].get_window_extent().x1 < end


@pytest.mark.parametrize("rows", [[], [[]]])
def test_panels_need_traces(rows):
    with pytest.raises(ValueError, match=r"nothing to draw.*\[\[resid, mlp, attn\]\]"):
        plots.trace_panels(rows)


def test_titles_come_as_the_traces_do():
    trace = trace_of(grid(2, 2))
    with pytest.raises(ValueError, match=r"the rows have \[1\] titles and \[2\] traces"):
        plots.trace_panels([[trace, trace]], [["only one"]])


def curves():
    mean = torch.tensor([[0.1, 0.2, 0.3], [NAN, NAN, NAN], [0.5, 0.4, 0.0]])
    return mean, mean - 0.05, mean + torch.tensor([0.1, 0.2, 0.3])


def test_effect_curves_carry_means_and_intervals():
    mean, low, high = curves()
    layers = [2, 5, 9]
    ax = plots.effect_curves(mean, low, high, ["first", "middle", "last"], layers, "mlp", title="mine")
    lines = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert list(lines) == ["first", "last"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["first", "last"]
    for row, name, band in zip((0, 2), lines, ax.collections, strict=True):
        assert lines[name].get_xdata().tolist() == layers
        assert torch.equal(torch.from_numpy(lines[name].get_ydata()), mean[row])
        corners = {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
        wanted = {(x, y) for ends in (low, high) for x, y in zip(layers, ends[row].tolist(), strict=True)}
        assert wanted <= corners
        assert tuple(band.get_facecolor()[0][:3]) == pytest.approx(rgb(lines[name].get_color()))
    assert x_labels(ax) == {2: "2", 5: "5", 9: "9"}
    assert "MLP outputs" in ax.get_xlabel()
    assert ax.get_title() == "mine"
    assert drawn(ax.figure)


def rgb(colour):
    from matplotlib.colors import to_rgb

    return to_rgb(colour)


def test_a_role_keeps_its_colour():
    mean, low, high = curves()
    roles = ["first", "middle", "last"]
    _, (one, other) = plots.panels(1, 2, 8.0, 3.0)
    plots.effect_curves(mean, low, high, roles, [0, 1, 2], "resid", ax=one)
    whole = mean.nan_to_num()
    assert plots.effect_curves(whole, low, high, roles, [0, 1, 2], "resid", ax=other) is other
    colours = [{line.get_label(): line.get_color() for line in ax.get_lines()} for ax in (one, other)]
    assert colours[0]["last"] == colours[1]["last"] != colours[1]["middle"]


def test_curves_need_a_role():
    nothing = torch.full((2, 3), NAN)
    with pytest.raises(ValueError, match="NaN in every role of first, last"):
        plots.effect_curves(nothing, nothing, nothing, ["first", "last"], [0, 1, 2], "resid")


def test_nothing_is_shown():
    from matplotlib._pylab_helpers import Gcf

    mean, low, high = curves()
    axes = [
        trace_of(grid(3, 3)).plot(),
        plots.trace_panels([[trace_of(grid(3, 3))]]).axes[0],
        plots.effect_curves(mean, low, high, ["first", "middle", "last"], [0, 1, 2], "attn"),
    ]
    assert [ax.figure.canvas.manager for ax in axes] == [None, None, None]
    assert Gcf.get_all_fig_managers() == []


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plots need matplotlib: pip install 'diffusion-lens\[plot\]'"):
        trace_of(grid(2, 2)).plot()


def long_run(n_pos, n_steps):
    """The arguments of a canvas in which each position is written once."""
    revealed_at = [-1] * 4 + [(7 * pos) % n_steps for pos in range(4, n_pos)]
    hidden = [[at >= step for at in revealed_at] for step in range(n_steps + 1)]
    return [["word"] * n_pos] * (n_steps + 1), hidden, revealed_at, [0.5] * n_pos


@pytest.mark.parametrize("size", [(3.3, 2.2), (3.3, 6.0), (7.0, 12.0), None])
def test_steps_stand_below_the_positions_of_their_band(size):
    words, hidden, revealed_at, confidence = long_run(40, 16)
    texts = [[None if blank else "a" for blank in row] for row in hidden]
    others = [[None if blank else "b" if pos > 3 else "a" for pos, blank in enumerate(row)] for row in hidden]
    differs = [[a != b for a, b in zip(*rows, strict=True)] for rows in zip(texts, others, strict=True)]
    for ax in (
        plots.denoising_grid(words, hidden, revealed_at, confidence, size=size),
        plots.difference_grid(texts, others, differs, size=size),
    ):
        labels = [label.get_text() for label in ax.get_yticklabels()]
        headers = [label for label in labels if label.startswith("positions")]
        if not headers:  # all positions side by side
            assert ax.get_images()[0].get_array().shape[1] == 36
            continue
        assert headers == ["positions 4-15", "positions 16-27", "positions 28-39"]
        assert labels[0] == headers[0]


def test_a_long_run_is_drawn_without_texts_where_they_have_no_room():
    arguments = long_run(256, 64)
    for size in ((3.3, 2.2), None):
        ax = plots.denoising_grid(*arguments, size=size)
        assert not ax.texts
        assert ax.get_images()[0].get_array().shape == (2 * 65, 252)
        assert max(ax.figure.get_size_inches()) < 30
    assert len(plots.denoising_grid(*long_run(30, 4)).texts) > 26


def test_panels_of_signatures_show_all_of_their_curves():
    """Reuse is a cosine, which may be negative, and a curve that nobody could measure has no entry in the legend."""
    levels = torch.tensor([0.4, -0.3, 0.9])
    low = plots.Curve(levels, levels - 0.1, levels + 0.05)
    none = torch.full((3,), torch.nan)
    panels = plots.SignaturePanels(
        "m", {"reuse": low}, {"forward": plots.Curve(none, none, none), "reverse": low}, {}, "", {}, {}
    )
    evidence = plots.signature_panels([panels], show="evidence")
    assert evidence.get_ylim()[0] < -0.4
    assert evidence.get_ylim()[1] >= 1
    cuts = plots.signature_panels([panels], show="cuts")
    assert [text.get_text() for text in cuts.get_legend().get_texts()] == ["reverse"]
