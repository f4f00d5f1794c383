"""Copies of the stock llama.cpp, changed in one place: linked otherwise, or without a function."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from ggml_tern.host.stock import llama_cpp_dir

PT_NULL = 0
PT_GNU_RELRO = 0x6474E552

Edit = Callable[[bytearray], None]


def copy_of_host(folder: Path, edits: Mapping[str, Edit]) -> Path:
    """All of llama.cpp in `folder`, with the libraries that `edits` names changed. Returns the folder."""
    for path in llama_cpp_dir().iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    for name, edit in edits.items():
        data = bytearray((folder / name).read_bytes())
        edit(data)
        (folder / name).write_bytes(data)
    return folder


def _relro_header(elf: bytearray) -> int:
    """Where the program header of the part that the loader makes read-only stands (64 bit, little endian)."""
    (offset,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for at in range(offset, offset + size * count, size):
        if struct.unpack_from("<I", elf, at)[0] == PT_GNU_RELRO:
            return int(at)
    raise AssertionError("the library has no RELRO")


def without_relro(elf: bytearray) -> None:
    """As if linked with -z norelro: everything stays writable."""
    struct.pack_into("<I", elf, _relro_header(elf), PT_NULL)


def with_relro_that_ends_inside_a_page(elf: bytearray) -> None:
    """As with pages larger than the linker thought: the loader leaves the last one of them writable."""
    at = _relro_header(elf)
    for field in (32, 40):  # p_filesz, p_memsz
        (size,) = struct.unpack_from("<Q", elf, at + field)
        struct.pack_into("<Q", elf, at + field, size - 8)


def without_function(name: str) -> Edit:
    """The library no longer exports the function: its name is another, which no hash leads to."""

    def edit(elf: bytearray) -> None:
        at = elf.index(b"\0" + name.encode() + b"\0") + len(name)
        elf[at] = ord("_")

    return edit
