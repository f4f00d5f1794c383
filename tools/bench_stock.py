"""Measure the plug-in against stock llama.cpp on the synthetic Qwen3 0.6B, and write the table down.

    python tools/bench_stock.py                   # all five, and docs/benchmarks/DATE-stock.md
    python tools/bench_stock.py --slow-rounds 0   # without stock Q2_0, which alone takes minutes

Every round runs the stock llama-bench once for each engine and type in turn, so that whatever else the
machine does hits all of them alike; look at the ratios first. All files hold the very same weights.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

import ggml_tern
from ggml_tern.runtime import host

ROOT = Path(__file__).resolve().parents[1]
N_PROMPT, N_GENERATE = 512, 64


@dataclass
class Contender:
    """One engine and type. prefill, decode: tokens per second, one sample a round."""

    type_name: str
    stock: bool
    slow: bool = False
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{'stock' if self.stock else 'plug-in'} {self.type_name.upper()}"


def synthetic(type_name: str) -> Path:
    """The cached synthetic model in that type, written if it is not there yet."""
    command = [sys.executable, str(ROOT / "tools" / "make_synthetic.py"), "--type", type_name]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def measure(contender: Contender, model: Path, threads: int) -> str:
    """Adds one sample to both lists; returns the name of the processor."""
    command = [str(host.llama_cpp_dir() / "llama-bench"), "-m", str(model), "-o", "json", "-r", "1"]
    command += ["-p", str(N_PROMPT), "-n", str(N_GENERATE), "-t", str(threads)]
    done = subprocess.run(
        command, env=host.host_environment(contender.stock), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr}")
    tests = json.loads(done.stdout)
    for test in tests:
        (contender.prefill if test["n_prompt"] else contender.decode).extend(test["samples_ts"])
    return str(tests[0]["cpu_info"])


def table(contenders: list[Contender], sizes: dict[str, int]) -> str:
    """A Markdown table; ratios are to the first contender."""

    def cell(samples: list[float]) -> str:
        spread = f" ± {statistics.stdev(samples):.1f}" if len(samples) > 1 else ""
        return f"{statistics.mean(samples):.1f}{spread}"

    base = contenders[0]
    columns = ["", "file MB", f"pp{N_PROMPT} t/s", "ratio", f"tg{N_GENERATE} t/s", "ratio", "rounds"]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for c in contenders:
        ratios = [
            statistics.mean(got) / statistics.mean(reference)
            for got, reference in ((c.prefill, base.prefill), (c.decode, base.decode))
        ]
        lines.append(
            f"| {c.name} | {sizes[c.type_name] / 1e6:.0f} | {cell(c.prefill)} | {ratios[0]:.2f} "
            f"| {cell(c.decode)} | {ratios[1]:.2f} | {len(c.prefill)} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__.split("\n")[0])
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--slow-rounds", type=click.IntRange(0), default=1, show_default=True, help="For stock Q2_0.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "docs" / "benchmarks",
    help="The folder for the table.  [default: docs/benchmarks]",
)
def main(rounds: int, slow_rounds: int, threads: int, out: Path) -> None:
    contenders = [
        Contender("tq2_0", stock=True),
        Contender("pq2_0", stock=False),
        Contender("ptq1_0", stock=False),
        Contender("q2_0", stock=True, slow=True),
        Contender("q2_0", stock=False),
    ]
    contenders = [c for c in contenders if slow_rounds or not c.slow]
    models = {c.type_name: synthetic(c.type_name) for c in contenders}
    load = os.getloadavg()[0]
    console = Console()
    processor = ""
    with Progress(console=console) as progress:
        schedule = [c for r in range(rounds) for c in contenders if not c.slow or r < slow_rounds]
        task = progress.add_task("measuring", total=len(schedule))
        for contender in schedule:
            progress.update(task, description=contender.name)
            processor = measure(contender, models[contender.type_name], threads)
            progress.advance(task)

    text = table(contenders, {name: path.stat().st_size for name, path in models.items()})
    console.print(text, markup=False, highlight=False)
    by_name = {c.name: c for c in contenders}
    if slow_rounds:
        ours, stock = by_name["plug-in Q2_0"], by_name["stock Q2_0"]
        prefill = statistics.mean(ours.prefill) / statistics.mean(stock.prefill)
        decode = statistics.mean(ours.decode) / statistics.mean(stock.decode)
        gain = f"Q2_0 through the plug-in against stock Q2_0: {prefill:.1f}x prefill, {decode:.1f}x decode."
        console.print(gain, markup=False, highlight=False)
        text += f"\n\n{gain}"

    now = datetime.datetime.now(datetime.UTC)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{now:%Y-%m-%d}-stock.md"
    command = f"llama-bench -p {N_PROMPT} -n {N_GENERATE} -t {threads} -r 1"
    path.write_text(
        f"# Plug-in and stock llama.cpp, {now:%Y-%m-%d}\n\n"
        "Synthetic Qwen3 0.6B (`tools/make_synthetic.py`), the same weights in every file. Rounds of\n"
        f"the stock `{command}`, engines in turn; mean ± standard\n"
        "deviation over the rounds; ratios to the first row. Written by `tools/bench_stock.py`.\n\n"
        f"- {processor}, {threads} threads, load average at the start {load:.2f}\n"
        f"- llama.cpp of llama-cpp-python {host.llama_cpp_version()}; ggml-tern {ggml_tern.__version__}\n\n"
        f"{text}\n",
        encoding="utf-8",
    )
    console.print(f"written to {path}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
