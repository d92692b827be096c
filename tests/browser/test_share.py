"""The menu "Share": what it saves is what it says, from a file and from the live page."""

import base64
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import explorer_pages
import nbformat
import pytest
from explorer_walk import saved, share
from PIL import Image, ImageChops
from playwright.sync_api import expect

Open = Callable[..., Any]
SVG = "{http://www.w3.org/2000/svg}"
# A film's size in px, its length in seconds, its number of frames, and how many pixels differ from first to last.
WATCH = """async (address) => {
    const film = Object.assign(document.createElement("video"), { muted: true, src: address });
    const event = (name) => new Promise((done, fail) => {
        film.addEventListener(name, done, { once: true });
        film.addEventListener("error", () => fail(new Error(film.error.message)));
    });
    await event("loadeddata");
    const canvas = Object.assign(document.createElement("canvas"), {
        width: film.videoWidth, height: film.videoHeight,
    });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const look = async (seconds) => {
        film.currentTime = seconds;
        await event("seeked");
        context.drawImage(film, 0, 0);
        return context.getImageData(0, 0, canvas.width, canvas.height).data;
    };
    const first = (await look(0.3)).slice(), last = await look(1e6);
    const seconds = film.currentTime;
    return [canvas.width, canvas.height, seconds, first.filter((x, i) => Math.abs(x - last[i]) > 30).length];
}"""


