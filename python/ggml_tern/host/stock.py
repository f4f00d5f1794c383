"""Where the plug-in and the stock llama.cpp are, and how a host process gets the plug-in.

A host is any program or library that contains llama.cpp: llama-server, llama-bench, llama-cpp-python.
Programs find the plug-in through environment variables (``host_environment``); in Python it is loaded by a
call (``enable``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_tern.errors import TernError
from ggml_tern.host import binaries
from ggml_tern.host.binaries import LIBRARY_PATH_VARIABLE

PLUGIN_NAME = "libggml-tern.so"
REGISTRY = "TERN"
DEVICE = "TERN0"

# ggml_backend_load_all() loads the library that the first names. llama-bench and test-backend-ops always call
# that; programs with llama.cpp's common options (llama-server, llama-cli, llama-completion, llama-perplexity)
# call it when a device is named, which the second does.
BACKEND_VARIABLE = "GGML_BACKEND_PATH"
DEVICE_VARIABLE = "LLAMA_ARG_DEVICE"

# Where llama-cpp-python looks for libllama.so and libmtmd.so instead of in its own folder.
LLAMA_LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
MTMD_LIBRARY_VARIABLE = "MTMD_CPP_LIB"

_enable_lock = threading.Lock()


def install_dir() -> Path:
    """The folder with ``lib/`` and ``llama.cpp/``: where the build put ``_core``, editable install or not."""
    spec = importlib.util.find_spec("ggml_tern._core")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).parents[1]


def plugin_path() -> Path:
    """The plug-in's file.

    Raises:
        TernError: it is not there; the package has not been built.
    """
    path = install_dir() / "lib" / PLUGIN_NAME
    if not path.is_file():
        raise TernError(
            f"{path}: the plug-in is missing; install the package again (pip install ., or make build)"
        )
    return path


def llama_cpp_dir() -> Path:
    """The folder of the stock llama.cpp tools and libraries that came with the package.

    Raises:
        TernError: the package was built without them (``TERN_LLAMA_CPP_DIR``).
    """
    path = install_dir() / "llama.cpp"
    if not path.is_dir():
        raise TernError(
            f"{path}: no stock llama.cpp tools, since this was built with TERN_LLAMA_CPP_DIR; build it "
            "without that variable, or use a llama.cpp program of your own by its path"
        )
    return path


def llama_cpp_version() -> str:
    """The version of llama-cpp-python whose llama.cpp is in ``llama_cpp_dir()``."""
    return (llama_cpp_dir() / "VERSION").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class LlamaCppPython:
    """An installed llama-cpp-python."""

    version: str
    folder: Path

    @property
    def has_own_libraries(self) -> bool:
        """False where it was installed without building llama.cpp, and needs to be told whose to use."""
        return (self.folder / "lib" / "libllama.so").exists()


def find_llama_cpp_python() -> LlamaCppPython | None:
    """The llama-cpp-python of this interpreter, found without importing it (importing loads llama.cpp)."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    # Imported here, for it takes time.
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        version = version_of("llama-cpp-python")
    except PackageNotFoundError:
        version = "unknown"
    return LlamaCppPython(version, Path(spec.origin).parent)


def bindings_command() -> str:
    """The shell command that installs llama-cpp-python, in seconds where it can use our llama.cpp.

    Not through pip's cache, which would keep the wheel without libraries for whoever asks for a whole one.
    """
    try:
        version = llama_cpp_version()
    except TernError:
        return "pip install llama-cpp-python"
    options = 'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"'
    return f"{options} pip install --no-cache-dir llama-cpp-python=={version}"


def library_variables() -> dict[str, str]:
    """The variables that lend our llama.cpp to a llama-cpp-python that has none of its own.

    Empty if there is no such llama-cpp-python, if the user has chosen a folder, or if our version is not its
    own.
    """
    bindings = find_llama_cpp_python()
    if bindings is None or bindings.has_own_libraries or LLAMA_LIBRARY_VARIABLE in os.environ:
        return {}
    try:
        if bindings.version != llama_cpp_version():
            return {}
    except TernError:
        return {}
    folder = str(llama_cpp_dir())
    return {LLAMA_LIBRARY_VARIABLE: folder, MTMD_LIBRARY_VARIABLE: folder}


