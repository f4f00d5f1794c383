"""The mapping of architectures: rotary layouts, rope scaling, metadata in both spellings, and what is
refused."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert_models import (
    bitnet_config,
    gemma3_config,
    gemma3_dir,
    llama_config,
    llama_dir,
    mistral_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    qwen35_config,
    qwen35_mtp_tensors,
    random_tensors,
    write_json,
    write_weights,
)
from ggml_tern import _core
from ggml_tern.convert.model.architectures import REGISTRY, find_architecture
from ggml_tern.convert.model.architectures.base import Architecture, Role
from ggml_tern.convert.model.architectures.decoder import interleaved_heads
from ggml_tern.convert.model.architectures.qwen35 import tiled_heads
from ggml_tern.convert.model.architectures.rope import Rope
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.model.sources import find_sources
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.read.checkpoint import Checkpoint
from ggml_tern.convert.read.config import Config
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import Q8_0

F64 = npt.NDArray[np.float64]


def architecture(config: dict[str, Any]) -> Architecture:
    return REGISTRY[config["architectures"][0]](Config(config, "config.json"))


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the architecture writes, without its name in front."""
    found = architecture(config)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[found.model_arch])
    found.add_metadata(writer)
    prefix = writer.arch + "."
    return {
        key.removeprefix(prefix): item.value
        for key, item in writer.kv_data[0].items()
        if key.startswith(prefix)
    }


# ---- rotary layout ----


