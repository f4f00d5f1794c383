"""Recompute every tensor of a converted file from its source, and say how far the two are apart."""

from __future__ import annotations

import enum
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.model.sources import Source, prepared_rows
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Stats, encode
from ggml_tern.convert.read.lora import Adapter
from ggml_tern.convert.rotate.rotated_ternary import Fold, folded, unit_roundoff
from ggml_tern.convert.verdict import judge
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource, GGUFTensor
from ggml_tern.tensors.names import printable
from ggml_tern.tensors.types import GROUP_TYPES, type_by_id
from ggml_tern.tensors.values import as_float32

#: Weights compared at a time.
_PIECE = 1 << 19


class Verdict(enum.StrEnum):
    """How a tensor of the file stands to its source."""

    EXACT = "exact"
    #: Ternary values kept; scales rounded to fp16.
    SCALES = "exact but for fp16 scales"
    #: Stored rotated, of a source that is not: as plain weights, rounded as the source's are, the same.
    ROUNDED = "exact but for rounding"
    #: What quantizing the source gives, bit for bit.
    QUANTIZED = "as quantized"
    #: Anything else.
    DIFFERENT = "different"


@dataclass(frozen=True)
class Finding:
    """One tensor.

    Attributes:
        target: the tensor and its type in the file.
        verdict: how it stands to its source.
        stats: what quantizing the source costs; relative_error is that of the recomputed tensor.
        first_difference: for a different one, the row in which the file first differs.
    """

    target: Target
    verdict: Verdict
    stats: Stats
    first_difference: int | None = None

    @property
    def name(self) -> str:
        return self.target.spec.name

    @property
    def type_name(self) -> str:
        return self.target.type.name

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "type": self.type_name,
            "verdict": self.verdict.value,
            "relative_error": self.stats.relative_error,
            "max_scale_error": self.stats.max_scale_error,
            "first_different_row": self.first_difference,
        }


