"""--cpu-mask and its like: the threads that llama.cpp makes of them are those that our kernels run in."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from ggml_tern.host import stock
from llama_server import LLAMA_SERVER, TINY, serving

#: Two processors that this process may use, if it may use two.
PROCESSORS = sorted(os.sched_getaffinity(0))[:2]


def mask(processors: list[int]) -> str:
    return hex(sum(1 << processor for processor in processors))


def affinities(pid: int) -> list[str]:
    """The processors that each thread of the process may run on, as the kernel writes them."""
    found = []
    for task in (Path("/proc") / str(pid) / "task").iterdir():
        try:
            status = (task / "status").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue  # it has ended
        found += [line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")]
    return found


def test_each_thread_has_a_processor_of_its_own() -> None:
    """--cpu-strict: thread by thread. llama-bench binds its main thread itself, whose children would stay on
    the same processor."""
    command = [
        *(str(stock.llama_cpp_dir() / "llama-bench"), "-m", str(TINY), "-dev", stock.DEVICE),
        *("-p", "0", "-n", "512"),
        *("-r", "1000", "-t", str(len(PROCESSORS)), "--cpu-mask", mask(PROCESSORS), "--cpu-strict", "1"),
    ]
    wanted = {str(processor) for processor in PROCESSORS}
    environment = stock.host_environment(stock=False)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as bench:
        try:
            deadline = time.monotonic() + 120
            while not wanted <= set(found := affinities(bench.pid)) and time.monotonic() < deadline:
                assert bench.poll() is None
                time.sleep(0.01)
            assert wanted <= set(found)
        finally:
            bench.kill()


def test_threads_that_were_there_before_the_mask() -> None:
    """llama-server computes once before it makes its pools, in threads that the main thread has not bound
    with itself."""
    processor = PROCESSORS[-1]
    with serving(
        TINY, "-c", "512", "-t", "2", "--cpu-mask", mask([processor]), command=LLAMA_SERVER
    ) as server:
        assert server.post("/completion", {"prompt": "Once", "n_predict": 4}).status == 200
        assert affinities(server.pid).count(str(processor)) >= 2
