"""What people hand in: every kind is named in one line that says what to do, in every command that takes a
model."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert_models import llama_dir
from ggml_tern.errors import TernError
from ggml_tern.gguf.identify import Kind, identify, require_gguf
from ggml_tern.gguf.model_file import model_file
from ggml_tern.gguf.reader import GGUFSource
from reference import gguf_files as files

TERN = Path(sys.executable).parent / "tern"
TERNCONV = Path(sys.executable).parent / "ternconv"

NORM = files.plain("output_norm.weight", 0, np.ones(4, np.float32))
Make = Callable[[Path], object]


def content(data: bytes) -> Make:
    return lambda path: path.write_bytes(data)


def a_zip(path: Path, member: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"x" * 100)


def a_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("config.json"), io.BytesIO())


def gguf(*tensors: files.Tensor, **metadata: object) -> Make:
    names = {"arch": "general.architecture", "kind": "general.type"}
    keys = {names.get(name, name.replace("__", ".")): value for name, value in metadata.items()}
    return lambda path: files.write(path, keys, list(tensors))


def big_endian(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8))


def folder(*names: str, content: str = "{}") -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content)

    return make


ERROR = b'{"error": "Repository not\\u001b found"}'
ADAPTER = '{"base_model_name_or_path": "x/y"}'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5951234567\n"
IMATRIX = struct.pack("<ii", 2, 19) + b"blk.0.attn_q.weight" + bytes(100)

#: Things that are no model: how to make one, and two parts of the line about it.
FOREIGN: dict[str, tuple[Make, str, str]] = {
    "empty": (content(b""), "is empty", "download it again"),
    "LFS pointer": (content(POINTER), "Git LFS pointer to a file of 5951.2 MB", "git lfs pull"),
    "web page": (content(b"\n<!DOCTYPE html>\n<html>"), "a web page (HTML)", "/resolve/"),
    "XML": (content(b'<?xml version="1.0"?><Error/>'), "XML", "download it again"),
    "error of a server": (
        content(ERROR),
        "Repository not\\x1b",
        "again",
    ),
    "JSON": (content(b'{"a": 1}'), "a JSON file", "give a model"),
    "text": (content(b"Not Found\n"), 'text that begins with "Not Found"', "download it again"),
    "long text": (content(b"\xc3\xa9" * 5000), 'text that begins with "\xe9\xe9', "download it again"),
    "gzip": (content(gzip.compress(b"GGUF")), "compressed with gzip", "gunzip"),
    "xz": (content(b"\xfd7zXZ\0" + bytes(9)), "compressed with xz", "unxz"),
    "zip": (lambda path: a_zip(path, "model.gguf"), "a zip archive", "unzip"),
    "PyTorch": (lambda path: a_zip(path, "pytorch_model/data.pkl"), "a PyTorch file", "as safetensors"),
    "old PyTorch": (content(b"\x80\x02\x8a\nl\xfc\x9cF"), "a PyTorch file", "as safetensors"),
    "tar": (a_tar, "a tar archive", "tar xf"),
    "program": (content(b"\x7fELF" + bytes(60)), "a program", "give a model"),
    "before GGUF": (content(b"tjgg" + bytes(60)), "before GGUF", "convert the model anew"),
    "imatrix of old": (content(IMATRIX), "importance matrix", "give the model"),
    "zeros": (content(bytes(5000)), "nothing but zeros", "finish the download"),
    "noise": (content(b"\xfe\x01\x80\x90" * 20), "fe 01 80 90", "begins with 'GGUF'"),
    "big endian": (big_endian, "big endian", "gguf-convert-endian"),
    "version 1": (content(b"GGUF" + struct.pack("<III", 1, 0, 0)), "version 1", "convert the model anew"),
    "pipe": (os.mkfifo, "not a regular file", "give a model"),
    "loop": (lambda path: path.symlink_to(path), "", ""),
    # folders
    "empty folder": (folder(), "an empty directory", "give a model"),
    "folder of others": (folder("notes.txt"), "has no config.json", "give a model"),
    "adapter": (
        folder(
            "adapter_config.json", "adapter_model.safetensors", content='{"base_model_name_or_path": "x/y"}'
        ),
        "an adapter of x/y",
        "--lora",
    ),
    "adapter with a config": (folder("adapter_config.json", "config.json"), "an adapter", "--lora"),
    "Mistral's own": (
        folder("consolidated.safetensors", "params.json", "tekken.json"),
        "its maker's own format",
        "config.json and model*.safetensors",
    ),
    "Mistral's with a config": (
        folder("consolidated.safetensors", "config.json"),
        "its maker's own format (consolidated.safetensors",
        "model*.safetensors",
    ),
    "Meta's own": (folder("consolidated.00.pth", "params.json"), "its maker's own format", "-hf"),
    "cache of the hub": (
        folder("snapshots/abc/config.json", "refs/main"),
        "has no config.json",
        "give a model",
    ),
    "Ollama's": (folder("blobs/sha256-1", "manifests/x"), "Ollama's store", "largest of the files in blobs"),
    "weights alone": (folder("model.safetensors"), "but has no config.json", "download config.json"),
    "folder of folders": (folder("main/config.json"), "a directory of directories", "main"),
    "diffusers": (folder("model_index.json", "unet/config.json"), "diffusers", "a language model"),
}
# The kinds of GGUF that are no language model.
OTHER_GGUF: dict[str, tuple[Make, str, str]] = {
    "LoRA": (gguf(NORM, kind="adapter", arch="llama"), "an adapter", "--lora"),
    "projector": (
        gguf(NORM, kind="mmproj", arch="clip"),
        "a projector",
        "--mmproj",
    ),
    "projector of old": (gguf(NORM, arch="clip"), "a projector", "--mmproj"),
    "imatrix": (gguf(NORM, kind="imatrix"), "an importance matrix", "llama-quantize"),
    "imatrix without a type": (gguf(NORM, imatrix__datasets=["x"]), "an importance matrix", "give the model"),
    "control vector": (
        gguf(NORM, arch="controlvector"),
        "a control vector",
        "--control-vector",
    ),
    "vocabulary": (gguf(arch="llama"), "a vocabulary", "has the weights"),
    "images": (gguf(NORM, arch="flux"), "makes images", "a language model"),
    "speech": (gguf(NORM, arch="whisper"), "hears speech", "whisper.cpp"),
    "no architecture": (gguf(NORM), "no general.architecture", "expected the GGUF file of a model"),
    "other type": (
        gguf(NORM, kind="da\nta", arch="llama"),
        "'da\\\\nta'",
        "give a model",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_gguf_file_is_named(name: str, tmp_path: Path) -> None:
    make, what, way_out = FOREIGN[name]
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(TernError) as caught:
        require_gguf(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line and line.isprintable()
    assert what in line and way_out in line
    with pytest.raises(TernError) as again:
        GGUFSource(path)
    assert str(again.value) == line


@pytest.mark.parametrize("name", OTHER_GGUF)
def test_what_is_no_language_model_is_named(name: str, tmp_path: Path) -> None:
    make, what, way_out = OTHER_GGUF[name]
    path = tmp_path / "m.gguf"
    make(path)
    with pytest.raises(TernError) as caught:
        model_file(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: is ") and "\n" not in line and line.isprintable()
    assert what in line and way_out in line


def test_missing_files_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TernError, match=r"m\.gguf: no such file or directory$"):
        identify(tmp_path / "m.gguf")
    with pytest.raises(TernError, match="hf download org/Some-Model --local-dir Some-Model"):
        identify(Path("org/Some-Model"))
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(TernError, match="link to nowhere, which leads nowhere"):
        identify(tmp_path / "link")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TernError, match=r"/proc/self/mem: cannot be read: Input/output error"):
        identify(Path("/proc/self/mem"))
    if os.geteuid() != 0:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUF")
        path.chmod(0)
        with pytest.raises(TernError, match=r"m\.gguf: cannot be read: Permission denied"):
            identify(path)


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    folder("snapshots/abc/config.json", "refs/main", "blobs/1")(cache)
    assert f"give {cache / 'snapshots' / 'abc'}" in str(identify(cache).refusal())


def test_a_gguf_file_beside_what_was_given(tmp_path: Path) -> None:
    both = tmp_path / "both"
    folder("config.json", "model.safetensors", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")(both)
    found = identify(both)
    assert found.kind is Kind.CHECKPOINT and f"{both}/m-00001-of-00002.gguf" in found.way_out
    alone = tmp_path / "alone"
    folder("b.gguf", "a.gguf")(alone)
    assert str(identify(alone).refusal()).endswith(f"give one of them, {alone}/a.gguf")


def test_a_checkpoint_where_a_gguf_file_is_wanted(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    line = str(identify(model).refusal())
    assert "a Hugging Face model directory" in line and f"`ternconv {model} OUT.gguf`" in line
    weights = identify(model / "model.safetensors")
    assert weights.kind is Kind.SAFETENSORS and str(model) in weights.way_out
    assert f"to ternconv, {model}" in str(identify(model / "config.json").refusal())
    alone = tmp_path / "alone.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, alone)
    assert "together with config.json" in str(identify(alone).refusal())


def test_big_files_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3))
    os.truncate(path, 1 << 40)
    assert identify(path).kind is Kind.GGUF


def test_any_part_stands_for_its_model(tmp_path: Path) -> None:
    paths = [
        files.write(
            tmp_path / f"m-{number:05}-of-00003.gguf",
            {"general.architecture": "llama", "split.no": number - 1, "split.count": 3},
            [files.plain(f"t{number}", 0, np.ones(4, np.float32))],
        )
        for number in (1, 2, 3)
    ]
    assert [model_file(path) for path in paths] == [paths[0]] * 3
    whole = files.write(tmp_path / "whole", {"general.architecture": "llama"}, [NORM])
    assert model_file(whole) == whole
    paths[2].unlink()
    with pytest.raises(TernError, match="part 3 of 3 is missing; finish the download"):
        model_file(paths[1])


@pytest.mark.parametrize(
    ("type_id", "says"),
    [(144, "only ik_llama.cpp knows"), (139, "only ik_llama.cpp"), (211, "only ik_llama.cpp"), (99, "fork")],
)
def test_types_of_other_forks(type_id: int, says: str, tmp_path: Path) -> None:
    tensor = files.Tensor("w", type_id, (2, 256), bytes(512))
    path = files.write(tmp_path / "m.gguf", {"general.architecture": "llama"}, [tensor])
    with pytest.raises(TernError) as caught:
        GGUFSource(path)
    assert f"tensor 'w' has unknown type {type_id}" in str(caught.value) and says in str(caught.value)


# ---- in the commands ----


def outcome(*command: Path | str) -> tuple[int, str, str]:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("name", ["LFS pointer", "adapter", "zip"])
def test_every_command_that_reads_models_says_it(name: str, tmp_path: Path) -> None:
    make, what, way_out = FOREIGN[name]
    path = tmp_path / "model.gguf"
    make(path)
    out = tmp_path / "out.gguf"
    for command in (
        [TERN, "inspect", path],
        [TERN, "hash", path],
        [TERN, "repack", path, out, "--type", "q2_0"],
        [TERN, "verify", path, path],
        [TERN, "plan", path],
        [TERN, "chat", path, "Why?"],
        [TERN, "serve", path],
        [TERN, "bench", path],
        [TERN, "run", "llama-bench", "-m", path],
        [TERNCONV, path, out],
    ):
        code, stdout, stderr = outcome(*command)
        assert code in (1, 2) and stdout == "" and stderr.count("\n") == 1, (command, stderr)
        assert str(path) in stderr and what in stderr and way_out in stderr, command
    assert not out.exists()


def test_a_gguf_file_needs_no_suffix(tmp_path: Path) -> None:
    """Ollama's blobs have none."""
    model = llama_dir(tmp_path / "hf")
    assert outcome(TERNCONV, "--type", "q8_0", model, tmp_path / "m.gguf")[0] == 0
    blob = tmp_path / f"sha256-{'0' * 64}"
    shutil.copyfile(tmp_path / "m.gguf", blob)
    code, _, stderr = outcome(TERNCONV, blob, tmp_path / "again.gguf")
    assert code == 0, stderr
    assert outcome(TERNCONV, tmp_path / "m.gguf", tmp_path / "other.gguf")[0] == 0
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()
    assert outcome(TERN, "verify", model, blob)[0] == 0


def test_a_shard_that_is_something_else_is_named(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf", shards=2)
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(POINTER)
    code, _, stderr = outcome(TERNCONV, model, tmp_path / "m.gguf")
    assert code == 1 and f"{shard}: is a Git LFS pointer" in stderr and "git lfs pull" in stderr
