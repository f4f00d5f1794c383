"""The reader of checkpoints: every tensor comes back as it was stored, and every kind of damage is one clear
line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

from convert_models import llama_config, random_tensors, write_json, write_weights
from ggml_tern.convert.read.checkpoint import Checkpoint
from ggml_tern.errors import TernError


def model_dir(directory: Path, shards: int = 1) -> Path:
    directory.mkdir(exist_ok=True)
    config = llama_config()
    write_json(directory / "config.json", config)
    write_weights(directory, random_tensors(config), shards)
    return directory


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensors_come_back_as_stored(tmp_path: Path, shards: int, dtype: str) -> None:
    config = llama_config()
    tensors = random_tensors(config, dtype=dtype)
    write_json(tmp_path / "config.json", config)
    write_weights(tmp_path, tensors, shards)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == config
    assert set(checkpoint.tensors) == set(tensors)
    for name, stored in checkpoint.tensors.items():
        values = checkpoint.load(stored)
        assert isinstance(values, np.ndarray) and values.dtype == tensors[name].dtype
        assert np.array_equal(values, tensors[name])


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_bfloat16_bits_come_back_for_any_shape(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("bf16")
    rng = np.random.default_rng(seed)
    arrays = {f"t{i}": rng.integers(0, 1 << 16, shape).astype(np.uint16) for i, shape in enumerate(shapes)}
    serialize_file(
        {
            name: TensorSpec(dtype="bfloat16", shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
            for name, a in arrays.items()
        },
        str(directory / "model.safetensors"),
    )
    write_json(directory / "config.json", {})
    checkpoint = Checkpoint(directory)
    for name, bits in arrays.items():
        values = checkpoint.load(checkpoint.tensors[name])
        assert isinstance(values, np.ndarray) and values.dtype == np.uint16
        assert np.array_equal(values, bits)


def refusal(directory: Path) -> str:
    with pytest.raises(TernError) as caught:
        Checkpoint(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_directory_and_files(tmp_path: Path) -> None:
    assert "no such file or directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is empty" in refusal(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert "has no config.json" in refusal(tmp_path)
    write_json(tmp_path / "config.json", {})
    assert "neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", '{"a": '])
def test_broken_config(tmp_path: Path, text: str) -> None:
    model_dir(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refusal(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    model_dir(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-00002-of-00003.safetensors" in message and "missing" in message


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    model_dir(tmp_path, shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first = "model-00001-of-00002.safetensors"
    name = next(key for key, shard in index["weight_map"].items() if shard == first)

    removed = {key: shard for key, shard in index["weight_map"].items() if key != name}
    write_json(index_path, {"weight_map": removed})
    assert re.search(rf"{first}: holds {re.escape(name)}", refusal(tmp_path))

    write_json(index_path, {"weight_map": index["weight_map"] | {"extra.weight": first}})
    assert re.search(rf"{first}: lacks extra\.weight", refusal(tmp_path))

    for weight_map in ({}, None, {name: "../elsewhere.safetensors"}, {name: 3}):
        write_json(index_path, {"weight_map": weight_map})
        assert "index.json" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 40, 0.5, -1])
def test_truncated_safetensors(tmp_path: Path, keep: float) -> None:
    """Cut to nothing, inside the length, inside the header, inside the data, and by one byte."""
    path = model_dir(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    size = int(len(whole) * keep) if isinstance(keep, float) else int(keep)
    path.write_bytes(whole[:size])
    message = refusal(tmp_path)
    assert str(path) in message and "truncated or damaged" in message


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_damaged_header_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    """One byte of the length or the JSON is changed: refused, or read with every tensor inside the file."""
    directory = tmp_path_factory.mktemp("flip")
    write_json(directory / "config.json", {})
    path = directory / "model.safetensors"
    save_file({f"tensor{i}": np.full((i + 1, 3), i, np.float32) for i in range(5)}, path)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = byte
    path.write_bytes(raw)
    try:
        checkpoint = Checkpoint(directory)
    except TernError:
        return
    for tensor in checkpoint.tensors.values():
        try:
            assert checkpoint.load(tensor).shape == tensor.shape
        except TernError as error:
            assert tensor.name in str(error)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {})
    save_file({"x": np.zeros((2, 2), np.int32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(TernError, match=r"tensor x is stored as I32; ternconv reads BF16, F16, F32, F64"):
        checkpoint.load(checkpoint.tensors["x"])


def test_shards_without_an_index(tmp_path: Path) -> None:
    whole = set(Checkpoint(model_dir(tmp_path, shards=3)).tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.tensors) == whole
    assert len(checkpoint.notes) == 1 and "model.safetensors.index.json" in checkpoint.notes[0]

    first, second = (tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    assert re.search(r"00002-of-00003\.safetensors: tensor .* is in model-00001-of-00003", refusal(tmp_path))
    second.unlink()
    assert "has 2 of 3 shards" in refusal(tmp_path) and second.name in refusal(tmp_path)
    second.write_bytes(content)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(content)
    assert "shards of several sets" in refusal(tmp_path)


def test_a_file_of_the_directory_instead_of_it(tmp_path: Path) -> None:
    model_dir(tmp_path)
    message = refusal(tmp_path / "model.safetensors")
    assert "a safetensors file" in message and message.endswith(f"to ternconv, {tmp_path}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_to_nothing(tmp_path: Path, name: str) -> None:
    """The cache of the hub holds links to where a download was to end."""
    path = model_dir(tmp_path) / name
    content = path.read_bytes()
    path.unlink()
    path.symlink_to("blob")
    assert f"{path}: is a link to blob, which leads nowhere" in refusal(tmp_path)
    (tmp_path / "blob").write_bytes(content)
    assert Checkpoint(tmp_path).tensors


def test_keys_that_occur_twice(tmp_path: Path) -> None:
    model_dir(tmp_path, shards=2)
    for name in ("config.json", "model.safetensors.index.json"):
        path = tmp_path / name
        text = path.read_text()
        path.write_text('{"a": {"key": 1, "key": 2},' + text[1:])
        assert f"{path}: not valid JSON: the key 'key' occurs twice" in refusal(tmp_path)
        path.write_text(text)


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    model_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    assert "config.json: not valid JSON" in refusal(tmp_path)


# ---- several sets of weights ----


def values_of(directory: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    checkpoint = Checkpoint(directory)
    return {name: np.asarray(checkpoint.load(t)) for name, t in checkpoint.tensors.items()}, checkpoint.notes


@pytest.mark.parametrize("beside", ["index and shards", "shards", "index alone"])
def test_one_file_beside_shards_of_another_training(tmp_path: Path, beside: str) -> None:
    """transformers loads model.safetensors, whatever else is there."""
    config = llama_config()
    write_json(tmp_path / "config.json", config)
    write_weights(tmp_path, random_tensors(config, seed=1), shards=2)
    for path in tmp_path.glob("model-*" if beside == "index alone" else "*.json"):
        if beside != "index and shards" and path.name != "config.json":
            path.unlink()
    newest = random_tensors(config, seed=2)
    write_weights(tmp_path, newest)
    found, (note,) = values_of(tmp_path)
    assert all(np.array_equal(found[name], values) for name, values in newest.items())
    assert note.startswith("model.safetensors is converted") and "move model.safetensors away" in note
    assert ("model.safetensors.index.json" in note) == (beside != "shards")
    assert ("model-00001-of-00002.safetensors" in note) == (beside == "shards")


def test_an_index_that_lists_the_one_file(tmp_path: Path) -> None:
    config, tensors = llama_config(), random_tensors(llama_config())
    write_json(tmp_path / "config.json", config)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:3]}, tmp_path / "model.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, tmp_path / "rest.safetensors")
    weight_map = {name: "model.safetensors" if name in names[:3] else "rest.safetensors" for name in names}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    found, notes = values_of(tmp_path)
    assert found.keys() == tensors.keys() and notes == []


def test_one_file_under_another_name(tmp_path: Path) -> None:
    model_dir(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert "weights.safetensors: if that is all of the model, name it model.safetensors" in refusal(tmp_path)
