"""``tern bench``: how fast is it, by itself and as a server?"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ggml_tern.cli.kv_type import KV_TYPE
from ggml_tern.tensors.names import printable

if TYPE_CHECKING:
    from ggml_tern.bench.llama_bench import Settings
    from ggml_tern.bench.report import Report
    from ggml_tern.bench.server import Load, Server

EPILOG = """
\b
Examples
  tern bench model.gguf
      A minute or two for a model of 0.6B.
  tern bench model.gguf --quick
      Seconds: one round, short tests, no context.
  tern bench model.gguf --context 0,4096,16384 --kv q8_0 --png speed.png
      How speed falls with the context.
  tern bench model-pq2_0.gguf --compare model-ptq1_0.gguf
      Both in turn, and the ratios of their medians.
  tern bench --serve http://localhost:8080 --concurrency 1,2,4,8
      What users of a running server get.
"""


class Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas: 0,2048. least: the smallest."""

    name = "counts"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.split(",")
        if not all(word.strip().isdecimal() and int(word) >= self.least for word in words):
            self.fail(f"{value!r}: give numbers from {self.least} on, with commas: 0,2048", param, ctx)
        # One after the other, each once.
        return tuple(dict.fromkeys(map(int, words)))


@click.command("bench", epilog=EPILOG)
@click.argument("model", metavar="[MODEL.gguf]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--compare",
    "others",
    metavar="OTHER.gguf",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Measure this too, in turn, and print ratios. May be given more than once.",
)
@click.option(
    "--context",
    "contexts",
    type=Counts(0),
    help="Tokens in the KV cache before each test.  [default: 0,2048; with --quick 0]",
)
@click.option(
    "--batch",
    "batches",
    type=Counts(1),
    help="Tokens of a prompt in one pass, as -ub of llama.cpp.  [default: 512]",
)
@click.option(
    "--prompt",
    "n_prompt",
    type=click.IntRange(1),
    help="Tokens of the prompt.  [default: 512; with --serve or --quick 128]",
)
@click.option(
    "--generate",
    "n_generate",
    type=click.IntRange(1),
    help="Tokens of the answer.  [default: 32; with --serve 64, with --quick 16]",
)
@click.option("--threads", type=click.IntRange(1), help="[default: as llama-bench, the cores]")
@click.option(
    "--kv",
    "kv_type",
    type=KV_TYPE,
    help="Type of the KV cache.  [default: f16]",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    help="Samples of each; medians are printed.  [default: 3; with --quick 1]",
)
@click.option(
    "--llama-bench",
    "program",
    metavar="PROGRAM",
    envvar="TERN_LLAMA_BENCH",
    show_envvar=True,
    default="llama-bench",
    help="Measure with this one, of a llama.cpp built for your GPU, say.  [default: the one that came along]",
)
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: a first impression.")
@click.option("--serve", "url", metavar="URL", help="Measure a running OpenAI-compatible server instead.")
@click.option(
    "--concurrency",
    type=Counts(1),
    help="With --serve: users at a time, each number for itself.  [default: 1,2,4,8]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    help="With --serve: the most for each number of users.  [default: 15; with --quick 5]",
)
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="With --serve: the most for each number of users.  [default: 64]",
)
@click.option("--api-key", envvar="LLAMA_API_KEY", show_envvar=True, help="With --serve: what it asks for.")
@click.option("--model-name", help="With --serve: the model to ask for.  [default: the first that it lists]")
@click.option("--json", "json_output", is_flag=True, help="Print all samples as JSON.")
@click.option("--md", "markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option(
    "--png",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also draw it. Needs matplotlib: pip install 'ggml-tern[plots]'",
)
def command(
    model: Path | None,
    others: tuple[Path, ...],
    contexts: tuple[int, ...] | None,
    batches: tuple[int, ...] | None,
    n_prompt: int | None,
    n_generate: int | None,
    threads: int | None,
    kv_type: str | None,
    rounds: int | None,
    program: str,
    quick: bool,
    url: str | None,
    concurrency: tuple[int, ...] | None,
    seconds: float | None,
    requests: int | None,
    api_key: str | None,
    model_name: str | None,
    json_output: bool,
    markdown: bool,
    png: Path | None,
) -> None:
    """Measure how fast a model runs, or a server answers.

    \b
    MODEL.gguf   stock llama-bench with the plug-in: prefill and decode, time to the first token, the
                 most memory, and how much of the machine's bandwidth decode uses.
    --serve URL  streams chats from a running server, several at a time: tokens/s for each user and for
                 all, and how long they wait.

    Ctrl-C ends it early and prints what was measured; the exit code is then 130. It is 1 if anything failed.
    """
    if (model is None) == (url is None):
        raise click.UsageError("give either MODEL.gguf or --serve URL")
    if json_output and markdown:
        raise click.UsageError("give either --json or --md")
    given: dict[str, dict[str, object]] = {
        "MODEL.gguf": {
            "--compare": others,
            "--context": contexts,
            "--batch": batches,
            "--threads": threads,
            "--kv": kv_type,
            "--rounds": rounds,
        },
        "--serve": {
            "--concurrency": concurrency,
            "--seconds": seconds,
            "--requests": requests,
            "--model-name": model_name,
        },
    }
    goes_with = "--serve" if url is None else "MODEL.gguf"
    for option, value in given[goes_with].items():
        if value:
            raise click.UsageError(f"{option} goes with {goes_with}")

    from ggml_tern.bench import llama_bench as bench
    from ggml_tern.bench import server as bench_server
    from ggml_tern.host.devices import choose
    from ggml_tern.host.run import find_program
    from ggml_tern.plots import check_plot

    if png is not None:
        check_plot(png)
    interrupts = Interrupts()
    if model is not None:
        settings = bench.Settings(
            contexts=contexts or ((0,) if quick else (0, 2048)),
            batches=batches or (512,),
            n_prompt=n_prompt or (128 if quick else 512),
            n_generate=n_generate or (16 if quick else 32),
            threads=threads,
            kv_type=kv_type or "f16",
            rounds=rounds or (1 if quick else 3),
        )
        path = find_program(program)
        settings = replace(settings, program=path, device=choose(path))
        if settings.device.said:
            click.echo(f"note: {printable(settings.device.said)}", err=True)
        report, code = bench_models([model, *others], settings, interrupts)
    else:
        assert url is not None
        load = bench_server.Load(
            n_prompt=n_prompt or 128,
            n_generate=n_generate or (16 if quick else 64),
            seconds=seconds or (5.0 if quick else 15.0),
            requests=requests or 64,
        )
        server = bench_server.open_server(url, api_key, model_name)
        report, code = bench_one_server(server, load, concurrency or (1, 2, 4, 8), interrupts)
    show(report, json_output, markdown, png)
    sys.exit(code)


