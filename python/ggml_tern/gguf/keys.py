"""Keys of one architecture in a GGUF file, by their kind and between their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.limits import MAX_WIDTH, checked_integer, shown

_WAY_OUT = "convert the model again"


class Keys:
    """The keys `ARCHITECTURE.*` of a file. A wrong or missing one is a TernError that names it."""

    def __init__(self, source: GGUFSource, architecture: str) -> None:
        self._source = source
        self._architecture = architecture

    def value(self, key: str) -> Any:
        """Whatever stands under a key, None for nothing."""
        return self._source.metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
        """An integer from `least` to `most`; `default` where there is none."""
        value = self.value(key)
        if value is None and default is not None:
            return default
        return self._checked(key, value, least, most)

    def per_layer(
        self, key: str, n_layers: int, default: int | None = None, most: int = MAX_WIDTH
    ) -> list[int]:
        """One integer from 0 to `most` for each layer; a single one stands for all."""
        value = self.value(key)
        if not isinstance(value, np.ndarray | list):
            return [self.integer(key, default, 0, most)] * n_layers
        if len(value) < n_layers:
            raise self._wrong(key, value, f"{n_layers} integers")
        values = np.asarray(value[:n_layers]).tolist()
        return [self._checked(f"{key}[{layer}]", n, 0, most) for layer, n in enumerate(values)]

    def flags(self, key: str, n_layers: int) -> list[bool] | None:
        """One flag for each layer; None where the key is not there or is a single number."""
        value = self.value(key)
        if not isinstance(value, np.ndarray | list):
            return None
        if len(value) < n_layers:
            raise self._wrong(key, value, f"{n_layers} flags")
        return [bool(flag) for flag in value[:n_layers]]

    def _checked(self, key: str, value: object, least: int, most: int) -> int:
        where, full = str(self._source.path), f"{self._architecture}.{key}"
        return checked_integer(value, where, full, least, most, _WAY_OUT)

    def _wrong(self, key: str, value: object, expected: str) -> TernError:
        return TernError(
            f"{self._source.path}: {self._architecture}.{key} is {shown(value)}; expected {expected}; "
            f"{_WAY_OUT}"
        )
