"""Which stored tensors each tensor of the file is made of, and their rows as the file has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Architecture, TensorSpec
from ggml_tern.convert.model.missing_tensors import missing, wrong_shape
from ggml_tern.convert.read.checkpoint import Checkpoint, StoredTensor
from ggml_tern.errors import TernError
from ggml_tern.tensors.values import Rows, as_float32

#: Rows compared at a time.
_ROWS = 1024

#: Rows of a tensor that stand for all.
SAMPLE_ROWS = 16


@dataclass(frozen=True)
class Source:
    """What a tensor is made of, or a part of it.

    Attributes:
        rows: its values, (n_rows, n_in).
        where: names tensor and file in errors.
        type_id: the ggml type that holds these values as they are stored.
        packed: the same rows in blocks of that type, uint8 (n_rows, row_bytes), where they come so.
    """

    rows: Rows
    where: str
    type_id: int = _core.TYPE_F32
    packed: NDArray[np.uint8] | None = None


class Sources(Mapping[str, list[Source]]):
    """The sources of every tensor, by its name in the file.

    They are opened whenever they are asked for, and with them the file is mapped; so a mapping lives as long
    as the list that it came with, and a model can be read any number of times.
    """

    def __init__(self, openers: Mapping[str, Sequence[Callable[[], Source]]]) -> None:
        self._openers = openers

    def __getitem__(self, name: str) -> list[Source]:
        return [opener() for opener in self._openers[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._openers)

    def __len__(self) -> int:
        return len(self._openers)


#: The safetensors types that ggml has too.
_TYPES = {"BF16": _core.TYPE_BF16, "F16": _core.TYPE_F16}


def find_sources(checkpoint: Checkpoint, architecture: Architecture, specs: Sequence[TensorSpec]) -> Sources:
    """The sources of every tensor by its name in the file; nothing is read yet.

    Raises TernError for a tensor that is missing, has another shape, or has no place in the architecture.
    """
    stored: dict[str, StoredTensor] = {}
    for tensor in checkpoint.tensors.values():
        name = architecture.canonical_name(tensor.name)
        if name is None:
            continue
        if name in stored:
            raise TernError(f"{tensor} and {stored[name]} are one and the same tensor; expected one of them")
        stored[name] = tensor
    if architecture.tied:
        _drop_tied_head(checkpoint, stored)
    found: dict[str, list[Callable[[], Source]]] = {}
    used: set[str] = set()
    for spec in specs:
        if spec.values is not None:
            found[spec.name] = [partial(Source, spec.values.reshape(-1, spec.shape[-1]), spec.name)]
            continue
        found[spec.name] = [_opener(checkpoint, stored, spec, name) for name in spec.sources]
        used.update(spec.sources)
    if unused := stored.keys() - used:
        names = sorted(stored[name].name for name in unused)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise TernError(
            f"{checkpoint.directory}: {', '.join(names[:5])}{more} have no place in "
            f"{gguf.MODEL_ARCH_NAMES[architecture.model_arch]} as config.json describes it"
        )
    return Sources(found)


def _opener(
    checkpoint: Checkpoint, stored: dict[str, StoredTensor], spec: TensorSpec, name: str
) -> Callable[[], Source]:
    tensor = stored.get(name)
    if tensor is None:
        raise missing(checkpoint, stored, name)
    shape = spec.source_shape
    if shape is None:
        shape = spec.shape if len(spec.sources) == 1 else spec.shape[1:]
    if _squeezed(tensor.shape) != _squeezed(shape):
        raise wrong_shape(tensor, shape)
    opener = partial(_open, checkpoint, tensor, shape[-1])
    # What cannot be read is refused before anything is written.
    opener()
    return opener


def _open(checkpoint: Checkpoint, tensor: StoredTensor, n_in: int) -> Source:
    rows: Rows = checkpoint.load(tensor)
    if isinstance(rows, np.ndarray):
        rows = rows.reshape(-1, n_in)
    decoded = tensor.scale is not None or tensor.absmean
    return Source(rows, str(tensor), _core.TYPE_F32 if decoded else _TYPES.get(tensor.dtype, _core.TYPE_F32))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _drop_tied_head(checkpoint: Checkpoint, stored: dict[str, StoredTensor]) -> None:
    """Forget a stored copy of the embedding as head, which some tools write although the two are tied."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is None or embedding is None:
        return
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not _same_bits(
        checkpoint.load(head), checkpoint.load(embedding)
    ):
        raise TernError(
            f"{head} differs from {embedding.name}, but tie_word_embeddings makes "
            "them one; set it to false in config.json if the head is its own"
        )
    del stored["lm_head.weight"]


def _same_bits(one: Rows, other: Rows) -> bool:
    """Whether two matrices of one shape and dtype are equal bit for bit; some rows at a time, as they may be
    large."""
    return all(
        one[start : start + _ROWS].tobytes() == other[start : start + _ROWS].tobytes()
        for start in range(0, one.shape[0], _ROWS)
    )


def prepared_rows(spec: TensorSpec, source: Source, start: int, stop: int) -> NDArray[Any]:
    """Some rows of one source of a tensor as the file has them before quantization: reordered, shifted, with
    the function applied. float32, float16, or uint16 holding bfloat16 bits."""
    rows = source.rows[chosen_rows(spec, start, stop)]
    column_order = spec.row_order if len(spec.shape) == 1 else spec.column_order
    if column_order is not None:
        rows = rows[:, column_order]
    if spec.shift:
        rows = as_float32(rows) + np.float32(spec.shift)
    if spec.function is not None:
        rows = spec.function(as_float32(rows))
    return rows


def sample_rows(spec: TensorSpec, sources: Sequence[Source]) -> Iterator[tuple[Source, int]]:
    """`SAMPLE_ROWS` rows of a tensor from all over it, or all that it has: the source and the row in it."""
    per_source = spec.rows_per_source
    last = per_source * len(sources) - 1
    for row in np.unique(np.linspace(0, last, SAMPLE_ROWS, dtype=np.int64)).tolist():
        yield sources[row // per_source], row % per_source


def chosen_rows(spec: TensorSpec, start: int, stop: int) -> slice | NDArray[np.intp]:
    """Which rows of a source become the rows from start to stop."""
    if spec.row_order is None or len(spec.shape) == 1:
        return slice(start, stop)
    return spec.row_order[start:stop]
