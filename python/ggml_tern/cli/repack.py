"""The command ``tern repack``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ggml_tern.cli.ending import clean_up_when_killed, tell_stale_parts
from ggml_tern.progress import byte_progress
from ggml_tern.tensors.names import printable

REPACK_EPILOG = """
\b
Examples
  tern repack model-ptq1_0.gguf model.gguf --type pq2_0
      From the smallest type to the fastest.
  tern repack old-q2_0.gguf model.gguf --type pq2_0
      A legacy file gets the type id that its blocks have now.
  tern repack model-00001-of-00003.gguf model.gguf --type q2_0
      Three parts in one file that llama.cpp runs without the plug-in.
  tern repack --unrotate rotated.gguf model-f16.gguf
      A rotated model as a plain one.
"""

#: What `tern repack --unrotate` can write, the default first.
PLAIN_TYPES = ("f16", "f32")


@click.command("repack", epilog=REPACK_EPILOG)
@click.argument("file", metavar="IN.gguf", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "type_name",
    # The names of _core.TERNARY_TYPES, which would cost an import here.
    type=click.Choice(["pq2_0", "ptq1_0", "q2_0", "tq2_0", "tq1_0", *PLAIN_TYPES]),
    help="The type that every ternary tensor gets. f16 and f32 go with --unrotate.  [default: with "
    "--unrotate, f16]",
)
@click.option(
    "--unrotate",
    is_flag=True,
    help="Make a rotated model plain: weights that any llama.cpp runs and quantizes.",
)
@click.option("--force", is_flag=True, help="Replace OUT.gguf if it exists.")
def command(file: Path, output: Path, type_name: str | None, unrotate: bool, force: bool) -> None:
    """Write the ternary weights of IN.gguf in another ternary type, without loss.

    Everything else is copied byte for byte. What the type cannot hold exactly is refused. Legacy files, with
    PQ2_0 blocks under the id of Q2_0, and bitnet.cpp's I2_S are read too; the parts of a split model become
    one file. Rotated weights stay rotated, in pq2_0 or ptq1_0, unless --unrotate is given.
    """
    if type_name is None:
        if not unrotate:
            raise click.UsageError("Missing option '--type'.")
        type_name = PLAIN_TYPES[0]
    elif unrotate != (type_name in PLAIN_TYPES):
        raise click.UsageError(f"--type {' and '.join(PLAIN_TYPES)} go with --unrotate, and no others do")
    from ggml_tern.gguf import repacking
    from ggml_tern.gguf.reader import GGUFSource

    clean_up_when_killed()
    tell_stale_parts("tern", output)
    try:
        with byte_progress() as progress:
            task = progress.add_task("repacking", total=None)
            write = repacking.unrotate if unrotate else repacking.repack
            types = repacking.PLAIN_TARGETS if unrotate else repacking.TARGETS
            report = write(
                GGUFSource(file),
                output,
                types[type_name],
                force=force,
                start=lambda total: progress.update(task, total=total),
                advance=lambda nbytes: progress.advance(task, nbytes),
            )
    except KeyboardInterrupt:
        click.echo("tern: interrupted; nothing was written", err=True)
        sys.exit(130)
    for note in report.notes:
        click.echo(f"note: {printable(note)}")
    click.echo(f"{output}: {report.size / 1e6:.1f} MB")
