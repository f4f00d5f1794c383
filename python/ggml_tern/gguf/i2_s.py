"""bitnet.cpp's I2_S: two bits a weight, and one fp32 scale for the whole tensor, stored behind the data.

A block is 32 bytes for 128 weights that lie side by side in a row. Byte m holds the weights m, 32 + m, 64 + m
and 96 + m, the first in its highest two bits; the codes 0, 1, 2 stand for -1, 0, +1, and 3 reads as 0. The
scale comes right behind the last block and has 32 bytes to itself. Layout read from quantize_i2_s and
dequantize_row_i2_s in github.com/microsoft/BitNet. (Its kernels for ARM once wrote blocks of 64 under the
same id, which nothing in a file tells apart; the published models have blocks of 128.)

A half of a TQ2_0 block has the same codes at the same bytes, only in the opposite order within the byte.
One look-up a byte therefore makes TQ2_0 blocks, and _core does the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core

_HALF = 32  # bytes of codes: an I2_S block, half a TQ2_0 block
_TQ2_0_CODES = 2 * _HALF
_ALL_ZERO = 0b01010101


def _reversed_codes() -> NDArray[np.uint8]:
    """For every byte, the byte with its four codes in the opposite order, and 1 for code 3."""
    out = np.zeros(256, np.uint8)
    for shift in (0, 2, 4, 6):
        codes = np.arange(256, dtype=np.uint8) >> shift & 3
        codes[codes == 3] = 1
        out |= codes << (6 - shift)
    return out


_REVERSED = _reversed_codes()


def to_tq2_0(blocks: NDArray[np.uint8], scale: np.float16) -> NDArray[np.uint8]:
    """I2_S blocks, uint8 [..., 32 * n], as TQ2_0 blocks in one row, uint8 [1, 66 * ceil(n / 2)].

    An odd number of blocks is filled up with zero weights.
    """
    codes = _REVERSED[blocks.reshape(-1)]
    out = np.empty((-(-codes.size // _TQ2_0_CODES), _TQ2_0_CODES + 2), np.uint8)
    if codes.size % _TQ2_0_CODES:
        codes = np.concatenate([codes, np.full(_HALF, _ALL_ZERO, np.uint8)])
    out[:, :_TQ2_0_CODES] = codes.reshape(-1, _TQ2_0_CODES)
    out[:, _TQ2_0_CODES:] = np.array([scale], "<f2").view(np.uint8)
    return out.reshape(1, -1)


def dequantize(blocks: NDArray[np.uint8], scale: np.float32) -> NDArray[np.float32]:
    """I2_S blocks, uint8 [n_rows, n_in / 4], to float32 [n_rows, n_in], every value trit * scale."""
    n_rows, row_bytes = blocks.shape
    trits = _core.dequantize(_core.TYPE_TQ2_0, to_tq2_0(blocks, np.float16(1)), n_threads=1)
    values = trits[0, : n_rows * row_bytes * 4].reshape(n_rows, row_bytes * 4)
    np.multiply(values, scale, out=values)
    return values
