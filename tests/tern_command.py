"""The command ``tern`` as a process, in an environment that does not have the plug-in's variables already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ggml_tern.host import stock

TERN = str(Path(sys.executable).parent / "tern")


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without the plug-in's variables, with ``variables`` added."""
    dropped = {stock.BACKEND_VARIABLE, stock.DEVICE_VARIABLE, stock.LLAMA_LIBRARY_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in dropped} | variables


def tern(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with these variables in its environment."""
    return subprocess.run(
        [TERN, *map(str, arguments)],
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
