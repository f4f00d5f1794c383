"""LoRA adapters merged by ternconv, against what PEFT itself makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from convert_models import byte_level_tokenizer, smollm_steps, write_byte_level
from ggml_tern.cli.ternconv import main as ternconv
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.read.lora import open_adapter
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.types import F32, Q8_0

PLAIN = TypeChoice(Q8_0, keep=(Keep("*", F32),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it."""
    directory = tmp_path_factory.mktemp("lora") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory


def make_adapter(model: Path, directory: Path, seed: int, **options: Any) -> Path:
    """An adapter with random factors, saved by PEFT."""
    torch.manual_seed(seed)
    base = LlamaForCausalLM.from_pretrained(model)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]} | options
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(str(directory))
    return directory


def change_config(directory: Path | str, **changes: Any) -> None:
    path = Path(directory) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def merged_by_peft(model: Path, adapters: list[tuple[Path, float]], directory: Path) -> Path:
    """What PEFT makes of the model; the scale goes into alpha, as PEFT scales no embeddings."""
    merged = LlamaForCausalLM.from_pretrained(model)
    for number, (adapter, scale) in enumerate(adapters):
        scaled = shutil.copytree(adapter, f"{directory}-{number}")
        config = json.loads((adapter / "adapter_config.json").read_text())
        patterns = {key: alpha * scale for key, alpha in config["alpha_pattern"].items()}
        change_config(scaled, lora_alpha=config["lora_alpha"] * scale, alpha_pattern=patterns)
        merged = PeftModel.from_pretrained(merged, scaled).merge_and_unload()
    merged.save_pretrained(str(directory))
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["embed_tokens", "v_proj", "lm_head"]},
        {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3}},
    ],
    ids=["plain", "rslora", "embedding and head", "patterns"],
)
def test_merged_as_peft_merges(tmp_path: Path, model: Path, options: dict[str, Any]) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 11, **options)
    expected = merged_by_peft(model, [(adapter, 0.5)], tmp_path / "merged")
    convert(expected, tmp_path / "expected.gguf", PLAIN)
    convert(model, tmp_path / "out.gguf", PLAIN, adapters=[open_adapter(adapter, 0.5)])
    convert(model, tmp_path / "base.gguf", PLAIN)
    found, wanted, base = (GGUFSource(tmp_path / f"{name}.gguf") for name in ("out", "expected", "base"))
    changed = 0
    for name, tensor in wanted.tensors.items():
        np.testing.assert_allclose(found.tensors[name].rows[:], tensor.rows[:], atol=1e-6, err_msg=name)
        changed += not np.array_equal(tensor.rows[:], base.tensors[name].rows[:])
    # embed_tokens, lm_head, and v_proj in both blocks; or q_proj and down_proj in both.
    assert changed == 4


def test_the_base_may_be_saved_alone(tmp_path: Path, model: Path) -> None:
    """An adapter is of the whole model, whose names begin with "model."."""
    adapter = make_adapter(model, tmp_path / "adapter", 1)
    convert(model, tmp_path / "expected.gguf", PLAIN, adapters=[open_adapter(adapter)])
    alone = shutil.copytree(model, tmp_path / "alone")
    tensors = load_file(model / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, alone / "model.safetensors")
    convert(alone, tmp_path / "found.gguf", PLAIN, adapters=[open_adapter(adapter)])
    found, expected = GGUFSource(tmp_path / "found.gguf"), GGUFSource(tmp_path / "expected.gguf")
    for name, tensor in expected.tensors.items():
        assert np.array_equal(found.tensors[name].data, tensor.data), name


def test_several_adapters(tmp_path: Path, model: Path) -> None:
    first = make_adapter(model, tmp_path / "first", 1)
    second = make_adapter(model, tmp_path / "second", 2, target_modules=["q_proj", "up_proj"])
    expected = merged_by_peft(model, [(first, 1.0), (second, -0.25)], tmp_path / "merged")
    convert(expected, tmp_path / "expected.gguf", PLAIN)
    options = ["--type", "q8_0", "--keep", "*=f32", "--lora", str(first), "--lora", f"{second}=-0.25"]
    done = CliRunner().invoke(ternconv, [*options, str(model), str(tmp_path / "out.gguf")])
    assert done.exit_code == 0, done.output
    found, wanted = GGUFSource(tmp_path / "out.gguf"), GGUFSource(tmp_path / "expected.gguf")
    for name, tensor in wanted.tensors.items():
        np.testing.assert_allclose(found.tensors[name].rows[:], tensor.rows[:], atol=1e-6, err_msg=name)


