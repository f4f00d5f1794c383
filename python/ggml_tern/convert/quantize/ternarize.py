"""Quantize: the bytes of each tensor, block of rows by block of rows.

Ternary types are packed by ggml_tern._core, which picks for every group the scale of least squared error;
the others by gguf-py. Work is cut into pieces of some hundred thousand weights, which threads
quantize in parallel and hand on in order, so that memory stays at a few pieces whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.sources import Source, chosen_rows, prepared_rows, sample_rows
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.errors import TernError
from ggml_tern.ordered import in_order
from ggml_tern.tensors.types import GROUP_TYPES, PQ2_0
from ggml_tern.tensors.values import as_float32

#: Weights in one piece of work: large enough to hide the cost of a call, small enough for the caches.
_PIECE = 1 << 19

#: The relative error of rounding a normal number to fp16.
_FP16_ROUNDING = 2.0**-11


@dataclass
class Stats:
    """What quantizing cost, over a tensor's weights.

    Attributes:
        n, zeros: weights, and those that decode to 0.
        sum_sq, sum_sq_error: sums of w^2 and of (w - decoded)^2, in float64.
        changed: weights outside of ternary types that decode to something else. Not to be seen from the error
            alone: even in float64, that of numbers which a type rounds to 0 may be nothing beside a sum.
        groups: groups that were ternarized; 0 for other types.
        ternary_groups: of these, the ones that were ternary before (nothing but -a, 0 and a).
        exact_groups: of these, the ones whose a is an fp16 number and was kept as it is.
        max_scale_error: the largest relative error of rounding such an a to fp16.
    """

    n: int = 0
    zeros: int = 0
    sum_sq: float = 0.0
    sum_sq_error: float = 0.0
    changed: int = 0
    groups: int = 0
    ternary_groups: int = 0
    exact_groups: int = 0
    max_scale_error: float = 0.0

    def add(self, other: Stats) -> None:
        self.n += other.n
        self.zeros += other.zeros
        self.sum_sq += other.sum_sq
        self.sum_sq_error += other.sum_sq_error
        self.changed += other.changed
        self.groups += other.groups
        self.ternary_groups += other.ternary_groups
        self.exact_groups += other.exact_groups
        self.max_scale_error = max(self.max_scale_error, other.max_scale_error)

    def times(self, factor: float) -> Stats:
        """Those of a tensor that is larger by a factor of at least 1, and otherwise alike."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        larger = {
            name: round(value * factor) if isinstance(value, int) else value * factor
            for name, value in values.items()
        }
        return Stats(**larger | {"max_scale_error": self.max_scale_error})

    @property
    def is_exact(self) -> bool:
        """Whether every weight decodes to what it was."""
        return self.changed == 0 and self.groups == self.exact_groups

    @property
    def is_lossless(self) -> bool:
        """The same, but for the rounding of ternary groups' scales to fp16."""
        if not self.groups:
            return self.is_exact
        return self.groups == self.ternary_groups and self.max_scale_error <= _FP16_ROUNDING

    @property
    def relative_error(self) -> float:
        """The share of the weights' energy that was lost, sum (w - decoded)^2 / sum w^2."""
        return self.sum_sq_error / self.sum_sq if self.sum_sq else 0.0


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, encoded: uint8 bytes in file order."""

    data: NDArray[np.uint8]
    stats: Stats


def encode(
    target: Target,
    sources: Sequence[Source],
    pool: ThreadPoolExecutor,
    n_threads: int,
    *,
    lossless: bool = False,
) -> Iterator[Piece]:
    """Yield the encoded tensor piece by piece, in order.

    Args:
        target: the tensor and its type.
        sources: what it is made of; their rows follow one another.
        pool: runs the pieces, `n_threads` at a time.
        lossless: refuse what is not `Stats.is_lossless`.

    Raises TernError naming the element for a NaN, an infinity, or a value that F16 cannot hold, and naming
    the rows for what `lossless` refuses.
    """
    n_rows = target.spec.rows_per_source
    rows_per_piece = max(1, _PIECE // max(1, target.spec.shape[-1]))
    work = _encoder(target, lossless)
    return in_order(
        pool,
        n_threads,
        (
            partial(work, source, start, min(start + rows_per_piece, n_rows))
            for source in sources
            for start in range(0, n_rows, rows_per_piece)
        ),
    )


def sample(target: Target, sources: Sequence[Source], *, lossless: bool = False) -> Stats:
    """What quantizing a tensor will cost, from some of its rows. Raises what `encode` does, where it lies in
    these."""
    work = _encoder(target, lossless)
    total = Stats()
    for source, row in sample_rows(target.spec, sources):
        total.add(work(source, row, row + 1).stats)
    return total.times(target.n_weights / total.n)


def _encoder(target: Target, lossless: bool) -> Callable[[Source, int, int], Piece]:
    """The function that encodes some rows of a source. It raises TernError, as `encode` says."""
    spec = target.spec
    encode_rows = _row_encoder(target)

    def work(source: Source, start: int, stop: int) -> Piece:
        if source.packed is not None and source.type_id == target.type.id and not target.type.is_ternary:
            piece = _copy(source, spec.shape[-1], start, stop)
        else:
            try:
                piece = encode_rows(prepared_rows(spec, source, start, stop))
            except ValueError as error:
                check_finite(spec, source, start, stop)
                raise TernError(f"{source.where}: cannot be stored as {target.type.name}: {error}") from None
        if lossless and not piece.stats.is_lossless:
            raise TernError(
                f"{source.where}: rows {start} to {stop - 1} do not fit {target.type.name} without loss "
                f"(relative error {piece.stats.relative_error:.1e}); give the tensor another type with "
                f"--keep, or drop --lossless"
            )
        return piece

    return work


def check_finite(spec: TensorSpec, source: Source, start: int, stop: int) -> None:
    """Raise TernError naming the element for a NaN and an infinity among some rows of a source."""
    chosen = chosen_rows(spec, start, stop)
    rows = source.rows[chosen]
    # In bfloat16, an exponent of all ones is an infinity or a NaN.
    exponent = np.uint16(0x7F80)
    bad = (rows & exponent) == exponent if rows.dtype == np.uint16 else ~np.isfinite(rows)
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        value = float(as_float32(rows[row, column : column + 1])[0])
        source_row = chosen.start + row if isinstance(chosen, slice) else int(chosen[row])
        raise TernError(
            f"{source.where}: the element at row {source_row}, column {column} is {value}; "
            "the checkpoint is damaged or diverged in training"
        )


def is_ternary(spec: TensorSpec, sources: Sequence[Source]) -> bool:
    """Whether a tensor holds nothing but -a, 0 and a in every group of 128. Stops at the first that does
    not."""
    if spec.shape[-1] % PQ2_0.block:
        return False
    n_rows = spec.rows_per_source
    rows_per_piece = max(1, _PIECE // spec.shape[-1])
    for source in sources:
        for start in range(0, n_rows, rows_per_piece):
            rows = prepared_rows(spec, source, start, min(start + rows_per_piece, n_rows))
            try:
                _, stats = _quantize(PQ2_0.id, rows, n_threads=0)
            except ValueError:
                return False
            if stats.ternary_groups != stats.groups:
                return False
    return True


def _quantize(type_id: int, rows: NDArray[Any], n_threads: int) -> tuple[NDArray[np.uint8], Stats]:
    """Rows as blocks of a ternary type, uint8 [1, nbytes]. Raises ValueError for values that are not finite
    or too large."""
    # Blocks do not care about rows, and one long row is worked through fastest.
    flat = np.require(rows, requirements=["C", "A"]).reshape(1, -1)
    data, stats = _core.ternarize(type_id, flat, n_threads=n_threads)
    return data, Stats(**stats)


def _row_encoder(target: Target) -> Callable[[NDArray[Any]], Piece]:
    """The function that encodes rows: float32, float16, or uint16 holding bfloat16 bits. It raises ValueError
    for values that are not finite or that the type cannot hold."""
    type_id = target.type.id
    grouped = GROUP_TYPES[target.group].id if target.group else type_id

    def ternary(rows: NDArray[Any]) -> Piece:
        data, stats = _quantize(grouped, rows, n_threads=1)
        if grouped != type_id:
            data = _core.transcode(grouped, type_id, data, n_threads=1)
        return Piece(data.reshape(-1), stats)

    def stock(rows: NDArray[Any]) -> Piece:
        values = as_float32(rows).reshape(1, -1)
        qtype = gguf.GGMLQuantizationType(type_id)
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                data = gguf.quants.quantize(values, qtype)
            except NotImplementedError:
                raise ValueError("llama-quantize writes this type, and ternconv does not") from None
            decoded = gguf.quants.dequantize(data, qtype)
            sum_sq_error = _sum_sq(np.subtract(values, decoded, dtype=np.float64))
        if not np.isfinite(sum_sq_error):
            raise ValueError(f"values up to {np.abs(values).max():g} are too large for it")
        return Piece(
            np.ascontiguousarray(data).view(np.uint8).reshape(-1),
            Stats(
                n=values.size,
                zeros=values.size - int(np.count_nonzero(decoded)),
                sum_sq=_sum_sq(values),
                sum_sq_error=sum_sq_error,
                changed=int(np.count_nonzero(values != decoded)),
            ),
        )

    return ternary if target.type.is_ternary else stock


def _copy(source: Source, n_in: int, start: int, stop: int) -> Piece:
    """Rows that have the type already."""
    assert source.packed is not None
    try:
        values = as_float32(source.rows[start:stop])
    except TernError:
        # Of a type that nothing here decodes, and need not.
        return Piece(source.packed[start:stop].reshape(-1), Stats(source.packed[start:stop].shape[0] * n_in))
    stats = Stats(values.size, values.size - int(np.count_nonzero(values)), _sum_sq(values))
    return Piece(source.packed[start:stop].reshape(-1), stats)


def _sum_sq(values: NDArray[Any]) -> float:
    # Not a BLAS dot product: that would start threads of its own in every one of ours. In float64: the
    # square of a float32 number may be too small or too large for float32.
    return float(np.sum(np.square(values, dtype=np.float64)))
