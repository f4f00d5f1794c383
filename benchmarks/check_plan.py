"""Compare `tern plan` with what a stock llama-server takes, model by model.

    python benchmarks/check_plan.py               # tiny models, synthetic 0.6B and 1.7B, 27B cut to 4 layers
    python benchmarks/check_plan.py model.gguf    # this one, at several contexts and KV types

Each way to run a model is a llama-server of its own, with --cache-ram 0 and --ctx-checkpoints 0, all of whose
context is filled by prompts. Then its anonymous memory is compared with the plan without the weights that
stay mapped from the file. Printed as Markdown. Exits with 1 where one is off by more than 5%, and by more
than 3 MB, which is more than that for a model of half a megabyte.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from benchmarking import ROOT, markdown, synthetic
from ggml_tern.bench import llama_bench as bench
from ggml_tern.plan import arithmetic
from ggml_tern.plan.header import read_model

sys.path.insert(0, str(ROOT / "tests"))
from llama_server import LLAMA_SERVER, serving

TOLERANCE, TOLERANCE_BYTES = 0.05, 3e6
N_PREDICT = 32
TINY = tuple(ROOT / "models" / name / f"{name}-ptq1_0.gguf" for name in ("tiny-qwen3", "tiny-qwen35"))


@dataclass(frozen=True)
class Way:
    """A way to run a model; parallel, n_gpu_layers: None for llama-server's default."""

    context: int
    kv_type: str = "f16"
    parallel: int | None = 1
    n_gpu_layers: int | None = None

    @property
    def options(self) -> list[str]:
        words = ["-c", str(self.context), "-ctk", self.kv_type, "-ctv", self.kv_type]
        words += [] if self.parallel is None else ["-np", str(self.parallel)]
        return words + ([] if self.n_gpu_layers is None else ["-ngl", str(self.n_gpu_layers)])


#: What a conversation has at least: all models here know so many tokens.
SHARE = 1024
WAYS = (
    Way(SHARE),
    Way(4 * SHARE, parallel=None),
    Way(4 * SHARE, "q8_0", 4),
    Way(2 * SHARE, "q4_0", 2),
    Way(SHARE, n_gpu_layers=2),
)


#: A model whose prompts would take long is run in two ways.
LARGE, WAYS_OF_LARGE = 300e6, (Way(SHARE), Way(2 * SHARE, "q8_0", 2))


@dataclass(frozen=True)
class Found:
    """Bytes: anonymous and resident memory of the process, and the plan for both."""

    anonymous: int
    resident: int
    planned: arithmetic.Plan

    @property
    def planned_anonymous(self) -> int:
        return self.planned.total - self.planned.mapped

    @property
    def ratio(self) -> float:
        return self.planned_anonymous / self.anonymous

    @property
    def is_good(self) -> bool:
        error = abs(self.planned_anonymous - self.anonymous)
        return error <= max(TOLERANCE * self.anonymous, TOLERANCE_BYTES)


def run(path: Path, way: Way) -> Found:
    header = read_model(path)
    limits = ["--cache-ram", "0", "--ctx-checkpoints", "0", "--fit", "off"]
    with serving(path, *way.options, *limits, command=LLAMA_SERVER, timeout=300) as server:
        for slot in range(way.parallel or arithmetic.DEFAULT_PARALLEL):
            # Token ids, which any vocabulary has, enough to fill the slot's share.
            prompt = [100 + (slot + n) % 100 for n in range(SHARE - N_PREDICT)]
            body = {"prompt": prompt, "n_predict": N_PREDICT, "ignore_eos": True, "id_slot": slot}
            answer = server.post("/completion", body, timeout=600)
            if answer.status != 200:
                raise click.ClickException(f"{path.name}: llama-server answered {answer.text}")
        sizes = bench.memory_of(Path(f"/proc/{server.process.pid}/status").read_text())
        server.stop(signal.SIGTERM)
    planned = arithmetic.plan(header, way.context, way.kv_type, way.parallel, way.n_gpu_layers)
    return Found(sizes["RssAnon"], sizes["VmRSS"], planned)


def models() -> list[Path]:
    shapes = [
        ("--model", "qwen3-0.6b", "--type", "pq2_0"),
        ("--model", "qwen3-1.7b", "--type", "ptq1_0"),
        ("--model", "qwen35-27b", "--type", "ptq1_0", "--layers", "4", "--rotate"),
    ]
    return [*TINY, *(synthetic(*shape) for shape in shapes)]


@click.command(help=__doc__.split("\n")[0])
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def main(files: Sequence[Path]) -> None:
    columns = ["model", "context", "KV", "`-np`", "`-ngl`", "anonymous MB", "planned", "RSS MB", "whole plan"]
    click.echo(markdown([*columns, "planned / anonymous"], []))
    good = True
    console = Console(stderr=True)
    for path in files or models():
        for way in WAYS if path.stat().st_size < LARGE else WAYS_OF_LARGE:
            if not arithmetic.fits_heads(read_model(path), way.kv_type):
                continue
            with console.status(f"{path.name} {' '.join(way.options)}"):
                found = run(path, way)
            good &= found.is_good
            sizes = (found.anonymous, found.planned_anonymous, found.resident, found.planned.total)
            cells = [
                path.name,
                f"{way.context}",
                way.kv_type,
                "-" if way.parallel is None else f"{way.parallel}",
                "all" if way.n_gpu_layers is None else f"{way.n_gpu_layers}",
                *(f"{size / 1e6:.1f}" for size in sizes),
                f"{found.ratio:.3f}",
            ]
            click.echo(f"| {' | '.join(cells)} |")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
