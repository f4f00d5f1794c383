"""Small models of every family as transformers makes, saves and computes them, and the same in llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llama_cpp import Llama
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from convert_models import byte_level_tokenizer, smollm_steps, write_byte_level
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.tensors.types import F32, TensorType


def served_logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    # A float32 KV cache and no flash attention, which would round to float16.
    llama = Llama(
        str(path), n_ctx=128, n_threads=2, n_gpu_layers=0, logits_all=True, type_k=0, type_v=0,
        flash_attn=False, verbose=False,
    )  # fmt: skip
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)], np.float32)
    llama.close()
    return logits


def plain_model(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


#: Sizes that all families share: wide enough for groups of 128 and for logits that mean something.
SIZES: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


QWEN3_MOE = {"head_dim": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 3}


# Two value heads to a key head, in an order of their own.
QWEN35 = {
    "head_dim": 128,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}


LLAMA3 = LLAMA3_SCALING | {"rope_theta": 10000.0}


#: For each family its class, and configurations by name.
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, dict[str, Any]]]] = {
    "llama": (LlamaConfig, {"": {}, "llama3 rope": {"rope_parameters": LLAMA3}}),
    # Falcon3 has heads of 256, TriLM as many key heads as query heads.
    "falcon3": (LlamaConfig, {"": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}}),
    "trilm": (
        LlamaConfig,
        {"": {"num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}},
    ),
    "mistral": (MistralConfig, {"": {"sliding_window": None}, "head 128": {"head_dim": 128}}),
    "qwen2": (
        Qwen2Config,
        {"": {}, "tied": {"tie_word_embeddings": True}, "yarn": {"rope_parameters": YARN}},
    ),
    "qwen3": (
        Qwen3Config,
        {
            "": {"head_dim": 64},
            "head 128, tied": {"head_dim": 128, "tie_word_embeddings": True},
            "yarn": {"head_dim": 64, "rope_parameters": YARN | {"attention_factor": 0.7}},
        },
    ),
    "qwen3moe": (Qwen3MoeConfig, {"": QWEN3_MOE | {"norm_topk_prob": True}}),
    "bitnet": (
        BitNetConfig,
        {
            "": {"tie_word_embeddings": True, "hidden_act": "silu"},
            "squared ReLU": {"tie_word_embeddings": True, "hidden_act": "relu2"},
        },
    ),
    "qwen35": (
        Qwen3_5TextConfig,
        {
            "": QWEN35,
            "small heads": QWEN35 | {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
            "as many value heads": QWEN35 | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
            "layers": QWEN35
            | {"layer_types": [f"{kind}_attention" for kind in ("full", "linear", "linear", "full")]},
            "yarn": QWEN35 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "": {
                "head_dim": 64,
                "query_pre_attn_scalar": 64,
                "sliding_window": 32,
                "num_hidden_layers": 7,
                "tie_word_embeddings": False,
            }
        },
    ),
}


#: About the standard deviation of the logits: neither flat nor certain.
LOGITS = 1.0


#: What stays as it is in a ternary model: tables, and matrices that are not rounded.
NOT_TERNARY = ("embed_tokens", "lm_head", "conv1d", "in_proj_a", "in_proj_b", "mlp.gate.")


def ternary(weights: torch.Tensor) -> torch.Tensor:
    """The weights rounded to -a, 0 and a in groups of 128 along the last dimension; a is an fp16 number."""
    groups = weights.unflatten(-1, (-1, 128))
    scale = groups.abs().mean(dim=-1, keepdim=True).half().float()
    return ((groups / scale).round().clamp(-1, 1) * scale).flatten(-2)


def float_tables(family: str, case: str, matrix: TensorType = F32) -> TypeChoice:
    """Matrices of a type; the embedding, and the head where there is one, stay in float32."""
    config_class, cases = FAMILIES[family]
    tied = config_class(**SIZES | cases[case]).tie_word_embeddings
    return TypeChoice(matrix, F32, None if tied else F32)


def transformers_dir(directory: Path, family: str, case: str = "", *, is_ternary: bool = False) -> Path:
    """A model directory of a family, as transformers saves it: random weights, a byte-level tokenizer."""
    config_class, cases = FAMILIES[family]
    torch.manual_seed(2 + len(family))
    model = AutoModelForCausalLM.from_config(config_class(**SIZES | cases[case]), dtype=torch.float32)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() == 1:
                # Norms, biases, the time constants of Gated DeltaNets: off what they start with.
                values += 0.1 * torch.randn_like(values)
                # Behind these norms, what a block adds would be as loud as the token itself.
                if family == "bitnet" and "sub_norm" in name:
                    values *= 0.3
                if family == "gemma3" and "post_" in name:
                    values -= 0.8
                continue
            values.copy_(torch.randn_like(values) / values.shape[-1] ** 0.5)
            if name.endswith("mlp.gate.weight"):
                # A router that knows what it wants.
                values *= 3.0
            if "linear_attn" in name and ("in_proj_qkv" in name or "conv1d" in name):
                # Keys that resemble queries, as trained ones do: what a Gated DeltaNet computes is
                # normalized, and where a key is at right angles to the query only rounding would be left.
                n_key = model.config.linear_num_key_heads * model.config.linear_key_head_dim
                values[n_key : 2 * n_key].mul_(0.5).add_(values[:n_key])
            if is_ternary and not any(part in name for part in NOT_TERNARY):
                values.copy_(ternary(values))
        # Some tokens are likelier than others; no token is lost among what the blocks add to it, nor so loud
        # that a head which is the embedding hears only the token itself. (Gemma scales the embedding.)
        model.get_output_embeddings().weight.mul_(torch.randn(SIZES["vocab_size"], 1).mul(0.8).exp())
        tied = model.config.tie_word_embeddings
        token_size = 2.0 if family == "gemma3" else 8.0 if tied else 32.0
        model.get_input_embeddings().weight.mul_(token_size)
        norm = model.get_parameter("model.norm.weight")
        shift = 1.0 if family in ("gemma3", "qwen35") else 0.0
        norm.add_(shift).mul_(LOGITS / token_size if tied else LOGITS).sub_(shift)
    model.save_pretrained(directory)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory
