"""A view that a user wrote: its name, its data, and what of its file is refused."""

import numpy as np
import pytest
import torch
from page_reader import PageFile, unpack

from diffusion_lens.explorer import CustomView
from diffusion_lens.pages.views import Stored

TEXT = """import { h } from "./elements.js";

const shown = "own";

/** @type {import("./types.js").View} */
export const view = {
  name: "margin",
  title: "Margin",
  missing: ({ run }) => (run.margin ? null : "none"),
  create: () => ({ element: h("p", {}, shown), draw: () => {} }),
};
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="margin.js"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_page_has_entry_chunks_and_the_view_in_a_scope_of_its_own(small, written):
    run = small.denoise("Gustav Geisser is the", length=12, steps=3)
    chunks = {
        "0": {"counts": torch.arange(6).view(2, 3), "p": torch.tensor([0.5, torch.nan])},
        "s": {"x": Stored.shares([1.0])},
    }
    own = CustomView(written(TEXT), {"steps": [0]}, chunks)
    page = PageFile(run.explore(views=[own]).html())
    assert page.run()["margin"] == {"steps": [0]}
    _, arrays = page.read("margin/0")
    assert arrays["counts"].tolist() == [[0, 1, 2], [3, 4, 5]]
    np.testing.assert_array_equal(arrays["p"], [0.5, np.nan])
    assert unpack(own.packed["margin/s"])[1]["x"].tolist() == [1.0]
    (added,) = (page.module[at:] for at in [page.module.index("addView((function margin_view()")])
    assert "import " not in added
    assert "export " not in added
    assert added.index("return view;") < added.index("mountFile(")
    assert "addView((" not in PageFile(run.explore().html()).module


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("export const other = 1;\n", "has no view. It must contain"),
        (TEXT.replace('"margin"', '"Ma rgin"'), "has no view. It must contain"),
        (TEXT.replace("{ h }", "{ hh, h }"), "imports hh, which no module of the explorer exports"),
        (f'import other from "https://example.org/x.js";\n{TEXT}', "may only import names of the explorer's modules"),
        (f"{TEXT}export default view;\n", "may only import names of the explorer's modules"),
        (f"{TEXT}const end = '</ScRipt>';\n", "an HTML tag that would end its element"),
    ],
)
def test_files_that_are_no_view_or_would_leave_their_element_are_refused(written, text, message):
    with pytest.raises(ValueError, match=message):
        CustomView(written(text))


def test_names_that_exist_and_data_that_are_none_are_refused(small, written):
    run = small.denoise("Gustav Geisser is the", length=12, steps=3)
    own = CustomView(written(TEXT))
    for name in ("lens", "words", "circuit", "canvas", "token"):
        taken = CustomView(written(TEXT.replace('"margin"', f'"{name}"')))
        with pytest.raises(ValueError, match=f"there is a view or an entry '{name}' already"):
            run.explore(views=[taken])
    with pytest.raises(ValueError, match="there is a view or an entry 'margin' already"):
        run.explore(views=[own, CustomView(written(TEXT, "again.js"))])
    with pytest.raises(TypeError, match="0/words is an array of <U5; a chunk contains integers and floats"):
        CustomView(written(TEXT), chunks={"0": {"words": ["a", "words"]}})
    with pytest.raises(ValueError, match="do not fit into 32 bits"):
        CustomView(written(TEXT), chunks={"0": {"ids": [2**40]}})
    with pytest.raises(ValueError, match="JSON does not have: use None"):
        CustomView(written(TEXT), {"limit": float("nan")})
    with pytest.raises(FileNotFoundError):
        CustomView("nowhere.js")
