"""tern doctor: what it says must be true on any machine, so it hangs on no other program's last words."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ggml_tern.errors import TernError
from ggml_tern.host import binaries, doctor, stock
from tern_command import clean_environment, tern

#: A library of llama.cpp that a program cannot do without.
BASE = "libggml-base.so.0"


def examine(*arguments: str | Path, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by name of ``tern doctor --json``."""
    result = tern("doctor", "--json", *arguments, **variables)
    answer = json.loads(result.stdout)
    assert answer["ok"] == (result.returncode == 0)
    return result.returncode, {check["name"]: check for check in answer["checks"]}


def compile_c(target: Path, code: str, *options: str) -> Path:
    """A program, or a library, from a few lines of C."""
    command = [*os.environ.get("CC", "cc").split(), "-x", "c", "-", "-o", str(target), *options]
    subprocess.run(command, input=code, text=True, check=True)
    return target


@pytest.fixture
def own_llama_cpp(tmp_path: Path) -> Path:
    """The folder of a llama.cpp that somebody has built: a llama-bench with the libraries beside it."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in stock.llama_cpp_dir().iterdir():
        if ".so" in file.name:
            (folder / file.name).symlink_to(file)
    shutil.copy(stock.llama_cpp_dir() / "llama-bench", folder)
    return folder


# ---- what is sound ----


def test_a_sound_installation() -> None:
    code, checks = examine()
    assert code == 0, checks
    for name in (
        "package",
        "processor",
        "ggml_tern._core",
        "plug-in",
        "stock tools",
        "plug-in in llama-server",
        "plug-in in libllama",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert str(stock.plugin_path()) == checks["plug-in"]["found"]
    assert "TERN0" in checks["plug-in in llama-server"]["found"]
    assert stock.llama_cpp_version() in checks["stock tools"]["found"]


def test_for_people() -> None:
    """No line is broken within a word, a path above all; at any width the words are the same."""
    wide = tern("doctor", COLUMNS="1000")
    assert wide.returncode == 0, wide.stdout
    assert str(stock.plugin_path()) in wide.stdout
    words = wide.stdout.split()
    for width in (80, 120):
        narrow = tern("doctor", COLUMNS=str(width)).stdout
        # The free memory is another each time.
        assert len(narrow.split()) == len(words) and str(stock.plugin_path()) in narrow
        assert all(len(line) <= width or "/" in line.split()[-1] for line in narrow.splitlines()), narrow


def test_a_llama_cpp_of_ones_own(own_llama_cpp: Path) -> None:
    code, checks = examine(own_llama_cpp / "llama-bench")
    assert code == 0, checks
    assert f"{own_llama_cpp}/llama-bench: TERN0 is" in checks["plug-in in llama-bench"]["found"]


# ---- a plug-in that cannot be loaded ----


def empty(data: bytes) -> bytes:
    return b""


def text(data: bytes) -> bytes:
    return b"no library\n"


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def another_processor(data: bytes) -> bytes:
    return data[:18] + struct.pack("<H", 22) + data[20:]


def missing_library(data: bytes) -> bytes:
    assert data.count(b"libc.so.6\0") == 1
    return data.replace(b"libc.so.6\0", b"libc.so.9\0")


def missing_function(data: bytes) -> bytes:
    """It asks for a function that nobody has."""
    name = b"\0dladdr\0"
    assert data.count(name) == 1
    return data.replace(name, b"\0dladdX\0")


DAMAGES: dict[Callable[[bytes], bytes], str] = {
    empty: "is empty",
    text: "begins with b'no libra'",
    half: "is cut short",
    another_processor: r"is for another processor \(s390x\); this one is (x86-64|aarch64)",
    missing_library: "libc.so.9: cannot open shared object file",
    missing_function: "dladdX",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_plugin_that_cannot_be_loaded(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the file, whatever a host says of it, if anything."""
    program = stock.llama_cpp_dir() / "llama-server"
    plugin = tmp_path / "lib" / stock.PLUGIN_NAME
    plugin.parent.mkdir()
    plugin.write_bytes(damage(stock.plugin_path().read_bytes()))
    monkeypatch.setattr(stock, "install_dir", lambda: tmp_path)
    for check in (doctor.check_plugin_file(), doctor.check_host(program)):
        assert check.status is doctor.Status.BROKEN
        assert str(plugin) in check.found and check.mend
        assert re.search(DAMAGES[damage], check.found), check.found
    assert check.found.startswith(f"{program}: ")
    with pytest.raises(TernError, match=DAMAGES[damage]):
        stock.check_plugin_loads()


