"""JSON files of a model directory: read, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ggml_tern.errors import TernError

#: What transformers calls a model's configuration.
CONFIG_FILE = "config.json"


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises TernError when it is missing, unreadable, not JSON or not an object, and with `unique_keys` also
    where a key occurs twice in an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except FileNotFoundError:
        raise TernError(f"{path}: no such file") from None
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TernError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TernError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return value
