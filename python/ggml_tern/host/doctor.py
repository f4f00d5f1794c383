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
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ggml_tern.errors import TernError
from ggml_tern.host import binaries
from ggml_tern.host.binaries import LIBRARY_PATH_VARIABLE
from ggml_tern.host.child import run_to_end
from ggml_tern.host.devices import library_to_probe
from ggml_tern.host.run import bundled_programs, find_program
from ggml_tern.host.stock import (
    BACKEND_VARIABLE,
    DEVICE,
    DEVICE_VARIABLE,
    LLAMA_LIBRARY_VARIABLE,
    PLUGIN_NAME,
    REGISTRY,
    bindings_command,
    clash_of_bindings,
    find_llama_cpp_python,
    gpus_of,
    host_environment,
    install_dir,
    llama_cpp_dir,
    llama_cpp_version,
    plugin_path,
)
from ggml_tern.tensors.names import printable

REBUILD = "install the package again: pip install --force-reinstall . (or make build)"
BUILD_HERE = (
    "use a llama.cpp that was built on this machine, or one with a backend for every processor "
    "(-DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON)"
)
SECONDS_TO_START = 60.0
#: A driver may have to compile its shaders first.
SECONDS_FOR_GPUS = 300.0

CPUINFO = Path("/proc/cpuinfo")
# The instruction sets that the kernels know, as /proc/cpuinfo names them.
X86_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "asimddp", "i8mm", "sve")
# What every kernel but the portable one needs on x86-64.
X86_NEEDED = ("avx", "avx2", "fma", "f16c")
# What a llama.cpp can be compiled for.
KNOWN_X86_FEATURES = (
    *("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "f16c", "fma", "avx2", "bmi1", "bmi2", "abm"),
    *("movbe", "adx", "avx_vnni", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma"),
    *("avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
)
# Where the compiler's macros, in small letters and without underscores, are not /proc/cpuinfo's names.
OTHER_NAMES = {"bmi": "bmi1", "lzcnt": "abm", "sse3": "pni", "sha": "shani"}


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
        """How it failed: by a signal, else the plug-in's own refusal if there is one, else its last line."""
        if self.code == -signal.SIGILL:
            return f"uses an instruction that this processor lacks (SIGILL){lacking(X86_NEEDED)}"
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        refusals = [line for line in self.text.splitlines() if line.startswith("ggml-tern: ")]
        last = self.last_line().removeprefix("ggml_tern.errors.TernError: ").removeprefix("OSError: ")
        return refusals[-1] if refusals else last


def run_child(command: list[str], environment: dict[str, str], seconds: float = SECONDS_TO_START) -> Outcome:
    """Run ``command`` to its end. A crash in it is a finding, not the end of the doctor."""
    try:
        result = run_to_end(command, environment, seconds)
    except subprocess.TimeoutExpired:
        return Outcome(1, f"no answer in {seconds:.0f} seconds")
    except OSError as error:
        return Outcome(1, str(error.strerror))
    return Outcome(result.returncode, result.stdout)


def check_package() -> Check:
    found = f"ggml-tern {version('ggml-tern')} in {install_dir()}, Python {platform.python_version()}"
    return Check("package", Status.OK, found)


def run_python(
    code: str, *arguments: str, environment: dict[str, str] | None = None, seconds: float = SECONDS_TO_START
) -> Outcome:
    """Run code in a Python like this one, where a crash does no harm."""
    # -P: not the modules of the working directory.
    command = [sys.executable, "-P", "-c", code, *arguments]
    return run_child(command, environment or dict(os.environ), seconds)


def cpu_features() -> set[str]:
    """What /proc/cpuinfo says that the processor has; empty if it does not say."""
    text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return set(flags.group(1).split()) if flags else set()


def lacking(features: Iterable[str]) -> str:
    """Says which of these features an x86-64 processor has not; empty if it has all, or is another."""
    present = cpu_features()
    absent = [name for name in features if name not in present]
    return f"; it has no {', '.join(absent)}" if absent and present and platform.machine() == "x86_64" else ""


def built_for() -> tuple[str, ...]:
    """What a processor must have for the llama.cpp that came along, as /proc/cpuinfo names it.

    Only what it names at all; empty if that is not known.
    """
    try:
        macros = (llama_cpp_dir() / "CPU").read_text(encoding="utf-8").lower().split()
    except (OSError, TernError):
        return ()
    compiled = {OTHER_NAMES.get(name, name) for name in (macro.replace("_", "") for macro in macros)}
    return tuple(name for name in KNOWN_X86_FEATURES if name.replace("_", "") in compiled)


def check_cpu() -> Check:
    """The processor, and which of the instruction sets that kernels are written for it has."""
    machine = platform.machine()
    text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    present = cpu_features()
    known = X86_FEATURES if machine == "x86_64" else ARM_FEATURES
    features = (
        " ".join(name for name in known if name in present) or "no vector instructions that the kernels use"
    )
    cores = len(os.sched_getaffinity(0))
    found = f"{model.group(1) if model else machine}, {cores} processors: {features}"
    if absent := lacking(built_for()):
        found += f"{absent}, which the llama.cpp programs that came along were built for"
        mend = "build them for this processor: pip install --force-reinstall --no-cache-dir . on this machine"
        return Check("processor", Status.BROKEN, found, mend)
    if absent := lacking(X86_NEEDED):
        mend = "nothing, but for another machine: the portable kernels are used here, which are much slower"
        return Check("processor", Status.NOTE, found + absent, mend)
    return Check("processor", Status.OK, found)


def check_core() -> Check:
    """Import the extension module in a child, where an illegal instruction does no harm."""
    outcome = run_python("import ggml_tern._core as c; print(c.__file__)")
    if outcome.code == 0:
        return Check("ggml_tern._core", Status.OK, outcome.last_line())
    return Check("ggml_tern._core", Status.BROKEN, f"does not import: {outcome.failure()}", REBUILD)


def check_plugin_file() -> Check:
    """Load the plug-in's file by itself: what is wrong with it, llama.cpp would only log, if at all."""
    try:
        path = plugin_path()
        binaries.read(path)
    except TernError as error:
        return Check("plug-in", Status.BROKEN, str(error), REBUILD)
    outcome = run_python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", str(path))
    if outcome.code != 0:
        return Check("plug-in", Status.BROKEN, f"{path}: it cannot be loaded: {outcome.failure()}", REBUILD)
    return Check("plug-in", Status.OK, str(path))


def check_tools() -> Check:
    try:
        folder = llama_cpp_dir()
    except TernError as error:
        return Check("stock tools", Status.NOTE, str(error))
    program = folder / "llama-server"
    environment = host_environment(stock=True, program=program)
    environment.pop(DEVICE_VARIABLE, None)
    try:
        trouble = binaries.libraries_of(binaries.read(program), environment).trouble
    except TernError as error:
        return Check("stock tools", Status.BROKEN, str(error), REBUILD)
    outcome = run_child([str(program), "--version"], environment)
    if outcome.code != 0:
        why = "; ".join(trouble[:3]) or outcome.failure()
        return Check("stock tools", Status.BROKEN, f"{program} does not run: {why}", REBUILD)
    reported = re.search(r"^version: (\S+)", outcome.text, flags=re.MULTILINE)
    found = f"llama.cpp {reported.group(1) if reported else 'of unknown version'}"
    found += f", as in llama-cpp-python {llama_cpp_version()}, in {folder}: {', '.join(bundled_programs())}"
    return Check("stock tools", Status.OK, found)


def check_host(program: Path) -> Check:
    """Load the plug-in into a stock llama.cpp program, and let that say which devices it has.

    Where it has not ours, why not is found out without it: what it says, it only logs, and it may end before
    that is written.
    """
    name = f"plug-in in {program.name}"
    ours = program.parent == install_dir() / "llama.cpp"
    # --list-devices loads the plug-in whether or not a device is named, and a device that is named but
    # missing would end the program before it has said why.
    environment = host_environment(stock=False, program=program)
    del environment[DEVICE_VARIABLE]

    def broken(found: str, mend: str) -> Check:
        return Check(name, Status.BROKEN, f"{program}: {found.removeprefix(f'{program}: ')}", mend)

    is_script = program.read_bytes()[:2] == b"#!"
    if is_script:
        libraries = binaries.Libraries({}, ())
    else:
        try:
            binary = binaries.read(program)
        except TernError as error:
            return broken(str(error), REBUILD if ours else "install that llama.cpp again")
        libraries = binaries.libraries_of(binary, environment)
        if not libraries.of_llama_cpp and not libraries.trouble:
            return broken(
                "needs no shared libggml: it is no llama.cpp program, or linked statically",
                "build that llama.cpp with -DBUILD_SHARED_LIBS=ON, or use the programs that came with "
                "ggml-tern",
            )
    outcome = run_child([str(program), "--list-devices"], environment)
    device = re.search(rf"^\s*{DEVICE}: (.+)$", outcome.text, flags=re.MULTILINE)
    if outcome.code == 0 and device:
        return Check(name, Status.OK, f"{program}: {DEVICE} is {device.group(1)}")
    plugin = check_plugin_file()
    if plugin.status is Status.BROKEN:
        return broken(f"does not get the device {DEVICE}: {plugin.found}", plugin.mend)
    if is_script:
        return broken(
            f"is a script, and what it starts does not show the device {DEVICE}: {outcome.failure()}",
            "name the program that it starts: tern doctor PROGRAM",
        )
    if (clash := binaries.clash_of(binary, environment)) is not None:
        return broken(str(clash), clash.mend)
    if libraries.trouble:
        return broken(
            f"does not start: {'; '.join(libraries.trouble[:3])}",
            REBUILD if ours else f"install it again, or name the library's folder in {LIBRARY_PATH_VARIABLE}",
        )
    if outcome.code == -signal.SIGILL:
        return broken(outcome.failure(), REBUILD if ours else BUILD_HERE)
    found = probe_libraries_of(program, libraries, environment)
    if isinstance(found, str):
        mend = "use the programs that came with ggml-tern, or a llama.cpp of a version that the README lists"
        return broken(f"does not get the device {DEVICE}: {found}", REBUILD if ours else mend)
    return broken(
        f"does not show the device {DEVICE}, though the plug-in goes into its {Path(found['library']).name}: "
        f"--list-devices ended with exit code {outcome.code} and {outcome.last_line()!r}",
        "some programs load no backends at all, such as llama-quantize: use another, or a newer llama.cpp",
    )


# Loads the plug-in into a libllama (that of the named file, or of llama-cpp-python) and prints what it says
# there.
LIBRARY_PROBE = """
import ctypes, json, sys
from pathlib import Path
from ggml_tern.host import stock as host
if len(sys.argv) > 1:
    library = ctypes.CDLL(sys.argv[1])
    host.load_plugin(library, Path(sys.argv[2]))
else:
    host.enable()
    import llama_cpp.llama_cpp
    library = llama_cpp.llama_cpp._lib
if "gpus" in sys.argv[3:]:
    host.test_gpus(library)
maps = open("/proc/self/maps").read().split("\\n")
loaded = sorted({line.split(maxsplit=5)[5] for line in maps if "/libggml.so" in line})
print(json.dumps(host.plugin_status(library) | {"library": library._name, "libggml": loaded}))
"""


def probe_library(environment: dict[str, str], *arguments: str) -> dict[str, Any] | str:
    """What the plug-in says of itself in a libllama, or why it does not go in.

    arguments: of LIBRARY_PROBE.
    """
    seconds = SECONDS_FOR_GPUS if "gpus" in arguments else SECONDS_TO_START
    outcome = run_python(LIBRARY_PROBE, *arguments, environment=environment, seconds=seconds)
    return outcome.failure() if outcome.code != 0 else dict(json.loads(outcome.last_line()))


def probe_libraries_of(
    program: Path, libraries: binaries.Libraries, environment: dict[str, str], *words: str
) -> dict[str, Any] | str:
    """`probe_library` of the libraries that a program gets. words: more arguments of LIBRARY_PROBE."""
    try:
        library, environment = library_to_probe(libraries, environment)
    except TernError as error:
        return str(error)
    return probe_library(environment, str(library), str(program.parent), *words)


def check_gpus(program: Path) -> Iterator[Check]:
    """Have each GPU that a program's own llama.cpp shows multiply with ternary matrices."""
    environment = host_environment(stock=False, program=program)
    del environment[DEVICE_VARIABLE]
    outcome = run_child([str(program), "--list-devices"], environment)
    shown = re.findall(r"^ +([A-Za-z]\w*): ", outcome.text, flags=re.MULTILINE)
    if not any(not name.startswith(REGISTRY) for name in shown):
        return
    try:
        libraries = binaries.libraries_of(binaries.read(program), environment)
        found = probe_libraries_of(program, libraries, environment, "gpus")
    except TernError as error:
        found = str(error)
    if isinstance(found, str):
        yield Check(f"GPUs of {program.name}", Status.NOTE, f"could not be tried: {found}")
        return
    for gpu in gpus_of(found):
        name = f"GPU {printable(gpu.name)}"
        description = printable(gpu.description)
        if gpu.refusal:
            mend = "that GPU runs the rest of llama.cpp; ternary matrices are multiplied by the processor"
            yield Check(name, Status.NOTE, f"{description}: left alone: {printable(gpu.refusal)}", mend)
        else:
            tried = f"{gpu.n_tests} self-tests passed in {gpu.test_ms} ms" if gpu.n_tests else "not tested"
            yield Check(name, Status.OK, f"{description}: runs ternary matrices; {tried}")


def check_library(name: str, mend: str, environment: dict[str, str], *arguments: str) -> Check:
    """Load the plug-in into a libllama, in a child, and let it say how it sits there."""
    probe = probe_library(environment, *arguments)
    if isinstance(probe, str):
        return Check(name, Status.BROKEN, probe, mend)
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
    if (clash := clash_of_bindings(bindings)) is not None:
        mend = clash.mend
    return check_library(f"llama-cpp-python {bindings.version}", mend, dict(os.environ))


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
    if devices is not None and DEVICE in devices.split(",") and Path(backend or "").name != PLUGIN_NAME:
        found = f"is {devices}, and {BACKEND_VARIABLE} {f'names {backend}' if backend else 'is not set'}: "
        found += f"programs that you start yourself end with 'invalid device: {DEVICE}'"
        mend = f'set both, eval "$(tern env)"; or unset {DEVICE_VARIABLE}'
        yield Check(DEVICE_VARIABLE, Status.BROKEN, found, mend)
    elif devices is not None and DEVICE not in devices.split(","):
        found = (
            f"is {devices}: programs of llama.cpp use that, and not {DEVICE}; unset it where they have none"
        )
        yield Check(DEVICE_VARIABLE, Status.NOTE, found)
    try:
        clash = binaries.clash_of(binaries.read(llama_cpp_dir() / "llama-server"), os.environ)
    except TernError:
        clash = None
    if clash is not None:
        found = f"{clash}, for llama.cpp programs that you start yourself; 'tern' starts ours with their own"
        yield Check(LIBRARY_PATH_VARIABLE, Status.NOTE, found, clash.mend)


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
        for host in hosts:
            checks.extend(check_gpus(host))
        for library in libraries:
            environment = host_environment(stock=False, program=llama_cpp_dir() / "llama-server")
            arguments = (str(library), str(library.parent))
            checks.append(check_library("plug-in in libllama", REBUILD, environment, *arguments))
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
