"""Attention as the formula has it, in float64, and random inputs for it.

A cache is uint8 [n_kv, n_kv_heads, row_bytes] in one of ggml's types, by its id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.float16]

F32_TYPE, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = 0, 1, 2, 3, 6, 7, 8, 30
TYPES = (F32_TYPE, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16)


def cache(rng: np.random.Generator, type_id: int, n_kv: int, n_kv_heads: int, d: int) -> U8:
    """Random rows of a cache: uint8 [n_kv, n_kv_heads, row_bytes]."""
    values = rng.standard_normal((n_kv, n_kv_heads, d)).astype(np.float32)
    if type_id == F32_TYPE:
        return values.view(np.uint8)
    if type_id == F16:
        return values.astype(np.float16).view(np.uint8)
    return quants.quantize(values, GGMLQuantizationType(type_id)).view(np.uint8)


def decoded(type_id: int, rows: U8) -> F64:
    plain = {F32_TYPE: np.float32, F16: np.float16}
    if type_id in plain:
        return rows.view(plain[type_id]).astype(np.float64)
    return quants.dequantize(rows, GGMLQuantizationType(type_id)).astype(np.float64)


def random_mask(rng: np.random.Generator, n_tokens: int, n_kv: int) -> Mask:
    """Hides some of the positions, and all of them from about every tenth token."""
    mask = rng.standard_normal((n_tokens, n_kv))
    mask[rng.random((n_tokens, n_kv)) < rng.choice([0.1, 0.9])] = -np.inf
    mask[rng.random(n_tokens) < 0.1] = -np.inf
    return mask.astype(np.float16)


def slopes(n_heads: int, max_bias: float) -> F64:
    """ALiBi, as ggml has it for any number of heads."""
    if max_bias == 0:
        return np.ones(n_heads)
    power = 2 ** int(np.log2(n_heads))
    first = [2.0 ** (-max_bias / power * (h + 1)) for h in range(power)]
    return np.array(first + [2.0 ** (-max_bias / 2 / power * (2 * h + 1)) for h in range(n_heads - power)])


def reference(
    q: F32,
    k: F64,
    v: F64,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    max_bias: float = 0,
    softcap: float = 0,
    sinks: list[float] | None = None,
) -> F64:
    """The formula, in float64: q [n_tokens, n_heads, d_k], k and v [n_kv, n_kv_heads, d]."""
    n_tokens, n_heads, d_k = q.shape
    group = n_heads // k.shape[1]
    out = np.zeros((n_tokens, n_heads, v.shape[2]))
    for head, slope in enumerate(slopes(n_heads, max_bias)):
        scores = q[:, head].astype(np.float64) @ k[:, head // group].T
        scores *= d_k**-0.5 if scale is None else scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None:
            scores = scores + slope * mask.astype(np.float64)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((n_tokens, 1), sinks[head])], axis=1)
        highest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
        total = weights.sum(axis=1, keepdims=True)
        out[:, head] = weights[:, : len(v)] @ v[:, head // group] / np.where(total == 0, 1, total)
    return out


def assert_matches(y: F32, want: F64) -> None:
    assert y.shape == want.shape
    assert np.abs(y - want).max() <= 4e-6 * max(1.0, float(np.abs(want).max()))
