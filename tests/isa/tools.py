"""What the tests of foreign instruction sets need beside a compiler: SIMDe, a cross compiler, an emulator.

What is installed is used. SIMDe and qemu are otherwise fetched as Debian packages into the cache folder,
without root: the packages are only unpacked. What cannot be had skips the test, with a reason that names the
package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "cpu"
HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-ffp-contract=off", "-ffunction-sections", f"-I{ROOT / 'csrc'}"]


def cache_dir() -> Path:
    return Path(os.environ.get("TERN_CACHE_DIR") or Path.home() / ".cache" / "ggml-tern") / "debian"


def debian_package(name: str) -> Path | None:
    """The folder that the files of a Debian package are unpacked in, or None if it cannot be fetched."""
    folder = cache_dir() / name
    if folder.is_dir():
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
        fetched = subprocess.run(["apt-get", "download", name], cwd=scratch, capture_output=True)
        files = list(Path(scratch).glob("*.deb"))
        if fetched.returncode != 0 or len(files) != 1:
            return None
        unpacked = Path(scratch) / "unpacked"
        subprocess.run(["dpkg-deb", "-x", files[0], unpacked], check=True, capture_output=True)
        if not folder.is_dir():
            unpacked.rename(folder)
    return folder


def simde_include() -> Path:
    """The folder that holds simde/. Skips the test if there is none."""
    if Path("/usr/include/simde").is_dir():
        return Path("/usr/include")
    folder = debian_package("libsimde-dev")
    if folder is None:
        pytest.skip("needs SIMDe: apt-get install libsimde-dev")
    return folder / "usr" / "include"


def qemu_aarch64() -> str:
    """An emulator of 64-bit Arm. Skips the test if there is none."""
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        if found := shutil.which(name):
            return found
    folder = debian_package("qemu-user-static")
    if folder is None:
        pytest.skip("needs an emulator of Arm: apt-get install qemu-user-static")
    return str(folder / "usr" / "bin" / "qemu-aarch64-static")


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert found is not None, "the project is built with a C++ compiler"
    return found


def cross_compiler() -> str:
    """A compiler for 64-bit Arm. Skips the test if there is none."""
    found = shutil.which("aarch64-linux-gnu-g++")
    if found is None:
        pytest.skip("needs a cross compiler: apt-get install g++-aarch64-linux-gnu")
    return found


def build(program: Path, cxx: str, sources: dict[Path, list[str]], flags: list[str]) -> Path:
    """Compiles every source with its own flags and all with `flags`, side by side; links to `program`."""

    def compile_one(index: int, source: Path, own: list[str]) -> Path:
        made = program.with_name(f"{program.name}-{index}.o")
        run([cxx, *FLAGS, *flags, *own, "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, i, *item) for i, item in enumerate(sources.items())]
        objects = [str(job.result()) for job in jobs]
    run([cxx, *flags, "-Wl,--gc-sections", *objects, "-o", str(program)])
    return program


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


# What every driver is linked with; DEFINES say which tables there are.
def common_sources(defines: list[str]) -> dict[Path, list[str]]:
    return {
        HERE / "driver.cpp": defines,
        KERNELS / "kernels.cpp": defines,
        **{
            KERNELS / f"{name}.cpp": []
            for name in ("attention_generic", "dense_tiles", "kernels_generic", "roofline_generic", "tiles")
        },
        **{
            ROOT / "csrc" / "format" / f"{name}.cpp": []
            for name in ("gguf_header", "hadamard", "ternary_types")
        },
    }
