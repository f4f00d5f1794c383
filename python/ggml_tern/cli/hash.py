"""The command ``tern hash``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO

import click

from ggml_tern.progress import byte_progress


@click.command("hash")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--check",
    metavar="LIST",
    type=click.File(encoding="utf-8"),
    help="Compare with the saved output of `tern hash`; the exit code is 1 if anything differs.",
)
@click.option("--json", "json_output", is_flag=True, help="Print the hashes as JSON.")
def command(file: Path, check: IO[str] | None, json_output: bool) -> None:
    """Print a SHA-256 of every tensor of a GGUF FILE, and of all of them.

    Two files with the same weights have the same hashes, whatever ternary type they are packed in, whatever
    the order of the tensors, and whatever the metadata.

    Exit codes, as cmp has them: 0, 1 for a difference from --check, 2 for trouble, 130 interrupted.
    """
    from ggml_tern.gguf import digest
    from ggml_tern.gguf.reader import GGUFSource

    source = GGUFSource(file)
    with byte_progress() as progress:
        nbytes = sum(tensor.data.nbytes for tensor in source.tensors.values())
        task = progress.add_task("hashing", total=nbytes)
        hashes = digest.hash_tensors(source, advance=lambda nbytes: progress.advance(task, nbytes))
    if check is not None:
        differences = digest.compare(hashes, check.read(), check.name)
        click.echo("\n".join(differences or [f"{file}: as in {check.name}"]))
        sys.exit(1 if differences else 0)
    if json_output:
        report = {"file": str(file), "all": digest.hash_all(hashes), "tensors": hashes}
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(digest.as_list(hashes), nl=False)
