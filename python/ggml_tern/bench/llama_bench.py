"""``tern bench``: the stock llama-bench with the plug-in, point by point, and the memory of its process.

A point is a model at a context, with so many tokens a pass. Every round calls llama-bench once for each, in
turn, so that whatever else the machine does hits all of them alike. The bandwidth of the machine is measured
between the rounds: decode has to read all weights for every token, so its share of that bandwidth says how
near to the machine's bound it is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ggml_tern import _core
from ggml_tern.bench.report import Grid, Report
from ggml_tern.errors import TernError
from ggml_tern.gguf.model_file import require_model
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.host import stock as host
from ggml_tern.host.devices import Choice
from ggml_tern.plan import arithmetic
from ggml_tern.plan.fit import Demand, fit
from ggml_tern.plan.header import N_UBATCH, Model, model_of
from ggml_tern.plots import Panel

#: Seconds between two looks at the memory of a process.
_LOOK = 0.01


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        contexts: tokens that are in the KV cache before a test.
        batches: tokens of a prompt in one pass.
        n_prompt, n_generate: tokens of the two tests.
        threads: None: as llama-bench chooses.
        kv_type: one of arithmetic.KV_TYPES.
        rounds: samples of each point.
        program: the llama-bench; None for the one that came along.
        device: what it runs on.
    """

    contexts: tuple[int, ...] = (0, 2048)
    batches: tuple[int, ...] = (N_UBATCH,)
    n_prompt: int = 512
    n_generate: int = 32
    threads: int | None = None
    kv_type: str = "f16"
    rounds: int = 3
    program: Path | None = None
    device: Choice = field(default_factory=Choice)


@dataclass(frozen=True)
class Point:
    """Where a model is measured."""

    context: int
    batch: int

    def options(self, settings: Settings) -> list[str]:
        """Of llama-bench."""
        counts = {
            "-p": settings.n_prompt,
            "-n": settings.n_generate,
            "-d": self.context,
            "-b": self.batch,
            "-ub": self.batch,
            **({} if settings.threads is None else {"-t": settings.threads}),
        }
        words = [word for option, count in counts.items() for word in (option, str(count))]
        return [*words, "-ctk", settings.kv_type, "-ctv", settings.kv_type, "-r", "1"]


@dataclass
class Samples:
    """What a model did at a point, a sample a round. A prompt's last token gives the first one of the answer,
    so the time of the prompt is the time to that.

    Attributes:
        prefill, decode: tokens/s.
        first_token: seconds.
        anonymous, resident: the most bytes that the process had, without and with what is mapped from files.
        dense: whether the plug-in held the weights in its dense layout.
    """

    prefill: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    anonymous: int = 0
    resident: int = 0
    dense: bool = False


@dataclass(frozen=True)
class Contender:
    """A model to measure.

    Attributes:
        path: its file; of a split model, the first part.
        header: what of it decides about decode; None where plans do not know it.
        mapped: bytes of its weights that stay mapped from the file.
        trained: tokens that it was trained for; None where the file does not say.
    """

    path: Path
    header: Model | None
    mapped: int
    trained: int | None

    @property
    def name(self) -> str:
        return self.path.name


@dataclass
class Results:
    """All that was measured so far. threads: those that llama-bench took."""

    settings: Settings
    contenders: Sequence[Contender]
    samples: dict[tuple[Contender, Point], Samples] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)  # bytes/s
    processor: str = ""
    threads: int | None = None
    complete: bool = False


def open_model(path: Path) -> Contender:
    """Raises TernError for what is no model in GGUF."""
    source = GGUFSource(path)
    require_model(source)
    header = None
    # llama-bench may know what plans do not; its own words are better where it does not.
    with suppress(TernError):
        header = model_of(source)
    others = (
        tensor.data.nbytes for tensor in source.tensors.values() if tensor.type not in _core.TERNARY_TYPES
    )
    trained = source.metadata.get(f"{source.architecture}.context_length")
    return Contender(
        source.first,
        header,
        sum(others) if header is None else header.mapped,
        trained if isinstance(trained, int) and trained > 0 else None,
    )


