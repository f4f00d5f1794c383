"""The mapping of architectures: rotary layouts, rope scaling, metadata in both spellings, and what is
refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert_models import (
    gemma3_config,
    gemma3_dir,
    llama_config,
    llama_dir,
    random_tensors,
    write_json,
    write_weights,
)
from ggml_tern.convert.architectures import REGISTRY, find_architecture
from ggml_tern.convert.architectures.base import Architecture, Role
from ggml_tern.convert.architectures.config import Config
from ggml_tern.convert.architectures.llama import interleaved_heads
from ggml_tern.convert.architectures.rope import Rope
from ggml_tern.convert.checkpoint import Checkpoint
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.ternarize import Q8_0, TypeChoice
from ggml_tern.errors import TernError

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
    factors = Rope(500000.0, Config(scaling, "config.json")).llama3_factors(128)
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
    expected = Rope(10000.0, Config(scaling, "")).llama3_factors(32)
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


def test_yarn() -> None:
    found = metadata(
        llama_config(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.1,
            }
        )
    )
    scaling = {key.removeprefix("rope.scaling."): value for key, value in found.items() if "scaling" in key}
    assert scaling == {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 128,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_attn_factor": 1.1,
    }


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
        write_json(model / "config.json", llama_config(architectures=names))
        with pytest.raises(TernError) as caught:
            find_architecture(Checkpoint(model))
        message = str(caught.value)
        assert found in message and "config.json" in message
        assert all(known in message for known in REGISTRY)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "128"}, "hidden_size is '128'; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp runs this architecture only with 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope scaling 'dynamic' is not supported; known:"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: has no factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
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
