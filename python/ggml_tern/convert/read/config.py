"""Typed access to a model's config.json: a wrong or missing key is one clear line and not a traceback."""

from __future__ import annotations

from typing import Any, TypeGuard

from ggml_tern.errors import TernError


def _is_integer(value: object, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
        return self.error(f"{key} is {self._values[key]!r}; expected {expected}")

    def keys(self) -> list[str]:
        return list(self._values)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, for the few where that is not the same as absent."""
        return key in self._values and self._values[key] is None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not _is_integer(value, least):
            raise self._fail(key, "a positive integer" if least == 1 else f"an integer from {least} on")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of positive integers; empty when not given."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(_is_integer(item, 1) for item in value):
            raise self._fail(key, "a list of positive integers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._fail(key, "a positive number")
        return float(value)

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
            raise self.error(f"{key} is {value!r}; llama.cpp runs this architecture only with {supported!r}")
