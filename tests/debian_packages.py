"""Debian packages that tests need, without root: unpacked into the cache, with what they depend on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

#: Put before apt's options: nothing is asked for but what a package cannot do without.
INSTALL = ("install", "--simulate", "--no-install-recommends")


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


def cache_dir() -> Path:
    root = os.environ.get("TERN_CACHE_DIR") or Path.home() / ".cache" / "ggml-tern"
    return Path(root).absolute() / "debian"


def unpacked(package: str) -> Path:
    """The folder that the files of a package are in, and those of what it needs and is not installed.

    Fails the test, with a line that says what to install, if the package cannot be had."""
    folder = cache_dir() / package
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fetch(package, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.fail(f"needs {package}: apt-get install {package} ({said})", pytrace=False)
    return folder


def program(package: str, path: str) -> Program:
    """A program of a package, `path` in it, that finds the libraries which were unpacked with it.

    Fails the test if it cannot be had, or does not run."""
    folder = unpacked(package)
    found = _in_folder(folder, path)
    if not found.runs():
        # Unpacked when the system had libraries that it has no longer.
        shutil.rmtree(folder, ignore_errors=True)
        found = _in_folder(unpacked(package), path)
        assert found.runs(), f"{found.path} does not run: apt-get install {package}"
    return found


def _in_folder(folder: Path, path: str) -> Program:
    libraries = [file.parent for file in (folder / "usr" / "lib").glob("*-linux-gnu*/**/*.so*")]
    search = os.pathsep.join(str(path) for path in dict.fromkeys(libraries))
    return Program(folder / path, {"LD_LIBRARY_PATH": search} if search else {})


def _fetch(package: str, folder: Path) -> None:
    """Where apt's own list of packages is missing, or too old to fetch by, a fresh one is used, kept apart.

    Raises CalledProcessError if a package cannot be fetched, OSError if there is no apt."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name)
        fresh = [f"-oDir::State::Lists={scratch}/lists", f"-oDir::Cache={scratch}/cache"]
        (scratch / "lists" / "partial").mkdir(parents=True)
        (scratch / "cache" / "archives" / "partial").mkdir(parents=True)
        try:
            _download(package, scratch, [])
        except subprocess.CalledProcessError:
            _run(["apt-get", *fresh, "update"], scratch)
            _download(package, scratch, fresh)
        for file in scratch.glob("*.deb"):
            _run(["dpkg-deb", "-x", file.name, "unpacked"], scratch)
        try:
            (scratch / "unpacked").rename(folder)
        except OSError:
            if not folder.is_dir():  # by another test run that was faster
                raise


def _download(package: str, to: Path, options: list[str]) -> None:
    lines = _run(["apt-get", *options, *INSTALL, package], to).splitlines()
    names = [line.split()[1] for line in lines if line.startswith("Inst ")]
    _run(["apt-get", *options, "download", *names], to)


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
