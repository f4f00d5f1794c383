"""The command ``tern env``."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import click

from ggml_tern.host import devices
from ggml_tern.host.run import find_program
from ggml_tern.host.stock import library_variables, llama_cpp_dir, plugin_variables
from ggml_tern.tensors.names import printable


@click.command("env")
@click.option("--path", is_flag=True, help="Also put the stock llama.cpp tools first on the PATH.")
@click.argument("program", required=False)
def command(path: bool, program: str | None) -> None:
    """Print the shell lines that make any stock llama.cpp program use the plug-in.

    \b
    In a shell:  eval "$(tern env)"

    The device in them suits PROGRAM, or the llama-server on the PATH: the GPUs that this llama.cpp has, else
    TERN0, the processor. LLAMA_ARG_DEVICE stays as it is where it is set.
    """
    on_path = None if path else shutil.which("llama-server")
    known = find_program(program) if program is not None else Path(on_path or "llama-server")
    choice = devices.choose(known)
    if choice.said:
        click.echo(f"tern env: {printable(choice.said)}", err=True)
    variables = plugin_variables(choice.devices) | library_variables()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if path:
        lines.append(f'export PATH={shlex.quote(str(llama_cpp_dir()))}:"$PATH"')
    click.echo("\n".join(lines))
