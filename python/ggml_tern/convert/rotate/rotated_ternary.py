"""Weights that are ternary in a rotated basis only: to see it through the rounding of what is stored, and to
give the three values back.

A model that was trained ternary in a rotated basis and saved in the plain one holds w = P^-1(s * H(t a)),
rounded to the stored type. Folding it gives t a again but for that rounding, which is far from enough for a
group to be ternary by the bits, and near enough to tell which of -a, 0 and a every value is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.model.input_model import InputModel
from ggml_tern.convert.model.sources import Source, prepared_rows, sample_rows
from ggml_tern.convert.rotate.rotation import BLOCKS, RotationChoice, candidates
from ggml_tern.tensors.names import kind_name
from ggml_tern.tensors.types import PQ2_0
from ggml_tern.tensors.values import as_float32

_GROUP = PQ2_0.block
#: Tensors of a model that are looked at before all of them are.
_SAMPLE_TENSORS = 4
#: Values by which a stored type is told.
_SAMPLE_VALUES = 1 << 13


@dataclass(frozen=True)
class Fold:
    """Rows of weights, float32 [n_rows, n_in], to the basis that they are stored in.

    Attributes:
        rotation: that basis; None: the plain one.
        stored: the one that the rows come in; None: the plain one.
        snaps: whether groups that are ternary but for rounding become ternary.
    """

    rotation: _core.Rotation | None
    stored: _core.Rotation | None = None
    snaps: bool = False

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = np.ascontiguousarray(rows)
        rounding = unit_roundoff(rows) if self.snaps else 0.0
        if self.stored is not None:
            rows = self.stored.unrotate(rows, n_threads=1)
        if self.rotation is not None:
            rows = self.rotation.rotate(rows, n_threads=1)
            if self.snaps:
                rows, _ = snap(rows, self.rotation.block, rounding)
        return rows


def folded(
    spec: TensorSpec,
    sources: Sequence[Source],
    rotation: _core.Rotation | None,
    stored: _core.Rotation | None = None,
) -> TensorSpec:
    """The tensor, with its rows taken from the basis `stored` to the basis `rotation` (None: plain)."""
    spec = replace(spec, function=Fold(rotation, stored))
    if rotation is not None and ternary_share(spec, sources, rotation.block) > 0.5:
        spec = replace(spec, function=Fold(rotation, stored, snaps=True))
    return spec


def snaps(spec: TensorSpec) -> bool:
    """Whether a folded tensor was found to be ternary in its rotated basis."""
    return isinstance(spec.function, Fold) and spec.function.snaps


def unit_roundoff(values: NDArray[np.float32]) -> float:
    """The largest relative error that rounding can have left in values, by the narrowest type that holds some
    thousands of them from all over: 2^-8 of bfloat16, 2^-11 of float16, 2^-24 of float32."""
    some = values.reshape(-1)
    some = some[:: -(-some.size // _SAMPLE_VALUES)]
    if not (some.view(np.uint32) & np.uint32(0xFFFF)).any():
        return 2.0**-8
    with np.errstate(over="ignore", invalid="ignore"):
        is_float16 = np.array_equal(some.astype(np.float16).astype(np.float32), some)
    return 2.0**-11 if is_float16 else 2.0**-24


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found when it is quantized
def snap(
    rows: NDArray[np.float32], block: int, rounding: float
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Rotated rows with every group that is ternary but for rounding made ternary: -a, 0 and a, with a the
    mean of the values that stand for it. And which groups these are, bool [n_rows, n_in / 128].

    Errors of at most `rounding` times each of B plain weights w add up to at most rounding * |w|_1 / sqrt(B)
    <= rounding * |w|_2 in a rotated weight, and H keeps |w|_2. The arithmetic of both directions adds about
    2^-24 |w|_2 for each of its log2(B) stages and three products; and numbers below float16's normal range
    have an absolute error of up to 2^-25.
    """
    n_rows, n_in = rows.shape
    arithmetic = 2 * (math.log2(block) + 3) * 2.0**-24
    norms = np.sqrt(np.square(rows.reshape(n_rows, -1, block)).sum(axis=2, dtype=np.float64))
    bounds = (rounding + arithmetic) * norms + math.sqrt(block) * 2.0**-25 * (rounding == 2.0**-11)
    bounds = np.repeat(bounds.astype(np.float32), block // _GROUP, axis=1)[:, :, None]

    groups = rows.reshape(n_rows, n_in // _GROUP, _GROUP)
    magnitudes = np.abs(groups)
    largest = magnitudes.max(axis=2, keepdims=True)
    # A group no larger than what rounding explains is one of zeros.
    nonzero = magnitudes > np.where(largest > bounds, largest / 2, np.float32(np.inf))
    counts = np.count_nonzero(nonzero, axis=2, keepdims=True)
    ternary = magnitudes * nonzero
    scales = ternary.sum(axis=2, keepdims=True) / np.maximum(counts, 1).astype(np.float32)
    np.multiply(nonzero, scales, out=ternary)
    # The scale is off by up to the bound, too.
    magnitudes -= ternary
    near = np.abs(magnitudes, out=magnitudes).max(axis=2) <= 2 * bounds[:, :, 0]
    np.copysign(ternary, groups, out=ternary)
    if not near.all():
        ternary[~near] = groups[~near]
    return ternary.reshape(n_rows, n_in), near


def ternary_share(spec: TensorSpec, sources: Sequence[Source], block: int) -> float:
    """The share of groups that are ternary but for rounding, among those that are not zero in some rows from
    all over a tensor; 0 without such groups. `block`: what its rotation mixes; 1 for a plain one."""
    plain = replace(spec, function=None)
    found = total = 0
    for source, row in sample_rows(spec, sources):
        rounding = unit_roundoff(np.ascontiguousarray(as_float32(prepared_rows(plain, source, row, row + 1))))
        rows = as_float32(prepared_rows(spec, source, row, row + 1))
        _, near = snap(rows, max(block, _GROUP), rounding if block > 1 else 0.0)
        nonzero = rows.reshape(-1, _GROUP).any(axis=1)
        found += int(np.count_nonzero(near.reshape(-1) & nonzero))
        total += int(np.count_nonzero(nonzero))
    return found / total if total else 0.0


def _sample(model: InputModel, choice: TypeChoice) -> list[TensorSpec]:
    """A few of the matrices that may be folded, of different kinds. Without ssm_out, the one kind whose input
    may come in two orders."""
    kinds: dict[str, TensorSpec] = {}
    for spec in candidates(model, choice):
        kinds.setdefault(kind_name(spec.name), spec)
    for kind in ("ssm_out", "token_embd", "output"):
        kinds.pop(kind, None)
    return list(kinds.values())[:_SAMPLE_TENSORS]


def is_plain_ternary(model: InputModel, choice: TypeChoice) -> bool:
    """Whether some matrix that may be folded is ternary as it is."""
    return any(ternary_share(spec, model.sources[spec.name], 1) == 1 for spec in _sample(model, choice))


def find_rotation(model: InputModel, choice: TypeChoice) -> RotationChoice | None:
    """The rotation without signs in which a model is ternary that is not so as it is stored; None where there
    is none. Looks at some rows of a few tensors."""
    sample = _sample(model, choice)
    if model.arch not in _core.ROTATED_ARCHITECTURES or not sample or is_plain_ternary(model, choice):
        return None
    widths = {spec.shape[-1] for spec in candidates(model, choice)}
    for block in BLOCKS:
        if any(width % block for width in widths):
            break
        if all(
            ternary_share(
                replace(spec, function=Fold(_core.Rotation(spec.shape[-1], block))),
                model.sources[spec.name],
                block,
            )
            == 1
            for spec in sample
        ):
            return RotationChoice(block)
    return None
