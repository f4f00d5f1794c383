"""Names of tensors, and any other text from a file, as people are shown them."""

from __future__ import annotations

import re


def kind_name(name: str) -> str:
    """A tensor's name without block and ending: `ffn_down`, `token_embd`, ..."""
    return re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")


def printable(text: str) -> str:
    """Text from a file, safe in a message or on a terminal: one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines, which it keeps."""
    return "\n".join(map(printable, text.split("\n")))
