"""What a safetensors file holds: where each tensor lies, and its bytes mapped on demand.

The safetensors package validates every file (header, extents, total size); gguf-py's reader of the same
format gives the byte range of each tensor, which is mapped when it is asked for and unmapped when the array
is dropped. A tensor therefore costs page cache and no anonymous memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ggml_tern.errors import TernError
from ggml_tern.gguf.identify import Kind, identify

#: safetensors dtype -> numpy dtype of the mapped array. BF16 and the 8-bit floats have no numpy dtype: their
#: bits come as unsigned integers.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True)
class Scale:
    """The tensor of scales beside a quantized matrix: one for each block of `block[0]` rows and `block[1]`
    columns, in a grid of shape `grid`. `divides`: the weight is code / scale instead of code * scale."""

    tensor: StoredTensor
    grid: tuple[int, int]
    block: tuple[int, int]
    divides: bool


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its values are made of.

    Attributes:
        name: its name in the checkpoint.
        file: the safetensors file.
        dtype: what safetensors calls its element type (BF16, F16, F32, F8_E4M3, I8, ...).
        shape: the shape of the decoded tensor, which differs from the stored one where codes are packed.
        data: dtype, stored shape and byte range.
        scale: the scales of a quantized matrix.
        absmean: the weights are masters that the model itself rounds to -a, 0 and a.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: LocalTensor
    scale: Scale | None = None
    absmean: bool = False

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name}"


def open_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, after the safetensors package has accepted it.

    Raises TernError for a file that is truncated, malformed or unreadable.
    """
    try:
        with safe_open(path, framework="np"):
            pass
        header = SafetensorsLocal(path).tensors
    except (SafetensorError, ValueError, KeyError) as error:
        found = identify(path)
        if found.kind not in (Kind.SAFETENSORS, Kind.UNKNOWN):
            raise found.refusal() from None
        raise TernError(
            f"{path}: truncated or damaged safetensors file of {path.stat().st_size} bytes ({error}); "
            "download it again"
        ) from None
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [StoredTensor(name, path, data.dtype, data.shape, data) for name, data in header.items()]


def map_tensor(tensor: StoredTensor) -> NDArray[Any]:
    """The stored elements as a read-only mapped array of the stored shape; BF16 and 8-bit floats as their
    bits.

    Raises TernError for an element type that ternconv does not read.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TernError(
            f"{tensor} is stored as {tensor.dtype}; ternconv reads {', '.join(_DTYPES)}, so save the model "
            "in one of these"
        )
    if tensor.data.data_range.size == 0:
        return np.empty(tensor.data.shape, dtype)
    raw = np.memmap(
        tensor.file, mode="r", offset=tensor.data.data_range.offset, shape=tensor.data.data_range.size
    )
    return raw.view(dtype).reshape(tensor.data.shape)
