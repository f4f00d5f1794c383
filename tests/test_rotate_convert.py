"""ternconv --rotate, against a rotation and a ternarization in plain numpy; and models that are ternary in a
rotated basis only, with a manifest and without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner

import rotated_files
from convert_models import gemma3_dir, llama_dir, write_json
from ggml_tern import _core
from ggml_tern.cli.ternconv import main
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.pipeline import Report, convert
from ggml_tern.convert.read.lora import Adapter
from ggml_tern.convert.rotate.rotation import RotationChoice, random_signs
from ggml_tern.convert.verify import Verdict, verify
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import unrotate
from ggml_tern.tensors.types import F16, F32, PQ2_0, PTQ1_0, TQ2_0
from reference import formats as ref
from rotated_checkpoints import (
    CONFIGS,
    Signs,
    Tensors,
    checkpoint,
    decoded,
    draw_signs,
    make_ternary,
    manifest,
    write_model,
)

PREFIX = "prism.hadamard."
FAMILIES = list(CONFIGS)
#: Everything ternary.
ALL = TypeChoice(PTQ1_0, PTQ1_0)


def plain_choice(config: dict[str, Any]) -> TypeChoice:
    """Everything in float32."""
    return TypeChoice(F32, F32, None if config["tie_word_embeddings"] else F32)


def all_ternary(config: dict[str, Any], **more: Any) -> TypeChoice:
    return TypeChoice(PTQ1_0, PTQ1_0, None if config["tie_word_embeddings"] else PQ2_0, **more)


def reference(rotation: _core.Rotation) -> rotated_files.Rotation:
    """The same rotation in plain numpy."""
    return rotated_files.Rotation(rotation.n_in, rotation.block, rotation.signs, rotation.v_heads)


def rows(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.reshape(-1, values.shape[-1])


# ---- the rotation itself ----


@pytest.mark.parametrize("block", [128, 256, 512, 1024, 2048])
def test_fold_and_unfold(block: int, rng: np.random.Generator) -> None:
    """To the formula, and back to what it was."""
    heads = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    n_in = block * heads[0] * heads[1] * int(rng.integers(1, 3))
    signs = rotated_files.random_signs(rng, n_in) if rng.random() < 0.7 else None
    v_heads = (heads[0], heads[0] * heads[1]) if rng.random() < 0.7 else None
    rotation = _core.Rotation(n_in, block, signs, v_heads)
    plain = rng.standard_normal((int(rng.integers(1, 9)), n_in)).astype(np.float32)
    stored = rotation.rotate(plain)
    scale = float(np.abs(plain).max())
    np.testing.assert_allclose(stored, reference(rotation).rotate(plain), rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(rotation.unrotate(stored), plain, rtol=0, atol=1e-6 * scale)
    relative = np.linalg.norm(rotation.unrotate(stored) - plain) / np.linalg.norm(plain)
    assert relative < 1e-6


def test_random_signs_are_the_same_everywhere() -> None:
    """As documented: bits of SHAKE-256, the lowest first; pinned, as files are made with them."""
    stream = hashlib.shake_256(b"ggml-tern signs 42 200").digest(25)
    expected = [-1 if stream[i // 8] >> (i % 8) & 1 else 1 for i in range(200)]
    assert random_signs(42, 200).tolist() == expected and random_signs(42, 200).dtype == np.int8
    assert random_signs(7, 16).tolist() == [-1, -1, -1, -1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, 1, -1]
    assert random_signs(7, 256).tolist() != random_signs(8, 256).tolist()


# ---- --rotate ----


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotate(family: str, seed: int | None, tmp_path: Path, rng: np.random.Generator) -> None:
    """What is stored decodes to the best three values for the folded weights, and stands for the plain ones
    with the same error."""
    config = CONFIGS[family]
    directory = write_model(tmp_path / "hf", config, checkpoint(config, rng))
    convert(directory, tmp_path / "plain.gguf", plain_choice(config))
    report = convert(
        directory, tmp_path / "out.gguf", all_ternary(config), rotation=RotationChoice(128, seed)
    )
    found = _core.read_hadamard(tmp_path / "out.gguf")
    assert found is not None
    rotations, plain, stored = found["rotations"], decoded(tmp_path / "plain.gguf"), decoded(report.output)
    types = {name: tensor.type for name, tensor in GGUFSource(report.output).tensors.items()}
    matrices = {t.spec.name for t in report.targets if t.type.is_ternary}
    assert set(rotations) == matrices == set(found["weight_names"] + found["inverse_weight_names"])
    for name, values in plain.items():
        if name not in rotations:
            kind = name.split(".")[-2]
            assert types[name] == (_core.TYPE_BF16 if kind in ("ssm_alpha", "ssm_beta") else _core.TYPE_F32)
            atol = 2.0**-8 * float(np.abs(values).max()) if kind.startswith("ssm") else 0
            np.testing.assert_allclose(stored[name], values, rtol=0, atol=atol)
            continue
        assert rotations[name].block == 128 and (rotations[name].signs is None) == (seed is None)
        if seed is not None:
            assert rotations[name].signs.tolist() == random_signs(seed, values.shape[-1]).tolist()
        assert (rotations[name].v_heads is not None) == ("ssm_out" in name)
        rotation = reference(rotations[name])
        folded, packed = rows(rotation.rotate(values)), rows(stored[name])
        trits, scales = ref.ternarize(ref.PQ2_0, folded[:64])
        best = trits * np.repeat(scales, 128, axis=1)
        lost = np.square(packed - folded).sum()
        assert np.square(packed[:64] - folded[:64]).sum() <= np.square(best - folded[:64]).sum() * (1 + 1e-5)
        lost_plain = np.square(rotation.unrotate(stored[name]) - values).sum()
        np.testing.assert_allclose(lost_plain, lost, rtol=1e-4)
    assert {f.verdict for f in verify(directory, report.output)} == {Verdict.EXACT, Verdict.QUANTIZED}


def test_the_keys_that_are_written(tmp_path: Path, rng: np.random.Generator) -> None:
    def run(family: str, **options: Any) -> dict[str, Any]:
        config = CONFIGS[family]
        directory = tmp_path / family
        if not directory.exists():
            write_model(directory, config, checkpoint(config, rng))
        choice = options.pop("choice", all_ternary(config))
        report = convert(
            directory, tmp_path / "out.gguf", choice, rotation=RotationChoice(**options), force=True
        )
        keys = GGUFSource(report.output).metadata
        return {k.removeprefix(PREFIX): v for k, v in keys.items() if k.startswith(PREFIX)}

    keys = run("qwen3", seed=3)
    assert keys.pop("sign_values").dtype == np.int8
    assert keys.pop("sign_widths").tolist() == [256, 512]
    kinds = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    assert keys == {
        "version": 1,
        # The largest power of two that divides both widths.
        "block_size": 256,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "weight_names": ["output.weight", *(f"blk.0.{kind}.weight" for kind in kinds)],
        "inverse_weight_names": ["token_embd.weight"],
    }
    tied = run("qwen35, tied")
    assert (tied["version"], tied["tied_output"], tied["gdn_v_grouped"]) == (2, True, True)
    assert (tied["sign_mode"], "sign_values" in tied) == ("identity", False)
    # An embedding that is not ternary is not rotated; with it goes the second version.
    floats = run("llama, tied", choice=TypeChoice(PTQ1_0))
    assert floats["version"] == 1 and not {"tied_output", "inverse_weight_names"} & floats.keys()
    # What gets another type is not rotated.
    kept = run(
        "qwen3", choice=TypeChoice(PQ2_0, F16, F16, keep=(Keep("ffn_down", TQ2_0), Keep("attn_k", F16)))
    )
    assert kept["weight_names"] == [
        f"blk.0.{kind}.weight" for kind in ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up")
    ]
    # Only ffn_down is 512 wide, and the block is that of what is left.
    assert kept["block_size"] == 256


def test_default_block(tmp_path: Path, rng: np.random.Generator) -> None:
    """1024 at most, whatever the widths allow."""
    for width, n_ff, block in ((2048, 4096, 1024), (256, 384, 128)):
        config = CONFIGS["llama, tied"] | {"hidden_size": width, "intermediate_size": n_ff}
        directory = llama_dir(tmp_path / str(width), **config | {"vocab_size": 512})
        convert(directory, tmp_path / f"{width}.gguf", TypeChoice(PTQ1_0), rotation=RotationChoice())
        found = _core.read_hadamard(tmp_path / f"{width}.gguf")
        assert found is not None and found["block_size"] == block


def test_the_command(tmp_path: Path) -> None:
    directory = llama_dir(tmp_path / "hf", hidden_size=256)
    arguments = ["--rotate", "--rotation-block", "128", "--signs", "random:18446744073709551616"]
    outputs = [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    for output, threads in zip(outputs, ("1", "3"), strict=True):
        result = CliRunner().invoke(
            main, [*arguments, "--threads", threads, str(directory), str(output)], catch_exceptions=False
        )
        assert result.exit_code == 0 and "note: rotated: 14 tensors, Hadamard blocks of 128" in result.output
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    found = _core.read_hadamard(outputs[0])
    assert found is not None
    assert found["signs"][256].tolist() == random_signs(2**64, 256).tolist()


# ---- refusals ----


def refused(directory: Path, output: Path, *arguments: str, code: int = 1) -> str:
    result = CliRunner().invoke(main, [*arguments, str(directory), str(output)])
    assert result.exit_code == code and not output.exists(), result.output
    assert code == 2 or result.stderr.count("\n") == 1
    return result.stderr


def test_what_cannot_be_rotated(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    # ffn_down is 384 wide.
    llama = llama_dir(tmp_path / "llama", hidden_size=256, intermediate_size=384)
    for name in ("tq2_0", "tq1_0", "q2_0", "q8_0"):
        message = refused(llama, out, "--rotate", "--type", name)
        assert f"rotation of a {name.upper()} weight" in message and "--type pq2_0" in message
    message = refused(llama, out, "--rotate", "--rotation-block", "256")
    assert "--rotation-block 256" in message and "blk.0.ffn_down.weight" in message
    assert "384" in message and "128 is the largest" in message
    for number in ("64", "100", "4096"):
        assert "--rotation-block" in refused(llama, out, "--rotate", "--rotation-block", number, code=2)
    for signs in ("random", "random:", "random:x", "random:-1", "hadamard"):
        assert "random:SEED" in refused(llama, out, "--rotate", "--signs", signs, code=2)
    for option in (["--signs", "identity"], ["--rotation-block", "128"]):
        assert "goes with --rotate" in refused(llama, out, *option, code=2)
    message = refused(llama, out, "--rotate", "--type", "auto")
    assert "no matrix gets PQ2_0 or PTQ1_0" in message
    message = refused(llama, out, "--rotate", "--type", "auto", "--embed", "pq2_0")
    assert "no matrix gets PQ2_0 or PTQ1_0" in message
    message = refused(llama, out, "--rotate", "--keep", "*=q8_0")
    assert "no tensor can be rotated" in message
    gemma = gemma3_dir(tmp_path / "gemma")
    message = refused(gemma, out, "--rotate")
    assert str(gemma) in message and "not defined for gemma3" in message and "llama, qwen3" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_values_that_are_no_weights(value: float, tmp_path: Path, rng: np.random.Generator) -> None:
    """Named by where they stand, although the rotation spreads them over a block."""
    config = CONFIGS["llama, tied"]
    tensors = checkpoint(config, rng)
    tensors["model.layers.0.mlp.up_proj.weight"][17, 5] = value
    directory = write_model(tmp_path / "hf", config, tensors)
    message = refused(directory, tmp_path / "out.gguf", "--rotate")
    assert "model.layers.0.mlp.up_proj.weight" in message
    assert ("row 17, column 5" in message) == (value != 3e38)


def test_a_model_that_is_ternary_as_it_is(tmp_path: Path, rng: np.random.Generator) -> None:
    """--rotate would undo what training made; and without it nothing is rotated."""
    config = CONFIGS["llama, tied"]
    tensors = checkpoint(config, rng)
    ternary = make_ternary(tensors, 128, None, rng)
    directory = write_model(tmp_path / "hf", config, ternary)
    report = convert(directory, tmp_path / "out.gguf", ALL, rotation=RotationChoice())
    assert any("ternary as they are stored" in note and "drop --rotate" in note for note in report.notes)
    report = convert(directory, tmp_path / "plain.gguf", ALL)
    assert not GGUFSource(report.output).is_rotated and all(stats.is_exact for stats in report.stats)


# ---- ternary in a rotated basis only ----


def ternary_model(
    tmp_path: Path, family: str, block: int, signs: Signs | None, rng: np.random.Generator
) -> tuple[Path, Tensors, Tensors]:
    """A directory with a manifest, its tensors, and the plain ones that they stand for."""
    config = CONFIGS[family]
    plain = checkpoint(config, rng)
    rotated = make_ternary(plain, block, signs, rng)
    directory = write_model(tmp_path / "rotated", config, rotated, torch.float16)
    write_json(directory / "hadamard_packing.json", manifest(rotated, block, signs))
    return directory, rotated, plain


#: For each stored type, by how much scales may be off, and the share of weights that may have such a scale.
ROUNDING_OF_SCALES = {
    torch.float32: (0.0, 0.0),
    torch.float16: (2.0**-10, 0.02),
    torch.bfloat16: (2.0**-7, 0.3),
}


def blocks(path: Path) -> dict[str, tuple[int, bytes]]:
    return {name: (t.type, t.data.tobytes()) for name, t in GGUFSource(path).tensors.items()}


def assert_packed_exactly(report: Report) -> None:
    packed = [stats for stats in report.stats if stats.groups]
    assert packed and all(stats.exact_groups == stats.groups for stats in packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_manifest(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Packed as it is, and unrotated it is what the plain checkpoint gives."""
    config = CONFIGS[family]
    signs = draw_signs(config, rng)
    directory, _, plain = ternary_model(tmp_path, family, 256, signs, rng)
    report = convert(directory, tmp_path / "out.gguf", TypeChoice())
    assert_packed_exactly(report)
    assert any("hadamard_packing.json" in note for note in report.notes)
    found = _core.read_hadamard(report.output)
    assert found is not None
    assert found["block_size"] == 256 and found["sign_mode"] == "explicit"
    assert {n: v.tolist() for n, v in found["signs"].items()} == {n: v.tolist() for n, v in signs.items()}
    assert found["tied_output"] == config["tie_word_embeddings"]
    assert found["version"] == 1 + config["tie_word_embeddings"]
    assert found["gdn_v_grouped"] == family.startswith("qwen35")

    unrotate(GGUFSource(report.output), tmp_path / "unrotated.gguf", _core.TYPE_F32)
    convert(write_model(tmp_path / "plain", config, plain), tmp_path / "plain.gguf", plain_choice(config))
    ours, truth = decoded(tmp_path / "unrotated.gguf"), decoded(tmp_path / "plain.gguf")
    assert ours.keys() == truth.keys()
    for name, values in truth.items():
        if "ssm_alpha" in name or "ssm_beta" in name:
            np.testing.assert_allclose(ours[name], values, rtol=2.0**-8)
            continue
        assert np.linalg.norm(ours[name] - values) <= 1e-6 * np.linalg.norm(values), name
    assert {f.verdict for f in verify(directory, report.output)} <= {Verdict.EXACT, Verdict.QUANTIZED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ternary_in_a_rotated_basis(
    family: str, dtype: torch.dtype, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Saved plain, in any type: folded with the right signs it is what its manifest would have made it, and
    without --rotate the basis is found if it has no signs."""
    config = CONFIGS[family]
    width_signs = {n: random_signs(11, n) for n in draw_signs(config, rng)}
    for number, (signs, asked) in enumerate([(width_signs, RotationChoice(256, 11)), (None, None)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        directory, _, plain = ternary_model(folder, family, 256, signs, rng)
        convert(directory, folder / "true.gguf", TypeChoice())
        saved = write_model(folder / "plain", config, plain, dtype)
        report = convert(saved, folder / "out.gguf", TypeChoice(PTQ1_0), rotation=asked)
        matrices = [stats for stats in report.stats if stats.groups]
        assert all(stats.ternary_groups == stats.groups for stats in matrices)
        assert any("but for the rounding of what is stored" in note for note in report.notes)
        found_basis = any("ternary in a rotated basis (Hadamard blocks of 256" in n for n in report.notes)
        assert found_basis == (asked is None)
        ours, truth = decoded(folder / "out.gguf"), decoded(folder / "true.gguf")
        rotations = (_core.read_hadamard(folder / "true.gguf") or {})["rotations"]
        assert rotations == (_core.read_hadamard(folder / "out.gguf") or {})["rotations"]
        for name in rotations:
            assert np.array_equal(np.sign(ours[name]), np.sign(truth[name])), name
            # Rounding hides which of a few neighbours a scale in fp16 was: seldom in float16.
            rtol, share = ROUNDING_OF_SCALES[dtype]
            np.testing.assert_allclose(ours[name], truth[name], rtol=rtol)
            assert (ours[name] != truth[name]).mean() <= share
        assert Verdict.DIFFERENT not in {f.verdict for f in verify(saved, report.output)}
        # From a GGUF file, where the value heads stand in another order.
        convert(saved, folder / "plain.gguf", plain_choice(config))
        again = convert(folder / "plain.gguf", folder / "again.gguf", TypeChoice(PTQ1_0), rotation=asked)
        expected = blocks(report.output)
        assert {n: expected[n] for n in rotations} == {n: blocks(again.output)[n] for n in rotations}
        # In types that no rotation is undone in, nothing is looked for.
        if asked is None:
            report = convert(saved, folder / "stock.gguf", TypeChoice(TQ2_0))
            assert not GGUFSource(report.output).is_rotated


def test_an_ordinary_model_is_not_rotated(tmp_path: Path) -> None:
    report = convert(llama_dir(tmp_path / "hf", hidden_size=256), tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    assert not GGUFSource(report.output).is_rotated
    assert not any("rotated" in note for note in report.notes)


# ---- the manifest's fields ----


@pytest.fixture(scope="module")
def with_manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    signs = draw_signs(CONFIGS["qwen3moe"], rng)
    return ternary_model(tmp_path_factory.mktemp("manifest"), "qwen3moe", 128, signs, rng)[0]


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a field, found by its keys; None removes it."""

    def apply(found: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        inner: Any = found
        for key in parents:
            inner = inner[int(key) if isinstance(inner, list) else key]
        at: Any = int(last) if isinstance(inner, list) else last
        if value is None:
            del inner[at]
        else:
            inner[at] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 4, "schema_version is 4; expected 1 or 2 or 3"),
        ("schema_version", True, "schema_version is True"),
        ("kind", "other", "kind is 'other'; expected 'hadamard-weight-fold'"),
        ("status", None, "has no status; expected 'requires-matching-runtime'"),
        ("transform", None, "has no transform"),
        ("transform/name", "dct", "transform.name is 'dct'"),
        ("transform/block_size", 100, "transform.block_size is 100; expected a power of two"),
        ("transform/block_size", "128", "transform.block_size is '128'"),
        ("transform/block_size", 512, "transform.block_size is 512, which does not divide the 256 inputs of"),
        ("transform/sign_mode", "random", "transform.sign_mode is 'random'"),
        ("transform/sign_mode", "identity", "signs is there although transform.sign_mode is 'identity'"),
        ("signs", None, "has no signs"),
        ("signs", {}, "signs is {}"),
        ("signs", {"1": [1]}, "signs has no list for the 256 inputs of"),
        ("signs/256/3", 0, "signs.256[3] is 0; expected -1 or +1"),
        ("signs/256/255", None, "signs.256: expected 256 values of -1 and +1, found 255"),
        ("signs/x", [1], "signs.x: expected a width"),
        ("tensors", [], "tensors is []"),
        ("tensors/1", "name", "tensors[1] is 'name'"),
        ("tensors/1/name", None, "has no tensors[1].name"),
        ("tensors/1/name", "model.embed_tokens.weight", "which is there twice"),
        ("tensors/1/name", "model.layers.9.mlp.up_proj.weight", "which is none of the model's tensors"),
        ("tensors/1/name", "model.layers.0.mlp.gate.weight", "cannot be rotated"),
        ("tensors/1/axis", 0, "tensors[1].axis is 0; expected -1"),
        ("tensors/1/axis", None, "has no tensors[1].axis"),
        ("tensors/1/role", "other", "tensors[1].role is 'other'"),
        ("tensors/1/role", "inverse-after-lookup", "expected 'fold-before-matmul'"),
        ("tensors/0/role", "fold-before-matmul", "expected 'inverse-after-lookup'"),
    ],
)  # fmt: skip
def test_a_broken_manifest(path: str, value: Any, message: str, with_manifest: Path, tmp_path: Path) -> None:
    file = with_manifest / "hadamard_packing.json"
    saved = file.read_text()
    found = json.loads(saved)
    assert found["tensors"][0]["name"] == "model.embed_tokens.weight"
    change(path, value)(found)
    try:
        write_json(file, found)
        line = refused(with_manifest, tmp_path / "out.gguf")
    finally:
        file.write_text(saved)
    assert line.startswith(f"ternconv: {file}: ") and message in line


