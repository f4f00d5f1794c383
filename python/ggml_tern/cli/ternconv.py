"""The command ``ternconv``: a Hugging Face model directory in, a ternary GGUF out."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from ggml_tern.cli.ending import clean_up_when_killed, tell_stale_parts
from ggml_tern.cli.lora_option import LORA
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.rotate.rotation import BLOCKS, DEFAULT_BLOCK, RotationChoice
from ggml_tern.errors import TernError
from ggml_tern.progress import byte_progress
from ggml_tern.tensors.names import printable
from ggml_tern.tensors.types import GROUP_TYPES, MATRIX_TYPES, TENSOR_TYPES, TYPE_OF_BITS

EPILOG = """
\b
Examples
  ternconv ./Ternary-Model model.gguf
      A checkpoint that is ternary already is packed as it is; the summary
      says for how many tensors that is exact.
  ternconv --lossless ./Ternary-Model model.gguf
      The same, and an error instead of a file if anything would be lost.
  ternconv --type tq2_0 ./BitNet model.gguf
      For stock llama.cpp without the plug-in (as are q2_0 and tq1_0).
  ternconv --type pq2_0 --embed q4_0 --keep 'attn_*=q4_0' ./gemma gemma.gguf
      Mixed precision. Any name of a tensor will do: attn_q, q_proj,
      blk.0.attn_q.weight; --sensitive-layers q_proj,k_proj --sensitive-bits 4
      says the same in another way.
  ternconv --lora ./adapter=0.5 ./Llama-3.2-1B llama.gguf
      Merges a LoRA, at half its strength, before anything is rounded.
  ternconv --rotate --signs random:7 ./Qwen3-0.6B qwen3.gguf
      Folds a Hadamard rotation into the weights before they are rounded.
  ternconv --type q8_0 ./Llama-3.2-1B check.gguf
      Nothing ternary: shows that a checkpoint converts rightly.
  ternconv --type ptq1_0 model-f16.gguf model.gguf
      From a GGUF file instead of a checkpoint.
  ternconv --dry-run ./Ternary-Model model.gguf
      What would be written, and how large; in seconds, without writing.

Rounding a model that was not trained ternary to three values destroys it;
ternconv does so if a ternary --type is asked for, and the verdict at the end
says so. --type auto leaves such matrices in Q8_0. Run the result with any stock
llama.cpp program through `tern run`, as in `tern run llama-server -m llama.gguf`.

