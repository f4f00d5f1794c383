"""Stage 6, tell: what the file holds and what quantizing cost, as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from ggml_tern.convert.architectures import Role
from ggml_tern.convert.pipeline import Report
from ggml_tern.convert.ternarize import F32, Stats, Target, TensorType


def _group_name(target: Target) -> str:
    """The kind of a tensor, over all blocks: `ffn_down`, `token_embd`, ...; vectors are all one kind."""
    if target.spec.role is Role.VECTOR:
        return "norms, biases"
    return re.sub(r"^blk\.\d+\.", "", target.spec.name).removesuffix(".weight")


def print_summary(report: Report, console: Console) -> None:
    """Print one line per kind and type of tensor, a total, and the notes.

    The error is the share of the weights' energy that quantizing lost, sum (w - decoded)^2 / sum w^2. That of
    the total
    counts the quantized tensors only: the norms are few, large and exact, and would hide it.
    """
    groups: dict[tuple[str, str], list[tuple[Target, Stats]]] = {}
    for target, stats in zip(report.targets, report.stats, strict=True):
        groups.setdefault((_group_name(target), target.type.name), []).append((target, stats))

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    everything = list(zip(report.targets, report.stats, strict=True))
    footers = _cells(everything)
    for title, footer in zip(
        ("tensors", "type", "count", "weights", "bits/weight", "zeros", "rel. error", "MB"),
        ("total", "", *footers),
        strict=True,
    ):
        table.add_column(
            title, footer=footer, justify="left" if title in ("tensors", "type") else "right", no_wrap=True
        )
    for (name, type_name), members in groups.items():
        table.add_row(name, type_name, *_cells(members))
    console.print(table)
    console.print()
    for note in [*fallback_notes(report.targets), *report.notes]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{report.output}: {report.size / 1e6:.1f} MB", highlight=False, soft_wrap=True, markup=False
    )


def _cells(members: Iterable[tuple[Target, Stats]]) -> tuple[str, ...]:
    whole, quantized = Stats(), Stats()
    count = nbytes = 0
    for target, stats in members:
        whole.add(stats)
        if target.type != F32:
            quantized.add(stats)
        count += 1
        nbytes += target.nbytes
    error = quantized.sum_sq_error / quantized.sum_sq if quantized.sum_sq else 0.0
    return (
        str(count),
        f"{whole.n / 1e6:.2f} M",
        f"{8 * nbytes / whole.n:.3f}",
        f"{100 * whole.zeros / whole.n:.1f}%",
        "0" if error == 0 else f"{error:.2e}",
        f"{nbytes / 1e6:.1f}",
    )


def fallback_notes(targets: Iterable[Target]) -> list[str]:
    """A line for every width of matrix that could not take the type asked for."""
    widths: dict[tuple[int, TensorType, TensorType], Counter[str]] = {}
    for target in targets:
        if target.wanted is not None:
            kinds = widths.setdefault((target.spec.shape[-1], target.wanted, target.type), Counter())
            kinds[_group_name(target)] += 1
    return [
        f"n_in {n_in} is not a multiple of {wanted.block}, so {actual.name} instead of {wanted.name} in "
        f"{kinds.total()} tensor{'s' if kinds.total() > 1 else ''}: {', '.join(kinds)}"
        for (n_in, wanted, actual), kinds in widths.items()
    ]
