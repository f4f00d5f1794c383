"""A header costs a small multiple of its bytes in memory, whatever it says: by itself, and in a host.

Each is read in a process that may not take more; without the bound, the first took 3.2 GB.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.make_corpus import header, key, rotated_alike, string
from ggml_tern.host import stock

MB = 1 << 20
#: What a process may take for a header of less than 1 MB, in writable memory.
ALLOWED = 64 * MB

PRELUDE = """
import os, re, resource, sys
path, allowed = sys.argv[1], int(sys.argv[2])

def limit():
    now = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + allowed, resource.RLIM_INFINITY))
"""
BY_ITSELF = """
import numpy  # which takes memory of its own
from ggml_tern import _core
limit()
for read in (_core.read_gguf_header, _core.read_hadamard):
    try:
        read(path)
        print("read")
    except _core.FormatError as error:
        print(error)
"""
IN_A_HOST = """
from ggml_tern.host import stock
stock.enable()
import llama_cpp
parameters = llama_cpp.llama_model_default_params()
parameters.vocab_only = True
limit()
model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
print("refused" if not model else "loaded")
"""


def run(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(path), str(ALLOWED)],
        env=os.environ | stock.library_variables(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def grown(path: Path, data: bytes, data_bytes: int) -> Path:
    """A sparse file of the header and so much data."""
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(len(data) + data_bytes)
    return path


N_NAMES, WIDTH = 4000, 199_936  # 4000 copies of so many floats are 3.2 GB


def test_names_that_want_the_same_signs(tmp_path: Path) -> None:
    data = rotated_alike(N_NAMES, WIDTH)
    assert len(data) < MB
    path = grown(tmp_path / "alike.gguf", data, N_NAMES * WIDTH * 34 // 128 + 32 * N_NAMES)
    assert run(BY_ITSELF, path).stdout.splitlines() == ["read", "read"]
    done = run(IN_A_HOST, path)
    assert (
        done.stdout.splitlines()[-1] == "refused"
    )  # the model's own numbers are missing, which the host says
    assert "bad_alloc" not in done.stderr


def test_names_whose_data_is_not_there(tmp_path: Path) -> None:
    """What is cheap to check comes first."""
    path = grown(tmp_path / "short.gguf", rotated_alike(N_NAMES, WIDTH), 0)
    lines = run(BY_ITSELF, path).stdout.splitlines()
    assert len(lines) == 2 and all("beyond the 0 bytes of data in the file" in line for line in lines), lines
    done = run(IN_A_HOST, path)
    assert "beyond the 0 bytes of data in the file" in done.stderr


def many_keys(size: int) -> bytes:
    return header([key(f"{i:05x}", 7, b"\x01") for i in range(size // 18)], [])


def many_strings(size: int) -> bytes:
    count = size // 10
    return header([key("k", 9, struct.pack("<IQ", 8, count) + string("ab") * count)], [])


def many_booleans(size: int) -> bytes:
    return header([key("k", 9, struct.pack("<IQ", 7, size) + b"\x01" * size)], [])


def many_tensors(size: int) -> bytes:
    entry = struct.Struct("<Q5sIQIQ")
    count = size // entry.size
    return header([], [entry.pack(5, b"%05x" % i, 1, 8, 0, 32 * i) for i in range(count)])


@pytest.mark.parametrize("make", [many_keys, many_strings, many_booleans, many_tensors])
def test_many_of_the_smallest_entries(make: Callable[[int], bytes], tmp_path: Path) -> None:
    data = make(600_000)
    assert len(data) < MB
    path = grown(tmp_path / "many.gguf", data + bytes(-len(data) % 32), 32 * 600_000 // 37)
    assert run(BY_ITSELF, path).stdout.splitlines() == ["read", "read"]
    assert "bad_alloc" not in run(IN_A_HOST, path).stderr