def verify(
    path: Path,
    converted: Path,
    *,
    adapters: Sequence[Adapter] = (),
    keep_mtp: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[Finding]:
    """Compare `converted` with what its source gives in the same types, tensor by tensor.

    Where only one of them is rotated, or both in different bases, the source's weights are made plain and
    then rotated as the file's are.

    Args:
        path: the Hugging Face model directory or GGUF file that it was converted from.
        converted: the GGUF file.
        adapters, keep_mtp: as they were given to the conversion.
        n_threads: threads that quantize; 0 for one per core.
        start, advance: told the number of bytes of tensor data, first in total and then as they are compared.

    Raises TernError where the two do not have the same tensors in the same shapes, and for unreadable files.
    """
    model = open_model(path, adapters, keep_mtp=keep_mtp)
    file = GGUFSource(converted)
    rotations = file.rotations
    names = {spec.name for spec in model.specs}
    if missing := sorted(names - file.tensors.keys()):
        raise TernError(f"{converted}: lacks {missing[0]}, which {path} gives; it is of another model")
    if extra := sorted(file.tensors.keys() - names):
        raise TernError(f"{converted}: holds {extra[0]}, which {path} does not give; it is of another model")
    n_threads = n_threads or len(os.sched_getaffinity(0))
    start(sum(tensor.data.nbytes for tensor in file.tensors.values()))
    with ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
        for spec in model.specs:
            tensor = file.tensors[spec.name]
            if tensor.shape != spec.shape:
                raise TernError(
                    f"{tensor.where} has shape {list(tensor.shape)}; {path} makes it {list(spec.shape)}"
                )
            if tensor.type == _core.TYPE_I2_S:
                raise TernError(
                    f"{tensor.where}: is I2_S, which only bitnet.cpp writes; give the file that was made of "
                    "it, and this one as its source"
                )
            sources = model.sources[spec.name]
            stored, rotation = model.rotations.get(spec.name), rotations.get(spec.name)
            if stored != rotation:
                spec = folded(spec, sources, rotation, stored)
            finding = _compare(Target(spec, type_by_id(tensor.type)), sources, tensor, pool, n_threads)
            if rotation is not None and finding.verdict is Verdict.DIFFERENT:
                plain = replace(spec, function=None if stored is None else Fold(None, stored))
                if _same_plain_weights(plain, sources, tensor, rotation):
                    finding = replace(finding, verdict=Verdict.ROUNDED, first_difference=None)
            yield finding
            advance(tensor.data.nbytes)


def _compare(
    target: Target, sources: Sequence[Source], tensor: GGUFTensor, pool: ThreadPoolExecutor, n_threads: int
) -> Finding:
    """The file does not say how many weights share a scale, so a ternary tensor is tried in every group size
    that its type can hold."""
    groups = [0]
    if target.type.is_ternary:
        groups += [g for g in GROUP_TYPES if g > target.type.block and target.spec.shape[-1] % g == 0]
    finding: Finding | None = None
    for group in groups:
        tried = Target(target.spec, target.type, group=group)
        stats, difference = _recompute(tried, sources, tensor.blocks, pool, n_threads)
        if difference is None:
            return Finding(tried, _verdict(stats), stats)
        finding = finding or Finding(tried, Verdict.DIFFERENT, stats, difference)
    assert finding is not None
    return finding


def _same_plain_weights(
    spec: TensorSpec, sources: Sequence[Source], tensor: GGUFTensor, rotation: _core.Rotation
) -> bool:
    """Whether a rotated tensor stands for the plain weights of its sources, but for how those are rounded.

    Rounding hides by how much a scale differs: the bits of a tensor that was folded from F16 weights may
    differ from those that the F16 weights came from.
    """
    n_rows = spec.rows_per_source
    rows_per_piece = max(1, _PIECE // spec.shape[-1])
    for number, source in enumerate(sources):
        for start in range(0, n_rows, rows_per_piece):
            stop = min(start + rows_per_piece, n_rows)
            expected = np.ascontiguousarray(as_float32(prepared_rows(spec, source, start, stop)))
            stored = as_float32(tensor.rows[number * n_rows + start : number * n_rows + stop])
            found = rotation.unrotate(stored, n_threads=1)
            # The arithmetic of both, and what float16 loses of the smallest numbers.
            slack = 4e-6 * np.abs(expected).max(axis=1, keepdims=True) + 2.0**-24
            if not (np.abs(found - expected) <= unit_roundoff(expected) * np.abs(expected) + slack).all():
                return False
    return True


def _verdict(stats: Stats) -> Verdict:
    if stats.is_exact:
        return Verdict.EXACT
    return Verdict.SCALES if stats.groups and stats.is_lossless else Verdict.QUANTIZED


def _recompute(
    target: Target,
    sources: Sequence[Source],
    blocks: NDArray[np.uint8],
    pool: ThreadPoolExecutor,
    n_threads: int,
) -> tuple[Stats, int | None]:
    """The statistics, and the first row in which the file differs; stops there."""
    flat = blocks.reshape(-1)
    row_bytes = blocks.shape[1]
    stats = Stats()
    position = 0
    for piece in encode(target, sources, pool, n_threads):
        stored = flat[position : position + piece.data.size]
        if not np.array_equal(stored, piece.data):
            return stats, (position + int(np.argmax(stored != piece.data))) // row_bytes
        position += piece.data.size
        stats.add(piece.stats)
    return stats, None


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for every tensor, how many there are of each verdict, and what that makes of the model."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("tensor", "type", "verdict", "rel. error"):
        table.add_column(title, no_wrap=True, justify="right" if title == "rel. error" else "left")
    for finding in findings:
        verdict = finding.verdict.value
        error = f"{finding.stats.relative_error:.2e}"
        if finding.verdict is Verdict.DIFFERENT:
            verdict, error = f"different from row {finding.first_difference} on", ""
        elif finding.verdict in (Verdict.EXACT, Verdict.ROUNDED):
            error = ""
        table.add_row(Text(printable(finding.name)), finding.type_name, verdict, error)
    console.print(table)
    counts = Counter(finding.verdict for finding in findings)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    console.print(f"{len(findings)} tensors: {', '.join(parts)}", highlight=False, soft_wrap=True)
    # Of a tensor that differs, or stands rotated for plain weights, the error is not known.
    unknown = (Verdict.DIFFERENT, Verdict.ROUNDED)
    if not any(finding.verdict in unknown for finding in findings):
        judgement = judge((finding.target, finding.stats) for finding in findings)
        console.print(f"verdict: {judgement.line}", highlight=False, soft_wrap=True)
