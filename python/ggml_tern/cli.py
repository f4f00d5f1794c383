"""The command ``tern``: run stock llama.cpp programs with the plug-in, and find out what is in the way."""

from __future__ import annotations

import shlex
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.errors import TernError
from ggml_tern.runtime import doctor as examination
from ggml_tern.runtime import run as running
from ggml_tern.runtime.host import library_variables, llama_cpp_dir, plugin_variables

STATUS_STYLE = {
    examination.Status.OK: "green",
    examination.Status.NOTE: "yellow",
    examination.Status.BROKEN: "bold red",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ggml-tern", prog_name="tern")
def cli() -> None:
    """Ternary language models on unmodified llama.cpp."""


@cli.command()
@click.argument("program", required=False)
@click.option("--json", "json_output", is_flag=True, help="Print the findings as JSON.")
def doctor(program: str | None, json_output: bool) -> None:
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


@cli.command()
@click.option("--path", is_flag=True, help="Also put the stock llama.cpp tools first on the PATH.")
def env(path: bool) -> None:
    """Print the shell lines that make any stock llama.cpp program use the plug-in.

    \b
    In a shell:  eval "$(tern env)"
    """
    variables = plugin_variables() | library_variables()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if path:
        lines.append(f'export PATH={shlex.quote(str(llama_cpp_dir()))}:"$PATH"')
    click.echo("\n".join(lines))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--stock", is_flag=True, help="Run it without the plug-in.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(stock: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run a stock llama.cpp PROGRAM with the plug-in.

    PROGRAM is the name of one that came with ggml-tern (llama-server, llama-bench, ...), of one on the PATH,
    or a path. All that follows it is passed on; its output, signals and exit code come through.
    """
    running.run(program, list(arguments), stock=stock)


def main() -> None:
    """Entry point: a TernError is one line on stderr and exit code 1."""
    try:
        cli()
    except TernError as error:
        click.echo(f"tern: {error}", err=True)
        sys.exit(1)
