"""Programs and shared libraries as the dynamic loader sees them: what a file is, and which libraries it gets.

The file is read and the loader is asked; nothing of the file itself runs.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ggml_tern.errors import TernError
from ggml_tern.host.child import run_to_end

LIBRARY_PATH_VARIABLE = "LD_LIBRARY_PATH"

# The ELF format: e_machine, and of program headers and the dynamic section what is read here.
_MACHINES = {3: "x86", 40: "32-bit Arm", 62: "x86-64", 183: "aarch64", 243: "RISC-V", 22: "s390x"}
_MACHINES |= {8: "MIPS", 20: "32-bit PowerPC", 21: "PowerPC", 258: "LoongArch"}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5
_HEADER, _PROGRAM_HEADER, _DYNAMIC = struct.Struct("<16xHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ"), "<qQ"

#: What llama.cpp's own libraries are called, whatever their version.
_LLAMA_CPP = re.compile(r"lib(llama|ggml|mtmd)\b")
_SECONDS_TO_LIST = 20.0


@dataclass(frozen=True)
class Binary:
    """An ELF file for this processor.

    Attributes:
        interpreter: the dynamic loader that starts it; None for libraries and for static programs.
        needed: the names of the libraries that it asks for itself.
    """

    path: Path
    interpreter: str | None
    needed: tuple[str, ...]

    @property
    def uses_llama_cpp(self) -> bool:
        return any(is_llama_cpp(name) for name in self.needed)


def is_llama_cpp(name: str) -> bool:
    """Whether a library of this file name is one of llama.cpp's."""
    return _LLAMA_CPP.match(name) is not None


