"""What the build installs: the plug-in's symbols, the stock llama.cpp, and both in one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_tern.host import stock as host

REPOSITORY = Path(__file__).resolve().parent.parent


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_entries(binary: Path, tag: str) -> list[str]:
    """The values of one tag (NEEDED, SONAME, RUNPATH) in the dynamic section of an ELF file."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", output_of("readelf", "-dW", binary))


def run_python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter in which neither the plug-in nor a library folder is chosen."""
    dropped = {
        host.BACKEND_VARIABLE,
        host.DEVICE_VARIABLE,
        host.LLAMA_LIBRARY_VARIABLE,
        host.MTMD_LIBRARY_VARIABLE,
    }
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------------------------
# The plug-in
# ------------------------------------------------------------------------------------------------------------


def test_plugin_exports_what_the_loader_asks_for_and_nothing_else() -> None:
    symbols = output_of("nm", "-D", "--defined-only", host.plugin_path()).split("\n")
    assert {line.split()[-1] for line in symbols if line} == {"ggml_backend_init", "ggml_backend_score"}


def test_plugin_brings_no_ggml_of_its_own() -> None:
    needed = dynamic_entries(host.plugin_path(), "NEEDED")
    assert "libc.so.6" in needed
    assert not [name for name in needed if "ggml" in name or "llama" in name]
    undefined = output_of("nm", "-D", "--undefined-only", host.plugin_path())
    assert not re.search(r"\b(ggml|gguf|llama)_", undefined)


@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_other_systems_are_refused_at_once(system: str, tmp_path: Path) -> None:
    """In one line, before llama.cpp is fetched and compiled for a quarter of an hour."""
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(tmp_path), f"-DCMAKE_SYSTEM_NAME={system}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    said = " ".join(result.stderr.split())
    assert f"ggml-tern runs on Linux only so far, and this is {system}; docs/own-llama-cpp.md" in said


# ------------------------------------------------------------------------------------------------------------
# The stock llama.cpp
# ------------------------------------------------------------------------------------------------------------


def test_stock_libraries_are_there_once_and_need_nothing_from_elsewhere() -> None:
    folder = host.llama_cpp_dir()
    libraries = [path for path in folder.iterdir() if ".so" in path.suffixes]
    names = {path.name for path in libraries}
    assert {"libllama.so.0", "libggml.so.0", "libggml-base.so.0", "libggml-cpu.so.0"} <= names
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    for path in libraries:
        # A file under another name than its soname could be loaded a second time.
        assert dynamic_entries(path, "SONAME") in ([path.name], []), path
        assert dynamic_entries(path, "RUNPATH") == ["$ORIGIN"], path
        for needed in dynamic_entries(path, "NEEDED"):
            assert needed in names or not re.match(r"lib(ggml|llama|mtmd)", needed), f"{path} needs {needed}"
    forwarders = {path.name for path in libraries if not dynamic_entries(path, "SONAME")}
    assert forwarders == {"libllama.so", "libmtmd.so"}


def test_stock_tools_start_from_anywhere(tmp_path: Path) -> None:
    for name in ("llama-server", "llama-cli", "llama-completion", "llama-perplexity"):
        command = [str(host.llama_cpp_dir() / name), "--version"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "version: " in result.stdout + result.stderr


def test_licence_of_llama_cpp_goes_with_it() -> None:
    assert "MIT License" in (host.llama_cpp_dir() / "LICENSE").read_text()


# ------------------------------------------------------------------------------------------------------------
# llama-cpp-python
# ------------------------------------------------------------------------------------------------------------

LOADED = """
def loaded():
    lines = open("/proc/self/maps").read().split("\\n")
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/lib" in line and ".so" in line})
"""

USE_BINDINGS = """
import json, os, sys
import ggml_tern
if sys.argv[1] == "mtmd first":
    os.environ.update(ggml_tern.host.stock.library_variables())
    import llama_cpp.mtmd_cpp
ggml_tern.enable()
import llama_cpp.llama_cpp as host
first = host._lib.ggml_backend_dev_count()
ggml_tern.enable()
print(json.dumps({"devices": [first, host._lib.ggml_backend_dev_count()], "files": loaded()}))
"""


@pytest.mark.parametrize("order", ["llama first", "mtmd first"])
@pytest.mark.parametrize("libraries", ["default", "ours"])
def test_enable_loads_the_plugin_once_into_the_registry_that_libllama_uses(
    order: str, libraries: str
) -> None:
    ours = str(host.llama_cpp_dir())
    chosen = (
        {host.LLAMA_LIBRARY_VARIABLE: ours, host.MTMD_LIBRARY_VARIABLE: ours} if libraries == "ours" else {}
    )
    result = run_python(LOADED + USE_BINDINGS, order, **chosen)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    # The CPU device, and the plug-in's two.
    assert answer["devices"] == [3, 3]
    names = [Path(path).name for path in answer["files"]]
    assert names.count(host.PLUGIN_NAME) == 1
    if libraries == "ours":
        assert [name for name in names if name.startswith("libggml.so")] == ["libggml.so.0"]
        assert [name for name in names if name.startswith("libllama.so.")] == ["libllama.so.0"]


def test_enable_does_without_variables_of_the_user() -> None:
    """The first line of a program, with nothing exported: llama_cpp imports and has the device."""
    code = (
        "import ggml_tern; ggml_tern.enable()\n"
        "import llama_cpp\n"
        "library = llama_cpp.llama_cpp._lib\n"
        "print(library.ggml_backend_dev_by_name(b'TERN0') != 0, llama_cpp.llama_supports_gpu_offload())"
    )
    result = run_python(code)
    assert result.stdout.split() == ["True", "True"], result.stderr


def test_enable_says_why_it_cannot(tmp_path: Path) -> None:
    code = "import ggml_tern\ntry: ggml_tern.enable()\nexcept ggml_tern.TernError as error: print(error)"
    missing = run_python(code, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert "does not load its libraries" in missing.stdout
    assert host.LLAMA_LIBRARY_VARIABLE in missing.stdout
    without = run_python("import sys; sys.modules['llama_cpp'] = None\n" + code)
    assert "llama-cpp-python is not installed" in without.stdout


# ------------------------------------------------------------------------------------------------------------
# CMake
# ------------------------------------------------------------------------------------------------------------


def test_another_llama_cpp_must_be_a_source_tree(tmp_path: Path) -> None:
    # The environment's cmake need not be on the PATH of whoever runs the tests.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake is not None
    result = subprocess.run(
        [cmake, "-S", str(REPOSITORY), "-B", str(tmp_path / "build"), f"-DTERN_LLAMA_CPP_DIR={tmp_path}"],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "is no llama.cpp source tree" in " ".join(result.stderr.split())
    assert str(tmp_path) in result.stderr
