"""Qwen2 (and 2.5), Qwen3, and Qwen3's mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import gguf

from ggml_tern.convert.model.architectures.base import Role, TensorSpec
from ggml_tern.convert.model.architectures.decoder import Decoder
from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_ALL_EXPERTS, MAX_EXPERTS, MAX_TOKENS


class Qwen2(Decoder):
    """Biases on q, k and v. Layers from `max_window_layers` on may attend through a sliding window."""

    hf_names = ("Qwen2ForCausalLM",)
    model_types = ("qwen2",)
    model_arch = gguf.MODEL_ARCH.QWEN2
    any_head_dim = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.boolean("use_sliding_window", False) and self._has_sliding_layers():
            self.note_sliding_window(config.integer("sliding_window", 4096, most=MAX_TOKENS))

    def _has_sliding_layers(self) -> bool:
        kinds = self.config.strings("layer_types")
        if kinds:
            return "sliding_attention" in kinds
        return self.config.integer("max_window_layers", 28, least=0) < self.n_blocks

    def read_biases(self) -> frozenset[str]:
        return frozenset(("q", "k", "v"))


class Qwen3(Qwen2):
    """No biases; queries and keys are normalized."""

    hf_names = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    model_arch = gguf.MODEL_ARCH.QWEN3
    any_head_dim = True
    default_head_dim: ClassVar[int | None] = 128
    has_qk_norm = True

    def read_biases(self) -> frozenset[str]:
        self.config.require("attention_bias", False, False)
        return frozenset()


class Qwen3Moe(Qwen3):
    """Qwen3 with a router and experts for the MLP, in every block."""

    hf_names = ("Qwen3MoeForCausalLM",)
    model_types = ("qwen3_moe",)
    model_arch = gguf.MODEL_ARCH.QWEN3MOE
    default_head_dim = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        n_local_experts = config.integer("num_local_experts", 128, most=MAX_EXPERTS)
        self.n_experts = config.integer("num_experts", n_local_experts, most=MAX_EXPERTS)
        self.n_experts_used = config.integer("num_experts_per_tok", 8, most=self.n_experts)
        self.n_expert_ff = config.integer("moe_intermediate_size", 768)
        if self.n_experts * self.n_blocks > MAX_ALL_EXPERTS:
            raise config.error(
                f"num_experts times num_hidden_layers is {self.n_experts * self.n_blocks}; expected at most "
                f"{MAX_ALL_EXPERTS}"
            )
        config.require("norm_topk_prob", False, True)
        config.require("decoder_sparse_step", 1, 1)
        config.require("mlp_only_layers", [], [])

    def _has_sliding_layers(self) -> bool:
        return True

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_expert_count(self.n_experts)
        writer.add_expert_used_count(self.n_experts_used)
        writer.add_expert_feed_forward_length(self.n_expert_ff)

    def mlp(self, prefix: str) -> Iterator[TensorSpec]:
        # The router is small, and a wrong choice of expert costs more than a wrong weight.
        yield self.spec(prefix + "gate.weight", (self.n_experts, self.n_embd), Role.VECTOR)
        for name, n_out, n_in in (
            ("gate", self.n_expert_ff, self.n_embd),
            ("up", self.n_expert_ff, self.n_embd),
            ("down", self.n_embd, self.n_expert_ff),
        ):
            yield self.spec(
                f"{prefix}experts.{name}_proj.weight",
                (self.n_experts, n_out, n_in),
                Role.MATRIX,
                sources=tuple(
                    f"{prefix}experts.{expert}.{name}_proj.weight" for expert in range(self.n_experts)
                ),
            )
