"""Converted files in stock llama.cpp: its logits are those of transformers.

Weights are kept in float32 here, so that whatever differs is the conversion's fault: row order, norms, rotary
parameters, sliding windows, heads, biases.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5TextConfig,
)

import compare_logits
from convert_models import (
    byte_level_tokenizer,
    gemma3_dir,
    llama_dir,
    smollm_steps,
    write_byte_level,
    write_json,
    write_weights,
)
from ggml_tern import _core
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.host import stock as host
from ggml_tern.host.run import find_program
from ggml_tern.tensors.types import F32, PQ2_0, PTQ1_0, Q2_0, Q8_0, TQ2_0, TensorType
from llama_server import serving
from reference import gguf_bytes, gguf_files, in_llama
from transformers_models import (
    FAMILIES,
    LLAMA3_SCALING,
    QWEN35,
    SIZES,
    float_tables,
    plain_logits,
    plain_model,
    served_logits,
    transformers_dir,
)

N_TOKENS = 70


def logits_without_blocks(model: PreTrainedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor([tokens]))
        logits: npt.NDArray[np.float32] = model.lm_head(model.model.norm(embedded))[0].numpy()
    return logits


YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama_dir, {}),
        (llama_dir, {"num_key_value_heads": 1, "head_dim": 64, "rope_theta": 500000.0}),
        (llama_dir, {"tie_word_embeddings": False, "attention_bias": True}),
        (llama_dir, {"rope_scaling": LLAMA3_SCALING}),
        (llama_dir, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        (llama_dir, {"rope_scaling": YARN_SCALING}),
        (gemma3_dir, {}),
        (gemma3_dir, {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}),
        (gemma3_dir, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0}),
        (gemma3_dir, {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}),
        (gemma3_dir, {"layer_types": ["full_attention"] * 7}),
    ],
    ids=lambda value: value.__name__.removesuffix("_dir") if callable(value) else ",".join(value) or "plain",
)
def test_logits_are_those_of_transformers(tmp_path: Path, make: Any, changes: dict[str, Any]) -> None:
    directory = make(tmp_path / "hf", **changes)
    output = tmp_path / "out.gguf"
    convert(
        directory, output, TypeChoice(F32, F32, None if changes.get("tie_word_embeddings", True) else F32)
    )
    # More positions than the sliding window of 32.
    tokens = np.random.default_rng(1).integers(4, 400, N_TOKENS).tolist()
    expected = plain_logits(plain_model(directory), tokens)
    # float32 sums in another order; a wrong row order, norm or angle is off by the size of the logits.
    np.testing.assert_allclose(served_logits(output, tokens), expected, atol=2e-3 * float(expected.std()))


# ---- models that transformers makes ----


# What llama.cpp's own graphs compute: squared ReLU takes the plug-in.
CASES = [
    (family, case) for family, (_, cases) in FAMILIES.items() for case in cases if case != "squared ReLU"
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_of_every_family_are_those_of_transformers(tmp_path: Path, family: str, case: str) -> None:
    directory = transformers_dir(tmp_path / "hf", family, case)
    output = tmp_path / "out.gguf"
    convert(directory, output, float_tables(family, case))
    tokens = np.random.default_rng(1).integers(4, 400, N_TOKENS).tolist()
    expected = plain_logits(plain_model(directory), tokens)
    assert 0.3 < compare_logits.entropy(expected) < 5
    np.testing.assert_allclose(
        served_logits(output, tokens), expected, rtol=2e-3, atol=2e-3 * float(expected.std())
    )


def assert_served_as_it_is(
    directory: Path, output: Path, choice: TypeChoice, n_gpu_layers: Sequence[int] = (99,)
) -> None:
    """Packed without loss, through the plug-in: the logits of transformers, but for the int8 activations,
    and its greedy text."""
    report = convert(directory, output, choice)
    packed = [stats for stats in report.stats if stats.groups]
    assert packed and all(stats.exact_groups == stats.groups for stats in packed)

    tokens = np.random.default_rng(1).integers(4, 400, 200).astype(np.int32)
    model = plain_model(directory)
    expected = plain_logits(model, tokens.tolist())
    for layers in n_gpu_layers:
        serving = compare_logits.Serving(n_gpu_layers=layers, kv_type=_core.TYPE_F32)
        agreement = compare_logits.compare(expected, compare_logits.host_logits(output, tokens, serving))
        print(agreement)
        assert agreement.mean_kl <= 1e-3
        assert agreement.top1 >= 0.99
    without_blocks = compare_logits.compare(expected, logits_without_blocks(model, tokens.tolist()))
    print(without_blocks)
    # The model is worth comparing: neither flat nor certain, and its blocks have their say.
    assert 0.3 < compare_logits.entropy(expected) < 5
    assert without_blocks.mean_kl > 0.05 and without_blocks.top1 < 0.95

    prompt = "The quick brown fox jumps over"
    ids = compare_logits.host_tokens(output, prompt).tolist()
    for _ in range(24):
        ids.append(int(plain_logits(model, ids)[-1].argmax()))
    for layers in n_gpu_layers:
        assert in_llama.ask("greedy", str(output), prompt, 24, layers) == ids[-24:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ternary_model_is_served_as_it_is(tmp_path: Path, family: str) -> None:
    directory = transformers_dir(tmp_path / "hf", family, is_ternary=True)
    assert_served_as_it_is(directory, tmp_path / "out.gguf", float_tables(family, "", PTQ1_0))


# ---- squared ReLU, where llama.cpp's graph of BitNet has SiLU ----


@pytest.fixture(scope="module")
def squared_relu_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BitNet as released: ternary, with squared ReLU."""
    return transformers_dir(
        tmp_path_factory.mktemp("relu2") / "hf", "bitnet", "squared ReLU", is_ternary=True
    )


