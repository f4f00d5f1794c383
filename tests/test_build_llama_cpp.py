"""tools/build_llama_cpp.py on a source tree of a few lines: real tar, cmake and ninja, in seconds."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import build_llama_cpp as script

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = Path(script.__file__)

LIBRARY = "int answer(void) { return 42; }\n"
PROGRAM = "int answer(void);\nint main(void) { return answer() - 42; }\n"
CMAKE = """
cmake_minimum_required(VERSION 3.21)
project(tiny C CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(ggml SHARED library.c)
set_target_properties(ggml PROPERTIES VERSION 0.1.2 SOVERSION 0)
foreach(tool llama-server llama-cli llama-completion llama-bench llama-perplexity llama-quantize
             llama-gguf-split test-backend-ops)
  add_executable(${tool} program.c)
  target_link_libraries(${tool} ggml)
endforeach()
"""

# A web page without dependencies: npm has nothing to fetch.
PACKAGE = """{
  "name": "page",
  "version": "1.0.0",
  "scripts": {"build": "npm run part && node make.js", "part": "node --version"}
}
"""
PACKAGE_LOCK = """{
  "name": "page",
  "version": "1.0.0",
  "lockfileVersion": 3,
  "packages": {"": {"name": "page", "version": "1.0.0"}}
}
"""
MAKE_PAGE = """
require("fs").writeFileSync(process.env.LLAMA_UI_OUT_DIR + "/index.html", process.version);
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "a cache"


@pytest.fixture
def run(cache: Path, tmp_path: Path) -> Run:
    """Runs a copy of the script, with the tiny tree in place of the pinned sdist."""
    content = io.BytesIO()
    top = f"llama_cpp_python-{script.VERSION}"
    files = {
        "setup.py": "raise SystemExit",
        "vendor/llama.cpp/CMakeLists.txt": CMAKE,
        "vendor/llama.cpp/library.c": LIBRARY,
        "vendor/llama.cpp/program.c": PROGRAM,
        "vendor/llama.cpp/LICENSE": "free",
        "vendor/llama.cpp/licenses/LICENSE-other": "free too",
        "vendor/llama.cpp/tools/ui/package.json": PACKAGE,
        "vendor/llama.cpp/tools/ui/package-lock.json": PACKAGE_LOCK,
        "vendor/llama.cpp/tools/ui/make.js": MAKE_PAGE,
        # There already, as far as most tests are concerned.
        "vendor/llama.cpp/tools/ui/dist/index.html": "a page",
    }
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    sdist = cache / "dl" / f"{top}.tar.gz"
    sdist.parent.mkdir(parents=True)
    sdist.write_bytes(content.getvalue())
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    copy = tmp_path / "build_llama_cpp.py"
    copy.write_text(SCRIPT.read_text().replace(script.SDIST_SHA256, digest))

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TERN_CACHE_DIR": str(cache)} | variables
        command = [sys.executable, str(copy), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


def files_of(folder: Path) -> dict[str, int]:
    """Every file under ``folder`` with the time of its last change."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_builds_and_stages_each_library_once_under_its_soname(run: Run, cache: Path) -> None:
    result = run("build", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    dist = Path(answer["dist"])
    assert answer["built"] is True
    assert dist.is_relative_to(cache)
    expected = {*script.TOOLS, "libggml.so.0", "LICENSE", "VERSION", "licenses", "licenses/LICENSE-other"}
    assert set(files_of(dist)) == expected
    assert not any(path.is_symlink() for path in dist.rglob("*"))
    # The build folder is not needed to run them.
    os.rename(cache / "llama.cpp" / script.VERSION / "build", cache / "away")
    assert subprocess.run([dist / "llama-server"]).returncode == 0
    assert (dist / "VERSION").read_text().strip() == script.VERSION


def test_does_nothing_when_done(run: Run, cache: Path) -> None:
    assert run("build").returncode == 0
    before = files_of(cache)
    result = run("build", PATH="/nowhere", CXX="/usr/bin/c++")
    assert (result.returncode, result.stderr) == (0, "")
    assert files_of(cache) == before


def test_builds_anew_for_another_cpu(run: Run, cache: Path) -> None:
    assert run("build").returncode == 0
    stamp = cache / "llama.cpp" / script.VERSION / "stamp.json"
    other = json.loads(stamp.read_text())
    other["cpu"] = ["AVX10"]
    stamp.write_text(json.dumps(other))
    assert json.loads(run("status", "--json").stdout)["built"] is False
    result = run("build", "--json")
    assert "another CPU; building anew" in result.stderr
    assert json.loads(result.stdout)["built"] is True


def remove_page(run: Run, cache: Path) -> Path:
    """The root of a source without the built web page."""
    assert run("fetch").returncode == 0
    root: Path = cache / "llama.cpp" / script.VERSION
    shutil.rmtree(root / "source" / "tools" / "ui" / "dist")
    return root


def test_a_web_page_that_cannot_be_built_is_left_out_and_can_come_later(run: Run, cache: Path) -> None:
    root = remove_page(run, cache)
    no_network = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    result = run("build", **no_network)
    assert result.returncode == 0, result.stderr
    assert "going on without llama-server's web page" in result.stderr
    assert "build --web-page" in result.stderr
    status = json.loads(run("status", "--json").stdout)
    assert (status["built"], status["web_page"]) == (True, False)
    # It is not tried again and again.
    assert run("build", **no_network).stderr == ""
    result = run("build", "--web-page", **no_network)
    assert result.returncode == 1
    assert str(root / "web-page.log") in result.stderr

    compiled = {name: time for name, time in files_of(root / "build").items() if name.endswith(".o")}
    result = run("build", "--web-page", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["web_page"] is True
    # npm and what it started were those of the pinned Node.js.
    pinned = re.search(r"binaries==(\S+)", script.NODE)
    assert pinned is not None
    assert (root / "source" / "tools" / "ui" / "dist" / "index.html").read_text() == f"v{pinned[1]}"
    assert "building anew" not in result.stderr
    assert compiled.items() <= files_of(root / "build").items()
    assert not (root / "web-page").exists()


def test_a_web_page_that_npm_cannot_build_is_not_there(run: Run, cache: Path) -> None:
    root = remove_page(run, cache)
    (root / "source" / "tools" / "ui" / "make.js").write_text(MAKE_PAGE + "throw 'out of luck'")
    result = run("build", "--web-page")
    assert result.returncode == 1
    assert "out of luck" in result.stderr
    assert not (root / "source" / "tools" / "ui" / "dist").exists()
    assert not (root / "web-page").exists()


def test_a_failing_compiler_is_reported_and_a_mended_one_goes_on(run: Run, cache: Path) -> None:
    assert run("fetch").returncode == 0
    root = cache / "llama.cpp" / script.VERSION
    (root / "source" / "program.c").write_text("#error out of luck\n")
    result = run("build")
    assert result.returncode == 1
    assert "out of luck" in result.stderr
    assert str(root / "build.log") in result.stderr
    assert not (root / "dist").exists()
    (root / "source" / "program.c").write_text(PROGRAM)
    assert run("build").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_goes_on_after_it_was_stopped(run: Run, cache: Path, tmp_path: Path, number: signal.Signals) -> None:
    assert run("fetch").returncode == 0
    root = cache / "llama.cpp" / script.VERSION
    (root / "source" / "library.c").write_text('#include "fifo"\n' + LIBRARY)
    fifo = root / "source" / "fifo"  # the compiler waits for someone to write there
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "build_llama_cpp.py"), "build"],
        env=os.environ | {"TERN_CACHE_DIR": str(cache)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with open(fifo, "w"):  # returns when the compiler has come that far
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C does
        else:
            process.send_signal(number)
            process.wait(60)  # while its ninja still runs
    code = process.wait(60)
    assert code == (130 if number == signal.SIGINT else -number)
    assert not (root / "dist").exists()
    fifo.unlink()
    (root / "source" / "library.c").write_text(LIBRARY)
    result = run("build", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["built"] is True
    assert not list(root.glob(".*")), "temporary folders are left"


def test_a_second_build_waits_for_the_first(run: Run, cache: Path, tmp_path: Path) -> None:
    root = cache / "llama.cpp" / script.VERSION
    root.mkdir(parents=True)
    with open(root / "lock", "w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "build_llama_cpp.py"), "build"],
            env=os.environ | {"TERN_CACHE_DIR": str(cache)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "another build is running here (process 4711)" in process.stderr.readline()
        time.sleep(0.5)
        assert process.poll() is None
        assert not (root / "source").exists()
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert (root / "dist" / "llama-server").exists()


def test_a_damaged_sdist_is_not_used(run: Run, cache: Path) -> None:
    sdist = next((cache / "dl").iterdir())
    sdist.write_bytes(sdist.read_bytes()[:-1])
    result = run("build", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert result.returncode == 1
    assert "has another hash than the pinned one" in result.stderr
    assert "pip could not fetch" in result.stderr
    assert "TERN_LLAMA_CPP_DIR" in result.stderr
    assert not (cache / "llama.cpp" / script.VERSION / "source").exists()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = os.environ | {"TERN_CACHE_DIR": str(tmp_path / "file" / "cache")}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "build"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert str(tmp_path / "file" / "cache") in result.stderr


def test_the_pinned_version_is_named_alike_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    assert extras["python"] == [f"llama-cpp-python=={script.VERSION}"]


# ---- other arguments ----

#: A GPU backend that libggml is linked with, and one that is a file of its own.
GPU_CMAKE = """
if(GGML_CUDA)
  add_library(ggml-cuda SHARED library.c)
  set_target_properties(ggml-cuda PROPERTIES VERSION 0.1.2 SOVERSION 0)
  target_link_options(ggml PRIVATE LINKER:--no-as-needed)
  target_link_libraries(ggml PRIVATE ggml-cuda)
endif()
if(GGML_VULKAN)
  add_library(ggml-vulkan MODULE library.c)
  add_dependencies(ggml ggml-vulkan)
endif()
"""


def test_other_arguments_build_beside(run: Run, cache: Path) -> None:
    root = cache / "llama.cpp" / script.VERSION
    assert run("fetch").returncode == 0
    with (root / "source" / "CMakeLists.txt").open("a") as file:
        file.write(GPU_CMAKE)
    plain = json.loads(run("build", "--json").stdout)
    assert Path(plain["dist"]) == root / "dist"
    before = files_of(root / "dist")
    assert json.loads((root / "stamp.json").read_text())["flags"] == list(script.CMAKE_FLAGS)

    words = {"TERN_LLAMA_CPP_CMAKE_ARGS": "-DGGML_CUDA=ON -DGGML_VULKAN=ON '-DCMAKE_CUDA_FLAGS=-a -b'"}
    result = run("build", "--json", **words)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    dist = Path(answer["dist"])
    assert answer["built"] and dist.parent.parent == root
    assert {"libggml.so.0", "libggml-cuda.so.0", "libggml-vulkan.so"} <= files_of(dist).keys()
    flags = json.loads((dist.parent / "stamp.json").read_text())["flags"]
    assert flags[-3:] == ["-DGGML_CUDA=ON", "-DGGML_VULKAN=ON", "-DCMAKE_CUDA_FLAGS=-a -b"]
    made = (dist.parent / "build" / "CMakeCache.txt").read_text()
    assert re.search(r"^GGML_CUDA:\w+=ON$", made, re.MULTILINE)
    assert re.search(r"^CMAKE_CUDA_FLAGS:\w+=-a -b$", made, re.MULTILINE)
    # Neither makes the other anew.
    assert files_of(root / "dist") == before
    assert "building" not in run("build").stderr + run("build", **words).stderr
    # Others are others.
    assert not json.loads(run("status", "--json", TERN_LLAMA_CPP_CMAKE_ARGS="-DGGML_CUDA=ON").stdout)["built"]


@pytest.mark.parametrize("text", ["--fresh", "GGML_CUDA=ON", "-DGGML_CUDA", "-DA=1 '"])
def test_arguments_that_are_none(text: str, run: Run) -> None:
    result = run("build", TERN_LLAMA_CPP_CMAKE_ARGS=text)
    assert result.returncode == 1
    assert "TERN_LLAMA_CPP_CMAKE_ARGS" in result.stderr and "Traceback" not in result.stderr
