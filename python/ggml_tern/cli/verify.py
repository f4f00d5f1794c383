"""The command ``tern verify``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from ggml_tern.cli.lora_option import LORA
from ggml_tern.progress import byte_progress

VERIFY_EPILOG = """
\b
Examples
  tern verify ./Ternary-Model model.gguf
  tern verify model-pq2_0.gguf model-ptq1_0.gguf
      Two files of one model: exact if their weights are equal.
"""


@click.command("verify", epilog=VERIFY_EPILOG)
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("file", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--lora", "loras", multiple=True, metavar="DIR[=SCALE]", help="As it was given to ternconv.", type=LORA
)
@click.option("--mtp", is_flag=True, help="As it was given to ternconv.")
@click.option("--json", "json_output", is_flag=True, help="Print the findings as JSON.")
def command(
    source: Path, file: Path, loras: tuple[tuple[Path, float], ...], mtp: bool, json_output: bool
) -> None:
    """Recompute every tensor of OUT.gguf from SRC, the model that it was converted from, and compare.

    Says of each tensor whether it holds the source's values exactly, exactly but for scales rounded to fp16,
    or as quantizing them gives, bit for bit, and with what error.

    Exit codes, as cmp has them: 0 none is different, 1 some are, 2 for trouble, 130 interrupted.
    """
    from ggml_tern.convert import verify as verification
    from ggml_tern.convert.read.lora import open_adapter

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
