"""Rotate: which tensors of a plain model are folded, and with what signs.

A folded weight is stored in the basis of a blockwise Walsh-Hadamard transform, w_stored = H(s * P(w)), which
spreads an outlier over its block; model/hadamard.py has what a file says of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.choice import TypeChoice, asked_type
from ggml_tern.convert.model.hadamard import FOLDED_TYPES, is_foldable, make_rotation
from ggml_tern.convert.model.input_model import InputModel
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import PQ2_0

#: The values that H may mix.
BLOCKS = (128, 256, 512, 1024, 2048)
#: The most that it mixes unless told; what the released models have.
DEFAULT_BLOCK = 1024


@dataclass(frozen=True)
class RotationChoice:
    """What the user asked for.

    Attributes:
        block: values that H mixes; None: as many as divide every folded width, up to DEFAULT_BLOCK.
        seed: which random signs; None: all of them +1.
    """

    block: int | None = None
    seed: int | None = None


def random_signs(seed: int, width: int) -> NDArray[np.int8]:
    """The signs of a seed for a width, int8 [width]: the same on every machine and with every numpy.

    Element i is -1 where bit i % 8 (0 is the lowest) of byte i // 8 of
    SHAKE-256("ggml-tern signs SEED WIDTH"), both in decimal, is set, and +1 elsewhere.
    """
    stream = hashlib.shake_256(f"ggml-tern signs {seed} {width}".encode()).digest(-(-width // 8))
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=width, bitorder="little")
    return 1 - 2 * bits.astype(np.int8)


def plan_rotation(model: InputModel, choice: TypeChoice, asked: RotationChoice) -> dict[str, _core.Rotation]:
    """The rotation of every tensor that will be folded if it gets a type that can be, by its name.

    Raises TernError for a model that is rotated already, an architecture or a type that rotation is not
    defined for, and a block that does not divide a width.
    """
    if model.rotations:
        raise TernError(
            f"{model.path}: its weights are rotated already; drop --rotate, or make them plain first with "
            "`tern repack --unrotate`"
        )
    if model.arch not in _core.ROTATED_ARCHITECTURES:
        raise TernError(
            f"{model.path}: rotated weights are not defined for {model.arch}, only for "
            f"{', '.join(_core.ROTATED_ARCHITECTURES)}; drop --rotate"
        )
    if choice.matrix is not None and choice.matrix not in FOLDED_TYPES:
        raise TernError(
            f"--rotate: nothing undoes the rotation of a {choice.matrix.name} weight; use --type pq2_0 or "
            "--type ptq1_0"
        )
    specs = candidates(model, choice)
    if not specs:
        raise TernError(
            f"{model.path}: no tensor can be rotated: none gets PQ2_0 or PTQ1_0, whose blocks are of "
            f"{PQ2_0.block} weights; drop --rotate"
        )
    block = asked.block or largest_block(specs)
    for spec in specs:
        if spec.shape[-1] % block:
            raise TernError(
                f"--rotation-block {block}: does not divide the {spec.shape[-1]} inputs of {spec.name}; "
                f"{largest_block(specs, BLOCKS[-1])} is the largest that fits all, --keep {spec.name}=q8_0 "
                "leaves it out"
            )
    widths = {spec.shape[-1] for spec in specs}
    signs = {n: None if asked.seed is None else random_signs(asked.seed, n) for n in widths}
    try:
        return {
            spec.name: make_rotation(
                spec.name, spec.shape[-1], block, signs[spec.shape[-1]], model.value_heads
            )
            for spec in specs
        }
    except ValueError as error:
        raise TernError(f"{model.path}: {error}") from None


def candidates(model: InputModel, choice: TypeChoice) -> list[TensorSpec]:
    """The tensors that may be folded and for which no other type is asked."""
    types = (None, *FOLDED_TYPES)
    return [spec for spec in model.specs if is_foldable(spec) and asked_type(spec, choice) in types]


def largest_block(specs: Iterable[TensorSpec], limit: int = DEFAULT_BLOCK) -> int:
    """The largest block up to `limit` that divides the width of every tensor."""
    common = int(np.gcd.reduce([limit, *(spec.shape[-1] for spec in specs)]))
    return common & -common
