"""Measure what the rotation costs: the synthetic Qwen3 0.6B with and without it, through the plug-in.

    python benchmarks/bench_rotation.py               # PQ2_0 and PTQ1_0, and docs/benchmarks/DATE-rotation.md
    python benchmarks/bench_rotation.py --rounds 3 --type pq2_0

Every round calls the stock llama-bench once for each file in turn, plain before rotated and then the other
way round, so that whatever else the machine does hits both alike. Both files of a type hold the same trits,
and so the kernels do the same work but for the rotation.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from benchmarking import LlamaBench, Samples, markdown, out_option, spread, synthetic, write_report

N_PROMPT, N_GENERATE, REPETITIONS = 128, 64, 4
TARGET = 0.95


@dataclass
class Pair:
    """A type's plain and rotated file, and their samples."""

    type_name: str
    plain_model: Path
    rotated_model: Path
    plain: Samples = field(default_factory=Samples)
    rotated: Samples = field(default_factory=Samples)


def ratio(rotated: list[float], plain: list[float]) -> float:
    """Of the medians."""
    return statistics.median(rotated) / statistics.median(plain)


def table(pairs: list[Pair]) -> str:
    """A Markdown table; ratios are to the row above."""
    rows = []
    for pair in pairs:
        for name, samples in (("plain", pair.plain), ("rotated", pair.rotated)):
            cells = []
            for got, base in (
                (samples.prefill, pair.plain.prefill),
                (samples.decode, pair.plain.decode),
            ):
                cells += [f"{statistics.median(got):.1f}{spread(got)}", f"{ratio(got, base):.3f}"]
            rows.append([f"{pair.type_name.upper()}, {name}", *cells, f"{len(samples.decode)}"])
    columns = ["", f"pp{N_PROMPT} t/s", "ratio", f"tg{N_GENERATE} t/s", "ratio", "samples"]
    return markdown(columns, rows)


@click.command(help=__doc__.split("\n")[0])
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--type",
    "types",
    type=click.Choice(["pq2_0", "ptq1_0"]),
    multiple=True,
    default=("pq2_0", "ptq1_0"),
    show_default=True,
    help="May be given more than once.",
)
@out_option
def main(rounds: int, threads: int, types: tuple[str, ...], out: Path) -> None:
    pairs = [Pair(t, synthetic("--type", t), synthetic("--type", t, "--rotate")) for t in types]
    bench = LlamaBench(N_PROMPT, N_GENERATE, threads, REPETITIONS)
    load = os.getloadavg()[0]
    console = Console()
    processor = ""
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=2 * rounds * len(pairs))
        for number in range(rounds):
            for pair in pairs:
                turn = [(pair.plain_model, pair.plain), (pair.rotated_model, pair.rotated)]
                for model, samples in turn if number % 2 == 0 else reversed(turn):
                    progress.update(task, description=model.name)
                    processor, _ = bench.measure(model, samples)
                    progress.advance(task)

    text = table(pairs)
    console.print(text, markup=False, highlight=False)
    for pair in pairs:
        decode = ratio(pair.rotated.decode, pair.plain.decode)
        verdict = "reached" if decode >= TARGET else "missed"
        line = (
            f"{pair.type_name.upper()}: decode with the rotation at {decode:.3f} of the speed without it; "
            f"the target, {TARGET}, is {verdict}."
        )
        console.print(line, markup=False, highlight=False)
        text += f"\n\n{line}"
    path = write_report(
        out,
        "rotation",
        "What the rotation costs",
        "Synthetic Qwen3 0.6B (`tools/make_synthetic.py`, with and without `--rotate`), the same trits in\n"
        f"both files of a type. Rounds of the stock `llama-bench {' '.join(bench.arguments)}` with the\n"
        "plug-in, files in turn; median ± standard deviation over all samples; ratios of the medians.\n"
        "Written by `benchmarks/bench_rotation.py`.",
        [f"{processor}, {threads} threads, load average at the start {load:.2f}"],
        text,
    )
    console.print(f"written to {path}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
