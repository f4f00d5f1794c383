"""Stage 4, quantize: which type each tensor gets, and its bytes, block of rows by block of rows.

Ternary types are packed by ggml_tern._core, which picks for every group the scale of least squared error;
Q8_0, Q4_0 and F16 by gguf-py. Work is cut into pieces of some hundred thousand weights, which threads
quantize in parallel and hand on in order, so that memory stays at a few pieces whatever the size of a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.architectures import Role, TensorSpec
from ggml_tern.convert.sources import Source
from ggml_tern.errors import TernError

#: Weights in one piece of work: large enough to hide the cost of a call, small enough for the caches.
_PIECE = 1 << 17


@dataclass(frozen=True)
class TensorType:
    """A ggml type: `block` weights take `nbytes` bytes; `id` is what the file says."""

    name: str
    id: int
    block: int
    nbytes: int

    @property
    def is_ternary(self) -> bool:
        return self.id in _core.TERNARY_TYPES

    def row_bytes(self, n_in: int) -> int:
        return n_in // self.block * self.nbytes


def _ternary(type_id: int) -> TensorType:
    return TensorType(_core.type_name(type_id), type_id, _core.block_size(type_id), _core.type_size(type_id))


def _stock(qtype: gguf.GGMLQuantizationType) -> TensorType:
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    return TensorType(qtype.name, int(qtype), block, nbytes)


PTQ1_0 = _ternary(_core.TYPE_PTQ1_0)
PQ2_0 = _ternary(_core.TYPE_PQ2_0)
Q2_0 = _ternary(_core.TYPE_Q2_0)
Q8_0 = _stock(gguf.GGMLQuantizationType.Q8_0)
Q4_0 = _stock(gguf.GGMLQuantizationType.Q4_0)
F16 = _stock(gguf.GGMLQuantizationType.F16)
F32 = _stock(gguf.GGMLQuantizationType.F32)

#: The types that an option may name.
MATRIX_TYPES = {"ptq1_0": PTQ1_0, "pq2_0": PQ2_0, "q8_0": Q8_0}
TABLE_TYPES = {"q8_0": Q8_0, "q4_0": Q4_0, "f16": F16, "ptq1_0": PTQ1_0, "pq2_0": PQ2_0}


@dataclass(frozen=True)
class TypeChoice:
    """What the user asked for: the types of the block matrices, the embedding, the head (None: not said)."""

    matrix: TensorType
    embedding: TensorType
    head: TensorType | None = None


@dataclass(frozen=True)
class Target:
    """A tensor and its type in the file; `wanted` is the type asked for where that does not fit the rows."""

    spec: TensorSpec
    type: TensorType
    wanted: TensorType | None = None

    @property
    def nbytes(self) -> int:
        *outer, n_in = self.spec.shape
        return int(np.prod(outer, dtype=np.int64)) * self.type.row_bytes(n_in)


@dataclass
class Stats:
    """What quantizing cost, over a tensor's weights.

    Attributes:
        n, zeros: weights, and those that decode to 0.
        sum_sq, sum_sq_error: sums of w^2 and of (w - decoded)^2.
        groups: groups that were ternarized; 0 for other types.
        ternary_groups: of these, the ones that were ternary before (nothing but -a, 0 and a).
        exact_groups: of these, the ones whose a is an fp16 number and was kept as it is.
        max_scale_error: the largest relative error of rounding such an a to fp16.
    """

    n: int = 0
    zeros: int = 0
    sum_sq: float = 0.0
    sum_sq_error: float = 0.0
    groups: int = 0
    ternary_groups: int = 0
    exact_groups: int = 0
    max_scale_error: float = 0.0

    def add(self, other: Stats) -> None:
        self.n += other.n
        self.zeros += other.zeros
        self.sum_sq += other.sum_sq
        self.sum_sq_error += other.sum_sq_error
        self.groups += other.groups
        self.ternary_groups += other.ternary_groups
        self.exact_groups += other.exact_groups
        self.max_scale_error = max(self.max_scale_error, other.max_scale_error)


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, encoded: uint8 bytes in file order."""

    data: NDArray[np.uint8]
    stats: Stats


def choose_target(spec: TensorSpec, choice: TypeChoice) -> Target:
    """The type of a tensor: the one asked for, or the nearest whose blocks divide its rows.

    A ternary type falls back to Q2_0, whose group is 64, then to Q8_0; a block type whose group of 32 does
    not divide the rows either falls back to F16.
    """
    if spec.role is Role.VECTOR:
        return Target(spec, F32)
    wanted = {Role.EMBEDDING: choice.embedding, Role.HEAD: choice.head or Q8_0, Role.MATRIX: choice.matrix}[
        spec.role
    ]
    n_in = spec.shape[-1]
    ladder = (wanted, Q2_0, Q8_0, F16) if wanted.is_ternary else (wanted, F16)
    fitting = next(candidate for candidate in ladder if n_in % candidate.block == 0)
    return Target(spec, fitting, wanted if fitting != wanted else None)


