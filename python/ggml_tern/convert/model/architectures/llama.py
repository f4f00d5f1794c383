"""Llama and the models that share its graph: Llama 1 to 3.x, SmolLM, Falcon3, TriLM, ..., and Mistral."""

from __future__ import annotations

from collections.abc import Iterator

import gguf

from ggml_tern.convert.model.architectures.base import Role, TensorSpec
from ggml_tern.convert.model.architectures.decoder import Decoder
from ggml_tern.convert.model.architectures.rope import COMMON_KINDS
from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_TOKENS


class Llama(Decoder):
    hf_names = ("LlamaForCausalLM",)
    model_types = ("llama",)
    model_arch = gguf.MODEL_ARCH.LLAMA
    rotates_neighbours = True
    rope_kinds = (*COMMON_KINDS, "llama3")

    def read_biases(self) -> frozenset[str]:
        biases: set[str] = set()
        if self.config.boolean("attention_bias", False):
            biases |= {"q", "k", "v", "o"}
        if self.config.boolean("mlp_bias", False):
            biases |= {"gate", "up", "down"}
        return frozenset(biases)

    def tensors(self) -> Iterator[TensorSpec]:
        factors = self.rope.llama3_factors(self.head_dim)
        if factors is not None:
            name = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS] + ".weight"
            yield TensorSpec(name, factors.shape, Role.VECTOR, values=factors)
        yield from super().tensors()


class Mistral(Llama):
    """Llama's graph as it is; some releases attend through a sliding window, which that graph does not."""

    hf_names = ("MistralForCausalLM",)
    model_types = ("mistral",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # The transformers class takes a missing key for 4096, and null for no window.
        if not config.is_null("sliding_window"):
            self.note_sliding_window(config.integer("sliding_window", 4096, most=MAX_TOKENS))

    def read_biases(self) -> frozenset[str]:
        self.config.require("attention_bias", False, False)
        return frozenset()
