"""GGUF files put together byte by byte, with any type id, at any offset, and I2_S in plain numpy."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference import formats as ref

I2_S = 36


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: `shape` in numpy's order, n_in last; `data` as it stands in the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    data: bytes


def ternary(name: str, fmt: ref.Format, trits: ref.I8, scales: ref.F32, type_id: int | None = None) -> Tensor:
    """trits [..., n_in], scales [n_rows, n_in/block]; type_id where the file is to say another one."""
    packed = ref.pack(fmt, trits.reshape(-1, trits.shape[-1]), scales)
    return Tensor(name, fmt.type_id if type_id is None else type_id, trits.shape, packed.tobytes())


def i2_s(name: str, trits: ref.I8, scale: float) -> Tensor:
    """Blocks of 128 weights: byte m has the codes of weights m, 32 + m, 64 + m, 96 + m, from its highest bits
    down; behind all blocks a float32 scale and 28 bytes of nothing."""
    codes = (trits.reshape(-1, 4, 32) + 1).astype(np.uint8)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    return Tensor(name, I2_S, trits.shape, packed.tobytes() + struct.pack("<f", scale) + bytes(28))


def plain(name: str, type_id: int, values: npt.NDArray[Any]) -> Tensor:
    return Tensor(name, type_id, values.shape, values.tobytes())


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Value type and value: bool, int (u32, or the 64 bits that hold it), float, str, or a list of one of
    them."""
    if isinstance(item, list):
        parts = [value(x) for x in item] or [value(0)[:4]]
        return (
            struct.pack("<I", 9)
            + parts[0][:4]
            + struct.pack("<Q", len(item))
            + b"".join(p[4:] for p in parts)
        )
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        if item < 0:
            return struct.pack("<Iq", 11, item)
        return struct.pack("<II", 4, item) if item < 1 << 32 else struct.pack("<IQ", 10, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    return struct.pack("<I", 8) + string(item)


def write(
    path: Path, metadata: dict[str, Any], tensors: list[Tensor], alignment: int = 32, pad_end: bool = True
) -> Path:
    """Write a GGUF file of version 3 with the tensors in the order given."""
    keys = b"".join(string(key) + value(item) for key, item in metadata.items())
    table = data = b""
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        table += string(tensor.name) + dims + struct.pack("<IQ", tensor.type_id, len(data))
        data += tensor.data
        if pad_end or tensor is not tensors[-1]:
            data += bytes(-len(data) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + table
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path
