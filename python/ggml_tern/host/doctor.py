"""``tern doctor``: try each part of an installation for real, and say how to mend what does not work."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from ggml_tern.errors import TernError
from ggml_tern.host.run import bundled_programs, find_program
from ggml_tern.host.stock import (
    BACKEND_VARIABLE,
    DEVICE,
    DEVICE_VARIABLE,
    LLAMA_LIBRARY_VARIABLE,
    PLUGIN_NAME,
    bindings_command,
    find_llama_cpp_python,
    host_environment,
    install_dir,
    llama_cpp_dir,
    llama_cpp_version,
    plugin_path,
)

REBUILD = "install the package again: pip install --force-reinstall . (or make build)"
SECONDS_TO_START = 60.0

# The instruction sets that the kernels know, as /proc/cpuinfo names them.
X86_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "asimddp", "i8mm", "sve")


class Status(StrEnum):
    """What a check found."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        status: ``BROKEN`` is for what keeps a model from running, ``NOTE`` for what can stay as it is.
        found: what was found there.
        mend: what to do about it; empty when nothing is to be done.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a child process ended: its exit code (negative: the signal) and all that it printed."""

    code: int
    text: str

    def last_line(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no output"

    def failure(self) -> str:
        """How it failed: the plug-in's own refusal if there is one, else what the loader said of its file."""
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        lines = [line.strip() for line in self.text.splitlines()]
        said = [line for line in lines if line.startswith("ggml-tern:")]
        said += [line for line in lines if PLUGIN_NAME in line]
        said.append(self.last_line().removeprefix("ggml_tern.errors.TernError: "))
        return said[0]


def run_child(command: list[str], environment: dict[str, str]) -> Outcome:
    """Run ``command`` to its end. A crash in it is a finding, not the end of the doctor."""
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS_TO_START,
        )
    except subprocess.TimeoutExpired:
        return Outcome(1, f"no answer in {SECONDS_TO_START:.0f} seconds")
    except OSError as error:
        return Outcome(1, str(error.strerror))
    return Outcome(result.returncode, result.stdout)


def check_package() -> Check:
    found = f"ggml-tern {version('ggml-tern')} in {install_dir()}, Python {platform.python_version()}"
    return Check("package", Status.OK, found)


def check_cpu() -> Check:
    """The processor and which of the instruction sets that kernels are written for it has."""
    machine = platform.machine()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    known = X86_FEATURES if machine == "x86_64" else ARM_FEATURES
    features = (
        " ".join(name for name in known if name in present) or "no vector instructions that the kernels use"
    )
    cores = len(os.sched_getaffinity(0))
    return Check(
        "processor", Status.OK, f"{model.group(1) if model else machine}, {cores} processors: {features}"
    )


def check_core() -> Check:
    """Import the extension module in a child, where an illegal instruction does no harm."""
    outcome = run_child(
        [sys.executable, "-c", "import ggml_tern._core as c; print(c.__file__)"], dict(os.environ)
    )
    if outcome.code == 0:
        return Check("ggml_tern._core", Status.OK, outcome.last_line())
    return Check("ggml_tern._core", Status.BROKEN, f"does not import: {outcome.failure()}", REBUILD)


def check_plugin_file() -> Check:
    try:
        path = plugin_path()
    except TernError as error:
        return Check("plug-in", Status.BROKEN, str(error), REBUILD)
    return Check("plug-in", Status.OK, str(path))


def check_tools() -> Check:
    try:
        folder = llama_cpp_dir()
    except TernError as error:
        return Check("stock tools", Status.NOTE, str(error))
    environment = {name: value for name, value in os.environ.items() if name != DEVICE_VARIABLE}
    outcome = run_child([str(folder / "llama-server"), "--version"], environment)
    if outcome.code != 0:
        mend = f"they were built for another processor or are damaged; {REBUILD}"
        return Check("stock tools", Status.BROKEN, f"llama-server {outcome.failure()}", mend)
    reported = re.search(r"^version: (\S+)", outcome.text, flags=re.MULTILINE)
    found = f"llama.cpp {reported.group(1) if reported else 'of unknown version'}"
    found += f", as in llama-cpp-python {llama_cpp_version()}, in {folder}: {', '.join(bundled_programs())}"
    return Check("stock tools", Status.OK, found)


def is_static(program: Path) -> bool:
    """True if ``program`` needs no libggml, so that a plug-in could not register itself there."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return False
    needed = run_child([ldd, str(program)], dict(os.environ)).text
    return "libggml" not in needed and "libllama" not in needed and "not found" not in needed


def check_host(program: Path) -> Check:
    """Load the plug-in into a stock llama.cpp program, and let that say which devices it has."""
    name = f"plug-in in {program.name}"
    # --list-devices loads the plug-in whether or not a device is named, and a device that is named but
    # missing would end the program before it has said why.
    environment = host_environment(stock=False)
    del environment[DEVICE_VARIABLE]
    outcome = run_child([str(program), "--list-devices"], environment)
    device = re.search(rf"^\s*{DEVICE}: (.+)$", outcome.text, flags=re.MULTILINE)
    if outcome.code == 0 and device:
        return Check(name, Status.OK, f"{program}: {DEVICE} is {device.group(1)}")
    if is_static(program):
        found = f"{program} needs no shared libggml: it is no llama.cpp program, or linked statically"
        mend = (
            "build that llama.cpp with -DBUILD_SHARED_LIBS=ON, or use the programs that came with ggml-tern"
        )
        return Check(name, Status.BROKEN, found, mend)
    found = f"{program} does not get the device {DEVICE}: {outcome.failure()}"
    mend = "use the programs that came with ggml-tern, or a llama.cpp of a version that the README lists"
    return Check(
        name, Status.BROKEN, found, mend if program.parent != install_dir() / "llama.cpp" else REBUILD
    )


# Loads the plug-in into a libllama (that of the named file, or of llama-cpp-python) and prints what it says
# there.
LIBRARY_PROBE = """
import ctypes, json, sys
from ggml_tern.host import stock as host
if len(sys.argv) > 1:
    library = ctypes.CDLL(sys.argv[1])
    host.load_plugin(library)
