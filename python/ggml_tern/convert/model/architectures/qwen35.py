"""Qwen3.5, 3.6 and 3.8, dense: three layers of Gated DeltaNet, then one of gated full attention.

The text model, on its own or as the language model of a vision checkpoint, with or without its MTP head (a
block that predicts the next token but one, for speculative decoding).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.model.architectures.base import Role, TensorSpec
from ggml_tern.convert.model.architectures.decoder import Decoder
from ggml_tern.convert.read.config import Config

#: transformers' default for how the rotated pairs of a head are dealt out to time, height and width. For text
#: the three positions are one and the same.
_MROPE_SECTION = [11, 11, 10]
_INTERVAL = 4


@lru_cache(maxsize=8)
def tiled_heads(n_key_heads: int, n_value_heads: int, head_dim: int) -> NDArray[np.intp]:
    """The order that turns transformers' value heads into llama.cpp's.

    A key head serves n_value_heads / n_key_heads value heads. transformers groups them by key head: [key
    head, which of its value heads, element]. ggml repeats key heads as a whole, so llama.cpp has [which of
    its value heads, key head, element]. Element i of the result comes from element order[i] of the
    checkpoint.
    """
    elements = np.arange(n_value_heads * head_dim, dtype=np.intp)
    order = elements.reshape(n_key_heads, n_value_heads // n_key_heads, head_dim).swapaxes(0, 1).reshape(-1)
    # All blocks of a model share it.
    order.flags.writeable = False
    return order


def _negative_exp(a_log: NDArray[np.float32]) -> NDArray[np.float32]:
    return -np.exp(a_log)


class Qwen35(Decoder):
    hf_names = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    model_types = ("qwen3_5", "qwen3_5_text")
    model_arch = gguf.MODEL_ARCH.QWEN35
    default_head_dim: ClassVar[int | None] = 256
    default_rotated_part: ClassVar[float | None] = 0.25
    has_qk_norm = True
    norm_shift = 1.0
    left_out: Mapping[str, str] = {
        "visual.": "the vision tower",
        "mtp.": "the MTP head, which predicts a second token for speculative decoding,",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config.text_model())
        config = self.config
        self.linear = self._read_layer_types()
        self.n_key_heads = config.integer("linear_num_key_heads", 16)
        self.n_value_heads = config.integer("linear_num_value_heads", 32)
        self.linear_head_dim = config.integer("linear_key_head_dim", 128)
        self.n_conv = config.integer("linear_conv_kernel_dim", 4)
        config.require("linear_value_head_dim", 128, self.linear_head_dim)
        config.require("attn_output_gate", True, True)
        if self.n_value_heads % self.n_key_heads:
            raise config.error(
                f"linear_num_value_heads is {self.n_value_heads}; expected a multiple of "
                f"linear_num_key_heads, {self.n_key_heads}"
            )
        self.value_heads = self.n_key_heads, self.n_value_heads
        heads = 2 * self.n_key_heads + self.n_value_heads
        self.check_width("all linear heads times linear_key_head_dim", heads * self.linear_head_dim)

    def _read_layer_types(self) -> list[bool]:
        """For each layer, whether it is a Gated DeltaNet."""
        kinds = self.config.strings("layer_types")
        if not kinds:
            interval = self.config.integer("full_attention_interval", _INTERVAL)
            return [(layer + 1) % interval != 0 for layer in range(self.n_blocks)]
        if len(kinds) != self.n_blocks or not set(kinds) <= {"linear_attention", "full_attention"}:
            raise self.config.error(
                f"layer_types has {len(kinds)} entries of {', '.join(sorted(set(kinds)))}; expected "
                f"{self.n_blocks} of linear_attention and full_attention"
            )
        return [kind == "linear_attention" for kind in kinds]

    def keep_mtp_head(self) -> None:
        if not self.config.has("mtp_num_hidden_layers"):
            raise self.config.error("has no mtp_num_hidden_layers, so there is no MTP head to keep")
        self.config.require("mtp_num_hidden_layers", 1, 1)
        self.config.require("mtp_use_dedicated_embeddings", False, False)
        self.left_out = {part: what for part, what in self.left_out.items() if part != "mtp."}
        self.set_mtp_blocks(1)

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_ssm_conv_kernel(self.n_conv)
        writer.add_ssm_state_size(self.linear_head_dim)
        writer.add_ssm_group_count(self.n_key_heads)
        writer.add_ssm_time_step_rank(self.n_value_heads)
        writer.add_ssm_inner_size(self.n_value_heads * self.linear_head_dim)
        writer.add_rope_dimension_sections(self._mrope_section())
        intervals = [
            n
            for n in range(1, self.n_blocks + 2)
            if self.linear == [(layer + 1) % n != 0 for layer in range(self.n_blocks)]
        ]
        if intervals:
            # The least that fits; with no full attention at all, one beyond the last layer.
            writer.add_full_attention_interval(intervals[0])
        else:
            key = f"{writer.arch}.attention.recurrent_layers"
            writer.add_array(key, self.linear + [False] * self.n_mtp_blocks)
        if self.n_mtp_blocks:
            writer.add_nextn_predict_layers(self.n_mtp_blocks)

    def _mrope_section(self) -> list[int]:
        """How the rotated pairs are dealt out to time, height, width and nothing."""
        parameters = self.config.section("rope_parameters") or self.config.section("rope_scaling")
        section = parameters.integers("mrope_section", 4) if parameters is not None else []
        section = section or _MROPE_SECTION
        return section + [0] * (4 - len(section))

    def canonical_name(self, name: str) -> str | None:
        canonical = super().canonical_name(name)
        if canonical is not None and canonical.startswith("mtp.layers."):
            # llama.cpp has the MTP head's block after the others.
            _, _, block, rest = canonical.split(".", 3)
            if block.isdecimal():
                return f"model.layers.{self.n_blocks + int(block)}.{rest}"
        return canonical

    def tensors(self) -> Iterator[TensorSpec]:
        yield from super().tensors()
        if self.n_mtp_blocks:
            yield from self._mtp_head()

    def block(self, block: int) -> Iterator[TensorSpec]:
        prefix = f"model.layers.{block}."
        yield self.norm(prefix + "input_layernorm", self.n_embd)
        if block < self.n_blocks and self.linear[block]:
            yield from self._delta_net(prefix + "linear_attn.", block)
        else:
            yield from self.attention(prefix + "self_attn.")
        yield self.norm(prefix + "post_attention_layernorm", self.n_embd)
        yield from self.mlp(prefix + "mlp.")

    @cached_property
    def _qkv_order(self) -> NDArray[np.intp]:
        """Where each row of in_proj_qkv comes from; queries and keys stay where they are."""
        n_key = self.n_key_heads * self.linear_head_dim
        values = tiled_heads(self.n_key_heads, self.n_value_heads, self.linear_head_dim)
        return np.concatenate([np.arange(2 * n_key, dtype=np.intp), 2 * n_key + values])

    def _delta_net(self, prefix: str, block: int) -> Iterator[TensorSpec]:
        n_embd, n_value_heads = self.n_embd, self.n_value_heads
        n_key = self.n_key_heads * self.linear_head_dim
        n_value = n_value_heads * self.linear_head_dim
        value_order = tiled_heads(self.n_key_heads, n_value_heads, self.linear_head_dim)
        head_order = tiled_heads(self.n_key_heads, n_value_heads, 1)
        qkv_order = self._qkv_order

        yield self.spec(
            prefix + "in_proj_qkv.weight", (2 * n_key + n_value, n_embd), Role.MATRIX, row_order=qkv_order
        )
        yield self.spec(prefix + "in_proj_z.weight", (n_value, n_embd), Role.MATRIX, row_order=value_order)
        # One row a head, which steers how fast the head forgets and learns: small, and not for rounding.
        for name in ("in_proj_a", "in_proj_b"):
            yield self.spec(
                f"{prefix}{name}.weight", (n_value_heads, n_embd), Role.VECTOR, row_order=head_order
            )
        yield self.spec(
            prefix + "conv1d.weight", (2 * n_key + n_value, self.n_conv), Role.VECTOR, row_order=qkv_order
        )
        yield self.spec(
            prefix + "dt_proj.bias",
            (n_value_heads,),
            Role.VECTOR,
            sources=(prefix + "dt_bias",),
            row_order=head_order,
        )
        yield self.spec(
            prefix + "A_log", (n_value_heads,), Role.VECTOR, row_order=head_order, function=_negative_exp
        )
        # The one norm here whose weight is not off by one.
        yield self.spec(prefix + "norm.weight", (self.linear_head_dim,), Role.VECTOR)
        yield self.spec(prefix + "out_proj.weight", (n_embd, n_value), Role.MATRIX, column_order=value_order)

    def attention(self, prefix: str) -> Iterator[TensorSpec]:
        n_q, n_kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        # Every head's query is followed by the gate of its output.
        yield from self.projection(prefix, "q", 2 * n_q, self.n_embd)
        yield from self.projection(prefix, "k", n_kv, self.n_embd)
        yield from self.projection(prefix, "v", n_kv, self.n_embd)
        yield from self.projection(prefix, "o", self.n_embd, n_q)
        yield self.norm(prefix + "q_norm", self.head_dim)
        yield self.norm(prefix + "k_norm", self.head_dim)

    def _mtp_head(self) -> Iterator[TensorSpec]:
        """The block that predicts the next token but one; gguf-py has no names for what joins it on."""
        block, n_embd = self.n_blocks, self.n_embd
        yield from self.block(block)
        yield TensorSpec(
            f"blk.{block}.nextn.eh_proj.weight", (n_embd, 2 * n_embd), Role.MATRIX, ("mtp.fc.weight",)
        )
        for name, source in (
            ("enorm", "mtp.pre_fc_norm_embedding.weight"),
            ("hnorm", "mtp.pre_fc_norm_hidden.weight"),
            ("shared_head_norm", "mtp.norm.weight"),
        ):
            yield TensorSpec(
                f"blk.{block}.nextn.{name}.weight",
                (n_embd,),
                Role.VECTOR,
                (source,),
                shift=self.norm_shift,
            )
