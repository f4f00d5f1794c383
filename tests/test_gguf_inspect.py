"""tern inspect and tern hash: what they say of good files, and one line for all others."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_tern.gguf.digest import hash_all, hash_tensors
from ggml_tern.gguf.inspection import describe
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import TARGETS, repack
from reference import formats as ref
from reference import gguf_files as files
from reference.random_inputs import random_ternary

TERN = str(Path(sys.executable).parent / "tern")
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(20)],
    "llama.rope.freq_base": 10000.0,
}


def tern(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TERN, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def ternary(rng: np.random.Generator, name: str, fmt: ref.Format, n_rows: int, n_in: int) -> files.Tensor:
    return files.ternary(name, fmt, *random_ternary(rng, fmt, n_rows, n_in // fmt.block))


def described(path: Path, *tensors: files.Tensor, **changes: Any) -> dict[str, Any]:
    return describe(GGUFSource(files.write(path, METADATA | changes, list(tensors))))


# ---- inspect ----


def test_inspect_json(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.PTQ1_0, 7, 5)
    tensors = [
        files.plain("norm", 0, np.ones(40, np.float32)),
        files.ternary("w", ref.PTQ1_0, trits, scales),
        ternary(rng, "v", ref.PTQ1_0, 1, 128),
    ]
    path = files.write(tmp_path / "m.gguf", METADATA, tensors)
    result = tern("inspect", path, "--json", "--stats")
    assert result.returncode == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    nbytes = 36 * 28 + 160
    assert found["file"] == str(path) and found["bytes"] == path.stat().st_size
    assert found["parts"] == [{"file": str(path), "bytes": path.stat().st_size, "tensors": 3}]
    assert (found["version"], found["alignment"]) == (3, 32)
    assert (found["architecture"], found["name"], found["parameters"]) == ("llama", "tiny", 36 * 128 + 40)
    assert found["bits_per_weight"] == round(8 * nbytes / (36 * 128 + 40), 4)
    packed, plain = found["types"]
    assert 0 <= packed.pop("zero_share") <= 1
    assert packed == {
        "type": "PTQ1_0",
        "id": 143,
        "tensors": 2,
        "weights": 36 * 128,
        "bits_per_weight": 1.75,
        "bytes": 36 * 28,
    }
    assert plain["type"] == "F32" and plain["zero_share"] is None
    assert found["legacy_q2_0"] is False and found["rotation"] is None
    assert found["runs"]["stock"] is False and found["runs"]["plugin"] is True
    assert found["metadata"]["llama.rope.freq_base"] == 10000
    assert found["metadata"]["tokenizer.ggml.tokens"] == {"length": 20, "first": [f"t{i}" for i in range(8)]}
    assert found["tensors"][1] == {"name": "w", "type": "PTQ1_0", "shape": [7, 640], "bytes": 35 * 28}


@pytest.mark.parametrize("fmt", [pytest.param(f, id=f.name) for f in ref.FORMATS.values()])
def test_zero_share(fmt: ref.Format, tmp_path: Path, rng: np.random.Generator) -> None:
    """Of zeros by code and of zeros by scale."""
    trits, scales = random_ternary(rng, fmt, 9, 4)
    scales[3:5] = 0
    path = files.write(tmp_path / "m.gguf", METADATA, [files.ternary("w", fmt, trits, scales)])
    (entry,) = describe(GGUFSource(path), stats=True)["types"]
    values = trits * np.repeat(scales, fmt.block, axis=1)
    assert entry["zero_share"] == round(float((values == 0).mean()), 4)


def test_zero_share_of_i2_s(tmp_path: Path, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (5, 384), np.int8)
    path = files.write(tmp_path / "m.gguf", METADATA, [files.i2_s("w", trits, 0.1)])
    (entry,) = describe(GGUFSource(path), stats=True)["types"]
    assert entry["zero_share"] == round(float((trits == 0).mean()), 4)


def test_what_runs_it(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    norm = files.plain("norm", 0, np.ones(4, np.float32))

    def runs(*tensors: files.Tensor, **changes: Any) -> tuple[bool, bool, str]:
        found = described(path, norm, *tensors, **changes)["runs"]
        return found["stock"], found["plugin"], "\n".join(found["notes"])

    stock, plugin, notes = runs(ternary(rng, "w", ref.TQ2_0, 3, 256))
    assert (stock, plugin) == (True, True) and f"`llama-server -m {path}`" in notes
    stock, plugin, notes = runs(ternary(rng, "w", ref.PQ2_0, 3, 256))
    assert (stock, plugin) == (False, True) and f"`tern run llama-server -m {path}`" in notes
    stock, plugin, notes = runs(ternary(rng, "w", ref.Q2_0, 33, 1024))
    assert (stock, plugin) == (True, True) and "Q2_0 needs ggml" in notes

    legacy = files.ternary("w", ref.PQ2_0, *random_ternary(rng, ref.PQ2_0, 33, 8), type_id=42)
    stock, plugin, notes = runs(legacy)
    assert (stock, plugin) == (False, True) and f"`tern repack {path} OUT.gguf --type pq2_0`" in notes
    stock, plugin, notes = runs(files.i2_s("w", np.ones((1, 128), np.int8), 1.0))
    assert (stock, plugin) == (False, False) and f"`tern repack {path} OUT.gguf --type pq2_0`" in notes

    stock, plugin, notes = runs(**{"general.architecture": "no-such"})
    assert (stock, plugin) == (False, False) and "does not know the architecture no-such" in notes
    stock, plugin, notes = runs(**{"general.architecture": 3})
    assert (stock, plugin) == (False, False) and "general.architecture" in notes


def rotation(**changes: Any) -> dict[str, Any]:
    keys = {
        "version": 1,
        "block_size": 128,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "identity",
        "weight_names": [
            "blk.0.attn_q.weight",
            "blk.1.attn_q.weight",
            "blk.0.ffn_up.weight",
            "output.weight",
        ],
        "inverse_weight_names": ["token_embd.weight"],
    }
    return {f"prism.hadamard.{key}": value for key, value in (keys | changes).items()}


def test_rotation(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    names = [*rotation()["prism.hadamard.weight_names"], "token_embd.weight"]
    tensors = [ternary(rng, name, ref.PQ2_0, 3, 256) for name in names]
    found = described(path, *tensors, **rotation())
    assert found["rotation"] == {
        "version": 1,
        "block_size": 128,
        "sign_mode": "identity",
        "tied_output": None,
        "gdn_v_grouped": None,
        "weights": names[:-1],
        "inverse_weights": ["token_embd.weight"],
        "error": None,
    }
    assert not found["runs"]["stock"] and found["runs"]["plugin"]
    assert any("rotated" in note for note in found["runs"]["notes"])
    assert (
        "Hadamard, blocks of 128, signs identity, 4 weights (2 attn_q, 1 ffn_up, 1 output), inverse "
        "token_embd.weight, version 1"
    ) in " ".join(tern("inspect", path).stdout.split())


def test_a_rotation_that_breaks_a_rule(tmp_path: Path, rng: np.random.Generator) -> None:
    """One line says so, and the rest is told as ever."""
    path = tmp_path / "m.gguf"
    names = [*rotation()["prism.hadamard.weight_names"], "token_embd.weight"]
    tensors = [ternary(rng, name, ref.PQ2_0, 3, 256) for name in names]
    for broken, key in (
        (rotation(block_size=512), "prism.hadamard.block_size"),
        (rotation(tied_output=True), "prism.hadamard.tied_output"),
        (rotation(sign_mode="none"), "prism.hadamard.sign_mode"),
    ):
        found = described(path, *tensors, **broken)
        assert key in found["rotation"]["error"] and not found["runs"]["plugin"]
        result = tern("inspect", path)
        (note,) = [note for note in result.stdout.split("note: ") if note.startswith("the plug-in refuses")]
        assert result.returncode == 0 and key in note and "broken: Hadamard" in result.stdout
    other = [ternary(rng, names[0], ref.TQ2_0, 3, 256), *tensors[1:]]
    found = described(path, *other, **rotation())
    assert "blk.0.attn_q.weight is rotated, and nothing undoes that in TQ2_0" in found["rotation"]["error"]


def test_rotation_keys_of_wrong_types(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    described(
        path,
        ternary(rng, "w", ref.TQ2_0, 3, 256),
        **rotation(version=[1, 2], block_size="x", weight_names=7, inverse_weight_names=[1.5]),
    )
    for arguments in ([], ["--json"]):
        result = tern("inspect", path, *arguments)
        assert result.returncode == 0 and "Traceback" not in result.stderr


def test_inspect_for_people(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    hostile = "\x1b[2J\nevil"
    files.write(path, METADATA | {"general.name": hostile}, [ternary(rng, hostile, ref.PQ2_0, 4, 512)])
    result = tern("inspect", path, "--stats")
    assert result.returncode == 0 and result.stderr == ""
    assert "\x1b" not in result.stdout and r"\x1b[2J\nevil" in result.stdout
    for part in ("PQ2_0 (142)", "2.125", "zeros", "20 in all]", "runs it", "does not run it", str(path)):
        assert part in result.stdout, part


@pytest.mark.parametrize("width", [80, 120])
def test_inspect_fits_the_terminal(
    width: int, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is longer, but for one with a path or a command that would be of no use in pieces."""
    monkeypatch.setenv("COLUMNS", str(width))
    path = tmp_path / "a model.gguf"
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [*(f"blk.{i}.{kind}.weight" for i in range(2) for kind in kinds), "output.weight"]
    tensors = [ternary(rng, name, ref.PQ2_0, 3, 256) for name in [*names, "token_embd.weight"]]
    keys = rotation(weight_names=names)
    files.write(path, METADATA | keys | {"general.description": "a word " * 40}, tensors)
    result = tern("inspect", path, "--stats")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"note: `tern run llama-server -m '{path}'`" in lines and f"file              {path}" in lines
    assert [line for line in lines if len(line) > width and str(path) not in line] == []
    text = " ".join(result.stdout.split())
    assert (
        f"signs identity, 15 weights ({', '.join(f'2 {kind}' for kind in kinds)}, 1 output), inverse" in text
    )
    assert "the plug-in rotates what they are multiplied with" in text


