"""The command ``tern doctor``."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from ggml_tern.tensors.names import printable_lines
from ggml_tern.wrapping import print_wrapped

STATUS_STYLE = {"ok": "green", "note": "yellow", "broken": "bold red"}


@click.command("doctor")
@click.argument("program", required=False)
@click.option("--json", "json_output", is_flag=True, help="Print the findings as JSON.")
def command(program: str | None, json_output: bool) -> None:
    """Say whether everything works here, and how to mend what does not.

    Loads the plug-in for real: into the stock llama-server that came with it, into a llama-server on the PATH
    (or into PROGRAM, any llama.cpp program that knows --list-devices) and into llama-cpp-python. The exit
    code is 1 if something that matters is broken.
    """
    from ggml_tern.host import doctor as examination

    checks = examination.examine(program)
    if json_output:
        click.echo(examination.as_json(checks))
    else:
        console = Console()
        longest = max(len(check.name) for check in checks)
        for check in checks:
            style = STATUS_STYLE[check.status]
            label = Text.assemble((f"{check.status:<8}", style), f"{check.name:<{longest}}  ")
            print_wrapped(label, printable_lines(check.found), console)
            if check.mend:
                print_wrapped(" " * len(label) + "→ ", printable_lines(check.mend), console, style)
    sys.exit(0 if examination.is_sound(checks) else 1)
