"""What a llama.cpp built for a GPU makes of ternary models, as one dated table to send in.

    tools/gpu_check.sh ~/llama.cpp/build/bin               # the tiny models that come along
    tools/gpu_check.sh ~/llama.cpp/build/bin my-model.gguf # and one of yours

The self-test of `tern doctor`; for each model the next token after pieces of a text, on the GPU and on TERN0,
the processor, compared; perplexity and the speed of prefill and decode on both, where that llama.cpp
has llama-perplexity and llama-bench. What is not there, fails or does not fit into the time, the table says.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from ggml_tern.chat.server import local_server
from ggml_tern.client.endpoint import unix_endpoint
from ggml_tern.errors import TernError
from ggml_tern.host.devices import Choice, Device, best_gpus, devices_of
from ggml_tern.host.doctor import check_gpus, check_host
from ggml_tern.host.run import find_program
from ggml_tern.host.stock import DEVICE, host_environment
from ggml_tern.tensors.names import printable

ROOT = Path(__file__).resolve().parents[1]
MODELS = tuple(ROOT / "models" / name / f"{name}-ptq1_0.gguf" for name in ("tiny-qwen3", "tiny-qwen35"))
TEXT = ROOT / "models" / "held-out.txt"
MINUTES = 8.0
#: Pieces of the text whose next token is asked for, and bytes of each.
PIECES, PIECE = 16, 400
#: Likeliest tokens that a server tells; the others count as one.
LIKELIEST = 50

Row = tuple[str, str, str]


class Token(BaseModel):
    id: int
    logprob: float


class Step(BaseModel):
    top_logprobs: list[Token]


class Completion(BaseModel):
    """What llama-server's /completion says of the next token."""

    completion_probabilities: list[Step]


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds. Raises TernError where there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TernError("not done: the time was over")
        return seconds


def next_tokens(server: Path, device: Choice, model: Path, clock: Clock) -> list[dict[int, float]]:
    """For each piece of the text, the log probabilities of the likeliest next tokens.

    Raises TernError."""
    text = TEXT.read_text(encoding="utf-8")
    found = []
    options = ["-c", "512", "-np", "1", "--no-webui"]
    with local_server(model, options, server, device) as running:
        running.wait_until_ready()
        endpoint = unix_endpoint(running.socket, str(model))
        for start in range(0, PIECES * PIECE, PIECE):
            request = {"prompt": text[start : start + PIECE], "n_predict": 1, "temperature": 0}
            request |= {"n_probs": LIKELIEST, "cache_prompt": False}
            answer = endpoint.ask(Completion, "/completion", request, patience=clock.left())
            found.append(
                {token.id: token.logprob for token in answer.completion_probabilities[0].top_logprobs}
            )
    return found


