"""The option --lora, which converting and verifying share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click


class LoraOption(click.ParamType[tuple[Path, float]]):
    """DIR or DIR=SCALE"""

    name = "dir[=scale]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Path, float]:
        directory, equals, number = str(value).rpartition("=")
        if not equals or Path(value).is_dir():
            return Path(value), 1.0
        try:
            scale = float(number)
        except ValueError:
            self.fail(f"{value!r}: expected DIR or DIR=SCALE, with a number as scale", param, ctx)
        if not math.isfinite(scale):
            self.fail(f"{value!r}: the scale is no finite number", param, ctx)
        return Path(directory), scale


LORA = LoraOption()