def read(path: Path) -> Binary:
    """Look into a program or a shared library.

    Raises:
        TernError: it is none, is not whole, or is for another processor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(_HEADER.size)
            _check_kind(path, beginning)
            fields = _HEADER.unpack(beginning)
            table_at, entry_size, n_entries = fields[4], fields[8], fields[9]
            file.seek(table_at)
            table = file.read(entry_size * n_entries)
            if entry_size < _PROGRAM_HEADER.size or len(table) < entry_size * n_entries:
                raise TernError(f"{path}: is cut short at {size} bytes, or damaged: without program headers")
            segments = [_PROGRAM_HEADER.unpack_from(table, i * entry_size) for i in range(n_entries)]
            for kind, _, at, _, _, in_file, _, _ in segments:
                if kind == _PT_LOAD and at + in_file > size:
                    raise TernError(
                        f"{path}: is cut short: it has {size} bytes, and its header speaks of {at + in_file}"
                    )

            def bytes_at(at: int, length: int) -> bytes:
                file.seek(at)
                return file.read(max(0, min(length, size - at)))

            interpreter = None
            needed: tuple[str, ...] = ()
            for kind, _, at, _, _, in_file, _, _ in segments:
                if kind == _PT_INTERP:
                    interpreter = os.fsdecode(bytes_at(at, in_file).rstrip(b"\0"))
                elif kind == _PT_DYNAMIC:
                    whole = in_file - in_file % struct.calcsize(_DYNAMIC)
                    entries = list(struct.iter_unpack(_DYNAMIC, bytes_at(at, whole)))
                    strings = _offset_of(segments, dict(reversed(entries)).get(_DT_STRTAB, 0))
                    names = [bytes_at(strings + value, 256) for tag, value in entries if tag == _DT_NEEDED]
                    needed = tuple(os.fsdecode(name.partition(b"\0")[0]) for name in names)
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror}") from error
    except struct.error as error:
        raise TernError(f"{path}: is damaged: its dynamic section cannot be read") from error
    return Binary(path, interpreter, needed)


def _check_kind(path: Path, beginning: bytes) -> None:
    """Raises TernError unless this is the beginning of an ELF file for this processor."""
    if not beginning.startswith(b"\x7fELF"):
        what = "is empty" if not beginning else f"begins with {beginning[:8]!r}"
        if beginning.startswith(b"#!"):
            what = "is a script"
        raise TernError(f"{path}: {what}; a program or library for Linux (ELF) was expected")
    if len(beginning) < _HEADER.size:
        raise TernError(f"{path}: is cut short at {len(beginning)} bytes")
    with open("/proc/self/exe", "rb") as interpreter:
        own = interpreter.read(_HEADER.size)
    machine, here = (struct.unpack_from("<H", header, 18)[0] for header in (beginning, own))
    if beginning[4:6] != own[4:6] or machine != here:
        found, expected = (_MACHINES.get(number, f"ELF machine {number}") for number in (machine, here))
        raise TernError(f"{path}: is for another processor ({found}); this one is {expected}")


def _offset_of(segments: list[tuple[int, ...]], address: int) -> int:
    """Where in the file lies what the loader puts at an address."""
    for kind, _, at, start, _, in_file, _, _ in segments:
        if kind == _PT_LOAD and start <= address < start + in_file:
            return at + address - start
    return address


@dataclass(frozen=True)
class Libraries:
    """What the dynamic loader finds for a program, and for the libraries that it finds.

    Attributes:
        found: the file of each library, by the name that is asked for.
        trouble: what it says of those that are missing or do not fit, a line each.
    """

    found: Mapping[str, Path]
    trouble: tuple[str, ...]

    @property
    def of_llama_cpp(self) -> dict[str, Path]:
        return {name: path for name, path in self.found.items() if is_llama_cpp(name)}


def libraries_of(program: Binary, environment: Mapping[str, str]) -> Libraries:
    """The libraries that a program would get in this environment, as its own dynamic loader says.

    Of a library, those that a Python started in this environment would get with it.
    """
    interpreter = program.interpreter or read(Path("/proc/self/exe")).interpreter
    if interpreter is None:
        return Libraries({}, ())
    # glibc's --list ends at the first library that is missing, the variable does not; musl's loader knows the
    # option alone.
    is_musl = "musl" in interpreter
    try:
        listed = run_to_end(
            [interpreter, *(["--list"] if is_musl else []), str(program.path.absolute())],
            {**environment, "LD_TRACE_LOADED_OBJECTS": "1"},
            _SECONDS_TO_LIST,
        ).stdout
    except OSError as error:
        return Libraries({}, (f"its dynamic loader {interpreter}: {error.strerror}",))
    except subprocess.TimeoutExpired:
        return Libraries({}, (f"its dynamic loader {interpreter} does not answer",))
    lines = [line.strip() for line in listed.splitlines()]
    found = [re.fullmatch(r"(\S+) => (/.+) \(0x[0-9a-f]+\)", line) for line in lines]
    trouble = [line.replace(" => not found", " is not found") for line in lines if "not found" in line]
    return Libraries({match[1]: Path(match[2]) for match in found if match}, tuple(trouble))


@dataclass(frozen=True)
class Clash:
    """Libraries of another llama.cpp that LD_LIBRARY_PATH puts before a program's own.

    Attributes:
        instead: what the program gets, by the name of the library, and what it would have had.
    """

    instead: Mapping[str, tuple[Path, Path]]

    def __str__(self) -> str:
        folders = dict.fromkeys(str(theirs.parent) for theirs, _ in self.instead.values())
        theirs, own = next(iter(self.instead.values()))
        more = f" and {len(self.instead) - 1} more" if len(self.instead) > 1 else ""
        return (
            f"{LIBRARY_PATH_VARIABLE} holds another llama.cpp: {theirs.name}{more} comes from "
            f"{', '.join(folders)} instead of {own.parent}"
        )

    @property
    def mend(self) -> str:
        folders = dict.fromkeys(str(theirs.parent) for theirs, _ in self.instead.values())
        return f"unset {LIBRARY_PATH_VARIABLE}, or take {' and '.join(folders)} out of it"


def clash_of(program: Binary, environment: Mapping[str, str]) -> Clash | None:
    """Which of llama.cpp's libraries a program gets because LD_LIBRARY_PATH says so, though it has others."""
    if not environment.get(LIBRARY_PATH_VARIABLE):
        return None
    plain = {name: value for name, value in environment.items() if name != LIBRARY_PATH_VARIABLE}
    own = libraries_of(program, plain).of_llama_cpp
    instead = {
        name: (path, own[name])
        for name, path in libraries_of(program, environment).of_llama_cpp.items()
        if name in own and not _same(path, own[name])
    }
    return Clash(instead) if instead else None


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