class Interrupts:
    """Ctrl-C and a kill, which ends it alike, as KeyboardInterrupt.

    One that comes while Python finalizes an object is lost there, so `check` raises it again."""

    def __init__(self) -> None:
        self._number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._number is not None:
            raise KeyboardInterrupt

    @property
    def code(self) -> int:
        """The exit code, as a shell has it: 128 and the number of the signal."""
        return 0 if self._number is None else 128 + self._number


def _progress() -> Progress:
    """On stderr, and only where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    )


def bench_models(paths: Sequence[Path], settings: Settings, interrupts: Interrupts) -> tuple[Report, int]:
    """The report, and the exit code."""
    from ggml_tern.bench import llama_bench as bench

    contenders = [bench.open_model(path) for path in paths]
    settings, notes = bench.settle(contenders, settings)
    for note in notes:
        click.echo(f"note: {printable(note)}", err=True)
    results = bench.Results(settings, contenders)
    rounds = bench.schedule(results.contenders, settings)
    n_calls = sum(map(len, rounds))
    with _progress() as progress:
        task = progress.add_task("", total=sum(call.cost for calls in rounds for call in calls))
        number = 0

        def start(call: bench.Call) -> None:
            nonlocal number
            interrupts.check()
            number += 1
            name = printable(call.contender.name)
            what = f"{number} of {n_calls}: {name}, context {call.point.context:,}"
            progress.update(task, description=what)

        with contextlib.suppress(KeyboardInterrupt):
            bench.measure(results, rounds, start=start, done=lambda call: progress.advance(task, call.cost))
    return bench.report(results), interrupts.code


def bench_one_server(
    server: Server, load: Load, users: Sequence[int], interrupts: Interrupts
) -> tuple[Report, int]:
    """The report, and the exit code."""
    from ggml_tern.bench import server as bench_server

    levels: list[bench_server.Level] = []
    complete = False
    with _progress() as progress:
        task = progress.add_task("one request to warm up", total=len(users))

        def start(level: bench_server.Level) -> None:
            interrupts.check()
            what = f"{level.users} at a time, up to {load.seconds:g} s"
            progress.update(task, description=what, completed=len(levels) - 1)

        with contextlib.suppress(KeyboardInterrupt):
            bench_server.warm_up(server, load)
            complete = bench_server.measure(server, load, users, levels, start)
    code = interrupts.code
    if errors := [error for level in levels for error in level.errors]:
        click.echo(f"tern: {len(errors)} requests failed; the first: {printable(errors[0])}", err=True)
        code = code or 1
    return bench_server.report(server, load, levels, complete), code


def show(report: Report, json_output: bool, markdown: bool, png: Path | None) -> None:
    from ggml_tern.bench.report import as_markdown, print_report
    from ggml_tern.plots import write_plot

    if json_output:
        click.echo(json.dumps(report.data, indent=2))
    elif markdown:
        click.echo(as_markdown(report), nl=False)
    else:
        print_report(report, Console())
    if png is not None and any(panel.lines for panel in report.panels):
        write_plot(png, report.title, report.panels)
        click.echo(f"drawn into {png}", err=True)
