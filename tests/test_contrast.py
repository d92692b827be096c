"""Every text in a figure or a page has a contrast of at least 4.5 with what is behind it (WCAG 2, level AA)."""

import re

import pytest
import torch
from results import every_result

from diffusion_lens import plots
from diffusion_lens.plots import canvas as canvas_html
from diffusion_lens.plots.axes import HUES, ink_on
from diffusion_lens.records.results import PicturedResult

ENOUGH = 4.5


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def over(colour, opacity, behind):
    return [opacity * a + (1 - opacity) * b for a, b in zip(colour, behind, strict=True)]


def test_contrasts_are_those_of_the_standard():
    """From WCAG's own examples: black on white, and the greys next to the limit."""
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast([0x76 / 255] * 3, (1, 1, 1)) == pytest.approx(4.54, abs=0.01)
    assert contrast([0x77 / 255] * 3, (1, 1, 1)) == pytest.approx(4.48, abs=0.01)


def behind(text, figure):
    """Colour of the cell, the axes or the figure that a text is drawn on."""
    from matplotlib.colors import to_rgb

    ax = text.axes
    if ax is None or text not in ax.texts:
        return to_rgb(figure.get_facecolor())
    for image in ax.get_images():
        values = image.get_array().filled(float("nan"))
        left, right, bottom, top = image.get_extent()
        (x, y), (n_rows, n_columns) = text.get_position(), values.shape
        column, row = int((x - left) / (right - left) * n_columns), int((y - top) / (bottom - top) * n_rows)
        if 0 <= row < values.shape[0] and 0 <= column < values.shape[1] and values[row, column] == values[row, column]:
            return image.cmap(image.norm(values[row, column]))[:3]
    return to_rgb(ax.get_facecolor())


def weakest(figure):
    """The lowest contrast of the texts of a figure, and the text."""
    from matplotlib.colors import to_rgba

    contrasts = []
    for text in texts_of(figure):
        *colour, opacity = to_rgba(text.get_color(), text.get_alpha())
        cell = behind(text, figure)
        contrasts.append((contrast(over(colour, opacity, cell), cell), text.get_text()))
    return min(contrasts)


def texts_of(figure):
    """The texts that a figure shows."""
    from matplotlib.text import Text

    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


@pytest.mark.parametrize("hue", [*HUES.values(), "RdBu", "viridis", "viridis_r", "YlGn"])
def test_black_or_white_can_be_read_on_every_colour(hue):
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    for colour in colormaps[hue](range(256)).tolist():
        assert contrast(to_rgb(ink_on(colour)), colour[:3]) > ENOUGH


@pytest.mark.parametrize("hue", ["viridis", "RdBu"])
def test_tokens_in_cells_can_be_read(hue):
    values = torch.linspace(0, 1, 240).view(20, 12)
    values[0, :3] = torch.nan
    ax = plots.token_map(
        values,
        [["word"] * 12] * 20,
        rows=["row"] * 20,
        layers=range(12),
        xlabel="layer",
        hue=hue,
        limits=(0.0, 1.0),
        bar="p",
        title="title",
    )
    assert len(ax.texts) == 240
    assert {text.get_color() for text in ax.texts} == {"black", "white"}
    assert weakest(ax.figure) > (ENOUGH, "")


@pytest.mark.parametrize("n_pos", [14, 52])
def test_a_canvas_is_read_at_every_probability(n_pos):
    n_steps, n_given = 10, 4
    revealed_at = [-1] * n_given + [pos % n_steps for pos in range(n_pos - n_given)]
    words = [["word"] * n_pos] * (n_steps + 1)
    hidden = [[at >= canvas for at in revealed_at] for canvas in range(n_steps + 1)]
    confidence = [pos / (n_pos - 1) for pos in range(n_pos)]
    ax = plots.denoising_grid(words, hidden, revealed_at, confidence)
    assert {"word", "·"} == {text.get_text() for text in ax.texts}
    assert weakest(ax.figure) > (ENOUGH, "")
    assert min(text.get_fontsize() for text in ax.texts) >= 7
    assert ax.figure.get_size_inches()[0] <= 14


def test_every_picture_of_a_result_can_be_read(tmp_path):
    for result in every_result(tmp_path):
        if isinstance(result, PicturedResult):
            figure = plots.figure_of(result._picture())
            assert weakest(figure) > (ENOUGH, ""), type(result)
            assert min(text.get_fontsize() for text in texts_of(figure)) >= 7, type(result)
            assert figure.get_size_inches()[0] <= 14


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_page_of_a_canvas_is_read(mode):
    ink, paper = ([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in canvas_html.COLOURS[mode])
    green = [part / 255 for part in canvas_html.GREEN]
    assert contrast(over(ink, canvas_html.FAINT, paper), paper) > ENOUGH
    for percent in range(101):
        assert contrast(ink, over(green, canvas_html.tint(percent / 100), paper)) > ENOUGH


@pytest.mark.parametrize(
    ("ink", "paper"), [("#212121", "#ffffff"), ("#e0e0e0", "#111111"), ("#cccccc", "#1f1f1f"), ("#000000", "#ffffff")]
)
def test_a_canvas_in_a_notebook_is_read(ink, paper):
    """In the colours of JupyterLab, VS Code and Colab."""
    ink, paper = ([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in (ink, paper))
    green = [part / 255 for part in canvas_html.GREEN]
    assert contrast(over(ink, canvas_html.FAINT, paper), paper) > ENOUGH
    assert contrast(ink, over(green, canvas_html.tint(1.0), paper)) > ENOUGH


def test_the_page_has_the_colours_that_are_tried():
    page = plots.canvas_table("t", [["a", "b"], ["a", "c"]], [[False, True], [False, False]], [-1, 0], [1.0, 1.0])
    ink, paper = canvas_html.COLOURS["dark"]
    assert f"(prefers-color-scheme: dark) {{ :root {{ --ink: {ink}; --paper: {paper}; }} }}" in page
    assert {*re.findall(r"#[0-9a-f]{6}", page)} == {colour for pair in canvas_html.COLOURS.values() for colour in pair}
    assert f"rgba(60, 160, 80, {canvas_html.tint(1.0):.2f})" in page
    assert "given:</span> a</div>" in page
