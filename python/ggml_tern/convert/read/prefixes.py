"""Models under another prefix than the usual one: saved without a head, or wrapped by what trained them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ggml_tern.convert.read.stored_tensors import StoredTensor

#: The prefixes of a language model that every architecture knows.
_USUAL = ("model.", "language_model.model.", "model.language_model.")
_EMBEDDING = "embed_tokens.weight"
#: What a language model is made of besides its head.
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


def with_usual_prefix(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names that transformers gives them in a whole model, which begin with "model." or
    "lm_head.". Nothing changes where they have a usual prefix, and where several models are in one."""
    prefix = _odd_prefix(tensors)
    if prefix is None:
        return dict(tensors)
    return {
        (name := _renamed(tensor.name, prefix)): replace(tensor, name=name) for tensor in tensors.values()
    }


def _odd_prefix(names: Iterable[str]) -> str | None:
    """What stands before the names of the language model's tensors, if that is unusual: nothing in a model
    that was saved without its head, "module.model." and the like where training wrapped it. None if it is
    none, or not to be told."""
    found = [name.removesuffix(_EMBEDDING) for name in names if name.endswith(_EMBEDDING)]
    if len(found) != 1 or found[0] in _USUAL or (found[0] and not found[0].endswith(".")):
        return None
    return found[0]


def _renamed(name: str, prefix: str) -> str:
    outer = prefix.removesuffix("model.")
    if name.startswith(f"{outer}lm_head."):
        return name.removeprefix(outer)
    rest = name.removeprefix(prefix)
    if name.startswith(prefix) and rest.partition(".")[0] in _PARTS:
        return f"model.{rest}"
    return name
