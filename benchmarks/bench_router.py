"""Measure how long tern serve takes to switch between two ternary models by name.

    python benchmarks/bench_router.py                 # and docs/benchmarks/DATE-router.md
    python benchmarks/bench_router.py --rounds 20 --model first.gguf --model second.gguf

A request for one token names the models in turn: with one model loaded at a time, when each switch ends one
llama-server and starts another, and with both loaded. The files are in the page cache.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import yaml
from rich.console import Console

from benchmarking import ROOT, markdown, out_option, synthetic, write_report

sys.path.insert(0, str(ROOT / "tests"))
from llama_server import Server, serving

PROMPT = "Once upon a time"


def seconds(router: Server, name: str) -> float:
    """Of a request for one token."""
    question = {"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "cache_prompt": False}
    began = time.monotonic()
    answer = router.post("/v1/completions", question, timeout=300)
    if answer.status != 200:
        raise click.ClickException(f"{name}: {answer.text}")
    return time.monotonic() - began


def measure(models: dict[str, Path], loaded: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of requests that switch, and of requests for the model that was asked last."""
    config = {
        "models": {name: {"path": str(path), "max_context": 4096} for name, path in models.items()},
        "memory": {"max_models": loaded},
    }
    switching, staying = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        with serving(None, "--config", str(file), threads=None) as router:
            for name in reversed(models):
                seconds(router, name)
            # The first is loaded and was asked last.
            for _ in range(rounds):
                for name in reversed(models):
                    switching.append(seconds(router, name))
                    staying.append(seconds(router, name))
    return switching, staying


@click.command(help=__doc__.split("\n")[0])
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--model",
    "paths",
    type=click.Path(path_type=Path, exists=True, resolve_path=True),
    multiple=True,
    help="Twice.  [default: the synthetic Qwen3 0.6B in PQ2_0 and in PTQ1_0]",
)
@out_option
def main(rounds: int, paths: tuple[Path, ...], out: Path) -> None:
    files = paths or (synthetic("--type", "pq2_0"), synthetic("--type", "ptq1_0"))
    if len(files) != 2:
        raise click.UsageError("give --model twice, or not at all")
    models = {f"model-{index}": path for index, path in enumerate(files, 1)}
    load = os.getloadavg()[0]
    rows = []
    for loaded in (1, 2):
        switching, staying = measure(models, loaded, rounds)
        for name, samples in ((f"switch, {loaded} loaded", switching), (f"stay, {loaded} loaded", staying)):
            milliseconds = sorted(1000 * sample for sample in samples)
            ends = (milliseconds[0], milliseconds[-1])
            cells = [f"{value:.0f}" for value in (statistics.median(milliseconds), *ends)]
            rows.append([name, *cells, str(len(samples))])
    table = markdown(["", "median ms", "least", "most", "requests"], rows)
    Console().print(table, markup=False, highlight=False)
    sizes = ", ".join(f"{path.name} ({path.stat().st_size / 1e6:.0f} MB)" for path in files)
    text = (
        "Requests for one token through `tern serve` with two models, by name in turn: from sending it\n"
        "to the whole answer. With 1 loaded, a switch ends one llama-server and starts another, which\n"
        "loads its model from the page cache; with 2, the router only passes the request on. `stay` asks\n"
        "the same model again. Written by `benchmarks/bench_router.py`."
    )
    facts = [sizes, f"{os.cpu_count()} processors, load average at the start {load:.2f}"]
    click.echo(write_report(out, "router", "Switching models by name", text, facts, table))


if __name__ == "__main__":
    main()