def settle(contenders: Sequence[Contender], settings: Settings) -> tuple[Settings, list[str]]:
    """The settings with contexts that all models were trained for, and what the user is told of that.

    Raises TernError for what does not fit into the memory that is free, saying what does."""
    n_tokens = max(settings.n_prompt, settings.n_generate)
    trained = min((c.trained for c in contenders if c.trained is not None), default=None)
    notes = []
    if trained is not None:
        most = max(trained - n_tokens, 0)
        contexts = tuple(dict.fromkeys(min(context, most) for context in settings.contexts))
        notes = [
            f"a context of {context:,} is cut to {most:,}: models here were trained for {trained:,} tokens, "
            f"and {n_tokens:,} come on top"
            for context in settings.contexts
            if context > most
        ]
        settings = replace(settings, contexts=contexts)

    def spelled(context: int, kv_type: str, _: int | None) -> str:
        return f"--context {max(context - n_tokens, 0)} --kv {kv_type}"

    for contender in contenders:
        if contender.header is not None:
            demand = Demand(
                contender.path,
                context=max(settings.contexts) + n_tokens,
                # Whether it uses all of what was allocated is settled above.
                trained=None if contender.trained is None else max(contender.trained, n_tokens),
                kv_type=settings.kv_type,
                parallel=1,
                n_ubatch=max(settings.batches),
                logits=min(max(settings.batches), settings.n_prompt),
                keeps_copy=max(settings.contexts) > 0,
                spelled=spelled,
            )
            notes += fit(demand, is_elsewhere=settings.device.is_elsewhere).notes
    return settings, notes


# ---- measuring ----


@dataclass(frozen=True)
class Call:
    """A call of llama-bench. cost: in proportion to the time that it takes."""

    contender: Contender
    point: Point
    cost: float


def schedule(contenders: Sequence[Contender], settings: Settings) -> list[list[Call]]:
    """The calls of every round."""

    def call(contender: Contender, point: Point) -> Call:
        # The prompt runs twice, the first time to warm up; a token of decode costs about three of prefill.
        n_tokens = point.context + 2 * settings.n_prompt + 3 * settings.n_generate
        return Call(contender, point, n_tokens * contender.path.stat().st_size)

    points = [Point(context, batch) for context in settings.contexts for batch in settings.batches]
    a_round = [call(contender, point) for point in points for contender in contenders]
    return [a_round] * settings.rounds


def measure(
    results: Results,
    rounds: Sequence[Sequence[Call]],
    *,
    start: Callable[[Call], None] = lambda call: None,
    done: Callable[[Call], None] = lambda call: None,
) -> None:
    """Makes the calls and adds to the results, which hold what is done whenever an exception comes.

    Raises TernError if llama-bench fails."""
    for calls in rounds:
        for call in calls:
            start(call)
            samples = results.samples.setdefault((call.contender, call.point), Samples())
            for test in run_llama_bench(call, results.settings, samples):
                results.processor, results.threads = test["cpu_info"], test["n_threads"]
            done(call)
        if not results.settings.device.is_elsewhere:
            results.bandwidth.append(_core.read_bandwidth(results.threads or 0))
    results.complete = True


