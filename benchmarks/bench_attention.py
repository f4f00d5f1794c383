"""Measure attention after a long context: the plug-in's own against the stock one, in the same host.

    python benchmarks/bench_attention.py                       # 0.6B, 8192 tokens, f16, q8_0 and q4_0 caches
    python benchmarks/bench_attention.py --depth 2048 --kv q8_0

Two processes of llama-cpp-python run the plug-in, one of them with TERN_ATTENTION=stock. The context is
computed once, by our own attention, which is quicker; both begin with that state. Then they take turns:
decode of a few tokens, and a prefill of some more, each from that state again. So five rounds take minutes
where llama-bench, filling the cache by the stock attention, takes hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

import ggml_tern
from benchmarking import ROOT, markdown, out_option, synthetic, write_report
from ggml_tern import _core

ATTENTIONS = {"own": "", "stock": "stock"}  # TERN_ATTENTION
TESTS = ("decode", "prefill")
KV_TYPES = {"f16": _core.TYPE_F16, "q8_0": 8, "q5_0": 6, "q4_0": 2}
N_BATCH = 512


class Worker:
    """A process with the model and one kind of attention, which answers a line of JSON with another."""

    def __init__(self, model: Path, attention: str, kv: str, depth: int, room: int, threads: int) -> None:
        setup = {"model": str(model), "kv": kv, "depth": depth, "room": room, "threads": threads}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(setup)],
            env=os.environ | {"TERN_ATTENTION": ATTENTIONS[attention]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, question: str, argument: str | int) -> float:
        """The seconds that it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([question, argument]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise click.ClickException(f"the process that measures ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Host:
    """What a worker does: a model and a state that every measurement begins with."""

    def __init__(self, model: str, kv: str, depth: int, room: int, threads: int) -> None:
        ggml_tern.enable()
        import llama_cpp

        self._library: Any = llama_cpp
        self._depth = depth
        self._llm = llama_cpp.Llama(
            model,
            n_gpu_layers=-1,
            n_ctx=depth + room,
            n_batch=N_BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            type_k=KV_TYPES[kv],
            type_v=KV_TYPES[kv],
            verbose=False,
        )
        generator = random.Random(0)
        self._tokens = [generator.randrange(1000, 30000) for _ in range(depth + room)]

    def fill(self, file: str) -> None:
        """Computes the state and saves it."""
        self._llm.eval(self._tokens[: self._depth])
        tokens = (self._library.llama_token * 0)()
        if not self._library.llama_state_seq_save_file(self._llm.ctx, file.encode(), 0, tokens, 0):
            raise RuntimeError(f"{file}: the state was not saved")

    def restore(self, file: str) -> None:
        tokens = (self._library.llama_token * 1)()
        count = self._library.ctypes.c_size_t()
        if not self._library.llama_state_seq_load_file(self._llm.ctx, file.encode(), 0, tokens, 1, count):
            raise RuntimeError(f"{file}: the state was not loaded")

    def decode(self, count: int) -> None:
        self._llm.n_tokens = self._depth
        for token in self._tokens[self._depth : self._depth + count]:
            self._llm.eval([token])

    def prefill(self, count: int) -> None:
        self._llm.n_tokens = self._depth
        self._llm.eval(self._tokens[self._depth : self._depth + count])


def work(setup: dict[str, Any]) -> None:
    host = Host(**setup)
    for line in sys.stdin:
        question, argument = json.loads(line)
        begin = time.perf_counter()
        getattr(host, question)(argument)
        print(time.perf_counter() - begin, flush=True)


@contextlib.contextmanager
def workers(*arguments: Any) -> Iterator[dict[str, Worker]]:
    started = {name: Worker(arguments[0], name, *arguments[1:]) for name in ATTENTIONS}
    try:
        yield started
    finally:
        for worker in started.values():
            worker.close()


@click.command(help=__doc__.split("\n")[0])
@click.option("--depth", type=click.IntRange(1), default=8192, show_default=True, help="Tokens in the cache.")
@click.option("--kv", type=click.Choice(list(KV_TYPES)), multiple=True, default=("f16", "q8_0", "q4_0"))
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--generate", type=click.IntRange(1), default=8, show_default=True)
@click.option("--prompt", type=click.IntRange(1), default=32, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--worker", hidden=True)
@out_option
def main(
    depth: int,
    kv: tuple[str, ...],
    rounds: int,
    generate: int,
    prompt: int,
    threads: int,
    worker: str | None,
    out: Path,
) -> None:
    if worker is not None:
        work(json.loads(worker))
        return
    model = synthetic("--type", "pq2_0")
    counts = {"decode": generate, "prefill": prompt}
    console = Console()
    rows = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        task = progress.add_task("", total=len(kv) * (1 + rounds * len(TESTS) * len(ATTENTIONS)))
        for cache in kv:
            seconds: dict[tuple[str, str], list[float]] = {(a, t): [] for a in ATTENTIONS for t in TESTS}
            state = Path(folder) / f"{cache}.state"
            with workers(model, cache, depth, max(prompt, generate), threads) as running:
                progress.update(task, description=f"{cache}: {depth} tokens")
                running["own"].ask("fill", str(state))
                running["stock"].ask("restore", str(state))
                progress.advance(task)
                for number in range(rounds):
                    turn = list(ATTENTIONS)[:: 1 if number % 2 == 0 else -1]
                    for test in TESTS:
                        for attention in turn:
                            progress.update(task, description=f"{cache}: {test}, {attention}")
                            seconds[attention, test].append(running[attention].ask(test, counts[test]))
                            progress.advance(task)
            state.unlink()
            row = [cache]
            for test in TESTS:
                own, stock = (
                    [counts[test] / taken for taken in seconds[attention, test]] for attention in ATTENTIONS
                )
                ratio = statistics.median(own) / statistics.median(stock)
                row += [
                    *(
                        f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"
                        for rates in (own, stock)
                    ),
                    f"{ratio:.2f}",
                ]
            rows.append(row)
    columns = ["cache"]
    for test, count in counts.items():
        columns += [f"{test} of {count}, own t/s", "stock t/s", "ratio"]
    text = markdown(columns, rows)
    click.echo(text)
    path = write_report(
        out,
        f"attention-d{depth}",
        f"Attention after {depth} tokens",
        "Synthetic Qwen3 0.6B in PQ2_0; the plug-in in llama-cpp-python, with its own attention and with\n"
        "TERN_ATTENTION=stock, in turn, all from the same state. Medians (least-greatest) of "
        f"{rounds} rounds;\nratios of the medians. Written by `benchmarks/{Path(__file__).name}`.",
        [f"{threads} threads, load average at the start {load:.2f}"],
        text,
    )
    console.print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")


if __name__ == "__main__":
    main()
