"""One Chromium for all tests; a page fails its test when it logs something or asks another host for something."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromium
import explorer_pages
import pytest
from playwright.sync_api import expect

expect.set_options(timeout=30_000)  # A run that a page asks for takes longer on a slow machine.
AXE = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first, so that two workers end together."""
    items.sort(key=lambda item: item.path.name != "test_site.py")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with chromium.started() as browser:
        yield browser


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of explorer pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "mdm": explorer_pages.page_of(explorer_pages.explored("site-mdm")),
        "pair": explorer_pages.pair_page(),
        "large": explorer_pages.large_page(),
        "hostile": explorer_pages.large_page(12, 3, 2, explorer_pages.HOSTILE),
    }
    return {name: explorer_pages.write(page, folder, name) for name, page in made.items()}


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[..., str]]:
    """Runs `diffusion-lens explore` with arguments, until the end of the tests, and returns the address of its page."""
    addresses: dict[tuple[str, ...], str] = {}
    with ExitStack() as running:

        def serve(*arguments: str) -> str:
            if arguments not in addresses:
                command = [sys.executable, "-m", "diffusion_lens", "explore", *arguments, "--no-browser"]
                environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
                server = running.enter_context(
                    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
                )
                running.callback(server.terminate)
                assert server.stdout is not None
                lines = iter(server.stdout.readline, "")
                addresses[arguments] = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
            return addresses[arguments]

        yield serve


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page by its name or address. At the end it must have logged nothing and have asked no other host.

    Its reader prefers reduced motion, so that it does not play by itself, unless `moves` is true. `script` runs before
    those of the page.
    """
    contexts, problems = [], []

    def open_page(
        name: str,
        width: int = 1280,
        theme: str = "light",
        fragment: str = "",
        height: int = 800,
        moves: bool = False,
        script: str = "",
        **settings: Any,
    ) -> Any:
        url = f"{pages[name].as_uri() if name in pages else name}{fragment}"
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,
            reduced_motion="no-preference" if moves else "reduce",
            **settings,
        )
        contexts.append(context)
        context.add_init_script(script)
        page = context.new_page()
        own = urlsplit(url)

        def on_request(request: Any) -> None:
            asked = urlsplit(request.url)
            if asked.scheme not in ("data", "blob") and (asked.scheme, asked.netloc) != (own.scheme, own.netloc):
                problems.append(f"a request to {request.url}")

        page.on("request", on_request)
        page.on("console", lambda message: problems.append(f"console: {message.text} {message.location['url']}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}\n{error.stack}"))
        page.goto(url)
        page.wait_for_selector(chromium.DRAWN)
        return page

    open_page.problems = problems  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what a page lacks for assistive technology."""
    assert AXE.exists(), f"axe-core is not at {AXE}: run `make browser`, which installs it with npm"
    return AXE.read_text(encoding="utf-8")
