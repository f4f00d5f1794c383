"""Choose: which type each tensor of the file gets, from what the user asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.convert.model.choice import TypeChoice, asked_type
from ggml_tern.tensors.types import F16, F32, PTQ1_0, Q2_0, Q8_0, TensorType


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
    def n_weights(self) -> int:
        return int(np.prod(self.spec.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        *outer, n_in = self.spec.shape
        return int(np.prod(outer, dtype=np.int64)) * self.type.row_bytes(n_in)


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
    wanted = asked_type(spec, choice)
    if wanted is None:
        wanted = stored if spec.role is Role.OTHER else _by_content(choice, stored, is_ternary)
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


def _by_content(choice: TypeChoice, stored: TensorType, is_ternary: Callable[[], bool]) -> TensorType:
    """The type of a tensor for which none is asked."""
    if is_ternary():
        return choice.matrix if choice.matrix is not None and choice.matrix.is_ternary else PTQ1_0
    # What is quantized already only loses by being quantized again.
    return stored if choice.lossless or not stored.is_float else Q8_0