def rotate_halves(x: F64, angles: F64) -> F64:
    """transformers' rotation: element j of a head is paired with j + head_dim/2."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotate_neighbours(x: F64, angles: F64) -> F64:
    """llama.cpp's rotation in the Llama graph: element 2j of a head is paired with 2j + 1."""
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = first * cos - second * sin, second * cos + first * sin
    return out


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half_dim=st.integers(1, 9),
    n_embd=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_reordered_rows_give_the_same_attention_scores(
    groups: int, kv_heads: int, half_dim: int, n_embd: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    heads, head_dim, n_tokens = groups * kv_heads, 2 * half_dim, 5
    wq, wk = (rng.standard_normal((n * head_dim, n_embd)) for n in (heads, kv_heads))
    x = rng.standard_normal((n_tokens, n_embd))
    angles = np.arange(n_tokens)[:, None, None] * 100.0 ** -(np.arange(half_dim) / half_dim)

    def scores(rotate: Any, q: F64, k: F64) -> F64:
        queries = rotate((x @ q.T).reshape(n_tokens, heads, head_dim), angles)
        keys = rotate((x @ k.T).reshape(n_tokens, kv_heads, head_dim), angles).repeat(groups, axis=1)
        result: F64 = np.einsum("thd,shd->hts", queries, keys)
        return result

    order_q, order_k = interleaved_heads(heads, head_dim), interleaved_heads(kv_heads, head_dim)
    np.testing.assert_allclose(
        scores(rotate_neighbours, wq[order_q], wk[order_k]), scores(rotate_halves, wq, wk), atol=1e-9
    )


# ---- rope scaling ----


def test_llama3_factors() -> None:
    """Against the rule of the Llama 3.1 release, frequency by frequency."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = Rope(500000.0, Config(scaling, "config.json"), ("llama3",)).llama3_factors(128)
    assert factors is not None and factors.dtype == np.float32
    kinds = set()
    for i, factor in enumerate(factors):
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            scaled, kind = frequency, "kept"
        elif wavelength > 8192 / 1:
            scaled, kind = frequency / 8, "slowed"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled, kind = (1 - smooth) * frequency / 8 + smooth * frequency, "between"
        kinds.add(kind)
        assert frequency / factor == pytest.approx(scaled, rel=1e-6)
    assert kinds == {"kept", "slowed", "between"}


def test_llama3_scaling_becomes_a_tensor(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = llama_dir(tmp_path / "hf", rope_scaling=scaling)
    output = tmp_path / "out.gguf"
    convert(model, output, TypeChoice(Q8_0, Q8_0))
    reader = gguf.GGUFReader(output)
    tensor = next(t for t in reader.tensors if t.name == "rope_freqs.weight")
    expected = Rope(10000.0, Config(scaling, ""), ("llama3",)).llama3_factors(32)
    assert expected is not None
    assert np.array_equal(tensor.data, expected)
    assert not any("scaling" in key for key in reader.fields)


def test_old_and_new_spelling_mean_the_same() -> None:
    old = llama_config(rope_theta=50000.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = llama_config(
        rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}
    )
    assert metadata(old) == metadata(new)
    assert metadata(new)["rope.freq_base"] == 50000.0
    assert metadata(new)["rope.scaling.factor"] == 2.0

    old = gemma3_config(rope_theta=2e6, rope_local_base_freq=5e3)
    new = gemma3_config(
        rope_theta=None,
        rope_local_base_freq=None,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    )
    assert metadata(old) == metadata(new)
    assert metadata(new)["rope.freq_base"] == 2e6
    assert metadata(new)["rope.freq_base_swa"] == 5e3


def yarn_keys(**changes: Any) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | changes
    found = metadata(llama_config(rope_scaling=scaling))
    return {key.removeprefix("rope.scaling."): value for key, value in found.items() if "scaling" in key}


def test_yarn() -> None:
    plain = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    assert yarn_keys() == plain
    assert yarn_keys(beta_fast=32, beta_slow=1, truncate=True) == plain
    # Relative to what llama.cpp applies by itself, 1 + 0.1 ln(factor).
    own = 1 + 0.1 * math.log(4)
    assert yarn_keys(attention_factor=1.2)["attn_factor"] == pytest.approx(1.2 / own)
    expected = (1 + 0.07 * math.log(4)) / own / own
    assert yarn_keys(mscale=0.7, mscale_all_dim=1.0)["attn_factor"] == pytest.approx(expected)


# ---- metadata ----


def test_llama_metadata() -> None:
    assert metadata(llama_config()) == {
        "vocab_size": 512,
        "context_length": 512,
        "embedding_length": 128,
        "block_count": 2,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 32,
    }
    wide = metadata(llama_config(head_dim=64, num_key_value_heads=None))
    assert (
        wide["attention.key_length"] == wide["attention.value_length"] == wide["rope.dimension_count"] == 64
    )
    assert wide["attention.head_count_kv"] == 4


def test_gemma3_metadata() -> None:
    found = metadata(gemma3_config(final_logit_softcapping=30.0))
    assert found == {
        "context_length": 512,
        "embedding_length": 128,
        "block_count": 7,
        "feed_forward_length": 256,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 32,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "final_logit_softcapping": 30.0,
    }


def test_gemma3_sliding_pattern() -> None:
    """llama.cpp's own pattern, one global layer in six, is not written; another one is."""
    key = "attention.sliding_window_pattern"
    six = ["full_attention" if i == 5 else "sliding_attention" for i in range(7)]
    assert key not in metadata(gemma3_config(layer_types=six))
    assert key not in metadata(gemma3_config(sliding_window_pattern=6))
    assert metadata(gemma3_config(sliding_window_pattern=2))[key] == [
        True, False, True, False, True, False, True
    ]  # fmt: skip
    everywhere = metadata(gemma3_config(layer_types=["full_attention"] * 7))
    assert "attention.sliding_window" not in everywhere


def test_metadata_of_qwen3_moe() -> None:
    found = metadata(qwen3_moe_config())
    assert found["expert_count"] == 8 and found["expert_used_count"] == 2
    assert found["expert_feed_forward_length"] == 64 and found["feed_forward_length"] == 256
    assert found["attention.key_length"] == found["rope.dimension_count"] == 64
    # transformers 5 has another name for it.
    assert metadata(qwen3_moe_config(num_experts=None, num_local_experts=8)) == found


def test_metadata_of_qwen35() -> None:
    found = metadata(qwen35_config())
    assert {
        key: value for key, value in found.items() if key.startswith(("ssm", "rope", "full", "nextn"))
    } == {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 32,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 192,
        "full_attention_interval": 4,
        "rope.freq_base": 10000000.0,
        "rope.dimension_count": 16,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    assert found["block_count"] == 4


@pytest.mark.parametrize(
    ("full", "expected"),
    [
        ([3], {"full_attention_interval": 4}),
        ([1, 3], {"full_attention_interval": 2}),
        ([0, 1, 2, 3], {"full_attention_interval": 1}),
        ([], {"full_attention_interval": 5}),
        ([0, 3], {"attention.recurrent_layers": [False, True, True, False]}),
    ],
)
def test_layer_types_of_qwen35(full: list[int], expected: dict[str, Any]) -> None:
    kinds = ["full_attention" if layer in full else "linear_attention" for layer in range(4)]
    found = metadata(qwen35_config(layer_types=kinds))
    keys = ("full_attention_interval", "attention.recurrent_layers")
    assert {key: found[key] for key in keys if key in found} == expected


@settings(max_examples=30, deadline=None)
@given(n_key=st.integers(1, 4), per_key=st.integers(1, 4), head_dim=st.integers(1, 5))
def test_tiled_heads(n_key: int, per_key: int, head_dim: int) -> None:
    """Value head v belongs to key head v // per_key in transformers, and to v % n_key in llama.cpp."""
    order = tiled_heads(n_key, n_key * per_key, head_dim)
    assert sorted(order) == list(range(n_key * per_key * head_dim))
    for i, source in enumerate(order):
        head, element = divmod(i, head_dim)
        source_head, source_element = divmod(int(source), head_dim)
        assert element == source_element
        assert head % n_key == source_head // per_key
        assert head // n_key == source_head % per_key


# ---- what the user is told ----


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (mistral_config(), None),
        (mistral_config(sliding_window=96), 96),
        (mistral_config(sliding_window=512), None),
        # transformers' default of 4096, where the key is missing.
        ({key: value for key, value in mistral_config().items() if key != "sliding_window"}, None),
        (
            {k: v for k, v in mistral_config(max_position_embeddings=8192).items() if k != "sliding_window"},
            4096,
        ),
        (qwen2_config(sliding_window=96), None),
        (qwen2_config(sliding_window=96, use_sliding_window=True), None),
        (qwen2_config(sliding_window=96, use_sliding_window=True, max_window_layers=1), 96),
        (qwen2_config(sliding_window=96, use_sliding_window=True, max_window_layers=0), 96),
        (qwen3_config(sliding_window=96, use_sliding_window=True, max_window_layers=1), 96),
        (qwen3_moe_config(sliding_window=96, use_sliding_window=True), 96),
    ],
)
def test_sliding_windows_that_the_graph_has_not(config: dict[str, Any], window: int | None) -> None:
    found = architecture(config).notes
    if window is None:
        assert found == []
    else:
        assert len(found) == 1 and f"the last {window} tokens" in found[0] and f"up to {window}" in found[0]


