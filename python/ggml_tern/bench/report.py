"""What a benchmark found, for terminals, Markdown, programs and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.plots import Panel
from ggml_tern.tensors.names import printable, printable_lines


@dataclass(frozen=True)
class Grid:
    """A table of numbers: what its columns hold, and rows of as many cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Report:
    """title, facts: what was measured, and how. data: all of it, as JSON can hold it."""

    title: str
    facts: Sequence[str]
    grids: Sequence[Grid]
    panels: Sequence[Panel]
    data: dict[str, Any]


def print_report(report: Report, console: Console) -> None:
    def say(text: str) -> None:
        # Whole lines for a pipe; on a terminal, words stay whole.
        text = printable_lines(text)
        console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)

    say(report.title)
    for fact in report.facts:
        say(f"- {fact}")
    for grid in report.grids:
        say(f"\n{grid.title}" if grid.title else "")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in grid.columns:
            table.add_column(column, justify="right")
        for row in grid.rows:
            table.add_row(*map(Text, row))
        console.print(table)


def as_markdown(report: Report) -> str:
    facts = "\n".join(f"- {printable(fact)}" for fact in report.facts)
    parts = [f"# {printable(report.title)}", facts]
    for grid in report.grids:
        if grid.title:
            parts.append(f"## {printable(grid.title)}")
        lines = [grid.columns, ["---:"] * len(grid.columns), *grid.rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts) + "\n"
