"""Rotated weights as a file holds them: which tensors may be, in what basis, and the keys that say so.

A folded weight is stored in the basis of a blockwise Walsh-Hadamard transform, w_stored = H(s * P(w)). The
plug-in rotates the activation to match. What the keys `prism.hadamard.*` may say stands in
csrc/format/hadamard.cpp, which reads them; here they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.gguf.reader import HADAMARD, ROTATED_TYPES_TO_WRITE
from ggml_tern.tensors.types import PQ2_0, type_by_id

#: The types that a folded weight can have.
FOLDED_TYPES = tuple(map(type_by_id, ROTATED_TYPES_TO_WRITE))

EMBEDDING = "token_embd.weight"
_SSM_OUT = ".ssm_out.weight"


def is_foldable(spec: TensorSpec) -> bool:
    """Whether a tensor may be folded in one of FOLDED_TYPES."""
    return (
        spec.role is not Role.VECTOR and _core.may_be_rotated(spec.name) and spec.shape[-1] % PQ2_0.block == 0
    )


def make_rotation(
    name: str, n_in: int, block: int, signs: NDArray[np.int8] | None, v_heads: tuple[int, int] | None
) -> _core.Rotation:
    """The rotation of one tensor; of all tensors, only ssm_out has value heads in its input.

    Raises ValueError where block, signs or heads do not fit its width.
    """
    return _core.Rotation(n_in, block, signs, v_heads if name.endswith(_SSM_OUT) else None)


def add_rotation_keys(
    writer: gguf.GGUFWriter, rotations: Mapping[str, _core.Rotation], names: Collection[str]
) -> None:
    """Write the keys prism.hadamard.* of a file.

    Args:
        rotations: of every rotated tensor, by its name; at least one that is not the embedding.
        names: the names of all tensors of the file.
    """
    prefix = HADAMARD
    tied = EMBEDDING in rotations and "output.weight" not in names
    signs = {rotation.n_in: rotation.signs for rotation in rotations.values()}
    explicit = any(vector is not None for vector in signs.values())
    writer.add_uint32(prefix + "version", 2 if tied else 1)
    writer.add_uint32(prefix + "block_size", next(iter(rotations.values())).block)
    writer.add_string(prefix + "transform", "normalized-sylvester-walsh-hadamard")
    writer.add_string(prefix + "axis", "input-last-dimension")
    writer.add_string(prefix + "sign_mode", "explicit" if explicit else "identity")
    if explicit:
        widths = sorted(signs)
        values: list[int] = []
        for width in widths:
            vector = signs[width]
            values += [1] * width if vector is None else vector.tolist()
        kinds = gguf.GGUFValueType
        writer.add_key_value(prefix + "sign_widths", widths, kinds.ARRAY, sub_type=kinds.INT32)
        writer.add_key_value(prefix + "sign_values", values, kinds.ARRAY, sub_type=kinds.INT8)
    writer.add_array(prefix + "weight_names", [name for name in rotations if name != EMBEDDING])
    if EMBEDDING in rotations:
        writer.add_array(prefix + "inverse_weight_names", [EMBEDDING])
    if tied:
        writer.add_bool(prefix + "tied_output", True)
    if any(rotation.v_heads is not None for rotation in rotations.values()):
        writer.add_bool(prefix + "gdn_v_grouped", True)
