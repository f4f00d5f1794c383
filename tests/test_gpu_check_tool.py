"""tools/gpu_check.py, as far as a machine without a GPU goes: what it measures, on the processor."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest

import gpu_check
from ggml_tern.errors import TernError
from ggml_tern.host.devices import Choice
from ggml_tern.host.stock import llama_cpp_dir
from llama_server import TINY
from reference import ROOT


def test_divergence() -> None:
    p = {1: math.log(0.5), 2: math.log(0.25), 3: math.log(0.125)}
    assert gpu_check.divergence(p, p) == 0
    # 3 and 4 are told by one side alone, and count as others.
    q = {1: math.log(0.25), 2: math.log(0.25), 4: math.log(0.4)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert gpu_check.divergence(p, q) == pytest.approx(expected)


def test_the_processor_agrees_with_itself() -> None:
    server = llama_cpp_dir() / "llama-server"
    said = gpu_check.compare(server, Choice(), TINY, gpu_check.Clock(5))
    assert said == f"KL mean 0.0e+00, largest 0.0e+00; same token {gpu_check.PIECES} of {gpu_check.PIECES}"


def test_perplexity_and_speed() -> None:
    folder, clock = llama_cpp_dir(), gpu_check.Clock(5)
    said = gpu_check.perplexity(folder / "llama-perplexity", Choice(), TINY, clock)
    assert re.fullmatch(r"\d+\.\d+ \+/- \d+\.\d+", said)
    said = gpu_check.speed(folder / "llama-bench", Choice(), TINY, clock)
    assert re.fullmatch(r"prefill [\d,.]+ t/s, decode [\d,.]+ t/s", said)
    with pytest.raises(TernError, match="failed with exit code"):
        gpu_check.speed(folder / "llama-bench", Choice(), Path("missing.gguf"), clock)
    with pytest.raises(TernError, match="the time was over"):
        gpu_check.speed(folder / "llama-bench", Choice(), TINY, gpu_check.Clock(0))


def test_a_llama_cpp_without_a_gpu(tmp_path: Path) -> None:
    command = [ROOT / "tools" / "gpu_check.sh", llama_cpp_dir()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "no GPU that runs ternary types" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_what_a_program_says_does_not_break_the_table() -> None:
    table = gpu_check.as_table([("a", "b|c", "two\nlines \x1b[31m")])
    assert table.splitlines()[2].count(" | ") == 2 and "\x1b" not in table and "b\\|c" in table
