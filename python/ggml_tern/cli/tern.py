"""The command ``tern``: run stock llama.cpp programs with the plug-in, find out what is in the way, and look
into GGUF files. Each of its commands has a file beside this one.

The files import what does the work when the command is called: it takes time, which `tern run` need not.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import click

from ggml_tern.cli import bench, chat, doctor, env, eval, hash, inspect, plan, repack, run, serve, verify
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable_lines

#: Commands that compare, as cmp and diff do: 1 is their answer "differs" or "does not fit", and trouble is 2.
_COMPARING = ("hash", "plan", "verify")
_TROUBLE, _INTERRUPTED = 2, 130


class Commands(click.Group):
    """The commands of ``tern``. Those that compare end with 1 for that answer alone: neither for an error,
    be it one that nobody expected, nor for Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if ctx.invoked_subcommand not in _COMPARING:
                raise
            if isinstance(error, KeyboardInterrupt):
                click.echo("tern: interrupted", err=True)
                sys.exit(_INTERRUPTED)
            if isinstance(error, TernError):
                _tell(error)
            else:
                traceback.print_exc()
            sys.exit(_TROUBLE)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ggml-tern", prog_name="tern")
def cli() -> None:
    """Ternary language models on unmodified llama.cpp."""


for _module in (bench, chat, doctor, env, eval, hash, inspect, plan, repack, run, serve, verify):
    cli.add_command(_module.command)


def main() -> None:
    """Entry point: a TernError is one line on stderr and exit code 1, or 2 of commands that compare."""
    try:
        cli()
    except TernError as error:
        _tell(error)
        sys.exit(1)


def _tell(error: TernError) -> None:
    # Of what is wrong with a configuration, there is a line each.
    click.echo(f"tern: {printable_lines(str(error))}", err=True)
