"""The notebook widget's `render` at 700 pixels, with a model that answers as the kernel does, and with none."""

import base64
from collections.abc import Callable
from typing import Any

import explorer_pages
from explorer_walk import apply, drawer, labels, select, settled, slider, step_to
from playwright.sync_api import expect

# anywidget loads the module from a blob and gives the style separately.
START = """async ([module, style, manifest, chunks, traits]) => {
    document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
    const element = document.createElement("div");
    document.body.append(element);
    const listeners = new Set();
    window.asked = [];
    const bytes = (text) => new DataView(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
    const kept = Object.fromEntries(Object.entries(traits.kept).map(([name, text]) => [name, bytes(text)]));
    window.traits = { manifest, live: true, ...traits, kept };
    const model = {
        get: (name) => window.traits[name],
        set: (name, value) => { window.traits[name] = JSON.parse(JSON.stringify(value)); },
        save_changes: () => { window.saved = (window.saved ?? 0) + 1; },
        on: (event, listener) => listeners.add(listener),
        off: (event, listener) => listeners.delete(listener),
        send: (message) => {
            window.asked.push(message);
            if (chunks === null) return; // There is no kernel.
            const answer = (reply, buffers) => setTimeout(() => {
                for (const listen of listeners) listen({ id: message.id, ...reply }, buffers);
            }, 0);
            if (message.name && message.name === window.broken) answer({ ok: false, error: "the kernel is busy" }, []);
            else if (message.ask === "chunk") answer({ ok: true }, [bytes(chunks[message.name])]);
            else if (message.ask === "suggest") answer({ ok: true, suggestions: { subjects: [], answers: [] } }, []);
            else if (message.ask === "cancel") answer({ ok: true }, []);
            else if (message.spec.seed === 7) answer({ progress: { what: "denoising", done: 1, of: 4 } }, []);
            else if (message.spec.interventions[0].what === "zero")
                answer({ ok: false, error: "there is no block <9>" }, []);
            else answer({ ok: true, run: { ...manifest.runs[0], id: "again", label: "forced", base: manifest.runs[0].id,
                spec: message.spec, text: "another", canvases: manifest.runs[0].canvases.map((canvas, i) =>
                    canvas.map((word, p) => (p === 11 && word >= 0 ? (word + 1) % 9 : word))) } }, []);
        },
    };
    const { default: widget } = await import(URL.createObjectURL(new Blob([module], { type: "text/javascript" })));
    window.cleanup = widget.render({ model, el: element });
    window.listeners = listeners;
}"""
SPEC = dict(
    model=0,
    prompt="x",
    length=12,
    steps=3,
    sampler=None,
    cfg_scale=0.0,
    temperature=0.0,
    seed=0,
    answer=None,
    subject=None,
)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def start(
    opened: Callable[..., Any],
    kernel: bool = True,
    lens: dict[str, Any] | None = None,
    constants: dict[str, str] | None = None,
    **traits: Any,
) -> Any:
    """The widget, with other entries of the lens, and other constants of the module, where they are given."""
    from diffusion_lens.pages.page import explorer_files

    large = explorer_pages.large_page(12, 3, 2)
    (run,) = large.runs
    entry = {**run.entry, "lens": {**run.entry["lens"], **(lens or {})}}
    module, style = explorer_files()
    for constant, value in (constants or {}).items():
        assert constant in module
        module = module.replace(constant, value)
    manifest = {**large.manifest, "runs": [{**entry, "spec": {**SPEC, "interventions": [], "base": None}}]}
    chunks = {name: base64_of(data) for name, data in run.chunks.items()}
    page = opened("mdm", 700, height=900)
    page.goto("about:blank")
    page.evaluate(START, [module, style, manifest, chunks if kernel else None, {"kept": {}, "state": {}, **traits}])
    return settled(page)


def change(page: Any) -> None:
    """Write a token at position 9 before step 1."""
    step_to(page, 0)
    select(page, 9)
    drawer(page).get_by_label("Token", exact=True).fill(" w")
    drawer(page).get_by_role("button", name="Write it").click()
    settled(page)


