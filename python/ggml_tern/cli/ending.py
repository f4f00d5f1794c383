"""How commands that write large files begin and end: what was left behind is told, and a kill cleans up."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import click

from ggml_tern.tensors.names import printable


def clean_up_when_killed() -> None:
    """Let SIGTERM and SIGHUP, which a terminal sends when it is closed, end the program as Ctrl-C does:
    through everything that cleans up. The exit code is 128 and the number, as a shell has it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # What nohup has the program ignore stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def tell_stale_parts(program: str, output: Path) -> None:
    """Say on stderr which part files lie where `output` is to be written, and nobody writes any more."""
    # Here and not above, as `tern --help` would pay for it.
    from ggml_tern.atomic_file import stale_parts

    for line in stale_parts(output.parent):
        click.echo(f"{program}: note: {printable(line)}", err=True)
