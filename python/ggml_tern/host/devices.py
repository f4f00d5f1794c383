"""The devices of a llama.cpp program, and on which of them a model is to run.

A llama.cpp that was built for a GPU shows it as a device of its own (``CUDA0``, ``Vulkan0``), which the
plug-in teaches ternary types. Such a device goes before TERN0, the processor; what the user names, first.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_tern.errors import TernError
from ggml_tern.host import binaries
from ggml_tern.host.binaries import LIBRARY_PATH_VARIABLE
from ggml_tern.host.child import run_to_end
from ggml_tern.host.stock import (
    DEVICE,
    DEVICE_VARIABLE,
    REGISTRY,
    gpus_of,
    host_environment,
    load_plugin,
    plugin_status,
)

RPC_VARIABLE = "LLAMA_ARG_RPC"
#: A word for the device that stands for none at all.
NO_DEVICE = "none"
#: enum ggml_backend_dev_type.
_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")
#: Backends in files of their own that are no GPU's.
_NO_GPU = re.compile(r"libggml(\.|-(base|cpu|blas|rpc|tern|zendnn|zdnn)\b)")
_SECONDS_TO_LIST = 60.0

#: What a user may call a kind of device: how its names begin.
_BEGINNINGS = {
    "cuda": "CUDA",
    "rocm": "ROCm",
    "hip": "ROCm",
    "musa": "MUSA",
    "vulkan": "Vulkan",
    "metal": "MTL",
}
_KIND_OF_DEVICE = re.compile(rf"(auto|cpu|gpu|{'|'.join(_BEGINNINGS)})(?::(\d+))?", re.IGNORECASE)

HOW_TO_GET_ONE = "docs/gpu.md tells how to get a llama.cpp for a GPU, and --llama-server PROGRAM takes it"


@dataclass(frozen=True)
class Device:
    """A device of a llama.cpp.

    Attributes:
        kind: "cpu", "gpu", "igpu" (integrated GPU), "accel" or "meta".
        free, total: its memory, in bytes.
        is_taught: whether the plug-in taught it ternary types.
        refusal: why not; empty where it did, or where it is no GPU.
    """

    name: str
    description: str
    kind: str
    free: int
    total: int
    is_taught: bool = False
    refusal: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.kind in ("gpu", "igpu") and self.name != DEVICE

    def __str__(self) -> str:
        return f"{self.name} ({self.description})"


@dataclass(frozen=True)
class Choice:
    """On what a program runs.

    Attributes:
        devices: the value of LLAMA_ARG_DEVICE; None where llama.cpp is to choose.
        gpus: those among them that are GPUs of the program's own, where they were chosen here.
        said: what the user should know, one line; empty where all is as always.
    """

    devices: str | None = DEVICE
    gpus: tuple[Device, ...] = ()
    said: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """Whether weights go to other memory than TERN0's, the machine's own."""
        if self.devices is None:
            return True
        return any(not name.startswith((REGISTRY, NO_DEVICE)) for name in self.devices.split(","))

    def __str__(self) -> str:
        return self.devices or "the devices that llama-server chooses"


def choose(program: Path, arguments: Sequence[str] = ()) -> Choice:
    """The devices for a program with these arguments: those that the user names, else GPUs, else TERN0.

    RPC servers and the devices beside them are left for llama.cpp to choose, since they have no names before
    it has read its command line.
    """
    named = named_devices(arguments)
    if named is not None:
        # "none" alone does not have the plug-in loaded.
        return Choice(DEVICE if named == NO_DEVICE else named)
    if not is_llama_cpp(program):
        return Choice()
    if has_rpc(arguments):
        return Choice(None)
    devices = devices_of(program)
    gpus = tuple(best_gpus(devices))
    if gpus:
        names = ",".join(gpu.name for gpu in gpus)
        shown = ", ".join(map(str, gpus))
        return Choice(names, gpus, f"on {shown}, of this llama.cpp's own; --device {DEVICE} is the processor")
    refused = [device for device in devices if device.refusal]
    if refused:
        return Choice(said=f"on {DEVICE}, the processor: {refused[0]} is left alone: {refused[0].refusal}")
    return Choice()


def is_llama_cpp(program: Path) -> bool:
    if program.name.startswith("llama-"):
        return True
    try:
        return binaries.read(program).uses_llama_cpp
    except TernError:
        return False


def named_devices(arguments: Sequence[str]) -> str | None:
    """The devices that the words of a command line name, or else LLAMA_ARG_DEVICE; None where nobody does."""
    named = [value for word, value in itertools.pairwise([*arguments, ""]) if word in ("--device", "-dev")]
    return (named[-1] if named else os.environ.get(DEVICE_VARIABLE)) or None


def has_rpc(arguments: Sequence[str]) -> bool:
    return bool(os.environ.get(RPC_VARIABLE)) or any(word in ("--rpc", "-rpc") for word in arguments)


def best_gpus(devices: Sequence[Device]) -> Iterator[Device]:
    """The GPUs that llama.cpp would take by itself, of those that run ternary types.

    Discrete ones if there are any, else one integrated one; and those of one backend, for two backends may
    show the same card.
    """
    taught = [device for device in devices if device.is_gpu and device.is_taught]
    discrete = [device for device in taught if device.kind == "gpu"]
    for device in discrete or taught[:1]:
        if _backend(device) == _backend((discrete or taught)[0]):
            yield device


def _backend(device: Device) -> str:
    return device.name.rstrip("0123456789")


def resolve(wanted: str, key: str, program: Path, arguments: Sequence[str] = ()) -> Choice:
    """The devices that a user asks for.

    Args:
        wanted: names as llama.cpp has them, with commas between; or ``auto``, ``cpu``, ``gpu``, ``cuda``,
            ``vulkan`` and the like, also with a number (``cuda:1``).
        key: where that was said, for the error.

    Raises:
        TernError: the program has no such device.
    """
    kind = _KIND_OF_DEVICE.fullmatch(wanted)
    word = kind[1].lower() if kind else ""
    if word == "auto":
        return choose(program, arguments)
    if word == "cpu":
        return Choice()
    if not kind and (wanted in (DEVICE, NO_DEVICE) or has_rpc(arguments)):
        return Choice(wanted)
    devices = devices_of(program)
    if not kind:
        by_name = {device.name: device for device in devices if device.kind != "cpu"}
        found = [by_name[name] for name in wanted.split(",") if name in by_name]
        complete = len(found) == len(wanted.split(","))
    elif word == "gpu":
        found = list(best_gpus(devices)) or [device for device in devices if device.is_gpu]
        found = found[int(kind[2]) :][:1] if kind[2] else found
        complete = bool(found)
    else:
        pattern = _BEGINNINGS[word] + (kind[2] or r"\d+")
        found = [device for device in devices if re.fullmatch(pattern, device.name)]
        complete = bool(found)
    if not complete:
        shown = ", ".join(str(device) for device in devices if device.kind in ("gpu", "igpu")) or DEVICE
        raise TernError(f"{key}: {wanted}: {program} has no such device; it has {shown}; {HOW_TO_GET_ONE}")
    gpus = tuple(device for device in found if device.is_gpu)
    refused = [gpu for gpu in gpus if gpu.refusal]
    said = f"{refused[0]} runs no ternary matrices: {refused[0].refusal}" if refused else ""
    return Choice(",".join(device.name for device in found), gpus, said)


# ---- finding out ----


def may_have_gpus(program: Path) -> bool:
    """Whether a program may have GPU backends, from its files and those of its libraries; nothing runs."""
    try:
        binary = binaries.read(program)
    except TernError:
        return False
    folders = {program.parent, program.resolve().parent}
    names = {path.name for folder in folders for path in folder.glob("libggml-*.so*")}
    if any(not _NO_GPU.match(name) for name in names):
        return True
    if any(name.startswith("libggml-cpu") for name in names):
        # Its backends are here, and they are all.
        return False
    needed = binaries.libraries_of(binary, host_environment(stock=True, program=program)).of_llama_cpp
    backends = [name for name in needed if name.startswith("libggml")]
    # Where libggml needs no CPU backend, backends are files of their own, who knows where.
    has_cpu = any(name.startswith("libggml-cpu") for name in backends)
    return any(not _NO_GPU.match(name) for name in backends) or bool(backends and not has_cpu)


def devices_of(program: Path) -> list[Device]:
    """The devices of a program with the plug-in in it, TERN0 among them.

    A program that can have no GPUs is not looked into; of one that cannot be looked into, TERN0 is all that
    is known, and the program itself will say what is wrong.
    """
    alone = [Device(DEVICE, "the processor", "igpu", 0, 0)]
    if not may_have_gpus(program):
        return alone
    environment = host_environment(stock=False, program=program)
    environment.pop(DEVICE_VARIABLE, None)
    try:
        libraries = binaries.libraries_of(binaries.read(program), environment)
        library, environment = library_to_probe(libraries, environment)
        command = [sys.executable, "-P", "-c", _PROBE, str(library), str(program.parent)]
        result = run_to_end(command, environment, _SECONDS_TO_LIST)
        # Backends talk, before and after.
        listed = [line for line in result.stdout.splitlines() if line.startswith("[{")]
        return [Device(**entry) for entry in json.loads(listed[-1])] if listed else alone
    except (TernError, subprocess.SubprocessError, OSError, ValueError):
        return alone


def library_to_probe(
    libraries: binaries.Libraries, environment: Mapping[str, str]
) -> tuple[Path, dict[str, str]]:
    """The library to load in place of a program that gets these, and the environment in which the loader
    finds for Python what it found for the program.

    Raises:
        TernError: there is none.
    """
    files = libraries.of_llama_cpp
    whole = [files[name] for stem in ("libllama.so", "libggml.so") for name in files if name.startswith(stem)]
    if not whole:
        raise TernError("it has no libllama and no libggml of its own")
    folders = dict.fromkeys(str(path.parent) for path in files.values())
    searched = [*folders, *filter(None, [environment.get(LIBRARY_PATH_VARIABLE)])]
    return whole[0], dict(environment) | {LIBRARY_PATH_VARIABLE: os.pathsep.join(searched)}


# Loads the plug-in into a libllama, in a child, and prints the devices.
_PROBE = """
import sys
from ggml_tern.host.devices import print_devices
print_devices(sys.argv[1], sys.argv[2])
"""


def print_devices(library_path: str, folder: str) -> None:
    """What `devices_of` reads: the devices of the llama.cpp of a library, as a line of JSON.

    folder: where its backends are, if they are files of their own.
    """
    library = ctypes.CDLL(library_path)
    load_plugin(library, Path(folder))
    gpus = {gpu.name: gpu for gpu in gpus_of(plugin_status(library))}
    found = []
    for device in _devices(library):
        gpu = gpus.get(device["name"])
        device["refusal"] = gpu.refusal if gpu else ""
        found.append(device | {"is_taught": gpu is not None and not gpu.refusal})
    print(json.dumps(found))


def _devices(library: ctypes.CDLL) -> Iterator[dict[str, Any]]:
    count, get = library.ggml_backend_dev_count, library.ggml_backend_dev_get
    count.restype = ctypes.c_size_t
    get.argtypes, get.restype = [ctypes.c_size_t], ctypes.c_void_p
    name, description = library.ggml_backend_dev_name, library.ggml_backend_dev_description
    kind, memory = library.ggml_backend_dev_type, library.ggml_backend_dev_memory
    for function in (name, description, kind):
        function.argtypes = [ctypes.c_void_p]
    name.restype = description.restype = ctypes.c_char_p
    memory.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]
    memory.restype = None
    for i in range(count()):
        device = get(i)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        yield {
            "name": name(device).decode(errors="replace"),
            "description": description(device).decode(errors="replace"),
            "kind": _KINDS[kind(device)],
            "free": free.value,
            "total": total.value,
        }
