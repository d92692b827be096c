"""A person's page goes on while other clients of the same explorer leave, ask for too much, or say nothing."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from explorer_walk import apply, drawer, prompt_box, settings, settled, step_to
from playwright.sync_api import expect

Open = Callable[..., Any]
PROMPTS = ("Tilda Drusser is the", "Gustav Geisser", "Tilda Drusser")


@pytest.fixture(scope="module")
def address(served: Callable[..., str]) -> str:
    return served("tiny-mdm", "--steps", "5")


@pytest.fixture(scope="module")
def forgetful() -> Iterator[str]:
    """Address of an explorer that keeps two runs."""
    import uvicorn

    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.explorer import Session
    from diffusion_lens.explorer.server import Server

    session = Session([HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")], max_runs=2)
    session.run({"prompt": "Gustav Geisser is the", "steps": 4})
    server, running, begin = Server(session), [], uvicorn.Server.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self, sockets: (running.append(self), begin(self, sockets)))
        thread = Thread(target=server.serve)
        thread.start()
        yield server.url
        running[0].should_exit = True
        thread.join(20)


def run(page: Any, prompt: str, seconds: float = 20) -> None:
    """Run a prompt, as a person who waits no longer than some seconds for it."""
    prompt_box(page).fill(prompt)
    prompt_box(page).press("Enter")
    expect(page.get_by_role("status")).to_have_text("Done.", timeout=1000 * seconds)
    settled(page)


def test_a_page_that_is_closed_stops_its_run(opened: Open, address: str) -> None:
    leaves = opened(address)
    settings(leaves, Steps=4096)  # minutes
    leaves.get_by_role("button", name="Run", exact=True).click()
    expect(leaves.locator(".dl-progress")).to_contain_text("of 4096 · 1 s")
    leaves.close()
    run(opened(address), PROMPTS[0])


def test_a_spec_of_20000_interventions_is_refused_at_once(opened: Open, address: str) -> None:
    page, at = opened(address), urlsplit(address)
    spec = {"prompt": PROMPTS[0], "interventions": [{"what": "zero", "site": "mlp", "layer": 1}] * 20_000}
    token = {"X-Token": at.query.partition("=")[2]}
    request = urllib.request.Request(f"http://{at.netloc}/api/run", json.dumps(spec).encode(), token)
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(request, timeout=20)
    assert "20,000 entries; a run takes at most 128" in json.loads(refused.value.read())["error"]
    run(page, PROMPTS[1])


def test_connections_that_say_nothing_are_closed(opened: Open, address: str) -> None:
    at = urlsplit(address)
    with ExitStack() as connections:
        silent = [
            connections.enter_context(socket.create_connection((at.hostname, at.port), timeout=20)) for _ in range(60)
        ]
        for connection in silent[::2]:
            connection.sendall(b"POST /api/run HTT")
        begun = time.monotonic()
        run(opened(address), PROMPTS[0])
        assert [connection.recv(100) for connection in silent] == [b""] * 60
        assert time.monotonic() - begun < 20


def test_a_run_that_the_server_has_dropped_is_shown_again(opened: Open, forgetful: str) -> None:
    page = opened(forgetful)
    step_to(page, 0)
    apply(page, Site="mlp")  # a run that names the first one as its base
    drawer(page).get_by_role("button", name="Close").click()
    chosen = page.get_by_label("Run", exact=True)
    first, changed = (chosen.locator("option").nth(i).get_attribute("value") for i in range(2))
    for prompt in PROMPTS:
        run(page, prompt)
    page.get_by_role("tab", name="Lens").click()
    for one in (first, changed):
        chosen.select_option(one)
        for step in (2, 3):
            step_to(page, step)
            expect(page.get_by_role("heading", name=f"Lens at step {step}")).to_be_visible()
            expect(page.locator(".dl-pane.dl-lens canvas").first).to_be_visible()
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator(".dl-panel")).not_to_contain_text("could not be read")
    drawer(page).get_by_role("button", name="Mask it instead").click()
    settled(page)
    expect(page.locator(".dl-run.dl-active .dl-edit")).to_have_count(2)
    opened.problems[:] = [problem for problem in opened.problems if "404 (Not Found)" not in problem]
    again = opened(forgetful)  # what the server still has
    expect(again.locator(".dl-run")).to_have_count(1)