else:
    host.enable()
    import llama_cpp.llama_cpp
    library = llama_cpp.llama_cpp._lib
maps = open("/proc/self/maps").read().split("\\n")
loaded = sorted({line.split(maxsplit=5)[5] for line in maps if "/libggml.so" in line})
print(json.dumps(host.plugin_status(library) | {"library": library._name, "libggml": loaded}))
"""


def check_library(name: str, mend: str, *arguments: str) -> Check:
    """Load the plug-in into a libllama, in a child, and let it say how it sits there."""
    outcome = run_child([sys.executable, "-c", LIBRARY_PROBE, *arguments], dict(os.environ))
    if outcome.code != 0:
        return Check(name, Status.BROKEN, outcome.failure(), mend)
    probe = json.loads(outcome.last_line())
    found = f"{probe['library']}: ggml {probe['ggml_version']}, backend API {probe['api_version']}, "
    found += f"kernels {probe['isa']}"
    if probe["hooked_slots"] == "0":
        return Check(name, Status.BROKEN, f"{found}; it opens GGUF files past the plug-in", mend)
    if len(probe["libggml"]) > 1:
        found += f"; libggml is loaded {len(probe['libggml'])} times ({', '.join(probe['libggml'])})"
        advice = "harmless unless your own code loads libggml.so: use ggml_tern.enable() for the plug-in"
        return Check(name, Status.NOTE, found, advice)
    return Check(name, Status.OK, found)


def check_python_bindings() -> Check:
    """Load the plug-in into llama-cpp-python, if there is one."""
    bindings = find_llama_cpp_python()
    if bindings is None:
        mend = f"for use from Python: {bindings_command()}"
        return Check("llama-cpp-python", Status.NOTE, "not installed", mend)
    mend = f"install the one that goes with ggml-tern: {bindings_command()}"
    if LLAMA_LIBRARY_VARIABLE in os.environ:
        mend = f"{LLAMA_LIBRARY_VARIABLE} is set: unset it, or name a folder with libllama.so; or {mend}"
    return check_library(f"llama-cpp-python {bindings.version}", mend)


def check_environment() -> Iterator[Check]:
    """Variables in this shell that could stand in the way."""
    backend = os.environ.get(BACKEND_VARIABLE)
    if backend is not None:
        if not Path(backend).is_file():
            mend = f'unset {BACKEND_VARIABLE}, or set it anew: eval "$(tern env)"'
            yield Check(BACKEND_VARIABLE, Status.BROKEN, f"names {backend}, which is not there", mend)
        elif Path(backend).name != PLUGIN_NAME:
            found = (
                f"names another backend, {backend}: llama.cpp loads one, so 'tern run' puts ours in its place"
            )
            yield Check(BACKEND_VARIABLE, Status.NOTE, found)
        elif Path(backend).resolve() != plugin_path().resolve():
            mend = f'to use this installation\'s in this shell: eval "$(tern env)"; it is {plugin_path()}'
            yield Check(
                BACKEND_VARIABLE, Status.NOTE, f"names another installation's plug-in, {backend}", mend
            )
    devices = os.environ.get(DEVICE_VARIABLE)
    if devices is not None and DEVICE not in devices.split(","):
        found = f"is {devices}: programs that you start yourself do not use {DEVICE}; 'tern run' does"
        yield Check(DEVICE_VARIABLE, Status.NOTE, found)


def examine(program: str | None) -> list[Check]:
    """Make all checks; with ``program``, of that host, and without it of ours and a llama-server on the PATH.

    Raises:
        TernError: there is no such program.
    """
    checks = [check_package(), check_cpu(), check_core(), check_plugin_file(), check_tools()]
    has_plugin = checks[3].status is Status.OK
    hosts: list[Path] = []
    libraries: list[Path] = []
    if program is not None:
        hosts.append(find_program(program))
    else:
        if "llama-server" in bundled_programs():
            hosts.append(llama_cpp_dir() / "llama-server")
            libraries.append(llama_cpp_dir() / "libllama.so.0")
        on_path = shutil.which("llama-server")
        if on_path is not None and Path(on_path).resolve() not in [host.resolve() for host in hosts]:
            hosts.append(Path(on_path))
    if has_plugin:
        checks.extend(check_host(host) for host in hosts)
        checks.extend(check_library("plug-in in libllama", REBUILD, str(library)) for library in libraries)
        if not hosts:
            mend = "tern doctor PROGRAM tries the plug-in in a llama.cpp program of yours"
            checks.append(
                Check("host program", Status.NOTE, "none here, and no llama-server on the PATH", mend)
            )
        checks.append(check_python_bindings())
        checks.extend(check_environment())
    return checks


def as_json(checks: list[Check]) -> str:
    """The checks as one JSON object: ``{"ok": bool, "checks": [{"name", "status", "found", "mend"}]}``."""
    return json.dumps({"ok": is_sound(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def is_sound(checks: list[Check]) -> bool:
    return all(check.status is not Status.BROKEN for check in checks)
