"""The decoder that most families share; a family says only where it differs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.model.architectures.base import Architecture, Role, TensorSpec
from ggml_tern.convert.model.architectures.rope import COMMON_KINDS, read_rope, rotated_part
from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_TOKENS, MAX_VOCABULARY


@lru_cache(maxsize=8)
def interleaved_heads(n_heads: int, head_dim: int) -> NDArray[np.intp]:
    """The row order that turns transformers' rotary layout into that of llama.cpp's Llama graph.

    transformers pairs row j of a head with row j + head_dim/2; the Llama graph pairs rows 2j and 2j + 1.
    Output row i of the result comes from row order[i] of the checkpoint.
    """
    rows = np.arange(n_heads * head_dim, dtype=np.intp)
    order = rows.reshape(n_heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
    # All blocks of a model share it.
    order.flags.writeable = False
    return order


class Decoder(Architecture):
    """Blocks of grouped-query attention with rotary embedding and a gated MLP, each behind an RMS norm.

    A family sets the class attributes and, where its blocks have other tensors, overrides `attention`, `mlp`
    or `block`.

    Attributes:
        n_embd, n_ff, n_heads, n_kv_heads, head_dim: sizes, as llama.cpp calls them.
        n_rot: how many elements of a head are rotated, the first ones.
        rope: the rotary embedding.
        activation: `hidden_act`, the activation of the gate.
        biases: the projections that carry a bias, some of q, k, v, o, gate, up, down.
    """

    tied_by_default = False
    #: `rope_theta`, `rms_norm_eps` and `head_dim` of the transformers class when config.json does not give
    #: them; None: the width divided by the heads.
    default_rope_base: ClassVar[float] = 10000.0
    default_norm_eps: ClassVar[float] = 1e-6
    default_head_dim: ClassVar[int | None] = None
    #: The kinds of rope scaling that llama.cpp's graph computes.
    rope_kinds: ClassVar[tuple[str, ...]] = COMMON_KINDS
    #: `partial_rotary_factor` of the transformers class when config.json does not give it; None: llama.cpp's
    #: graph rotates whole heads.
    default_rotated_part: ClassVar[float | None] = None
    #: `hidden_act` of the transformers class when config.json does not give it.
    default_activation: ClassVar[str] = "silu"
    #: The activations of the gate that can be converted; all graphs here compute SiLU.
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    #: Whether llama.cpp's graph rotates neighbouring rows of a head, and not, as transformers, its halves.
    rotates_neighbours: ClassVar[bool] = False
    #: Whether llama.cpp's graph takes a head size other than the width divided by the heads.
    any_head_dim: ClassVar[bool] = True
    #: Whether the queries and keys of every head are normalized before the rotation.
    has_qk_norm: ClassVar[bool] = False
    #: What transformers adds to a norm's weight before it multiplies, and llama.cpp does not.
    norm_shift: ClassVar[float] = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        config = self.config
        self._vocab_size = config.integer("vocab_size", most=MAX_VOCABULARY)
        self.n_embd = config.integer("hidden_size")
        self.n_ff = config.integer("intermediate_size")
        self.n_heads = config.integer("num_attention_heads")
        self.n_kv_heads = config.integer("num_key_value_heads", self.n_heads)
        self.n_context = config.integer("max_position_embeddings", 2048, most=MAX_TOKENS)
        self.head_dim = config.integer("head_dim", self.default_head_dim or self.n_embd // self.n_heads)
        self.check_heads(self.n_heads, self.n_kv_heads, self.head_dim)
        self.rope = read_rope(config, self.default_rope_base, self.rope_kinds)
        part = rotated_part(config, self.default_rotated_part or 1.0)
        if part != 1.0 and self.default_rotated_part is None:
            raise config.error(
                f"partial_rotary_factor is {part}; llama.cpp runs this architecture only with 1.0"
            )
        self.n_rot = int(self.head_dim * part)
        if self.n_rot < 2 or self.n_rot % 2:
            raise config.error(
                f"partial_rotary_factor is {part}, which rotates {self.n_rot} of {self.head_dim} elements; "
                "expected an even number of them"
            )
        self.biases = self.read_biases()
        self.activation = config.string("hidden_act", self.default_activation)
        if self.activation not in self.activations:
            raise config.error(
                f"hidden_act is {self.activation!r}; llama.cpp runs this architecture only with "
                f"{' or '.join(map(repr, self.activations))}"
            )
        if not self.any_head_dim and self.head_dim * self.n_heads != self.n_embd:
            raise config.error(
                f"head_dim is {self.head_dim}; llama.cpp runs this architecture only with hidden_size / "
                f"num_attention_heads, here {self.n_embd / self.n_heads:g}"
            )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def read_biases(self) -> frozenset[str]:
        """The projections that carry a bias; the graphs of most families add none."""
        self.config.require("attention_bias", False, False)
        return frozenset()

    def note_sliding_window(self, window: int) -> None:
        """Note that the model attends to the last `window` tokens only, where llama.cpp's graph attends to
        all."""
        if window < self.n_context:
            self.notes.append(
                f"the model attends to the last {window} tokens, llama.cpp's "
                f"{gguf.MODEL_ARCH_NAMES[self.model_arch]} to all: they agree in contexts of up to {window}"
            )

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_vocab_size(self.vocab_size)
        writer.add_context_length(self.n_context)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_blocks + self.n_mtp_blocks)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_heads)
        writer.add_head_count_kv(self.n_kv_heads)
        writer.add_layer_norm_rms_eps(self.config.number("rms_norm_eps", self.default_norm_eps))
        writer.add_rope_freq_base(self.rope.base)
        writer.add_rope_dimension_count(self.n_rot)
        # llama.cpp takes the head size to be n_embd / n_heads unless told.
        if self.head_dim * self.n_heads != self.n_embd:
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        self.rope.add_scaling(writer)

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.spec("model.embed_tokens.weight", (self.vocab_size, self.n_embd), Role.EMBEDDING)
        yield self.norm("model.norm", self.n_embd)
        if not self.tied:
            yield self.spec("lm_head.weight", (self.vocab_size, self.n_embd), Role.HEAD)
        for block in range(self.n_blocks):
            yield from self.block(block)

    def block(self, block: int) -> Iterator[TensorSpec]:
        """The tensors of one block, counted from 0."""
        prefix = f"model.layers.{block}."
        yield self.norm(prefix + "input_layernorm", self.n_embd)
        yield from self.attention(prefix + "self_attn.")
        yield self.norm(prefix + "post_attention_layernorm", self.n_embd)
        yield from self.mlp(prefix + "mlp.")

    def attention(self, prefix: str) -> Iterator[TensorSpec]:
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        q_order = k_order = None
        if self.rotates_neighbours:
            q_order = interleaved_heads(self.n_heads, self.head_dim)
            k_order = interleaved_heads(self.n_kv_heads, self.head_dim)
        yield from self.projection(prefix, "q", n_q, self.n_embd, q_order)
        yield from self.projection(prefix, "k", n_kv, self.n_embd, k_order)
        yield from self.projection(prefix, "v", n_kv, self.n_embd)
        yield from self.projection(prefix, "o", self.n_embd, n_q)
        if self.has_qk_norm:
            yield self.norm(prefix + "q_norm", self.head_dim)
            yield self.norm(prefix + "k_norm", self.head_dim)

    def mlp(self, prefix: str) -> Iterator[TensorSpec]:
        yield from self.projection(prefix, "gate", self.n_ff, self.n_embd)
        yield from self.projection(prefix, "up", self.n_ff, self.n_embd)
        yield from self.projection(prefix, "down", self.n_embd, self.n_ff)

    def projection(
        self, prefix: str, name: str, n_out: int, n_in: int, row_order: NDArray[np.intp] | None = None
    ) -> Iterator[TensorSpec]:
        """A matrix, and its bias where `biases` says so."""
        source = f"{prefix}{name}_proj"
        yield self.spec(source + ".weight", (n_out, n_in), Role.MATRIX, row_order=row_order)
        if name in self.biases:
            yield self.spec(source + ".bias", (n_out,), Role.VECTOR, row_order=row_order)

    def norm(self, source: str, size: int) -> TensorSpec:
        return self.spec(source + ".weight", (size,), Role.VECTOR, shift=self.norm_shift)
