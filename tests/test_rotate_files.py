"""Rotated GGUF files: repacked, made plain, converted again, verified. Their plain twins are of numpy's
making."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import rotated_files
from ggml_tern import _core
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.rotate.rotation import RotationChoice
from ggml_tern.convert.verify import Verdict, verify
from ggml_tern.errors import TernError
from ggml_tern.gguf.digest import hash_tensors
from ggml_tern.gguf.reader import HADAMARD, GGUFSource
from ggml_tern.gguf.repacking import TARGETS, repack, unrotate
from ggml_tern.tensors.types import F16, F32, PQ2_0, PTQ1_0, Q8_0, TQ2_0
from reference import gguf_bytes
from rotated_checkpoints import decoded
from rotated_files import RECIPES, RotatedModel

TERN = str(Path(sys.executable).parent / "tern")
OURS = [_core.TYPE_PQ2_0, _core.TYPE_PTQ1_0]


def a_model(recipe: str, path: Path, rng: np.random.Generator) -> tuple[RotatedModel, Path]:
    model = rotated_files.make(RECIPES[recipe], rng)
    return model, model.write(path)


def tern(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TERN, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def keys_of(path: Path) -> dict[str, object]:
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in GGUFSource(path).metadata.items()
    }


def assert_near(found: npt.NDArray[np.float32], truth: npt.NDArray[np.float32], relative: float) -> None:
    assert np.linalg.norm(found - truth) <= relative * np.linalg.norm(truth)


# ---- tern repack ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_unrotate(recipe: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The plain twin, in F32 to 1e-6 and in F16 to its rounding; nothing is left of the rotation, and the
    rest is what it was."""
    model, path = a_model(recipe, tmp_path / "in.gguf", rng)
    for type_id, relative in ((_core.TYPE_F32, 1e-6), (_core.TYPE_F16, 2.0**-11)):
        output = tmp_path / f"{type_id}.gguf"
        report = unrotate(GGUFSource(path), output, type_id)
        assert f"{len(model.rotations)} rotated tensors are plain now" in report.notes[0]
        made = GGUFSource(output)
        assert not made.is_rotated and list(made.tensors) == list(model.plain)
        expected = {key: value for key, value in keys_of(path).items() if not key.startswith(HADAMARD)}
        assert keys_of(output) == expected
        for name, values in decoded(output).items():
            assert_near(values, model.plain[name], relative)
            before = GGUFSource(path).tensors[name]
            if before.is_ternary:
                assert made.tensors[name].type == type_id
            else:
                assert made.tensors[name].data.tobytes() == before.data.tobytes()


@pytest.mark.parametrize("recipe", ["qwen3, tied", "qwen35", "qwen3moe"])
def test_repack_keeps_the_rotation(recipe: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """PQ2_0 to PTQ1_0 and back, whole or from two parts: the same keys, the same values."""
    _, path = a_model(recipe, tmp_path / "in.gguf", rng)
    hashes = hash_tensors(GGUFSource(path))
    source = path
    for name in ("pq2_0", "ptq1_0", "pq2_0"):
        output = tmp_path / f"{name}-{source.stem}.gguf"
        repack(GGUFSource(source), output, TARGETS[name])
        assert hash_tensors(GGUFSource(output)) == hashes and keys_of(output) == keys_of(path)
        assert _core.read_hadamard(output) is not None
        source = output
    first = gguf_bytes.split_in_two(path, tmp_path / "parts")
    report = repack(GGUFSource(first), tmp_path / "joined.gguf", TARGETS["pq2_0"])
    assert "joined the 2 parts of the model" in report.notes
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / f"pq2_0-{path.stem}.gguf").read_bytes()


