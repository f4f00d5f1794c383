"""Measure the plug-in against stock llama.cpp on the synthetic Qwen3 0.6B, and write the table down.

    python benchmarks/bench_stock.py                   # all five, and docs/benchmarks/DATE-stock.md
    python benchmarks/bench_stock.py --slow-rounds 0   # without stock Q2_0, which alone takes minutes

Every round runs the stock llama-bench once for each engine and type in turn, so that whatever else the
machine does hits all of them alike; look at the ratios first. All files hold the very same weights.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from benchmarking import (
    PLUGIN,
    STOCK,
    LlamaBench,
    Samples,
    markdown,
    out_option,
    spread,
    synthetic,
    write_report,
)

N_PROMPT, N_GENERATE = 512, 64


@dataclass
class Contender:
    """One engine and type."""

    type_name: str
    stock: bool
    slow: bool = False
    samples: Samples = field(default_factory=Samples)

    @property
    def name(self) -> str:
        return f"{'stock' if self.stock else 'plug-in'} {self.type_name.upper()}"

    @property
    def prefill(self) -> float:
        return statistics.mean(self.samples.prefill)

    @property
    def decode(self) -> float:
        return statistics.mean(self.samples.decode)


def table(contenders: list[Contender], sizes: dict[str, int]) -> str:
    """A Markdown table; ratios are to the first contender."""
    base = contenders[0]
    columns = ["", "file MB", f"pp{N_PROMPT} t/s", "ratio", f"tg{N_GENERATE} t/s", "ratio", "rounds"]
    rows = [
        [
            c.name,
            f"{sizes[c.type_name] / 1e6:.0f}",
            f"{c.prefill:.1f}{spread(c.samples.prefill)}",
            f"{c.prefill / base.prefill:.2f}",
            f"{c.decode:.1f}{spread(c.samples.decode)}",
            f"{c.decode / base.decode:.2f}",
            f"{len(c.samples.prefill)}",
        ]
        for c in contenders
    ]
    return markdown(columns, rows)


@click.command(help=__doc__.split("\n")[0])
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--slow-rounds", type=click.IntRange(0), default=1, show_default=True, help="For stock Q2_0.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@out_option
def main(rounds: int, slow_rounds: int, threads: int, out: Path) -> None:
    contenders = [
        Contender("tq2_0", stock=True),
        Contender("pq2_0", stock=False),
        Contender("ptq1_0", stock=False),
        Contender("q2_0", stock=True, slow=True),
        Contender("q2_0", stock=False),
    ]
    contenders = [c for c in contenders if slow_rounds or not c.slow]
    models = {c.type_name: synthetic("--type", c.type_name) for c in contenders}
    bench = LlamaBench(N_PROMPT, N_GENERATE, threads)
    load = os.getloadavg()[0]
    console = Console()
    processor = ""
    with Progress(console=console) as progress:
        schedule = [c for r in range(rounds) for c in contenders if not c.slow or r < slow_rounds]
        task = progress.add_task("measuring", total=len(schedule))
        for contender in schedule:
            progress.update(task, description=contender.name)
            engine = STOCK if contender.stock else PLUGIN
            processor, _ = bench.measure(models[contender.type_name], contender.samples, engine)
            progress.advance(task)

    text = table(contenders, {name: path.stat().st_size for name, path in models.items()})
    console.print(text, markup=False, highlight=False)
    by_name = {c.name: c for c in contenders}
    if slow_rounds:
        ours, stock = by_name["plug-in Q2_0"], by_name["stock Q2_0"]
        gain = (
            f"Q2_0 through the plug-in against stock Q2_0: {ours.prefill / stock.prefill:.1f}x prefill, "
            f"{ours.decode / stock.decode:.1f}x decode."
        )
        console.print(gain, markup=False, highlight=False)
        text += f"\n\n{gain}"
    path = write_report(
        out,
        "stock",
        "Plug-in and stock llama.cpp",
        "Synthetic Qwen3 0.6B (`tools/make_synthetic.py`), the same weights in every file. Rounds of\n"
        f"the stock `llama-bench {' '.join(bench.arguments)}`, engines in turn; mean ± standard\n"
        "deviation over the rounds; ratios to the first row. Written by `benchmarks/bench_stock.py`.",
        [f"{processor}, {threads} threads, load average at the start {load:.2f}"],
        text,
    )
    console.print(f"written to {path}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
