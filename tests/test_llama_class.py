"""ggml_tern from Python: the class Llama, enable(), and programs that are left as they are."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

import build_llama_cpp
import ggml_tern
from ggml_tern.host.stock import LLAMA_LIBRARY_VARIABLE, llama_cpp_dir
from llama_server import TINY, free_port

# Everything here that runs a model does so in a process of its own: which modules are loaded matters.
GREEDY = """
llm = Llama(MODEL, verbose=False, n_ctx=256, n_threads=1, n_threads_batch=1)
print(llm("In the beginning", max_tokens=12, temperature=0)["choices"][0]["text"])
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code that finds the path of a ternary, rotated model in MODEL."""
    return subprocess.run(
        [sys.executable, *arguments, "-c", f"MODEL = {str(TINY)!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(code: str) -> str:
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def expected() -> str:
    """What the model writes, computed without one of our devices' layers."""
    text = answer("from ggml_tern import Llama\n" + GREEDY.replace("verbose", "n_gpu_layers=0, verbose"))
    assert len(text) > 20
    return text


def test_llama_computes_all_layers_on_our_device() -> None:
    done = python("from ggml_tern import Llama\nLlama(MODEL, n_ctx=128)")
    assert done.returncode == 0, done.stderr
    assert "offloaded 3/3 layers to GPU" in done.stderr and "TERN0" in done.stderr, done.stderr
    none = python("from ggml_tern import Llama\nLlama(MODEL, n_ctx=128, n_gpu_layers=0)")
    assert "offloaded 0/3 layers to GPU" in none.stderr, none.stderr


def test_llama_writes_what_other_ways_write(expected: str) -> None:
    assert answer("from ggml_tern import Llama\n" + GREEDY) == expected


def test_import_loads_nothing_that_is_not_needed() -> None:
    code = "import ggml_tern, sys\nprint('Llama' in dir(ggml_tern), 'llama_cpp' in sys.modules)"
    assert answer(code) == "True False"
    with pytest.raises(AttributeError, match="Lama"):
        ggml_tern.Lama  # noqa: B018


def test_llama_has_the_signature_of_llama_cpp() -> None:
    import llama_cpp

    ours, theirs = (inspect.signature(of).parameters for of in (ggml_tern.Llama, llama_cpp.Llama))
    assert list(ours) == list(theirs)
    different = [name for name in ours if ours[name] != theirs[name]]
    assert different == ["n_gpu_layers"] and ours["n_gpu_layers"].default == -1
    assert ggml_tern.Llama.__init__.__doc__ == llama_cpp.Llama.__init__.__doc__
    assert issubclass(ggml_tern.Llama, llama_cpp.Llama)


# A plug-in that is loaded late: after llama_cpp, and even after other models.
LATE = {
    "llama_cpp is imported already": "import llama_cpp",
    "it has loaded a model already": """
import ctypes, llama_cpp
stock = llama_cpp.Llama(STOCK, n_ctx=64, verbose=False)
stock("Once", max_tokens=2)
try:
    llama_cpp.Llama(MODEL, verbose=False)
except ValueError:
    pass
else:
    raise AssertionError("stock llama.cpp has loaded our types")
""",
}


@pytest.fixture(scope="module")
def stock_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in a type that stock llama.cpp knows."""
    path = tmp_path_factory.mktemp("stock") / "stock.gguf"
    tern = Path(sys.executable).parent / "tern"
    subprocess.run([tern, "repack", "--unrotate", TINY, path], check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.mark.parametrize("before", LATE.values(), ids=LATE.keys())
@pytest.mark.parametrize("way", ["ggml_tern.Llama", "ggml_tern.enable"])
def test_late(before: str, way: str, expected: str, stock_model: Path) -> None:
    code = f"STOCK = {str(stock_model)!r}\n{before}\nimport ggml_tern\n"
    if way == "ggml_tern.enable":
        code += "ggml_tern.enable()\nfrom llama_cpp import Llama\n"
    else:
        code += "from ggml_tern import Llama\n"
    assert answer(code + GREEDY) == expected


def test_without_llama_cpp_python() -> None:
    """Everything else works, and what does not names the command that mends it."""
    hide = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
def find_others(name, *arguments):
    return None if name.partition(".")[0] == "llama_cpp" else find(name, *arguments)
importlib.machinery.PathFinder.find_spec = find_others
import ggml_tern
from ggml_tern import *
"""
    for use in ("ggml_tern.Llama", "from ggml_tern import Llama", "ggml_tern.enable()"):
        done = python(f"{hide}\ntry:\n    {use}\nexcept ggml_tern.TernError as error:\n    print(error)")
        assert done.returncode == 0, done.stderr
        assert "llama-cpp-python is not installed" in done.stdout and "pip install" in done.stdout
        assert len(done.stdout.splitlines()) == 1


