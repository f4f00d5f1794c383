"""Rotated weights: which tensors are folded, with what signs, and the keys that say so.

A folded weight is stored in the basis of a blockwise Walsh-Hadamard transform, w_stored = H(s * P(w)), which
spreads an outlier over its block. The plug-in rotates the activation to match. What the keys
`prism.hadamard.*` may say stands in csrc/format/hadamard.cpp, which reads them; here they are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.convert.quantize.targets import (
    BF16,
    PQ2_0,
    Target,
    TensorType,
    TypeChoice,
    asked_type,
    kind_name,
    type_by_id,
)
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import HADAMARD, ROTATED_TYPES

if TYPE_CHECKING:
    from ggml_tern.convert.model.models import InputModel

#: The types that a folded weight can have.
FOLDED_TYPES = tuple(map(type_by_id, ROTATED_TYPES))
#: The values that H may mix.
BLOCKS = (128, 256, 512, 1024, 2048)
#: The most that it mixes unless told; what the released models have.
DEFAULT_BLOCK = 1024

EMBEDDING = "token_embd.weight"
_SSM_OUT = ".ssm_out.weight"

#: Small matrices that read the same activations as folded ones but are not for rounding. In a rotated model
#: they stay in the type that checkpoints have them in.
_KEPT = ("ssm_alpha", "ssm_beta")


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


def kept_target(spec: TensorSpec, stored: TensorType, lossless: bool) -> Target | None:
    """The type of one of the matrices that a rotated model has in BF16; None for all others."""
    if kind_name(spec.name) not in _KEPT or (lossless and stored != BF16):
        return None
    return Target(spec, BF16)


def folded_rotations(
    targets: Iterable[Target], rotations: Mapping[str, _core.Rotation]
) -> dict[str, _core.Rotation]:
    """The rotations of the tensors that get a type that can be folded."""
    return {
        target.spec.name: rotations[target.spec.name]
        for target in targets
        if target.spec.name in rotations and target.type in FOLDED_TYPES
    }


def check_folded_types(model: InputModel, targets: Iterable[Target]) -> None:
    """Raise TernError for a type in which nothing could undo the rotation that a tensor is stored with."""
    for target in targets:
        if target.spec.name in model.rotations and target.type not in FOLDED_TYPES:
            plain = (
                f"`tern repack --unrotate {model.path} PLAIN.gguf` makes the weights plain"
                if model.path.is_file()
                else "`tern repack --unrotate` then makes the weights plain"
            )
            raise TernError(
                f"{model.path}: {target.spec.name} is stored rotated, and nothing undoes that in "
                f"{target.type.name}; use --type pq2_0 or --type ptq1_0, {plain}"
            )


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