def test_an_expert_that_a_manifest_leaves_out(with_manifest: Path, tmp_path: Path) -> None:
    file = with_manifest / "hadamard_packing.json"
    saved = file.read_text()
    found = json.loads(saved)
    found["tensors"] = [e for e in found["tensors"] if "experts.1.up_proj" not in e["name"]]
    try:
        write_json(file, found)
        line = refused(with_manifest, tmp_path / "out.gguf")
    finally:
        file.write_text(saved)
    assert "2 of the 3 tensors that make blk.0.ffn_up_exps.weight" in line


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    """A link to nothing, as a download leaves it that did not end."""
    directory = llama_dir(tmp_path / "hf")
    (directory / "hadamard_packing.json").symlink_to(tmp_path / "blobs" / "1234")
    message = refused(directory, tmp_path / "out.gguf")
    assert "hadamard_packing.json: no such file" in message


def test_a_lora_for_rotated_weights(with_manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(TernError, match=r"hadamard_packing\.json: the weights are rotated, and a LoRA"):
        open_model(with_manifest, [Adapter(tmp_path)])


def test_what_does_not_go_with_a_manifest(with_manifest: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert "rotated already" in refused(with_manifest, out, "--rotate")
    message = refused(with_manifest, out, "--type", "q8_0")
    assert "is stored rotated" in message and "--type pq2_0" in message
    message = refused(with_manifest, out, "--keep", "attn_q=f16")
    assert "blk.0.attn_q.weight is stored rotated" in message


@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model.", ""])
def test_names_in_a_manifest(wrapper: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """With the prefix of a wrapper that the checkpoint does not have, or without its own. Roles may be left
    out but for the embedding's; a head that is the embedding may be named."""
    directory, _, _ = ternary_model(tmp_path, "llama, tied", 128, None, rng)
    convert(directory, tmp_path / "as-it-is.gguf", TypeChoice())
    file = directory / "hadamard_packing.json"
    found = json.loads(file.read_text())
    for entry in found["tensors"]:
        entry["name"] = entry["name"].replace("model.", wrapper, 1)
        if entry["role"] == "fold-before-matmul":
            del entry["role"]
    found["tensors"].append({"name": "lm_head.weight", "axis": -1})
    write_json(file, found)
    convert(directory, tmp_path / "out.gguf", TypeChoice())
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "as-it-is.gguf").read_bytes()


def test_a_matrix_that_a_manifest_does_not_name(tmp_path: Path, rng: np.random.Generator) -> None:
    """Stays plain, and may have any type."""
    directory, _, _ = ternary_model(tmp_path, "qwen3", 128, None, rng)
    file = directory / "hadamard_packing.json"
    found = json.loads(file.read_text())
    found["tensors"] = [e for e in found["tensors"] if "up_proj" not in e["name"]]
    write_json(file, found)
    report = convert(directory, tmp_path / "out.gguf", TypeChoice(PTQ1_0, keep=(Keep("ffn_up", F16),)))
    names = (_core.read_hadamard(report.output) or {})["weight_names"]
    assert "blk.0.ffn_up.weight" not in names and "blk.0.ffn_gate.weight" in names
    assert GGUFSource(report.output).tensors["blk.0.ffn_up.weight"].type == _core.TYPE_F16
