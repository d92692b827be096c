"""The system's Chromium, driven by playwright: for the tests in the browser and for the pictures of the docs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO_INSTALL = "Chromium is not installed. On Debian and Ubuntu: apt-get install chromium fonts-dejavu-core"
# A headless browser that fetches nothing by itself. Containers do not allow its sandbox.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-color-profile=srgb",
)
DRAWN = ".dl-explorer[data-state=ready]"


class Missing(RuntimeError):
    """There is no Chromium on this machine."""


def executable() -> str:
    """Path of the browser.

    Raises:
        Missing: There is none.
    """
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise Missing(HOW_TO_INSTALL)
    return found


@contextmanager
def started() -> Iterator[Any]:
    """A browser with a fresh profile, closed at the end."""
    from playwright.sync_api import sync_playwright

    path = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