def plugin_variables(devices: str | None = DEVICE) -> dict[str, str]:
    """The environment variables that make a stock llama.cpp program load the plug-in and use these devices.

    devices: names with commas between; None where llama.cpp is to choose.
    """
    variables = {BACKEND_VARIABLE: str(plugin_path())}
    return variables if devices is None else variables | {DEVICE_VARIABLE: devices}


def host_environment(
    stock: bool, program: Path | None = None, devices: str | None = DEVICE
) -> dict[str, str]:
    """The environment for a llama.cpp program: this process's own, with the plug-in or without it.

    Args:
        stock: without the plug-in. Variables that name something else than the plug-in or its device stay.
        program: which one; None for one of ours.
        devices: what it runs on, with commas between; None where llama.cpp is to choose. See devices.py.
    """
    environment = dict(os.environ) | library_variables()
    if not stock:
        environment |= plugin_variables(devices)
    else:
        if Path(environment.get(BACKEND_VARIABLE, "")).name == PLUGIN_NAME:
            del environment[BACKEND_VARIABLE]
        if DEVICE in environment.get(DEVICE_VARIABLE, "").split(","):
            del environment[DEVICE_VARIABLE]
    folder = install_dir() / "llama.cpp"
    if environment.get(LIBRARY_PATH_VARIABLE) and (program is None or program.parent == folder):
        # The loader looks there first, and it may hold libraries of another llama.cpp. Ours need their own.
        environment[LIBRARY_PATH_VARIABLE] = f"{folder}{os.pathsep}{environment[LIBRARY_PATH_VARIABLE]}"
    return environment


def load_plugin(library: ctypes.CDLL, backends: Path | None = None) -> None:
    """Load the plug-in into the llama.cpp of this process whose libllama is ``library``, unless it is there.

    Args:
        library: libllama, or another library that depends on that llama.cpp's libggml.
        backends: the folder of that llama.cpp's own backends, where they are files of their own
            (``GGML_BACKEND_DL``); the folder of ``library`` unless it is given.

    Raises:
        TernError: that llama.cpp cannot load backends, or the plug-in cannot be loaded, or refuses it.
    """
    plugin = plugin_path()
    # A wheel can hold libggml.so and libggml.so.0 as copies, and each copy that is loaded has its own list of
    # backends. Looked up through the handle of libllama, functions are those of the copy that libllama uses.
    try:
        by_name, load, load_all, count = (
            library.ggml_backend_dev_by_name,
            library.ggml_backend_load,
            library.ggml_backend_load_all_from_path,
            library.ggml_backend_reg_count,
        )
    except AttributeError as error:
        raise TernError(
            f"{library._name}: this llama.cpp is linked statically and cannot load backends; install a "
            f"llama-cpp-python with shared libraries, as it is built by default, or {bindings_command()}"
        ) from error
    by_name.restype = load.restype = ctypes.c_void_p
    by_name.argtypes = load.argtypes = load_all.argtypes = [ctypes.c_char_p]
    count.restype = ctypes.c_size_t
    folder = backends or Path(library._name).absolute().parent
    if count() == 0:
        # All of this llama.cpp's backends are plug-ins, its CPU backend too. It loads them by itself only
        # while there is none, so ours must not be the first; and it looks for them beside the program, which
        # is Python here, and in the working directory.
        load_all(os.fsencode(folder))
    if count() == 0:
        raise TernError(
            f"{library._name}: this llama.cpp has its backends in files of their own (libggml-cpu*.so), and "
            f"none for this processor is in {folder}; put them there, or {bindings_command()}"
        )
    if by_name(DEVICE.encode()) is None:
        check_plugin_loads()
        load(os.fsencode(plugin))
    if by_name(DEVICE.encode()) is None:
        raise TernError(
            f"{plugin}: the plug-in does not go into {library._name}; the line that begins with 'ggml-tern:' "
            "says why, and 'tern doctor' more"
        )


def check_plugin_loads() -> None:
    """Load the plug-in's file into this process, without any llama.cpp.

    llama.cpp only logs why it could not, and a log may be off, or lost when a program ends.

    Raises:
        TernError: it is damaged, or a library is missing that it needs.
    """
    plugin = plugin_path()
    # A library that is cut short would end the process.
    binaries.read(plugin)
    try:
        ctypes.CDLL(str(plugin))
    except OSError as error:
        raise TernError(f"the plug-in cannot be loaded: {error}; install the package again") from error