def bitnet_file(directory: Path, output: Path, gate: TensorType, activation: str = "relu2") -> Path:
    """The BitNet in `directory`, with gates of a type, as if it had been trained with that activation."""
    config = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", config | {"hidden_act": activation})
    try:
        choice = float_tables("bitnet", "squared ReLU", PQ2_0)
        report = convert(directory, output, replace(choice, keep=(Keep("*ffn_gate*", gate),)))
    finally:
        write_json(directory / "config.json", config)
    notes = [note for note in report.notes if "squared ReLU" in note]
    assert len(notes) == (activation == "relu2" and gate not in (PQ2_0, PTQ1_0))
    return output


def run_bench(model: Path) -> tuple[int, list[str]]:
    """The exit code of llama-bench with the plug-in, and what the plug-in said."""
    done = subprocess.run(
        [host.llama_cpp_dir() / "llama-bench", "-m", model, "-p", "4", "-n", "1", "-r", "1"],
        env=host.host_environment(stock=False), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("ggml-tern: ")]


@pytest.mark.parametrize("matrix", [PTQ1_0, PQ2_0, Q2_0], ids=lambda kind: kind.name)
def test_squared_relu_is_served_as_it_is(tmp_path: Path, squared_relu_dir: Path, matrix: TensorType) -> None:
    choice = float_tables("bitnet", "squared ReLU", matrix)
    output = tmp_path / "out.gguf"
    assert_served_as_it_is(squared_relu_dir, output, choice, n_gpu_layers=(0, 99))
    assert run_bench(output) == (0, [])


