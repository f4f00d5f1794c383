"""A model to convert, whatever it comes from: what all floors above know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.sources import Source


class InputModel(ABC):
    """A model to convert. Converting reads it and changes nothing of it.

    Attributes:
        path: the directory or file.
        arch: what llama.cpp calls the architecture.
        specs: the tensors of the GGUF file to write, in file order.
        sources: what each is made of, by its name; opened when it is asked for.
        tied: whether the embedding serves as head.
        rotations: of the tensors that are stored in a rotated basis, by name.
        value_heads: as `Architecture.value_heads`.
        notes: one line for each thing that the user should know.
    """

    path: Path
    arch: str
    specs: list[TensorSpec]
    sources: Mapping[str, list[Source]]
    tied: bool
    rotations: dict[str, _core.Rotation]
    value_heads: tuple[int, int] | None
    notes: list[str]

    @abstractmethod
    def files(self) -> list[Path]:
        """Every file that the conversion may read from: what an output must never overwrite."""

    @abstractmethod
    def add_metadata(self, writer: gguf.GGUFWriter) -> list[str]:
        """Write all keys but those that tell the types. Returns a line for each thing to know about them."""

    @abstractmethod
    def notes_for(self, types: Mapping[str, int]) -> list[str]:
        """One line for each thing to know if the tensors have these ggml type ids, by their names."""

    @property
    def n_weights(self) -> int:
        return sum(int(np.prod(spec.shape, dtype=np.int64)) for spec in self.specs)
