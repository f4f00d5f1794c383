"""An option that takes an amount of memory."""

from __future__ import annotations

import re
from typing import ClassVar

import click


class MemorySize(click.ParamType[int]):
    """An amount of memory like 6GB, 512MB (powers of 1000) or 6GiB, 512MiB (powers of 1024), in bytes."""

    name = "size"
    _UNITS: ClassVar = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
    _MOST: ClassVar = 2**60

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG]i?B)", str(value), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is no amount of memory; give one like 6GB, 5.5GiB or 800MB", param, ctx)
        size = float(match[1]) * self._UNITS[match[2].upper()]
        if not size <= self._MOST:
            self.fail(f"{str(value)[:20]!r} is more memory than any machine has", param, ctx)
        return int(size)


class MemorySizes(click.ParamType[tuple[int, ...]]):
    """Amounts of memory with commas between."""

    name = "sizes"

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        sizes = tuple(MemorySize().convert(part.strip(), param, ctx) for part in value.split(","))
        if 0 in sizes:
            self.fail(f"{value!r}: a card without memory holds nothing", param, ctx)
        return sizes
