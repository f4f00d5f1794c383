"""Random ternary weights and activations, and what a product of them must come to."""

from __future__ import annotations

import numpy as np

from reference import formats as ref


def random_ternary(
    rng: np.random.Generator, fmt: ref.Format, n_rows: int, n_blocks: int
) -> tuple[ref.I8, ref.F32]:
    """Trits with a zero share of their own for every row, and positive scales exact in fp16."""
    zero_share = rng.random((n_rows, 1))
    sign = rng.choice(np.array([-1, 1], np.int8), (n_rows, n_blocks * fmt.block))
    trits = np.where(rng.random(sign.shape) < zero_share, np.int8(0), sign)
    scales = rng.lognormal(-3, 2, (n_rows, n_blocks)).astype(np.float16).astype(np.float32)
    return trits, scales


def random_blocks(rng: np.random.Generator, fmt: ref.Format, n_out: int, n_in: int) -> ref.U8:
    trits = rng.integers(-1, 2, (n_out, n_in), np.int8)
    scales = rng.lognormal(-3, 1, (n_out, n_in // fmt.block)).astype(np.float16).astype(np.float32)
    return ref.pack(fmt, trits, scales)


def any_blocks(rng: np.random.Generator, fmt: ref.Format, n_out: int, n_in: int) -> ref.U8:
    """Random bytes, with scales of any finite value."""
    blocks = rng.integers(0, 256, (n_out, n_in // fmt.block, fmt.n_bytes), np.uint8)
    scales = rng.integers(0, 0x7C00, (n_out, n_in // fmt.block, 1), np.uint16)
    scales |= rng.integers(0, 2, scales.shape, np.uint16) << np.uint16(15)
    blocks[..., fmt.scale_at : fmt.scale_at + 2] = scales.view(np.uint8)
    return blocks.reshape(n_out, -1)


def random_activations(rng: np.random.Generator, *shape: int) -> ref.F32:
    """Gaussian with outliers, one all-zero group, and tokens of very different size."""
    x = rng.standard_normal(shape) ** 3 * rng.lognormal(0, 3, (*shape[:-1], 1))
    x[..., : min(128, shape[-1])][0] = 0
    return x.astype(np.float32)


def assert_matches(fmt: ref.Format, weights: ref.U8, x: ref.F32, y: ref.F32) -> None:
    """y, float32 [n_tokens, n_out], is the integer reference but for fp32 rounding, and but for single
    steps of the activation quantization, where x/d falls on a tie."""
    want = ref.matmul(fmt, weights, x)
    magnitude = np.abs(x) @ np.abs(ref.dequantize(fmt, weights)).T
    _, d = ref.quantize_activations(x)
    step = d.max(axis=1)[:, None] * ref.unpack(fmt, weights)[1].max(axis=1)[None, :]
    error = np.abs(y - want)
    assert (error <= 4e-6 * magnitude + 2 * step).all()
    assert np.mean(error <= 4e-6 * magnitude) > 0.99