def rename_tensor(directory: Path, old: str, new: str) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    name = next(name for name in tensors if old in name)
    tensors[name.replace(old, new)] = tensors.pop(name)
    save_file(tensors, directory / "adapter_model.safetensors")


def poison(directory: Path) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json: no such file"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: no such file"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\xff" * 20), "damaged safetensors"),
        (lambda d: change_config(d, peft_type="IA3"), "peft_type is 'IA3'"),
        (lambda d: change_config(d, use_dora=True), "use_dora is True"),
        (lambda d: change_config(d, bias="all"), "bias is 'all'"),
        *(
            (
                lambda d, init=init: change_config(d, init_lora_weights=init),
                f"init_lora_weights is '{init}', which changed",
            )
            for init in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        (
            lambda d: change_config(d, init_lora_weights="mica"),
            "init_lora_weights is 'mica', which ternconv does not",
        ),
        (lambda d: change_config(d, alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
        (lambda d: change_config(d, target_parameters=["experts.gate_up_proj"]), "target_parameters is"),
        (lambda d: change_config(d, r=5), "expected rank 5"),
        (lambda d: change_config(d, rank_pattern={"(": 2}), "no regular expression"),
        (lambda d: rename_tensor(d, "lora_A", "lora_C"), "no factor of a LoRA"),
        (lambda d: rename_tensor(d, "layers.0", "layers.9"), "has no lora_"),
        (poison, "NaN or Inf"),
    ],
)
def test_broken_adapters(tmp_path: Path, model: Path, damage: Any, expected: str) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 5)
    damage(adapter)
    with pytest.raises(TernError) as error:
        open_adapter(adapter)
    assert expected in str(error.value) and str(adapter) in str(error.value)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", None])
def test_starts_that_leave_the_model_alone(tmp_path: Path, model: Path, init: Any) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 5)
    before = open_adapter(adapter)
    change_config(adapter, init_lora_weights=init)
    assert open_adapter(adapter).factors.keys() == before.factors.keys()


def test_what_merging_a_pissa_adapter_as_a_plain_one_would_do(tmp_path: Path, model: Path) -> None:
    """PEFT takes the principal part out of the weights when it loads such an adapter; W + s B A does not."""
    base = LlamaForCausalLM.from_pretrained(model)
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights="pissa")
    get_peft_model(base, config).save_pretrained(str(tmp_path / "adapter"))
    merged = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(model), tmp_path / "adapter")
    name = "model.layers.0.self_attn.v_proj.weight"
    right = merged.merge_and_unload().state_dict()[name].numpy()
    stored = LlamaForCausalLM.from_pretrained(model).state_dict()[name].numpy()
    np.testing.assert_allclose(right, stored, atol=1e-5)  # nothing was trained

    with pytest.raises(TernError, match="init_lora_weights is 'pissa'"):
        open_adapter(tmp_path / "adapter")
    change_config(tmp_path / "adapter", init_lora_weights=True)
    factors = open_adapter(tmp_path / "adapter").factors[name.removesuffix(".weight")]
    assert np.abs(factors.scale * factors.b @ factors.a).max() > 0.01


def test_adapter_of_another_model(tmp_path: Path, model: Path) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 5)
    for factor in ("lora_A", "lora_B"):
        rename_tensor(adapter, f"layers.0.mlp.down_proj.{factor}", f"layers.7.mlp.down_proj.{factor}")
    with pytest.raises(TernError, match=r"adapts model\.layers\.7\.mlp\.down_proj, which the model does not"):
        convert(model, tmp_path / "out.gguf", PLAIN, adapters=[open_adapter(adapter)])
    assert not (tmp_path / "out.gguf").exists()


def test_a_copy_of_the_embedding_that_differs(tmp_path: Path, model: Path) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 5, target_modules=["embed_tokens"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("base_layer.weight"))
    tensors[name][7, 7] += 1
    save_file(tensors, path)
    with pytest.raises(TernError, match=r"embed_tokens\.base_layer\.weight differs from"):
        convert(model, tmp_path / "out.gguf", PLAIN, adapters=[open_adapter(adapter)])


def test_factors_of_another_width(tmp_path: Path, model: Path) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", 5)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    tensors[name] = tensors[name][:, :64].contiguous()
    save_file(tensors, path)
    with pytest.raises(TernError, match=r"is of shape \[128, 64\].*is of \[128, 128\]"):
        convert(model, tmp_path / "out.gguf", PLAIN, adapters=[open_adapter(adapter)])
