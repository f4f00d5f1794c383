"""Attention of the plug-in against plain numpy, its promise of identical bits, and whole models with it.

ggml's own test program asks the plug-in for FLASH_ATTN_EXT in test_backend_ops.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import compare_logits
import make_synthetic as synthetic
from ggml_tern import _core
from reference.attention import (
    BF16,
    F16,
    F32,
    F32_TYPE,
    Q4_0,
    Q5_1,
    Q8_0,
    TYPES,
    U8,
    assert_matches,
    cache,
    decoded,
    random_mask,
    reference,
)

ISAS = _core.available_isas()
#: Positions that the kernels take at a time, and those after which sums start anew.
CHUNK, PIECE = 64, 256


def bits(y: F32) -> npt.NDArray[np.uint32]:
    return y.view(np.uint32)


# ---- against the formula ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_k, type_v", list(itertools.product(TYPES, repeat=2)))
def test_every_pair_of_types(type_k: int, type_v: int, isa: str, rng: np.random.Generator) -> None:
    """With one row for a KV head, with the few that are decoded on the fly, and with more."""
    for n_tokens, n_heads, n_kv_heads in [(1, 3, 3), (1, 4, 2), (3, 7, 1)]:
        n_kv = int(rng.integers(1, 2 * CHUNK))
        q = rng.standard_normal((n_tokens, n_heads, 64)).astype(np.float32)
        k, v = cache(rng, type_k, n_kv, n_kv_heads, 64), cache(rng, type_v, n_kv, n_kv_heads, 32)
        y = _core.attention(q, type_k, k, type_v, v, isa=isa)
        assert_matches(y, reference(q, decoded(type_k, k), decoded(type_v, v)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("d_k, d_v", [(32, 32), (64, 64), (96, 96), (192, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
def test_shapes(d_k: int, d_v: int, group: int, isa: str, rng: np.random.Generator) -> None:
    for n_tokens, n_kv in [(1, 1), (2, 63), (7, 64), (1, 513), (33, int(rng.integers(2, 1000))), (100, 129)]:
        type_k, type_v = rng.choice(TYPES, 2)
        n_kv_heads = int(rng.integers(1, 4))
        q = rng.standard_normal((n_tokens, group * n_kv_heads, d_k)).astype(np.float32)
        k, v = cache(rng, type_k, n_kv, n_kv_heads, d_k), cache(rng, type_v, n_kv, n_kv_heads, d_v)
        mask = random_mask(rng, n_tokens, n_kv)
        y = _core.attention(q, type_k, k, type_v, v, mask, isa=isa)
        assert_matches(y, reference(q, decoded(type_k, k), decoded(type_v, v), mask))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_what_models_add(
    masked: bool, softcap: float, with_sinks: bool, max_bias: float, isa: str, rng: np.random.Generator
) -> None:
    n_tokens, n_kv, n_heads = 9, 700, 12
    q = 3 * rng.standard_normal((n_tokens, n_heads, 64)).astype(np.float32)
    k, v = cache(rng, Q8_0, n_kv, 4, 64), cache(rng, Q5_1, n_kv, 4, 64)
    mask = random_mask(rng, n_tokens, n_kv) if masked else None
    options: dict[str, Any] = {
        "scale": 0.3,
        "softcap": softcap,
        "max_bias": max_bias,
        "sinks": rng.normal(0, 5, n_heads).astype(np.float32).tolist() if with_sinks else None,
    }
    y = _core.attention(q, Q8_0, k, Q5_1, v, mask, isa=isa, **options)
    assert_matches(y, reference(q, decoded(Q8_0, k), decoded(Q5_1, v), mask, **options))


@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_any_size(isa: str, rng: np.random.Generator) -> None:
    """Scores far apart, in a rising order too: weights below the smallest number and a maximum that moves."""
    n_kv = 600
    q = np.ones((2, 1, 32), np.float32)
    for heights in (np.arange(n_kv), -np.arange(n_kv), rng.normal(0, 1e4, n_kv)):
        k = np.zeros((n_kv, 1, 32), np.float32)
        k[:, 0, 0] = heights
        v = rng.standard_normal((n_kv, 1, 32)).astype(np.float32)
        y = _core.attention(q, F32_TYPE, k.view(np.uint8), F32_TYPE, v.view(np.uint8), scale=1.0, isa=isa)
        assert_matches(y, reference(q, k.astype(np.float64), v.astype(np.float64), scale=1.0))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_are_hidden_as_a_whole(isa: str, rng: np.random.Generator) -> None:
    q = rng.standard_normal((3, 2, 32)).astype(np.float32)
    k, v = cache(rng, F16, 300, 1, 32), cache(rng, F16, 300, 1, 32)
    mask = np.zeros((3, 300), np.float16)
    mask[1] = -np.inf
    y = _core.attention(q, F16, k, F16, v, mask, isa=isa)
    assert (y[1] == 0).all() and (y[[0, 2]] != 0).any(axis=2).all()


# ---- the same bits ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", TYPES)
@pytest.mark.parametrize("group", [1, 2, 7])
def test_batch_and_threads_change_no_bit(
    type_id: int, group: int, isa: str, rng: np.random.Generator
) -> None:
    """A prompt in one batch against its tokens in parts, with any number of threads; a longer cache, hidden
    behind its end, is no different from a shorter one."""
    n_tokens, n_kv, n_kv_heads = 70, 3 * PIECE - 27, 4
    q = rng.standard_normal((n_tokens, group * n_kv_heads, 64)).astype(np.float32)
    k, v = cache(rng, type_id, n_kv, n_kv_heads, 64), cache(rng, type_id, n_kv, n_kv_heads, 64)
    mask = np.zeros((n_tokens, n_kv), np.float16)
    for token in range(n_tokens):
        mask[token, n_kv - n_tokens + token + 1 :] = -np.inf
    whole = _core.attention(q, type_id, k, type_id, v, mask, isa=isa, n_threads=2)
    assert_matches(whole, reference(q, decoded(type_id, k), decoded(type_id, v), mask))
    for part in (slice(0, 1), slice(3, 5), slice(10, 17), slice(69, 70), slice(0, 70)):
        end = n_kv - n_tokens + part.stop
        for n_threads, n_seen in [(1, n_kv), (2, end), (3, -(-end // CHUNK) * CHUNK), (5, n_kv)]:
            rows = slice(0, min(n_seen, n_kv))
            y = _core.attention(
                q[part], type_id, k[rows], type_id, v[rows],
                np.ascontiguousarray(mask[part, rows]), isa=isa, n_threads=n_threads,
            )  # fmt: skip
            assert np.array_equal(bits(y), bits(whole[part])), (part, n_threads, n_seen)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n_heads", [1, 64])
def test_padding_changes_no_bit(n_heads: int, isa: str, rng: np.random.Generator) -> None:
    """Many heads are not split along the context, few are."""
    for n_kv, padded in [(1, 2), (1, 700), (60, 64), (64, 65), (255, 256), (256, 257), (300, 2000)]:
        q = rng.standard_normal((1, n_heads, 32)).astype(np.float32)
        k, v = cache(rng, Q4_0, padded, n_heads, 32), cache(rng, Q8_0, padded, n_heads, 32)
        mask = np.zeros((1, padded), np.float16)
        mask[:, n_kv:] = -np.inf
        short = _core.attention(q, Q4_0, k[:n_kv], Q8_0, v[:n_kv], isa=isa)
        long = _core.attention(q, Q4_0, k, Q8_0, v, mask, isa=isa)
        assert np.array_equal(bits(short), bits(long)), (n_kv, padded)


def spoil(type_id: int, rows: U8) -> None:
    """NaN or infinity in every block, in place."""
    if type_id in (F32_TYPE, F16, BF16):
        rows[...] = 0xFF
    else:
        rows[..., 0], rows[..., 1] = 0x00, 0x7C  # the first block's scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", TYPES)
@pytest.mark.parametrize("n_tokens", [2, 20])
def test_hidden_cells_may_hold_anything(
    n_tokens: int, type_id: int, isa: str, rng: np.random.Generator
) -> None:
    """Also where they are hidden from some tokens of a batch only: the others' results are not finite."""
    n_kv = 600
    q = rng.standard_normal((n_tokens, 4, 64)).astype(np.float32)
    k, v = cache(rng, type_id, n_kv, 2, 64), cache(rng, type_id, n_kv, 2, 64)
    mask = np.zeros((n_tokens, n_kv), np.float16)
    mask[:, [5, 100, 101, 599]] = -np.inf
    mask[1:, [300, 400]] = -np.inf
    clean = _core.attention(q, type_id, k, type_id, v, mask, isa=isa)
    for rows in (k, v):
        for cell in (5, 100, 101, 300, 400, 599):
            spoil(type_id, rows[cell])
    spoiled = _core.attention(q, type_id, k, type_id, v, mask, isa=isa)
    assert np.isfinite(clean).all()
    assert np.array_equal(bits(spoiled[1:]), bits(clean[1:]))
    assert not np.isfinite(spoiled[0]).all(axis=1).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", [F16, Q8_0])
