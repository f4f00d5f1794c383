"""Gemma 3, the text model: on its own, or as the language model of the vision checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import gguf

from ggml_tern.convert.model.architectures.base import Architecture, Role, TensorSpec
from ggml_tern.convert.model.architectures.rope import Rope
from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_TOKENS, MAX_VOCABULARY

#: Every sixth layer attends to everything, the others to a sliding window: llama.cpp's default as well as
#: Google's.
_PATTERN = 6


class Gemma3(Architecture):
    hf_names = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    model_types = ("gemma3", "gemma3_text")
    model_arch = gguf.MODEL_ARCH.GEMMA3
    tied_by_default = True
    left_out: Mapping[str, str] = {
        "vision_tower.": "the vision tower",
        "multi_modal_projector.": "the vision tower",
    }

    def __init__(self, config: Config) -> None:
        # The vision checkpoints nest the text model's configuration, and leave out what equals the defaults
        # of transformers' Gemma3TextConfig, which are therefore repeated below.
        super().__init__(config.text_model())
        config = self.config
        self._vocab_size = config.integer("vocab_size", 262208, most=MAX_VOCABULARY)
        self.n_embd = config.integer("hidden_size", 2304)
        self.n_ff = config.integer("intermediate_size", 9216)
        self.n_heads = config.integer("num_attention_heads", 8)
        self.n_kv_heads = config.integer("num_key_value_heads", 4)
        self.head_dim = config.integer("head_dim", 256)
        self.check_heads(self.n_heads, self.n_kv_heads, self.head_dim)
        self.window = config.integer("sliding_window", 4096, most=MAX_TOKENS)
        self.global_rope, self.local_rope = self._read_ropes()
        self.sliding = self._read_sliding()
        self._check_graph()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _read_ropes(self) -> tuple[Rope, Rope]:
        """The rotary embeddings of the global and of the sliding-window layers."""
        parameters = self.config.section("rope_parameters")
        full = parameters.section("full_attention") if parameters is not None else None
        sliding = parameters.section("sliding_attention") if parameters is not None else None
        base = self.config.number("rope_theta", 1_000_000.0)
        local_base = self.config.number("rope_local_base_freq", 10_000.0)
        if full is not None:
            global_rope = Rope(full.number("rope_theta", base), full)
        else:
            global_rope = Rope(base, self.config.section("rope_scaling"))
        local_rope = Rope(sliding.number("rope_theta", local_base) if sliding else local_base, sliding)
        return global_rope, local_rope

    def _read_sliding(self) -> list[bool]:
        """For each layer, whether its attention is limited to the window."""
        kinds = self.config.strings("layer_types")
        if kinds:
            if len(kinds) != self.n_blocks or not set(kinds) <= {"sliding_attention", "full_attention"}:
                raise self.config.error(
                    f"layer_types has {len(kinds)} entries of {', '.join(sorted(set(kinds)))}; expected "
                    f"{self.n_blocks} of sliding_attention and full_attention"
                )
            return [kind == "sliding_attention" for kind in kinds]
        pattern = self.config.integer(
            "sliding_window_pattern", self.config.integer("_sliding_window_pattern", _PATTERN)
        )
        return [(layer + 1) % pattern != 0 for layer in range(self.n_blocks)]

    def _check_graph(self) -> None:
        """Refuse what llama.cpp's Gemma 3 graph would silently compute otherwise."""
        config = self.config
        config.require("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        config.require("attention_bias", False, False)
        config.require("attn_logit_softcapping", None, None)
        config.require("use_bidirectional_attention", False, False)
        if self.local_rope.kind != "default":
            raise config.error(
                f"the sliding layers' rope scaling is {self.local_rope.kind!r}; expected 'default'"
            )
        # llama.cpp knows the 27B, whose scale differs, by its number of blocks.
        scale = self.n_embd // self.n_heads if self.n_blocks == 62 else self.head_dim
        config.require("query_pre_attn_scalar", 256, scale)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(self.config.integer("max_position_embeddings", 131072, most=MAX_TOKENS))
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_blocks)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(self.config.number("rms_norm_eps", 1e-6))
        writer.add_rope_freq_base(self.global_rope.base)
        self.global_rope.add_scaling(writer)
        if any(self.sliding):
            writer.add_sliding_window(self.window)
            writer.add_rope_freq_base_swa(self.local_rope.base)
            if self.sliding != [(layer + 1) % _PATTERN != 0 for layer in range(self.n_blocks)]:
                writer.add_sliding_window_pattern(self.sliding)
        if self.config.has("final_logit_softcapping"):
            writer.add_final_logit_softcapping(self.config.number("final_logit_softcapping"))

    def tensors(self) -> Iterator[TensorSpec]:
        n_embd, n_ff = self.n_embd, self.n_ff
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim

        def norm(source: str, size: int) -> TensorSpec:
            # Gemma's RMSNorm multiplies by 1 + weight; llama.cpp's multiplies by the weight.
            return self.spec(source, (size,), Role.VECTOR, shift=1.0)

        yield self.spec("model.embed_tokens.weight", (self.vocab_size, n_embd), Role.EMBEDDING)
        yield norm("model.norm.weight", n_embd)
        if not self.tied:
            yield self.spec("lm_head.weight", (self.vocab_size, n_embd), Role.HEAD)
        for block in range(self.n_blocks):
            prefix = f"model.layers.{block}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            yield norm(prefix + "input_layernorm.weight", n_embd)
            yield self.spec(attention + "q_proj.weight", (n_q, n_embd), Role.MATRIX)
            yield norm(attention + "q_norm.weight", self.head_dim)
            yield self.spec(attention + "k_proj.weight", (n_kv, n_embd), Role.MATRIX)
            yield norm(attention + "k_norm.weight", self.head_dim)
            yield self.spec(attention + "v_proj.weight", (n_kv, n_embd), Role.MATRIX)
            yield self.spec(attention + "o_proj.weight", (n_embd, n_q), Role.MATRIX)
            yield norm(prefix + "post_attention_layernorm.weight", n_embd)
            yield norm(prefix + "pre_feedforward_layernorm.weight", n_embd)
            yield self.spec(mlp + "gate_proj.weight", (n_ff, n_embd), Role.MATRIX)
            yield self.spec(mlp + "up_proj.weight", (n_ff, n_embd), Role.MATRIX)
            yield self.spec(mlp + "down_proj.weight", (n_embd, n_ff), Role.MATRIX)
            yield norm(prefix + "post_feedforward_layernorm.weight", n_embd)
