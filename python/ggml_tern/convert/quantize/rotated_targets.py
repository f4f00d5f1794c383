"""Which types a rotated model's tensors get, and which of them that folds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ggml_tern import _core
from ggml_tern.convert.model.architectures import TensorSpec
from ggml_tern.convert.model.hadamard import FOLDED_TYPES
from ggml_tern.convert.model.input_model import InputModel
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import kind_name
from ggml_tern.tensors.types import BF16, TensorType

#: Small matrices that read the same activations as folded ones but are not for rounding. In a rotated model
#: they stay in the type that checkpoints have them in.
_KEPT = ("ssm_alpha", "ssm_beta")


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