def test_caches_with_gaps(type_id: int, isa: str, rng: np.random.Generator) -> None:
    """Views of larger memory: every third position, heads before positions."""
    q = rng.standard_normal((3, 6, 64)).astype(np.float32)
    k, v = cache(rng, type_id, 900, 3, 64), cache(rng, type_id, 900, 3, 64)
    want = _core.attention(
        q, type_id, np.ascontiguousarray(k[::3]), type_id, np.ascontiguousarray(v[1::3]), isa=isa
    )
    by_head = np.ascontiguousarray(v[1::3].transpose(1, 0, 2)).transpose(1, 0, 2)
    wide = np.zeros((3, 6, 96), np.float32)
    wide[..., :64] = q
    y = _core.attention(wide[..., :64], type_id, k[::3], type_id, by_head, isa=isa)
    assert np.array_equal(bits(y), bits(want))


def test_instruction_sets_agree(rng: np.random.Generator) -> None:
    q = rng.standard_normal((5, 8, 128)).astype(np.float32)
    k, v = cache(rng, Q8_0, 1000, 2, 128), cache(rng, Q4_0, 1000, 2, 128)
    first, *others = (_core.attention(q, Q8_0, k, Q4_0, v, isa=isa) for isa in ISAS)
    for other in others:
        assert np.abs(other - first).max() <= 1e-5 * np.abs(first).max()


