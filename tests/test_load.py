"""benchmarks/load_test.py for some seconds: load, clients that hang up, malformed requests, sudden ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import load_test
from llama_server import free_port
from seeds import seed_of

PHASES = ("requests", "speed", "tokens", "memory", "clients hang up", "malformed requests")
ENDS = ("SIGTERM during generation", "SIGKILL during generation")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, load_test.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


@pytest.mark.random_inputs
def test_a_server_bears_load_abuse_and_sudden_ends(tmp_path: Path) -> None:
    # In so short a time the server still takes what it will keep: its caches, and a stack for each thread.
    short = ("--clients", "4", "--seconds", "10", "--malformed", "60", "--flat", "500")
    seed = str(seed_of("malformed requests"))
    done = run(*short, "--seed", seed, "--report", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.removeprefix("good").strip().split(": ", 1) for line in done.stdout.splitlines())
    assert [*lines][:-1] == [*PHASES, *ENDS]
    (report,) = tmp_path.glob("*-load.md")
    text = report.read_text()
    assert all(f"| {name} | yes | {lines[name]} |" in text for name in (*PHASES, *ENDS))


def test_a_server_that_dies_under_load_is_no_success(tmp_path: Path) -> None:
    server = load_test.Server(load_test.TINY, [], tmp_path / "log", free_port())
    try:
        server.start()
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(load_test.load, server, n_clients=2, seconds=300)
            while server.tokens_made() == 0:
                time.sleep(0.1)
            server.stop()
            findings = {finding.name: finding for finding in job.result()}
    finally:
        server.stop()
    assert not findings["requests"].good
    assert re.search(r"ConnectError|RemoteProtocolError|ReadError", findings["requests"].found)
    assert not findings["tokens"].good


def test_memory_that_grows_is_not_called_flat() -> None:
    flat = load_test.MemorySamples([(i / 4, 50.0 + i % 3) for i in range(400)])
    leaking = load_test.MemorySamples([(i / 4, 50.0 + i / 40) for i in range(400)])
    warming_up = load_test.MemorySamples([(i / 4, 50.0 + min(i, 90)) for i in range(400)])
    assert flat.finding().good
    assert not leaking.finding().good
    assert leaking.slope == pytest.approx(0.1)
    assert warming_up.finding().good
    assert load_test.MemorySamples(leaking.samples, flat=20.0).finding().good
    assert not load_test.MemorySamples([(0.0, 50.0)]).finding().good
