"""Runs a headless Chromium for the page's tests and pictures."""

import contextlib
import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OF_SYSTEM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def headless() -> Iterator[Any]:
    """Run a Chromium while the context lasts: playwright's own, or else one of the system.

    Raises:
        ModuleNotFoundError: playwright is not installed.
        FileNotFoundError: there is no Chromium.
    """
    playwright_api: Any = importlib.import_module("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        chromium = playwright.chromium
        paths = [chromium.executable_path, *(shutil.which(name) or "" for name in OF_SYSTEM)]
        path = next((path for path in paths if path and Path(path).exists()), None)
        if path is None:
            raise FileNotFoundError("there is no Chromium: run `playwright install chromium`")
        # Chromium's sandbox needs rights that a container may not have; only our page is opened.
        browser = chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def sign_in(page: Any, key: str) -> None:
    """Give the page a key, and ask for the figures."""
    page.fill("#key", key)
    page.click("#sign-in button")
