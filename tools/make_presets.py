"""Write the presets for the released 27B in several sizes of memory, models/presets/*.yaml for `tern serve`.

    python tools/make_presets.py

Every figure in them is computed by `tern plan` from a header with the keys, names, shapes and types of the
released file (tools/make_synthetic.py) and the size of its vocabulary. The KV cache has the most bits that
leave room for 4096 tokens; four conversations share it where that leaves room for 32768 tokens, or else there
is one alone. The context is the largest then. Where nothing fits there is no preset, and what is left over
from an earlier run is removed.

For graphics cards the same, of what is free on them. Where a card does not hold the whole model, there is one
conversation of 8192 tokens at 8 bits, as many layers on the card as fit, and the others on the processor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ggml_tern.plan import arithmetic
from ggml_tern.plan.cards import Division, divide
from ggml_tern.plan.header import Model, read_model
from make_synthetic import with_layers, write_header_only

FOLDER = Path(__file__).resolve().parents[1] / "models" / "presets"

GIGABYTES = (4, 6, 8, 12, 16, 24)
#: Of the budget, what stays free: a plan of a 27B may be off by as much (docs/plan.md).
RESERVE = 0.02
#: Tokens that are worth fewer bits, and that are worth one conversation alone.
LEAST_CONTEXT, LEAST_TO_SHARE = 4096, 32768

#: Of graphics cards. Of their memory, what a desktop and the driver leave.
CARD_GIGABYTES, FREE_OF_CARD = (6, 8, 12, 16, 24), 0.92
#: For a card that does not hold the whole model.
CONTEXT_OF_PART, KV_OF_PART = 8192, "q8_0"

MODEL, ROTATION_BLOCK = "qwen35-27b", 1024
#: The vocabulary of the released file. No tokenizer has more merges than tokens.
N_VOCAB = 248320

TEMPLATE = """\
# The released 27B (Ternary-Bonsai-2-27B, PTQ1_0 or PQ2_0) in {gigabytes} GB of memory:
#
#     tern serve --config {name}           # the model beside this file
#     tern serve MODEL.gguf --config {name}
#
# Planned: {planned} MB of {budget}. Computed by tools/make_presets.py.
model:
  path: Ternary-Bonsai-2-27B.gguf
  max_context: {context}
  kv_cache_bits: {bits}
{runtime}memory:
  budget: {gigabytes}GB
"""
ALONE = """runtime:
  max_batch_size: 1
"""

CARD_TEMPLATE = """\
# The released 27B (Ternary-Bonsai-2-27B, PTQ1_0 or PQ2_0) on a graphics card with {gigabytes} GB:
#
#     tern serve --llama-server PATH --config {name}     # a llama.cpp with a GPU: docs/gpu.md
#
# Planned: {on_card} MB of {free} on the card, {layers}; {on_host} MB in main memory.
# Computed by tools/make_presets.py.
model:
  path: Ternary-Bonsai-2-27B.gguf
  max_context: {context}
  kv_cache_bits: {bits}
runtime:
  device: gpu
{runtime}memory:
  max_gpu_memory: {budget}
"""


@dataclass(frozen=True)
class Preset:
    """parallel: None for four conversations that share the context."""

    gigabytes: int
    kv_type: str
    parallel: int | None
    planned: arithmetic.Plan

    @property
    def name(self) -> str:
        return f"ternary-27b-{self.gigabytes}gb.yaml"

    def text(self) -> str:
        return TEMPLATE.format(
            name=self.name,
            gigabytes=self.gigabytes,
            planned=arithmetic.megabytes(self.planned.total),
            budget=arithmetic.megabytes(self.gigabytes * 10**9),
            context=self.planned.context,
            bits=int(arithmetic.kv_bits(self.kv_type)),
            runtime="" if self.parallel is None else ALONE,
        )


@dataclass(frozen=True)
class CardPreset:
    """For a graphics card. parallel: as for `Preset`."""

    gigabytes: int
    parallel: int | None
    division: Division

    @property
    def name(self) -> str:
        return f"ternary-27b-gpu-{self.gigabytes}gb.yaml"

    def text(self) -> str:
        (card,), planned = self.division.cards, self.division.planned
        layers = f"{self.division.n_gpu_layers} of {self.division.n_layers} layers"
        return CARD_TEMPLATE.format(
            name=self.name,
            gigabytes=self.gigabytes,
            on_card=arithmetic.megabytes(card.total),
            free=arithmetic.megabytes(card.memory),
            layers="all layers" if self.division.is_whole else layers,
            on_host=arithmetic.megabytes(self.division.main_memory),
            context=planned.context,
            bits=int(arithmetic.kv_bits(planned.kv_type)),
            runtime="" if self.parallel is None else ALONE.removeprefix("runtime:\n"),
            budget=f"{card.memory / 1e9:g}GB",
        )


def card_preset(model: Model, gigabytes: int) -> CardPreset:
    free = int(gigabytes * 10**9 * FREE_OF_CARD)
    for kv_type in arithmetic.KV_TYPES:
        found = divide(model, [free], None, kv_type)
        if found.is_whole and found.planned.context >= LEAST_TO_SHARE:
            return CardPreset(gigabytes, None, found)
    return CardPreset(gigabytes, 1, divide(model, [free], CONTEXT_OF_PART, KV_OF_PART, 1))


def card_presets(sizes: Sequence[int] = CARD_GIGABYTES) -> list[CardPreset]:
    model = released_27b()
    return [card_preset(model, gigabytes) for gigabytes in sizes]


def released_27b() -> Model:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "27b.gguf"
        shape = with_layers(MODEL, None)
        model = read_model(write_header_only(path, "ptq1_0", shape, 0, ROTATION_BLOCK))
    return replace(model, n_vocab=N_VOCAB, n_merges=N_VOCAB)


def preset(model: Model, gigabytes: int) -> Preset | None:
    """None where not even one conversation of LEAST_CONTEXT tokens fits."""
    memory = int(gigabytes * 10**9 * (1 - RESERVE))
    for parallel, least in ((None, LEAST_TO_SHARE), (1, LEAST_CONTEXT)):
        for kv_type in arithmetic.KV_TYPES:
            context = arithmetic.largest_context(model, memory, kv_type, parallel)
            if context >= least:
                return Preset(
                    gigabytes, kv_type, parallel, arithmetic.plan(model, context, kv_type, parallel)
                )
    return None


def presets(sizes: Sequence[int] = GIGABYTES) -> dict[int, Preset | None]:
    model = released_27b()
    return {gigabytes: preset(model, gigabytes) for gigabytes in sizes}


@click.command(help=__doc__.split("\n")[0])
def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("ternary-27b-*.yaml"):
        path.unlink()
    for gigabytes, found in presets().items():
        if found is None:
            click.echo(f"{gigabytes} GB: does not hold it")
            continue
        (FOLDER / found.name).write_text(found.text(), encoding="utf-8")
        click.echo(f"{found.name}: {found.planned.context:,} tokens in {found.kv_type}")
    for card in card_presets():
        (FOLDER / card.name).write_text(card.text(), encoding="utf-8")
        division = card.division
        tokens = f"{division.planned.context:,} tokens in {division.planned.kv_type}"
        click.echo(f"{card.name}: {division.n_gpu_layers} of {division.n_layers} layers, {tokens}")


if __name__ == "__main__":
    main()
