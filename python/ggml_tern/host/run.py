"""``tern run``: become a llama.cpp program, with the plug-in or without it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

from ggml_tern.errors import TernError
from ggml_tern.host.stock import DEVICE, host_environment, llama_cpp_dir


def bundled_programs() -> list[str]:
    """The names of the stock llama.cpp programs that came with the package; empty if there are none."""
    try:
        folder = llama_cpp_dir()
    except TernError:
        return []
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_file() and os.access(entry, os.X_OK) and ".so" not in entry.suffixes
    )


def find_program(program: str) -> Path:
    """The file to run for ``program``: a path is one, a name is first ours and then one on the PATH.

    Absolute, for without a slash in it the system would search the PATH once more.

    Raises:
        TernError: there is no such program, or it is not executable.
    """
    if os.sep in program:
        path = Path(program)
        if not path.is_file():
            raise TernError(f"{program}: no such file" if not path.exists() else f"{program}: not a program")
        if not os.access(path, os.X_OK):
            raise TernError(f"{program}: not executable (chmod +x makes it so)")
        return path.absolute()
    ours = bundled_programs()
    if program in ours:
        return llama_cpp_dir() / program
    found = shutil.which(program)
    if found is None:
        listed = (
            f"ours are {', '.join(ours)}" if ours else "no llama.cpp programs came with this installation"
        )
        raise TernError(f"{program}: no such program here or on the PATH; {listed}")
    return Path(found).absolute()


def run(path: Path, arguments: list[str], *, stock: bool, devices: str | None = DEVICE) -> NoReturn:
    """Replace this process by a program, so that its output, signals and exit code are the caller's.

    Args:
        path: of the program, as `find_program` gives it.
        arguments: passed on as they are.
        stock: run it without the plug-in.
        devices: what it runs on, as `host_environment` takes it.

    Raises:
        TernError: the program cannot be started, or the plug-in is missing.
    """
    environment = host_environment(stock, path, devices)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and what is ignored stays ignored in the new program: 'tern run ... | head'
    # would not end.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(path, [str(path), *arguments], environment)
    except OSError as error:
        raise TernError(f"{path}: cannot be started: {error.strerror}") from error
