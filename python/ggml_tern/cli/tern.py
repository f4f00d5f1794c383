"""The command ``tern``: run stock llama.cpp programs with the plug-in, find out what is in the way, and look
into GGUF files. Each of its commands has a file beside this one.

The files import what does the work when the command is called: it takes time, which `tern run` need not.
"""

from __future__ import annotations

import sys

import click

from ggml_tern.cli import bench, chat, doctor, env, hash, inspect, plan, repack, run, serve, verify
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ggml-tern", prog_name="tern")
def cli() -> None:
    """Ternary language models on unmodified llama.cpp."""


for _module in (bench, chat, doctor, env, hash, inspect, plan, repack, run, serve, verify):
    cli.add_command(_module.command)


def main() -> None:
    """Entry point: a TernError is one line on stderr and exit code 1."""
    try:
        cli()
    except TernError as error:
        # Of what is wrong with a configuration, there is a line each.
        lines = "\n".join(printable(line) for line in str(error).split("\n"))
        click.echo(f"tern: {lines}", err=True)
        sys.exit(1)
