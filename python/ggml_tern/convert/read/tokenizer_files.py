"""What a model directory says about its tokenizer and about generating with it: its files, each read once.

The same fact may stand in several files, because every generation of transformers wrote another one. Where
they differ, the order is that of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ggml_tern.convert.read.json_files import read_json
from ggml_tern.errors import TernError

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

#: A chat template, or several with names.
ChatTemplate = str | list[dict[str, str]]


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched before the rest of the text is tokenized.

    Attributes:
        text: what is matched.
        special: a token that marks something and is no text.
        lstrip, rstrip: it takes the spaces to its left or right.
        single_word: it is matched only as a whole word.
        normalized: it is matched in the normalized text, itself normalized.
    """

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class TokenizerFiles:
    """The files of a model directory; one that does not exist is an empty object.

    Raises TernError for one that cannot be read or is not a JSON object.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _read(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return read_json(path) if path.is_file() else {}

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        return self._read(TOKENIZER_FILE)

    @cached_property
    def config(self) -> dict[str, Any]:
        """How transformers sets up the tokenizer."""
        return self._read("tokenizer_config.json")

    @cached_property
    def generation(self) -> dict[str, Any]:
        return self._read("generation_config.json")

    @cached_property
    def model(self) -> dict[str, Any]:
        """config.json; what it leaves out may stand in the text model's part, of a model with images."""
        config = self._read("config.json")
        return (config.get("text_config") or {}) | {k: v for k, v in config.items() if v is not None}

    @cached_property
    def special_tokens(self) -> dict[str, Any]:
        """What names the special tokens: `bos_token`, `eos_token`, `additional_special_tokens`, ..."""
        named = {
            key: value
            for key, value in self.config.items()
            if value is not None and key.endswith(("_token", "_tokens"))
        }
        return self._read("special_tokens_map.json") | named

    def named(self, kind: str) -> str | None:
        """The text of a special token: kind `bos` for `bos_token`."""
        return token_text(self.special_tokens.get(f"{kind}_token"))

    @cached_property
    def added(self) -> dict[int, AddedToken]:
        """The added tokens by id. tokenizer_config.json has them all up to transformers 4, tokenizer.json
        since, added_tokens.json before."""
        added = {int(token): AddedToken(text) for text, token in self._read("added_tokens.json").items()}
        items = [(item["id"], item) for item in self.tokenizer.get("added_tokens") or []]
        items += (self.config.get("added_tokens_decoder") or {}).items()
        for token, item in items:
            flags = {
                flag: bool(item.get(flag))
                for flag in ("special", "lstrip", "rstrip", "single_word", "normalized")
            }
            added[int(token)] = AddedToken(item["content"], **flags)
        if added and min(added) < 0:
            raise ValueError(f"added token with id {min(added)}")
        return added

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """A file of its own goes before tokenizer_config.json; chat_template.json is what processors had."""
        named = {
            path.stem: path for path in sorted((self.directory / "additional_chat_templates").glob("*.jinja"))
        }
        if (path := self.directory / CHAT_TEMPLATE_FILE).is_file():
            named = {"default": path} | named
        found: Any
        if named:
            found = [{"name": name, "template": read_text(path)} for name, path in named.items()]
        else:
            found = self.config.get("chat_template")
            if found is None:
                found = self._read("chat_template.json").get("chat_template")
        if isinstance(found, list):
            found = [{"name": str(item["name"]), "template": item["template"]} for item in found]
            if [item["name"] for item in found] == ["default"]:
                found = found[0]["template"]
        templates = [item["template"] for item in found] if isinstance(found, list) else [found]
        if found is not None and not all(isinstance(template, str) for template in templates):
            raise ValueError("chat_template is neither a text nor a list of named ones")
        return found or None


def token_text(value: Any) -> str | None:
    """The text of a token that a configuration gives as text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TernError(f"{path}: cannot be read: {error}") from None
