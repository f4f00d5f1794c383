"""What the plug-in leaves in the process that loads it.

All of it or nothing, every page protected as it was, and a host that goes on when it unloads us.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import make_synthetic as synthetic
from ggml_tern.host.stock import host_environment, llama_cpp_dir, plugin_path
from reference import edited_hosts

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
TINY = synthetic.Shape(width=256, ffn=768, layers=2, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)
SLOTS = (31, 32, 36, 37, 38)

# In a host whose libraries are in FOLDER: what a process sees of its table of types and of its memory.
PRELUDE = (
    f"SLOTS = {SLOTS}"
    + """
import ctypes, json, os, sys
FOLDER, PLUGIN = sys.argv[1:3]
base = ctypes.CDLL(f"{FOLDER}/libggml-base.so.0")
ggml = ctypes.CDLL(f"{FOLDER}/libggml.so.0")
llama = ctypes.CDLL(f"{FOLDER}/libllama.so.0")
ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
ggml.ggml_backend_unload.argtypes, ggml.ggml_backend_unload.restype = [ctypes.c_void_p], None
base.ggml_type_name.restype = ctypes.c_char_p
base.ggml_get_type_traits.restype = ctypes.c_void_p
llama.llama_backend_init()

class Traits(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("block_size", ctypes.c_int64), ("interleave", ctypes.c_int64),
                ("size", ctypes.c_size_t), ("quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p),
                ("from_float", ctypes.c_void_p)]

def table():
    return [ctypes.string_at(base.ggml_get_type_traits(i), ctypes.sizeof(Traits)).hex() for i in range(40)]

def names():
    return {i: (base.ggml_type_name(i) or b"").decode() for i in SLOTS}

def protections():
    found = {}
    for line in open("/proc/self/maps"):
        if FOLDER in line:
            begin, end = (int(n, 16) for n in line.split()[0].split("-"))
            for page in range(begin, end, os.sysconf("SC_PAGESIZE")):
                found[page] = line.split()[1]
    return found

def load_model(path):
    import llama_cpp
    global quiet
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if model:
        llama_cpp.llama_model_free(model)
    return bool(model)
"""
)


def in_host(
    script: str, *arguments: object, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs PRELUDE and `script` in a new Python process on the llama.cpp in `folder`."""
    folder = folder or llama_cpp_dir()
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(folder), str(plugin_path()), *map(str, arguments)],
        env=os.environ | {"LLAMA_CPP_LIB_PATH": str(folder), "MTMD_CPP_LIB_PATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = synthetic.write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "ptq1_0", TINY)
    return path


# ---- unloading ----

UNLOAD = """
registry = ggml.ggml_backend_load(PLUGIN.encode())
assert registry
print(load_model(sys.argv[3]))
before = names()
ggml.ggml_backend_unload(registry)
print(names() == before, before)
print(load_model(sys.argv[3]))
assert ggml.ggml_backend_load(PLUGIN.encode())
print(load_model(sys.argv[3]))
"""


def test_a_host_that_unloads_us_goes_on(tiny: Path) -> None:
    """Its table of types and its import slots still point at us; without our devices it refuses our files."""
    loaded, names, unloaded, again = said(in_host(UNLOAD, tiny))
    assert (loaded, unloaded, again) == ("True", "False", "True")
    assert names.startswith("True"), names


# ---- all or nothing ----

TAKE_AND_LOAD = """
import mmap
taken = base.ggml_get_type_traits(int(sys.argv[3]))
protect = ctypes.CDLL(None).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
page = taken & -mmap.PAGESIZE
assert protect(page, taken + ctypes.sizeof(Traits) - page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
Traits.from_address(taken).name, Traits.from_address(taken).block_size = b"somebody's", 32
before = table(), protections()
print(ggml.ggml_backend_load(PLUGIN.encode()))
print(before == (table(), protections()))
print(load_model(sys.argv[4]))
"""


@pytest.mark.parametrize("slot", [31, 32, 37, 38])
def test_a_taken_type_slot_leaves_all_as_it_was(slot: int, tiny: Path) -> None:
    refused, unchanged, loads = said(in_host(TAKE_AND_LOAD, slot, tiny))
    assert (refused, unchanged, loads) == ("None", "True", "False")


LOAD = """
before = table(), protections()
registry = ggml.ggml_backend_load(PLUGIN.encode())
print(bool(registry))
print(before[0] == table(), before[1] == protections())
asked = getattr(ctypes.CDLL(None), "times_asked_for_writable_memory", None)
print(asked() if asked else "")
print(load_model(sys.argv[3]))
"""


def test_memory_that_the_system_does_not_let_be_written(tiny: Path, tmp_path: Path) -> None:
    """Whichever of the pages it is that cannot be made writable."""
    preload = tmp_path / "failing_mprotect.so"
    command = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, HERE / "failing_mprotect.c", "-o", preload, "-ldl"], check=True)
    loaded, table_and_pages, asked, loads = said(in_host(LOAD, tiny, LD_PRELOAD=str(preload)))
    assert (loaded, table_and_pages, loads) == ("True", "False True", "True")
    assert int(asked) >= 1, "the table of types is read-only"
    for fail_at in range(1, int(asked) + 1):
        done = in_host(LOAD, tiny, LD_PRELOAD=str(preload), FAIL_AT=str(fail_at))
        loaded, table_and_pages, _, loads = said(done)
        assert (loaded, table_and_pages, loads) == ("False", "True True", "False")
        ours = [line for line in done.stderr.splitlines() if line.startswith("ggml-tern: ")]
        assert len(ours) == 1 and "mprotect" in ours[0], done.stderr


