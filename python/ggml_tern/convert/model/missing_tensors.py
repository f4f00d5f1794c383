"""What is wrong with a checkpoint whose tensors are not those that its configuration makes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from ggml_tern.convert.read.checkpoint import INDEX_FILE, Checkpoint, StoredTensor
from ggml_tern.convert.read.size import origins_of
from ggml_tern.errors import TernError

#: Names that are nearly right, at most.
_SIMILAR = 3
_BLOCK = re.compile(r"(?P<prefix>.*\.layers\.)(?P<number>\d+)\.(?P<rest>.+)")


def missing(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], name: str) -> TernError:
    """The error for a tensor that is not there: its name, the likely reason, and names that are alike.

    stored: the tensors by the names that the architecture has for them.
    """
    alike = difflib.get_close_matches(name, stored, n=_SIMILAR, cutoff=0.75)
    alike = [stored[other].name for other in alike] or _of_the_same_block(stored, name)
    there = f"; similar ones are there: {', '.join(alike)}" if alike else ""
    return TernError(
        f"{checkpoint.directory}: tensor {name} is missing: {_likely_reason(checkpoint, stored, name)}{there}"
    )


def _of_the_same_block(stored: Mapping[str, StoredTensor], name: str) -> list[str]:
    """Some tensors of the same part of the same block, whatever they are called."""
    part = name.rpartition(".")[0].rpartition(".")[0]
    found = [tensor.name for other, tensor in stored.items() if part and other.startswith(f"{part}.")]
    return sorted(found)[:_SIMILAR]


def _likely_reason(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], name: str) -> str:
    if name == "lm_head.weight":
        return (
            "the model was saved without its head, as a base model is, or its head is the embedding and "
            "config.json must have tie_word_embeddings true"
        )
    if name.endswith(".bias") and name.removesuffix("bias") + "weight" in stored:
        return "config.json makes the layer have a bias, and the checkpoint has none"
    block = _BLOCK.fullmatch(name)
    if block is not None:
        numbers = _blocks(stored, block["prefix"])
        if numbers and int(block["number"]) > max(numbers):
            return (
                f"the checkpoint has blocks up to {max(numbers)}, and num_hidden_layers in config.json makes "
                "them more; one of the two is of another model, or the upload is incomplete"
            )
        if int(block["number"]) in numbers and _is_everywhere_missing(stored, block, numbers):
            return (
                "no block has it, so the checkpoint is of a model of another build than config.json says, or "
                "has the names of another tool than transformers"
            )
    if not any(other.startswith("model.") for other in stored):
        return "the tensors have other names than transformers gives them; save the model with transformers"
    if (checkpoint.directory / INDEX_FILE).exists():
        return f"{INDEX_FILE} does not list it either; the upload is incomplete, or of another model"
    return "the file does not hold it; the upload is incomplete, or config.json is of another model"


def _blocks(stored: Collection[str], prefix: str) -> set[int]:
    matches = (_BLOCK.fullmatch(name) for name in stored)
    return {int(match["number"]) for match in matches if match is not None and match["prefix"] == prefix}


def _is_everywhere_missing(stored: Collection[str], block: re.Match[str], numbers: Collection[int]) -> bool:
    return not any(f"{block['prefix']}{number}.{block['rest']}" in stored for number in numbers)


def wrong_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> TernError:
    """The error for a tensor that config.json makes another shape, with the keys that do it."""
    keys: list[str] = []
    if len(tensor.shape) == len(shape):
        differing = [size for found, size in zip(tensor.shape, shape, strict=True) if found != size]
        keys = list(dict.fromkeys(key for size in differing for key in origins_of(size)))
    by = f" by {' and '.join(keys)}" if keys else ""
    wanted = list(map(int, shape))
    return TernError(f"{tensor} has shape {list(tensor.shape)}; config.json makes it {wanted}{by}")
