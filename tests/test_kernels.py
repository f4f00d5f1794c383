"""The CPU kernels against the plain numpy reference: every instruction set here, odd sizes, extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ggml_tern import _core
from reference import formats as ref

ISAS = _core.available_isas()
TYPES = [pytest.param(t, id=f.name) for t, f in ref.FORMATS.items()]


def random_matrix(rng: np.random.Generator, type_id: int, n_out: int, n_in: int) -> npt.NDArray[np.uint8]:
    weights = rng.standard_normal((n_out, n_in)).astype(np.float32)
    return _core.ternarize(type_id, weights)[0]


def assert_close(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Sums of the same integers in the same order: only the rounding of fp32 additions may differ."""
    scale = np.abs(expected).max() or 1.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", TYPES)
def test_matmul_equals_reference(rng: np.random.Generator, type_id: int, isa: str) -> None:
    fmt = ref.FORMATS[type_id]
    for n_cols in (1, 2, 5, 6, 7, 64, 65):
        n_in = fmt.block * int(rng.integers(1, 12))
        n_out = int(rng.integers(1, 40))
        data = random_matrix(rng, type_id, n_out, n_in)
        x = rng.standard_normal((n_cols, n_in)).astype(np.float32) * rng.lognormal(0, 3)
        assert_close(_core.matmul(type_id, data, x, isa=isa), ref.matmul(fmt, data, x))


@pytest.mark.parametrize("isa", ISAS)
def test_matmul_of_wide_rows(rng: np.random.Generator, isa: str) -> None:
    fmt = ref.FORMATS[_core.TYPE_PQ2_0]
    data = random_matrix(rng, _core.TYPE_PQ2_0, 9, 17408)
    x = rng.standard_normal((513, 17408)).astype(np.float32)
    assert_close(_core.matmul(_core.TYPE_PQ2_0, data, x, isa=isa), ref.matmul(fmt, data, x))


