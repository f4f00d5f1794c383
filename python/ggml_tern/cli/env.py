"""The command ``tern env``."""

from __future__ import annotations

import shlex

import click

from ggml_tern.host.stock import library_variables, llama_cpp_dir, plugin_variables


@click.command("env")
@click.option("--path", is_flag=True, help="Also put the stock llama.cpp tools first on the PATH.")
def command(path: bool) -> None:
    """Print the shell lines that make any stock llama.cpp program use the plug-in.

    \b
    In a shell:  eval "$(tern env)"
    """
    variables = plugin_variables() | library_variables()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if path:
        lines.append(f'export PATH={shlex.quote(str(llama_cpp_dir()))}:"$PATH"')
    click.echo("\n".join(lines))
