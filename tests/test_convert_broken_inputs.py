"""Broken inputs and impossible outputs, each through the command `ternconv`: exit code 1, one line that names
the file, nothing left behind, and what was there before is what it was."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from convert_models import llama_dir, write_json, write_weights
from ggml_tern.cli.ternconv import main

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
MATRIX = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"

Damage = Callable[[Path], object]

#: safetensors dtype, shape and bytes of a tensor.
Raw = tuple[str, tuple[int, ...], bytes]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that converts."""
    return llama_dir(tmp_path_factory.mktemp("sound") / "hf")


@pytest.fixture(scope="module")
def sound_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_dir(tmp_path_factory.mktemp("sound") / "hf", shards=2)


def ternconv(*arguments: Path | str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: Path | str) -> str:
    """The one line of standard error."""
    code, stdout, stderr = ternconv(*arguments)
    assert (code, stdout) == (1, ""), stderr
    assert stderr.startswith("ternconv: ") and stderr.count("\n") == 1 and stderr.endswith("\n")
    return stderr


# ---- ways to break a model directory ----


def removed(*names: str) -> Damage:
    def damage(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return damage


def emptied(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def written(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda model: (model / name).write_bytes(data)


def linked(name: str, target: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink()
        (model / name).symlink_to(target)

    return damage


def configured(**changes: Any) -> Damage:
    """config.json with other values; None takes a key out."""

    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | changes
        write_json(model / "config.json", {key: value for key, value in config.items() if value is not None})

    return damage


def indexed(change: Callable[[dict[str, str]], object]) -> Damage:
    """Another weight_map."""

    def damage(model: Path) -> None:
        index = json.loads((model / INDEX).read_text())
        change(index["weight_map"])
        write_json(model / INDEX, index)

    return damage


def cut(name: str, size: int) -> Damage:
    """A file without what is beyond `size`; from its end if that is negative."""
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:size])


def tensors(**changes: Any) -> Damage:
    """The weights with other arrays under the names MATRIX, NORM and `extra`; None takes one out."""

    def damage(model: Path) -> None:
        arrays = load_file(model / WEIGHTS)
        for key, change in changes.items():
            name = {"matrix": MATRIX, "norm": NORM}.get(key, key)
            array = change(arrays[name]) if callable(change) else change
            if array is None:
                del arrays[name]
            else:
                arrays[name] = array
        write_weights(model, arrays)

    return damage


def element(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[..., 77] = value
        return array

    return change


def write_raw(path: Path, stored: dict[str, Raw]) -> None:
    """A safetensors file of any element types."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, data) in stored.items():
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    write_header(path, json.dumps(header), b"".join(data for _, _, data in stored.values()))


def write_header(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def quantized(stored: Raw, scale: Raw | None = None, suffix: str = "_scale", **quantization: Any) -> Damage:
    """The matrix as a quantized checkpoint has it."""

    def damage(model: Path) -> None:
        raw: dict[str, Raw] = {
            name: ("F32", array.shape, array.tobytes()) for name, array in load_file(model / WEIGHTS).items()
        }
        raw[MATRIX] = stored
        if scale is not None:
            raw[MATRIX + suffix] = scale
        write_raw(model / WEIGHTS, raw)
        if quantization:
            configured(quantization_config=quantization)(model)

    return damage


def floats(*shape: int, value: float = 1.0) -> Raw:
    return "F32", shape, np.full(shape, value, np.float32).tobytes()


def header_changed(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another header over the same data."""

    def damage(model: Path) -> None:
        raw = (model / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        change(header)
        write_header(model / WEIGHTS, json.dumps(header), raw[8 + size :])

    return damage


def overlapping(header: dict[str, Any]) -> None:
    """Two norms of one size share their bytes."""
    header[NORM]["data_offsets"] = header["model.norm.weight"]["data_offsets"]


def duplicated(model: Path) -> None:
    """A header with one tensor twice, each time in bytes of its own."""
    entry = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    write_header(model / WEIGHTS, "{" + entry % (0, 4) + ", " + entry % (4, 8) + "}", bytes(8))


def unknown_pre_tokenizer(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "[a-f]+|."}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    write_json(model / "tokenizer.json", tokenizer)


def unknown_tokenizer(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}}
    write_json(model / "tokenizer.json", tokenizer)


def damaged_sentencepiece(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"\xff" * 9)


def embedding_cut(model: Path) -> None:
    """An embedding of fewer rows than the tokenizer has tokens."""
    tensors(**{"model.embed_tokens.weight": lambda array: array[:400].copy()})(model)
    configured(vocab_size=400)(model)


def directory_instead(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink()
        (model / name).mkdir()

    return damage


@dataclass(frozen=True)
class Case:
    """A way to break a model, the file of it that the message must name ("": the directory), and what more
    the message must say."""

    damage: Damage
    file: str
    says: str


#: A file that exists and that nobody can read from its start, not even root.
UNREADABLE = "/proc/self/mem"

CASES = {
    # the directory
    "no such directory": Case(shutil.rmtree, "", "no such file or directory"),
    "empty directory": Case(emptied, "", "has no config.json"),
    "no weights": Case(removed(WEIGHTS), "", "neither model.safetensors nor"),
    "pickled weights": Case(
        lambda m: (m / WEIGHTS).rename(m / "pytorch_model.bin"), "", "pytorch_model.bin, save the model as"
    ),
    "weights are a directory": Case(directory_instead(WEIGHTS), "", "neither model.safetensors nor"),
    # config.json
    "no config": Case(removed("config.json"), "", "has no config.json"),
    "config not JSON": Case(written("config.json", "{"), "config.json", "not valid JSON"),
    "config a list": Case(written("config.json", "[]"), "config.json", "expected a JSON object, found list"),
    "config not text": Case(written("config.json", b"\xff\xfe"), "config.json", "not valid JSON"),
    "config too deep": Case(written("config.json", "[" * 100_000), "config.json", "not valid JSON"),
    "config key twice": Case(
        written("config.json", '{"hidden_size": 1, "hidden_size": 2}'), "config.json", "occurs twice"
    ),
    "config a link loop": Case(linked("config.json", "config.json"), "config.json", "leads nowhere"),
    "config unreadable": Case(linked("config.json", UNREADABLE), "config.json", "cannot be read"),
    "no architectures": Case(
        configured(architectures=None, model_type="gpt_oss"), "config.json", "ternconv knows"
    ),
    "unknown architecture": Case(
        configured(architectures=["XForCausalLM"]), "config.json", "LlamaForCausalLM"
    ),
    "architectures no list": Case(configured(architectures="Llama"), "config.json", "a list of strings"),
    "negative size": Case(configured(hidden_size=-128), "config.json", "hidden_size is -128"),
    "size no number": Case(configured(num_hidden_layers="two"), "config.json", "num_hidden_layers is 'two'"),
    "gptq": Case(
        configured(quantization_config={"quant_method": "gptq"}), "config.json", "quant_method is 'gptq'"
    ),
    "no quant_method": Case(
        configured(quantization_config={"bits": 2}),
        "config.json",
        "has no quant_method; ternconv reads bitnet",
    ),
    # the file of tensors
    **{
        f"cut to {size} bytes": Case(cut(WEIGHTS, size), WEIGHTS, "truncated or damaged")
        for size in (0, 7, 8, 100, 5000, -4096, -1)
    },
    "header of 2^64 bytes": Case(
        written(WEIGHTS, b"\xff" * 8 + b"{}"), WEIGHTS, "truncated or damaged safetensors file of 10 bytes"
    ),
    "header longer than the file": Case(
        written(WEIGHTS, struct.pack("<Q", 1000) + b"{}"), WEIGHTS, "truncated or damaged"
    ),
    "header not JSON": Case(lambda m: write_header(m / WEIGHTS, "{{", b""), WEIGHTS, "truncated or damaged"),
    "a web page": Case(written(WEIGHTS, "<!DOCTYPE html><html></html>"), WEIGHTS, "is a web page (HTML)"),
    "overlapping tensors": Case(header_changed(overlapping), WEIGHTS, "truncated or damaged"),
    "a tensor twice": Case(duplicated, WEIGHTS, "truncated or damaged"),
    "negative shape": Case(
        header_changed(lambda h: h[NORM].update(shape=[-128])), WEIGHTS, "truncated or damaged"
    ),
    "huge shape": Case(
        header_changed(lambda h: h[NORM].update(shape=[1 << 62, 1 << 62])), WEIGHTS, "truncated or damaged"
    ),
    "shape of another size": Case(
        header_changed(lambda h: h[NORM].update(shape=[127])), WEIGHTS, "truncated or damaged"
    ),
    "no such dtype": Case(
        header_changed(lambda h: h[NORM].update(dtype="F7")), WEIGHTS, "truncated or damaged"
    ),
    "more data than tensors": Case(
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"more"), WEIGHTS, "damaged"
    ),
    "weights unreadable": Case(linked(WEIGHTS, UNREADABLE), WEIGHTS, "cannot be read"),
    "weights a link to nothing": Case(linked(WEIGHTS, "../blobs/0123"), WEIGHTS, "leads nowhere"),
    # the tensors
    "missing tensor": Case(tensors(matrix=None), "", f"tensor {MATRIX} is missing"),
    "wrong shape": Case(tensors(matrix=lambda a: a[:200].copy()), WEIGHTS, "has shape [200, 128]"),
    "transposed": Case(tensors(matrix=lambda a: a.T.copy()), WEIGHTS, "config.json makes it [256, 128]"),
    "one tensor too many": Case(tensors(extra=np.zeros(3, np.float32)), "", "extra have no place"),
    "wrong dtype": Case(tensors(matrix=lambda a: a.astype(np.int32)), WEIGHTS, f"{MATRIX} is stored as I32"),
    "NaN": Case(
        tensors(matrix=element(np.nan)), WEIGHTS, f"{MATRIX}: the element at row 0, column 77 is nan"
    ),
    "infinity": Case(tensors(matrix=element(-np.inf)), WEIGHTS, f"{MATRIX}: the element at row 0, column 77"),
    "NaN in a norm": Case(tensors(norm=element(np.nan)), WEIGHTS, f"{NORM}: the element at row 0, column 77"),
    "float64 too fine": Case(
        tensors(matrix=lambda a: a.astype(np.float64) + 1e-12), WEIGHTS, f"{MATRIX} is stored as F64"
    ),
    "float8 NaN": Case(
        quantized(("F8_E4M3", (256, 128), bytes(128 * 256 - 1) + b"\x7f")),
        WEIGHTS,
        "row 255, column 127 is nan",
    ),
    "float8 without scale": Case(
        quantized(("F8_E4M3", (256, 128), bytes(128 * 256)), quant_method="fp8"),
        WEIGHTS,
        f"{MATRIX}_scale_inv, is missing",
    ),
    "scales of wrong shape": Case(
        quantized(
            ("F8_E4M3", (256, 128), bytes(128 * 256)), floats(3, 1), suffix="_scale_inv", quant_method="fp8"
        ),
        WEIGHTS,
        f"{MATRIX}_scale_inv has shape [3, 1]",
    ),
    "int8 without scale": Case(
        quantized(("I8", (256, 128), bytes(128 * 256))), WEIGHTS, f"expected {MATRIX}_scale"
    ),
    "scale not a number": Case(
        quantized(("I8", (256, 128), bytes(128 * 256)), floats(1, value=np.nan)),
        WEIGHTS,
        f"{MATRIX}_scale holds the scale nan",
    ),
    "packed to wrong shape": Case(
        quantized(("U8", (128, 128), b"\x55" * 128 * 128), floats(1), quant_method="bitnet"),
        WEIGHTS,
        f"{MATRIX} has shape [512, 128]",
    ),
    "packed code that is none": Case(
        quantized(("U8", (64, 128), b"\x57" * 64 * 128), floats(1), quant_method="bitnet"),
        WEIGHTS,
        f"{MATRIX}: row 0 holds the code 3",
    ),
    "packed without quantization_config": Case(
        quantized(("U8", (64, 128), b"\x55" * 64 * 128), floats(1)), WEIGHTS, "quant_method bitnet"
    ),
    # the tokenizer
    "no tokenizer": Case(removed("tokenizer.json"), "", "has neither tokenizer.model nor tokenizer.json"),
    "unknown tokenizer": Case(unknown_tokenizer, "tokenizer.json", "WordPiece"),
    "unknown pre-tokenizer": Case(unknown_pre_tokenizer, "tokenizer.json", "[a-f]+|."),
    "tokenizer not JSON": Case(written("tokenizer.json", "{]"), "tokenizer.json", "not valid JSON"),
    "tokenizer.model damaged": Case(damaged_sentencepiece, "tokenizer.model", "SentencePiece"),
    "more tokens than rows": Case(embedding_cut, "tokenizer.json", "400"),
    "model card damaged": Case(written("README.md", "---\nlicense: [\n---\n"), "README.md", "front matter"),
}

SHARD_CASES = {
    "missing shard": Case(removed(SECOND), "", f"shard {SECOND} is missing, of 2"),
    "shard a directory": Case(directory_instead(SECOND), "", f"shard {SECOND} is missing"),
    "shard a link loop": Case(linked(SECOND, SECOND), SECOND, "leads nowhere"),
    "shard unreadable": Case(linked(SECOND, UNREADABLE), SECOND, "cannot be read"),
    "shard cut": Case(cut(SECOND, -1), SECOND, "truncated or damaged"),
    "index of a tensor that is not there": Case(
        indexed(lambda names: names.update(extra=FIRST)), FIRST, f"lacks extra, which {INDEX} places there"
    ),
    "index without a tensor": Case(
        indexed(lambda names: names.pop(next(key for key in names if names[key] == SECOND))), SECOND, "holds"
    ),
    "index with shards exchanged": Case(
        indexed(lambda names: names.update(dict.fromkeys(names, FIRST))), FIRST, "lacks"
    ),
    "absolute path in the index": Case(
        indexed(lambda names: names.update(extra="/etc/passwd")), INDEX, "not a plain file name"
    ),
    "parent path in the index": Case(
        indexed(lambda names: names.update(extra=f"../{FIRST}")), INDEX, "not a plain file name"
    ),
    "number in the index": Case(indexed(lambda names: names.update(extra=1)), INDEX, "not a plain file name"),  # type: ignore[call-overload]
    "empty index": Case(written(INDEX, '{"weight_map": {}}'), INDEX, "has no weight_map"),
    "index not JSON": Case(written(INDEX, "{"), INDEX, "not valid JSON"),
    "index key twice": Case(
        written(INDEX, f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}'),
        INDEX,
        "the key 'a' occurs twice",
    ),
    "index unreadable": Case(linked(INDEX, UNREADABLE), INDEX, "cannot be read"),
    "neither index nor all shards": Case(removed(INDEX, FIRST), "", f"no {INDEX}; {FIRST} is missing"),
}


def check(case: Case, sound: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(sound, model)
    case.damage(model)
    out = tmp_path / "out"
    out.mkdir()
    line = refused(model, out / "model.gguf")
    assert str(model / case.file) in line and case.says in line
    assert list(out.iterdir()) == []

    (out / "model.gguf").write_text("precious")
    assert refused(model, out / "model.gguf", "--force") == line
    assert [path.name for path in out.iterdir()] == ["model.gguf"]
    assert (out / "model.gguf").read_text() == "precious"


def test_the_sound_ones_convert(tmp_path: Path, sound: Path, sound_shards: Path) -> None:
    for number, model in enumerate((sound, sound_shards)):
        code, _, stderr = ternconv(model, tmp_path / f"{number}.gguf")
        assert (code, stderr) == (0, "")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_broken_model(case: Case, sound: Path, tmp_path: Path) -> None:
    check(case, sound, tmp_path)


@pytest.mark.parametrize("case", SHARD_CASES.values(), ids=SHARD_CASES)
def test_broken_shards(case: Case, sound_shards: Path, tmp_path: Path) -> None:
    check(case, sound_shards, tmp_path)


def test_file_instead_of_the_directory(sound: Path, tmp_path: Path) -> None:
    line = refused(sound / WEIGHTS, tmp_path / "model.gguf")
    assert f"{sound / WEIGHTS}: is a safetensors file" in line and f"to ternconv, {sound}\n" in line
    assert list(tmp_path.iterdir()) == []


# ---- outputs that cannot be ----


def test_existing_output(sound: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.gguf"
    output.write_text("precious")
    assert f"{output}: already exists; pass --force" in refused(sound, output)
    assert output.read_text() == "precious" and list(tmp_path.iterdir()) == [output]


def test_output_that_is_a_directory(sound: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}: is a directory" in refused(sound, tmp_path, "--force")
    assert list(tmp_path.iterdir()) == []


def test_output_in_a_directory_that_is_not_there(sound: Path, tmp_path: Path) -> None:
    output = tmp_path / "nowhere" / "model.gguf"
    assert f"{output}: the directory {output.parent} does not exist" in refused(sound, output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["itself", "symbolic link", "hard link", "roundabout path"])
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_output_on_top_of_an_input(sound: Path, tmp_path: Path, name: str, how: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(sound, model)
    output = tmp_path / "link.gguf"
    if how == "symbolic link":
        output.symlink_to(model / name)
    elif how == "hard link":
        output.hardlink_to(model / name)
    else:
        output = model / name if how == "itself" else model / ".." / "model" / name
    before = sorted(tmp_path.rglob("*"))
    assert f"{output}: is a file of the model that is being converted" in refused(model, output, "--force")
    assert (model / name).read_bytes() == (sound / name).read_bytes()
    assert sorted(tmp_path.rglob("*")) == before


def test_output_without_permission(sound: Path, tmp_path: Path) -> None:
    """Where not even root may make a file."""
    output = Path("/proc/model.gguf")
    assert str(output) in refused(sound, output)
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert f"the directory {tmp_path} is not writable" in refused(sound, tmp_path / "model.gguf")


@pytest.mark.parametrize("limit", [0, 5000, 100_000])
@pytest.mark.parametrize("existing", [False, True])
def test_output_that_fills_the_disk(sound: Path, tmp_path: Path, limit: int, existing: bool) -> None:
    """A limit to the size of files stops the header, the metadata and the tensors, as a full disk does."""
    output = tmp_path / "model.gguf"
    if existing:
        output.write_text("precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        result = ternconv(sound, output, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    code, stdout, stderr = result
    assert (code, stdout) == (1, "") and stderr.count("\n") == 1
    assert f"{output}: cannot be written: File too large" in stderr
    assert list(tmp_path.iterdir()) == ([output] if existing else [])
    assert not existing or output.read_text() == "precious"