def plugin_status(library: ctypes.CDLL) -> dict[str, str]:
    """What the plug-in, loaded into the llama.cpp of ``library``, says of itself and its host.

    Keys are ``version``, ``ggml_version``, ``api_version``, ``isa`` (of the kernels in use) and
    ``hooked_slots`` (how many of the host's calls of the GGUF reader come to the plug-in first; 0: no model
    of ours can be opened). ``gpu0``, ``gpu1``, ... are GPUs of the host: see `gpus_of`.
    """
    status = ctypes.CFUNCTYPE(ctypes.c_char_p)(_function_of_plugin(library, "ggml_tern_status"))
    return dict(line.split("=", 1) for line in status().decode().splitlines())


def test_gpus(library: ctypes.CDLL) -> None:
    """Have the GPUs of that llama.cpp prove that they multiply with ternary matrices.

    The outcome is in the next `plugin_status`."""
    ctypes.CFUNCTYPE(None)(_function_of_plugin(library, "ggml_tern_test_gpus"))()


@dataclass(frozen=True)
class Gpu:
    """A GPU of a host's own backend.

    n_tests: products with known results that it was put to, which took test_ms milliseconds. refusal: why its
    backend is left alone; empty where it runs ternary matrices.
    """

    name: str
    description: str
    n_tests: int
    test_ms: int
    refusal: str


def gpus_of(status: Mapping[str, str]) -> list[Gpu]:
    """The GPUs in what `plugin_status` returned."""
    found = []
    for key, text in status.items():
        if re.fullmatch(r"gpu\d+", key):
            name, description, n_tests, test_ms, refusal = text.split("\t")
            found.append(Gpu(name, description, int(n_tests), int(test_ms), refusal))
    return found


def _function_of_plugin(library: ctypes.CDLL, name: str) -> Any:
    find = library.ggml_backend_reg_by_name
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.c_void_p
    address_of = library.ggml_backend_reg_get_proc_address
    address_of.argtypes, address_of.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    return address_of(find(REGISTRY.encode()), name.encode())


def enable() -> None:
    """Load the plug-in into the llama.cpp that llama-cpp-python uses in this process; again does nothing.

    Call it before ``llama_cpp`` is imported, so that a llama-cpp-python installed without libraries of its
    own gets ours; for one with libraries, before the first model is loaded is early enough.

    Raises:
        TernError: llama-cpp-python is missing, or the plug-in cannot be loaded into its llama.cpp.
    """
    bindings = find_llama_cpp_python()
    if bindings is None:
        raise TernError(f"llama-cpp-python is not installed: {bindings_command()}")
    with _enable_lock:
        os.environ.update(library_variables())
        try:
            import llama_cpp.llama_cpp

            load_plugin(llama_cpp.llama_cpp._lib)
        except (OSError, RuntimeError, AttributeError) as error:
            # An AttributeError is a function that a libllama of another version does not have.
            raise TernError(
                f"llama-cpp-python {bindings.version} does not load its libraries: {error}; "
                f"{_way_out(bindings)}"
            ) from error
        except TernError as error:
            if (clash := clash_of_bindings(bindings)) is not None:
                raise TernError(f"{error}; {clash}: {clash.mend}") from error
            raise


def clash_of_bindings(bindings: LlamaCppPython) -> binaries.Clash | None:
    """Whether LD_LIBRARY_PATH puts another llama.cpp's libraries before those of llama-cpp-python."""
    chosen = {**os.environ, **library_variables()}.get(LLAMA_LIBRARY_VARIABLE)
    folder = Path(chosen or bindings.folder / "lib")
    try:
        return binaries.clash_of(binaries.read(folder / "libllama.so"), os.environ)
    except TernError:
        return None


def _way_out(bindings: LlamaCppPython) -> str:
    """What to do about a llama-cpp-python whose libraries do not load."""
    if (clash := clash_of_bindings(bindings)) is not None:
        return f"{clash}: {clash.mend}"
    folder = os.environ.get(LLAMA_LIBRARY_VARIABLE)
    if folder is not None and Path(folder) != install_dir() / "llama.cpp":
        return f"{LLAMA_LIBRARY_VARIABLE} names {folder}: unset it, or {bindings_command()}"
    return bindings_command()