def test_python_says_what_is_wrong_with_the_plugin(tmp_path: Path) -> None:
    """Where llama.cpp's log is off, too."""
    plugin = tmp_path / "lib" / stock.PLUGIN_NAME
    plugin.parent.mkdir()
    plugin.write_bytes(half(stock.plugin_path().read_bytes()))
    code = (
        "import sys; from pathlib import Path; from ggml_tern.host import stock\n"
        "import llama_cpp.llama_cpp as llama\n"
        "stock.install_dir = lambda: Path(sys.argv[1])\n"
        "stock.load_plugin(llama._lib)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert f"{plugin}: is cut short" in result.stderr.splitlines()[-1]


# ---- hosts that say nothing ----

SILENT = "int main(void) { return 0; }"
#: A libggml that the plug-in does not understand, and that says nothing about it.
UNKNOWN_GGML = """
#include <dlfcn.h>
#include <stddef.h>
const char * ggml_version(void) { return "9.9.9"; }
size_t ggml_backend_reg_count(void) { return 1; }
void * ggml_backend_dev_by_name(const char * name) { return NULL; }
void ggml_backend_load_all_from_path(const char * path) {}
void * ggml_backend_load(const char * path) {
    void * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void * (*init)(void) = (void * (*)(void))dlsym(handle, "ggml_backend_init");
    void * volatile reg = init();
    return reg;
}
"""
AS_NEEDED = "-Wl,--no-as-needed"


def test_a_host_that_the_plugin_refuses(tmp_path: Path) -> None:
    """The reason is the plug-in's, for the host ends without a word."""
    options = ("-shared", "-fPIC", "-Wl,-soname,libggml.so.0", "-Wl,-rpath,$ORIGIN")
    compile_c(tmp_path / "libggml.so.0", UNKNOWN_GGML, *options)
    program = tmp_path / "llama-silent"
    compile_c(program, SILENT, f"-L{tmp_path}", AS_NEEDED, "-l:libggml.so.0", "-Wl,-rpath,$ORIGIN")
    code, checks = examine(program)
    found = checks["plug-in in llama-silent"]["found"]
    assert code == 1
    assert found.startswith(f"{program}: does not get the device TERN0: ggml-tern: ") and "9.9.9" in found


def test_a_host_that_does_not_ask_for_backends(own_llama_cpp: Path) -> None:
    """The plug-in would go in, and the program does not let it."""
    program = own_llama_cpp / "llama-silent"
    options = (f"-L{own_llama_cpp}", AS_NEEDED, "-l:libllama.so.0", "-Wl,-rpath,$ORIGIN")
    compile_c(program, SILENT, *options, "-Wl,--allow-shlib-undefined")
    for host in (program, "llama-quantize"):
        code, checks = examine(host)
        found = checks[f"plug-in in {Path(host).name}"]["found"]
        assert code == 1 and "the plug-in goes into its libllama.so.0" in found, found


def test_a_host_without_shared_ggml() -> None:
    code, checks = examine("/bin/true")
    assert code == 1
    assert "needs no shared libggml" in checks["plug-in in true"]["found"]


def test_a_host_that_lacks_a_library(own_llama_cpp: Path) -> None:
    (own_llama_cpp / BASE).unlink()
    code, checks = examine(own_llama_cpp / "llama-bench")
    assert code == 1
    assert f"does not start: {BASE} is not found" in checks["plug-in in llama-bench"]["found"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(empty, "is empty"), (half, "is cut short"), (another_processor, "another processor")],
)
def test_a_host_that_is_damaged(
    damage: Callable[[bytes], bytes], complaint: str, own_llama_cpp: Path
) -> None:
    program = own_llama_cpp / "llama-bench"
    program.write_bytes(damage(program.read_bytes()))
    code, checks = examine(program)
    found = checks["plug-in in llama-bench"]["found"]
    assert code == 1 and found.startswith(f"{program}: ") and complaint in found, found


def test_a_host_that_is_a_script(own_llama_cpp: Path) -> None:
    """One that starts a llama.cpp program is as good as that; of others it is said that they are scripts."""
    script = own_llama_cpp / "run-it"
    script.write_text(f'#!/bin/sh\nexec "{own_llama_cpp}/llama-bench" "$@"\n')
    script.chmod(0o755)
    assert examine(script)[0] == 0
    script.write_text("#!/bin/sh\nexit 3\n")
    code, checks = examine(script)
    assert code == 1 and "is a script" in checks["plug-in in run-it"]["found"]


