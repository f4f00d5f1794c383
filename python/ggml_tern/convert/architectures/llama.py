"""Llama and the models that share its graph (Llama 1 to 3.x, SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.architectures.base import Architecture, Role, TensorSpec
from ggml_tern.convert.architectures.config import Config
from ggml_tern.convert.architectures.rope import read_rope


def interleaved_heads(n_heads: int, head_dim: int) -> NDArray[np.intp]:
    """The row order that turns transformers' rotary layout into llama.cpp's.

    transformers pairs row j of a head with row j + head_dim/2; llama.cpp's Llama graph pairs rows 2j and 2j +
    1. Output row i of the result comes from row order[i] of the checkpoint.
    """
    rows = np.arange(n_heads * head_dim, dtype=np.intp)
    return rows.reshape(n_heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


class Llama(Architecture):
    hf_names = ("LlamaForCausalLM",)
    model_arch = gguf.MODEL_ARCH.LLAMA
    tied_by_default = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._vocab_size = config.integer("vocab_size")
        self.n_embd = config.integer("hidden_size")
        self.n_ff = config.integer("intermediate_size")
        self.n_heads = config.integer("num_attention_heads")
        self.n_kv_heads = config.integer("num_key_value_heads", self.n_heads)
        self.head_dim = config.integer("head_dim", self.n_embd // self.n_heads)
        self.rope = read_rope(config, default_base=10000.0)
        config.require("hidden_act", "silu", "silu")
        config.require("partial_rotary_factor", 1.0, 1.0)
        self.attention_bias = config.boolean("attention_bias", False)
        self.mlp_bias = config.boolean("mlp_bias", False)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_vocab_size(self.vocab_size)
        writer.add_context_length(self.config.integer("max_position_embeddings", 2048))
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_blocks)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_kv_heads)
        writer.add_layer_norm_rms_eps(self.config.number("rms_norm_eps", 1e-6))
        writer.add_rope_freq_base(self.rope.base)
        writer.add_rope_dimension_count(self.head_dim)
        # llama.cpp takes the head size to be n_embd / n_heads unless told.
        if self.head_dim * self.n_heads != self.n_embd:
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        self.rope.add_scaling(writer)

    def tensors(self) -> Iterator[TensorSpec]:
        n_embd, n_ff = self.n_embd, self.n_ff
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        q_order = interleaved_heads(self.n_heads, self.head_dim)
        k_order = interleaved_heads(self.n_kv_heads, self.head_dim)

        yield self.spec("model.embed_tokens.weight", (self.vocab_size, n_embd), Role.EMBEDDING)
        yield self.spec("model.norm.weight", (n_embd,), Role.VECTOR)
        if not self.tied:
            yield self.spec("lm_head.weight", (self.vocab_size, n_embd), Role.HEAD)
        factors = self.rope.llama3_factors(self.head_dim)
        if factors is not None:
            name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
            yield TensorSpec(name, factors.shape, Role.VECTOR, values=factors)

        for block in range(self.n_blocks):
            prefix = f"model.layers.{block}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            yield self.spec(prefix + "input_layernorm.weight", (n_embd,), Role.VECTOR)
            yield self.spec(attention + "q_proj.weight", (n_q, n_embd), Role.MATRIX, row_order=q_order)
            yield self.spec(attention + "k_proj.weight", (n_kv, n_embd), Role.MATRIX, row_order=k_order)
            yield self.spec(attention + "v_proj.weight", (n_kv, n_embd), Role.MATRIX)
            yield self.spec(attention + "o_proj.weight", (n_embd, n_q), Role.MATRIX)
            if self.attention_bias:
                yield self.spec(attention + "q_proj.bias", (n_q,), Role.VECTOR, row_order=q_order)
                yield self.spec(attention + "k_proj.bias", (n_kv,), Role.VECTOR, row_order=k_order)
                yield self.spec(attention + "v_proj.bias", (n_kv,), Role.VECTOR)
                yield self.spec(attention + "o_proj.bias", (n_embd,), Role.VECTOR)
            yield self.spec(prefix + "post_attention_layernorm.weight", (n_embd,), Role.VECTOR)
            yield self.spec(mlp + "gate_proj.weight", (n_ff, n_embd), Role.MATRIX)
            yield self.spec(mlp + "up_proj.weight", (n_ff, n_embd), Role.MATRIX)
            yield self.spec(mlp + "down_proj.weight", (n_embd, n_ff), Role.MATRIX)
            if self.mlp_bias:
                yield self.spec(mlp + "gate_proj.bias", (n_ff,), Role.VECTOR)
                yield self.spec(mlp + "up_proj.bias", (n_ff,), Role.VECTOR)
                yield self.spec(mlp + "down_proj.bias", (n_embd,), Role.VECTOR)
