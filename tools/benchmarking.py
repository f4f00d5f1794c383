"""What the benchmarks share: cached synthetic models, rounds of the stock llama-bench, dated reports."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

import ggml_tern
from ggml_tern.runtime import host

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


@dataclass
class Samples:
    """Tokens per second."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class LlamaBench:
    """A stock llama-bench that runs two tests: a prompt of n_prompt tokens, then n_generate tokens. What the
    machine does besides lasts for seconds, so a test is repeated little and llama-bench is called often."""

    n_prompt: int
    n_generate: int
    threads: int
    repetitions: int = 1

    @property
    def arguments(self) -> list[str]:
        return f"-p {self.n_prompt} -n {self.n_generate} -t {self.threads} -r {self.repetitions}".split()

    def measure(self, model: Path, samples: Samples, *, stock: bool = False) -> str:
        """Adds the samples of one call to both lists; returns the name of the processor. stock: without the
        plug-in."""
        command = [str(host.llama_cpp_dir() / "llama-bench"), "-m", str(model), "-o", "json", *self.arguments]
        done = subprocess.run(
            command, env=host.host_environment(stock), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr}")
        tests = json.loads(done.stdout)
        for test in tests:
            (samples.prefill if test["n_prompt"] else samples.decode).extend(test["samples_ts"])
        return str(tests[0]["cpu_info"])


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
