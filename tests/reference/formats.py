"""The five ternary block formats and the integer matmul in plain numpy.

This is the yardstick for the compiled codecs and kernels, so it shares nothing with them: every format is
a table that says, weight by weight, which byte of the block holds it and at which place, read straight off
the written description of the format. Nothing here is fast and nothing here needs to be.

A *block* is the unit of storage: ``block`` weights that share one fp16 scale. A *row* is ``n_in`` weights,
a whole number of blocks. *Trits* are -1, 0 and +1; two-bit formats have room for a fourth code, which
decodes as +2 and is never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

FP16_MAX = 65504.0
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Format:
    """One block layout.

    place[j] is where weight j lives: ``(byte, shift)`` for two-bit codes, ``(byte, n)`` for the n-th
    base-3 digit of a byte (digit 0 is the most significant of five).
    """

    name: str
    type_id: int
    block: int
    n_bytes: int
    scale_at: int
    base3: bool
    place: tuple[tuple[int, int], ...]


def _two_bit_in_sequence(block: int, first_byte: int) -> tuple[tuple[int, int], ...]:
    """Four consecutive weights a byte, lowest bits first."""
    return tuple((first_byte + j // 4, 2 * (j % 4)) for j in range(block))


def _strided(spans: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans of ``width`` bytes that each hold ``depth`` weights: weight ``width*n + m`` of a span is the
    n-th value of its byte m. A span is (first_byte, width, depth); weights run on from span to span."""
    return tuple((first + m, n) for first, width, depth in spans for n in range(depth) for m in range(width))


# { fp16 d; u8 qs[32]; }
PQ2_0 = Format("PQ2_0", 142, 128, 34, 0, False, _two_bit_in_sequence(128, 2))
# { u8 qs[24]; u8 qh[2]; fp16 d; }
PTQ1_0 = Format("PTQ1_0", 143, 128, 28, 26, True, _strided([(0, 16, 5), (16, 8, 5), (24, 2, 4)]))
# { fp16 d; u8 qs[16]; }
Q2_0 = Format("Q2_0", 42, 64, 18, 0, False, _two_bit_in_sequence(64, 2))
# { u8 qs[64]; fp16 d; }: two runs of 32 bytes, in each the byte's four codes lie 32 weights apart
TQ2_0 = Format(
    "TQ2_0", 35, 256, 66, 64, False, tuple((b, 2 * n) for b, n in _strided([(0, 32, 4), (32, 32, 4)]))
)
# { u8 qs[48]; u8 qh[4]; fp16 d; }
TQ1_0 = Format("TQ1_0", 34, 256, 54, 52, True, _strided([(0, 32, 5), (32, 16, 5), (48, 4, 4)]))

FORMATS: dict[int, Format] = {f.type_id: f for f in (PQ2_0, PTQ1_0, Q2_0, TQ2_0, TQ1_0)}


