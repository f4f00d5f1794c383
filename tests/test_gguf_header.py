"""The GGUF header reader on good, broken and hostile headers, the fuzzer's corpus among them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fuzz.make_corpus import header, key, padded, seeds, string, tensor
from ggml_tern import _core
from seeds import seed_of

CORPUS = sorted((Path(__file__).parent / "fuzz" / "corpus").iterdir())


def read(tmp_path: Path, data: bytes) -> dict[str, Any]:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return _core.read_gguf_header(str(path))


def test_reads_what_was_written(tmp_path: Path) -> None:
    found = read(tmp_path, seeds()["good"])
    assert found["version"] == 3 and found["alignment"] == 32
    assert found["metadata"]["general.architecture"] == "llama"
    assert found["metadata"]["tokenizer.ggml.tokens"] == ["a", "bc"]
    assert found["metadata"]["sizes"].tolist() == [1, 2, 3]
    first, second, third = found["tensors"]
    extent = first.pop("extent")
    assert first == {"name": "blk.0.attn_q.weight", "type": 142, "shape": [128, 2], "offset": 0, "nbytes": 68}
    assert seeds()["good"][slice(*extent)] == tensor("blk.0.attn_q.weight", (128, 2), 142, 0)
    assert seeds()["good"][slice(*found["key_extents"]["general.architecture"])] == key(
        "general.architecture", 8, string("llama")
    )
    assert found["key_extents"].keys() == found["metadata"].keys()
    assert found["legacy_q2_0"] is False
    assert (second["type"], second["nbytes"]) == (143, 28)
    assert (third["shape"], third["nbytes"]) == ([3], 12)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        ("truncated-data", "blk.0.attn_q.weight.*truncated"),
        ("truncated-header", "truncated"),
        ("billion-tensors", "1000000000 tensors"),
        ("huge-counts", "18446744073709551615 metadata keys"),
        ("huge-string", "more than the file holds"),
        ("huge-array", "'k' claims"),
        ("nested-array", "array of arrays"),
        ("huge-shape", "'t' has an impossible shape"),
        ("overlap", "overlap"),
        ("type-edge", "unknown type 2147483648"),
        ("twice", "appears twice"),
        ("alignment-0", "not a power of two"),
        ("legacy-q2_0", None),
        ("version-2", None),
    ],
)
def test_one_clear_error(tmp_path: Path, seed: str, message: str | None) -> None:
    if message is None:
        read(tmp_path, seeds()[seed])
        return
    with pytest.raises(_core.FormatError, match=message) as raised:
        read(tmp_path, seeds()[seed])
    assert "\n" not in str(raised.value)


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        _core.read_gguf_header(str(tmp_path / "none.gguf"))
    assert raised.value.filename == str(tmp_path / "none.gguf")


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name[:16])
def test_corpus(path: Path) -> None:
    try:
        found = _core.read_gguf_header(str(path))
    except _core.FormatError as error:
        assert str(error)
        return
    for t in found["tensors"]:
        assert found["data_offset"] + t["offset"] + t["nbytes"] <= found["file_size"]


@pytest.mark.random_inputs
def test_flipped_bits_never_lead_outside_the_file(tmp_path: Path) -> None:
    rng = random.Random(seed_of("flipped bits"))
    good = seeds()["good"]
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            found = read(tmp_path, bytes(data))
        except _core.FormatError:
            continue
        for t in found["tensors"]:
            assert found["data_offset"] + t["offset"] + t["nbytes"] <= len(data)


@pytest.mark.parametrize("type_id", [31, 32, 33, 37, 38, 43, 44, 141, 144, 2**32 - 1])
def test_types_that_no_file_may_carry(tmp_path: Path, type_id: int) -> None:
    with pytest.raises(_core.FormatError, match=f"'t' has unknown type {type_id}"):
        read(tmp_path, padded(header([], [tensor("t", (256, 1), type_id, 0)]), 512))


def test_all_value_types(tmp_path: Path) -> None:
    values = [
        (0, b"\xff", 255),
        (1, b"\xff", -1),
        (2, b"\xff\xff", 65535),
        (3, b"\xff\xff", -1),
        (4, b"\xff\xff\xff\xff", 2**32 - 1),
        (5, b"\xff\xff\xff\xff", -1),
        (6, b"\x00\x00\x80\x3f", 1.0),
        (7, b"\x01", True),
        (8, string("süß"), "süß"),
        (10, b"\xff" * 8, 2**64 - 1),
        (11, b"\xff" * 8, -1),
        (12, b"\x00" * 6 + b"\xf0\x3f", 1.0),
    ]
    keys = [key(f"k{i}", i, payload) for i, payload, _ in values]
    metadata = read(tmp_path, header(keys, []))["metadata"]
    for i, _, expected in values:
        assert metadata[f"k{i}"] == expected