# ---- the MTP head of Qwen3.5 ----


def qwen35_with_mtp(directory: Path) -> Path:
    directory.mkdir()
    tensors = qwen35_mtp_tensors(qwen35_config())
    tensors["model.visual.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
    names = {
        name: name.replace("model.", "model.language_model.", 1) for name in tensors if "visual" not in name
    }
    write_weights(directory, {names.get(name, name): values for name, values in tensors.items()})
    text = qwen35_config(mtp_num_hidden_layers=1)
    del text["architectures"]
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    write_json(directory / "config.json", nested | {"text_config": text, "vision_config": {"depth": 1}})
    return directory


def test_mtp_head_and_vision_tower_are_left_out(tmp_path: Path) -> None:
    checkpoint = Checkpoint(qwen35_with_mtp(tmp_path / "hf"))
    found = find_architecture(checkpoint)
    assert [note.split()[:3] for note in found.notes] == [["the", "MTP", "head,"], ["the", "vision", "tower"]]
    specs = list(found.tensors())
    assert not any("nextn" in spec.name or spec.name.startswith("blk.4.") for spec in specs)
    find_sources(checkpoint, found, specs)


def test_mtp_head_is_kept(tmp_path: Path) -> None:
    """Its block follows the others, and what joins it on is where llama.cpp looks for it."""
    checkpoint = Checkpoint(qwen35_with_mtp(tmp_path / "hf"))
    found = find_architecture(checkpoint, keep_mtp=True)
    assert found.notes == ["the vision tower is left out"]
    specs = {spec.name: spec for spec in found.tensors()}
    find_sources(checkpoint, found, list(specs.values()))
    block = {name.removeprefix("blk.4.") for name in specs if name.startswith("blk.4.")}
    full_attention = {name.removeprefix("blk.3.") for name in specs if name.startswith("blk.3.")}
    joints = {f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    assert block == full_attention | joints
    assert specs["blk.4.nextn.eh_proj.weight"].sources == ("mtp.fc.weight",)
    assert specs["blk.4.attn_q.weight"].sources == ("model.layers.4.self_attn.q_proj.weight",)
    assert (
        found.canonical_name("mtp.layers.0.self_attn.q_proj.weight")
        == "model.layers.4.self_attn.q_proj.weight"
    )
    writer = gguf.GGUFWriter(None, "qwen35")
    found.add_metadata(writer)
    values = {key: item.value for key, item in writer.kv_data[0].items()}
    assert values["qwen35.block_count"] == 5 and values["qwen35.nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (llama_config(), "llama.cpp's llama has no MTP head"),
        (qwen35_config(), "has no mtp_num_hidden_layers"),
        (qwen35_config(mtp_num_hidden_layers=2), "mtp_num_hidden_layers is 2"),
        (
            qwen35_config(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True),
            "mtp_use_dedicated_embeddings is True",
        ),
    ],
)
def test_mtp_heads_that_cannot_be_kept(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(TernError, match=expected):
        architecture(config).keep_mtp_head()


# ---- the vision checkpoints of Gemma 3 ----


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: "language_model." + name,
        lambda name: name.replace("model.", "model.language_model.", 1),
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_language_model_of_a_vision_checkpoint(tmp_path: Path, rename: Any) -> None:
    plain = gemma3_dir(tmp_path / "text")
    text = gemma3_config()
    vision = tmp_path / "vision"
    gemma3_dir(vision)
    write_json(
        vision / "config.json",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {key: value for key, value in text.items() if key != "architectures"},
            "vision_config": {"hidden_size": 32},
        },
    )
    tensors = {rename(name): values for name, values in random_tensors(text).items()}
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = np.zeros((2, 2), np.float32)
    tensors["multi_modal_projector.mm_input_projection_weight"] = np.zeros((2, 2), np.float32)
    write_weights(vision, tensors)

    contents = []
    for directory in (plain, vision):
        output = tmp_path / f"{directory.name}.gguf"
        convert(directory, output, TypeChoice(Q8_0, Q8_0))
        contents.append({t.name: t.data.tobytes() for t in gguf.GGUFReader(output).tensors})
    assert contents[0] == contents[1]


# ---- refusals ----


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    model = llama_dir(tmp_path)
    for names, found in ((["GPTNeoXForCausalLM"], "GPTNeoXForCausalLM"), ([], "no architecture")):
        write_json(model / "config.json", llama_config(architectures=names, model_type="gpt_neox"))
        with pytest.raises(TernError) as caught:
            find_architecture(Checkpoint(model))
        message = str(caught.value)
        assert found in message and "config.json" in message
        assert all(known in message for known in REGISTRY)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "128"}, "hidden_size is '128'; expected an integer from 1 to 1048576"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a number from 1e-18 to 1e\\+18"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp runs this architecture only with 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic"}},
            "rope scaling 'dynamic' is not supported; llama.cpp runs",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}}, "beta_fast is 16"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: has no factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
    ],
)
def test_llama_configurations_that_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(TernError, match=expected):
        metadata(llama_config(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"query_pre_attn_scalar": 168}, "query_pre_attn_scalar is 168; .* only with 64"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
    ],
)
def test_gemma3_configurations_that_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(TernError, match=expected):
        metadata(gemma3_config(**changes))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (mistral_config(attention_bias=True), "attention_bias is True"),
        (
            qwen2_config(use_sliding_window=True, max_window_layers=-1),
            "max_window_layers is -1; expected an integer from 0 to 1048576",
        ),
        (qwen2_config(head_dim=64), "head_dim is 64; llama.cpp runs this architecture only with .* 32"),
        (
            qwen2_config(rope_scaling={"rope_type": "llama3"}),
            "'llama3' is not supported; .* default, linear, yarn",
        ),
        (qwen3_config(attention_bias=True), "attention_bias is True"),
        (qwen3_moe_config(norm_topk_prob=False), "norm_topk_prob is False; .* only with True"),
        (qwen3_moe_config(norm_topk_prob=None), "norm_topk_prob is False"),
        (qwen3_moe_config(mlp_only_layers=[0]), r"mlp_only_layers is \[0\]"),
        (qwen3_moe_config(decoder_sparse_step=2), "decoder_sparse_step is 2"),
        (bitnet_config(hidden_act="gelu"), "hidden_act is 'gelu'; .* only with 'silu' or 'relu2'"),
        (bitnet_config(tie_word_embeddings=None), "tie_word_embeddings is False; .* only with True"),
        (qwen35_config(linear_value_head_dim=64), "linear_value_head_dim is 64; .* only with 32"),
        (qwen35_config(linear_num_value_heads=5), "linear_num_value_heads is 5; expected a multiple of .* 2"),
        (qwen35_config(attn_output_gate=False), "attn_output_gate is False"),
        (qwen35_config(layer_types=["full_attention"]), "layer_types has 1 entries of full_attention"),
        (
            qwen35_config(rope_parameters={"mrope_section": [1, 0]}),
            r"mrope_section\[1\] is 0; expected an integer",
        ),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(TernError, match=expected):
        metadata(config)


