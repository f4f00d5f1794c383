"""Lets ready-made libraries run on a glibc older than the one that they were built with.

Built with glibc 2.38 or newer, a program that reads numbers asks for __isoc23_strtol and its like, which are
strtol and its like but for the binary numbers of C23 ("0b101"). Nothing else of that glibc is lent here: what
wants more does not load. All other code of the libraries stays as it is.
"""

from __future__ import annotations

import os
import platform
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

#: The version that the functions have.
_VERSION = (2, 38)

_SOURCE = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

long __isoc23_strtol(const char * s, char ** end, int base) { return strtol(s, end, base); }
unsigned long __isoc23_strtoul(const char * s, char ** end, int base) { return strtoul(s, end, base); }
long long __isoc23_strtoll(const char * s, char ** end, int base) { return strtoll(s, end, base); }
unsigned long long __isoc23_strtoull(const char * s, char ** end, int base) { return strtoull(s, end, base); }
int __isoc23_sscanf(const char * s, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int n = vsscanf(s, format, arguments);
    va_end(arguments);
    return n;
}
"""

# <elf.h>
_SHT_GNU_VERNEED, _VER_FLG_WEAK = 0x6FFFFFFE, 2


def lend(libraries: Iterable[Path], lent: Path) -> None:
    """Changes 64-bit libraries, if this glibc is older, so that they take its newer functions from the
    library `lent`, which is made, and wants to be in LD_PRELOAD. Does nothing if it is not older.

    Raises CalledProcessError without a C compiler, OSError."""
    _, found = platform.libc_ver()
    if tuple(map(int, found.split("."))) >= _VERSION:
        return
    for library in libraries:
        data = bytearray(library.read_bytes())
        for at in _requirements(data, ".".join(map(str, _VERSION))):
            # A version that may be missing.
            struct.pack_into("<H", data, at, struct.unpack_from("<H", data, at)[0] | _VER_FLG_WEAK)
        library.write_bytes(data)
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(lent)]
    subprocess.run(command, input=_SOURCE, text=True, check=True)


def _requirements(data: bytearray, version: str) -> Iterator[int]:
    """Where in an ELF file the flags of its requirements of a version of glibc are."""
    sections, size, count = *struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HH", data, 0x3A)
    for section in range(sections, sections + size * count, size):
        _, kind, _, _, offset, _, link, n_libraries = struct.unpack_from("<IIQQQQII", data, section)
        if kind != _SHT_GNU_VERNEED:
            continue
        [names] = struct.unpack_from("<Q", data, sections + link * size + 24)
        library = offset
        for _ in range(n_libraries):
            _, n_versions, _, first, next_library = struct.unpack_from("<HHIII", data, library)
            one = library + first
            for _ in range(n_versions):
                _, _, _, name, next_one = struct.unpack_from("<IHHII", data, one)
                start = names + name
                if data[start : data.index(0, start)] == f"GLIBC_{version}".encode():
                    yield one + 4
                one += next_one
            library += next_library
