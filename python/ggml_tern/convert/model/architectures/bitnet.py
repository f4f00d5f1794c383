"""BitNet b1.58 as transformers has it: a norm before each of the two output projections, squared ReLU.

llama.cpp's graph of this architecture has SiLU where the released model has squared ReLU (its pull request
25885), and no other graph has these norms. A file says which one it wants under the key that other
architectures of llama.cpp read, and the plug-in turns the one into the other in the products with gates of
its own types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import gguf

from ggml_tern import _core
from ggml_tern.convert.model.architectures.base import Role, TensorSpec
from ggml_tern.convert.model.architectures.decoder import Decoder
from ggml_tern.convert.read.config import Config

#: The file's word on the activation of the gate, "silu" where it is missing.
ACTIVATION_KEY = "bitnet.hidden_activation"


def notes_on_squared_relu(types: Mapping[str, int]) -> list[str]:
    """What to know of a file with squared ReLU whose tensors, by their names, have these types."""
    gates = {type_id for name, type_id in types.items() if name.endswith(".ffn_gate.weight")}
    if gates <= {_core.TYPE_PTQ1_0, _core.TYPE_PQ2_0}:
        return []
    return [
        "llama.cpp computes SiLU where this model has squared ReLU, which spoils its answers; convert with "
        "--type ptq1_0 or pq2_0, for which ggml-tern computes it"
    ]


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