def test_what_repack_refuses(tmp_path: Path, rng: np.random.Generator) -> None:
    model, path = a_model("qwen3", tmp_path / "in.gguf", rng)
    out = tmp_path / "out.gguf"

    def refused(*arguments: Path | str, code: int = 1) -> str:
        result = tern("repack", *arguments)
        assert result.returncode == code and not out.exists()
        assert code == 2 or result.stderr.count("\n") == 1
        return result.stderr

    for name in ("q2_0", "tq2_0", "tq1_0"):
        message = refused(path, out, "--type", name)
        assert str(path) in message and name.upper() in message and "--unrotate" in message
    first = gguf_bytes.split_in_two(path, tmp_path / "parts")
    assert "join the 2 parts first with `tern repack`" in refused("--unrotate", first, out)
    plain = model.write_twin(tmp_path / "plain.gguf")
    assert "nothing for --unrotate" in refused("--unrotate", plain, out)
    assert "f16 and f32 go with --unrotate" in refused(path, out, "--type", "f16", code=2)
    assert "f16 and f32 go with --unrotate" in refused(path, out, "--unrotate", "--type", "pq2_0", code=2)
    assert "--type" in refused(path, out, code=2)

    model.keys[HADAMARD + "block_size"] = rotated_files.u32(48)
    broken = model.write(tmp_path / "broken.gguf")
    for arguments in (["--unrotate"], ["--type", "pq2_0"]):
        message = refused(broken, out, *arguments)
        assert str(broken) in message and "prism.hadamard.block_size" in message

    # 1e5 is no F16 number.
    values = np.full_like(model.plain["blk.0.ffn_up.weight"], 1e5)
    assert values.shape[1] == 256
    _, path = a_model("qwen3", tmp_path / "large.gguf", rng)
    at = data_of(path, "blk.0.ffn_up.weight")
    data = bytearray(path.read_bytes())
    block = GGUFSource(path).tensors["blk.0.ffn_up.weight"]
    scale = slice(at, at + 2) if block.type == _core.TYPE_PQ2_0 else slice(at + 26, at + 28)
    data[scale] = np.float16(65504).tobytes()
    path.write_bytes(data)
    message = refused("--unrotate", path, out)
    assert "blk.0.ffn_up.weight" in message and "--type f32" in message
    assert tern("repack", "--unrotate", "--type", "f32", path, out).returncode == 0


def data_of(path: Path, name: str) -> int:
    """Where a tensor's data begins in a file."""
    header = _core.read_gguf_header(path)
    return int(header["data_offset"] + next(t["offset"] for t in header["tensors"] if t["name"] == name))


def test_the_command(tmp_path: Path, rng: np.random.Generator) -> None:
    model, path = a_model("llama", tmp_path / "in.gguf", rng)
    result = tern("repack", "--unrotate", path, tmp_path / "out.gguf")
    assert result.returncode == 0 and "rotated tensors are plain now, in F16" in result.stdout
    result = tern("verify", path, tmp_path / "out.gguf")
    assert result.returncode == 0 and "as quantized" in result.stdout
    result = tern("inspect", path)
    assert f"{len(model.rotations) - 1} weights" in result.stdout and "signs identity" in result.stdout
    assert "version 1" in result.stdout and "note: the plug-in refuses" not in result.stdout
    first = gguf_bytes.split_in_two(path, tmp_path / "parts")
    result = tern("inspect", first)
    assert "note: the plug-in refuses it: is a part of a rotated model; join the 2 parts" in result.stdout


# ---- ternconv ----