def run_llama_bench(call: Call, settings: Settings, samples: Samples) -> Iterator[dict[str, Any]]:
    """Adds one sample of each test; yields what llama-bench says of each."""
    program = settings.program or host.llama_cpp_dir() / "llama-bench"
    options = call.point.options(settings)
    if settings.device.is_elsewhere and settings.device.devices is not None:
        # It does not read LLAMA_ARG_DEVICE, and parts several by slashes; commas are for one run each.
        options += ["-dev", settings.device.devices.replace(",", "/")]
    command = [str(program), "-m", str(call.contender.path), "-o", "jsonl", *options]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                command,
                env=host.host_environment(False, program, settings.device.devices),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
            )
        except OSError as error:
            raise TernError(f"{program}: cannot be started: {error.strerror}") from error
        try:
            watch_memory(process, samples)
        finally:
            # Does nothing to one that has ended.
            process.kill()
            code = process.wait()
            # What it finished counts, whatever came then.
            out.seek(0)
            tests = [json.loads(line) for line in out if line.endswith("}\n")]
            for test in tests:
                _add(test, samples)
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
        # The plug-in says so where it decides for it.
        samples.dense = os.environ.get(arithmetic.LAYOUT_VARIABLE) == "dense" or any(
            line.startswith("ggml-tern: ") and "in the dense layout" in line for line in said
        )
        if code != 0:
            reason = said[-1] if said else f"exit code {code}, and not a word"
            raise TernError(
                f"{call.contender.path}: llama-bench {' '.join(options)} failed: {reason}; "
                "'tern doctor' tells whether it works here at all"
            )
    yield from tests


def _add(test: dict[str, Any], samples: Samples) -> None:
    if test["n_prompt"]:
        samples.prefill += test["samples_ts"]
        samples.first_token += [nanoseconds / 1e9 for nanoseconds in test["samples_ns"]]
    else:
        samples.decode += test["samples_ts"]


