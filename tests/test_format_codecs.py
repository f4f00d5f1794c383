"""The compiled codecs against the plain numpy reference, on random inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from ggml_tern import _core
from reference import formats as ref
from reference.random_inputs import random_ternary

TYPES = [pytest.param(t, id=f.name) for t, f in ref.FORMATS.items()]
# Odd numbers of rows, so that no split of work between threads comes out even.
ROWS_AND_BLOCKS = [(1, 1), (3, 5), (129, 2), (7, 33)]


def random_weights(rng: np.random.Generator, n_rows: int, n_in: int) -> ref.F32:
    """Rows of several kinds: Gaussian, heavy-tailed, sparse, uniform, one outlier, one magnitude."""
    w = rng.standard_normal((n_rows, n_in))
    kind = np.arange(n_rows) % 6
    w[kind == 1] **= 5
    w[kind == 2] *= rng.random((int((kind == 2).sum()), n_in)) < 0.02
    w[kind == 3] = rng.random((int((kind == 3).sum()), n_in)) - 0.5
    w[kind == 4, 0] = 1e4
    w[kind == 5] = np.sign(w[kind == 5]) * 0.25
    return (w * rng.lognormal(-3, 1, (n_rows, 1))).astype(np.float32)


# ---- what a type is ----


@pytest.mark.parametrize("type_id", TYPES)
def test_type_facts(type_id: int) -> None:
    fmt = ref.FORMATS[type_id]
    assert getattr(_core, f"TYPE_{fmt.name}") == type_id
    assert type_id in _core.TERNARY_TYPES
    assert _core.type_name(type_id).upper() == fmt.name
    assert _core.block_size(type_id) == fmt.block
    assert _core.type_size(type_id) == fmt.n_bytes


def test_no_other_type_is_ternary() -> None:
    assert sorted(_core.TERNARY_TYPES) == sorted(ref.FORMATS)


@pytest.mark.parametrize("type_id", [4, 31, 37, 38, 44, 141, 144, 2**31, 2**32 - 1])
def test_unknown_type_is_refused(type_id: int) -> None:
    for ask in (_core.type_name, _core.block_size, _core.type_size):
        with pytest.raises(ValueError):
            ask(type_id)
    with pytest.raises(ValueError):
        _core.dequantize(type_id, np.zeros((1, 34), np.uint8))


# ---- the reference itself, against gguf-py where that knows the type ----


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_reference_agrees_with_gguf_py(name: str, rng: np.random.Generator) -> None:
    fmt = next(f for f in ref.FORMATS.values() if f.name == name)
    qtype = gguf.GGMLQuantizationType[name]
    data = ref.pack(fmt, *random_ternary(rng, fmt, 5, 3))
    assert np.array_equal(gguf.dequantize(data, qtype), ref.dequantize(fmt, data))
    noise = rng.integers(0, 256, data.shape, np.uint8)
    noise_blocks, blocks = noise.reshape(5, 3, fmt.n_bytes), data.reshape(5, 3, fmt.n_bytes)
    noise_blocks[..., fmt.scale_at :] = blocks[..., fmt.scale_at :]
    assert np.array_equal(gguf.dequantize(noise, qtype), ref.dequantize(fmt, noise))


# ---- pack, unpack, dequantize ----


@pytest.mark.parametrize("n_rows, n_blocks", ROWS_AND_BLOCKS)
@pytest.mark.parametrize("type_id", TYPES)
def test_pack_unpack_dequantize(type_id: int, n_rows: int, n_blocks: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    trits, scales = random_ternary(rng, fmt, n_rows, n_blocks)
    data = _core.pack(type_id, trits, scales)
    assert data.dtype == np.uint8 and data.shape == (n_rows, n_blocks * fmt.n_bytes)
    assert np.array_equal(data, ref.pack(fmt, trits, scales))
    got_trits, got_scales = _core.unpack(type_id, data)
    assert got_trits.dtype == np.int8 and got_scales.dtype == np.float32
    assert np.array_equal(got_trits, trits) and np.array_equal(got_scales, scales)
    values = _core.dequantize(type_id, data)
    assert values.dtype == np.float32
    assert np.array_equal(values, trits * np.repeat(scales, fmt.block, axis=1))


@pytest.mark.parametrize("type_id", TYPES)
def test_any_bytes_decode_as_written_down(type_id: int, rng: np.random.Generator) -> None:
    """Every byte value in every place: code 3, and base-3 bytes that no packer writes."""
    fmt = ref.FORMATS[type_id]
    data = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (5 * fmt.n_bytes, 1)), axis=1)
    data = np.ascontiguousarray(data.reshape(5, fmt.n_bytes, 256).transpose(0, 2, 1)).reshape(5, -1)
    trits, scales = _core.unpack(type_id, data)
    want_trits, want_scales = ref.unpack(fmt, data)
    assert np.array_equal(trits, want_trits)
    assert np.array_equal(scales, want_scales, equal_nan=True)
    if not fmt.base3:
        assert (trits == 2).any()
    with np.errstate(invalid="ignore"):
        want = ref.dequantize(fmt, data)
    assert np.array_equal(_core.dequantize(type_id, data), want, equal_nan=True)


@pytest.mark.parametrize("type_id", TYPES)
def test_every_fp16_scale(type_id: int) -> None:
    """All 65536 bit patterns of the scale, subnormals, 65504, -0, infinities and NaNs among them."""
    fmt = ref.FORMATS[type_id]
    patterns = np.arange(65536, dtype="<u2")
    data = ref.pack(fmt, np.ones((256, 256 * fmt.block), np.int8), np.zeros((256, 256), np.float32))
    data.reshape(-1, fmt.n_bytes)[:, fmt.scale_at : fmt.scale_at + 2] = patterns[:, None].view(np.uint8)
    want = patterns.view(np.float16).astype(np.float32).reshape(256, 256)
    _, scales = _core.unpack(type_id, data)
    assert np.array_equal(scales, want, equal_nan=True)
    assert np.array_equal(np.signbit(scales[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))
    values = _core.dequantize(type_id, data)
    assert np.array_equal(values, np.repeat(want, fmt.block, axis=1), equal_nan=True)
    finite = np.where(np.isfinite(want), want, np.float32(0))
    again = _core.pack(type_id, np.ones((256, 256 * fmt.block), np.int8), finite)
    assert np.array_equal(again, ref.pack(fmt, np.ones((256, 256 * fmt.block), np.int8), finite))


@pytest.mark.parametrize("type_id", TYPES)
def test_scales_are_rounded_half_to_even(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    exact = rng.integers(0, 0x7BFF, 300, np.uint16)  # up to just below 65504, subnormals included
    lower, upper = (b.view(np.float16).astype(np.float32) for b in (exact, exact + np.uint16(1)))
    halfway = (lower + upper) / 2
    scales = np.stack([halfway, np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, upper)])
    trits = np.ones((3, 300 * fmt.block), np.int8)
    assert np.array_equal(_core.pack(type_id, trits, scales), ref.pack(fmt, trits, scales))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 65520.0, 1e30])
@pytest.mark.parametrize("type_id", TYPES)
def test_pack_refuses_scales_beyond_fp16(type_id: int, bad: float) -> None:
    fmt = ref.FORMATS[type_id]
    scales = np.ones((2, 3), np.float32)
    scales[1, 2] = bad
    with pytest.raises(ValueError):
        _core.pack(type_id, np.zeros((2, 3 * fmt.block), np.int8), scales)


@pytest.mark.parametrize("bad", [2, -2, 127, -128])
@pytest.mark.parametrize("type_id", TYPES)
def test_pack_refuses_what_is_not_a_trit(type_id: int, bad: int) -> None:
    fmt = ref.FORMATS[type_id]
    trits = np.zeros((3, 2 * fmt.block), np.int8)
    trits[2, -1] = bad
    with pytest.raises(ValueError):
        _core.pack(type_id, trits, np.ones((3, 2), np.float32))


# ---- ternarize ----


@pytest.mark.parametrize("n_rows, n_blocks", ROWS_AND_BLOCKS)
@pytest.mark.parametrize("type_id", TYPES)
def test_ternarize_is_optimal(type_id: int, n_rows: int, n_blocks: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, n_rows, n_blocks * fmt.block)
    data, stats = _core.ternarize(type_id, w)
    assert data.dtype == np.uint8 and data.shape == (n_rows, n_blocks * fmt.n_bytes)
    trits, scales = ref.unpack(fmt, data)

    want = ref.dequantize(fmt, ref.pack(fmt, *ref.ternarize(fmt, w)))
    error = _group_errors(fmt, w, ref.dequantize(fmt, data))
    power = _group_errors(fmt, w, np.zeros_like(w))
    assert (error <= _group_errors(fmt, w, want) + 1e-6 * power).all()
    groups = w.reshape(-1, fmt.block)
    bound = np.array([ref.least_error_any_scale(g) for g in groups]).reshape(error.shape)
    assert (error >= bound - 1e-9 * power).all()

    # Every weight is at the nearest of {-d, 0, d}.
    d = np.repeat(scales, fmt.block, axis=1).astype(np.float64)
    assert (scales >= 0).all() and (np.abs(trits) <= 1).all()
    nearest = np.minimum(np.abs(w), np.abs(np.abs(w) - d))
    assert (np.abs(w - trits * d) <= nearest + 1e-7 * d).all()

    assert stats["n"] == w.size
    assert stats["zeros"] == int((trits == 0).sum())
    assert stats["sum_sq"] == pytest.approx(power.sum(), rel=1e-5)
    assert stats["sum_sq_error"] == pytest.approx(error.sum(), rel=1e-5)


def _group_errors(fmt: ref.Format, w: ref.F32, values: ref.F32) -> npt.NDArray[np.float64]:
    squares = (w.astype(np.float64) - values) ** 2
    sums: npt.NDArray[np.float64] = squares.reshape(w.shape[0], -1, fmt.block).sum(axis=-1)
    return sums


@pytest.mark.parametrize("type_id", TYPES)
def test_ternary_weights_survive_exactly(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    trits, scales = random_ternary(rng, fmt, 37, 5)
    trits[3] = 0
    trits[5, 1:] = 0
    w = (trits * np.repeat(scales, fmt.block, axis=1)).astype(np.float32)
    data, stats = _core.ternarize(type_id, w)
    assert np.array_equal(ref.dequantize(fmt, data), w)
    assert stats["sum_sq_error"] == 0


@pytest.mark.parametrize("type_id", TYPES)
def test_extreme_magnitudes(type_id: int, rng: np.random.Generator) -> None:
    """All zeros, float32 subnormals, around the smallest fp16, and the largest that rounds to 65504."""
    fmt = ref.FORMATS[type_id]
    magnitudes = [0.0, 1e-44, 1e-38, 2e-8, 4e-8, 6e-8, 9e-8, 6e-5, 1, 65504, 65519]
    sign = rng.choice([-1, 0, 1], (len(magnitudes), 2 * fmt.block)).astype(np.float32)
    w = sign * np.array(magnitudes, np.float32)[:, None]
    w[0] *= -1  # negative zeros too
    data, _ = _core.ternarize(type_id, w)
    values = ref.dequantize(fmt, data)
    assert np.isfinite(values).all()
    want = ref.dequantize(fmt, ref.pack(fmt, *ref.ternarize(fmt, w)))
    assert np.array_equal(values, want)


@pytest.mark.parametrize("too_large", [65520.0, -1e6, 3e38])
@pytest.mark.parametrize("type_id", TYPES)
def test_weights_that_no_fp16_scale_reaches_are_refused(type_id: int, too_large: float) -> None:
    fmt = ref.FORMATS[type_id]
    w = np.zeros((3, 2 * fmt.block), np.float32)
    w[1, 7] = too_large
    with pytest.raises(ValueError, match="row 1, column 7"):
        _core.ternarize(type_id, w)


@pytest.mark.parametrize("type_id", TYPES)
def test_sources_of_equal_value_give_equal_bytes(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, 11, 3 * fmt.block)
    w = np.where((np.abs(w) < 2.0**-14) | (np.abs(w) > 6e4), np.float32(0), w)
    w = (w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # exact in bf16, and so in fp16
    f32, _ = _core.ternarize(type_id, w)
    f16, _ = _core.ternarize(type_id, w.astype(np.float16))
    bf16, _ = _core.ternarize(type_id, (w.view(np.uint32) >> np.uint32(16)).astype(np.uint16))
    assert np.array_equal(f32, f16) and np.array_equal(f32, bf16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("type_id", TYPES)
def test_non_finite_weights_are_refused_by_place(
    type_id: int, dtype: str, bad: float, rng: np.random.Generator
) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, 23, 3 * fmt.block)
    row, column = int(rng.integers(23)), int(rng.integers(w.shape[1]))
    w[row, column] = bad
    source: Any = w.astype(np.float16) if dtype == "float16" else w
    if dtype == "bfloat16":
        source = (w.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    with pytest.raises(ValueError) as error:
        _core.ternarize(type_id, source)
    numbers = re.findall(r"\d+", str(error.value))
    assert str(row) in numbers and str(column) in numbers


@pytest.mark.parametrize("type_id", TYPES)
def test_thread_count_changes_nothing(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, 203, 9 * fmt.block)
    one, one_stats = _core.ternarize(type_id, w, n_threads=1)
    for n_threads in (0, 2, 5, 300):
        many, stats = _core.ternarize(type_id, w, n_threads=n_threads)
        assert np.array_equal(one, many)
        assert stats == one_stats


@pytest.mark.parametrize("type_id", TYPES)
def test_ternarize_into_given_memory(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, 6, 2 * fmt.block)
    fresh, _ = _core.ternarize(type_id, w)
    out = np.full((6, 2 * fmt.n_bytes), 255, np.uint8)
    returned, _ = _core.ternarize(type_id, w, out=out)
    assert np.shares_memory(returned, out)
    assert np.array_equal(out, fresh)
    read_only = out.copy()
    read_only.flags.writeable = False
    bad: Any
    for bad in (
        out[:5].copy(),
        out[:, 1:].copy(),
        out.astype(np.int32),
        out.ravel(),
        read_only,
        out[:, ::-1],
    ):
        with pytest.raises((ValueError, TypeError)):
            _core.ternarize(type_id, w, out=bad)


# ---- transcode ----


@pytest.mark.parametrize("to_id", TYPES)
@pytest.mark.parametrize("from_id", TYPES)
def test_transcode(from_id: int, to_id: int, rng: np.random.Generator) -> None:
    """One scale per 256 weights fits every type: the values stay, and the bytes are those of a packer."""
    source, target = ref.FORMATS[from_id], ref.FORMATS[to_id]
    trits, scales = random_ternary(rng, ref.TQ2_0, 7, 5)
    data = ref.pack(source, trits, np.repeat(scales, 256 // source.block, axis=1))
    got = _core.transcode(from_id, to_id, data)
    assert got.dtype == np.uint8
    assert np.array_equal(got, ref.pack(target, trits, np.repeat(scales, 256 // target.block, axis=1)))


@pytest.mark.parametrize("from_id, to_id", [(42, 142), (42, 35), (142, 35), (143, 34), (143, 35), (42, 143)])
def test_transcode_refuses_to_lose(from_id: int, to_id: int, rng: np.random.Generator) -> None:
    source = ref.FORMATS[from_id]
    trits, scales = random_ternary(rng, source, 3, 256 // source.block * 2)
    trits[:, :: source.block] = 1  # no group all zero, where the scale would not matter
    scales[:] = 0.5
    scales[2, -1] = 0.75
    with pytest.raises(ValueError):
        _core.transcode(from_id, to_id, ref.pack(source, trits, scales))


@pytest.mark.parametrize("from_id", [42, 142, 35])
@pytest.mark.parametrize("to_id", [143, 34])
def test_transcode_refuses_the_fourth_code(from_id: int, to_id: int, rng: np.random.Generator) -> None:
    source = ref.FORMATS[from_id]
    trits, scales = random_ternary(rng, source, 3, 512 // source.block)
    trits[1, 300] = 2
    scales[:] = 0.5
    with pytest.raises(ValueError):
        _core.transcode(from_id, to_id, ref.pack(source, trits, scales))


@pytest.mark.parametrize("from_id, to_id", [(142, 42), (42, 142), (35, 142), (35, 42), (142, 35)])
def test_transcode_keeps_the_fourth_code(from_id: int, to_id: int) -> None:
    source, target = ref.FORMATS[from_id], ref.FORMATS[to_id]
    trits = np.resize(np.array([2, -1, 0, 1, 2], np.int8), (3, 512))
    data = ref.pack(source, trits, np.full((3, 512 // source.block), 0.5, np.float32))
    try:
        got = _core.transcode(from_id, to_id, data)
    except ValueError:
        return  # reserved codes may be refused, never changed
    assert np.array_equal(ref.dequantize(target, got), ref.dequantize(source, data))


# ---- what arrays are taken ----


def _either_equal_or_refused(call: Callable[[Any], Any], view: Any, want: Any) -> None:
    try:
        got = call(view)
    except (ValueError, TypeError):
        return
    assert np.array_equal(got, want)


@pytest.mark.parametrize("type_id", TYPES)
def test_strided_arrays_are_read_right_or_refused(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    w = random_weights(rng, 8, 4 * fmt.block)
    for view in (w[::2], w[:, ::2], w[::-1], w[:, fmt.block :], np.asfortranarray(w)):
        packed, _ = _core.ternarize(type_id, np.ascontiguousarray(view))
        _either_equal_or_refused(lambda v: _core.ternarize(type_id, v)[0], view, packed)
    data, _ = _core.ternarize(type_id, w)
    for rows in (data[::2], data[::-1], data[:, fmt.n_bytes :], np.asfortranarray(data)):
        whole = np.ascontiguousarray(rows)
        _either_equal_or_refused(lambda v: _core.dequantize(type_id, v), rows, ref.dequantize(fmt, whole))
        _either_equal_or_refused(lambda v: _core.unpack(type_id, v)[0], rows, ref.unpack(fmt, whole)[0])


@pytest.mark.parametrize("type_id", TYPES)
def test_wrong_shapes_and_dtypes_are_refused(type_id: int) -> None:
    fmt = ref.FORMATS[type_id]
    refused = pytest.raises((ValueError, TypeError))
    for shape in [(2, fmt.block + 1), (2, fmt.block // 2), (fmt.block,), (1, 2, fmt.block), ()]:
        with refused:
            _core.ternarize(type_id, np.zeros(shape, np.float32))
    for dtype in (np.float64, np.int8, np.int32, np.uint8, np.complex64):
        with refused:
            wrong: Any = np.zeros((2, fmt.block), dtype)
            _core.ternarize(type_id, wrong)
    for shape in [(2, fmt.n_bytes + 1), (2, fmt.n_bytes - 1), (fmt.n_bytes,), (1, 2, fmt.n_bytes)]:
        for read in (_core.unpack, _core.dequantize):
            with refused:
                read(type_id, np.zeros(shape, np.uint8))
        with refused:
            _core.transcode(type_id, type_id, np.zeros(shape, np.uint8))
    trits, scales = np.zeros((2, 2 * fmt.block), np.int8), np.ones((2, 2), np.float32)
    bad_pairs: list[tuple[Any, Any]] = [
        (trits[:1], scales),
        (trits, scales[:, :1].copy()),
        (trits, scales.ravel()),
        (trits[:, :-1].copy(), scales),
        (trits.astype(np.float32), scales),
    ]
    for bad_trits, bad_scales in bad_pairs:
        with refused:
            _core.pack(type_id, bad_trits, bad_scales)


@pytest.mark.parametrize("type_id", TYPES)
def test_no_rows(type_id: int) -> None:
    fmt = ref.FORMATS[type_id]
    data, stats = _core.ternarize(type_id, np.zeros((0, fmt.block), np.float32))
    assert data.shape == (0, fmt.n_bytes) and stats["n"] == 0
    assert _core.dequantize(type_id, data).shape == (0, fmt.block)
