"""A plan for people and programs: as JSON, as a table, as bars and as a picture."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from ggml_tern.host.stock import DEVICE
from ggml_tern.plan.arithmetic import (
    CACHE_STEP,
    DEFAULT_PARALLEL,
    KV_TYPES,
    LAYOUT_VARIABLE,
    Plan,
    fits_heads,
    kv_bits,
    megabytes,
    plan,
    trade_offs,
)
from ggml_tern.plan.cards import Division
from ggml_tern.plan.header import N_UBATCH, Model
from ggml_tern.plots import Panel, write_plot
from ggml_tern.tensors.names import printable_lines

#: What the host, beside the device, is called in tables.
HOST = "host CPU"
#: Columns of a bar in the terminal.
_BAR_WIDTH = 36
#: Times what a model takes at most, from which on a limit is not drawn.
_FAR_ABOVE = 4


def not_counted(model: Model) -> list[str]:
    """What llama-server may take beyond a plan, one line each."""
    notes = ["prompts of the past, up to 8 GiB: llama-server --cache-ram 0 keeps none"]
    if model.recurrent or any(layer.window is not None for layer in model.attention):
        size = f" of {megabytes(4 * sum(model.recurrent))} MB" if model.recurrent else ""
        notes.append(f"checkpoints{size}, up to 32 a conversation: llama-server --ctx-checkpoints N")
    return notes


def as_json(
    model: Model, planned: Plan, memory: int | None, parallel: int | None, n_gpu_layers: int | None = None
) -> dict[str, Any]:
    """The plan as JSON can hold it: bytes, tokens. fits and largest_context are null without `memory`."""
    largest = None if memory is None else trade_offs(model, memory, parallel, n_gpu_layers, planned.dense)
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        **asdict(planned),
        "total": planned.total,
        "memory": memory,
        "fits": None if memory is None else planned.total <= memory,
        "largest_context": largest,
    }


def print_plan(
    model: Model,
    planned: Plan,
    memory: int | None,
    parallel: int | None,
    console: Console,
    n_gpu_layers: int | None = None,
) -> None:
    """The plan as a table, by device where `n_gpu_layers` is given; with `memory`, whether it fits, and which
    contexts would."""

    def say(text: str, style: str = "") -> None:
        console.print(printable_lines(text), style=style, markup=False, highlight=False)

    sharing = "shared by" if parallel is None else "in equal parts for"
    conversations = "1 conversation" if planned.parallel == 1 else f"{planned.parallel} conversations"
    say(f"{model.path.name}: {model.architecture}" + (f", {model.name}" if model.name else ""))
    say(f"{planned.context:,} tokens of context {sharing} {conversations}\n")
    console.print(_memory_table(model, planned, split=n_gpu_layers is not None))
    say("\nnot counted:")
    for note in not_counted(model):
        say(f"- {note}")
    if memory is not None:
        fits = planned.total <= memory
        verdict = f"{'fits' if fits else 'does not fit'} into {megabytes(memory)} MB"
        largest = trade_offs(model, memory, parallel, n_gpu_layers, planned.dense)
        outcome = _all_alike(model, largest, n_gpu_layers, planned.dense)
        say(f"\n{verdict}{outcome or '; the largest contexts that do:'}", "green" if fits else "bold red")
        if outcome is None:
            console.print(_context_chart(largest))


def division_as_json(model: Model, division: Division, memory: int | None) -> dict[str, Any]:
    """A model on cards as JSON can hold it: bytes, tokens. fits is null without `memory`, which is main
    memory."""
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        "context": division.planned.context,
        "kv_type": division.planned.kv_type,
        "parallel": division.planned.parallel,
        "n_gpu_layers": division.n_gpu_layers,
        "n_layers": division.n_layers,
        "cards": [asdict(card) | {"total": card.total} for card in division.cards],
        "on_host": division.on_host,
        "host_total": division.main_memory,
        "memory": memory,
        "fits": None if memory is None else division.main_memory <= memory,
        "options": division.options(),
    }


def print_division(
    model: Model, division: Division, memory: int | None, parallel: int | None, console: Console
) -> None:
    """A model on cards as a table, and the command that loads it so."""

    def say(text: str, style: str = "") -> None:
        console.print(printable_lines(text), style=style, markup=False, highlight=False, soft_wrap=True)

    planned, host = division.planned, division.on_host
    say(f"{model.path.name}: {model.architecture}" + (f", {model.name}" if model.name else ""))
    say(f"{planned.context:,} tokens of context in {planned.kv_type}")
    verdict = f"{division.n_gpu_layers} of {division.n_layers} layers on the GPU"
    say(
        f"{verdict}, what is behind the last one counted as one\n",
        "" if division.n_gpu_layers else "bold red",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("MB", footer="total", no_wrap=True)
    for i, card in enumerate(division.cards):
        table.add_column(f"GPU {i}", footer=megabytes(card.total), justify="right", no_wrap=True)
    table.add_column("main memory", footer=megabytes(division.main_memory), justify="right", no_wrap=True)
    rows = {
        "layers": ([card.n_layers for card in division.cards], division.n_layers - division.n_gpu_layers),
        "weights": (
            [card.weights for card in division.cards],
            host["tiles"] + host["mapped"] + host["embedding"],
        ),
        "KV cache": ([card.kv_cache for card in division.cards], host["kv_cache"] + host["window_cache"]),
        "recurrent state": ([card.state for card in division.cards], host["state"]),
        "compute buffers": ([card.compute for card in division.cards], host["compute"]),
        "process": ([0] * len(division.cards), host["process"]),
    }
    for name, (on_cards, on_host) in rows.items():
        shown = [f"{n:,}" if name == "layers" else megabytes(n) for n in (*on_cards, on_host)]
        if any((*on_cards, on_host)):
            table.add_row(name, *shown)
    table.add_row(
        "free", *(megabytes(card.memory) for card in division.cards), megabytes(memory) if memory else ""
    )
    console.print(table)
    say("\nternary weights on a GPU: 2.25 bits; compute buffers and process: estimates")
    say("not counted: what a driver takes for itself; --cache-ram and --ctx-checkpoints of llama-server\n")
    if memory is not None and division.main_memory > memory:
        say(f"does not fit into {megabytes(memory)} MB of main memory", "bold red")
    alone = [] if parallel is None else ["-np", str(parallel)]
    say(shlex.join(["llama-server", "-m", str(model.path), *division.options(), *alone, "--fit", "off"]))


def _all_alike(
    model: Model, largest: dict[str, dict[str, int]], n_gpu_layers: int | None, dense: bool
) -> str | None:
    """The largest contexts in words, where nothing fits, or everything; None where they differ."""
    contexts = [context for found in largest.values() for context in found.values()]
    if not any(contexts):
        least = {
            kv_type: plan(model, CACHE_STEP, kv_type, 1, n_gpu_layers, dense).total
            for kv_type in KV_TYPES
            if fits_heads(model, kv_type)
        }
        kv_type = min(least, key=lambda kind: least[kind])
        return (
            f", and no context does; the least that it takes is {megabytes(least[kv_type])} MB (--context "
            f"{CACHE_STEP} --parallel 1 --kv {kv_type})"
        )
    # What conversations have each is rounded.
    if min(contexts) > model.context - CACHE_STEP * DEFAULT_PARALLEL and len(set(contexts)) == 1:
        return f"; so do all of the {contexts[0]:,} tokens that it was trained for, in every type of KV cache"
    return None


def _memory_table(model: Model, planned: Plan, split: bool) -> Table:
    host = sum(planned.on_host.values())
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("", footer="total", no_wrap=True)
    table.add_column("MB", footer=megabytes(planned.total), justify="right", no_wrap=True)
    if split:
        table.add_column(DEVICE, footer=megabytes(planned.total - host), justify="right", no_wrap=True)
        table.add_column(HOST, footer=megabytes(host), justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for part, name, what in _rows(model, planned):
        nbytes = getattr(planned, part)
        held = planned.on_host[part]
        cells = [nbytes, *([nbytes - held, held] if split else [])]
        if nbytes:
            table.add_row(name, *(megabytes(cell) for cell in cells), what)
    return table


def _named(conversations: str) -> str:
    """A key of `trade_offs` in words."""
    shared = conversations.endswith("_shared")
    return f"{DEFAULT_PARALLEL} conversations share" if shared else "--" + conversations.replace("_", " ")


def _context_chart(largest: dict[str, dict[str, int]]) -> Table:
    """A bar for each KV type, as long as its context."""
    most = max(context for contexts in largest.values() for context in contexts.values())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("bits", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("")
    for conversations, contexts in largest.items():
        name = _named(conversations)
        for kv_type, context in contexts.items():
            bar = Bar(max(most, 1), 0, context, width=_BAR_WIDTH)
            table.add_row(
                name, f"--kv {kv_type}", f"{kv_bits(kv_type):g}", f"{context:,}" if context else "none", bar
            )
            name = ""
    return table


def draw_plan(
    path: Path,
    model: Model,
    memory: int | None,
    parallel: int | None,
    n_gpu_layers: int | None = None,
    dense: bool = False,
) -> None:
    """A PNG file: memory against context for each KV type, and, with `memory`, KV bits against the largest
    context.

    Raises TernError."""
    step = CACHE_STEP * (parallel or 1)
    contexts = [step << n for n in range((model.context // step).bit_length())]
    # Up to the last one, which is seldom a power of two.
    contexts = [*(context for context in contexts if context < model.context), max(model.context, step)]
    taken = {
        kv_type: [plan(model, context, kv_type, parallel, n_gpu_layers, dense).total for context in contexts]
        for kv_type in KV_TYPES
        if fits_heads(model, kv_type)
    }
    most = max(max(totals) for totals in taken.values())
    unit, nbytes = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    lines = {
        f"--kv {kv_type}, {kv_bits(kv_type):g} bits": [
            (context, total / nbytes) for context, total in zip(contexts, totals, strict=True)
        ]
        for kv_type, totals in taken.items()
    }
    # A limit far above would press the lines together.
    limits = {}
    if memory is not None and memory < _FAR_ABOVE * most:
        limits = {f"--memory {memory / nbytes:g}{unit}": memory / nbytes}
    panels = [Panel("What it takes", "tokens of context", unit, lines, limits, log_x=True)]
    if memory is not None:
        largest = trade_offs(model, memory, parallel, n_gpu_layers, dense)
        # Where all are alike, the first panel shows it.
        if _all_alike(model, largest, n_gpu_layers, dense) is None:
            fitting = {
                _named(conversations): [(kv_bits(kv_type), context) for kv_type, context in found.items()]
                for conversations, found in largest.items()
            }
            title = f"What fits into {memory / 1e9:g} GB"
            panels.append(Panel(title, "bits of the KV cache", "tokens of context", fitting))
    write_plot(path, model.path.name, panels)


def _rows(model: Model, planned: Plan) -> list[tuple[str, str, str]]:
    """Field, name and explanation of each part."""
    windows = Counter(layer.window for layer in model.attention)
    full = windows.pop(None, 0)
    cache = f"{full} layers in {planned.kv_type}: {planned.kv_cache / planned.context / 1024:.4g} KiB a token"
    sliding = ", ".join(f"{count} layers that look back {window:,}" for window, count in windows.items())
    tiles = "in tiles: 2 bits and scales, whatever the type in the file"
    if planned.dense:
        tiles = f"in dense tiles: 1.6 bits and scales, with slower decode ({LAYOUT_VARIABLE}=dense)"
    recurrent = f"{len(model.recurrent)} layers: {megabytes(4 * sum(model.recurrent))} MB a conversation"
    return [
        ("tiles", "ternary weights", tiles),
        ("mapped", "other weights", "mapped from the file"),
        ("kv_cache", "KV cache", cache),
        ("window_cache", "window KV cache", sliding),
        ("state", "recurrent state", recurrent),
        ("compute", "compute buffers", f"estimate, for {N_UBATCH} tokens at a time"),
        ("process", "process", f"estimate: the program, its graphs, and {model.n_vocab:,} tokens"),
    ]
