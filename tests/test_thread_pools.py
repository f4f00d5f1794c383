"""--cpu-mask and its like: the threads that llama.cpp makes of them are those that our kernels run in.

--poll is a number in the same pool as the rest, which a llama.cpp with OpenMP, as this one is, never reads:
nothing of it can be seen from outside.
"""

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


def threads(pid: int) -> list[tuple[str, int]]:
    """Of each thread of the process: the processors that it may run on, as the kernel writes them, and its
    scheduling policy."""
    found = []
    for task in (Path("/proc") / str(pid) / "task").iterdir():
        try:
            status = (task / "status").read_text(encoding="ascii", errors="replace")
            policy = os.sched_getscheduler(int(task.name))
        except OSError:
            continue  # it has ended
        found += [
            (line.split()[1], policy) for line in status.splitlines() if line.startswith("Cpus_allowed_list:")
        ]
    return found


def affinities(pid: int) -> list[str]:
    return [processors for processors, _ in threads(pid)]


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


def test_threads_that_were_there_before_the_pool() -> None:
    """llama-server computes once before it makes its pools, in threads that have neither its mask nor its
    priority from the main thread. --prio -1 is SCHED_BATCH, which any process may choose."""
    processor = PROCESSORS[-1]
    options = ("-c", "512", "-t", "2", "--cpu-mask", mask([processor]), "--prio", "-1")
    with serving(TINY, *options, command=LLAMA_SERVER) as server:
        assert server.post("/completion", {"prompt": "Once", "n_predict": 4}).status == 200
        assert threads(server.pid).count((str(processor), os.SCHED_BATCH)) >= 2
