"""The one check of numbers that come from a file: config.json, the keys of a GGUF file, an adapter's.

A number that nothing bounds becomes gigabytes, or a traceback far from where it was read. So each has a least
and a most; who reads it names the file and the key, and the user is told all four in one line.
"""

from __future__ import annotations

from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable

#: Layers of a model, and experts of a layer: what llama.cpp has room for.
MAX_LAYERS = 512
MAX_EXPERTS = 1024
#: Experts of all layers together, each of them three tensors of a checkpoint.
MAX_ALL_EXPERTS = 1 << 17
#: Elements of any vector: the width of a model, of a feed-forward part, of all heads of a layer together.
MAX_WIDTH = 1 << 20
#: Rows of an embedding.
MAX_VOCABULARY = 1 << 24
#: Tokens of a context or a window, which llama.cpp counts in 32 bits.
MAX_TOKENS = (1 << 31) - 1
#: Numbers with a fraction, such as a frequency base or an epsilon: products of two stay within float32.
LEAST_NUMBER, MOST_NUMBER = 1e-18, 1e18

#: Characters of a value that people are shown.
_LONGEST = 60


def checked_integer(
    value: object, where: str, key: str, least: int = 1, most: int = MAX_WIDTH, way_out: str = ""
) -> int:
    """`value` if it is an integer from `least` to `most`; None stands for a missing one.

    Args:
        where: the file, and the part of it, in errors.
        way_out: what to do, where that is not plain.

    Raises TernError naming all of these, and the value.
    """
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise _wrong(value, where, key, f"an integer from {least} to {most}", way_out)


def checked_number(
    value: object,
    where: str,
    key: str,
    least: float = LEAST_NUMBER,
    most: float = MOST_NUMBER,
    way_out: str = "",
) -> float:
    """The same for a number with a fraction. NaN lies between no bounds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise _wrong(value, where, key, f"a number from {least:g} to {most:g}", way_out)


def shown(value: object) -> str:
    """Any value from a file on one line, shortened."""
    text = printable(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _wrong(value: object, where: str, key: str, expected: str, way_out: str) -> TernError:
    found = f"has no {key}" if value is None else f"{key} is {shown(value)}"
    return TernError(f"{where}: {found}; expected {expected}" + (f"; {way_out}" if way_out else ""))
