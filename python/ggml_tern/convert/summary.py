"""Tell: what the file holds, or would, and what quantizing cost, as a table."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern.convert.model.architectures import Role
from ggml_tern.convert.model.sources import SAMPLE_ROWS
from ggml_tern.convert.pipeline import Report
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Stats
from ggml_tern.convert.verdict import Judgement, Outcome
from ggml_tern.tensors.names import kind_name, printable
from ggml_tern.tensors.types import F32, TensorType

#: Shares of zeros between which trained ternary models lie.
_USUAL_ZEROS = (0.2, 0.8)


def _group_name(target: Target) -> str:
    """The kind of a tensor, over all blocks; what is kept in float32 is all one kind."""
    is_kept = target.spec.role is Role.VECTOR and target.type == F32
    return "norms, biases" if is_kept else kind_name(target.spec.name)


def print_summary(report: Report, console: Console) -> None:
    """Print one line per kind and type of tensor, a total, warnings and notes.

    The error is the share of the weights' energy that quantizing lost, sum (w - decoded)^2 / sum w^2. That of
    the total counts the quantized tensors only: the norms are few, large and exact, and would hide it.
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
        table.add_row(Text(printable(name)), type_name, *_cells(members))
    console.print(table)
    console.print()
    judgement = report.judgement
    lines = []
    if report.dry:
        lines.append(
            f"dry run: nothing was written; zeros, errors, what is said of them and the verdict are from "
            f"{SAMPLE_ROWS} rows of each tensor"
        )
    lines += [f"warning: {warning}" for warning in [*smells(report), *_warnings(judgement)]]
    notes = [*ternary_notes(report), *fallback_notes(report.targets), *report.notes]
    lines += [f"note: {note}" for note in notes]
    would_be, expected = ("would be ", "expected ") if report.dry else ("", "")
    lines += [
        f"{report.output}: {would_be}{report.size / 1e6:.1f} MB",
        f"{expected}verdict: {judgement.line}",
    ]
    if step := next_step(report, judgement):
        lines.append(f"next: {step}")
    for line in lines:
        console.print(printable(line), highlight=False, soft_wrap=True, markup=False)


def _warnings(judgement: Judgement) -> list[str]:
    if judgement.outcome is not Outcome.NONSENSE:
        return []
    return [
        "the model was not trained ternary, and made ternary it writes noise; --type auto leaves in 8 bits "
        "what is not ternary, --type q8_0 everything"
    ]


def next_step(report: Report, judgement: Judgement) -> str:
    """What to do with the file; nothing for one that is broken."""
    if judgement.outcome is Outcome.NONSENSE:
        return "the same again with --type auto or --type q8_0"
    if _empty(report) or report.dry:
        return ""
    output = shlex.quote(str(report.output))
    if report.chats:
        return f"tern chat {output}"
    # A model that is not made for a chat goes on with a text.
    return f"tern run llama-completion -no-cnv -m {output} -n 60 -p 'Once upon a time'"


def _cells(members: Iterable[tuple[Target, Stats]]) -> tuple[str, ...]:
    whole, quantized = Stats(), Stats()
    count = nbytes = 0
    for target, stats in members:
        whole.add(stats)
        if target.type != F32:
            quantized.add(stats)
        count += 1
        nbytes += target.nbytes
    return (
        str(count),
        f"{whole.n / 1e6:.2f} M",
        f"{8 * nbytes / whole.n:.3f}",
        f"{100 * whole.zeros / whole.n:.1f}%",
        _loss(quantized),
        f"{nbytes / 1e6:.1f}",
    )


def _loss(stats: Stats) -> str:
    """What was lost: nothing, the rounding of ternary scales to fp16, or an error."""
    if stats.is_exact:
        return "exact"
    if stats.groups and stats.is_lossless:
        return "fp16 scales"
    return f"{stats.relative_error:.2e}"


def ternary_notes(report: Report) -> list[str]:
    """Lines that say which ternary tensors were ternary before, and which were made so."""
    pairs = [
        (target, stats)
        for target, stats in zip(report.targets, report.stats, strict=True)
        if target.type.is_ternary
    ]
    if not pairs:
        return []
    exact = sum(stats.is_exact for _, stats in pairs)
    rounded = [stats for _, stats in pairs if stats.is_lossless and not stats.is_exact]
    made = [target for target, stats in pairs if not stats.is_lossless]
    lines = []
    if exact:
        lines.append(f"ternary already, kept exactly: {exact} of {len(pairs)} ternary tensors")
    if rounded:
        worst = max(stats.max_scale_error for stats in rounded)
        lines.append(
            f"ternary already, scales rounded to fp16: {len(rounded)} of {len(pairs)} ternary tensors, "
            f"largest relative error {worst:.1e}"
        )
    if made:
        lines.append(
            f"made ternary, which they were not: {len(made)} of {len(pairs)} ternary tensors, {_some(made)}"
        )
    return lines


def smells(report: Report) -> list[str]:
    """Warnings about weights that look wrong: broken uploads are full of zeros."""
    unusual = [
        target
        for target, stats in zip(report.targets, report.stats, strict=True)
        if target.type.is_ternary
        and stats.zeros < stats.n
        and not _USUAL_ZEROS[0] <= stats.zeros / stats.n <= _USUAL_ZEROS[1]
    ]
    lines = []
    if empty := _empty(report):
        lines.append(f"nothing but zeros in {_some(empty)}; the checkpoint is broken perhaps")
    if unusual:
        low, high = (f"{100 * share:.0f}" for share in _USUAL_ZEROS)
        lines.append(
            f"fewer than {low}% zeros or more than {high}% in {_some(unusual)}, which is unusual for ternary "
            "weights"
        )
    return lines


def _empty(report: Report) -> list[Target]:
    """The matrices that hold nothing but zeros."""
    return [
        target
        for target, stats in zip(report.targets, report.stats, strict=True)
        if target.spec.role is not Role.VECTOR and stats.zeros == stats.n
    ]


def _some(targets: list[Target]) -> str:
    names = ", ".join(target.spec.name for target in targets[:3])
    return f"{names} and {len(targets) - 3} more" if len(targets) > 3 else names


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
