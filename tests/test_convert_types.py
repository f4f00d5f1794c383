"""Which type each tensor gets, what counts as ternary already, and what --lossless refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from convert_models import (
    llama_config,
    llama_dir,
    per_group,
    per_tensor,
    random_tensors,
    ternary_dir,
    write_json,
    write_weights,
)
from ggml_tern import _core
from ggml_tern.cli.ternconv import main as ternconv
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import Report, convert
from ggml_tern.convert.summary import smells, ternary_notes
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.types import (
    BF16,
    F32,
    PQ2_0,
    PTQ1_0,
    Q2_0,
    Q4_0,
    Q8_0,
    TENSOR_TYPES,
    TERNARY,
    TQ2_0,
    TensorType,
)

F32Array = npt.NDArray[np.float32]


def types_of(path: Path) -> dict[str, int]:
    return {tensor["name"]: tensor["type"] for tensor in _core.read_gguf_header(path)["tensors"]}


def assert_same_values(path: Path, model: Path, tmp_path: Path) -> None:
    """Every tensor decodes to what it does in a file of float32."""
    convert(model, tmp_path / "f32.gguf", TypeChoice(Q8_0, keep=(Keep("*", F32),)), force=True)
    one, other = GGUFSource(path), GGUFSource(tmp_path / "f32.gguf")
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(
            as_float32(tensor.rows[:]), as_float32(other.tensors[name].rows[:]), err_msg=name
        )


def as_float32(rows: npt.NDArray[Any]) -> F32Array:
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


def verdicts(report: Report) -> dict[str, str]:
    return {
        target.spec.name: "exact" if stats.is_exact else "scales" if stats.is_lossless else "lossy"
        for target, stats in zip(report.targets, report.stats, strict=True)
    }


# ---- ternary already ----


@pytest.mark.parametrize("kind", TERNARY.values(), ids=lambda kind: kind.name)
def test_ternary_checkpoints_are_packed_without_loss(tmp_path: Path, kind: TensorType) -> None:
    """Scales for groups of 256 fit every type; the rest of the file is as --lossless keeps it."""
    model = ternary_dir(tmp_path / "model", per_group(256), embedding=True, hidden_size=256)
    report = convert(model, tmp_path / "out.gguf", TypeChoice(kind, lossless=True))
    assert set(verdicts(report).values()) == {"exact"}
    assert types_of(tmp_path / "out.gguf")["token_embd.weight"] == kind.id
    assert_same_values(tmp_path / "out.gguf", model, tmp_path)


@pytest.mark.parametrize("kind", [PTQ1_0, PQ2_0, Q2_0], ids=lambda kind: kind.name)
def test_groups_of_128_are_exact_where_the_type_holds_them(tmp_path: Path, kind: TensorType) -> None:
    model = ternary_dir(tmp_path / "model", per_group(128))
    report = convert(model, tmp_path / "out.gguf", TypeChoice(kind))
    found = verdicts(report)
    assert found.pop("token_embd.weight") == "lossy"
    assert set(found.values()) == {"exact"}


def test_groups_of_128_do_not_fit_blocks_of_256(tmp_path: Path) -> None:
    model = ternary_dir(tmp_path / "model", per_group(128), hidden_size=256)
    with pytest.raises(TernError, match=r"blk\.0\.|layers\.0\.") as error:
        convert(model, tmp_path / "out.gguf", TypeChoice(TQ2_0, lossless=True))
    assert "TQ2_0" in str(error.value) and "--lossless" in str(error.value)
    assert not (tmp_path / "out.gguf").exists()


def test_scales_beyond_fp16_precision_are_told(tmp_path: Path) -> None:
    model = ternary_dir(tmp_path / "model", per_tensor(0.0123456789))
    report = convert(model, tmp_path / "out.gguf", TypeChoice(PQ2_0, lossless=True))
    found = verdicts(report)
    assert {found[name] for name in found if "attn_q.weight" in name} == {"scales"}
    (line,) = ternary_notes(report)
    exact = np.float32(0.0123456789)
    error = abs(float(np.float16(exact)) - float(exact)) / float(exact)
    assert "14 of 14 ternary tensors" in line and f"{error:.1e}" in line


def test_scales_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    """2e-8 is below what fp16 rounds with its usual precision."""
    model = ternary_dir(tmp_path / "model", per_tensor(2e-8))
    with pytest.raises(TernError, match="without loss"):
        convert(model, tmp_path / "out.gguf", TypeChoice(PQ2_0, lossless=True))


def test_what_is_not_ternary_is_told(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    report = convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    (line,) = ternary_notes(report)
    assert line.startswith("made ternary, which they were not: 14 of 14 ternary tensors, blk.0.attn_q.weight")
    with pytest.raises(TernError, match="without loss"):
        convert(model, tmp_path / "again.gguf", TypeChoice(PTQ1_0, lossless=True))


def test_one_odd_group_among_ternary_ones_is_found(tmp_path: Path) -> None:
    model = ternary_dir(tmp_path / "model", per_group(128))
    tensors = random_tensors(llama_config(), 1)
    stored = convert_source(model)
    stored["model.layers.1.mlp.up_proj.weight"][255, 127] *= 1.001
    write_weights(model, tensors | stored)
    report = convert(model, tmp_path / "out.gguf", TypeChoice())
    odd = {t.spec.name: t.type for t in report.targets if t.type == Q8_0}
    assert odd.keys() == {"token_embd.weight", "blk.1.ffn_up.weight"}


def convert_source(model: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors.numpy import load_file

    return {name: tensor.copy() for name, tensor in load_file(model / "model.safetensors").items()}


def test_auto_is_ternary_where_the_checkpoint_is(tmp_path: Path) -> None:
    ternary = ternary_dir(tmp_path / "ternary", per_group(128), embedding=True)
    plain = llama_dir(tmp_path / "plain")
    convert(ternary, tmp_path / "ternary.gguf", TypeChoice())
    convert(plain, tmp_path / "plain.gguf", TypeChoice())
    assert set(types_of(tmp_path / "ternary.gguf").values()) == {PTQ1_0.id, F32.id}
    assert set(types_of(tmp_path / "plain.gguf").values()) == {Q8_0.id, F32.id}


def test_lossless_keeps_the_embedding_as_it_is_stored(tmp_path: Path) -> None:
    model = ternary_dir(tmp_path / "model", per_group(128))
    convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, lossless=True))
    assert types_of(tmp_path / "out.gguf")["token_embd.weight"] == F32.id
    assert_same_values(tmp_path / "out.gguf", model, tmp_path)


# ---- what was asked for ----


def test_keep_goes_by_any_name_and_the_last_counts(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    keep = (
        Keep("attn_*", Q8_0),
        Keep("q_proj", Q4_0),
        Keep("blk.1.ffn_down.weight", F32),
        Keep("model.layers.0.mlp.up_proj", BF16),
    )
    convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, keep=keep))
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.0.attn_k.weight"] == types["blk.1.attn_output.weight"] == Q8_0.id
    assert types["blk.0.attn_q.weight"] == types["blk.1.attn_q.weight"] == Q4_0.id
    assert types["blk.1.ffn_down.weight"] == F32.id and types["blk.0.ffn_down.weight"] == PTQ1_0.id
    assert types["blk.0.ffn_up.weight"] == BF16.id and types["blk.1.ffn_up.weight"] == PTQ1_0.id
    assert types["blk.0.attn_norm.weight"] == F32.id


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_every_type_decodes_to_about_the_weights(tmp_path: Path, kind: TensorType) -> None:
    model = llama_dir(tmp_path / "model", hidden_size=256)
    report = convert(model, tmp_path / "out.gguf", TypeChoice(keep=(Keep("*", kind),)))
    bound = {"Q8_0": 1e-4, "Q5_0": 4e-3, "Q4_0": 2e-2, "BF16": 1e-5, "F16": 1e-6, "F32": 0.0}
    for target, stats in zip(report.targets, report.stats, strict=True):
        if target.spec.name.endswith("norm.weight"):
            continue
        assert target.type == kind
        assert stats.relative_error <= bound.get(kind.name, 0.25)
        tensor = GGUFSource(tmp_path / "out.gguf").tensors[target.spec.name]
        values = as_float32(tensor.rows[:])
        assert stats.zeros == values.size - np.count_nonzero(values)
        assert stats.n == values.size


def test_group_size_shares_a_scale(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model", hidden_size=256)
    convert(model, tmp_path / "one.gguf", TypeChoice(Q2_0, group=128))
    convert(model, tmp_path / "other.gguf", TypeChoice(PQ2_0))
    one, other = GGUFSource(tmp_path / "one.gguf"), GGUFSource(tmp_path / "other.gguf")
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.rows[:], other.tensors[name].rows[:], err_msg=name)
    assert one.tensors["blk.0.ffn_up.weight"].type == Q2_0.id


def test_group_size_below_a_block(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    with pytest.raises(TernError, match="PTQ1_0 has a scale for every 128 weights"):
        convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, group=64))


def test_a_pattern_that_names_nothing(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    with pytest.raises(TernError, match=r"--keep attn_w\*=q4_0: names no matrix; there are attn_k, "):
        convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, keep=(Keep("attn_w*", Q4_0),)))


def test_options_of_the_command(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    out = tmp_path / "out.gguf"
    options = ["--type", "pq2_0", "--embed", "q4_0", "--sensitive-layers", "q_proj,k_proj"]
    options += ["--sensitive-bits", "8", "--keep", "ffn_down=bf16"]
    done = CliRunner().invoke(ternconv, [*options, str(model), str(out)])
    assert done.exit_code == 0, done.output
    types = types_of(out)
    assert types["token_embd.weight"] == Q4_0.id
    assert types["blk.0.attn_q.weight"] == types["blk.0.attn_k.weight"] == Q8_0.id
    assert types["blk.0.ffn_down.weight"] == BF16.id
    assert types["blk.0.attn_v.weight"] == PQ2_0.id


@pytest.mark.parametrize(
    "options",
    [
        ["--keep", "attn_q"],
        ["--keep", "attn_q=q9_9"],
        ["--keep", "=q4_0"],
        ["--lora", "somewhere=much"],
        ["--lora", "somewhere=nan"],
        ["--group-size", "100"],
        ["--sensitive-bits", "3"],
    ],
)
def test_wrong_usage(tmp_path: Path, options: list[str]) -> None:
    done = CliRunner().invoke(ternconv, [*options, str(tmp_path), str(tmp_path / "out.gguf")])
    assert done.exit_code == 2
    assert options[0] in done.output


# ---- what smells ----


def test_zeros_are_told(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    tensors = convert_source(model)
    tensors["model.layers.1.self_attn.v_proj.weight"][:] = 0
    sparse = tensors["model.layers.0.mlp.up_proj.weight"]
    sparse[:] = 0
    sparse[:, ::16] = 0.5
    write_weights(model, tensors)
    report = convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    empty, unusual = smells(report)
    assert "nothing but zeros in blk.1.attn_v.weight" in empty
    assert "in blk.0.ffn_up.weight" in unusual
    done = CliRunner().invoke(ternconv, ["--force", str(model), str(tmp_path / "out.gguf")])
    # The third says that the model, of random weights, was not trained ternary.
    assert done.exit_code == 0 and done.output.count("warning: ") == 3


# ---- GGUF as the source ----


def test_from_gguf_keeps_what_it_does_not_change(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    half = tmp_path / "half.gguf"
    convert(model, half, TypeChoice(keep=(Keep("*", F32),), matrix=Q8_0))
    direct, by_file = tmp_path / "direct.gguf", tmp_path / "by_file.gguf"
    convert(model, direct, TypeChoice(PTQ1_0, embedding=Q4_0))
    convert(half, by_file, TypeChoice(PTQ1_0, embedding=Q4_0))
    one, other = _core.read_gguf_header(direct), _core.read_gguf_header(by_file)
    assert one["metadata"].keys() == other["metadata"].keys()
    for key, value in one["metadata"].items():
        assert np.array_equal(value, other["metadata"][key]), key
    first, second = GGUFSource(direct), GGUFSource(by_file)
    assert list(first.tensors) == list(second.tensors)
    for name, tensor in first.tensors.items():
        assert tensor.type == second.tensors[name].type
        assert tensor.data.tobytes() == second.tensors[name].data.tobytes(), name


def test_from_gguf_does_not_quantize_the_embedding_twice(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    convert(model, tmp_path / "q8.gguf", TypeChoice(Q8_0, embedding=Q4_0))
    report = convert(tmp_path / "q8.gguf", tmp_path / "out.gguf", TypeChoice(PQ2_0))
    one, other = GGUFSource(tmp_path / "q8.gguf"), GGUFSource(tmp_path / "out.gguf")
    embedding = other.tensors["token_embd.weight"]
    assert embedding.type == Q4_0.id
    assert embedding.data.tobytes() == one.tensors["token_embd.weight"].data.tobytes()
    assert verdicts(report)["token_embd.weight"] == "exact"
    assert other.tensors["blk.0.attn_q.weight"].type == PQ2_0.id


@pytest.mark.parametrize("kind", TERNARY.values(), ids=lambda kind: kind.name)
def test_from_ternary_gguf_is_exact(tmp_path: Path, kind: TensorType) -> None:
    model = llama_dir(tmp_path / "model", hidden_size=256)
    convert(model, tmp_path / "in.gguf", TypeChoice(TQ2_0))
    convert(tmp_path / "in.gguf", tmp_path / "out.gguf", TypeChoice(kind, lossless=True))
    one, other = GGUFSource(tmp_path / "in.gguf"), GGUFSource(tmp_path / "out.gguf")
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.rows[:], other.tensors[name].rows[:], err_msg=name)


def test_gguf_of_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.kv_data[0].pop("general.architecture")
    writer.add_tensor("x", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(TernError, match=r"in\.gguf: is no model, since it has no general\.architecture"):
        convert(tmp_path / "in.gguf", tmp_path / "out.gguf", TypeChoice())


def test_config_of_a_gguf_directory_is_still_a_checkpoint(tmp_path: Path) -> None:
    """A directory may be called *.gguf."""
    model = llama_dir(tmp_path / "model.gguf")
    write_json(model / "generation_config.json", {})
    convert(model, tmp_path / "out.gguf", TypeChoice(Q8_0))
    assert types_of(tmp_path / "out.gguf")["blk.0.attn_q.weight"] == Q8_0.id


# ---- numbers whose squares are none ----


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("size", [1e-30, 1e-22])
def test_what_is_rounded_to_nothing_is_not_exact(tmp_path: Path, kind: str, size: float) -> None:
    """The squares of such numbers are 0 in float32, and of some in float64 next to any other."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = random_tensors(llama_config())
    tensors[name] = (tensors[name] * size).astype(np.float32)
    tensors[name][::2] = 0
    model = llama_dir(tmp_path / "model")
    write_weights(model, tensors)
    kept = (Keep("*", F32), Keep("blk.1.ffn_up.weight", TENSOR_TYPES[kind]))
    choice = TypeChoice(Q8_0, keep=kept)
    report = convert(model, tmp_path / "out.gguf", choice)
    stats = dict(zip((t.spec.name for t in report.targets), report.stats, strict=True))["blk.1.ffn_up.weight"]
    decoded = GGUFSource(tmp_path / "out.gguf").tensors["blk.1.ffn_up.weight"].rows[:].astype(np.float64)
    error = np.sum((decoded - tensors[name].astype(np.float64)) ** 2)
    wanted = error / np.sum(tensors[name].astype(np.float64) ** 2)
    assert wanted > 1e-6 and stats.relative_error == pytest.approx(wanted, rel=1e-6)
    assert not stats.is_exact and not stats.is_lossless
    with pytest.raises(TernError, match=r"up_proj\.weight: rows 0 to .* do not fit"):
        convert(model, tmp_path / "no.gguf", replace(choice, lossless=True))