def test_the_widget_draws_what_the_kernel_sends(opened: Callable[..., Any]) -> None:
    page = start(opened)
    assert page.locator(".dl-layers button:visible").count() == 3
    step_to(page, 1)
    asked = {"ask": "chunk", "run": "run", "name": "lens/1"}
    assert asked.items() <= page.evaluate("window.asked.find(({ name }) => name === 'lens/1')").items()
    page.evaluate("window.cleanup()")
    assert page.locator(".dl-text").count() == 0
    assert page.evaluate("window.listeners.size") == 0


def test_the_first_screen_of_a_notebook_contains_every_part(opened: Callable[..., Any]) -> None:
    page = start(opened)
    frame = page.locator(".dl-explorer").bounding_box()
    assert frame["width"] <= 700
    for part in (".dl-text", "input[type=range]", ".dl-layers", "[role=tablist]", "[role=tabpanel]"):
        box = page.locator(part).first.bounding_box()
        assert frame["y"] <= box["y"]
        assert box["y"] + box["height"] <= frame["y"] + frame["height"]
    assert page.locator("[role=tabpanel]").bounding_box()["height"] > 100


def test_the_notebook_keeps_what_is_selected(opened: Callable[..., Any]) -> None:
    page = start(opened)
    step_to(page, 1)
    select(page, 9)
    state = page.evaluate("window.traits.state")
    assert (state["run"], state["step"], state["position"]) == ("run", 1, 9)
    assert page.evaluate("window.saved") >= 2
    again = start(opened, state=state)
    assert slider(again).input_value() == "1"
    assert labels(again) == labels(page)
    expect(again.locator(".dl-text [aria-pressed=true]")).to_have_attribute("data-position", "9")


def test_a_saved_notebook_draws_the_first_screen_without_a_kernel(opened: Callable[..., Any]) -> None:
    (run,) = explorer_pages.large_page(12, 3, 2).runs
    kept = {f"run {name}": base64_of(run.chunks[name]) for name in ("predictions", "lens/1")}
    state = {"run": "run", "step": 1, "position": 9, "layer": 1}
    page, live = start(opened, kernel=False, kept=kept, state=state), start(opened, state=state)
    for part in (".dl-text", ".dl-layers", ".dl-layers-reading", ".dl-step-text"):
        assert page.locator(part).inner_text() == live.locator(part).inner_text()
    assert page.locator(".dl-layers button:visible").count() == 3


def test_a_changed_run_of_the_kernel_is_compared(opened: Callable[..., Any]) -> None:
    page = start(opened)
    change(page)
    spec = page.evaluate("window.asked.find(({ ask }) => ask === 'run').spec")
    assert spec["interventions"] == [{"what": "force", "step": 1, "position": 9, "token": " w"}]
    assert spec["base"] == "run"
    assert {name: spec[name] for name in SPEC} == SPEC
    drawer(page).get_by_role("button", name="Close").click()
    expect(page.locator(".dl-run")).to_have_count(2)
    expect(page.locator(".dl-run .dl-edit")).to_contain_text("position 9 set to “␣w” before step 1")
    expect(page.locator(".dl-differs button")).to_have_count(1)
    assert not any("set by an intervention" in text for text in labels(page, 1))  # it is another token from the start


def test_a_view_that_cannot_be_read_says_so_and_the_page_stays(opened: Callable[..., Any]) -> None:
    page = start(opened)
    page.get_by_role("tab", name="Trace").click()
    settled(page)
    page.evaluate("window.broken = 'trace/resid/1'")
    step_to(page, 1)
    expect(page.locator(".dl-pane > .dl-note")).to_contain_text("This view could not be read: the kernel is busy")
    step_to(page, 2)
    expect(page.locator(".dl-pane > .dl-note")).to_be_hidden()
    assert len(labels(page)) == 12


def test_an_error_of_the_kernel_is_shown(opened: Callable[..., Any]) -> None:
    page = start(opened)
    apply(page, Site="mlp")
    expect(page.get_by_role("alert")).to_have_text("there is no block <9>")
    expect(drawer(page).get_by_role("button", name="Apply", exact=True)).to_be_enabled()


