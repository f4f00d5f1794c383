"""The command ``tern``: run stock llama.cpp programs with the plug-in, find out what is in the way, and look
into GGUF files."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.commands import bench, chat, plan, serve
from ggml_tern.errors import TernError
from ggml_tern.lora_option import LORA
from ggml_tern.progress import byte_progress
from ggml_tern.runtime import doctor as examination
from ggml_tern.runtime import run as running
from ggml_tern.runtime.host import library_variables, llama_cpp_dir, plugin_variables

STATUS_STYLE = {
    examination.Status.OK: "green",
    examination.Status.NOTE: "yellow",
    examination.Status.BROKEN: "bold red",
}

VERIFY_EPILOG = """
\b
Examples
  tern verify ./Ternary-Model model.gguf
  tern verify model-pq2_0.gguf model-ptq1_0.gguf
      Two files of one model: exact if their weights are equal.
"""

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


# The commands below import what they need when they are called: it takes time, which `tern run` need not.


@cli.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--stats", is_flag=True, help="Count the zeros, which reads all of the file.")
@click.option("--json", "json_output", is_flag=True, help="Print everything as JSON.")
def inspect_file(file: Path, stats: bool, json_output: bool) -> None:
    """Tell what a GGUF FILE holds and what will run it.

    Of a split model, any part stands for all of it.
    """
    from ggml_tern.gguf_files.inspect import describe, print_description
    from ggml_tern.gguf_files.reader import GGUFSource

    source = GGUFSource(file)
    with byte_progress() as progress:
        nbytes = sum(tensor.data.nbytes for tensor in source.tensors.values() if tensor.is_ternary)
        task = progress.add_task("reading", total=nbytes, visible=stats)
        found = describe(source, stats=stats, advance=lambda nbytes: progress.advance(task, nbytes))
    if json_output:
        click.echo(json.dumps(found, indent=2))
    else:
        print_description(found, Console())


@cli.command(epilog=REPACK_EPILOG)
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
def repack(file: Path, output: Path, type_name: str | None, unrotate: bool, force: bool) -> None:
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
    from ggml_tern.gguf_files import repack as repacking
    from ggml_tern.gguf_files.reader import GGUFSource

    # A kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
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
        click.echo(f"note: {note}")
    click.echo(f"{output}: {report.size / 1e6:.1f} MB")


@cli.command(epilog=VERIFY_EPILOG)
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("file", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--lora", "loras", multiple=True, metavar="DIR[=SCALE]", help="As it was given to ternconv.", type=LORA
)
@click.option("--mtp", is_flag=True, help="As it was given to ternconv.")
@click.option("--json", "json_output", is_flag=True, help="Print the findings as JSON.")
def verify(
    source: Path, file: Path, loras: tuple[tuple[Path, float], ...], mtp: bool, json_output: bool
) -> None:
    """Recompute every tensor of OUT.gguf from SRC, the model that it was converted from, and compare.

    Says of each tensor whether it holds the source's values exactly, exactly but for scales rounded to fp16,
    or as quantizing them gives, bit for bit, and with what error. The exit code is 1 if any tensor is
    different.
    """
    from ggml_tern.convert import verify as verification
    from ggml_tern.convert.lora import open_adapter

    adapters = [open_adapter(directory, scale) for directory, scale in loras]
    with byte_progress() as progress:
        task = progress.add_task("comparing", total=None)
        findings = list(
            verification.verify(
                source,
                file,
                adapters=adapters,
                keep_mtp=mtp,
                start=lambda total: progress.update(task, total=total),
                advance=lambda nbytes: progress.advance(task, nbytes),
            )
        )
    different = [finding for finding in findings if finding.verdict is verification.Verdict.DIFFERENT]
    if json_output:
        click.echo(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        verification.print_findings(findings, Console())
    if different:
        click.echo(f"tern: {file}: {len(different)} of {len(findings)} tensors are different", err=True)
    sys.exit(1 if different else 0)


@cli.command("hash")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--check",
    metavar="LIST",
    type=click.File(encoding="utf-8"),
    help="Compare with the saved output of `tern hash`; exit code 1 if anything differs.",
)
@click.option("--json", "json_output", is_flag=True, help="Print the hashes as JSON.")
def hash_file(file: Path, check: IO[str] | None, json_output: bool) -> None:
    """Print a SHA-256 of every tensor of a GGUF FILE, and of all of them.

    Two files with the same weights have the same hashes, whatever ternary type they are packed in, whatever
    the order of the tensors, and whatever the metadata.
    """
    from ggml_tern.gguf_files import digest
    from ggml_tern.gguf_files.reader import GGUFSource

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


cli.add_command(bench.command)
cli.add_command(chat.command)
cli.add_command(plan.command)
cli.add_command(serve.command)


def main() -> None:
    """Entry point: a TernError is one line on stderr and exit code 1."""
    try:
        cli()
    except TernError as error:
        click.echo(f"tern: {error}", err=True)
        sys.exit(1)
