"""BitNet b1.58 as transformers has it: a norm before each of the two output projections, squared ReLU, which
llama.cpp's graph does not have (gguf/bitnet.py tells how it gets it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import gguf

from ggml_tern.convert.model.architectures.base import Role, TensorSpec
from ggml_tern.convert.model.architectures.decoder import Decoder
from ggml_tern.convert.read.config import Config
from ggml_tern.gguf.bitnet import ACTIVATION_KEY, notes_on_squared_relu


class BitNet(Decoder):
    hf_names = ("BitNetForCausalLM",)
    model_types = ("bitnet",)
    model_arch = gguf.MODEL_ARCH.BITNET
    default_rope_base = 500000.0
    default_norm_eps = 1e-5
    default_activation = "relu2"
    activations = ("silu", "relu2")
    any_head_dim = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # llama.cpp's graph knows no head but the embedding.
        config.require("tie_word_embeddings", False, True)

    def notes_for(self, types: Mapping[str, int]) -> list[str]:
        return notes_on_squared_relu(types) if self.activation == "relu2" else []

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        if self.activation != "silu":
            writer.add_string(ACTIVATION_KEY, self.activation)

    def attention(self, prefix: str) -> Iterator[TensorSpec]:
        yield from super().attention(prefix)
        yield self._sub_norm(prefix + "inner_attn_ln", prefix + "attn_sub_norm", self.n_embd)

    def mlp(self, prefix: str) -> Iterator[TensorSpec]:
        yield from super().mlp(prefix)
        yield self._sub_norm(prefix + "ffn_layernorm", prefix + "ffn_sub_norm", self.n_ff)

    def _sub_norm(self, known_as: str, source: str, size: int) -> TensorSpec:
        """gguf-py's tensor map has these norms under the names of an older release only."""
        return self.spec(known_as + ".weight", (size,), Role.VECTOR, sources=(source + ".weight",))
