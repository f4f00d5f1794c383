"""Checkpoints under other names than transformers writes: read where that is possible, or told why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from convert_models import gemma3_dir, llama_dir, qwen3_moe_config, write_json, write_weights
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import Report, convert
from ggml_tern.convert.read.size import Size, origins_of
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import Q8_0

Tensors = dict[str, npt.NDArray[Any]]


def weights(model: Path) -> Tensors:
    return load_file(model / "model.safetensors")


def configure(model: Path, **changes: Any) -> None:
    """Change config.json; None takes a key away."""
    path = model / "config.json"
    values = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in values.items() if value is not None})


def converted(model: Path, output: Path) -> tuple[bytes, Report]:
    report = convert(model, output, TypeChoice(Q8_0))
    return output.read_bytes(), report


def refusal(model: Path) -> str:
    with pytest.raises(TernError) as caught:
        convert(model, model.parent / "no.gguf", TypeChoice(Q8_0))
    line = str(caught.value)
    assert "\n" not in line and "download the checkpoint again" not in line
    return line


# ---- prefixes ----


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "prefix", ["", "module.model.", "_orig_mod.model.", "language_model.", "base_model.model.model."]
)
def test_a_model_under_another_prefix_is_the_same_model(tmp_path: Path, family: str, prefix: str) -> None:
    """Without one, as a base model is saved alone; with one, as training wraps it."""
    make = llama_dir if family == "llama" else gemma3_dir
    model = make(tmp_path / "hf")
    expected, _ = converted(model, tmp_path / "expected.gguf")
    outer = prefix.removesuffix("model.")
    renamed = {}
    for name, values in weights(model).items():
        inner = name.removeprefix("model.")
        renamed[f"{prefix}{inner}" if inner != name else f"{outer}{name}"] = values
    write_weights(model, renamed)
    assert converted(model, tmp_path / "found.gguf")[0] == expected


def test_two_models_in_one_are_not_guessed(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = {f"talker.{name}": values for name, values in weights(model).items()}
    write_weights(model, tensors | {f"thinker.{name}": values for name, values in weights(model).items()})
    assert "tensor model.embed_tokens.weight is missing: the tensors have other names" in refusal(model)


# ---- experts ----


def expert_weights(config: dict[str, Any]) -> Tensors:
    rng = np.random.default_rng(3)
    n_embd, n_ff = config["hidden_size"], config["moe_intermediate_size"]
    tensors: Tensors = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = rng.standard_normal(shape).astype(np.float32)

    add("model.embed_tokens.weight", config["vocab_size"], n_embd)
    add("model.norm.weight", n_embd)
    heads, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    for block in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{block}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{name}.weight", n_embd)
        for name, n_out, n_in in (
            ("q", heads, n_embd),
            ("k", kv, n_embd),
            ("v", kv, n_embd),
            ("o", n_embd, heads),
        ):
            add(f"{prefix}self_attn.{name}_proj.weight", n_out, n_in)
        for name in "qk":
            add(f"{prefix}self_attn.{name}_norm.weight", config["head_dim"])
        add(f"{prefix}mlp.gate.weight", config["num_experts"], n_embd)
        for expert in range(config["num_experts"]):
            for name, n_out, n_in in (("gate", n_ff, n_embd), ("up", n_ff, n_embd), ("down", n_embd, n_ff)):
                add(f"{prefix}mlp.experts.{expert}.{name}_proj.weight", n_out, n_in)
    return tensors


def stacked(tensors: Tensors, config: dict[str, Any], how: str) -> Tensors:
    """The same with the experts of a block in one tensor."""
    result = {name: values for name, values in tensors.items() if ".experts." not in name}
    for block in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{block}.mlp."
        stacks = {
            name: np.stack(
                [tensors[f"{mlp}experts.{e}.{name}_proj.weight"] for e in range(config["num_experts"])]
            )
            for name in ("gate", "up", "down")
        }
        if how == "gate_up_proj":
            result[f"{mlp}experts.gate_up_proj"] = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
            result[f"{mlp}experts.down_proj"] = stacks["down"]
        else:
            where = {"switch_mlp": "switch_mlp.", "experts": "experts."}[how]
            result |= {f"{mlp}{where}{name}_proj.weight": stack for name, stack in stacks.items()}
    return result


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("how", ["gate_up_proj", "switch_mlp", "experts"])
def test_stacked_experts_are_the_same_experts(tmp_path: Path, how: str, shards: int) -> None:
    model = llama_dir(tmp_path / "hf")
    config = qwen3_moe_config()
    write_json(model / "config.json", config)
    tensors = expert_weights(config)
    write_weights(model, tensors)
    expected, _ = converted(model, tmp_path / "expected.gguf")
    (model / "model.safetensors").unlink()
    write_weights(model, stacked(tensors, config, how), shards)
    assert converted(model, tmp_path / "found.gguf")[0] == expected


def test_experts_stacked_the_other_way_round_name_the_keys(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    config = qwen3_moe_config()
    write_json(model / "config.json", config)
    tensors = stacked(expert_weights(config), config, "gate_up_proj")
    name = "model.layers.0.mlp.experts.down_proj"
    write_weights(model, tensors | {name: np.ascontiguousarray(tensors[name].swapaxes(1, 2))})
    line = refusal(model)
    assert "experts.0.down_proj.weight has shape" in line
    assert "by hidden_size and moe_intermediate_size" in line


# ---- what is missing, and why ----


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: values for name, values in tensors.items() if name not in names}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): values for name, values in tensors.items()}


BLOCK = "model.layers.1."
MISSING: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], tuple[str, ...]]] = {
    "head": (without("lm_head.weight"), {}, ("lm_head.weight is missing", "tie_word_embeddings true")),
    "misspelt": (
        renamed(f"{BLOCK}mlp.up_proj", f"{BLOCK}mlp.upp_proj"),
        {},
        (f"{BLOCK}mlp.up_proj.weight is missing", f"similar ones are there: {BLOCK}mlp.upp_proj.weight"),
    ),
    "another tool's": (
        renamed("self_attn.q_proj", "attention.wq"),
        {},
        ("self_attn.q_proj.weight is missing: no block has it", "names of another tool"),
    ),
    "fused": (
        lambda tensors: without(
            *(f"model.layers.{b}.self_attn.{n}_proj.weight" for b in (0, 1) for n in "kv")
        )(renamed("self_attn.q_proj", "self_attn.qkv_proj")(tensors)),
        {},
        ("no block has it", "self_attn.qkv_proj.weight"),
    ),
    "blocks": (without(), {"num_hidden_layers": 5}, ("layers.2.", "blocks up to 1", "num_hidden_layers")),
    "bias": (without(), {"attention_bias": True}, ("q_proj.bias is missing", "have a bias")),
    "other names altogether": (
        lambda tensors: {f"x.{number}": values for number, values in enumerate(tensors.values())},
        {},
        ("model.embed_tokens.weight is missing", "other names than transformers gives"),
    ),
    "one tensor of one block": (
        without(f"{BLOCK}mlp.up_proj.weight"),
        {},
        (f"{BLOCK}mlp.up_proj.weight is missing", "upload is incomplete", f"{BLOCK}mlp.gate_proj.weight"),
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_tensors_are_explained(tmp_path: Path, name: str) -> None:
    change, config, says = MISSING[name]
    model = llama_dir(tmp_path / "hf", tie_word_embeddings=False)
    configure(model, **config)
    write_weights(model, change(weights(model)))
    line = refusal(model)
    for part in says:
        assert part in line, line


# ---- which key made a shape ----


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 600}, "config.json makes it [600, 128] by vocab_size"),
        ({"intermediate_size": 384}, "by intermediate_size"),
        ({"num_key_value_heads": None}, "num_key_value_heads (not given, so 4)"),
        ({"num_key_value_heads": 1}, "by num_key_value_heads and hidden_size and num_attention_heads"),
        ({"head_dim": 64}, "by num_attention_heads and head_dim"),
    ],
)
def test_a_wrong_shape_names_its_keys(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    model = llama_dir(tmp_path / "hf")
    configure(model, **config)
    assert says.partition(" by ")[2] in refusal(model) or says in refusal(model)


def test_sizes_remember_where_they_come_from() -> None:
    width, heads = Size(128, "hidden_size"), Size(4, "heads")
    assert isinstance(width, int) and width == 128 and hash(width) == hash(128)
    products = (width * 2, 2 * width, width // heads, width + 1, 1 + width)
    assert products == (256, 256, 32, 129, 129)
    assert all("hidden_size" in origins_of(value) for value in products)
    assert ["x"] * heads == heads * ["x"] == ["x"] * 4 and width * 0.5 == 64
    assert origins_of(width // heads * width) == ("hidden_size", "heads") and origins_of(3) == ()
    assert json.dumps([width]) == "[128]" and np.zeros(width).shape == (128,)


# ---- which architecture ----


@pytest.mark.parametrize("names", [None, [], ["LlamaModel"]])
def test_an_architecture_by_its_model_type(tmp_path: Path, names: list[str] | None) -> None:
    model = llama_dir(tmp_path / "hf")
    expected, _ = converted(model, tmp_path / "expected.gguf")
    configure(model, architectures=names, model_type="llama")
    found, report = converted(model, tmp_path / "found.gguf")
    assert found == expected
    (note,) = (note for note in report.notes if "model_type" in note)
    assert "llama, it is a LlamaForCausalLM" in note


@pytest.mark.parametrize(
    ("names", "model_type"),
    [(["LlamaForSequenceClassification"], "llama"), (None, "gpt_oss"), (["PhiModel"], "phi"), (None, None)],
)
def test_what_no_model_type_makes_known(
    tmp_path: Path, names: list[str] | None, model_type: str | None
) -> None:
    model = llama_dir(tmp_path / "hf")
    configure(model, architectures=names, model_type=model_type)
    line = refusal(model)
    assert "in architectures" in line and "ternconv knows BitNetForCausalLM" in line
    assert model_type is None or (f"model_type is '{model_type}'" in line) == (
        names != ["LlamaForSequenceClassification"]
    )


# ---- quantizers of other engines ----

MLX = {"group_size": 64, "bits": 2, "mode": "affine"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quantization": MLX, "quantization_config": MLX}, "quantized by MLX (2 bits)"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "quantized by MLX (4 bits)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by GPTQ (4 bits)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized by AWQ"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized by bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized by bitsandbytes"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized by HQQ"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0}}, "quantized by EXL2, of exllamav2,"),
        (
            {"quantization_config": {"quant_method": "exl3", "bits": 2}},
            "quantized by EXL3, of exllamav3, (2 bits)",
        ),
        ({"quantization_config": {"quant_method": "torchao"}}, "quantized by torchao"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized by MXFP4"),
        ({"quantization_config": {"quant_method": "of-tomorrow"}}, "quantized by 'of-tomorrow'"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "format is 'pack-quantized'",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "quant_algo is 'NVFP4'",
        ),
    ],
)
def test_quantizers_are_named(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    model = llama_dir(tmp_path / "hf")
    configure(model, **config)
    line = refusal(model)
    assert says in line and "convert the model that this one was quantized from" in line
    assert ("mlx_lm.convert" in line) == ("MLX" in says)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "GPTQ"),
        (("qweight", "qzeros", "scales"), "AWQ"),
        (("weight", "scales", "biases"), "MLX"),
        (("weight", "weight.absmax", "weight.quant_map"), "bitsandbytes"),
        (("weight", "SCB"), "bitsandbytes"),
        (("W_q", "scale", "zero"), "HQQ"),
        (("q_weight", "q_scale", "q_scale_max"), "EXL2"),
        (("trellis", "suh", "svh"), "EXL3"),
        (("codebooks", "codes", "scales"), "AQLM"),
    ],
)
def test_quantizers_are_known_by_their_tensors(tmp_path: Path, parts: tuple[str, ...], says: str) -> None:
    """Where config.json does not speak of them."""
    model = llama_dir(tmp_path / "hf")
    tensors: Tensors = {}
    for name, values in weights(model).items():
        if "_proj" in name:
            module = name.removesuffix("weight")
            tensors |= {f"{module}{part}": np.zeros((4, 4), np.int32) for part in parts}
        else:
            tensors[name] = values
    save_file(tensors, model / "model.safetensors")
    line = refusal(model)
    assert f"quantized by {says}" in line and str(model) in line
