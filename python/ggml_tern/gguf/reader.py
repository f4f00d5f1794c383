"""Open a GGUF file, or all parts of a split one, and read its tensors where they lie.

_core reads and checks the header; the data is mapped, so a tensor costs page cache and no anonymous memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf import i2_s
from ggml_tern.gguf.identify import require_gguf
from ggml_tern.tensors.names import printable

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"

#: What the keys begin with that say how weights are rotated.
HADAMARD = "prism.hadamard."
#: The types in which the plug-in undoes a rotation.
ROTATED_TYPES = (_core.TYPE_PQ2_0, _core.TYPE_PTQ1_0, _core.TYPE_Q2_0)
#: Those of them that rotated weights are written in. llama.cpp without the plug-in refuses these, while it
#: would load rotated Q2_0 and talk nonsense.
ROTATED_TYPES_TO_WRITE = (_core.TYPE_PQ2_0, _core.TYPE_PTQ1_0)

#: What to tell of a file for which `GGUFSource.is_legacy` is true.
LEGACY_NOTE = "read as PQ2_0 what stands in the file, in blocks of 128, under the id of Q2_0"

#: Types whose values are handed out as they are stored. BF16 has no numpy dtype: its bits come as uint16.
_PLAIN: dict[int, np.dtype[Any]] = {
    _core.TYPE_F32: np.dtype("<f4"),
    _core.TYPE_F16: np.dtype("<f2"),
    _core.TYPE_BF16: np.dtype("<u2"),
}


@dataclass(frozen=True)
class Part:
    """One file: `header` is what _core.read_gguf_header says, `data` the whole file, mapped."""

    path: Path
    header: dict[str, Any]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file.

    Attributes:
        name: its name.
        part: the file that holds it.
        type: the id of what its blocks are; PQ2_0 also where a legacy file says Q2_0.
        shape: in numpy's order, n_in last: (n_out, n_in), (n,), (n_expert, n_out, n_in).
        data: its bytes in the file, mapped.
        extent: where its entry in the tensor table begins and ends.
    """

    name: str
    part: Part
    type: int
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    extent: tuple[int, int]

    @property
    def where(self) -> str:
        """Names tensor and file in errors."""
        return f"{self.part.path}: tensor {printable(self.name)}"

    @property
    def type_name(self) -> str:
        return _core.type_name(self.type)

    @property
    def n_in(self) -> int:
        return self.shape[-1]

    @property
    def n_weights(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def n_rows(self) -> int:
        return self.n_weights // self.n_in

    @property
    def is_ternary(self) -> bool:
        """Whether its type holds only -d, 0 and +d."""
        return self.type in _core.TERNARY_TYPES or self.type == _core.TYPE_I2_S

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The packed rows, uint8 [n_rows, row_bytes], without the tail that I2_S has."""
        row_bytes = self.n_in // _core.block_size(self.type) * _core.type_size(self.type)
        return self.data[: self.n_rows * row_bytes].reshape(self.n_rows, row_bytes)

    @property
    def tensor_scale(self) -> np.float32:
        """The scale of an I2_S tensor."""
        assert self.type == _core.TYPE_I2_S
        at = self.blocks.size
        scale: np.float32 = self.data[at : at + 4].view("<f4")[0]
        return scale

    @property
    def has_fp16_scale(self) -> bool:
        """Whether fp16, which all other ternary types store, holds the scale of this I2_S tensor exactly."""
        with np.errstate(over="ignore"):
            return bool(np.float32(np.float16(self.tensor_scale)) == self.tensor_scale)

    @property
    def rows(self) -> GGUFRows:
        """The values, by rows of the tensor flattened to (n_rows, n_in)."""
        return GGUFRows(self)


@dataclass(frozen=True)
class GGUFRows:
    """The decoded rows of a tensor: `rows[start:stop]`, or with an array of row numbers.

    F32, F16 and BF16 come as they are stored, by slices without a copy: float32, float16, or uint16 holding
    bfloat16 bits. All else is decoded to float32, exactly.
    """

    tensor: GGUFTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.n_rows, self.tensor.n_in

    def __getitem__(self, rows: slice | NDArray[np.intp], /) -> NDArray[Any]:
        """Raises TernError for a type that nothing here decodes."""
        tensor = self.tensor
        packed = tensor.blocks[rows]
        if tensor.type in _PLAIN:
            return packed.view(_PLAIN[tensor.type])
        packed = np.ascontiguousarray(packed)
        if tensor.type == _core.TYPE_I2_S:
            return i2_s.dequantize(packed, tensor.tensor_scale)
        if tensor.is_ternary:
            return _core.dequantize(tensor.type, packed, n_threads=1)
        try:
            values: NDArray[np.float32] = gguf.quants.dequantize(
                packed, gguf.GGMLQuantizationType(tensor.type)
            )
        except (ValueError, NotImplementedError):
            raise TernError(
                f"{tensor.where}: has type {tensor.type_name}, which cannot be decoded here; "
                "convert from a file in F16, BF16 or Q8_0"
            ) from None
        return values


class GGUFSource:
    """An opened GGUF file. Of a split model, any part opens all of it.

    Attributes:
        path: the file that was named.
        parts: the files, in order.
        metadata: the keys of the first part: number, bool, str, list or numpy array.
        tensors: name -> GGUFTensor, in file order.

    Raises TernError for a file that is unreadable, malformed or truncated, and for a split model of which a
    part is missing or belongs elsewhere.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = _open(path)
        count = first.header["metadata"].get(SPLIT_COUNT, 1)
        self.parts = [first] if not isinstance(count, int) or count <= 1 else _open_split(first, count)
        self.metadata: dict[str, Any] = self.parts[0].header["metadata"]
        self.tensors: dict[str, GGUFTensor] = {}
        for part in self.parts:
            for entry in part.header["tensors"]:
                tensor = _tensor(part, entry)
                if tensor.name in self.tensors:
                    raise TernError(
                        f"{tensor.where}: stands in {self.tensors[tensor.name].part.path.name} already; "
                        "the parts do not belong together"
                    )
                self.tensors[tensor.name] = tensor
        expected = self.metadata.get(SPLIT_TENSORS)
        if len(self.parts) > 1 and isinstance(expected, int) and expected != len(self.tensors):
            raise TernError(
                f"{path}: its {len(self.parts)} parts hold {len(self.tensors)} tensors, "
                f"{SPLIT_TENSORS} says {expected}; the parts do not belong together"
            )

    @property
    def first(self) -> Path:
        """The file that llama.cpp opens: of a split model, the first part."""
        return self.parts[0].path

    @property
    def is_legacy(self) -> bool:
        """Whether PQ2_0 blocks stand in it under the id of Q2_0."""
        return any(part.header["legacy_q2_0"] for part in self.parts)

    @property
    def architecture(self) -> str | None:
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None

    @property
    def is_rotated(self) -> bool:
        """Whether its keys say that weights are stored in a rotated basis."""
        return any(key.startswith(HADAMARD) for key in self.metadata)

    @cached_property
    def hadamard(self) -> dict[str, Any] | None:
        """What _core.read_hadamard says of it; None where no weight is rotated.

        Raises TernError for keys that break a rule, and for a rotated model in parts, whose keys speak of
        tensors that are elsewhere.
        """
        if not self.is_rotated:
            return None
        if len(self.parts) > 1:
            raise TernError(
                f"{self.path}: is a part of a rotated model; join the {len(self.parts)} parts first with "
                "`tern repack`"
            )
        try:
            return _core.read_hadamard(self.parts[0].path)
        except _core.FormatError as error:
            raise TernError(f"{self.path}: {error}") from None

    @property
    def rotations(self) -> dict[str, _core.Rotation]:
        """The rotation of every tensor that is stored rotated, by its name. Raises what `hadamard` raises."""
        return {} if self.hadamard is None else self.hadamard["rotations"]

    def files(self) -> list[Path]:
        """Every file that is read from: what an output must never overwrite."""
        return [part.path for part in self.parts]


#: Ids of tensor types beyond those of stock llama.cpp, and who writes them: ik_llama.cpp's own types and its
#: interleaved ones (ggml/include/ggml.h in github.com/ikawrakow/ik_llama.cpp).
_FORKS = ((range(133, 160), "ik_llama.cpp"), (range(200, 400), "ik_llama.cpp"))


def _maker_of_type(error: _core.FormatError) -> str:
    """What to add to the message about a tensor's type that is not known."""
    match = re.search(r" has unknown type (\d+)$", str(error))
    if match is None:
        return ""
    for ids, maker in _FORKS:
        if int(match[1]) in ids:
            return f", which only {maker} knows; run the file there, or take one of the types of llama.cpp"
    return (
        "; it is of another fork of llama.cpp or of one newer than this ggml-tern; take a file of the types "
        "of llama.cpp, or update ggml-tern"
    )


def _open(path: Path) -> Part:
    require_gguf(path)
    try:
        header = _core.read_gguf_header(path)
        data: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    except _core.FormatError as error:
        raise TernError(f"{path}: {error}{_maker_of_type(error)}") from None
    except (OSError, ValueError) as error:
        raise TernError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return Part(path, header, data)


def _open_split(named: Part, count: int) -> list[Part]:
    """All parts of the split model that `named` belongs to."""
    path = named.path
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name, re.DOTALL)
    if match is None or int(match[3]) != count:
        raise TernError(
            f"{path}: is one of {count} parts of a model, so its name should be like "
            f"model-00001-of-{count:05}.gguf; give the parts their names back"
        )
    parts: list[Part] = []
    for number in range(count):
        sibling = path.with_name(f"{match[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not sibling.exists():
            raise TernError(f"{sibling}: part {number + 1} of {count} is missing; finish the download")
        part = named if sibling == path else _open(sibling)
        found = (part.header["metadata"].get(SPLIT_NO), part.header["metadata"].get(SPLIT_COUNT))
        if found != (number, count):
            raise TernError(
                f"{sibling}: {SPLIT_NO} and {SPLIT_COUNT} are {found[0]} and {found[1]}, its name makes "
                f"them {number} and {count}; give the parts their names back"
            )
        parts.append(part)
    return parts


def _tensor(part: Part, entry: dict[str, Any]) -> GGUFTensor:
    begin = part.header["data_offset"] + entry["offset"]
    return GGUFTensor(
        name=entry["name"],
        part=part,
        type=entry["type"],
        shape=tuple(reversed(entry["shape"])),
        data=part.data[begin : begin + entry["nbytes"]],
        extent=entry["extent"],
    )
