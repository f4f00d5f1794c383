"""Where every number of a GGUF header lies, so that tests can put others there."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Field:
    """size bytes at offset `at`. kind says what they are: "tensor type", "key length", ..."""

    kind: str
    at: int
    size: int


class _Walk:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.found = data, 0, list[Field]()

    def take(self, kind: str, size: int) -> int:
        """Notes a field and returns it as an unsigned number (of its first 8 bytes)."""
        self.found.append(Field(kind, self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at][:8], "little")

    def string(self, length_kind: str, kind: str) -> None:
        self.take(kind, self.take(length_kind, 8))


def fields(path: Path) -> list[Field]:
    """Every field of the header in file order; the elements of an array are one field "array"."""
    walk = _Walk(path.read_bytes())
    walk.take("magic", 4)
    walk.take("version", 4)
    n_tensors, n_keys = walk.take("tensor count", 8), walk.take("key count", 8)
    for _ in range(n_keys):
        walk.string("key length", "key")
        kind = walk.take("key type", 4)
        if kind == STRING:
            walk.string("string length", "string")
        elif kind == ARRAY:
            element, count = walk.take("array type", 4), walk.take("array length", 8)
            start = walk.at
            if element == STRING:
                for _ in range(count):
                    walk.at += 8 + struct.unpack_from("<Q", walk.data, walk.at)[0]
            else:
                walk.at += count * SCALAR_BYTES[element]
            walk.found.append(Field("array", start, walk.at - start))
        else:
            walk.take("value", SCALAR_BYTES[kind])
    for _ in range(n_tensors):
        walk.string("name length", "tensor name")
        for _ in range(walk.take("dimension count", 4)):
            walk.take("dimension", 8)
        walk.take("tensor type", 4)
        walk.take("offset", 8)
    return walk.found


def split_in_two(path: Path, folder: Path) -> Path:
    """Writes the tensors of a file to two, as llama-gguf-split does: the second has none of the keys. Returns
    the first."""
    data, start = path.read_bytes(), data_offset(path)
    found = fields(path)
    names = [f.at - 8 for f in found if f.kind == "tensor name"]
    offsets = [f.at for f in found if f.kind == "offset"]
    begins = [struct.unpack_from("<Q", data, at)[0] for at in offsets]
    n_keys, n_tensors = struct.unpack_from("<Q", data, 16)[0], len(names)
    folder.mkdir()
    parts = [folder / f"part-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):
        first, last = number * (n_tensors // 2), n_tensors if number else n_tensors // 2
        keys = b"" if number else data[24 : names[0]]
        for key, kind, packed in (
            (b"split.no", 2, struct.pack("<H", number)),
            (b"split.count", 2, struct.pack("<H", 2)),
            (b"split.tensors.count", 5, struct.pack("<i", n_tensors)),
        ):
            keys += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + packed
        table = b""
        for i in range(first, last):
            table += data[names[i] : offsets[i]] + struct.pack("<Q", begins[i] - begins[first])
        header = data[:8] + struct.pack("<QQ", last - first, 3 if number else n_keys + 3) + keys + table
        end = start + begins[last] if last < n_tensors else len(data)
        part.write_bytes(header + bytes(-len(header) % 32) + data[start + begins[first] : end])
    return parts[0]


def data_offset(path: Path) -> int:
    """Where tensor data begins, for the usual alignment of 32."""
    last = fields(path)[-1]
    return -(-(last.at + last.size) // 32) * 32
