"""The GGUF file of a language model, for everything that runs one: anything else is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.names import printable

#: general.type of what is no model, what it is, and what to do with it.
_TYPES = {
    "adapter": (
        "an adapter (LoRA) and no model",
        "give the model that it was trained for, and the adapter to llama.cpp with --lora",
    ),
    "mmproj": (
        "a projector of images or sound and no model",
        "give the model that it belongs to, and the projector to llama-server with --mmproj",
    ),
    "imatrix": (
        "an importance matrix (imatrix) and no model",
        "give the model; an imatrix goes to llama-quantize",
    ),
    "vocab": ("a vocabulary and no model", "give the file that has the weights too"),
}

#: The same by general.architecture, for files that do not say their type.
_ARCHITECTURES = {
    "clip": _TYPES["mmproj"],
    "controlvector": (
        "a control vector and no model",
        "give the model that it was made for, and the vector to llama.cpp with --control-vector",
    ),
    "imatrix": _TYPES["imatrix"],
    **dict.fromkeys(
        ("flux", "sd1", "sd3", "sdxl", "lumina2", "aura", "hidream", "wan", "hyvid", "ltxv", "cosmos"),
        ("a model that makes images or films, which llama.cpp does not run", "give a language model"),
    ),
    "whisper": (
        "a model that hears speech, which llama.cpp does not run",
        "whisper.cpp runs it; give a language model",
    ),
}


def why_no_model(metadata: Mapping[str, Any], n_tensors: int) -> tuple[str, str] | None:
    """Of a GGUF file with these keys that is no language model: what it is, in words that go behind "is",
    and the way out. None for a model."""
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind != "model":
        unknown = f"of general.type {printable(str(kind)[:60])!r} and no model"
        return _TYPES.get(str(kind), (unknown, "give a model's GGUF file"))
    if isinstance(architecture, str) and architecture in _ARCHITECTURES:
        return _ARCHITECTURES[architecture]
    if any(key.startswith("imatrix.") for key in metadata):
        return _TYPES["imatrix"]
    if not isinstance(architecture, str):
        return (
            "no model, since it has no general.architecture",
            "expected the GGUF file of a model; download it again, or convert the model anew",
        )
    if not n_tensors:
        return _TYPES["vocab"]
    return None


def require_model(source: GGUFSource) -> None:
    """Raise TernError unless an opened file is a language model (or part of one): for adapters, projectors,
    importance matrices, vocabularies and the like, with what they are and what to do."""
    found = why_no_model(source.metadata, len(source.tensors))
    if found is not None:
        raise TernError(f"{source.path}: is {found[0]}; {found[1]}")


def model_file(path: Path) -> Path:
    """The file that a llama.cpp program must be given for the model `path`: that file, or the first part
    where it is any part of a split model, which llama.cpp does not accept.

    Raises TernError, in one line that says what was found and what to do, for a path that holds no GGUF file,
    a damaged or incomplete one, a split model of which a part is missing, and what is no language model.
    """
    source = GGUFSource(path)
    require_model(source)
    return source.first


__all__ = ["model_file", "require_model", "why_no_model"]