@pytest.mark.parametrize("isa", ISAS)
def test_sums_of_16_bits_do_not_overflow(isa: str) -> None:
    """The largest products there are: every code the reserved 3 (+2), every activation at 127 or -127."""
    fmt = ref.FORMATS[_core.TYPE_PQ2_0]
    data = np.full((8, fmt.n_bytes * 3), 0xFF, np.uint8)
    data.reshape(8, 3, fmt.n_bytes)[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    for sign in (1.0, -1.0):
        x = np.full((6, 3 * fmt.block), sign, np.float32)
        y = _core.matmul(_core.TYPE_PQ2_0, data, x, isa=isa)
        np.testing.assert_allclose(y, sign * 2.0 * 3 * fmt.block, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", TYPES)
def test_extreme_scales(type_id: int, isa: str) -> None:
    fmt = ref.FORMATS[type_id]
    n_in = fmt.block * 4
    trits = np.tile(np.array([1, -1, 0, 1], np.int8), (3, n_in // 4))
    scales = np.tile(np.array([2**-24, 65504, 0, 2**-14], np.float32), (3, 1))
    data = _core.pack(type_id, trits, scales)
    rng = np.random.default_rng(1)
    for magnitude in (1e-30, 1.0, 1e30):
        x = (rng.standard_normal((3, n_in)) * magnitude).astype(np.float32)
        x[1] = 0
        y = _core.matmul(type_id, data, x, isa=isa)
        assert np.isfinite(y).all() and not y[1].any()
        assert_close(y, ref.matmul(fmt, data, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", TYPES)
def test_bits_do_not_depend_on_batch_or_threads(rng: np.random.Generator, type_id: int, isa: str) -> None:
    n_in = ref.FORMATS[type_id].block * 5
    data = random_matrix(rng, type_id, 101, n_in)
    x = rng.standard_normal((512, n_in)).astype(np.float32)
    whole = _core.matmul(type_id, data, x, isa=isa, n_threads=1)
    for n_threads in (1, 2):
        for batch in (1, 7, 64, 512):
            parts = [
                _core.matmul(type_id, data, x[i : i + batch], isa=isa, n_threads=n_threads)
                for i in range(0, 512, batch)
            ]
            assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_instruction_sets_agree(rng: np.random.Generator) -> None:
    data = random_matrix(rng, _core.TYPE_PTQ1_0, 33, 1280)
    x = rng.standard_normal((5, 1280)).astype(np.float32)
    first, *others = (_core.matmul(_core.TYPE_PTQ1_0, data, x, isa=isa) for isa in ISAS)
    for other in others:
        assert_close(other, first)


def relu2(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.square(np.maximum(x, np.float32(0)))


@pytest.mark.parametrize("isa", ISAS)
def test_silu_of_squared_relu(rng: np.random.Generator, isa: str) -> None:
    """silu(h) = relu(x)^2, to fp32 rounding, wherever the square is an ordinary fp32 number."""
    x = np.concatenate([10.0 ** rng.uniform(-15, 15, 100_001), rng.uniform(0, 6, 100_001)]).astype(np.float32)
    h = _core.squared_relu_for_silu(x[None], isa=isa)[0].astype(np.float64)
    np.testing.assert_allclose(h / (1 + np.exp(-h)), relu2(x), rtol=5e-7, atol=0)
    # As llama.cpp computes it: in fp32.
    single = h.astype(np.float32)
    np.testing.assert_allclose(single / (1 + np.exp(-single)), relu2(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_squared_relu_of_special_values(isa: str) -> None:
    x = np.array([[-np.inf, -3e38, -1, -1e-30, -0.0, 0, 1e-30, 1e19, 1e20, np.inf]], np.float32)
    expected = [0, 0, 0, 0, 0, 0, 0, np.float32(1e19) ** 2, np.inf, np.inf]
    assert _core.squared_relu_for_silu(x, isa=isa)[0].tolist() == expected
    nans = np.array([[0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]], np.uint32).view(np.float32)
    assert np.isnan(_core.squared_relu_for_silu(nans, isa=isa)).all()


def test_bits_of_squared_relu_depend_on_the_value_alone(rng: np.random.Generator) -> None:
    """Not on its place, its neighbours or the instruction set."""
    x = rng.standard_normal((1, 1003)).astype(np.float32) * 3
    whole = _core.squared_relu_for_silu(x, isa="generic")
    for isa in ISAS:
        for n in (1, 3, 8, 17):
            parts = [_core.squared_relu_for_silu(x[:, i : i + n].copy(), isa=isa) for i in range(0, 1003, n)]
            assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_q2_0_with_scales_in_pairs_is_pq2_0(rng: np.random.Generator, isa: str) -> None:
    """Groups of 128 written as Q2_0: the same bits as of PQ2_0. A scale without its like is no pair."""
    pq2_0, q2_0 = _core.TYPE_PQ2_0, _core.TYPE_Q2_0
    for n_out, n_groups in ((1, 1), (9, 5), (40, 3)):
        data = random_matrix(rng, pq2_0, n_out, 128 * n_groups)
        paired = _core.transcode(pq2_0, q2_0, data)
        x = rng.standard_normal((7, 128 * n_groups)).astype(np.float32)
        product = _core.matmul(q2_0, paired, x, isa=isa)
        assert product.tobytes() == _core.matmul(pq2_0, data, x, isa=isa).tobytes()
        assert _core.tiles_roundtrip(q2_0, paired).tobytes() == paired.tobytes()
        for block in (0, 2 * n_groups - 1):
            odd = paired.copy()
            odd[-1, 18 * block] ^= 1
            assert_close(_core.matmul(q2_0, odd, x, isa=isa), ref.matmul(ref.Q2_0, odd, x))
            assert _core.tiles_roundtrip(q2_0, odd).tobytes() == odd.tobytes()


@pytest.mark.parametrize("type_id", TYPES)
def test_tiles_give_back_the_bytes(rng: np.random.Generator, type_id: int) -> None:
    for n_out in (1, 7, 8, 9, 63):
        data = random_matrix(rng, type_id, n_out, ref.FORMATS[type_id].block * int(rng.integers(1, 9)))
        assert _core.tiles_roundtrip(type_id, data).tobytes() == data.tobytes()


@pytest.mark.parametrize("type_id", [_core.TYPE_PTQ1_0, _core.TYPE_TQ1_0])
def test_dense_tiles_have_the_same_bits(rng: np.random.Generator, type_id: int) -> None:
    """1.75 bits a weight where tiles take 2.125; bytes and products come out the same."""
    block = ref.FORMATS[type_id].block
    for n_out, n_groups, n_cols in ((1, 1, 1), (7, 3, 2), (64, 16, 1), (65, 8, 19), (130, 40, 1)):
        data = random_matrix(rng, type_id, n_out, block * n_groups)
        assert _core.tiles_roundtrip(type_id, data, dense=True).tobytes() == data.tobytes()
        fast, dense = (_core.TiledMatrix(type_id, data, dense=dense) for dense in (False, True))
        x = rng.standard_normal((n_cols, block * n_groups)).astype(np.float32)
        for isa in ISAS:
            product = dense.matmul(x, isa=isa, n_threads=int(rng.integers(1, 4)))
            assert product.tobytes() == fast.matmul(x, isa=isa).tobytes()
        if block * n_groups % 1024 == 0 and n_out % 8 == 0:
            assert dense.n_bytes * 8 == 1.75 * n_out * block * n_groups
            assert fast.n_bytes * 8 == 2.125 * n_out * block * n_groups


@pytest.mark.parametrize("type_id", [_core.TYPE_PQ2_0, _core.TYPE_Q2_0, _core.TYPE_TQ2_0])
def test_types_with_a_code_3_have_no_dense_tiles(rng: np.random.Generator, type_id: int) -> None:
    data = random_matrix(rng, type_id, 9, 512)
    fast, dense = (_core.TiledMatrix(type_id, data, dense=dense) for dense in (False, True))
    assert dense.n_bytes == fast.n_bytes
    assert _core.tiles_roundtrip(type_id, data, dense=True).tobytes() == data.tobytes()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"x": np.zeros((1, 64), np.float32)}, "n_in = 128"),
        ({"x": np.zeros(128, np.float32)}, "2 dimensions"),
        ({"x": np.zeros((1, 128))}, "float32"),
        ({"isa": "z80"}, "z80"),
        ({"data": np.zeros((1, 33), np.uint8)}, "33 bytes"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: str) -> None:
    good: dict[str, Any] = {"data": np.zeros((1, 34), np.uint8), "x": np.zeros((1, 128), np.float32)}
    with pytest.raises((ValueError, TypeError), match=error):
        _core.matmul(_core.TYPE_PQ2_0, **{**good, **arguments})
