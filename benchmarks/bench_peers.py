"""Measure the plug-in, stock llama.cpp and other engines in turn, and write the ratios down.

    python benchmarks/bench_peers.py                                 # docs/benchmarks/DATE-peers-ISA.md
    python benchmarks/bench_peers.py --peer ik=../ik_llama.cpp/build/bin/llama-bench:iq2_bn.gguf
    python benchmarks/bench_peers.py --depth 8192 --rounds 1         # attention: DATE-peers-d8192-ISA.md
    python benchmarks/bench_peers.py --roofline --model qwen3-1.7b   # shares of the machine's bounds

Every round calls the llama-bench of each engine once, in turn, so that whatever else the machine does hits
all of them alike; look at the ratios first. All files but those that peers bring hold the very same weights.
ISA is the instruction set of the plug-in's kernels, avx2, say; TERN_ISA forces another one.
Ctrl-C writes down what was measured so far.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import roofline
from benchmarking import (
    PLUGIN,
    ROOT,
    STOCK,
    BenchFailed,
    Engine,
    Host,
    LlamaBench,
    Samples,
    markdown,
    out_option,
    synthetic,
    write_report,
)

sys.path.insert(0, str(ROOT / "tools"))
import make_synthetic

N_PROMPT, N_GENERATE = 512, 64
DEFAULT_MODEL = "qwen3-0.6b"
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

#: The plug-in with the stock attention in place of its own.
STOCK_ATTENTION = replace(PLUGIN, variables={"TERN_ATTENTION": "stock"})
#: What the others are compared with, where it was measured.
BASELINES = ("stock TQ2_0", "stock TQ1_0", "stock Q2_0")
BASELINES_AT_DEPTH = ("plug-in PQ2_0, stock attention", "stock TQ2_0")

TITLES = {"peers": "Plug-in, stock llama.cpp and peers", "roofline": "How near to the machine's bounds"}
TEXTS = {
    "peers": "Rounds of llama-bench, engines in turn; medians,\n"
    "and their ratios to those of the baselines. The range is that of all samples.",
    "roofline": "Rounds of the bounds, the products alone\n"
    "and llama-bench with the plug-in, in turn; medians, and their shares of the bounds' medians. The\n"
    "bounds are what as many threads reach that only read memory, or only multiply in registers with the\n"
    "instructions of the kernels. Attention's own multiply-adds are not counted.",
}

# For the estimate of the time alone: tokens/s of a model of WEIGHTS weights on two cores with AVX2; seconds
# of attention that a token takes for each token before it; how much slower the slow ones are; a start.
WEIGHTS, PREFILL, DECODE = 440e6, 100.0, 60.0
ATTENTION = 6e-6
SLOW = 18
START = 1.5


@dataclass(frozen=True)
class Contender:
    """An engine with a model. slow: so slow that fewer tokens and rounds have to do."""

    name: str
    engine: Engine
    model: Path
    slow: bool = False

    def shortened(self, bench: LlamaBench) -> LlamaBench:
        if not self.slow:
            return bench
        return replace(
            bench, n_prompt=min(bench.n_prompt, 128), n_generate=min(bench.n_generate, 16), warm_up=False
        )


@dataclass(frozen=True)
class Call:
    """One call of llama-bench. phases: what the samples of its two tests count as."""

    contender: Contender
    bench: LlamaBench
    phases: tuple[str, str]

    @property
    def key(self) -> str:
        return f"{self.contender.name}, llama-bench {' '.join(self.bench.arguments)}"

    def estimate(self, weights: float) -> float:
        """Seconds that the call takes with a model of so many weights, roughly."""
        bench = self.bench
        slowness = weights / WEIGHTS * (SLOW if self.contender.slow else 1)

        def seconds(n_tokens: int, speed: float, depth: int) -> float:
            return n_tokens * (slowness / speed + ATTENTION * (depth + n_tokens / 2))

        tests = seconds(bench.n_prompt, PREFILL, bench.depth) + seconds(bench.n_generate, DECODE, bench.depth)
        return START + seconds(bench.depth, PREFILL, 0) + (bench.repetitions + bench.warm_up) * tests


@dataclass
class Results:
    """Tokens/s by phase and contender, the hosts of these, and what the calls that failed said."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)

    def add(self, call: Call, samples: Samples) -> None:
        for phase, found in zip(call.phases, (samples.prefill, samples.decode), strict=True):
            if found:
                self.samples.setdefault(phase, {}).setdefault(call.contender.name, []).extend(found)