def test_the_host_sees_the_activation_that_is_left_to_it(tmp_path: Path, squared_relu_dir: Path) -> None:
    """A host that read the key would apply to our gates what they have passed through already."""
    for gate, is_left in ((PTQ1_0, False), (Q8_0, True)):
        path = bitnet_file(squared_relu_dir, tmp_path / f"{gate.name}.gguf", gate)
        keys = in_llama.ask("metadata_keys", str(path))
        assert ("bitnet.hidden_activation" in keys) == is_left


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_squared_relu_and_silu_in_one_process(
    tmp_path: Path, squared_relu_dir: Path, n_gpu_layers: int
) -> None:
    """The same weights with each: every model keeps the bits that it has alone."""
    paths = [
        str(bitnet_file(squared_relu_dir, tmp_path / f"{activation}.gguf", PTQ1_0, activation))
        for activation in ("silu", "relu2")
    ]
    tokens = np.random.default_rng(3).integers(4, 400, 50).tolist()
    alone = [in_llama.ask("digests", [path], tokens, n_gpu_layers)[0] for path in paths]
    assert alone[0] != alone[1]
    assert in_llama.ask("digests_in_turns", paths, tokens, n_gpu_layers) == alone
    assert in_llama.ask("digests_in_turns", paths[::-1], tokens, n_gpu_layers) == alone[::-1]


def test_squared_relu_in_a_split_file(tmp_path: Path, squared_relu_dir: Path) -> None:
    """The later parts have no keys to tell it, as llama.cpp's own tool writes them."""
    whole = bitnet_file(squared_relu_dir, tmp_path / "whole.gguf", PTQ1_0)
    silu = bitnet_file(squared_relu_dir, tmp_path / "silu.gguf", PTQ1_0, "silu")
    first = gguf_bytes.split_in_two(whole, tmp_path / "parts")
    gates = {t["name"] for t in _core.read_gguf_header(str(first))["tensors"] if "ffn_gate" in t["name"]}
    assert 0 < len(gates) < SIZES["num_hidden_layers"]
    tokens = list(range(40, 80))
    digests = in_llama.ask("digests", [str(path) for path in (whole, silu, first, silu)], tokens, 99)
    assert digests[2] == digests[0] != digests[1] == digests[3]


@pytest.mark.parametrize("gate", [TQ2_0, Q8_0], ids=lambda kind: kind.name)
def test_a_gate_that_cannot_have_squared_relu(
    tmp_path: Path, squared_relu_dir: Path, gate: TensorType
) -> None:
    """The converter says so, and so does the plug-in, once; the model runs, as it does without it."""
    output = bitnet_file(squared_relu_dir, tmp_path / "out.gguf", gate)
    code, lines = run_bench(output)
    assert code == 0
    assert len(lines) == 1
    for part in (str(output), "squared ReLU", f"blk.0.ffn_gate.weight is {gate.name}", "--type ptq1_0"):
        assert part in lines[0]
    # The key goes with the file when it is converted again, and so does the note.
    again = convert(output, tmp_path / "again.gguf", TypeChoice(gate, F32))
    assert any("squared ReLU" in note for note in again.notes)
    # With SiLU that is no matter.
    assert run_bench(bitnet_file(squared_relu_dir, tmp_path / "silu.gguf", gate, "silu")) == (0, [])


def test_an_activation_that_nobody_computes(tmp_path: Path, squared_relu_dir: Path) -> None:
    output = bitnet_file(squared_relu_dir, tmp_path / "out.gguf", PQ2_0)
    data = output.read_bytes()
    assert data.count(b"relu2") == 1
    output.write_bytes(data.replace(b"relu2", b"gel\nu"))
    code, lines = run_bench(output)
    assert code == 1
    assert len(lines) == 1
    for part in (str(output), "bitnet.hidden_activation", r"'gel\x0au'", "'silu' and 'relu2'"):
        assert part in lines[0]


