"""What ggml_tern._core does with arrays in the other byte order, threads that cannot start, and memory that
there is not."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggml_tern import _core

T = _core.TYPE_PQ2_0
N_IN = 256


def packed() -> Any:
    rng = np.random.default_rng(1)
    return _core.ternarize(T, rng.standard_normal((8, N_IN)).astype(np.float32))[0]


ROTATION = _core.Rotation(N_IN, 64)
X = np.ones((2, N_IN), np.float32)
Q = np.ones((3, 2, 32), np.float32)
KV = np.zeros((4, 1, 34), np.uint8)

#: Each takes one array of its dtype, in the machine's byte order.
CALLS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "weights f4": (X, lambda a: _core.ternarize(T, a)[0]),
    "weights f2": (X.astype(np.float16), lambda a: _core.ternarize(T, a)[0]),
    "weights u2": (np.full((2, N_IN), 0x3F80, np.uint16), lambda a: _core.ternarize(T, a)[0]),
    "scales": (np.ones((2, 2), np.float32), lambda a: _core.pack(T, np.ones((2, N_IN), np.int8), a)),
    "x of matmul": (X, lambda a: _core.matmul(T, packed(), a)),
    "x of a matrix": (X, lambda a: _core.TiledMatrix(T, packed()).matmul(a)),
    "x of squared ReLU": (X, _core.squared_relu_for_silu),
    "x of rotate": (X, ROTATION.rotate),
    "z of unrotate": (X, ROTATION.unrotate),
    "q": (Q, lambda a: _core.attention(a, 8, KV, 8, KV)),
    "mask": (np.zeros((3, 4), np.float16), lambda a: _core.attention(Q, 8, KV, 8, KV, mask=a)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_other_byte_order_is_refused(name: str) -> None:
    array, call = CALLS[name]
    call(array)
    swapped = array.astype(array.dtype.newbyteorder("S"))
    with pytest.raises(TypeError, match=r"must be in the machine's byte order, not [<>]"):
        call(swapped)
    # What the message advises.
    call(swapped.astype(swapped.dtype.newbyteorder("=")))


def run_limited(code: str, stack: int = 64 << 20) -> str:
    """What the code prints. limit(n) in it leaves the process n bytes of address space more than it has.
    stack: what a thread takes."""

    def limit_stacks() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))

    head = """
import resource
import numpy as np
from ggml_tern import _core

def limit(n):
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + n, resource.RLIM_INFINITY))

T = _core.TYPE_PQ2_0
"""
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, preexec_fn=limit_stacks
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fewer_threads_do_where_no_more_can_start() -> None:
    assert (
        run_limited("""
rng = np.random.default_rng(1)
w = rng.standard_normal((64, 512)).astype(np.float32)
x = rng.standard_normal((20, 512)).astype(np.float32)
q = rng.standard_normal((3, 2, 32)).astype(np.float32)
kv = rng.integers(0, 100, (600, 1, 34), dtype=np.uint8)

def results():
    packed, _ = _core.ternarize(T, w, n_threads=4)
    y = _core.matmul(T, packed, x, n_threads=4)
    return [a.tobytes() for a in (packed, y, _core.attention(q, 8, kv, 8, kv, n_threads=4))]

before = results()
limit(32 << 20)
print(results() == before)
""")
        == "True\n"
    )


def test_measurements_want_all_their_threads() -> None:
    assert (
        run_limited("""
limit(32 << 20)
m = _core.TiledMatrix(T, np.zeros((8, 34), np.uint8))
for call in (
    lambda: _core.read_bandwidth(3, n_bytes=1 << 18, seconds=0.01),
    lambda: _core.multiply_add_peak(3, seconds=0.01),
    lambda: _core.time_products([m], 1, n_threads=3, repeats=1),
):
    try:
        call()
    except RuntimeError as error:
        print(str(error).split("(")[0])
""")
        == 3 * "only 1 of 3 threads can be started \n"
    )


def test_memory_that_a_thread_lacks_is_an_exception() -> None:
    """In the caller's thread and in the others."""
    code = """
n_in = 64 << 20
trits = np.zeros((2, n_in), np.int8)
scales = np.ones((2, n_in // 128), np.float32)
limit((2 * n_in // 128 * 34) + (40 << 20))
for n_threads in (1, 2):
    try:
        _core.pack(T, trits, scales, n_threads)
    except MemoryError:
        print("MemoryError")
"""
    assert run_limited(code, stack=1 << 20) == 2 * "MemoryError\n"