# ---- how memory is protected ----

CHANGED = ("libggml-base.so.0", "libllama.so.0", "libllama-common.so.0")
EDITS: dict[str, dict[str, edited_hosts.Edit]] = {
    "as it is": {},
    "no RELRO": dict.fromkeys(CHANGED, edited_hosts.without_relro),
    "RELRO that ends inside a page": dict.fromkeys(CHANGED, edited_hosts.with_relro_that_ends_inside_a_page),
}


@pytest.mark.parametrize("kind", EDITS)
def test_every_page_has_the_protection_that_it_had(kind: str, tiny: Path, tmp_path: Path) -> None:
    folder = edited_hosts.copy_of_host(tmp_path, EDITS[kind])
    loaded, table_and_pages, _, loads = said(in_host(LOAD, tiny, folder=folder))
    assert (loaded, table_and_pages, loads) == ("True", "False True", "True")


# ---- hosts that read headers in another way ----


@pytest.mark.parametrize("n_gpu_layers", ["0", "99"])
def test_a_host_without_the_reader_by_callback(tiny: Path, tmp_path: Path, n_gpu_layers: str) -> None:
    """As those before ggml 0.20 or so: the translated header goes through a file in memory."""
    edit = edited_hosts.without_function("gguf_init_from_callback")
    folder = edited_hosts.copy_of_host(tmp_path, {"libggml-base.so.0": edit})
    done = bench(folder, tiny, "-ngl", n_gpu_layers)
    assert done.returncode == 0, done.stderr
    # And under a limit on the size of files, which ends a process that writes beyond it.
    done = bench(folder, tiny, "-ngl", n_gpu_layers, limit_kib=16)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert re.search(rf"ggml-tern: {tiny}: .*File too large.*ulimit -f", done.stderr), done.stderr


@pytest.mark.parametrize("n_gpu_layers", ["0", "99"])
def test_a_limit_on_the_size_of_files(tiny: Path, n_gpu_layers: str) -> None:
    """Nothing is written where the host reads by callback."""
    assert tiny.stat().st_size > 16 * 1024
    done = bench(llama_cpp_dir(), tiny, "-ngl", n_gpu_layers, limit_kib=16)
    assert done.returncode == 0, (done.returncode, done.stderr)


def bench(
    folder: Path, model: Path, *options: str, limit_kib: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A shortest run of llama-bench, in a process whose files may not grow beyond limit_kib."""
    import resource

    def limit() -> None:
        if limit_kib is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_kib * 1024,) * 2)

    return subprocess.run(
        [folder / "llama-bench", "-m", model, "-p", "4", "-n", "1", "-r", "1", *options],
        env=host_environment(False),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
        restore_signals=True,  # Python ignores SIGXFSZ
        check=False,
    )


# ---- import slots of every kind ----


def test_import_slots(tmp_path: Path) -> None:
    """The hook by itself, on libraries linked in every way: tests/import_slots/driver.cpp."""
    here = HERE / "import_slots"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC"]

    def build(compiler: str, target: str, *arguments: object) -> None:
        command = [*os.environ.get(*compilers[compiler]).split(), *flags, *map(str, arguments)]
        subprocess.run([*command, "-o", str(tmp_path / target)], check=True)

    def build_caller(target: str, callee: str, *options: str) -> None:
        link = ["-L", tmp_path, "-Wl,-rpath,$ORIGIN", f"-l{callee}"]
        build("c", f"lib{target}.so", "-shared", here / "caller.c", *options, *link)

    compilers = {"c": ("CC", "cc"), "c++": ("CXX", "c++")}
    for name in ("callee", "stranger"):
        build("c", f"lib{name}.so", "-shared", here / "callee.c")
    ways = {
        "lazy": ["-Wl,-z,lazy"],
        "lazy_norelro": ["-Wl,-z,lazy", "-Wl,-z,norelro"],
        "now": ["-Wl,-z,now", "-Wl,-z,relro"],
        "now_norelro": ["-Wl,-z,now", "-Wl,-z,norelro"],
        "noplt": ["-fno-plt", "-Wl,-z,now", "-Wl,-z,relro"],
    }
    for name, options in ways.items():
        build_caller(name, "callee", *options)
    build_caller("constructor", "callee", "-DCONSTRUCTOR", "-Wl,-z,now")
    build_caller("calls_stranger", "stranger")
    sources = [here / "driver.cpp", CSRC / "host/import_slots.cpp", CSRC / "host/memory_protection.cpp"]
    build("c++", "driver", "-std=c++17", f"-I{CSRC}", *sources, "-rdynamic", "-pthread", "-ldl")
    driver = tmp_path / "driver"
    done = subprocess.run([driver, tmp_path, *ways], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