def test_a_few_lost_numbers_beside_large_ones(tmp_path: Path) -> None:
    """Their error is nothing beside the sum, in whatever precision; values are compared."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = random_tensors(llama_config(), dtype="float16")
    tensors = {key: values.astype(np.float32) for key, values in tensors.items()}
    tensors[name][3, 5] = 1e-30
    model = llama_dir(tmp_path / "model")
    write_weights(model, tensors)
    report = convert(model, tmp_path / "out.gguf", TypeChoice(Q8_0, keep=(Keep("*", TENSOR_TYPES["f16"]),)))
    lossy = [name for name, verdict in verdicts(report).items() if verdict == "lossy"]
    assert lossy == ["blk.1.ffn_up.weight"]


def test_large_numbers_have_an_error_too(tmp_path: Path) -> None:
    """Whose square float32 does not hold."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = random_tensors(llama_config())
    tensors[name] *= np.float32(1e30)
    model = llama_dir(tmp_path / "model")
    write_weights(model, tensors)
    kept = (Keep("*", F32), Keep("blk.1.ffn_up.weight", BF16))
    report = convert(model, tmp_path / "out.gguf", TypeChoice(Q8_0, keep=kept))
    lossy = [name for name, verdict in verdicts(report).items() if verdict == "lossy"]
    assert lossy == ["blk.1.ffn_up.weight"]
    (error,) = (stats.relative_error for stats in report.stats if not stats.is_exact)
    assert 1e-7 < error < 2.0**-16
