"""The command ``tern doctor``."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.host import doctor as examination

STATUS_STYLE = {
    examination.Status.OK: "green",
    examination.Status.NOTE: "yellow",
    examination.Status.BROKEN: "bold red",
}


@click.command("doctor")
@click.argument("program", required=False)
@click.option("--json", "json_output", is_flag=True, help="Print the findings as JSON.")
def command(program: str | None, json_output: bool) -> None:
    """Say whether everything works here, and how to mend what does not.

    Loads the plug-in for real: into the stock llama-server that came with it, into a llama-server on the PATH
    (or into PROGRAM, any llama.cpp program that knows --list-devices) and into llama-cpp-python. The exit
    code is 1 if something that matters is broken.
    """
    checks = examination.examine(program)
    if json_output:
        click.echo(examination.as_json(checks))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in checks:
            style = STATUS_STYLE[check.status]
            table.add_row(Text(check.status, style), check.name, Text(check.found))
            if check.mend:
                table.add_row("", "", Text(f"→ {check.mend}", style))
        Console().print(table)
    sys.exit(0 if examination.is_sound(checks) else 1)
