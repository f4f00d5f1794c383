"""No number in a file ends in a traceback or takes gigabytes: each is replaced by others that make no sense,
in a process whose memory is bounded; what comes of it is a model, or one line that says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert_models import (
    Tensors,
    bitnet_config,
    byte_level_tokenizer,
    gemma3_config,
    llama_config,
    mistral_config,
    qwen2_config,
    qwen3_config,
    qwen3_moe_config,
    qwen35_config,
    smollm_steps,
    write_byte_level,
    write_json,
    write_weights,
)
from ggml_tern.convert.model.architectures import REGISTRY
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.read.config import Config
from ggml_tern.errors import TernError
from ggml_tern.plan.header import read_model
from ggml_tern.tensors.types import Q8_0
from model_headers import hybrid_header
from reference import ROOT

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
QWEN35_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.5,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
#: A configuration of every family, with all the numbers that it may hold.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": llama_config(head_dim=32, rope_scaling=LLAMA3),
    "llama with yarn": llama_config(rope_scaling=YARN | {"attention_factor": 1.2}),
    "llama with mscale": llama_config(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}),
    "mistral": mistral_config(sliding_window=128),
    "qwen2": qwen2_config(use_sliding_window=True, sliding_window=96, max_window_layers=1),
    "qwen3": qwen3_config(rope_scaling=LINEAR),
    "qwen3 moe": qwen3_moe_config(num_local_experts=8),
    "bitnet": bitnet_config(),
    "qwen3.5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": qwen35_config(
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
            mtp_num_hidden_layers=1,
            rope_parameters=QWEN35_ROPE,
        ),
    },
    "gemma 3": gemma3_config(
        sliding_window_pattern=6, final_logit_softcapping=30.0, rope_parameters={"full_attention": LINEAR}
    ),
}
GENERATION = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "typical_p": 0.9,
    "eos_token_id": [1, 2],
    "suppress_tokens": [7],
    "penalty_last_n": 64,
    "mirostat": 2,
    "mirostat_tau": 5.0,
    "sequence": 7,
}


def checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """A model directory of zeros in the shapes of a configuration."""
    directory.mkdir()
    write_json(directory / "config.json", config)
    architecture = REGISTRY[config["architectures"][0]](Config(config, "config.json"))
    tensors: Tensors = {}
    for spec in architecture.tensors():
        shape = spec.source_shape or (spec.shape if len(spec.sources) == 1 else spec.shape[1:])
        tensors |= {source: np.zeros(shape, np.float32) for source in spec.sources}
    write_weights(directory, tensors)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory


def run(*arguments: object) -> None:
    """Nothing that does not end well, and many cases."""
    script = ROOT / "tests" / "hostile_numbers.py"
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *bad, count = done.stdout.splitlines()
    assert bad == []
    assert int(count.split()[0]) > 100


@pytest.mark.parametrize("name", CONFIGS)
def test_config(tmp_path: Path, name: str) -> None:
    run("checkpoint", checkpoint(tmp_path / "hf", CONFIGS[name]))


def test_generation_config_and_adapter(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "hf", llama_config(num_hidden_layers=1))
    write_json(directory / "generation_config.json", GENERATION | {"sequence": "ks"})
    adapter = directory / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}}
    write_json(adapter / "adapter_config.json", settings | {"alpha_pattern": {"q_proj": 8.0}})
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"lora_A": np.ones((2, 128), np.float32), "lora_B": np.ones((128, 2), np.float32)}
    save_file(
        {f"{prefix}.{name}.weight": value for name, value in factors.items()},
        adapter / "adapter_model.safetensors",
    )
    run("checkpoint", directory)


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    """As tern plan and tern serve read them, and ternconv, which converts such a file again."""
    run("keys", tmp_path)


# ---- what is said ----


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 200_000}, "num_hidden_layers is 200000; expected an integer from 1 to 512"),
        ({"head_dim": 33}, "head_dim .* is 33; expected an even number"),
        ({"head_dim": 10**30}, "head_dim is 1(0{30}); expected an integer from 1 to 1048576"),
        ({"rope_theta": 10**400}, r"rope_theta is 10{59}… \(401 characters\); expected a number from 1e-18"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; expected a number"),
        (
            {"num_attention_heads": 3},
            "num_key_value_heads is 2, which does not divide num_attention_heads, 3",
        ),
        ({"num_attention_heads": 2**19, "head_dim": 64}, "num_attention_heads times head_dim is 33554432"),
        ({"vocab_size": 2**25}, "vocab_size is 33554432; expected an integer from 1 to 16777216"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings is .* to 2147483647"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps is 1e-320; expected a number from 1e-18 to 1e.18"),
    ],
)
def test_a_checkpoint_names_file_key_value_and_bounds(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    directory = checkpoint(tmp_path / "hf", llama_config())
    write_json(directory / "config.json", llama_config(**changes))
    with pytest.raises(TernError, match=f"^{directory / 'config.json'}: {expected}"):
        convert(directory, tmp_path / "out.gguf", TypeChoice(Q8_0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_count": 2**32 - 1}, "qwen35.block_count is 4294967295; expected an integer from 1 to 512"),
        ({"nextn_predict_layers": 4}, "qwen35.nextn_predict_layers is 4; expected an integer from 0 to 3"),
        ({"ssm.inner_size": 2**40}, "qwen35.ssm.inner_size is 1099511627776; expected an integer from 1 to"),
        ({"context_length": 2**31}, "qwen35.context_length is 2147483648; expected .* to 2147483647"),
        ({"attention.head_count": [2**32] * 4}, r"attention.head_count\[0\] is 4294967296; expected"),
    ],
)
def test_a_gguf_file_names_key_value_and_bounds(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    header = hybrid_header(4, 142, 256, 512, (4, 2, 64), (2, 6, 64))
    path = header.write(tmp_path / "m.gguf", **changes)
    with pytest.raises(TernError, match=f"^{path}: .*{expected}") as caught:
        read_model(path)
    assert str(caught.value).endswith("; convert the model again")


def test_value_heads_of_a_gguf_source(tmp_path: Path) -> None:
    header = hybrid_header(4, 142, 256, 512, (4, 2, 64), (2, 6, 64))
    assert open_model(header.write(tmp_path / "m.gguf")).value_heads == (2, 6)
    path = header.write(tmp_path / "m.gguf", **{"ssm.group_count": 2**63})
    with pytest.raises(TernError, match=r"qwen35\.ssm\.group_count is 9223372036854775808; expected"):
        open_model(path)
