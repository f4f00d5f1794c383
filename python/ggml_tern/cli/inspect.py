"""The command ``tern inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from ggml_tern.progress import byte_progress


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--stats", is_flag=True, help="Count the zeros, which reads all of the file.")
@click.option("--json", "json_output", is_flag=True, help="Print everything as JSON.")
def command(file: Path, stats: bool, json_output: bool) -> None:
    """Tell what a GGUF FILE holds and what will run it.

    Of a split model, any part stands for all of it.
    """
    from ggml_tern.gguf.inspection import describe, print_description
    from ggml_tern.gguf.reader import GGUFSource

    source = GGUFSource(file)
    with byte_progress() as progress:
        nbytes = sum(tensor.data.nbytes for tensor in source.tensors.values() if tensor.is_ternary)
        task = progress.add_task("reading", total=nbytes, visible=stats)
        found = describe(source, stats=stats, advance=lambda nbytes: progress.advance(task, nbytes))
    if json_output:
        click.echo(json.dumps(found, indent=2))
    else:
        print_description(found, Console())
