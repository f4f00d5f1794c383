"""llama.cpp's own server tests (tools/server/tests of the pinned source) against its server with the plug-in.

    python benchmarks/run_server_tests.py                        # all that can run without downloads
    python benchmarks/run_server_tests.py --write unit/test_basic.py unit/test_completion.py

They download models from a hub; here they get the tiny Qwen3, ternary and rotated (server_tests_plugin.py).
What they say of the text that they expect then fails. So they run twice: with the plug-in and PTQ1_0, and
stock with the same weights in F16. What fails in both fails for the model; what fails with the plug-in alone
is ours, and makes the exit code 1. --write makes DATE-server-tests.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarking import ROOT, markdown, out_option, write_report
from ggml_tern.host import stock as host

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tools"))
from build_llama_cpp import Layout
from llama_server import free_port

TERNARY = ROOT / "models" / "tiny-qwen3" / "tiny-qwen3-ptq1_0.gguf"
#: A test of upstream waits for an answer for 10 minutes.
SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Outcome:
    """state: passed, failed or skipped. reason: a line of why it is not passed."""

    state: str
    reason: str = ""


def python_with_requirements(tests: Path, cache: Path) -> Path:
    """A virtual environment with what the tests ask for, made once: their versions are not ours."""
    folder = cache / "server-tests"
    python = folder / "venv" / "bin" / "python"
    wanted = (tests / "requirements.txt").read_text(encoding="utf-8") + "pytest-timeout\n"
    stamp = folder / "requirements.txt"
    if not python.exists() or not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        given = folder / "wanted.txt"
        given.write_text(wanted, encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", given], check=True)
        given.rename(stamp)
    return python


def run_tests(
    source: Path, python: Path, model: Path, stock: bool, selected: tuple[str, ...]
) -> dict[str, Outcome]:
    """Every test's outcome, by its name, of a run in a copy of the tests: they write beside themselves."""
    with tempfile.TemporaryDirectory(prefix="server-tests-") as folder:
        tests = Path(folder) / "tools" / "server" / "tests"
        shutil.copytree(source / "tools" / "server" / "tests", tests)
        (tests / "tmp").mkdir()
        (Path(folder) / "models").symlink_to(source / "models")
        report = Path(folder) / "report.xml"
        environment = host.host_environment(stock) | {
            "LLAMA_SERVER_BIN_PATH": str(host.llama_cpp_dir() / "llama-server"),
            "TERN_TEST_MODEL": str(model),
            "PORT": str(free_port()),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        options = [
            "-p",
            "server_tests_plugin",
            "-p",
            "no:cacheprovider",
            "-q",
            f"--timeout={SECONDS_PER_TEST}",
        ]
        command = [str(python), "-m", "pytest", *options, f"--junitxml={report}", *selected]
        done = subprocess.run(command, cwd=tests, env=environment, stdout=subprocess.PIPE, text=True)
        if not report.exists():
            raise click.ClickException(f"pytest failed:\n{done.stdout[-4000:]}")
        return dict(outcome_of(case) for case in ElementTree.parse(report).iter("testcase"))


def outcome_of(case: ElementTree.Element) -> tuple[str, Outcome]:
    name = f"{case.get('classname', '').removeprefix('unit.')}::{case.get('name')}"
    for tag, state in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            lines = (found.get("message") or "").splitlines() or ["no reason given"]
            return name, Outcome(state, lines[0])
    return name, Outcome("passed")


def plain_copy(folder: Path) -> Path:
    """The same weights for a llama.cpp without the plug-in."""
    made = folder / "tiny-qwen3-f16.gguf"
    tern = Path(sys.executable).parent / "tern"
    subprocess.run([tern, "repack", "--unrotate", TERNARY, made], check=True, stdout=subprocess.DEVNULL)
    return made


def file_of(name: str) -> str:
    return name.partition("::")[0].rpartition(".")[2] or name


def overview(ours: dict[str, Outcome], stock: dict[str, Outcome]) -> str:
    """A row for every file of tests."""
    columns = ("", "tests", "passed", "failed", "of them stock too", "skipped", "passed stock")
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in ours.items():
        for key in (file_of(name), "**all**"):
            counts[key][outcome.state] += 1
            counts[key]["both"] += outcome.state == stock[name].state == "failed"
            counts[key]["stock"] += stock[name].state == "passed"
    rows = [
        [key, str(sum(count[state] for state in ("passed", "failed", "skipped")))]
        + [str(count[state]) for state in ("passed", "failed", "both", "skipped", "stock")]
        for key, count in sorted(counts.items(), key=lambda item: (item[0] == "**all**", item[0]))
    ]
    return markdown(columns, rows)


def reasons(outcomes: dict[str, Outcome], names: list[str]) -> str:
    """A list of tests with why they did not pass, those of one reason and one function on one line."""
    groups: defaultdict[tuple[str, str], int] = defaultdict(int)
    for name in names:
        reason = re.sub(r"\s+", " ", outcomes[name].reason)[:160].replace("|", "\\|").replace("<", "&lt;")
        groups[name.partition("[")[0], reason] += 1
    return "\n".join(
        f"- `{name}`{f', {count} cases' if count > 1 else ''}: {reason}"
        for (name, reason), count in sorted(groups.items())
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--write", is_flag=True, help="Write DATE-server-tests.md.")
@out_option
@click.argument("selected", metavar="[TESTS]...", nargs=-1)
def main(write: bool, out: Path, selected: tuple[str, ...]) -> None:
    """Run llama.cpp's own server tests with the plug-in, and stock with the same weights in F16.

    TESTS are as pytest takes them, like unit/test_basic.py; all by default, which takes some ten minutes.
    """
    layout = Layout.from_environment()
    subprocess.run(
        [sys.executable, ROOT / "tools" / "build_llama_cpp.py", "fetch"], check=True, stdout=sys.stderr
    )
    python = python_with_requirements(layout.source / "tools" / "server" / "tests", layout.cache)
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_copy(Path(folder))
        ours = run_tests(layout.source, python, TERNARY, False, selected)
        stock = run_tests(layout.source, python, plain, True, selected)
    failed = [name for name, outcome in ours.items() if outcome.state == "failed"]
    for_the_model = [name for name in failed if stock[name].state == "failed"]
    for_us = [name for name in failed if stock[name].state != "failed"]
    skipped = [name for name, outcome in ours.items() if outcome.state == "skipped"]
    table = overview(ours, stock)
    click.echo(f"{table}\n\nFailed with the plug-in alone: {len(for_us)}\n{reasons(ours, for_us)}")
    if write:
        text = (
            "llama.cpp's own tests of its server (`tools/server/tests`), with the plug-in and the tiny\n"
            "Qwen3 in PTQ1_0 in the place of their smallest model, and stock with the same weights in F16.\n"
            "Written by `benchmarks/run_server_tests.py --write`."
        )
        lists = (
            ("Failed with the plug-in alone", ours, for_us),
            ("Failed both ways", ours, for_the_model),
            ("Skipped", ours, skipped),
        )
        parts = [f"## {title}: {len(names)}\n\n{reasons(of, names) or 'None.'}" for title, of, names in lists]
        found = "\n\n".join([table, *parts])
        click.echo(f"written: {write_report(out, 'server-tests', 'Server tests', text, [], found)}")
    sys.exit(1 if for_us else 0)


if __name__ == "__main__":
    main()