@pytest.mark.parametrize("recipe", ["qwen3, tied", "qwen35", "llama, in part"])
def test_convert_a_rotated_file(recipe: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Keys and values go through; what is not ternary may change its type."""
    _, path = a_model(recipe, tmp_path / "in.gguf", rng)
    for choice in (TypeChoice(PQ2_0), TypeChoice(PTQ1_0), TypeChoice(None)):
        report = convert(path, tmp_path / "out.gguf", choice, force=True)
        ours, before = keys_of(report.output), keys_of(path)
        rotation = {key: value for key, value in before.items() if key.startswith(HADAMARD)}
        assert {key: value for key, value in ours.items() if key.startswith(HADAMARD)} == rotation
        made, was = decoded(report.output), decoded(path)
        for name in _core.read_hadamard(path)["rotations"]:  # type: ignore[index]
            assert np.array_equal(made[name], was[name])
        assert Verdict.DIFFERENT not in {finding.verdict for finding in verify(path, report.output)}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (TypeChoice(TQ2_0, PTQ1_0, PTQ1_0), "blk.0.attn_q.weight"),
        (TypeChoice(Q8_0), "blk.0.attn_q.weight"),
        (TypeChoice(PTQ1_0, Q8_0), "token_embd.weight"),
        (TypeChoice(PTQ1_0, None, F16), "output.weight"),
        (TypeChoice(PTQ1_0, keep=(Keep("ffn_down", F32),)), "blk.0.ffn_down.weight"),
    ],
)
def test_types_that_rotated_weights_cannot_have(
    choice: TypeChoice, name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    _, path = a_model("qwen3", tmp_path / "in.gguf", rng)
    with pytest.raises(TernError, match=rf"{name} is stored rotated.*tern repack --unrotate {path}"):
        convert(path, tmp_path / "out.gguf", choice)
    assert not (tmp_path / "out.gguf").exists()


def test_what_ternconv_refuses_of_a_rotated_file(tmp_path: Path, rng: np.random.Generator) -> None:
    model, path = a_model("qwen3", tmp_path / "in.gguf", rng)
    with pytest.raises(TernError, match="rotated already; drop --rotate"):
        convert(path, tmp_path / "out.gguf", TypeChoice(PTQ1_0), rotation=RotationChoice())
    first = gguf_bytes.split_in_two(path, tmp_path / "parts")
    with pytest.raises(TernError, match="join the 2 parts"):
        convert(first, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    model.keys[HADAMARD + "axis"] = rotated_files.text("output")
    with pytest.raises(TernError, match=r"prism\.hadamard\.axis"):
        convert(model.write(tmp_path / "broken.gguf"), tmp_path / "out.gguf", TypeChoice(PTQ1_0))


# ---- tern verify ----


@pytest.mark.parametrize("recipe", ["llama", "qwen3, tied", "qwen35", "qwen3moe"])
def test_verify_across_bases(recipe: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Rotated against plain, plain against rotated, and two rotations of one model against each other."""
    model, path = a_model(recipe, tmp_path / "in.gguf", rng)
    plain = tmp_path / "f16.gguf"
    unrotate(GGUFSource(path), plain, _core.TYPE_F16)

    def verdicts(one: Path, other: Path) -> set[Verdict]:
        return {finding.verdict for finding in verify(one, other) if finding.name in model.rotations}

    assert verdicts(path, path) == {Verdict.EXACT}
    assert verdicts(path, plain) == {Verdict.QUANTIZED}
    assert verdicts(plain, path) <= {Verdict.EXACT, Verdict.SCALES, Verdict.ROUNDED}
    f32 = tmp_path / "f32.gguf"
    unrotate(GGUFSource(path), f32, _core.TYPE_F32)
    assert verdicts(f32, path) <= {Verdict.EXACT, Verdict.SCALES}
    asked = RotationChoice(128, 99)
    other = convert(f32, tmp_path / "other.gguf", TypeChoice(PQ2_0, PQ2_0), rotation=asked)
    assert verdicts(path, other.output) == {Verdict.QUANTIZED} == verdicts(f32, other.output)

    name = "blk.1.ffn_gate_exps.weight" if "moe" in recipe else "blk.1.ffn_up.weight"
    for source, file in ((path, plain), (plain, path)):
        damaged = tmp_path / "damaged.gguf"
        data = bytearray(file.read_bytes())
        data[data_of(file, name) + 11] ^= 0x44
        damaged.write_bytes(data)
        different = [f.name for f in verify(source, damaged) if f.verdict is Verdict.DIFFERENT]
        assert different == [name]