# ---- a llama.cpp whose backends are files of their own ----

CPU_BACKEND = """
#include "ggml-backend.h"
ggml_backend_reg_t ggml_backend_cpu_reg(void);
__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    return ggml_backend_cpu_reg();
}
"""


@pytest.fixture(scope="module")
def dynamic_backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a llama.cpp as GGML_BACKEND_DL makes it: a libggml with no backend, and one beside it."""
    folder = tmp_path_factory.mktemp("dynamic")
    for file in llama_cpp_dir().glob("lib*.so*"):
        if file.name != "libggml.so.0":
            (folder / file.name).symlink_to(file)
    ggml = build_llama_cpp.Layout.from_environment().source / "ggml"
    include = [f"-I{ggml}/include", f"-I{ggml}/src"]
    link = ["-shared", "-fPIC", f"-L{folder}", "-Wl,-rpath,$ORIGIN"]
    registry = [str(ggml / "src" / name) for name in ("ggml-backend-reg.cpp", "ggml-backend-dl.cpp")]
    cxx = [*os.environ.get("CXX", "c++").split(), "-std=c++17", "-O1", "-DNDEBUG", "-DGGML_BACKEND_DL"]
    out = ["-Wl,-soname,libggml.so.0", "-o", str(folder / "libggml.so.0"), "-l:libggml-base.so.0"]
    subprocess.run([*cxx, *include, *link, *registry, *out], check=True)
    cc = [*os.environ.get("CC", "cc").split(), *include, *link, "-x", "c", "-", "-x", "none"]
    out = ["-o", str(folder / "libggml-cpu.so"), "-l:libggml-cpu.so.0", "-l:libggml-base.so.0"]
    subprocess.run([*cc, *out], input=CPU_BACKEND, text=True, check=True)
    return folder


def test_backends_are_looked_for_beside_libllama(
    dynamic_backends: Path, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the working directory is; llama.cpp itself looks there, and beside the program."""
    monkeypatch.setenv(LLAMA_LIBRARY_VARIABLE, str(dynamic_backends))
    monkeypatch.chdir(tmp_path)
    assert answer("from ggml_tern import Llama\n" + GREEDY) == expected


def test_no_backend_beside_libllama(
    dynamic_backends: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in dynamic_backends.iterdir():
        if file.name != "libggml-cpu.so":
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv(LLAMA_LIBRARY_VARIABLE, str(tmp_path))
    done = python("import ggml_tern\nggml_tern.enable()")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ggml_tern.errors.TernError: {tmp_path}/libllama.so: "), done.stderr
    assert f"none for this processor is in {tmp_path}" in last


# ------------------------------------------------------------------------------------------------------------
# python -m ggml_tern
# ------------------------------------------------------------------------------------------------------------


def test_script_runs_as_it_is(tmp_path: Path, expected: str) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nimport beside\nfrom llama_cpp import Llama\n"
        f"MODEL = sys.argv[1]\n{GREEDY}"
        "print(json.dumps([__name__, beside.NAME, sys.argv]))\nsys.exit(7)"
    )
    command = [sys.executable, "-m", "ggml_tern", str(script), str(TINY), "-x", "--y"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    text, _, last = done.stdout.strip().rpartition("\n")
    assert text.strip() == expected
    assert json.loads(last) == ["__main__", "beside", [str(script), str(TINY), "-x", "--y"]]


def test_nothing_to_run() -> None:
    done = subprocess.run([sys.executable, "-m", "ggml_tern"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "usage" in done.stderr and "llama_cpp.server" in done.stderr


def test_openai_style_server_of_llama_cpp_python(expected: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "ggml_tern", "-m", "llama_cpp.server", "--model", str(TINY)]
    command += ["--port", str(port), "--n_gpu_layers", "-1", "--n_threads", "1", "--n_ctx", "256"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        deadline = time.monotonic() + 60
        while True:
            try:
                [model] = client.models.list().data
                break
            except openai.APIConnectionError:
                assert process.poll() is None and time.monotonic() < deadline, "it does not serve"
                time.sleep(0.1)
        question: dict[str, Any] = {"model": model.id, "prompt": "In the beginning", "max_tokens": 12}
        # Its default is another one than the class has.
        question["extra_body"] = {"repeat_penalty": 1.0}
        whole = client.completions.create(**question, temperature=0)
        assert whole.choices[0].text.strip() == expected
        pieces = [
            p.choices[0].text for p in client.completions.create(**question, temperature=0, stream=True)
        ]
        assert len(pieces) > 5 and "".join(pieces).strip() == expected
        chat = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Who was the king?"}], max_tokens=8
        )
        assert chat.choices[0].message.content
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