def divergence(there: dict[int, float], here: dict[int, float]) -> float:
    """KL(there || here) in nats over the tokens that both tell, and all others as one."""
    both = there.keys() & here.keys()
    p, q = ([math.exp(side[token]) for token in both] for side in (there, here))
    p, q = ([*side, max(1 - sum(side), 1e-12)] for side in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def compare(server: Path, gpus: Choice, model: Path, clock: Clock) -> str:
    """How far the GPU's next tokens are from the processor's."""
    there = next_tokens(server, gpus, model, clock)
    here = next_tokens(server, Choice(), model, clock)
    kl = [divergence(a, b) for a, b in zip(here, there, strict=True)]
    same = sum(
        max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in zip(here, there, strict=True)
    )
    return f"KL mean {sum(kl) / len(kl):.1e}, largest {max(kl):.1e}; same token {same} of {len(kl)}"


def output_of(program: Path, words: list[str], device: Choice, clock: Clock) -> str:
    """All that a program prints. Raises TernError where it fails or takes too long."""
    try:
        done = subprocess.run(
            [str(program), *words],
            env=host_environment(False, program, device.devices),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=clock.left(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TernError("not done: the time was over") from error
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["not a word"])[-1]
        raise TernError(f"failed with exit code {done.returncode}: {last}")
    return done.stdout


def perplexity(program: Path, device: Choice, model: Path, clock: Clock) -> str:
    words = ["-m", str(model), "-f", str(TEXT), "-c", "256", "--chunks", "16"]
    found = re.search(r"Final estimate: PPL = (\S+ \+/- \S+)", output_of(program, words, device, clock))
    if found is None:
        raise TernError("llama-perplexity ended without an estimate")
    return found[1]


def speed(program: Path, device: Choice, model: Path, clock: Clock) -> str:
    words = ["-m", str(model), "-p", "512", "-n", "64", "-r", "3", "-o", "jsonl"]
    words += ["-dev", (device.devices or DEVICE).replace(",", "/")]
    text = output_of(program, words, device, clock)
    tests: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return ", ".join(
        f"{'prefill' if test['n_prompt'] else 'decode'} {test['avg_ts']:,.1f} t/s" for test in tests
    )


def rows(folder: Path, server: Path, gpus: list[Device], models: list[Path], clock: Clock) -> Iterator[Row]:
    """What was checked, of what, and the outcome."""
    for check in (check_host(server), *check_gpus(server)):
        yield check.name, "tern doctor", f"{check.status}: {check.found}"
    on_gpus = Choice(",".join(gpu.name for gpu in gpus), tuple(gpus))
    for model in models:
        yield (
            "next tokens against TERN0",
            model.name,
            attempt(lambda m=model: compare(server, on_gpus, m, clock)),
        )
    for name, what, measure in (
        ("llama-perplexity", "perplexity", perplexity),
        ("llama-bench", "speed", speed),
    ):
        program = folder / name
        for model in models:
            if not program.is_file():
                yield what, model.name, f"skipped: no {name} in {folder}"
                continue
            for device in (on_gpus, Choice()):
                outcome = attempt(lambda p=program, d=device, m=model, f=measure: f(p, d, m, clock))
                yield f"{what} on {device}", model.name, outcome


def attempt(measure: Any) -> str:
    """What it says, or why it does not."""
    try:
        return str(measure())
    except TernError as error:
        return f"**{error}**"


def as_table(about: list[Row]) -> str:
    def cell(text: str) -> str:
        return printable(" ".join(text.split())).replace("|", "\\|")

    lines = ["| what | of | outcome |", "|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in about)]) + "\n"


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.argument("models", nargs=-1, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--minutes", type=click.FloatRange(0.1), default=MINUTES, show_default=True, help="The most to take."
)
@click.option("--out", type=click.Path(path_type=Path), help="[default: gpu-check-DATE.md here]")
def main(folder: Path, models: tuple[Path, ...], minutes: float, out: Path | None) -> None:
    clock = Clock(minutes)
    try:
        server = find_program(str((folder / "llama-server" if folder.is_dir() else folder).absolute()))
        found = devices_of(server)
        gpus = list(best_gpus(found))
    except TernError as error:
        sys.exit(f"gpu_check.py: {error}")
    if not gpus:
        shown = "; ".join(f"{device}: {device.refusal}" for device in found if device.is_gpu)
        sys.exit(
            f"gpu_check.py: {server}: no GPU that runs ternary types{shown and ': '}{shown}; see docs/gpu.md"
        )
    now = datetime.datetime.now(datetime.UTC)
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    built = re.search(r"version: .+", said.stdout + said.stderr)
    about: list[Row] = [
        ("date", "", f"{now:%Y-%m-%d %H:%M} UTC"),
        ("ggml-tern", "", f"{version('ggml-tern')} on {platform.platform()}, {os.cpu_count()} processors"),
        ("llama.cpp", server.name, built[0] if built else "of unknown version"),
    ]
    for gpu in gpus:
        about.append(("GPU", gpu.name, f"{gpu.description}, {gpu.free >> 20} of {gpu.total >> 20} MiB free"))
    out = out or Path(f"gpu-check-{now:%Y-%m-%d}.md")
    for row in rows(server.parent, server, gpus, [*MODELS, *models], clock):
        click.echo(f"{row[0]}: {row[1]}: {row[2]}", err=True)
        about.append(row)
        # What there is counts, whatever comes then.
        out.write_text(f"# GPU check of {now:%Y-%m-%d}\n\n{as_table(about)}", encoding="utf-8")
    click.echo(as_table(about))
    click.echo(f"written to {out}", err=True)


if __name__ == "__main__":
    main()
