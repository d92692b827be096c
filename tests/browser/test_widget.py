"""The notebook widget's `render`, with a model that answers as the kernel does."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import explorer_pages
from playwright.sync_api import expect

PACKAGE = Path(__file__).parents[2] / "diffusion_lens" / "pages"
# anywidget loads the module from a blob and gives the style separately.
START = """async ([module, style, manifest, chunks]) => {
    document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
    const element = document.createElement("div");
    document.body.append(element);
    const listeners = new Set();
    window.asked = [];
    const bytes = (text) => new DataView(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
    const model = {
        get: (name) => ({ manifest, live: true })[name],
        on: (event, listener) => listeners.add(listener),
        off: (event, listener) => listeners.delete(listener),
        send: (message) => {
            window.asked.push(message);
            const answer = (reply, buffers) => setTimeout(() => {
                for (const listen of listeners) listen({ id: message.id, ...reply }, buffers);
            }, 0);
            if (message.name && message.name === window.broken) answer({ ok: false, error: "the kernel is busy" }, []);
            else if (message.ask === "chunk") answer({ ok: true }, [bytes(chunks[message.name])]);
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


def start(opened: Callable[..., Any]) -> Any:
    large = explorer_pages.large_page(12, 3, 2)
    (run,) = large.runs
    manifest = {**large.manifest, "runs": [{**run.entry, "spec": {**SPEC, "interventions": [], "base": None}}]}
    chunks = {name: base64.b64encode(data).decode() for name, data in run.chunks.items()}
    page = opened("mdm")
    page.goto("about:blank")
    style, module = ((PACKAGE / f"explorer.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page.evaluate(START, [module, style, manifest, chunks])
    page.wait_for_selector("[data-state=ready]")
    return page


def test_the_widget_draws_what_the_kernel_sends(opened: Callable[..., Any]) -> None:
    page = start(opened)
    assert page.locator(".dl-lens [role=gridcell]").count() == 3 * 12
    page.get_by_role("button", name="next step").click()
    page.wait_for_selector("[data-state=ready]")
    assert {"ask": "chunk", "run": "run", "name": "lens/1"}.items() <= page.evaluate(
        "window.asked.find(({ name }) => name === 'lens/1')"
    ).items()
    page.evaluate("window.cleanup()")
    assert page.locator("[role=grid]").count() == 0
    assert page.evaluate("window.listeners.size") == 0


def test_a_forced_token_makes_a_run_that_is_compared(opened: Callable[..., Any]) -> None:
    page = start(opened)
    page.get_by_label("Step", exact=True).fill("0")
    page.locator(".dl-text button").nth(9).click()
    page.get_by_label("Token", exact=True).fill(" w")
    page.get_by_role("button", name="Force and go on").click()
    expect(page.locator("h2")).to_have_text("forced")
    spec = page.evaluate("window.asked.find(({ ask }) => ask === 'run').spec")
    assert spec["interventions"] == [{"what": "force", "step": 1, "position": 9, "token": " w"}]
    assert spec["base"] == "run"
    assert {name: spec[name] for name in SPEC} == SPEC
    assert "1 token differs from “random numbers”" in page.locator(".dl-changes").inner_text()
    texts = page.locator(".dl-canvas [data-column='11']").evaluate_all("cells => cells.map((cell) => cell.ariaLabel)")
    assert not any("set by an intervention" in text for text in texts)  # the run reveals another token from the start
    expect(page.locator(".dl-edits")).to_contain_text("position 9 set to “␣w” before step 1")


def test_a_view_that_cannot_be_read_says_so_and_the_others_stay(opened: Callable[..., Any]) -> None:
    page = start(opened)
    page.evaluate("window.broken = 'trace/resid/1'")
    page.get_by_label("Step", exact=True).fill("1")
    page.wait_for_selector("[data-state=ready]")
    expect(page.locator(".dl-trace .dl-note")).to_have_text("This view could not be read: the kernel is busy")
    assert page.locator(".dl-lens h3").inner_text() == "Lens at step 1"
    page.get_by_label("Step", exact=True).fill("2")
    expect(page.locator(".dl-trace [role=grid]")).to_be_visible()
    page.evaluate("window.broken = 'predictions'")
    page.get_by_label("Token", exact=True).fill(" w")
    page.get_by_role("button", name="Force and go on").click()
    expect(page.get_by_role("alert")).to_have_text("the kernel is busy")


def test_an_error_of_the_kernel_is_shown(opened: Callable[..., Any]) -> None:
    page = start(opened)
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_role("alert")).to_have_text("there is no block <9>")
    assert page.get_by_role("button", name="Apply").is_enabled()
