"""``tern plan``: will it fit?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from ggml_tern.cli.kv_type import KV_TYPE
from ggml_tern.memory_size import MemorySize, MemorySizes

EPILOG = """
\b
Examples
  tern plan model.gguf
      At the context that the model was trained for, as llama-server starts it.
  tern plan model.gguf --memory 8GB --kv q8_0
      With the largest context that fits.
  tern plan model.gguf --memory 8GB --png plan.png
      What every KV type takes at every context, as a picture.
  tern plan model.gguf --context 8192 -ngl 20
      20 layers on the device, the others on the host: what each holds.
  tern plan model.gguf --vram 8GB --kv q8_0 --parallel 1
      How many layers a graphics card with 8 GB free holds, and what stays in main memory.
  tern plan model.gguf --memory 8GB --context 32768 --parallel 1 || echo "too large"
"""


@click.command("plan", epilog=EPILOG)
@click.argument("file", metavar="MODEL.gguf", type=click.Path(path_type=Path))
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens in the KV cache, of all conversations together.  [default: the most that fit into "
    "--memory, or those that the model was trained for]",
)
@click.option(
    "--kv",
    "kv_type",
    type=KV_TYPE,
    default="f16",
    show_default=True,
    help="Type of the KV cache, as -ctk and -ctv of llama.cpp.",
)
@click.option("--memory", type=MemorySize(), help="What there is, like 6GB or 5.5GiB: does it fit?")
@click.option(
    "--vram",
    "cards",
    type=MemorySizes(),
    metavar="SIZE[,SIZE]...",
    help="What is free on each graphics card: how many layers do they hold? --memory is main memory then.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    help="Conversations at a time, each with its share of the context.  [default: as llama-server, 4 that "
    "share all of it]",
)
@click.option(
    "--n-gpu-layers",
    "-ngl",
    type=click.IntRange(0),
    help="Layers on TERN0, as -ngl of llama.cpp: adds what it holds and what the host does.  [default: all]",
)
@click.option(
    "--layout",
    type=click.Choice(["auto", "fast", "dense"]),
    default="auto",
    show_default=True,
    help="Of the ternary weights in memory, as TERN_LAYOUT of the plug-in: dense takes less, of PTQ1_0 and "
    "TQ1_0, and decodes slower. auto: dense where fast does not fit into --memory.",
)
@click.option("--json", "json_output", is_flag=True, help="Print the plan as JSON, in bytes.")
@click.option(
    "--png",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also draw memory against context for each KV type. Needs matplotlib.",
)
def command(
    file: Path,
    context: int | None,
    kv_type: str,
    memory: int | None,
    cards: tuple[int, ...] | None,
    parallel: int | None,
    n_gpu_layers: int | None,
    layout: str,
    json_output: bool,
    png: Path | None,
) -> None:
    """Tell how much memory a model takes, and whether it fits.

    Reads the header alone. The figures are those of the stock llama-server with the plug-in on a CPU; compute
    buffers and the process itself are estimates.

    Exit codes: 0, 1 if the model does not fit into --memory, or --vram holds no layer of it, 2 for trouble,
    130 interrupted.
    """
    from ggml_tern.plan import arithmetic, tables
    from ggml_tern.plan.cards import divide
    from ggml_tern.plan.header import read_model
    from ggml_tern.plots import check_plot

    if cards is not None and (png is not None or n_gpu_layers is not None):
        raise click.UsageError("--vram finds the layers itself and draws nothing: no -ngl, no --png")
    if png is not None:
        check_plot(png)
    model = read_model(file)
    if cards is not None:
        division = divide(model, cards, context, kv_type, parallel, layout == "dense")
        if json_output:
            click.echo(json.dumps(tables.division_as_json(model, division, memory), indent=2))
        else:
            tables.print_division(model, division, memory, parallel, Console())
        fits = division.n_gpu_layers > 0 and (memory is None or division.main_memory <= memory)
        sys.exit(0 if fits else 1)
    planned = arithmetic.choose(model, context, kv_type, memory, parallel, n_gpu_layers, layout)
    if json_output:
        found = tables.as_json(model, planned, memory, parallel, n_gpu_layers)
        click.echo(json.dumps(found, indent=2))
    else:
        tables.print_plan(model, planned, memory, parallel, Console(), n_gpu_layers)
    if png is not None:
        tables.draw_plan(png, model, memory, parallel, n_gpu_layers, planned.dense)
        click.echo(f"drawn into {png}", err=True)
    sys.exit(1 if memory is not None and planned.total > memory else 0)
