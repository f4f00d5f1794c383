"""What the tests of foreign instruction sets need beside a compiler: SIMDe, a cross compiler, an emulator.

What is installed is used. The rest are Debian packages, unpacked into the cache folder without root
(debian_packages.py). A test whose needs cannot be had fails, and names the package.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import debian_packages

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "cpu"
HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-ffp-contract=off", "-ffunction-sections", "-Icsrc"]
#: Compiled files that no test has asked for that long are removed.
SECONDS_TO_KEEP = 30 * 24 * 3600.0


class Compiler(NamedTuple):
    """words: how it is called; variables: of its environment, in addition to our own."""

    words: list[str]
    variables: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        """In the root folder of the sources."""
        command = [*self.words, *arguments]
        environment = {**os.environ, **self.variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
        return done.stdout


def simde_include() -> Path:
    """The folder that holds simde/."""
    if Path("/usr/include/simde").is_dir():
        return Path("/usr/include")
    return debian_packages.unpacked("libsimde-dev") / "usr" / "include"


def qemu_aarch64() -> str:
    """An emulator of 64-bit Arm."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        if found := shutil.which(name):
            return found
    return str(debian_packages.program("qemu-user-static", "usr/bin/qemu-aarch64-static").path)


def compiler() -> Compiler:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert found is not None, "the project is built with a C++ compiler"
    return Compiler(found.split(), {})


def cross_compiler() -> Compiler:
    """A compiler for 64-bit Arm."""
    name = "aarch64-linux-gnu-g++"
    if found := shutil.which(name):
        return Compiler([found], {})
    program = debian_packages.program("g++-aarch64-linux-gnu", f"usr/bin/{name}")
    # -B: its assembler and linker lie beside it.
    return Compiler([str(program.path), f"-B{program.path.parent}/aarch64-linux-gnu-"], program.variables)


def build(
    program: Path,
    cxx: Compiler,
    sources: dict[Path, list[str]],
    flags: list[str],
    libraries: Sequence[str] = (),
) -> Path:
    """Compiles every source with its own flags and all with `flags`, side by side; links to `program`."""
    compiled = objects(cxx, sources, flags)
    cxx.run(*flags, "-Wl,--gc-sections", *map(str, compiled), "-o", str(program), *libraries)
    return program


def objects(cxx: Compiler, sources: Mapping[Path, list[str]], flags: list[str]) -> list[Path]:
    """Compiles every source with its own flags and all with `flags`, side by side.

    What was compiled before, by whatever test run, of the same files with the same flags is taken from the
    cache folder."""
    headers = headers_digest()
    version = cxx.run("--version")

    def compile_one(source: Path, own: list[str]) -> Path:
        # Named from the root folder, so that a clone elsewhere finds them too.
        arguments = [*FLAGS, *flags, *own, "-c", str(source.relative_to(ROOT))]
        key = "\0".join([version, *cxx.words, *arguments, headers, digest(source)])
        made = cache_dir() / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.o"
        if not made.exists():
            # Renamed when it is whole: another test run may be at it too.
            with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
                cxx.run(*arguments, "-o", str(unfinished := Path(folder) / "made.o"))
                unfinished.replace(made)
        made.touch()
        return made

    cache_dir().mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(compile_one, *item) for item in sources.items()]
        compiled = [job.result() for job in jobs]
    remove_old(cache_dir())
    return compiled


def cache_dir() -> Path:
    return debian_packages.cache_dir().parent / "test-objects"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def headers_digest() -> str:
    """Of all that a kernel may include, but for what a package brings."""
    files = sorted([*(ROOT / "csrc").rglob("*.h"), *HERE.rglob("*.h")])
    text = "".join(f"{path.relative_to(ROOT)} {digest(path)}\n" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def remove_old(folder: Path) -> None:
    for path in folder.glob("*.o"):
        if path.stat().st_mtime < time.time() - SECONDS_TO_KEEP:
            path.unlink(missing_ok=True)


# What every driver is linked with; DEFINES say which tables there are.
def common_sources(defines: list[str]) -> dict[Path, list[str]]:
    return {
        HERE / "driver.cpp": defines,
        **{
            KERNELS / f"{name}.cpp": []
            for name in (
                *("attention", "attention_generic", "dense_tiles", "kernels_generic"),
                *("product", "roofline_generic", "tiles"),
            )
        },
        **{
            ROOT / "csrc" / "format" / f"{name}.cpp": []
            for name in ("gguf_header", "hadamard", "ternary_types")
        },
    }
