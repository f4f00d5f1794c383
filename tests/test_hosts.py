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


@pytest.mark.parametrize("version", ["0.14.9", "0.9", "not a version", ""])
def test_version_that_is_too_old_or_none(compile_host: Compile, version: str) -> None:
    found, lines = load(compile_host(version, 2, *with_real_ggml()))
    assert found == "None"
    line = refusal(lines)
    assert version in line
    assert re.search(r"\b0\.15\b", line) and re.search(r"\b0\.27\b", line), line


@pytest.mark.parametrize("version", ["0.28.0", "0.29.3", "1.20.0", "9.9.9"])
def test_newer_version_whose_structures_fit(compile_host: Compile, version: str) -> None:
    """The structures decide, not the number: it is used, and said so once."""
    found, lines = load(compile_host(version, 2, *with_real_ggml()))
    assert found != "None"
    assert f"ggml {version}, which this version was not tried with" in refusal(lines)


STRUCTURES_OF_OURS = ["registry entry", "device", "buffer type", "buffer", "backend"]
STRUCTURES = ["DEVICE", "BACKEND", "BUFFER_TYPE", "BUFFER"]


@pytest.mark.parametrize("version", ["known", "0.99.0"])
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_with_a_function_more(compile_host: Compile, structure: str, at: int, version: str) -> None:
    """Whatever number the host gives itself: a table that has one function more is not read or filled."""
    claim = real_version() if version == "known" else version
    options = [f"-DFAKE_GROWN_{structure}={at}", *with_real_ggml()]
    found, lines = load(compile_host(claim, 2, *options))
    assert found == "None", lines
    assert f"another {structure.lower().replace('_', ' ')} layout" in refusal(lines)


@pytest.mark.parametrize("structure", STRUCTURES_OF_OURS)
def test_host_that_finds_other_things_in_our_structures(compile_host: Compile, structure: str) -> None:
    """Its own are as ours, as far as can be seen, and it reads ours otherwise."""
    options = [f"-DFAKE_MISREADS={STRUCTURES_OF_OURS.index(structure)}", *with_real_ggml()]
    found, lines = load(compile_host("0.99.0", 2, *options))
    assert found == "None", lines
    assert f"finds other things in a {structure} than" in refusal(lines)


def test_tensors_of_another_size(compile_host: Compile) -> None:
    found, lines = load(compile_host("0.99.0", 2, "-DFAKE_TENSOR_GROWTH=8", *with_real_ggml()))
    assert found == "None"
    assert "another tensor size" in refusal(lines)


def test_properties_in_another_order(compile_host: Compile) -> None:
    found, lines = load(compile_host("0.99.0", 2, "-DFAKE_PROPERTIES", *with_real_ggml()))
    assert found == "None"
    assert "other device properties" in refusal(lines)


def test_buffer_types_of_the_other_interface_version(compile_host: Compile) -> None:
    """A host that says 3, whose tables have the shape of 2."""
    found, lines = load(compile_host(real_version(), 3, *with_real_ggml()))
    assert found == "None"
    assert "registry" in refusal(lines) or "buffer type" in refusal(lines)


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
