"""The command ``ternconv``: a Hugging Face model directory in, a ternary GGUF out."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ggml_tern.convert.pipeline import Report, convert
from ggml_tern.convert.summary import print_summary
from ggml_tern.convert.ternarize import MATRIX_TYPES, TABLE_TYPES, TypeChoice
from ggml_tern.errors import TernError

EPILOG = """
\b
Examples
  ternconv ./Llama-3.2-1B llama.gguf
      The smallest file: matrices in PTQ1_0 (1.75 bits a weight), embedding
      and head in Q8_0.
  ternconv --type pq2_0 --embed q4_0 ./gemma-3-270m gemma.gguf
      The same weights in the faster layout PQ2_0 (2.125 bits), and a smaller
      embedding.
  ternconv --embed ptq1_0 --head ptq1_0 ./Ternary-Model all.gguf
      For a model that was trained ternary throughout.
  ternconv --type q8_0 ./Llama-3.2-1B check.gguf
      Nothing ternary: shows that a checkpoint converts rightly.

Rounding a model that was not trained ternary to three values destroys it;
ternconv does so without asking, and the summary shows the error. Run the result
with any stock llama.cpp program through `tern run`, as in
`tern run llama-server -m llama.gguf`.

Exit codes: 0 done, 1 an error told in one line, 2 wrong usage, 130 interrupted.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="ggml-tern", prog_name="ternconv")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "matrix",
    type=click.Choice(list(MATRIX_TYPES)),
    default="ptq1_0",
    show_default=True,
    help="Type of the matrices in the blocks. Ternary types take groups of 128 along n_in; a matrix that "
    "they do not divide goes to Q2_0 (groups of 64) or Q8_0, and the summary says so.",
)
@click.option(
    "--embed",
    type=click.Choice(list(TABLE_TYPES)),
    default="q8_0",
    show_default=True,
    help="Type of the token embedding; with tied embeddings it is the head too.",
)
@click.option(
    "--head",
    type=click.Choice(list(TABLE_TYPES)),
    help="Type of the head, of a model that has its own.  [default: q8_0]",
)
@click.option("--force", is_flag=True, help="Replace OUT.gguf if it exists.")
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Threads that quantize.  [default: one per core]",
)
def main(
    model_dir: Path, output: Path, matrix: str, embed: str, head: str | None, force: bool, threads: int
) -> None:
    """Convert the Hugging Face model in MODEL_DIR to the GGUF file OUT.gguf, with ternary weights.

    MODEL_DIR holds config.json, safetensors and a tokenizer, as the hub serves them. Known architectures are
    Llama (LlamaForCausalLM) and Gemma 3 (Gemma3ForCausalLM, and the text model of
    Gemma3ForConditionalGeneration).
    """
    choice = TypeChoice(MATRIX_TYPES[matrix], TABLE_TYPES[embed], TABLE_TYPES[head] if head else None)
    # A kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(format="ternconv: warning: %(message)s", level=logging.WARNING)
    # How a tokenizer joins two texts is nothing that a GGUF tells.
    logging.getLogger("gguf.vocab").addFilter(lambda record: "<pair>" not in record.getMessage())
    try:
        report = _convert_with_progress(model_dir, output, choice, force, threads)
    except TernError as error:
        click.echo(f"ternconv: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("ternconv: interrupted; nothing was written", err=True)
        sys.exit(130)
    print_summary(report, Console())


def _convert_with_progress(
    model_dir: Path, output: Path, choice: TypeChoice, force: bool, threads: int
) -> Report:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        return convert(
            model_dir,
            output,
            choice,
            force=force,
            n_threads=threads,
            start=lambda total: progress.update(task, total=total, description="writing"),
            advance=lambda nbytes: progress.advance(task, nbytes),
        )


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