def texts_of(picture: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(picture).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def run() -> Any:
    return explorer_pages.explored("site-mdm")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_svg_contains_the_words_of_the_step(opened: Open, run: Any, tmp_path: Path, theme: str) -> None:
    picture = saved(opened("mdm", theme=theme, fragment="#step=0"), "SVG", tmp_path)
    assert re.fullmatch(r"site-mdm-[a-z-]+\.svg", picture.name)
    root, texts = ElementTree.parse(picture).getroot(), texts_of(picture)
    end = run.trajectory.str_canvases()[-1].index("<eos>")
    canvas = run.trajectory.canvases[1, 0, : end + 1].tolist()
    masked = [token == run.trajectory.blank for token in canvas]
    assert True in masked
    for token, is_masked in zip(canvas, masked, strict=True):
        assert is_masked or run.trajectory.words[token].strip() in texts
    assert {"site-mdm", f"“{run.fact.prompt}”", "after step 0 of 0–5"} <= set(texts)
    dashed = [one for one in root.iter(f"{SVG}rect") if "stroke-dasharray" in one.attrib]
    assert len(dashed) == sum(masked)
    paper = next(root.iter(f"{SVG}rect"))
    assert paper.get("fill") == {"light": "#ffffff", "dark": "#14171b"}[theme]
    assert paper.get("width") == root.get("width")


def test_the_svg_of_a_pair_shows_both_runs(opened: Open, tmp_path: Path) -> None:
    texts = texts_of(saved(opened("pair", fragment="#step=3"), "SVG", tmp_path))
    assert {"site-mdm", "site-ar", "after step 3 of 0–5", "after step 3 of 0–11"} <= set(texts)


def test_hostile_tokens_stay_text(opened: Open, tmp_path: Path) -> None:
    page = opened("hostile")
    picture = saved(page, "SVG", tmp_path)
    allowed = {f"{SVG}{tag}" for tag in ("svg", "g", "rect", "path", "text")}
    assert {element.tag for element in ElementTree.parse(picture).iter()} <= allowed
    assert any(text.startswith("<") for text in texts_of(picture))
    page.goto(picture.as_uri())
    assert page.evaluate("window.hacked") is None


def test_the_png_has_two_pixels_for_each_of_the_svg(opened: Open, tmp_path: Path) -> None:
    page = opened("mdm", fragment="#step=2")
    root = ElementTree.parse(saved(page, "SVG", tmp_path)).getroot()
    png = saved(page, "PNG", tmp_path).read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (2 * int(root.get("width", 0)), 2 * int(root.get("height", 0)))
    assert len(png) > 5_000  # an empty picture is much smaller


def test_the_webm_film_shows_each_step_for_0_7_seconds(opened: Open, run: Any, tmp_path: Path) -> None:
    page = opened("mdm")
    film = saved(page, r"Film \(.webm\)", tmp_path)
    page.goto("about:blank")
    width, height, seconds, differing = page.evaluate(
        WATCH, f"data:video/webm;base64,{base64.b64encode(film.read_bytes()).decode()}"
    )
    assert width == 2 * 776
    assert height > 200
    assert 0.7 * run.trajectory.n_steps < seconds < 3 * run.trajectory.n_steps
    assert differing > 1_000


@pytest.mark.parametrize("name", ["mdm", "hostile"])
def test_the_gif_film_ends_in_the_picture_of_the_last_step(opened: Open, tmp_path: Path, name: str) -> None:
    page = opened(name, fragment="#step=99")
    with Image.open(saved(page, "PNG", tmp_path)) as png, Image.open(saved(page, r"Film \(.gif\)", tmp_path)) as gif:
        assert gif.size == png.size
        frames = []
        for i in range(gif.n_frames):
            gif.seek(i)
            frames.append((gif.info["duration"], gif.convert("RGB")))
        assert [duration for duration, _ in frames] == [700] * (len(frames) - 1) + [2000]
        assert len(frames) == {"mdm": 6, "hostile": 3}[name]
        assert len({frame.tobytes() for _, frame in frames}) > 1
        # The colours of a GIF are rounded, to no more than an eighth of the range.
        assert max(high for _, high in ImageChops.difference(frames[-1][1], png.convert("RGB")).getextrema()) < 32


def test_a_film_is_cancelled(opened: Open) -> None:
    page = opened("mdm")
    share(page, r"Film \(.webm\)")
    expect(page.get_by_text(re.compile(r"Recording the film \d of 6"))).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_have_text("Cancelled: the film.")


@pytest.mark.parametrize("view", ["token", "lens", "attention", "trace"])
def test_the_notebook_is_valid_and_its_code_runs(opened: Open, tmp_path: Path, view: str) -> None:
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    page = opened("pair", fragment=f"#run=run0&compare=run1&step=2&position=5&layer=3&head=1&view={view}")
    notebook = nbformat.read(saved(page, "Notebook", tmp_path), as_version=4)
    nbformat.validate(notebook)
    assert [notebook.nbformat, notebook.nbformat_minor] == [4, 5]
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == 8
    for i, name in enumerate(("site-mdm", "site-ar")):
        names: dict[str, Any] = {}
        for source in cells[4 * i : 4 * i + 3]:
            exec(compile(source, name, "exec"), names)
        run = explorer_pages.explored(name)
        assert names["words"] == run.trajectory.str_canvases()[3]
        if view == "token":
            assert names["predictions"].tokens.equal(run.trajectory.predictions(run.model, top_k=5).tokens)
        if view == "lens":
            assert names["lens"].top_tokens.equal(run.lens.at_step(2).top_tokens)
        if view == "attention":
            assert names["pattern"].allclose(run.cache[2]["pattern", 3][0, 1])
        if view == "trace":
            assert names["scores"].allclose(run.trace.at_step(2).scores, atol=1e-6, equal_nan=True)
        assert isinstance(eval(cells[4 * i + 3], names), Axes)
        pyplot.close()


def test_code_and_link_are_copied(opened: Open, tmp_path: Path) -> None:
    page = opened("mdm", fragment="#step=2&position=6", permissions=["clipboard-read", "clipboard-write"])
    share(page, "Code")
    expect(page.get_by_role("status")).to_have_text("Copied the code.")
    names: dict[str, Any] = {}
    exec(page.evaluate("navigator.clipboard.readText()"), names)
    assert names["trajectory"].tokens.equal(explorer_pages.explored("site-mdm").trajectory.tokens)
    share(page, "Copy link")
    expect(page.get_by_role("status")).to_have_text("Copied the link.")
    other = opened(page.evaluate("navigator.clipboard.readText()"))
    assert other.get_by_label("Step", exact=True).input_value() == "2"
    pressed = other.locator(".dl-text button[aria-pressed=true]")
    assert pressed.all_inner_texts() == page.locator(".dl-text button[aria-pressed=true]").all_inner_texts()


def test_without_a_clipboard_the_text_is_selected(opened: Open) -> None:
    page = opened("mdm")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed')); }")
    share(page, "Code")
    text = page.get_by_label("Text to copy")
    expect(text).to_be_focused()
    assert text.evaluate("text => text.value.slice(text.selectionStart, text.selectionEnd)").startswith("import torch")


def test_the_frame_of_a_notebook_lets_files_through(opened: Open, tmp_path: Path) -> None:
    page = opened("mdm")
    page.set_content(explorer_pages.page_of(explorer_pages.explored("site-mdm"))._repr_html_())
    frame = page.frame_locator("iframe")
    with page.expect_download() as download:
        frame.get_by_role("button", name="Share", exact=True).click()
        frame.get_by_role("button", name=re.compile("^SVG")).click()
    download.value.save_as(tmp_path / "picture.svg")
    assert "site-mdm" in texts_of(tmp_path / "picture.svg")


def test_a_file_says_that_it_is_the_page(opened: Open) -> None:
    page = opened("mdm")
    share(page, "Page")
    expect(page.get_by_role("status")).to_have_text("This file is the page: send it as it is.")


def test_the_live_page_saves_a_page_that_opens_at_the_same_place(
    opened: Open, served: Callable[..., str], tmp_path: Path
) -> None:
    page = opened(served("tiny-mdm", "--steps", "5"))
    page.get_by_label("Step", exact=True).fill("3")
    page.locator(".dl-text button").nth(6).click()
    page.wait_for_selector("[data-state=ready]")
    file = opened(saved(page, "Page", tmp_path).as_uri())
    assert file.get_by_label("Step", exact=True).input_value() == "3"
    words = ".dl-text button:not([hidden])"
    assert file.locator(words).all_inner_texts() == page.locator(words).all_inner_texts()
    assert file.locator(".dl-text button[aria-pressed=true]").get_attribute("data-position") == "6"


def test_pictures_and_film_of_the_live_page_pass_its_policy(
    opened: Open, served: Callable[..., str], tmp_path: Path
) -> None:
    page = opened(served("tiny-mdm", "--steps", "5"), theme="dark")
    for name, start in {"PNG": b"\x89PNG", r"Film \(.webm": b"\x1aE\xdf\xa3", "Notebook": b"{"}.items():
        assert saved(page, name, tmp_path).read_bytes().startswith(start)
    (notebook,) = tmp_path.glob("*.ipynb")
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], cell["id"], "exec"), names)


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
def test_the_menu_works_by_keyboard_and_is_accessible(opened: Open, axe: str, width: int, theme: str) -> None:
    page = opened("mdm", width, theme)
    opener = page.get_by_role("button", name="Share", exact=True)
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name=re.compile("^Copy link"))).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("button", name=re.compile("^Page"))).to_be_focused()
    box = page.locator(".dl-share-menu").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.evaluate(axe)
    found = page.evaluate("() => axe.run('.dl-sharing', { resultTypes: ['violations'] })")["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(page.locator(".dl-share-menu")).to_be_hidden()