def phases(bench: LlamaBench) -> tuple[str, str]:
    """The names of the two tests."""
    after = f" after {bench.depth} tokens" if bench.depth else ""
    kv = f", {bench.kv} KV" if bench.kv else ""
    return f"pp{bench.n_prompt}{after}{kv}", f"tg{bench.n_generate}{after}{kv}"


def schedule(
    contenders: Sequence[Contender], benches: Sequence[LlamaBench], rounds: int, slow_rounds: int
) -> list[list[Call]]:
    """The calls of every round: for each bench, all contenders in turn."""
    return [
        [
            Call(contender, contender.shortened(bench), phases(bench))
            for bench in benches
            for contender in contenders
            if not contender.slow or number < slow_rounds
        ]
        for number in range(rounds)
    ]


def run(
    rounds: Sequence[Sequence[Call]],
    weights: float,
    results: Results,
    console: Console,
    first: Callable[[], None] = lambda: None,
) -> bool:
    """Makes the calls, and `first` before those of each round. A call that fails is not made again.

    Returns False if Ctrl-C came before the end.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    total = sum(call.estimate(weights) for calls in rounds for call in calls)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measuring", total=total)
        try:
            for calls in rounds:
                first()
                for call in calls:
                    progress.update(task, description=f"{call.contender.name}, {call.phases[0]}")
                    if call.key not in results.failures:
                        measure(call, results)
                    progress.advance(task, call.estimate(weights))
        except KeyboardInterrupt:
            return False
    return True


def measure(call: Call, results: Results) -> None:
    samples = Samples()
    try:
        host = call.bench.measure(call.contender.model, samples, call.contender.engine)
        results.hosts[call.contender.name] = host
    except BenchFailed as error:
        results.failures[call.key] = error.reason
    results.add(call, samples)


def phase_table(samples: Mapping[str, Sequence[float]], baselines: Sequence[str]) -> str:
    """A Markdown table of a phase: medians, and their ratios to those of the baselines that were measured."""
    medians = {name: statistics.median(speeds) for name, speeds in samples.items()}
    against = [name for name in baselines if name in medians]
    rows = [
        [
            name,
            f"{medians[name]:.1f}",
            f"{min(speeds):.1f} to {max(speeds):.1f}",
            *(f"{medians[name] / medians[base]:.2f}" for base in against),
            f"{len(speeds)}",
        ]
        for name, speeds in samples.items()
    ]
    return markdown(["", "t/s", "range", *(f"against {base}" for base in against), "samples"], rows)


def tables(results: Results, baselines: Sequence[str]) -> str:
    """Those of all phases, each under its name."""
    return "\n\n".join(
        f"## {phase}\n\n{phase_table(samples, baselines)}" for phase, samples in results.samples.items()
    )


def parse_peer(text: str, model: str) -> Contender:
    """NAME=LLAMA_BENCH[:MODEL], where MODEL is a file or the type of a synthetic model, tq2_0 by default.

    Raises click.BadParameter."""
    name, separator, rest = text.partition("=")
    program, _, given = rest.rpartition(":") if ":" in rest else (rest, "", "tq2_0")
    if not name or not separator or not program:
        raise click.BadParameter(f"'{text}': expected NAME=LLAMA_BENCH or NAME=LLAMA_BENCH:MODEL")
    path = Path(program).expanduser()
    if not os.access(path, os.X_OK) or path.is_dir():
        raise click.BadParameter(f"'{text}': {path} is no program; give the path of a llama-bench")
    if given.lower() in make_synthetic.TERNARY:
        return Contender(name, Engine(program=path), synthetic("--model", model, "--type", given.lower()))
    file = Path(given).expanduser()
    if not file.is_file():
        types = ", ".join(make_synthetic.TERNARY)
        raise click.BadParameter(f"'{text}': {given} is neither a file nor one of the types {types}")
    return Contender(name, Engine(program=path), file)


def own_contenders(model: str, *, depth: int, as_roofline: bool, slow: bool) -> list[Contender]:
    """The plug-in and stock llama.cpp, each with the types that matter."""

    def contender(type_name: str, engine: Engine, name: str, slow: bool = False) -> Contender:
        path = synthetic("--model", model, "--type", type_name)
        return Contender(f"{name} {type_name.upper()}", engine, path, slow)

    if as_roofline:
        return [contender(type_name, PLUGIN, "plug-in") for type_name in ("pq2_0", "ptq1_0")]
    if depth:
        pq2_0 = contender("pq2_0", PLUGIN, "plug-in")
        stock_attention = replace(pq2_0, engine=STOCK_ATTENTION, name=f"{pq2_0.name}, stock attention")
        return [contender("tq2_0", STOCK, "stock"), stock_attention, pq2_0]
    stock = [contender(type_name, STOCK, "stock") for type_name in ("tq2_0", "tq1_0")]
    plugin = [contender(type_name, PLUGIN, "plug-in") for type_name in ("pq2_0", "ptq1_0", "q2_0")]
    return [*stock, *plugin, *([contender("q2_0", STOCK, "stock", slow=True)] if slow else [])]


def own_benches(common: LlamaBench, depth: int, kv: Sequence[str]) -> list[LlamaBench]:
    """common: what all calls share."""
    benches = []
    for cache in kv:
        bench = replace(common, kv=cache)
        if depth:
            # The prompt that fills the cache, timed; then what comes after it, several times a filling.
            benches.append(replace(bench, n_prompt=depth, n_generate=0, warm_up=False))
            benches.append(replace(bench, depth=depth, repetitions=3))
        else:
            benches.append(bench)
    return benches


def subject(kind: str, model: str, depth: int, processor: str) -> str:
    """The name of the report without its date; the processor is what the host of the plug-in says it is."""
    kernels = re.search(r"kernels \((\w+)\)", processor)
    parts = [
        kind,
        model if model != DEFAULT_MODEL else "",
        f"d{depth}" if depth else "",
        kernels[1] if kernels else "",
    ]
    return "-".join(filter(None, parts))


def weights_of(model: str) -> float:
    return float(sum(tensor.n_in * tensor.n_out for tensor in make_synthetic.MODELS[model].tensors()))


class Roofline:
    """The machine's bounds, the products alone and the plug-in's whole models, all in turn."""

    def __init__(self, contenders: Sequence[Contender], threads: int) -> None:
        self.threads = threads
        self.bounds = roofline.Bounds(threads)
        self.models = {c.name: roofline.read_model(c.model) for c in contenders}
        self.decode = {
            name: roofline.Row(f"products alone, {name}", model.weight_bytes)
            for name, model in self.models.items()
        }
        self.matrices = {shape: roofline.random_matrix(*shape) for shape in roofline.SHAPES}
        self.prefill = {
            (n_in, n_out): roofline.Row(f"product alone, {n_in} x {n_out}", n_in * n_out)
            for n_in, n_out in roofline.SHAPES
        }

    def measure(self) -> None:
        """A round without the whole models. The bounds are taken between all the rest, since they change."""
        self.bounds.measure()
        for name, model in self.models.items():
            roofline.time_decode(self.decode[name], model, self.threads)
        self.bounds.measure()
        for shape, matrix in self.matrices.items():
            roofline.time_prefill(self.prefill[shape], matrix, self.threads)
        self.bounds.measure()

    def tables(self, results: Results, benches: Sequence[LlamaBench]) -> str:
        decode, prefill = list(self.decode.values()), list(self.prefill.values())
        for bench in benches:
            pp, tg = phases(bench)
            for name, model in self.models.items():
                # Halfway through the tokens that are generated.
                kv_bytes = model.kv_bytes(bench.depth + bench.n_generate / 2, bench.kv or "f16")
                row = roofline.Row(f"{tg}, {name}", model.weight_bytes + kv_bytes)
                row.samples = results.samples.get(tg, {}).get(name, [])
                decode.append(row)
                row = roofline.Row(f"{pp}, {name}", model.prefill_multiply_adds)
                row.samples = results.samples.get(pp, {}).get(name, [])
                prefill.append(row)
        bandwidth = roofline.bound_text(self.bounds.bandwidth, "GB/s")
        peak = roofline.bound_text(self.bounds.peak, "G multiply-adds/s")
        return (
            f"## Decode, of the read bandwidth: {bandwidth}\n\n"
            f"{roofline.share_table(decode, self.bounds.bandwidth, 'GB/s', 'MB a token')}\n\n"
            f"## Prefill, of the multiply-add peak: {peak}\n\n"
            f"{roofline.share_table(prefill, self.bounds.peak, 'G/s', 'M multiply-adds a token')}"
        )


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--model",
    type=click.Choice(list(make_synthetic.MODELS)),
    default=DEFAULT_MODEL,
    show_default=True,
    help="The shape of the synthetic models.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=LLAMA_BENCH[:MODEL]",
    help="Another engine's llama-bench, with a GGUF file or the type of a synthetic model (default tq2_0). "
    "May be given more than once.",
)
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    metavar="NAME",
    help="What the others are compared with, by its name in the first column. May be given more than once.  "
    "[default: stock types; at a depth, stock attention]",
)
@click.option(
    "--depth",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Measure attention: prefill of so many tokens, and prefill and decode after them. Takes long.",
)
@click.option("--kv", help="Types of the KV cache, with commas.  [default: f16; at a depth q8_0,q4_0]")
@click.option(
    "--flash-attention/--no-flash-attention",
    default=True,
    show_default=True,
    help="For all engines.",
)
@click.option(
    "--roofline", "as_roofline", is_flag=True, help="Shares of the machine's bounds; the plug-in alone."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--slow-rounds",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="For stock Q2_0, without SIMD.",
)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@out_option
def main(
    model: str,
    peers: tuple[str, ...],
    baselines: tuple[str, ...],
    depth: int,
    kv: str | None,
    flash_attention: bool,
    as_roofline: bool,
    rounds: int,
    slow_rounds: int,
    threads: int,
    out: Path,
) -> None:
    if as_roofline and (peers or baselines):
        raise click.UsageError("--roofline measures the plug-in alone: leave --peer and --baseline out")
    caches = kv.split(",") if kv else ["q8_0", "q4_0"] if depth else [""]
    for cache in caches:
        if cache and cache not in CACHE_TYPES:
            raise click.BadParameter(f"'{cache}' is none of {', '.join(CACHE_TYPES)}", param_hint="--kv")
    contenders = own_contenders(model, depth=depth, as_roofline=as_roofline, slow=slow_rounds > 0)
    contenders += [parse_peer(peer, model) for peer in peers]
    names = [contender.name for contender in contenders]
    for name in baselines:
        if name not in names:
            raise click.BadParameter(f"'{name}' is none of {', '.join(names)}", param_hint="--baseline")
    common = LlamaBench(N_PROMPT, N_GENERATE, threads, flash_attention=flash_attention)
    benches = own_benches(common, depth, caches)
    calls = schedule(contenders, benches, rounds, slow_rounds)

    console = Console()
    weights = weights_of(model)
    n_calls = sum(map(len, calls))
    minutes = sum(call.estimate(weights) for calls_of_round in calls for call in calls_of_round) / 60
    console.print(f"{n_calls} calls of llama-bench, very roughly {minutes:.0f} minutes; Ctrl-C ends it early")
    load = os.getloadavg()[0]
    results = Results()
    if as_roofline:
        measured = Roofline(contenders, threads)
        finished = run(calls, weights, results, console, measured.measure)
        text = measured.tables(results, benches) if results.samples else ""
    else:
        finished = run(calls, weights, results, console)
        text = tables(results, baselines or (BASELINES_AT_DEPTH if depth else BASELINES))

    failures = [f"{key} failed: {said}" for key, said in results.failures.items()]
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        # The plug-in's host says the instruction set too.
        hosts = sorted(results.hosts, key=lambda name: name.startswith("plug-in"))
        processor = results.hosts[hosts[-1]].processor
        facts = [f"{processor}, {threads} threads, load average at the start {load:.2f}"]
        facts += [f"`llama-bench {' '.join(bench.arguments)}`" for bench in benches]
        for c in contenders:
            if c.engine.program is not None and c.name in results.hosts:
                facts.append(f"{c.name}: build {results.hosts[c.name].build}, with {c.model.name}")
            elif c.slow:
                facts.append(f"{c.name}: `llama-bench {' '.join(c.shortened(common).arguments)}`")
        facts += [*failures, *([] if finished else ["ended before all was measured"])]
        kind = "roofline" if as_roofline else "peers"
        path = write_report(
            out,
            subject(kind, model, depth, processor),
            TITLES[kind],
            f"Synthetic {model} (`tools/make_synthetic.py`). {TEXTS[kind]}\n"
            "Written by `benchmarks/bench_peers.py`.",
            facts,
            text,
        )
        console.print(f"written to {path}", markup=False, highlight=False)
    if failures:
        raise click.ClickException("\n".join(failures))
    if not finished:
        raise click.Abort()


if __name__ == "__main__":
    main()
