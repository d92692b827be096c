"""A notebook's kernel shows every picture of a result once, where the cell draws it."""

from dataclasses import replace

import nbclient
import nbformat
import pytest
from results import every_result

from diffusion_lens.analysis import CausalTrace

# The number of pictures that each cell shows.
CELLS = {
    "import sys; sys.modules['ipywidgets'] = None": 0,
    "from diffusion_lens import plots; from diffusion_lens.analysis import CausalTrace": 0,
    "trace = CausalTrace.load({path!r})": 0,
    "from tqdm.auto import tqdm; list(tqdm(range(3), desc='steps'))[:0]": 0,
    "trace.plot()": 1,
    "ax = trace.plot()": 1,
    "ax": 1,
    "trace.plot(); trace.plot()": 2,
    "for _ in range(3): trace.plot()": 3,
    "display(trace.plot())": 1,
    "first = trace.plot(title='first'); plots.trace_panels([[trace, trace]])": 2,
    "figure = plots.trace_panels([[trace]])": 1,
    "figure, axes = plots.panels(1, 2, 9.0, 3.0); [trace.plot(ax=each) for each in axes][0]": 1,
    "axes": 1,
    "import matplotlib.pyplot as plt; _, own = plt.subplots(); trace.plot(ax=own)": 1,
    "trace": 1,
    "import copy, pickle; pickle.loads(pickle.dumps(trace.plot())); copy.deepcopy(ax); None": 1,
    r"ax = trace.plot(title=r'$\oops$'); trace.plot(); None": 1,
    "1 / 0": 0,
    "2": 0,
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The outputs of each cell, of one kernel that runs all of them."""
    folder = tmp_path_factory.mktemp("kernel")
    trace = next(result for result in every_result(folder / "store") if isinstance(result, CausalTrace))
    few = replace(trace, scores=trace.scores[:3], token_scores=trace.token_scores[:3], positions=[0, 1, 2])
    path = str(few.save(folder / "trace.safetensors"))
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source.format(path=path)) for source in CELLS]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def pictures(outputs):
    return [o for o in outputs if o.output_type in ("display_data", "execute_result") and "image/png" in o.data]


def test_a_notebook_shows_each_picture_once(cells):
    assert {source: len(pictures(outputs)) for source, outputs in cells.items()} == CELLS


def test_a_notebook_prints_neither_axes_nor_warnings(cells):
    for source, outputs in cells.items():
        texts = [o.get("data", {}).get("text/plain", "") for o in outputs]
        assert not any("Axes" in text and "Figure" not in text for text in texts), source
        if not any(word in source for word in ("1 / 0", "oops", "tqdm")):
            assert all(o.output_type in ("display_data", "execute_result") for o in outputs), (source, outputs)


def test_without_ipywidgets_bars_are_text(cells):
    (outputs,) = (outputs for source, outputs in cells.items() if "tqdm" in source)
    bar = "".join(o.get("text", "") for o in outputs)
    assert "steps: 100%" in bar
    assert "IProgress" not in bar


def test_a_notebook_shows_a_result_as_html_with_its_picture(cells):
    (shown,) = cells["trace"]
    assert set(shown.data) == {"text/html", "text/plain", "image/png"}
    assert shown.data["text/html"].count("<img") == 1
    assert shown.data["text/plain"].startswith("CausalTrace(toy, ")


def test_a_notebook_shows_pictures_in_the_order_of_drawing(cells):
    first, second = pictures(cells["first = trace.plot(title='first'); plots.trace_panels([[trace, trace]])"])
    assert "1 Axes" in first.data["text/plain"]
    assert "2 Axes" in second.data["text/plain"]
    metadata = second.metadata["image/png"]
    assert metadata["width"] > first.metadata["image/png"]["width"]