def encode(
    target: Target, sources: Sequence[Source], pool: ThreadPoolExecutor, n_threads: int
) -> Iterator[Piece]:
    """Yield the encoded tensor piece by piece, in order.

    Args:
        target: the tensor and its type.
        sources: what it is made of; their rows follow one another.
        pool: runs the pieces, `n_threads` at a time.

    Raises TernError naming the element for a NaN, an infinity, or a value that F16 cannot hold.
    """
    spec = target.spec
    is_vector = len(spec.shape) == 1
    n_rows = spec.rows_per_source
    rows_per_piece = max(1, _PIECE // max(1, spec.shape[-1]))
    column_order = spec.row_order if is_vector else spec.column_order
    row_order = None if is_vector else spec.row_order
    encoder = _encoder(target.type)

    def work(source: Source, start: int) -> Piece:
        stop = min(start + rows_per_piece, n_rows)
        chosen = slice(start, stop) if row_order is None else row_order[start:stop]
        rows = source.rows[chosen]
        _check_finite(rows, chosen, source.where)
        if column_order is not None:
            rows = rows[:, column_order]
        if spec.shift:
            rows = _as_float32(rows) + np.float32(spec.shift)
        if spec.function is not None:
            rows = spec.function(_as_float32(rows))
        return encoder(rows, source.where)

    waiting: deque[Future[Piece]] = deque()
    for source in sources:
        for start in range(0, n_rows, rows_per_piece):
            waiting.append(pool.submit(work, source, start))
            # Enough to keep the threads busy while a piece is written.
            if len(waiting) > 2 * n_threads:
                yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _as_float32(rows: NDArray[Any]) -> NDArray[np.float32]:
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)


def _check_finite(rows: NDArray[Any], chosen: slice | NDArray[np.intp], where: str) -> None:
    # In bfloat16, an exponent of all ones is an infinity or a NaN.
    exponent = np.uint16(0x7F80)
    bad = (rows & exponent) == exponent if rows.dtype == np.uint16 else ~np.isfinite(rows)
    if bad.any():
        row, column = (int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
        value = float(_as_float32(rows[row, column : column + 1])[0])
        source_row = chosen.start + row if isinstance(chosen, slice) else int(chosen[row])
        raise TernError(
            f"{where}: the element at row {source_row}, column {column} is {value}; "
            "the checkpoint is damaged or diverged in training"
        )


def _encoder(tensor_type: TensorType) -> Callable[[NDArray[Any], str], Piece]:
    """The function that encodes rows of finite values: float32, float16, or uint16 holding bfloat16 bits."""

    # Blocks do not care about rows, and both quantizers work through one long row fastest.

    def ternary(rows: NDArray[Any], where: str) -> Piece:
        flat = np.require(rows, requirements=["C", "A"]).reshape(1, -1)
        try:
            data, stats = _core.quantize(tensor_type.id, flat, n_threads=1)
        except ValueError as error:
            raise TernError(f"{where}: cannot be stored as {tensor_type.name}: {error}") from None
        return Piece(data.reshape(-1), Stats(**stats))

    def stock(rows: NDArray[Any], where: str) -> Piece:
        values = _as_float32(rows).reshape(1, -1)
        qtype = gguf.GGMLQuantizationType(tensor_type.id)
        with np.errstate(over="ignore", invalid="ignore"):
            data = gguf.quants.quantize(values, qtype)
            decoded = gguf.quants.dequantize(data, qtype)
            sum_sq_error = _sum_sq(values - decoded)
        if not np.isfinite(sum_sq_error):
            raise TernError(
                f"{where}: has values up to {np.abs(values).max():g}, too large for {tensor_type.name}"
            )
        return Piece(
            np.ascontiguousarray(data).view(np.uint8).reshape(-1),
            Stats(
                n=values.size,
                zeros=values.size - int(np.count_nonzero(decoded)),
                sum_sq=_sum_sq(values),
                sum_sq_error=sum_sq_error,
            ),
        )

    return ternary if tensor_type.is_ternary else stock


def _sum_sq(values: NDArray[np.float32]) -> float:
    # Not a BLAS dot product: that would start threads of its own in every one of ours.
    return float(np.sum(np.square(values), dtype=np.float64))
