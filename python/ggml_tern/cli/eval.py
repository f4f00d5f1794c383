"""The command ``tern eval``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ggml_tern.tensors.names import printable

if TYPE_CHECKING:
    from ggml_tern.evaluate.scoring import Estimate, Summary

EPILOG = """
\b
Examples
  tern eval model.gguf --text book.txt
      Perplexity alone.
  tern eval model-ptq1_0.gguf --against ./Model --text book.txt
      What is left of a checkpoint, which is converted without loss for that.
  tern eval model-ptq1_0.gguf --against model-f16.gguf --text book.txt --json
      For scripts.
"""


@click.command("eval", epilog=EPILOG)
@click.argument("model", metavar="MODEL.gguf", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="REF",
    type=click.Path(path_type=Path),
    help="The model that it should be like: a GGUF file, or a checkpoint's directory.",
)
@click.option("--text", required=True, metavar="FILE", type=click.Path(path_type=Path), help="UTF-8 text.")
@click.option(
    "--context",
    "-c",
    default=512,
    show_default=True,
    type=click.IntRange(min=8),
    help="Tokens of a window, of which the second half is scored.",
)
@click.option(
    "--tokens", default=16384, show_default=True, type=click.IntRange(min=1), help="Of the text at most."
)
@click.option(
    "--n-gpu-layers",
    "-ngl",
    default=-1,
    show_default="all",
    help="Layers on the device, as llama.cpp has it.",
)
@click.option(
    "--threads", "-t", type=click.IntRange(min=1), help="Threads; llama.cpp's own choice unless given."
)
@click.option("--json", "json_output", is_flag=True, help="Print the figures as JSON.")
def command(
    model: Path,
    against: Path | None,
    text: Path,
    context: int,
    tokens: int,
    n_gpu_layers: int,
    threads: int | None,
    json_output: bool,
) -> None:
    """Tell how good a model predicts a text, and how much of a reference is left in it.

    Perplexity is that of llama-perplexity: the text in windows, the second half of each scored. Against a
    reference, the KL divergence KL(REF || MODEL) of the predictions in nats (0: the same), its mean, median
    and 99th percentile, and how often both hold the same token for the likeliest. Figures are comparable over
    the same text and context alone. Needs llama-cpp-python.
    """
    from ggml_tern.evaluate.models import Model, as_gguf
    from ggml_tern.evaluate.text import evaluate, read_text, tokens_of

    words = read_text(text)
    with ExitStack() as stack:
        models = []
        for path in (model, against):
            if path is not None:
                file = stack.enter_context(as_gguf(path, beside=model))
                models.append(Model(file, context, n_gpu_layers, threads))
                stack.callback(models[-1].close)
        parts = tokens_of(words, text, models, context, tokens)
        columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task("", total=len(parts))
        reference = models[1] if against is not None else None
        summary = evaluate(models[0], reference, parts, lambda: progress.advance(task))
    if json_output:
        click.echo(json.dumps({"windows": len(parts), "context": context, **summary.as_json()}, indent=2))
    else:
        Console().print(table_of(summary, model, against, text))


def table_of(summary: Summary, model: Path, against: Path | None, text: Path) -> Table:
    def of(estimate: Estimate, digits: int) -> str:
        return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"

    against_words = f" against {printable(against.name)}" if against else ""
    of_what = f"{summary.positions} positions of {printable(text.name)}"
    table = Table(title=f"{printable(model.name)}{against_words}, {of_what}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("perplexity", of(summary.perplexity, 3))
    if summary.reference_perplexity is not None and summary.kl is not None and summary.same_top is not None:
        table.add_row("perplexity of the reference", of(summary.reference_perplexity, 3))
        table.add_row("KL divergence, mean", of(summary.kl, 4))
        table.add_row("KL divergence, median", f"{summary.kl_median:.4f}")
        table.add_row("KL divergence, 99th percentile", f"{summary.kl_99:.4f}")
        table.add_row("KL divergence, largest", f"{summary.kl_max:.4f}")
        share = summary.same_top
        table.add_row("same likeliest token", f"{100 * share.value:.1f} ± {100 * share.error:.1f} %")
    return table
