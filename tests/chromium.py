"""A real Chromium for tests: one that is installed, or Debian's, unpacked into the cache without root."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

import debian_packages
from debian_packages import Program

INSTALLED = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chromium-headless-shell",
)
#: Chromium without a window, a third of the size of the whole.
PACKAGE = "chromium-headless-shell"


def installed(of_playwright: Path) -> Program | None:
    """A browser of this machine, or one that `playwright install` has brought."""
    found = (shutil.which(name) for name in INSTALLED)
    candidates = [*(Path(path) for path in found if path), of_playwright]
    return next((program for path in candidates if (program := Program(path, {})).runs()), None)


def find(of_playwright: Path) -> Program:
    """Fails the test if there is no Chromium to be had."""
    return installed(of_playwright) or debian_packages.program(PACKAGE, f"usr/lib/chromium/{PACKAGE}")


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A Chromium without a window, and without a sandbox: it shows our own pages only."""
    with sync_playwright() as playwright:
        program = find(Path(playwright.chromium.executable_path))
        browser = playwright.chromium.launch(
            executable_path=program.path,
            env={**os.environ, **program.variables},
            # Containers have a small /dev/shm.
            args=["--disable-dev-shm-usage"],
        )
        with contextlib.closing(browser):
            yield browser
