"""Stage 4, choose: which type each tensor of the file gets, from what the user asked for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.errors import TernError


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


def _ternary(type_id: int) -> TensorType:
    return TensorType(_core.type_name(type_id), type_id, _core.block_size(type_id), _core.type_size(type_id))


def _stock(qtype: gguf.GGMLQuantizationType) -> TensorType:
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    return TensorType(qtype.name, int(qtype), block, nbytes)


PTQ1_0 = _ternary(_core.TYPE_PTQ1_0)
PQ2_0 = _ternary(_core.TYPE_PQ2_0)
Q2_0 = _ternary(_core.TYPE_Q2_0)
TQ2_0 = _ternary(_core.TYPE_TQ2_0)
TQ1_0 = _ternary(_core.TYPE_TQ1_0)
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
    """The type with that id in a GGUF file. Raises ValueError for one that neither gguf-py nor ggml-tern
    knows."""
    if type_id in _core.TERNARY_TYPES:
        return _ternary(type_id)
    return _stock(gguf.GGMLQuantizationType(type_id))


@dataclass(frozen=True)
class Keep:
    """A type for the tensors that a pattern names, which is matched as file names are (`*`, `?`, `[...]`).

    A tensor goes by its name in the file (`blk.3.attn_q.weight`), without block and ending (`attn_q`), by its
    names in the checkpoint (`model.layers.3.self_attn.q_proj.weight`), and by their last part (`q_proj`).
    """

    pattern: str
    type: TensorType

    def matches(self, spec: TensorSpec) -> bool:
        names = {spec.name, kind_name(spec.name)}
        for source in spec.sources:
            module = source.removesuffix(".weight")
            names |= {source, module, module.rpartition(".")[2]}
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True)
class TypeChoice:
    """What the user asked for.

    Attributes:
        matrix: the type of the matrices in the blocks. None: PTQ1_0 for those that are ternary already, and
            for the others what loses little, Q8_0.
        embedding, head: theirs. None: that of the matrices if they are ternary already, and Q8_0 if not.
        keep: types of single tensors; of several that match, the last counts.
        group: weights that share a scale; None: one block of the type.
        lossless: refuse to lose anything but the rounding of a scale to fp16, and where the type is left
            open, take the stored one.
    """

    matrix: TensorType | None = None
    embedding: TensorType | None = None
    head: TensorType | None = None
    keep: tuple[Keep, ...] = ()
    group: int | None = None
    lossless: bool = False


@dataclass(frozen=True)
class Target:
    """A tensor and its type in the file.

    Attributes:
        spec: the tensor.
        type: its type.
        wanted: the type asked for, where that does not fit the rows.
        group: weights that share a scale of a ternary type; 0: one block of it.
    """

    spec: TensorSpec
    type: TensorType
    wanted: TensorType | None = None
    group: int = 0

    @property
    def nbytes(self) -> int:
        *outer, n_in = self.spec.shape
        return int(np.prod(outer, dtype=np.int64)) * self.type.row_bytes(n_in)


def kind_name(name: str) -> str:
    """A tensor's name without block and ending: `ffn_down`, `token_embd`, ..."""
    return re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")


def choose_target(
    spec: TensorSpec,
    choice: TypeChoice,
    stored: TensorType = F32,
    is_ternary: Callable[[], bool] = lambda: False,
) -> Target:
    """The type of a tensor: the one asked for, or the nearest whose blocks divide its rows.

    A ternary type falls back to Q2_0, whose group is 64, then to Q8_0; a block type whose group of 32 does
    not divide the rows either falls back to F16.

    Args:
        stored: the type that holds what is stored without loss.
        is_ternary: tells whether the tensor is ternary already; asked only where that decides.
    """
    if spec.role is Role.VECTOR:
        return Target(spec, F32)
    wanted = asked_type(spec, choice) or _by_content(choice, stored, is_ternary)
    group = choice.group or 0
    n_in = spec.shape[-1]
    if wanted.is_ternary:
        if n_in % max(wanted.block, group) == 0:
            return Target(spec, wanted, group=group if group != wanted.block else 0)
        ladder = (Q2_0, stored) if choice.lossless else (Q2_0, Q8_0, F16)
    else:
        ladder = (wanted, stored if choice.lossless else F16)
    fitting = next(candidate for candidate in ladder if n_in % candidate.block == 0)
    return Target(spec, fitting, wanted if fitting != wanted else None)


def asked_type(spec: TensorSpec, choice: TypeChoice) -> TensorType | None:
    """The type that was asked for a tensor that is no vector, by its name or its role; None: none was."""
    kept = [keep.type for keep in choice.keep if keep.matches(spec)]
    if kept:
        return kept[-1]
    return {Role.EMBEDDING: choice.embedding, Role.HEAD: choice.head, Role.MATRIX: choice.matrix}[spec.role]


def _by_content(choice: TypeChoice, stored: TensorType, is_ternary: Callable[[], bool]) -> TensorType:
    """The type of a tensor for which none is asked."""
    if is_ternary():
        return choice.matrix if choice.matrix is not None and choice.matrix.is_ternary else PTQ1_0
    # What is quantized already only loses by being quantized again.
    return stored if choice.lossless or not stored.is_float else Q8_0


def check_choice(choice: TypeChoice, specs: list[TensorSpec]) -> None:
    """Raise TernError for an option that has no effect, which is a misspelling more often than not."""
    for keep in choice.keep:
        if not any(keep.matches(spec) and spec.role is not Role.VECTOR for spec in specs):
            kinds = sorted({kind_name(spec.name) for spec in specs if spec.role is not Role.VECTOR})
            raise TernError(
                f"--keep {keep.pattern}={keep.type.name.lower()}: names no matrix; there are "
                f"{', '.join(kinds)}"
            )
    if choice.group is not None:
        asked = {choice.matrix or PTQ1_0, choice.embedding, choice.head, *(k.type for k in choice.keep)}
        for kind in asked:
            if kind is not None and kind.is_ternary and choice.group % kind.block:
                raise TernError(
                    f"--group-size {choice.group}: {kind.name} has a scale for every {kind.block} weights, "
                    f"so its groups are of {' or '.join(str(g) for g in GROUP_TYPES if g % kind.block == 0)}"
                )