def test_an_unknown_program() -> None:
    result = tern("doctor", "no-such-program")
    assert result.returncode == 1
    assert result.stderr.startswith("tern: no-such-program: ")


def test_a_path_is_that_program_and_no_other(
    own_llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """./NAME is the file of this folder, whatever of its name is on the PATH."""
    here = tmp_path / "here"
    here.mkdir()
    shutil.copy("/bin/true", here / "llama-bench")
    path = f"{own_llama_cpp}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.chdir(here)
    code, checks = examine("./llama-bench", PATH=path)
    found = checks["plug-in in llama-bench"]["found"]
    assert code == 1 and found.startswith(f"{here}/llama-bench: needs no shared libggml"), found
    monkeypatch.chdir(own_llama_cpp)
    code, checks = examine("./llama-bench", PATH=f"{here}{os.pathsep}{path}")
    found = checks["plug-in in llama-bench"]["found"]
    assert code == 0 and found.startswith(f"{own_llama_cpp}/llama-bench: TERN0"), found


# ---- what stands in the environment ----


def test_a_variable_that_names_nothing() -> None:
    code, checks = examine(GGML_BACKEND_PATH="/nowhere/libggml-tern.so")
    assert code == 1
    assert checks["GGML_BACKEND_PATH"]["status"] == "broken"
    assert "tern env" in checks["GGML_BACKEND_PATH"]["mend"]


def test_other_choices_are_noted() -> None:
    code, checks = examine(GGML_BACKEND_PATH="/bin/sh", LLAMA_ARG_DEVICE="CUDA0")
    assert code == 0
    assert checks["GGML_BACKEND_PATH"]["status"] == "note"
    assert checks["LLAMA_ARG_DEVICE"]["status"] == "note"


@pytest.mark.parametrize("variables", [{}, {"GGML_BACKEND_PATH": "/bin/sh"}])
def test_a_device_without_the_plugin(variables: dict[str, str]) -> None:
    """Every program then ends with that message, as is shown; with both variables none does."""
    code, checks = examine(LLAMA_ARG_DEVICE="TERN0", **variables)
    check = checks["LLAMA_ARG_DEVICE"]
    assert code == 1 and check["status"] == "broken"
    assert "invalid device: TERN0" in check["found"] and "GGML_BACKEND_PATH" in check["found"]
    program = [str(stock.llama_cpp_dir() / "llama-server"), "--version"]
    environment = clean_environment(LLAMA_ARG_DEVICE="TERN0", **variables)
    result = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "invalid device: TERN0" in result.stderr
    both = {"LLAMA_ARG_DEVICE": "TERN0", "GGML_BACKEND_PATH": str(stock.plugin_path())}
    assert examine(**both)[0] == 0
    assert subprocess.run(program, env=clean_environment(**both), timeout=60).returncode == 0


@pytest.fixture
def clashing(tmp_path: Path) -> Path:
    """A folder with one library of a llama.cpp that is another than ours in everything."""
    folder = tmp_path / "another llama.cpp"
    folder.mkdir()
    compile_c(folder / BASE, "int nothing;", "-shared", "-fPIC", f"-Wl,-soname,{BASE}")
    return folder


def test_another_llama_cpp_in_the_library_path(clashing: Path, own_llama_cpp: Path) -> None:
    """The variable and the library are named where they are in the way; programs that came along run."""
    variables = {"LD_LIBRARY_PATH": str(clashing)}
    code, checks = examine(**variables)
    for name in ("stock tools", "plug-in in llama-server", "plug-in in libllama"):
        assert checks[name]["status"] == "ok", checks[name]
    note = checks["LD_LIBRARY_PATH"]
    assert note["status"] == "note"
    bindings = next(check for name, check in checks.items() if name.startswith("llama-cpp-python"))
    assert code == 1 and bindings["status"] == "broken"
    _, checks = examine(own_llama_cpp / "llama-bench", **variables)
    host = checks["plug-in in llama-bench"]
    assert host["status"] == "broken"
    for found in (note["found"], bindings["found"], host["found"]):
        assert f"LD_LIBRARY_PATH holds another llama.cpp: {BASE} comes from {clashing} instead of" in found
    assert all(str(clashing) in check["mend"] for check in (host, note, bindings))

    shown = tern("run", "llama-bench", "--list-devices", **variables)
    assert shown.returncode == 0 and "TERN0: " in shown.stdout
    assert tern("run", "--stock", "llama-server", "--version", **variables).returncode == 0


@pytest.mark.parametrize("library", [BASE, "libllama.so.0"])
def test_another_llama_cpp_in_the_library_path_of_python(library: str, clashing: Path) -> None:
    """Whether a function of it is missing when it is loaded, or when it is called."""
    if library != BASE:
        compile_c(clashing / library, "int nothing;", "-shared", "-fPIC", f"-Wl,-soname,{library}")
        (clashing / BASE).unlink()
    for code in ("from ggml_tern import Llama", "import ggml_tern; ggml_tern.enable()"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=clean_environment(LD_LIBRARY_PATH=str(clashing)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        last = result.stderr.splitlines()[-1]
        assert last.startswith("ggml_tern.errors.TernError: "), result.stderr
        assert f"LD_LIBRARY_PATH holds another llama.cpp: {library} comes from {clashing}" in last


def test_a_library_path_without_llama_cpp_is_no_clash(own_llama_cpp: Path, tmp_path: Path) -> None:
    """Nor is one that is the program's only way to its libraries."""
    assert "LD_LIBRARY_PATH" not in examine(LD_LIBRARY_PATH=str(tmp_path))[1]
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(own_llama_cpp / "llama-bench", alone)
    assert examine(alone / "llama-bench", LD_LIBRARY_PATH=str(own_llama_cpp))[0] == 0


# ---- processors ----

#: As Linux shows a processor of 2008.
NEHALEM = """processor\t: 0
model name\t: Intel Core i7 9xx (Nehalem Class Core i7)
flags\t\t: fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm
"""


def on_a_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, macros: str) -> doctor.Check:
    """The check on Nehalem of an installation whose llama.cpp was compiled for these instruction sets."""
    (tmp_path / "cpuinfo").write_text(NEHALEM)
    (tmp_path / "CPU").write_text(macros)
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(doctor, "llama_cpp_dir", lambda: tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return doctor.check_cpu()


def test_a_processor_without_avx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which instruction sets are missing, and which build helps."""
    macros = "AVX AVX2 AVX512F AVX512VNNI BMI FMA LZCNT SSE SSE2 SSE2_MATH SSE3 SSE4_1 SSE4_2 SSSE3 POPCNT\n"
    check = on_a_processor(monkeypatch, tmp_path, macros)
    assert check.status is doctor.Status.BROKEN and "Nehalem" in check.found
    assert "it has no avx, fma, avx2, bmi1, abm, avx512f, avx512_vnni, which" in check.found
    assert "for this processor: pip install" in check.mend
    ended = doctor.Outcome(-4, "").failure()
    assert "lacks (SIGILL); it has no avx, avx2, fma, f16c" in ended

    check = on_a_processor(monkeypatch, tmp_path, "SSE SSE2 SSE3 SSE4_1 SSE4_2 SSSE3 POPCNT\n")
    assert check.status is doctor.Status.NOTE
    assert "it has no avx, avx2" in check.found and "portable kernels" in check.mend


def test_what_was_built_here_is_for_this_processor() -> None:
    assert doctor.lacking(doctor.built_for()) == ""
    if os.uname().machine == "x86_64":
        assert "sse4_2" in doctor.built_for()


# ---- reading programs and libraries ----


def test_any_damage_to_a_program_is_one_clear_error(tmp_path: Path) -> None:
    """Cut anywhere and with any bytes changed in its headers, it is read, or refused with its name."""
    data = (stock.llama_cpp_dir() / "libggml.so.0").read_bytes()
    path = tmp_path / "libggml.so.0"
    random.seed(7)
    for i in range(600):
        changed = bytearray(data[: random.randrange(len(data))] if i % 2 else data)
        for _ in range(random.randrange(1, 5)):
            if changed:
                at = random.randrange(min(len(changed), 1024))
                changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        path.write_bytes(changed)
        try:
            found = binaries.read(path)
        except TernError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            assert found.path == path


def test_libraries_are_those_that_the_loader_takes() -> None:
    program = binaries.read(stock.llama_cpp_dir() / "llama-server")
    assert program.uses_llama_cpp and program.interpreter is not None
    libraries = binaries.libraries_of(program, clean_environment())
    assert not libraries.trouble
    for name in ("libllama.so.0", "libggml.so.0", BASE):
        assert libraries.of_llama_cpp[name] == stock.llama_cpp_dir() / name
    assert "libc.so.6" in libraries.found and "libc.so.6" not in libraries.of_llama_cpp
    assert not binaries.read(Path("/bin/true")).uses_llama_cpp