def test_a_lora_of_a_gate_with_squared_relu(tmp_path: Path, squared_relu_dir: Path) -> None:
    """llama.cpp would add it to what the plug-in hands out in the gate's place."""
    models = {
        activation: str(bitnet_file(squared_relu_dir, tmp_path / f"{activation}.gguf", PTQ1_0, activation))
        for activation in ("silu", "relu2")
    }
    n_embd, n_ff = SIZES["hidden_size"], SIZES["intermediate_size"]
    keys = {
        "general.architecture": "bitnet",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 1.0,
    }
    adapters = {}
    for matrix in ("ffn_gate", "ffn_up"):
        factors = {"lora_a": np.ones((4, n_embd), np.float32), "lora_b": np.ones((n_ff, 4), np.float32)}
        tensors = [
            gguf_files.plain(f"blk.0.{matrix}.weight.{name}", 0, values) for name, values in factors.items()
        ]
        adapters[matrix] = str(gguf_files.write(tmp_path / f"{matrix}.gguf", keys, tensors))
    outcomes = in_llama.ask("load_adapters", models["relu2"], list(adapters.values()))
    assert outcomes == [False, True]
    assert in_llama.ask("load_adapters", models["silu"], list(adapters.values())) == [True, True]


@pytest.mark.parametrize("tied", [False, True])
def test_language_model_of_a_qwen35_vision_checkpoint(tmp_path: Path, tied: bool) -> None:
    """As transformers saves the whole of it: configuration and names are nested, and the whole says whether
    it is tied."""
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}
    config = Qwen3_5Config(text_config=SIZES | QWEN35, vision_config=vision, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    directory = tmp_path / "hf"
    model.save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    saved["text_config"].pop("tie_word_embeddings", None)
    write_json(directory / "config.json", saved)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    output = tmp_path / "out.gguf"
    report = convert(directory, output, TypeChoice(F32, F32, None if tied else F32))
    assert "the vision tower is left out" in report.notes
    tokens = np.random.default_rng(1).integers(4, 400, N_TOKENS).tolist()
    expected = plain_logits(model, tokens)
    np.testing.assert_allclose(served_logits(output, tokens), expected, atol=2e-3 * float(expected.std()))


# ---- the MTP head of Qwen3.5 ----


def mtp_dir(directory: Path, joint: npt.NDArray[np.float32]) -> Path:
    """A Qwen3.5 whose blocks add nothing: it goes from token t to token t + 7.

    Its MTP head therefore knows what comes after the next token if `joint`, the matrix (n_embd, 2 * n_embd)
    that joins it on, picks the embedding of that token from (embedding, hidden state).
    """
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SIZES | QWEN35 | {"mtp_num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                values.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(embedding.roll(7, 0))
    model.save_pretrained(directory)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))

    tensors = load_file(directory / "model.safetensors")
    full_attention = "model.layers.3."
    tensors |= {
        "mtp.layers.0." + name.removeprefix(full_attention): values.copy()
        for name, values in tensors.items()
        if name.startswith(full_attention)
    }
    tensors["mtp.fc.weight"] = joint
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = np.zeros(config.hidden_size, np.float32)
    write_weights(directory, tensors)
    return directory


@pytest.mark.parametrize("picks", ["embedding", "hidden state"])
def test_llama_server_speculates_with_the_mtp_head(tmp_path: Path, picks: str) -> None:
    """All that it drafts is accepted if its head knows the answer, and nothing if it repeats the token."""
    unit, zeros = np.eye(SIZES["hidden_size"], dtype=np.float32), np.zeros((256, 256), np.float32)
    joint = np.concatenate([unit, zeros] if picks == "embedding" else [zeros, unit], axis=1)
    output = tmp_path / "out.gguf"
    convert(mtp_dir(tmp_path / "hf", joint), output, TypeChoice(PTQ1_0, F32, F32), keep_mtp=True)
    command = [str(find_program("llama-server")), "-m", str(output), "-c", "128", "-np", "1"]
    command += ["-t", "1", "--fit", "off", "--spec-type", "draft-mtp"]
    with serving(None, command=command, variables=host.host_environment(stock=False)) as server:
        request = {
            "prompt": [10],
            "n_predict": 30,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        answer = server.post("/completion", request).json
    assert answer["tokens"] == [(10 + 7 * step) % 512 for step in range(1, 31)]
    drafted, accepted = answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]
    assert drafted >= 10
    assert accepted == (drafted if picks == "embedding" else 0)
