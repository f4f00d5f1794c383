"""The command ``tern run``."""

from __future__ import annotations

import click

from ggml_tern.host import run as running


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--stock", is_flag=True, help="Run it without the plug-in.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(stock: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run a stock llama.cpp PROGRAM with the plug-in.

    PROGRAM is the name of one that came with ggml-tern (llama-server, llama-bench, ...), of one on the PATH,
    or a path. All that follows it is passed on; its output, signals and exit code come through.
    """
    running.run(running.find_program(program), list(arguments), stock=stock)