def test_inspect_of_files_without_tensors_or_numbers(tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.gguf", {"nan": float("nan"), "inf": [float("inf")]}, [])
    result = tern("inspect", path, "--json", "--stats")
    found = json.loads(result.stdout, parse_constant=pytest.fail)
    assert found["metadata"] == {"nan": "nan", "inf": {"length": 1, "first": ["inf"]}}
    assert (found["parameters"], found["bits_per_weight"], found["architecture"]) == (0, None, None)
    assert tern("inspect", path).returncode == 0


@pytest.mark.parametrize(("command", "code"), [(["inspect"], 1), (["inspect", "--json"], 1), (["hash"], 2)])
def test_broken_files_are_one_line(
    command: list[str], code: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = files.write(tmp_path / "m.gguf", METADATA, [ternary(rng, "w", ref.PQ2_0, 4, 512)])
    path.write_bytes(path.read_bytes()[:-100])
    result = tern(*command, path)
    assert result.returncode == code and result.stdout == ""
    assert result.stderr.startswith(f"tern: {path}: ") and result.stderr.count("\n") == 1
    assert "truncated" in result.stderr


# ---- hash ----


def hashes(path: Path) -> dict[str, str]:
    return hash_tensors(GGUFSource(path))


def test_the_same_values_have_the_same_hashes_in_every_type(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.TQ2_0, 37, 5)
    experts, expert_scales = random_ternary(rng, ref.TQ2_0, 6, 1)
    norm = files.plain("norm", 0, rng.standard_normal(5).astype(np.float32))
    tensors = [
        norm,
        files.ternary("w", ref.TQ2_0, trits, scales),
        files.ternary("experts", ref.TQ2_0, experts.reshape(2, 3, 256), expert_scales),
    ]
    original = files.write(tmp_path / "in.gguf", METADATA, tensors)
    want = hashes(original)
    assert len(set(want.values())) == 3
    for name, target in TARGETS.items():
        repack(GGUFSource(original), tmp_path / f"{name}.gguf", target)
        assert hashes(tmp_path / f"{name}.gguf") == want

    reordered = files.write(tmp_path / "reordered.gguf", {"general.architecture": "x"}, tensors[::-1])
    assert hashes(reordered) == want and list(hashes(reordered)) != list(want)
    assert hash_all(hashes(reordered)) == hash_all(want)


def test_the_same_values_in_i2_s(tmp_path: Path, rng: np.random.Generator) -> None:
    trits = rng.integers(-1, 2, (5, 384), np.int8)
    trits[2] = 0
    one = files.write(tmp_path / "one.gguf", METADATA, [files.i2_s("w", trits, 1.21875)])
    scales = np.full((5, 3), 1.21875, np.float32)
    two = files.write(tmp_path / "two.gguf", METADATA, [files.ternary("w", ref.PTQ1_0, trits, scales)])
    other = files.write(tmp_path / "other.gguf", METADATA, [files.i2_s("w", trits, 0.1)])
    again = files.write(tmp_path / "again.gguf", METADATA, [files.i2_s("w", trits, 0.2)])
    assert hashes(one) == hashes(two)
    assert len({hashes(path)["w"] for path in (one, other, again)}) == 3


def test_one_spelling_for_each_group(tmp_path: Path, rng: np.random.Generator) -> None:
    """Zero groups with scales, groups with scale zero, and signs in the scale instead of the codes."""
    trits, scales = random_ternary(rng, ref.PQ2_0, 6, 4)
    trits[0] = 0
    scales[1] = 0
    trits[2, 3] = 1
    plain = files.write(tmp_path / "plain.gguf", METADATA, [files.ternary("w", ref.PQ2_0, trits, scales)])
    trits, scales = trits.copy(), scales.copy()
    scales[0] = [1, -2, 0, 3]
    trits[1] = 0
    trits[2:4] *= -1
    scales[2:4] *= -1
    odd = files.write(tmp_path / "odd.gguf", METADATA, [files.ternary("w", ref.PQ2_0, trits, scales)])
    assert hashes(odd) == hashes(plain)
    trits[2, 3] = 0
    other = files.write(tmp_path / "other.gguf", METADATA, [files.ternary("w", ref.PQ2_0, trits, scales)])
    assert hashes(other) != hashes(plain)


def test_hashes_tell_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.PQ2_0, 6, 4)
    trits[3, 300] = 1
    flipped, scaled = trits.copy(), scales.copy()
    flipped[3, 300] = -1
    scaled[3, 2] *= 2
    reserved = trits.copy()
    reserved[3, 300] = 2
    variants = [
        files.ternary("w", ref.PQ2_0, trits, scales),
        files.ternary("v", ref.PQ2_0, trits, scales),
        files.ternary("w", ref.PQ2_0, trits.reshape(2, 3, 512), scales),
        files.ternary("w", ref.PQ2_0, flipped, scales),
        files.ternary("w", ref.PQ2_0, trits, scaled),
        files.ternary("w", ref.PQ2_0, reserved, scales),
        files.plain("w", 0, np.zeros((6, 512), np.float32)),
        files.plain("w", 1, np.zeros((6, 512), np.float16)),
    ]
    found = {hash_all(hashes(files.write(tmp_path / "m.gguf", METADATA, [t]))) for t in variants}
    assert len(found) == len(variants)


def test_large_tensors_are_hashed_in_pieces(tmp_path: Path, rng: np.random.Generator) -> None:
    """As the documentation of the format says, from the reference's Q2_0 blocks."""
    trits, scales = random_ternary(rng, ref.PQ2_0, 1501, 27)
    trits[:, ::64] = 1  # no group all zero, so that Q2_0 has no spelling to choose
    path = files.write(tmp_path / "m.gguf", METADATA, [files.ternary("w", ref.PQ2_0, trits, scales)])
    blocks = ref.pack(ref.Q2_0, trits, np.repeat(scales, 2, axis=1))
    text = json.dumps(["w", [1501, 27 * 128], "ternary"]) + "\n"
    assert hashes(path) == {"w": hashlib.sha256(text.encode() + blocks.tobytes()).hexdigest()}


def test_hash_command(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = [ternary(rng, name, ref.PTQ1_0, 3, 256) for name in ("a", "b")]
    path = files.write(tmp_path / "m.gguf", METADATA, tensors)
    listed = tern("hash", path)
    assert listed.returncode == 0
    want = hashes(path)
    assert listed.stdout == f"{want['a']}  a\n{want['b']}  b\n{hash_all(want)}  (all tensors)\n"
    found = json.loads(tern("hash", path, "--json").stdout)
    assert found == {"file": str(path), "all": hash_all(want), "tensors": want}
    # Anyone can make the last line from the others.
    lines = sorted(listed.stdout.splitlines(keepends=True)[:-1])
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == hash_all(want)

    saved = tmp_path / "saved.txt"
    saved.write_text(listed.stdout)
    assert tern("hash", path, "--check", saved).returncode == 0
    files.write(path, METADATA, [tensors[0], ternary(rng, "c", ref.PQ2_0, 3, 256)])
    checked = tern("hash", path, "--check", saved)
    assert checked.returncode == 1
    assert checked.stdout.splitlines() == ["b: is missing", f"c: is not in {saved}"]
    files.write(path, METADATA, [ternary(rng, "a", ref.PTQ1_0, 3, 256), tensors[1]])
    assert tern("hash", path, "--check", saved).stdout == "a: differs\n"
    saved.write_text("no list\n")
    broken = tern("hash", path, "--check", saved)
    assert broken.returncode == 2 and broken.stderr.startswith(f"tern: {saved}: is not a list of hashes")
