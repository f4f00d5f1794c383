"""Text beside a label, in lines that fit the terminal."""

from __future__ import annotations

import re
import textwrap

from rich.console import Console
from rich.text import Text

#: Stands for a space at which no line ends. What is printed holds none: control characters are escaped.
_NO_BREAK = "\0"
_NARROWEST = 20


def whole(text: str) -> str:
    """Text that `print_wrapped` leaves in one line, however long."""
    return text.replace(" ", _NO_BREAK)


def print_wrapped(label: str | Text, text: str, console: Console, style: str = "") -> None:
    """Print text, in a style, beside its label, whose width is what later lines are indented by.

    A word is never broken, a path above all; nor is a command between backticks, which is there to be copied.
    """
    text = re.sub("`[^`]*`", lambda command: whole(command[0]), text)
    width = max(console.width - len(label), _NARROWEST)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    for i, line in enumerate(lines):
        console.print(" " * len(label) if i else label, end="", highlight=False, soft_wrap=True, markup=False)
        line = line.replace(_NO_BREAK, " ")
        console.print(line, style=style, highlight=False, soft_wrap=True, markup=False)
