"""The types of tensors: how many weights a block holds, in how many bytes, under which id in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

from ggml_tern import _core


@dataclass(frozen=True)
class TensorType:
    """A ggml type: `block` weights take `nbytes` bytes; `id` is what the file says."""

    name: str
    id: int
    block: int
    nbytes: int

    @property
    def is_ternary(self) -> bool:
        return self.id in _core.TERNARY_TYPES

    @property
    def is_float(self) -> bool:
        return self.block == 1

    def row_bytes(self, n_in: int) -> int:
        return n_in // self.block * self.nbytes


def _by_core(type_id: int) -> TensorType:
    return TensorType(_core.type_name(type_id), type_id, _core.block_size(type_id), _core.type_size(type_id))


def _stock(qtype: gguf.GGMLQuantizationType) -> TensorType:
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    return TensorType(qtype.name, int(qtype), block, nbytes)


PTQ1_0 = _by_core(_core.TYPE_PTQ1_0)
PQ2_0 = _by_core(_core.TYPE_PQ2_0)
Q2_0 = _by_core(_core.TYPE_Q2_0)
TQ2_0 = _by_core(_core.TYPE_TQ2_0)
TQ1_0 = _by_core(_core.TYPE_TQ1_0)
Q8_0 = _stock(gguf.GGMLQuantizationType.Q8_0)
Q5_0 = _stock(gguf.GGMLQuantizationType.Q5_0)
Q4_0 = _stock(gguf.GGMLQuantizationType.Q4_0)
BF16 = _stock(gguf.GGMLQuantizationType.BF16)
F16 = _stock(gguf.GGMLQuantizationType.F16)
F32 = _stock(gguf.GGMLQuantizationType.F32)

TERNARY = {kind.name.lower(): kind for kind in (PTQ1_0, PQ2_0, Q2_0, TQ2_0, TQ1_0)}

#: The types that an option may name, for the matrices in the blocks and for single tensors.
MATRIX_TYPES = {**TERNARY, "q8_0": Q8_0}
TENSOR_TYPES = {**TERNARY, **{kind.name.lower(): kind for kind in (Q8_0, Q5_0, Q4_0, BF16, F16, F32)}}

#: The group sizes that a scale may serve, and the type in whose blocks such groups are found.
GROUP_TYPES = {64: Q2_0, 128: PQ2_0, 256: TQ2_0}

#: The type that --sensitive-bits means.
TYPE_OF_BITS = {4: Q4_0, 5: Q5_0, 8: Q8_0, 16: F16}

#: general.file_type of a file whose matrices are mostly of that type. 141 and 143 are what the released PQ2_0
#: and PTQ1_0 models carry; gguf-py has no names for them, nor (in older releases) for 41.
FILE_TYPES = {
    F32.id: int(gguf.LlamaFileType.ALL_F32),
    F16.id: int(gguf.LlamaFileType.MOSTLY_F16),
    BF16.id: int(gguf.LlamaFileType.MOSTLY_BF16),
    Q4_0.id: int(gguf.LlamaFileType.MOSTLY_Q4_0),
    Q5_0.id: int(gguf.LlamaFileType.MOSTLY_Q5_0),
    Q8_0.id: int(gguf.LlamaFileType.MOSTLY_Q8_0),
    TQ1_0.id: int(gguf.LlamaFileType.MOSTLY_TQ1_0),
    TQ2_0.id: int(gguf.LlamaFileType.MOSTLY_TQ2_0),
    Q2_0.id: 41,
    PQ2_0.id: 141,
    PTQ1_0.id: 143,
}


def type_by_id(type_id: int) -> TensorType:
    """The type with that id in a GGUF file, of all that such files are read with. Raises ValueError for any
    other id."""
    return _by_core(type_id)
