"""GGUFSource: every type that can be a source, decoded exactly; legacy, split and broken files."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fuzz.make_corpus import seeds
from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from reference import formats as ref
from reference import gguf_files as files
from reference.random_inputs import random_ternary
from seeds import seed_of

CORPUS = sorted((Path(__file__).parent / "fuzz" / "corpus").iterdir())
METADATA = {"general.architecture": "llama", "general.name": "tiny"}


def source_of(path: Path, *tensors: files.Tensor, **options: Any) -> GGUFSource:
    return GGUFSource(files.write(path, METADATA, list(tensors), **options))


def all_rows(source: GGUFSource, name: str) -> npt.NDArray[Any]:
    rows = source.tensors[name].rows
    return np.asarray(rows[0 : rows.shape[0]])


# ---- types ----


@pytest.mark.parametrize("shape", [(7, 512), (1, 1280), (3, 5, 768)])
@pytest.mark.parametrize("fmt", [pytest.param(f, id=f.name) for f in ref.FORMATS.values()])
def test_ternary_rows(
    fmt: ref.Format, shape: tuple[int, ...], tmp_path: Path, rng: np.random.Generator
) -> None:
    n_rows, n_in = int(np.prod(shape[:-1])), shape[-1]
    trits, scales = random_ternary(rng, fmt, n_rows, n_in // fmt.block)
    want = trits * np.repeat(scales, fmt.block, axis=1)
    norm = files.plain("norm", 0, rng.standard_normal(9).astype(np.float32))
    source = source_of(tmp_path / "m.gguf", norm, files.ternary("w", fmt, trits.reshape(shape), scales))
    tensor = source.tensors["w"]
    assert (tensor.shape, tensor.type_name, tensor.is_ternary) == (shape, fmt.name, True)
    assert tensor.rows.shape == (n_rows, n_in)
    got = all_rows(source, "w")
    assert got.dtype == np.float32 and np.array_equal(got, want)
    some = rng.permutation(n_rows)[: max(1, n_rows // 2)]
    assert np.array_equal(tensor.rows[some], want[some])
    assert np.array_equal(tensor.rows[n_rows // 2 : n_rows], want[n_rows // 2 :])


@pytest.mark.parametrize("scale", [1.21875, 0.1, 3e-9, 70000.0, -0.5])
@pytest.mark.parametrize("shape", [(3, 128), (8, 384), (2, 3, 256)])
def test_i2_s_rows(shape: tuple[int, ...], scale: float, tmp_path: Path, rng: np.random.Generator) -> None:
    """One float32 scale, exact in fp16 or not."""
    trits = rng.integers(-1, 2, shape, np.int8)
    after = files.plain("after", 0, np.ones(3, np.float32))
    source = source_of(tmp_path / "m.gguf", files.i2_s("w", trits, scale), after)
    tensor = source.tensors["w"]
    assert (tensor.type_name, tensor.shape, tensor.is_ternary) == ("I2_S", shape, True)
    want = trits.reshape(-1, shape[-1]) * np.float32(scale)
    assert np.array_equal(all_rows(source, "w"), want)
    backwards = np.arange(want.shape[0])[::-1]
    assert np.array_equal(tensor.rows[backwards], want[backwards])
    assert np.array_equal(all_rows(source, "after"), np.ones((1, 3)))


def test_i2_s_reads_code_3_as_zero(tmp_path: Path) -> None:
    ones = files.i2_s("w", np.ones((1, 128), np.int8), 2.0)
    data = b"\xff" + ones.data[1:]  # weights 0, 32, 64, 96
    values = all_rows(source_of(tmp_path / "m.gguf", files.Tensor("w", 36, (1, 128), data)), "w")
    assert np.array_equal(np.flatnonzero(values == 0), [0, 32, 64, 96]) and values.max() == 2


def test_i2_s_needs_its_tail(tmp_path: Path) -> None:
    whole = files.i2_s("w", np.ones((1, 128), np.int8), 2.0)
    cut = files.Tensor("w", 36, (1, 128), whole.data[:32])
    with pytest.raises(TernError, match="'w' ends at 0 \\+ 64 bytes"):
        source_of(tmp_path / "m.gguf", cut)


@pytest.mark.parametrize("alignment", [32, 1, 64])
def test_plain_rows_are_views_of_the_file(alignment: int, tmp_path: Path, rng: np.random.Generator) -> None:
    f32 = rng.standard_normal((5, 33)).astype(np.float32)
    f16 = rng.standard_normal((4, 3)).astype(np.float16)
    bf16 = rng.integers(0, 65536, (2, 3, 7), np.uint16)
    path = tmp_path / "m.gguf"
    tensors = [files.plain("a", 1, f16), files.plain("b", 30, bf16), files.plain("c", 0, f32)]
    source = GGUFSource(
        files.write(path, METADATA | {"general.alignment": alignment}, tensors, alignment=alignment)
    )
    for name, want in {"a": f16, "b": bf16.reshape(6, 7), "c": f32}.items():
        rows = source.tensors[name].rows
        got = rows[1:3]
        assert got.dtype == want.dtype and got.tobytes() == want[1:3].tobytes()
        assert np.shares_memory(got, source.parts[0].data)
        assert rows[np.array([1, 0])].tobytes() == want[[1, 0]].tobytes()


def test_q8_0_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    q = rng.integers(-127, 128, (3, 5, 32), np.int8)
    d = rng.lognormal(-3, 2, (3, 5, 1)).astype("<f2")
    data = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
    source = source_of(tmp_path / "m.gguf", files.Tensor("w", 8, (3, 160), data.tobytes()))
    assert np.array_equal(all_rows(source, "w"), (q * d.astype(np.float32)).reshape(3, 160))


def test_a_type_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path / "m.gguf", files.Tensor("w", 27, (2, 4), bytes(64)))
    with pytest.raises(TernError, match=r"m\.gguf: tensor w: has type I64"):
        all_rows(source, "w")


# ---- legacy files ----


def legacy_tensors(rng: np.random.Generator) -> tuple[list[files.Tensor], dict[str, ref.F32]]:
    tensors, values = [], {}
    for name, n_rows, n_in in (("a", 5, 1024), ("small", 1, 128), ("b", 3, 2176)):
        trits, scales = random_ternary(rng, ref.PQ2_0, n_rows, n_in // 128)
        tensors.append(files.ternary(name, ref.PQ2_0, trits, scales, type_id=ref.Q2_0.type_id))
        values[name] = (trits * np.repeat(scales, 128, axis=1)).astype(np.float32)
    tensors.insert(1, files.plain("norm", 0, np.ones(17, np.float32)))
    return tensors, values


@pytest.mark.parametrize("pad_end", [True, False])
def test_legacy_q2_0_is_recognized_by_its_sizes(
    pad_end: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, values = legacy_tensors(rng)
    source = source_of(tmp_path / "m.gguf", *tensors, pad_end=pad_end)
    assert source.is_legacy
    assert [tensor.type_name for tensor in source.tensors.values()] == ["PQ2_0", "F32", "PQ2_0", "PQ2_0"]
    for name, want in values.items():
        assert np.array_equal(all_rows(source, name), want)


@pytest.mark.parametrize("pad_end", [True, False])
def test_proper_q2_0_is_no_legacy(pad_end: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, values = [], {}
    for name, n_rows, n_in in (("a", 5, 1024), ("small", 1, 128), ("odd", 4, 192), ("b", 3, 2176)):
        trits, scales = random_ternary(rng, ref.Q2_0, n_rows, n_in // 64)
        tensors.append(files.ternary(name, ref.Q2_0, trits, scales))
        values[name] = trits * np.repeat(scales, 64, axis=1)
    source = source_of(tmp_path / "m.gguf", *tensors, pad_end=pad_end)
    assert not source.is_legacy
    for name, want in values.items():
        assert np.array_equal(all_rows(source, name), want)


def test_truncated_q2_0_is_truncated_and_not_legacy(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.Q2_0, 64, 16)
    path = tmp_path / "m.gguf"
    files.write(path, METADATA, [files.ternary(name, ref.Q2_0, trits, scales) for name in "ab"])
    path.write_bytes(path.read_bytes()[: -18 * 64])
    with pytest.raises(TernError, match=r"m\.gguf: the data of tensor 'b' .* truncated"):
        GGUFSource(path)


# ---- split models ----


def split(tmp_path: Path, count: int = 3, **changes: Any) -> list[Path]:
    paths = []
    for number in range(count):
        metadata: dict[str, Any] = {"split.no": number, "split.count": count, "split.tensors.count": count}
        if number == 0:
            metadata = METADATA | metadata
        values = np.full((2, 4), number, np.float32)
        path = tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf"
        paths.append(files.write(path, metadata | changes, [files.plain(f"t{number}", 0, values)]))
    return paths


def test_any_part_opens_all_parts(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        source = GGUFSource(path)
        assert source.files() == paths and source.architecture == "llama"
        assert [float(all_rows(source, name)[0, 0]) for name in source.tensors] == [0, 1, 2]


def test_split_models_that_do_not_fit_together(tmp_path: Path) -> None:
    first, second, third = split(tmp_path)
    third.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(TernError, match=r"m-00003-of-00003\.gguf: part 3 of 3 is missing"):
        GGUFSource(first)
    with pytest.raises(TernError, match=r"elsewhere\.gguf: is one of 3 parts"):
        GGUFSource(tmp_path / "elsewhere.gguf")
    third.write_bytes(second.read_bytes())
    with pytest.raises(TernError, match=r"m-00003-of-00003\.gguf: split\.no and split\.count are 1 and 3"):
        GGUFSource(first)
    with pytest.raises(TernError, match=r"parts hold 2 tensors, split\.tensors\.count says 9"):
        GGUFSource(split(tmp_path, count=2, **{"split.tensors.count": 9})[0])


# ---- what is no model ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"GGUF", "ends inside the header"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big endian"),
        (b"GGML" * 10, 'text that begins with "GGML'),
    ],
)
def test_no_gguf_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TernError, match=f"m.gguf: .*{message}"):
        GGUFSource(path)


def test_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(TernError, match="is an empty directory"):
        GGUFSource(tmp_path)
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(TernError, match="is not a regular file"):
        GGUFSource(tmp_path / "fifo.gguf")


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name[:16])
def test_corpus_opens_or_gives_one_line(path: Path) -> None:
    try:
        source = GGUFSource(path)
    except TernError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    for tensor in source.tensors.values():
        assert tensor.data.size == _nbytes(tensor.type, tensor.n_weights)


def _nbytes(type_id: int, n_weights: int) -> int:
    return n_weights // _core.block_size(type_id) * _core.type_size(type_id)


@pytest.mark.random_inputs
def test_flipped_bits_open_or_give_one_line(tmp_path: Path) -> None:
    rng = random.Random(seed_of("flipped bits"))
    good = seeds()["good"]
    path = tmp_path / "m.gguf"
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        try:
            source = GGUFSource(path)
        except TernError as error:
            assert "\n" not in str(error)
            continue
        for tensor in source.tensors.values():
            try:
                tensor.rows[0 : tensor.n_rows]
            except TernError as error:
                assert "\n" not in str(error)