def watch_memory(process: subprocess.Popen[Any], samples: Samples) -> None:
    """Wait for the process to end, and note the most memory that it had."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        with suppress(OSError):
            sizes = memory_of(status.read_text())
            samples.anonymous = max(samples.anonymous, sizes.get("RssAnon", 0))
            samples.resident = max(samples.resident, sizes.get("VmHWM", 0))
        time.sleep(_LOOK)


def memory_of(status: str) -> dict[str, int]:
    """The sizes in a /proc/PID/status, in bytes."""
    found = (line.partition(":") for line in status.splitlines() if line.endswith(" kB"))
    return {name: int(size.split()[0]) * 1024 for name, _, size in found}


# ---- what was found ----


def share_of_bandwidth(results: Results, contender: Contender, point: Point) -> float | None:
    """What decode read of what the machine can read in that time; None where either is not known."""
    samples = results.samples.get((contender, point), Samples())
    if contender.header is None or not samples.decode or not results.bandwidth:
        return None
    # Halfway through the tokens that are generated.
    context = point.context + results.settings.n_generate / 2
    nbytes = arithmetic.decode_bytes(contender.header, context, results.settings.kv_type, samples.dense)
    return statistics.median(samples.decode) * nbytes / statistics.median(results.bandwidth)


def ratios(results: Results, other: Contender, point: Point) -> dict[str, float] | None:
    """The first model's medians over the other's; None before both were measured."""
    first = results.contenders[0]
    ours, theirs = results.samples.get((first, point)), results.samples.get((other, point))
    if ours is None or theirs is None or not (ours.decode and theirs.decode):
        return None
    found = {
        name: statistics.median(getattr(ours, name)) / statistics.median(getattr(theirs, name))
        for name in ("prefill", "first_token", "decode")
    }
    taken = [samples.anonymous + c.mapped for c, samples in ((first, ours), (other, theirs))]
    return found | {"memory": taken[0] / taken[1]}


def report(results: Results) -> Report:
    """What was measured, of all calls that were finished or begun."""
    title = "tern bench: " + " and ".join(contender.name for contender in results.contenders)
    columns = ["context", "batch", "prefill t/s", "first token s", "decode t/s", "bandwidth", "memory MB"]
    several = len(results.contenders) > 1
    grids = [
        Grid(columns, _rows(results, contender), contender.name if several else "")
        for contender in results.contenders
    ]
    for other in results.contenders[1:]:
        rows = [
            [f"{point.context:,}", f"{point.batch}", *(f"{ratio:.2f}" for ratio in found.values())]
            for point in _points(results)
            if (found := ratios(results, other, point)) is not None
        ]
        titled = f"{results.contenders[0].name} against {other.name}, ratios of medians"
        grids.append(Grid(["context", "batch", "prefill", "first token", "decode", "memory"], rows, titled))
    return Report(title, _facts(results), grids, _panels(results), as_json(results))


def _points(results: Results) -> list[Point]:
    return list(dict.fromkeys(point for _, point in results.samples))


def _rows(results: Results, contender: Contender) -> list[list[str]]:
    def median(values: Sequence[float], digits: int) -> str:
        return f"{statistics.median(values):,.{digits}f}" if values else "-"

    rows = []
    for point in _points(results):
        samples = results.samples.get((contender, point), Samples())
        share = share_of_bandwidth(results, contender, point)
        rows.append(
            [
                f"{point.context:,}",
                f"{point.batch}",
                median(samples.prefill, 1),
                median(samples.first_token, 3),
                median(samples.decode, 1),
                "-" if share is None else f"{share:.0%}",
                f"{(samples.anonymous + contender.mapped) / 1e6:,.0f}" if samples.anonymous else "-",
            ]
        )
    return rows


def _facts(results: Results) -> list[str]:
    settings = results.settings
    n_samples = max((len(samples.decode) for samples in results.samples.values()), default=0)
    facts = [
        f"{results.processor or 'nothing was measured'}, {results.threads or '?'} "
        f"{'thread' if results.threads == 1 else 'threads'}; KV cache in {settings.kv_type}",
        f"prefill of {settings.n_prompt} tokens, decode of {settings.n_generate}; medians of {n_samples} "
        f"{'round' if n_samples == 1 else 'rounds'}",
        "context: tokens before that; batch: tokens of a prompt in one pass; first token: of the answer",
        "memory: the most of llama-bench by itself, and the weights that it keeps mapped from the file",
    ]
    if results.bandwidth:
        bandwidth = statistics.median(results.bandwidth) / 1e9
        facts.append(
            f"bandwidth: what decode reads, of the {bandwidth:.1f} GB/s that as many threads read which do "
            "nothing else; above 100% where a model stays in the processor's caches"
        )
    unknown = [contender.name for contender in results.contenders if contender.header is None]
    facts += [f"{name}: what decode reads of it is not known here" for name in unknown]
    if not results.complete:
        facts.append("ended before all was measured")
    return facts


def _panels(results: Results) -> list[Panel]:
    def lines(name: str) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for (contender, point), samples in results.samples.items():
            if values := getattr(samples, name):
                batch = f", batch {point.batch}" if len(results.settings.batches) > 1 else ""
                line = found.setdefault(contender.name + batch, [])
                line.append((point.context, statistics.median(values)))
        return {name: sorted(line) for name, line in found.items()}

    titles = {"prefill": "Prefill", "decode": "Decode"}
    return [Panel(title, "tokens of context", "tokens/s", lines(name)) for name, title in titles.items()]


def as_json(results: Results) -> dict[str, Any]:
    """All samples, in tokens/s, seconds and bytes."""
    settings, first = results.settings, results.contenders[0]
    points = [
        {
            "file": str(contender.path),
            "context": point.context,
            "batch": point.batch,
            "prefill": samples.prefill,
            "first_token": samples.first_token,
            "decode": samples.decode,
            "bandwidth_share": share_of_bandwidth(results, contender, point),
            "peak_anonymous": samples.anonymous,
            "peak_resident": samples.resident,
            "mapped_weights": contender.mapped,
        }
        for (contender, point), samples in results.samples.items()
    ]
    compared = [
        {"file": str(first.path), "against": str(other.path), "context": point.context, "batch": point.batch}
        | found
        for other in results.contenders[1:]
        for point in _points(results)
        if (found := ratios(results, other, point)) is not None
    ]
    return {
        "processor": results.processor,
        "llama_cpp": host.llama_cpp_version(),
        "threads": results.threads,
        "kv": settings.kv_type,
        "n_prompt": settings.n_prompt,
        "n_generate": settings.n_generate,
        "rounds": settings.rounds,
        "complete": results.complete,
        "bandwidth": results.bandwidth,
        "points": points,
        "ratios": compared,
    }
