"""BitNet b1.58 as transformers has it: a norm before each of the two output projections, squared ReLU.

llama.cpp's graph of this architecture has SiLU where the released model has squared ReLU (its pull request
25885), and no other graph has these norms. A file says which one it wants under the key that other
architectures of llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf

from ggml_tern.convert.architectures.base import Role, TensorSpec
from ggml_tern.convert.architectures.config import Config
from ggml_tern.convert.architectures.decoder import Decoder


class BitNet(Decoder):
    hf_names = ("BitNetForCausalLM",)
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
        if self.activation == "relu2":
            self.notes.append(
                "llama.cpp computes SiLU where this model has squared ReLU, which spoils its answers; "
                "bitnet.hidden_activation in the file says relu2 to a host that can do better"
            )

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        if self.activation != "silu":
            writer.add_string(f"{writer.arch}.hidden_activation", self.activation)

    def attention(self, prefix: str) -> Iterator[TensorSpec]:
        yield from super().attention(prefix)
        yield self._sub_norm(prefix + "inner_attn_ln", prefix + "attn_sub_norm", self.n_embd)

    def mlp(self, prefix: str) -> Iterator[TensorSpec]:
        yield from super().mlp(prefix)
        yield self._sub_norm(prefix + "ffn_layernorm", prefix + "ffn_sub_norm", self.n_ff)

    def _sub_norm(self, known_as: str, source: str, size: int) -> TensorSpec:
        """gguf-py's tensor map has these norms under the names of an older release only."""
        return self.spec(known_as + ".weight", (size,), Role.VECTOR, sources=(source + ".weight",))
