"""A program that is run to its end for what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in this environment, with nothing to read; `stdout` of what is returned is all that it
    printed, errors too.

    Raises OSError where it does not start, TimeoutExpired where it does not end in time."""
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )
