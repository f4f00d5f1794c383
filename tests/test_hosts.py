"""A host that the plug-in does not understand is refused with one clear line, and left as it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ggml_tern.host.stock import llama_cpp_dir, plugin_path

FAKE_HOST = Path(__file__).parent / "fake_host.c"
PRINT_VERSION = """
import ctypes, sys
version = ctypes.CDLL(sys.argv[1]).ggml_version
version.restype = ctypes.c_char_p
print(version().decode())
"""
# Prints what the fake host's loader got: None for NULL.
LOAD_FAKE = """
import ctypes, sys
host = ctypes.CDLL(sys.argv[1])
host.fake_host_load.argtypes = [ctypes.c_char_p]
host.fake_host_load.restype = ctypes.c_void_p
print(host.fake_host_load(sys.argv[2].encode()))
"""
# The registry's loader of a real host, after a type slot of ours has been taken by somebody else.
LOAD_WITH_TAKEN_SLOT = """
import ctypes, mmap, sys

class Traits(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("block_size", ctypes.c_int64), ("interleave", ctypes.c_int64),
                ("size", ctypes.c_size_t), ("quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p),
                ("from_float", ctypes.c_void_p)]

folder, plugin, slot = sys.argv[1:]
base = ctypes.CDLL(f"{folder}/libggml-base.so.0")
ggml = ctypes.CDLL(f"{folder}/libggml.so.0")
base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
traits = base.ggml_get_type_traits(int(slot))
address = ctypes.addressof(traits.contents)
page = address & -mmap.PAGESIZE
protect = ctypes.CDLL(None).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert protect(page, address + ctypes.sizeof(Traits) - page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
taken = (b"somebody's", 32, 0, 18, True)
traits.contents.name, traits.contents.block_size, _, traits.contents.size, traits.contents.quantized = taken
ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
ggml.ggml_backend_load.restype = ctypes.c_void_p
reg = ggml.ggml_backend_load(plugin.encode())
assert traits.contents.name == taken[0] and traits.contents.block_size == taken[1]
print(reg)
"""

Compile = Callable[..., Path]


@pytest.fixture
def compile_host(tmp_path: Path) -> Compile:
    def compile_host(version: str, api_version: int, *options: str) -> Path:
        """The fake host, claiming to be that llama.cpp."""
        target = tmp_path / "host"
        command = [*os.environ.get("CC", "cc").split(), "-O1", "-Wall", "-Wextra", "-Werror"]
        command += [f'-DFAKE_VERSION="{version}"', f"-DFAKE_API_VERSION={api_version}"]
        subprocess.run([*command, str(FAKE_HOST), "-o", str(target), *options, "-ldl"], check=True)
        return target

    return compile_host


def with_real_ggml() -> list[str]:
    """Options for a host that is the pinned llama.cpp in all but what it claims."""
    folder = str(llama_cpp_dir())
    libraries = ["-Wl,--no-as-needed", "-l:libggml.so.0", "-l:libggml-base.so.0"]
    return ["-shared", "-fPIC", f"-L{folder}", f"-Wl,-rpath,{folder}", *libraries]


def real_version() -> str:
    return run(sys.executable, "-c", PRINT_VERSION, llama_cpp_dir() / "libggml-base.so.0")[0]


def run(*command: str | Path) -> tuple[str, list[str]]:
    """stdout, and the lines of stderr, of a command that must end well."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, f"exit code {result.returncode}: {result.stderr}"
    return result.stdout.strip(), result.stderr.splitlines()


def load(host: Path) -> tuple[str, list[str]]:
    return run(sys.executable, "-c", LOAD_FAKE, host, plugin_path())


def refusal(lines: list[str]) -> str:
    """The plug-in's one line."""
    assert len(lines) == 1, lines
    assert lines[0].startswith("ggml-tern: "), lines[0]
    return lines[0]


def test_honest_claim_is_accepted(compile_host: Compile) -> None:
    """So that the refusals below are for what the host claims and nothing else."""
    found, lines = load(compile_host(real_version(), 2, *with_real_ggml()))
    assert found != "None"
    assert lines == []


@pytest.mark.parametrize("version", ["9.9.9", "0.27.0", "0.14.9", "1.20.0", "not a version", ""])
def test_unknown_version(compile_host: Compile, version: str) -> None:
    found, lines = load(compile_host(version, 2, *with_real_ggml()))
    assert found == "None"
    line = refusal(lines)
    assert version in line
    assert re.search(r"\b0\.15\b", line) and re.search(r"\b0\.26\b", line), line


@pytest.mark.parametrize("api_version", [1, 4, 17])
def test_unknown_api_version(compile_host: Compile, api_version: int) -> None:
    found, lines = load(compile_host(real_version(), api_version, *with_real_ggml()))
    assert found == "None"
    assert f"API version {api_version}" in refusal(lines)


def test_known_version_that_lacks_functions(compile_host: Compile) -> None:
    found, lines = load(compile_host(real_version(), 2, "-shared", "-fPIC"))
    assert found == "None"
    assert re.search(r"\bg(gml|guf)_\w+", refusal(lines)), "the line names no function"


def test_statically_linked_host(compile_host: Compile) -> None:
    found, lines = run(compile_host(real_version(), 2, "-DFAKE_STATIC"), plugin_path())
    assert found == "refused"
    line = refusal(lines)
    assert "static" in line and "shared" in line, line


@pytest.mark.parametrize("slot", [31, 32, 37, 38])
def test_type_slot_that_is_taken(slot: int) -> None:
    command: list[str | Path] = [sys.executable, "-c", LOAD_WITH_TAKEN_SLOT]
    found, lines = run(*command, llama_cpp_dir(), plugin_path(), str(slot))
    assert found == "None"
    ours = [line for line in lines if line.startswith("ggml-tern: ")]
    assert str(slot) in refusal(ours)