def test_keys_without_a_meaning_for_the_graph() -> None:
    """What Falcon3, TriLM, SmolLM and older releases of transformers write besides."""
    more = {
        "attention_dropout": 0.0,
        "bos_token_id": 11,
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    found = architecture(llama_config() | more | {"rope_scaling": None, "head_dim": None})
    assert found.notes == []
    assert metadata(llama_config() | more) == metadata(llama_config())


def test_the_tensors_of_the_released_27b() -> None:
    """Its 851 tensors: 402 that may be ternary, and 96 gates and 353 vectors that are not."""
    found = architecture(
        qwen35_config(
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=False,
            vocab_size=248320,
        )
    )
    specs = list(found.tensors())
    roles = Counter(spec.role for spec in specs)
    assert len(specs) == len({spec.name for spec in specs}) == 851
    assert roles == {Role.MATRIX: 400, Role.EMBEDDING: 1, Role.HEAD: 1, Role.VECTOR: 353 + 96}
    # Value heads change places as a whole, and with them groups of 128.
    order = next(spec.column_order for spec in specs if spec.name == "blk.0.ssm_out.weight")
    assert order is not None
    groups = order.reshape(-1, 128)
    assert (groups[:, 0] % 128 == 0).all() and (np.diff(groups, axis=1) == 1).all()


@pytest.mark.parametrize("activation", ["relu2", None])
def test_squared_relu_of_bitnet(activation: str | None) -> None:
    """The file says so, and so does a note where a gate has a type for which the plug-in cannot mend it:
    llama.cpp's graph has SiLU in its place."""
    helped, not_helped = (
        {"blk.0.ffn_gate.weight": _core.TYPE_PTQ1_0, "blk.1.ffn_gate.weight": gate, "blk.1.ffn_up.weight": 0}
        for gate in (_core.TYPE_PQ2_0, _core.TYPE_TQ2_0)
    )
    config = bitnet_config(hidden_act=activation, tie_word_embeddings=True)
    assert metadata(config)["hidden_activation"] == "relu2"
    found = architecture(config)
    assert found.notes == [] and found.notes_for(helped) == []
    assert len(found.notes_for(not_helped)) == 1 and "squared ReLU" in found.notes_for(not_helped)[0]
    plain = bitnet_config(hidden_act="silu", tie_word_embeddings=True)
    assert "hidden_activation" not in metadata(plain)
    assert architecture(plain).notes == [] == architecture(plain).notes_for(not_helped)


def test_every_tensor_of_an_untied_model_with_biases_has_a_place() -> None:
    found = architecture(llama_config(tie_word_embeddings=False, attention_bias=True, mlp_bias=True))
    specs = {spec.name: spec for spec in found.tensors()}
    assert specs["output.weight"].role is Role.HEAD and specs["token_embd.weight"].role is Role.EMBEDDING
    assert specs["blk.1.attn_k.bias"].shape == (64,)
    assert specs["blk.1.ffn_up.bias"].shape == (256,)
    # q and k are reordered, and their biases with them.
    reordered = {name for name, spec in specs.items() if spec.row_order is not None}
    assert reordered == {
        f"blk.{i}.attn_{x}.{kind}" for i in (0, 1) for x in "qk" for kind in ("weight", "bias")
    }
