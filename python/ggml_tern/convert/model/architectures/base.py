"""What an architecture tells the rest of the converter: its tensors, their names, and its metadata."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_LAYERS, MAX_WIDTH


class Role(enum.Enum):
    """What a tensor is for, which decides its type in the file."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    #: What may be used in other ways than as a matrix of a product: kept in the type that it is stored in.
    OTHER = "other"
    #: Norms, biases and other small tensors: kept in float32.
    VECTOR = "vector"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the GGUF file and how it comes about.

    Attributes:
        name: its name in the GGUF file.
        shape: (n_out, n_in) of a matrix, (n_expert, n_out, n_in) of stacked ones, (n,) of a vector.
        role: what it is for.
        sources: the checkpoint tensors it is made of, as `Architecture.canonical_name` spells them; their
            rows follow one another. Empty for a computed tensor.
        source_shape: the shape of each source; None: `shape`, or its part for each of several. Dimensions of
            1 do not count.
        row_order: output row i of a source is its row row_order[i], for a vector element i; None keeps the
            order.
        column_order: the same for the elements of every row.
        shift: added to every element, in float32.
        function: then applied to the rows, in float32 (such as A = -exp(A_log), or a rotation).
        values: the content of a computed tensor.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    sources: tuple[str, ...] = ()
    source_shape: tuple[int, ...] | None = None
    row_order: NDArray[np.intp] | None = None
    column_order: NDArray[np.intp] | None = None
    shift: float = 0.0
    function: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None
    values: NDArray[np.float32] | None = None

    @property
    def rows_per_source(self) -> int:
        """Rows that each source gives; a vector is one row."""
        n_rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return n_rows // max(1, len(self.sources))


class Architecture(ABC):
    """A model family. A subclass names its checkpoints, lists its tensors and writes its metadata.

    Attributes:
        hf_names: the values of `architectures` in config.json that it serves.
        model_types: the values of `model_type` there, of files that name no architecture.
        model_arch: gguf-py's constant for the llama.cpp architecture.
        n_blocks: the number of transformer blocks.
        vocab_size: rows of the embedding.
        tied: whether the head is the embedding.
        n_mtp_blocks: the number of blocks of a multi-token prediction head, which follow the others.
        value_heads: of a Gated DeltaNet, the key heads and the value heads, which stand in another order in
            checkpoints than in llama.cpp; None without one.
        notes: one line for each thing that llama.cpp will do otherwise, or that is left out.
    """

    hf_names: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]
    model_arch: ClassVar[gguf.MODEL_ARCH]
    #: `tie_word_embeddings` of the transformers class when config.json does not give it.
    tied_by_default: ClassVar[bool]
    #: What is not converted: a part of the tensors' names, and what it is.
    left_out: Mapping[str, str] = {}
    value_heads: tuple[int, int] | None = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.notes: list[str] = []
        self.n_blocks = config.integer("num_hidden_layers", most=MAX_LAYERS)
        self.tied = config.boolean("tie_word_embeddings", self.tied_by_default)
        self.set_mtp_blocks(0)

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Write the architecture's own keys (context length, heads, rope, ...)."""

    @abstractmethod
    def tensors(self) -> Iterable[TensorSpec]:
        """Every tensor of the GGUF file, in file order."""

    def notes_for(self, types: Mapping[str, int]) -> list[str]:
        """One line for each thing that llama.cpp will do otherwise if the tensors have these types.

        Args:
            types: the ggml type id of every tensor of the GGUF file, by its name.
        """
        return []

    def check_heads(self, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
        """Raise TernError for heads that no graph has: a number that the KV heads do not divide, a size that
        does not come in pairs to rotate, or more of both than a vector holds."""
        if n_heads % n_kv_heads:
            raise self.config.error(
                f"num_key_value_heads is {n_kv_heads}, which does not divide num_attention_heads, {n_heads}"
            )
        if head_dim < 2 or head_dim % 2:
            raise self.config.error(
                f"head_dim (or hidden_size / num_attention_heads) is {head_dim}; expected an even number, as "
                "elements are rotated in pairs"
            )
        self.check_width("num_attention_heads times head_dim", n_heads * head_dim)

    def check_width(self, what: str, width: int) -> None:
        """Raise TernError for a vector that is too long."""
        if width > MAX_WIDTH:
            raise self.config.error(f"{what} is {width}; expected at most {MAX_WIDTH}")

    def set_mtp_blocks(self, count: int) -> None:
        """Set how many blocks of an MTP head follow the others."""
        self.n_mtp_blocks = count
        self._names = gguf.get_tensor_name_map(self.model_arch, self.n_blocks + count)

    def keep_mtp_head(self) -> None:
        """Convert the multi-token prediction head too, which is left out otherwise.

        Raises TernError where the model has none, or one that llama.cpp does not run.
        """
        raise self.config.error(
            f"llama.cpp's {gguf.MODEL_ARCH_NAMES[self.model_arch]} has no MTP head, so there is none to keep"
        )

    def canonical_name(self, name: str) -> str | None:
        """The name of a checkpoint tensor as `tensors` spells it; None for one that is not converted.

        Old checkpoints store the rotary frequencies, which follow from the configuration. transformers 4 and
        5 put the language model of a vision checkpoint at different places.
        """
        if self.part_left_out(name) is not None or name.endswith(".rotary_emb.inv_freq"):
            return None
        for prefix, replacement in (
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ):
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name

    def part_left_out(self, name: str) -> str | None:
        """What a checkpoint tensor belongs to that is not converted; None for all others."""
        return next((what for part, what in self.left_out.items() if part in name), None)

    def spec(self, source: str, shape: tuple[int, ...], role: Role, **how: object) -> TensorSpec:
        """The TensorSpec of a checkpoint tensor, named by gguf-py's tensor map.

        With `sources` among `how`, `source` only finds the name.
        """
        name = self._names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise KeyError(f"gguf-py has no name for {source} in {self.model_arch.name}")
        how.setdefault("sources", (source,))
        return TensorSpec(name=name, shape=shape, role=role, **how)  # type: ignore[arg-type]
