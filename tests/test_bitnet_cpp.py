"""Files of bitnet.cpp: type I2_S, and architectures that no stock llama.cpp knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import build_llama_cpp
from convert_models import bitnet_config, llama_dir, random_tensors, write_json, write_weights
from ggml_tern import _core
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.verify import Verdict, verify
from ggml_tern.errors import TernError
from ggml_tern.gguf.architectures import STOCK_ARCHITECTURES
from ggml_tern.gguf.digest import hash_tensors
from ggml_tern.gguf.inspection import describe
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import TARGETS, repack
from ggml_tern.tensors.types import F16, PQ2_0, PTQ1_0
from reference import gguf_files as files

TERN = Path(sys.executable).parent / "tern"
TERNCONV = Path(sys.executable).parent / "ternconv"


def bitnet_dir(directory: Path, scale: float) -> Path:
    """A BitNet of transformers whose matrices are ternary with one scale."""
    config = bitnet_config(hidden_act="relu2", tie_word_embeddings=True)
    model = llama_dir(directory)
    tensors = random_tensors(config)
    rng = np.random.default_rng(5)
    for name in tensors:
        if tensors[name].ndim == 2 and "embed" not in name:
            tensors[name] = rng.integers(-1, 2, tensors[name].shape).astype(np.float32) * np.float32(scale)
    for block in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{block}."
        tensors[f"{prefix}self_attn.attn_sub_norm.weight"] = np.ones(config["hidden_size"], np.float32)
        tensors[f"{prefix}mlp.ffn_sub_norm.weight"] = np.ones(config["intermediate_size"], np.float32)
    write_json(model / "config.json", config)
    write_weights(model, tensors)
    return model


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def of_bitnet_cpp(path: Path, output: Path, architecture: str, scale: float) -> Path:
    """A converted file as bitnet.cpp has it."""
    source = GGUFSource(path)
    keys = {key: plain(value) for key, value in source.metadata.items() if key != "bitnet.hidden_activation"}
    keys = {key.replace("bitnet.", f"{architecture}.", 1): value for key, value in keys.items()}
    keys["general.architecture"] = architecture
    tensors = []
    for tensor in source.tensors.values():
        if tensor.is_ternary:
            trits = np.sign(tensor.rows[:]).astype(np.int8)
            tensors.append(files.i2_s(tensor.name, trits, scale))
        else:
            tensors.append(files.Tensor(tensor.name, tensor.type, tensor.shape, tensor.data.tobytes()))
    return files.write(output, keys, tensors)


@pytest.fixture(params=["bitnet-b1.58", "bitnet-25"])
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


CHOICE = TypeChoice(PQ2_0, embedding=F16)
HALF, NOT_HALF = 0.5, float(np.float32(0.012345679))


def test_repacked_and_converted_as_the_checkpoint_is(tmp_path: Path, architecture: str) -> None:
    """The model that transformers has, its file of bitnet.cpp, and what becomes of that are the same."""
    model = bitnet_dir(tmp_path / "hf", HALF)
    convert(model, tmp_path / "direct.gguf", CHOICE)
    direct = GGUFSource(tmp_path / "direct.gguf")
    assert direct.metadata["bitnet.hidden_activation"] == "relu2"
    foreign = of_bitnet_cpp(tmp_path / "direct.gguf", tmp_path / "foreign.gguf", architecture, HALF)
    packed = repack(GGUFSource(foreign), tmp_path / "packed.gguf", TARGETS["pq2_0"])
    report = convert(foreign, tmp_path / "converted.gguf", CHOICE)
    for notes in (packed.notes, report.notes):
        assert (
            sum(f"the architecture {architecture}, which only bitnet.cpp knows" in note for note in notes)
            == 1
        )
    for name in ("packed", "converted"):
        found = GGUFSource(tmp_path / f"{name}.gguf")
        assert {key: plain(value) for key, value in found.metadata.items()} == {
            key: plain(value) for key, value in direct.metadata.items()
        }
        assert hash_tensors(found) == hash_tensors(direct) == hash_tensors(GGUFSource(foreign))
        assert describe(found)["runs"]["plugin"]
        verdicts = [finding.verdict for finding in verify(foreign, tmp_path / f"{name}.gguf")]
        assert set(verdicts) == {Verdict.EXACT}


def test_a_scale_that_fp16_does_not_hold(tmp_path: Path) -> None:
    """repack refuses it and sends to ternconv, which rounds it and says so; verify says the same."""
    model = bitnet_dir(tmp_path / "hf", HALF)
    convert(model, tmp_path / "direct.gguf", CHOICE)
    foreign = of_bitnet_cpp(tmp_path / "direct.gguf", tmp_path / "foreign.gguf", "bitnet-b1.58", NOT_HALF)
    with pytest.raises(TernError, match="`ternconv` converts the file with the scale rounded"):
        repack(GGUFSource(foreign), tmp_path / "packed.gguf", TARGETS["pq2_0"])
    for name in ("ptq1_0", "pq2_0", "q2_0", "tq2_0", "q8_0"):
        out = tmp_path / f"{name}.gguf"
        done = subprocess.run(
            [TERNCONV, foreign, out, "--type", name], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        checked = subprocess.run([TERN, "verify", foreign, out], capture_output=True, text=True, timeout=120)
        assert checked.returncode == 0, checked.stderr
        if name != "q8_0":
            assert "scales rounded to fp16: 14 of 14" in done.stdout
            assert "14 exact but for fp16 scales" in checked.stdout
            weights = GGUFSource(out).tensors["blk.0.ffn_up.weight"].rows[:]
            assert set(np.unique(weights)) == {-np.float16(NOT_HALF), 0, np.float16(NOT_HALF)}
    (note,) = (note for note in describe(GGUFSource(foreign))["runs"]["notes"] if "I2_S" in note)
    assert "ternconv" in note and "rounds its scales to fp16" in note


@pytest.mark.parametrize("lossless", [False, True])
def test_i2_s_in_other_architectures(tmp_path: Path, lossless: bool) -> None:
    """Of rows that blocks of 128 divide and those of 256 do not, and with types left open."""
    rng = np.random.default_rng(3)
    trits = rng.integers(-1, 2, (4, 384)).astype(np.int8)
    path = files.write(
        tmp_path / "m.gguf",
        {"general.architecture": "llama"},
        [files.i2_s("blk.0.ffn_up.weight", trits, HALF)],
    )
    for choice in (TypeChoice(lossless=lossless), TypeChoice(PTQ1_0, lossless=lossless)):
        (stats,) = convert(path, tmp_path / "out.gguf", choice, force=True).stats
        assert stats.is_exact
        values = GGUFSource(tmp_path / "out.gguf").tensors["blk.0.ffn_up.weight"].rows[:]
        np.testing.assert_array_equal(values, trits * np.float32(HALF))


def test_i2_s_as_the_file_to_verify_is_one_line(tmp_path: Path) -> None:
    path = files.write(
        tmp_path / "m.gguf",
        {"general.architecture": "llama"},
        [files.i2_s("blk.0.ffn_up.weight", np.ones((1, 128), np.int8), 1.0)],
    )
    done = subprocess.run([TERN, "verify", path, path], capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2) and done.stdout == "" and done.stderr.count("\n") == 1
    assert "I2_S" in done.stderr and "Traceback" not in done.stderr


def test_a_head_of_its_own_is_refused(tmp_path: Path, architecture: str) -> None:
    tensors = [
        files.i2_s("blk.0.ffn_up.weight", np.ones((1, 128), np.int8), 1.0),
        files.plain("output.weight", 0, np.ones((2, 128), np.float32)),
    ]
    path = files.write(tmp_path / "m.gguf", {"general.architecture": architecture}, tensors)
    for make in (
        lambda: convert(path, tmp_path / "out.gguf", CHOICE),
        lambda: repack(GGUFSource(path), tmp_path / "out.gguf", TARGETS["pq2_0"]),
    ):
        with pytest.raises(TernError, match=r"m\.gguf: tensor output\.weight: .* a head of its own"):
            make()
    assert not (tmp_path / "out.gguf").exists()


# ---- what runs it ----


def runs(path: Path, keys: dict[str, Any], *tensors: files.Tensor) -> tuple[bool, bool, str]:
    tensors = tensors or (files.plain("output_norm.weight", 0, np.ones(4, np.float32)),)
    found = describe(GGUFSource(files.write(path / "m.gguf", keys, list(tensors))))["runs"]
    return found["stock"], found["plugin"], "\n".join(found["notes"])


def test_inspect_believes_no_architecture_unseen(tmp_path: Path, architecture: str) -> None:
    stock, plugin, notes = runs(tmp_path, {"general.architecture": architecture})
    assert (stock, plugin) == (False, False) and "only bitnet.cpp knows" in notes and "ternconv" in notes
    stock, plugin, notes = runs(tmp_path, {"general.architecture": "of-tomorrow"})
    assert (stock, plugin) == (False, False) and "does not know the architecture of-tomorrow" in notes


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"general.architecture": "clip"}, "a projector"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "an adapter"),
        ({"general.architecture": 3}, "no general.architecture"),
    ],
)
def test_inspect_tells_what_is_no_model(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    stock, plugin, notes = runs(tmp_path, keys)
    assert ((stock, plugin) == (False, False) and f"it is {says}" in notes) or says in notes


@pytest.mark.parametrize(
    "keys",
    [
        {"general.architecture": "bert"},
        {"general.architecture": "gemma-embedding"},
        {"general.architecture": "qwen3", "qwen3.pooling_type": 3},
    ],
)
def test_inspect_says_that_an_embedding_model_does_not_chat(tmp_path: Path, keys: dict[str, Any]) -> None:
    stock, plugin, notes = runs(tmp_path, keys)
    assert (stock, plugin) == (True, True) and "an embedding model" in notes
    assert f"`llama-server -m {tmp_path / 'm.gguf'} --embeddings`" in notes
    assert (
        "embedding model" not in runs(tmp_path, {"general.architecture": "qwen3", "qwen3.pooling_type": 0})[2]
    )


def test_squared_relu_runs_where_the_plug_in_can_compute_it(tmp_path: Path) -> None:
    keys = {"general.architecture": "bitnet", "bitnet.hidden_activation": "relu2"}
    bytes_of = {142: 34, 35: 33}
    gates = {
        type_id: files.Tensor("blk.0.ffn_gate.weight", type_id, (8, 256), bytes(8 * 2 * size))
        for type_id, size in bytes_of.items()
    }
    stock, plugin, notes = runs(tmp_path, keys, gates[_core.TYPE_PQ2_0])
    assert (stock, plugin) == (False, True) and "the plug-in mends that" in notes
    stock, plugin, notes = runs(tmp_path, keys, gates[_core.TYPE_TQ2_0])
    assert (stock, plugin) == (False, False) and "spoils its answers" in notes
    assert runs(tmp_path, {"general.architecture": "bitnet"}, gates[_core.TYPE_TQ2_0])[:2] == (True, True)


def test_repacked_to_a_type_that_computes_silu_says_so(tmp_path: Path) -> None:
    keys = {"general.architecture": "bitnet-b1.58"}
    gate = files.i2_s("blk.0.ffn_gate.weight", np.ones((8, 256), np.int8), 1.0)
    path = files.write(tmp_path / "m.gguf", keys, [gate])
    said = "which spoils its answers"
    for target, spoiled in (("pq2_0", False), ("ptq1_0", False), ("tq2_0", True)):
        notes = repack(GGUFSource(path), tmp_path / f"{target}.gguf", TARGETS[target]).notes
        assert any(said in note for note in notes) == spoiled


def test_stock_architectures_are_those_of_llama_cpp() -> None:
    text = (build_llama_cpp.Layout.from_environment().source / "src" / "llama-arch.cpp").read_text(
        encoding="utf-8"
    )
    table = text[text.index("LLM_ARCH_NAMES = {") :]
    names = set(re.findall(r'LLM_ARCH_\w+,\s*"([^"]+)"', table[: table.index("};")]))
    assert names - {"(unknown)"} == STOCK_ARCHITECTURES
