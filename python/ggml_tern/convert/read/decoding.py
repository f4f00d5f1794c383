"""From stored elements to values: every kind of stored tensor as a matrix that is decoded by rows on demand.

Nothing here holds a decoded tensor: each request maps and decodes the rows it names, so that memory stays at
a few pieces whatever the size of a tensor. All arithmetic is in float32, as in the models' own layers.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.read.stored_tensors import Scale, StoredTensor, map_tensor
from ggml_tern.errors import TernError
from ggml_tern.tensors.values import Chosen, Rows, as_float32

#: BitNet packs four codes of two bits into a byte, each of another row.
ROWS_PER_BYTE = 4

#: Elements in one step of a pass over a whole tensor.
_STEP = 1 << 20


def load_rows(tensor: StoredTensor) -> Rows:
    """The values of a tensor.

    BF16, F16 and F32 come as a read-only mapped array of the stored shape (BF16 as uint16 bits). Anything
    else is a matrix of float32 rows, (n_rows, n_in), in which all dimensions but the last are rows.

    Raises TernError for a type that ternconv does not read, and for codes without their scale. The returned
    object raises it for codes that mean nothing and scales that are no numbers.
    """
    stored = map_tensor(tensor)
    if tensor.dtype in ("BF16", "F16", "F32") and tensor.scale is None and not tensor.absmean:
        return stored
    matrix = np.atleast_1d(stored)
    matrix = matrix.reshape(int(np.prod(matrix.shape[:-1])), matrix.shape[-1])
    if tensor.absmean:
        return AbsmeanRows(matrix)
    if tensor.scale is not None:
        return ScaledRows(_unscaled(matrix, tensor), tensor.scale)
    if tensor.dtype in ("I8", "U8"):
        raise TernError(
            f"{tensor} is stored as {tensor.dtype} and no scale is beside it; expected {tensor.name}_scale, "
            "so download the checkpoint again"
        )
    return _unscaled(matrix, tensor)


def _unscaled(matrix: NDArray[Any], tensor: StoredTensor) -> Rows:
    if tensor.dtype == "U8":
        return PackedRows(matrix, str(tensor))
    if tensor.dtype == "F64":
        return NarrowedRows(matrix, str(tensor))
    table = _TABLES.get(tensor.dtype)
    return matrix if table is None else TableRows(matrix, table)


def _load_scales(scale: Scale) -> Rows:
    grid = map_tensor(scale.tensor).reshape(scale.grid)
    # The exponents of F8_E8M0, by the name that older writers give to bytes.
    if scale.tensor.dtype == "U8":
        return TableRows(grid, _TABLES["F8_E8M0"])
    return _unscaled(grid, scale.tensor)


class TableRows:
    """8-bit floats (uint8 bits): `table` has the value of each of the 256."""

    def __init__(self, bits: NDArray[np.uint8], table: NDArray[np.float32]) -> None:
        self.shape = bits.shape
        self._bits = bits
        self._table = table

    def __getitem__(self, rows: Chosen) -> NDArray[np.float32]:
        return self._table.take(self._bits[rows])


class NarrowedRows:
    """Float64 whose every element is a float32 number; any other raises TernError, as it would be changed."""

    def __init__(self, values: NDArray[np.float64], where: str) -> None:
        self.shape = values.shape
        self._values = values
        self._where = where

    def __getitem__(self, rows: Chosen) -> NDArray[np.float32]:
        wide = self._values[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = wide.astype(np.float32)
        lost = (narrow != wide) & ~np.isnan(wide)
        if lost.any():
            raise TernError(
                f"{self._where} is stored as F64, and {wide[lost][0]!r} in it is no float32 number; save the "
                "model as float32"
            )
        return narrow


class PackedRows:
    """BitNet's packed codes, (n_out / 4, n_in) uint8: bits 2i and 2i+1 of row r hold row i * n_out / 4 + r,
    0, 1 and 2 for -1, 0 and +1 (transformers.integrations.bitnet.unpack_weights)."""

    def __init__(self, packed: NDArray[np.uint8], where: str) -> None:
        self.shape = (ROWS_PER_BYTE * packed.shape[0], packed.shape[1])
        self._packed = packed
        self._where = where

    def __getitem__(self, rows: Chosen) -> NDArray[np.float32]:
        numbers = _row_numbers(rows, self.shape[0])
        quarter, row = np.divmod(numbers, max(1, self._packed.shape[0]))
        codes = (self._packed[row] >> (2 * quarter).astype(np.uint8)[:, None]) & np.uint8(3)
        reserved = codes == 3
        if reserved.any():
            bad = int(numbers[int(np.argmax(reserved.any(axis=1)))])
            raise TernError(
                f"{self._where}: row {bad} holds the code 3, which is no ternary weight; "
                "download the checkpoint again"
            )
        return codes.astype(np.float32) - np.float32(1)


class ScaledRows:
    """Codes or values times the scales of their blocks (or divided by them)."""

    def __init__(self, values: Rows, scale: Scale) -> None:
        self.shape = values.shape
        self._values = values
        self._scales = _load_scales(scale)
        self._scale = scale

    def __getitem__(self, rows: Chosen) -> NDArray[np.float32]:
        block_rows, block_columns = self._scale.block
        values = as_float32(self._values[rows])
        scales = as_float32(self._scales[_row_numbers(rows, self.shape[0]) // block_rows])
        unusable = ~np.isfinite(scales)
        if self._scale.divides:
            unusable |= scales == 0
        if unusable.any():
            raise TernError(
                f"{self._scale.tensor} holds the scale {float(scales[unusable][0])}; "
                "download the checkpoint again"
            )
        if scales.shape[1] > 1:
            scales = np.repeat(scales, block_columns, axis=1)[:, : self.shape[1]]
        with np.errstate(over="ignore", invalid="ignore"):
            return values / scales if self._scale.divides else values * scales


class AbsmeanRows:
    """What a BitNet layer in `online` mode computes from its master weights w of type T:
    T(clip(round(w * s), -1, 1) / s) with s = 1 / max(mean(|w|), 1e-5) over the tensor
    (transformers.integrations.bitnet.WeightQuant).

    The mean takes a pass over the tensor, which the first request for rows makes.
    """

    def __init__(self, masters: NDArray[Any]) -> None:
        self.shape = masters.shape
        self._masters = masters
        self._lock = threading.Lock()
        self._scale: np.float32 | None = None

    def __getitem__(self, rows: Chosen) -> NDArray[np.float32]:
        with self._lock:
            if self._scale is None:
                self._scale = self._find_scale()
            scale = self._scale
        masters = as_float32(self._masters[rows])
        if not scale > 0:
            # Some master is NaN or infinite: whoever checks the rows will find it.
            return masters
        trits: NDArray[np.float32] = np.clip(np.rint(masters * scale), -1, 1)
        magnitude = _round_to(np.float32(1) / scale, self._masters.dtype)
        return trits * magnitude

    def _find_scale(self) -> np.float32:
        total = 0.0
        step = max(1, _STEP // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            masters = as_float32(self._masters[start : start + step])
            total += float(np.sum(np.abs(masters), dtype=np.float64))
        mean = np.float32(total / max(1, self._masters.size))
        return np.float32(1 / np.maximum(mean, np.float32(1e-5)))


def _row_numbers(rows: Chosen, n_rows: int) -> NDArray[np.intp]:
    return np.arange(*rows.indices(n_rows)) if isinstance(rows, slice) else rows


def _round_to(value: np.float32, dtype: np.dtype[Any]) -> np.float32:
    """A finite value rounded to nearest, ties to even, in the type of stored elements (uint16: bfloat16)."""
    if dtype != np.uint16:
        return np.float32(dtype.type(value))
    bits = int(value.view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.uint32(rounded).view(np.float32)


def _float8_e4m3() -> NDArray[np.float32]:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, and NaN where all seven bits are set."""
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    positive = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


def _float8_e5m2() -> NDArray[np.float32]:
    """The upper half of a float16."""
    return (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)


def _float8_e8m0() -> NDArray[np.float32]:
    """Powers of two, 2^(bits - 127), and NaN where all bits are set."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


_TABLES = {"F8_E4M3": _float8_e4m3(), "F8_E5M2": _float8_e5m2(), "F8_E8M0": _float8_e8m0()}