def pack(fmt: Format, trits: I8, scales: F32) -> U8:
    """trits int8 [n_rows, n_in], scales float32 [n_rows, n_in/block] -> uint8 [n_rows, row_bytes]."""
    n_rows, n_in = trits.shape
    codes = (trits.astype(np.int32) + 1).reshape(n_rows, n_in // fmt.block, fmt.block)
    packed = np.zeros((n_rows, n_in // fmt.block, fmt.n_bytes), np.int32)
    for j, (byte, at) in enumerate(fmt.place):
        packed[..., byte] += codes[..., j] * 3 ** (4 - at) if fmt.base3 else codes[..., j] << at
    if fmt.base3:
        # The byte is the fraction v/243 in units of 1/256, rounded up, so that multiplying by 3 shifts
        # the next digit out at the top.
        packed = -(-packed * 256 // 243)
    out = packed.astype(np.uint8)
    out[..., fmt.scale_at : fmt.scale_at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return out.reshape(n_rows, -1)


def unpack(fmt: Format, data: U8) -> tuple[I8, F32]:
    """uint8 [n_rows, row_bytes] -> (trits int8 [n_rows, n_in], scales float32 [n_rows, n_in/block])."""
    n_rows = data.shape[0]
    blocks = data.reshape(n_rows, -1, fmt.n_bytes)
    trits = np.empty((*blocks.shape[:2], fmt.block), np.int8)
    for j, (byte, at) in enumerate(fmt.place):
        b = blocks[..., byte].astype(np.int32)
        code = ((b * 3**at & 255) * 3) >> 8 if fmt.base3 else b >> at & 3
        trits[..., j] = code - 1
    scales = np.ascontiguousarray(blocks[..., fmt.scale_at : fmt.scale_at + 2]).view("<f2")[..., 0]
    return trits.reshape(n_rows, -1), scales.astype(np.float32)


def dequantize(fmt: Format, data: U8) -> F32:
    """uint8 [n_rows, row_bytes] -> float32 [n_rows, n_in], every value trit * scale."""
    trits, scales = unpack(fmt, data)
    return trits.astype(np.float32) * np.repeat(scales, fmt.block, axis=1)


def ternarize_group(w: npt.NDArray[np.floating]) -> tuple[I8, np.float16]:
    """The trits and the fp16 scale d that bring a group w, float [n], to the least squared error.

    For a given number k of non-zero weights the k largest magnitudes are the ones to keep, their mean is
    the scale, and the error is sum(w^2) - S_k^2/k with S_k their sum: so the best k maximizes S_k^2/k.
    The scale is then rounded to fp16 and every weight goes to the nearest of {-d, 0, d}.
    """
    magnitude = np.abs(w.astype(np.float64))
    sums = np.cumsum(np.sort(magnitude)[::-1])
    counts = np.arange(1, w.size + 1)
    best = int(np.argmax(sums**2 / counts))
    d = np.float16(min(sums[best] / counts[best], FP16_MAX))
    if d == 0:
        return np.zeros(w.size, np.int8), d
    return (np.sign(w) * (magnitude > 0.5 * np.float64(d))).astype(np.int8), d


def ternarize(fmt: Format, w: npt.NDArray[np.floating]) -> tuple[I8, F32]:
    """ternarize_group over every block of w, float [n_rows, n_in] -> (trits, scales) as `pack` takes them."""
    n_rows, n_in = w.shape
    trits = np.empty((n_rows, n_in), np.int8)
    scales = np.empty((n_rows, n_in // fmt.block), np.float32)
    for row in range(n_rows):
        for g in range(n_in // fmt.block):
            span = slice(g * fmt.block, (g + 1) * fmt.block)
            trits[row, span], scales[row, g] = ternarize_group(w[row, span])
    return trits, scales


def least_error_any_scale(w: npt.NDArray[np.floating]) -> float:
    """The least squared error of a group w, float [n], over every fp16 scale that there is: a lower bound
    that no ternarization can pass, whatever its reasoning."""
    magnitude = np.sort(np.abs(w.astype(np.float64)))
    scales = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.concatenate([[0.0], np.cumsum(magnitude[::-1])])  # above[k]: sum of the k largest
    kept = w.size - np.searchsorted(magnitude, 0.5 * scales, side="right")
    errors = (magnitude**2).sum() - 2 * scales * above[kept] + kept * scales**2
    return float(errors.min())


def quantize_activations(x: F32) -> tuple[I8, F32]:
    """float32 [n_tokens, n_in] -> (int8 of the same shape, float32 scales [n_tokens, ceil(n_in/128)]).

    Per group of 128 (the last one may be shorter): d = amax/127, q = x/d rounded half to even; an all-zero
    group has d = 0 and q = 0.
    """
    n_tokens, n_in = x.shape
    groups = np.pad(x, ((0, 0), (0, -n_in % ACTIVATION_GROUP))).reshape(n_tokens, -1, ACTIVATION_GROUP)
    d = np.abs(groups).max(axis=-1) / np.float32(127)
    safe = np.where(d == 0, np.float32(1), d)
    q = np.rint(groups / safe[..., None]).astype(np.int8)
    return q.reshape(n_tokens, -1)[:, :n_in], d


def matmul(fmt: Format, data: U8, x: F32) -> F32:
    """Packed weights, uint8 [n_out, row_bytes], times activations, float32 [n_tokens, n_in]
    -> float32 [n_tokens, n_out].

    Activations go to int8 per group of 128; products are summed as integers over the shorter of the weight
    block and the activation group, scaled in fp32 by both scales, and added up in fp32 from the first
    group to the last. The integer sums run in fp32 matrix products, where they are exact: no sum is beyond
    128 * 127 * 2.
    """
    trits, scales = unpack(fmt, data)
    q, d = quantize_activations(x)
    n_tokens, n_in = x.shape
    span = min(fmt.block, ACTIVATION_GROUP)
    y = np.zeros((n_tokens, trits.shape[0]), np.float32)
    for first in range(0, n_in, span):
        part = slice(first, first + span)
        dots = q[:, part].astype(np.float32) @ trits[:, part].astype(np.float32).T
        y += dots * (d[:, first // ACTIVATION_GROUP, None] * scales[None, :, first // fmt.block])
    return y