Exit codes: 0 done, 1 an error told in one line, 2 wrong usage, 130 interrupted.
"""


class KeepOption(click.ParamType[Keep]):
    """PATTERN=TYPE"""

    name = "pattern=type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Keep:
        pattern, equals, type_name = str(value).rpartition("=")
        if not equals or not pattern or type_name not in TENSOR_TYPES:
            self.fail(
                f"{value!r}: expected PATTERN=TYPE, with a type of {', '.join(TENSOR_TYPES)}", param, ctx
            )
        return Keep(pattern, TENSOR_TYPES[type_name])


class SignsOption(click.ParamType[int | None]):
    """identity, or random:SEED"""

    name = "signs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        kind, _, seed = str(value).partition(":")
        if value == "identity":
            return None
        if kind != "random" or not (seed.isascii() and seed.isdecimal()):
            self.fail(f"{value!r}: expected identity or random:SEED, with a number as SEED", param, ctx)
        return int(seed)


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(package_name="ggml-tern", prog_name="ternconv")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUT.gguf", type=click.Path(path_type=Path))
@click.option(
    "--type",
    "matrix",
    type=click.Choice([*MATRIX_TYPES, "auto"]),
    default="ptq1_0",
    show_default=True,
    help="Type of the matrices in the blocks. A matrix whose n_in its blocks do not divide (128 weights, "
    "q2_0 64, tq1_0 and tq2_0 256) goes to q2_0 or q8_0, and the summary says so. auto: ptq1_0 "
    "for what is ternary already, q8_0 for the rest.",
)
@click.option(
    "--embed",
    type=click.Choice(list(TENSOR_TYPES)),
    help="Type of the token embedding; with tied embeddings it is the head too.  [default: that of the "
    "matrices if it is ternary already, else q8_0]",
)
@click.option(
    "--head",
    type=click.Choice(list(TENSOR_TYPES)),
    help="Type of the head, of a model that has its own.  [default: as for --embed]",
)
@click.option(
    "--keep",
    type=KeepOption(),
    multiple=True,
    metavar="PATTERN=TYPE",
    help="Type of the tensors that a pattern names. May be given several times; the last match counts.",
)
@click.option(
    "--sensitive-layers", metavar="NAMES", help="Names of layers, such as q_proj,k_proj, that get more bits."
)
@click.option(
    "--sensitive-bits",
    type=click.Choice([str(bits) for bits in TYPE_OF_BITS]),
    default="4",
    show_default=True,
    help="How many: q4_0, q5_0, q8_0 or f16.",
)
@click.option(
    "--group-size",
    type=click.Choice([str(size) for size in GROUP_TYPES]),
    help="Weights that share a scale, at least a block of the type.  [default: one block]",
)
@click.option(
    "--lossless",
    is_flag=True,
    help="Refuse to lose anything but the rounding of ternary scales to fp16; embedding and head, if not "
    "ternary, stay as they are stored.",
)
@click.option(
    "--rotate",
    is_flag=True,
    help="Fold a blockwise Hadamard rotation into every weight that gets pq2_0 or ptq1_0. Such a model runs "
    "only with the plug-in, which rotates the activations.  [default: for a model that is ternary in such a "
    "basis only]",
)
@click.option(
    "--rotation-block",
    type=click.Choice([str(block) for block in BLOCKS]),
    help="Weights that the rotation mixes.  [default: the largest up to "
    f"{DEFAULT_BLOCK} that divides every folded width]",
)
@click.option(
    "--signs",
    type=SignsOption(),
    metavar="identity|random:SEED",
    help="The signs that weights are multiplied with first; the same SEED gives the same signs everywhere.  "
    "[default: identity, all +1]",
)
@click.option(
    "--lora",
    "loras",
    type=LORA,
    multiple=True,
    metavar="DIR[=SCALE]",
    help="A PEFT adapter to merge into the weights, in float32. May be given several times.",
)
@click.option("--mtp", is_flag=True, help="Keep the multi-token prediction head.  [default: left out]")
@click.option("--force", is_flag=True, help="Replace OUT.gguf if it exists.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Write nothing; tell what would be: tensors, types, the size of the file, and a verdict from some "
    "rows of each tensor.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Threads that quantize.  [default: one per core]",
)
def main(
    model: Path,
    output: Path,
    matrix: str,
    embed: str | None,
    head: str | None,
    keep: tuple[Keep, ...],
    sensitive_layers: str | None,
    sensitive_bits: str,
    group_size: str | None,
    lossless: bool,
    rotate: bool,
    rotation_block: str | None,
    signs: int | None,
    loras: tuple[tuple[Path, float], ...],
    mtp: bool,
    force: bool,
    dry_run: bool,
    threads: int,
) -> None:
    """Convert the model MODEL to the GGUF file OUT.gguf, with ternary weights.

    MODEL is a directory with config.json, safetensors and a tokenizer, as the hub serves them, or a GGUF
    file. Known architectures are Llama (and Mistral, SmolLM, Falcon3, TriLM), Qwen2, Qwen3, Qwen3-MoE,
    Qwen3.5 (and 3.6, 3.8), BitNet and Gemma 3.
    """
    # What --help does not need, and would wait for.
    from ggml_tern.convert.pipeline import convert
    from ggml_tern.convert.read.lora import open_adapter
    from ggml_tern.convert.summary import print_summary

    sensitive = TYPE_OF_BITS[int(sensitive_bits)]
    names = [name.strip() for name in sensitive_layers.split(",")] if sensitive_layers else []
    choice = TypeChoice(
        matrix=MATRIX_TYPES.get(matrix),
        embedding=TENSOR_TYPES[embed] if embed else None,
        head=TENSOR_TYPES[head] if head else None,
        keep=(*(Keep(name, sensitive) for name in names), *keep),
        group=int(group_size) if group_size else None,
        lossless=lossless,
    )
    context = click.get_current_context()
    for option in ("rotation_block", "signs"):
        if not rotate and context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{option.replace('_', '-')} goes with --rotate")
    rotation = RotationChoice(int(rotation_block) if rotation_block else None, signs) if rotate else None
    # Large vocabularies are made of millions of objects; looking through them for cycles takes a second.
    gc.disable()
    clean_up_when_killed()
    log = logging.StreamHandler()
    log.setFormatter(_OneLine("ternconv: warning: %(message)s"))
    logging.basicConfig(handlers=[log], level=logging.WARNING)
    # How a tokenizer joins two texts is nothing that a GGUF tells.
    logging.getLogger("gguf.vocab").addFilter(lambda record: "<pair>" not in record.getMessage())
    try:
        adapters = [open_adapter(directory, scale) for directory, scale in loras]
        tell_stale_parts("ternconv", output)
        with byte_progress() as progress:
            task = progress.add_task("reading", total=None)
            report = convert(
                model,
                output,
                choice,
                rotation=rotation,
                adapters=adapters,
                keep_mtp=mtp,
                force=force,
                dry=dry_run,
                n_threads=threads,
                start=lambda total: progress.update(task, total=total, description="writing"),
                advance=lambda nbytes: progress.advance(task, nbytes),
            )
    except TernError as error:
        click.echo(f"ternconv: {printable(str(error))}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("ternconv: interrupted; nothing was written", err=True)
        sys.exit(130)
    print_summary(report, Console())


class _OneLine(logging.Formatter):
    """A warning of a library, which may quote the model's files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


if __name__ == "__main__":
    main()
