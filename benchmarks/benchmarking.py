"""What the benchmarks share: cached synthetic models, rounds of llama-bench, memory, dated reports."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click

import ggml_tern
from ggml_tern.bench.llama_bench import memory_of
from ggml_tern.host import stock as host

ROOT = Path(__file__).resolve().parents[1]

#: The option --out of every benchmark.
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "docs" / "benchmarks",
    help="The folder for the table.  [default: docs/benchmarks]",
)


def synthetic(*arguments: str) -> Path:
    """The cached synthetic model that tools/make_synthetic.py makes of the arguments, written if it is not
    there yet."""
    command = [sys.executable, str(ROOT / "tools" / "make_synthetic.py"), *arguments]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def memory_of_tree(pid: int) -> tuple[int, int]:
    """Anonymous and resident bytes of a process and those that it started; nothing for one that has ended."""
    pids, anonymous, resident = [pid], 0, 0
    while pids:
        folder = Path("/proc") / str(current := pids.pop())
        try:
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
            children = (folder / "task" / str(current) / "children").read_text(encoding="ascii")
        except OSError:
            continue
        pids += map(int, children.split())
        sizes = memory_of(status)
        anonymous += sizes.get("RssAnon", 0)
        resident += sizes.get("VmRSS", 0)
    return anonymous, resident


@dataclass
class Samples:
    """Tokens per second."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Engine:
    """A llama-bench. program: the stock one that comes along by default. variables: of its environment, in
    addition to our own."""

    plugin: bool = False
    program: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return host.host_environment(stock=not self.plugin) | dict(self.variables)


PLUGIN, STOCK = Engine(plugin=True), Engine()


class Host(NamedTuple):
    """What a llama-bench says of where it runs."""

    processor: str
    build: str  # of its llama.cpp


class BenchFailed(click.ClickException):
    """A call of llama-bench that failed. reason: in one line."""

    def __init__(self, command: Sequence[str], reason: str, details: str) -> None:
        super().__init__(f"{' '.join(command)} failed: {reason}\n{details}".rstrip())
        self.reason = reason


@dataclass(frozen=True)
class LlamaBench:
    """A call of llama-bench that runs two tests: a prompt of n_prompt tokens, then n_generate tokens; 0: not
    that one. What the machine does besides lasts for seconds, so a test is repeated little and llama-bench is
    called often. depth: tokens that are in the KV cache before each test, of the type kv."""

    n_prompt: int
    n_generate: int
    threads: int
    repetitions: int = 1
    depth: int = 0
    kv: str = ""
    flash_attention: bool | None = None
    warm_up: bool = True

    @property
    def arguments(self) -> list[str]:
        words = f"-p {self.n_prompt} -n {self.n_generate} -t {self.threads} -r {self.repetitions}".split()
        words += ["-d", str(self.depth)] if self.depth else []
        words += ["-ctk", self.kv, "-ctv", self.kv] if self.kv else []
        words += ["-fa", str(int(self.flash_attention))] if self.flash_attention is not None else []
        words += [] if self.warm_up else ["--no-warmup"]
        return words

    def measure(self, model: Path, samples: Samples, engine: Engine = PLUGIN) -> Host:
        """Adds the samples of one call to both lists.

        Raises BenchFailed."""
        program = engine.program or host.llama_cpp_dir() / "llama-bench"
        command = [str(program), "-m", str(model), "-o", "json", *self.arguments]
        try:
            done = subprocess.run(
                command, env=engine.environment(), capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise BenchFailed(command, error.strerror or "it does not start", "") from error
        if done.returncode != 0:
            said = done.stderr.strip()
            reason = said.splitlines()[-1] if said else f"exit code {done.returncode}, and not a word"
            raise BenchFailed(command, reason, said)
        try:
            tests = json.loads(done.stdout)
        except ValueError as error:
            raise BenchFailed(command, "what it wrote is not JSON", done.stdout) from error
        for test in tests:
            (samples.prefill if test["n_prompt"] else samples.decode).extend(test["samples_ts"])
        return Host(str(tests[0]["cpu_info"]), f"{tests[0]['build_number']} ({tests[0]['build_commit']})")


def spread(samples: Sequence[float]) -> str:
    """The standard deviation, to be put behind the mean; empty for a single sample."""
    return f" ± {statistics.stdev(samples):.1f}" if len(samples) > 1 else ""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is of names and the others of numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_report(folder: Path, subject: str, title: str, text: str, facts: Sequence[str], table: str) -> Path:
    """Writes FOLDER/DATE-SUBJECT.md: a title, what was measured, facts as a list, the table. Returns its
    path."""
    now = datetime.datetime.now(datetime.UTC)
    versions = f"llama.cpp of llama-cpp-python {host.llama_cpp_version()}; ggml-tern {ggml_tern.__version__}"
    listed = "\n".join(f"- {fact}" for fact in (*facts, versions))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{subject}.md"
    path.write_text(f"# {title}, {now:%Y-%m-%d}\n\n{text}\n\n{listed}\n\n{table}\n", encoding="utf-8")
    return path
