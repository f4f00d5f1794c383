"""Typed access to a model's config.json: a wrong or missing key is one clear line and not a traceback."""

from __future__ import annotations

from typing import Any

from ggml_tern.convert.read.size import Size
from ggml_tern.errors import TernError
from ggml_tern.limits import (
    LEAST_NUMBER,
    MAX_WIDTH,
    MOST_NUMBER,
    checked_integer,
    checked_number,
    shown,
)


class Config:
    """A JSON object from config.json. Every getter raises TernError naming the key, what was found and what
    was expected.

    A key that is absent or null counts as not given: it takes `default`, and is an error where there is none.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def error(self, message: str) -> TernError:
        """A TernError that names the file."""
        return TernError(f"{self._where}: {message}")

    def _fail(self, key: str, expected: str) -> TernError:
        if self._values.get(key) is None:
            return self.error(f"has no {key}; expected {expected}")
        return self.error(f"{key} is {shown(self._values[key])}; expected {expected}")

    def keys(self) -> list[str]:
        return list(self._values)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, for the few where that is not the same as absent."""
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
        """An integer from `least` to `most`, which knows its key."""
        value = self._values.get(key)
        if value is None and default is not None:
            return Size(default, f"{key} (not given, so {int(default)})")
        return Size(checked_integer(value, self._where, key, least, most), key)

    def integers(self, key: str, count: int, most: int = MAX_WIDTH) -> list[int]:
        """A list of up to `count` integers from 1 to `most`; empty when not given."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > count:
            raise self._fail(key, f"a list of up to {count} integers")
        return [checked_integer(item, self._where, f"{key}[{n}]", 1, most) for n, item in enumerate(value)]

    def number(
        self,
        key: str,
        default: float | None = None,
        least: float = LEAST_NUMBER,
        most: float = MOST_NUMBER,
    ) -> float:
        """A positive number from `least` to `most`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        return checked_number(value, self._where, key, least, most)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def string(self, key: str, default: str) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._fail(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty when not given."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._fail(key, "a list of strings")
        return value

    def section(self, key: str) -> Config | None:
        """The object under `key`, None when not given."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._fail(key, "an object")
        return Config(value, f"{self._where}: {key}")

    def text_model(self) -> Config:
        """The configuration of the text model: this one, or a section of it in a vision checkpoint, where the
        whole may say whether the head is the embedding."""
        text = self.section("text_config")
        if text is None:
            return self
        tied = self._values.get("tie_word_embeddings")
        return Config({"tie_word_embeddings": tied} | text._values, text._where)

    def require(self, key: str, default: object, supported: object) -> None:
        """Raise TernError unless `key`, which means `default` when not given, is what llama.cpp's graph
        computes."""
        value = self._values.get(key)
        value = default if value is None else value
        if value != supported:
            raise self.error(
                f"{key} is {shown(value)}; llama.cpp runs this architecture only with {supported!r}"
            )