def test_long_work_of_the_kernel_is_cancelled(opened: Callable[..., Any]) -> None:
    page = start(opened)
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Run", exact=True).click()
    progress = page.locator(".dl-progress")
    expect(progress).to_contain_text("denoising 1 of 4")
    progress.get_by_role("button", name="Cancel").click()
    settled(page)
    asked = page.evaluate("window.asked")
    (run,) = [message for message in asked if message["ask"] == "run"]
    assert [message["of"] for message in asked if message["ask"] == "cancel"] == [run["id"]]
    expect(page.get_by_role("status")).to_have_text("Cancelled: computing the run.")


def test_a_kernel_is_given_up_only_without_a_sign_of_life(opened: Callable[..., Any]) -> None:
    page = start(opened, constants={"SILENT = 20_000": "SILENT = 1_000"})
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Seed").fill("7")
    page.evaluate("""() => {
        const alive = () => ({ id: window.asked.at(-1).id, alive: true });
        window.beats = setInterval(() => { for (const listen of window.listeners) listen(alive()); }, 100);
    }""")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_timeout(2_500)
    expect(page.locator(".dl-progress")).to_contain_text("denoising 1 of 4")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.evaluate("clearInterval(window.beats)")
    expect(page.get_by_role("alert")).to_contain_text("The kernel does not answer")
    asked = page.evaluate("window.asked")
    (run,) = [message for message in asked if message["ask"] == "run"]
    assert [message["of"] for message in asked if message["ask"] == "cancel"] == [run["id"]]


def lenses(page: Any) -> list[str]:
    """The chunks of the lens that the kernel was asked for, in their order."""
    names = page.evaluate("window.asked.map(({ name }) => name ?? '')")
    return [name for name in names if name.startswith("lens/")]


def test_chunks_beyond_the_bound_are_asked_for_again(opened: Callable[..., Any]) -> None:
    for most, again in (("64 * 2 ** 20", 0), ("1", 1)):
        page = start(opened, constants={"MOST_BYTES = 64 * 2 ** 20": f"MOST_BYTES = {most}"})
        for step in (0, 1, 2, 0):
            step_to(page, step)
        assert lenses(page).count("lens/0") == 1 + again


def test_steps_that_are_passed_quickly_are_not_asked_for(opened: Callable[..., Any]) -> None:
    page = start(opened)
    shown = lenses(page)
    page.evaluate("""() => {
        const slider = document.querySelector("input[type=range]");
        for (const step of [0, 1, 0, 1, 0]) {
            slider.value = step;
            slider.dispatchEvent(new Event("input"));
        }
    }""")
    settled(page)
    assert [name for name in lenses(page) if name not in shown] == ["lens/0"]


def test_the_band_shows_the_nearest_layer_that_its_lens_has(opened: Callable[..., Any]) -> None:
    page = start(opened, lens={"layers": [0, 2], "labels": ["0_pre", "final_post"]}, state={"layer": 1})
    band = page.locator(".dl-layers button:visible")
    assert [button.get_attribute("tabindex") for button in band.all()] == ["0", "-1"]
    expect(page.locator(".dl-layers-reading")).to_contain_text("before block 0: ")
    band.first.focus()
    page.keyboard.press("ArrowRight")
    expect(band.nth(1)).to_be_focused()
    expect(page.locator(".dl-layers-reading")).to_contain_text("after the last block: ")


def test_a_notebook_kept_for_another_model_says_so(opened: Callable[..., Any]) -> None:
    named = [{"index": 0, "name": "another", "weights": ""}]
    page = start(opened, state={"run": "run", "step": 1, "models": named, "specs": []})
    expect(page.get_by_role("alert")).to_contain_text("This link is of another, and this page shows random.")
    assert slider(page).input_value() == "2"
    assert page.evaluate("window.traits.state.models") == [{"index": 0, "name": "random", "weights": ""}]