def test_arguments_that_do_not_fit(rng: np.random.Generator) -> None:
    q = rng.standard_normal((3, 4, 64)).astype(np.float32)
    k, v = cache(rng, Q8_0, 10, 2, 64), cache(rng, Q8_0, 10, 2, 64)
    mask = np.zeros((3, 9), np.float16)
    with pytest.raises(ValueError, match="type 12 is not one of a KV cache"):
        _core.attention(q, 12, k, Q8_0, v)
    with pytest.raises(ValueError, match="no multiple of the 18 that 32 values"):
        _core.attention(q, Q4_0, k, Q8_0, v)
    with pytest.raises(ValueError, match="do not fit"):
        _core.attention(q, Q8_0, cache(rng, Q8_0, 10, 3, 64), Q8_0, v)
    with pytest.raises(ValueError, match=r"mask must be \[n_tokens, n_kv\]"):
        _core.attention(q, Q8_0, k, Q8_0, v, mask)
    with pytest.raises(ValueError, match="one sink for each"):
        _core.attention(q, Q8_0, k, Q8_0, v, sinks=[1.0])


# ---- whole models ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with two heads to a KV head."""
    path: Path = synthetic.write_synthetic(
        tmp_path_factory.mktemp("attention") / "pq2_0.gguf",
        "pq2_0",
        synthetic.Shape(layers=2, vocabulary=8192),
    )
    return path


@pytest.fixture(scope="module")
def tokens(model: Path) -> npt.NDArray[np.int32]:
    ids: npt.NDArray[np.int32] = compare_logits.host_tokens(model, compare_logits.real_text()[:4000])[:300]
    return ids


@pytest.mark.parametrize("kv_type", [F16, Q8_0, Q4_0])
def test_no_bit_of_a_model_depends_on_batch_or_threads(
    kv_type: int, model: Path, tokens: npt.NDArray[np.int32]
) -> None:
    """In batches of 1, most tokens run the graph of the one before once more."""
    whole, *others = (
        compare_logits.host_logits(
            model,
            tokens,
            compare_logits.Serving(
                kv_type=kv_type, flash_attention=True, n_batch=n_batch, n_threads=n_threads
            ),
        )
        for n_batch, n_threads in [(512, 2), (64, 3), (7, 1), (1, 2)]
    )
    for other in others:
        assert np.array_equal(bits(other), bits(whole))


@pytest.mark.parametrize("kv_type", [F16, Q8_0, Q4_0])
def test_a_model_with_stock_attention_says_nearly_the_same(
    kv_type: int, model: Path, tokens: npt.NDArray[np.int32], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERN_ATTENTION=stock hands attention to the host's own kernel."""
    serving = compare_logits.Serving(kv_type=kv_type, flash_attention=True)
    ours = compare_logits.host_logits(model, tokens, serving)
    monkeypatch.setenv("TERN_ATTENTION", "stock")
    stock = compare_logits.host_logits(model, tokens, serving)
    got = compare_logits.compare(stock, ours)
    print(got)
    assert not np.array_equal(ours, stock)
    assert got.mean_kl < 1e-2
    assert got.top1 > 0.9
