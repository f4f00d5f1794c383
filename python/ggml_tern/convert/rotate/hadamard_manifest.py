"""`hadamard_packing.json` beside a checkpoint: its weights are in a rotated basis already, and this file says
which and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Architecture, TensorSpec
from ggml_tern.convert.read.json_files import read_json
from ggml_tern.convert.rotate.rotation import EMBEDDING, is_foldable, make_rotation
from ggml_tern.errors import TernError

MANIFEST_FILE = "hadamard_packing.json"

_FOLD, _INVERSE = "fold-before-matmul", "inverse-after-lookup"
#: What models may be wrapped in; a manifest may leave it out.
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_HEAD_SOURCE, _EMBEDDING_SOURCE = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Manifest:
    """What the file says.

    Attributes:
        path: the file.
        block: values that H mixes.
        signs: int8 [width] by width; None: all of them +1.
        roles: of every rotated tensor of the checkpoint, by its name there.
    """

    path: Path
    block: int
    signs: dict[int, NDArray[np.int8]] | None
    roles: dict[str, str]

    def error(self, message: str) -> TernError:
        """A TernError that names the file."""
        return TernError(f"{self.path}: {message}")


def read_manifest(path: Path) -> Manifest:
    """The manifest in `path`. Raises TernError, naming file and field, for anything but what it should be."""
    values = read_json(path, unique_keys=True)
    _require(path, values, "schema_version", 1, 2, 3)
    _require(path, values, "kind", "hadamard-weight-fold")
    _require(path, values, "status", "requires-matching-runtime")
    transform = values.get("transform")
    if not isinstance(transform, dict):
        raise _wrong(path, "transform", transform, "an object")
    _require(path, transform, "transform.name", "normalized-signed-sylvester-walsh-hadamard")
    _require(path, transform, "transform.sign_mode", "identity", "explicit")
    block = transform.get("block_size")
    if not _is_integer(block) or block < 1 or block & (block - 1):
        raise _wrong(path, "transform.block_size", block, "a power of two")
    signs = values.get("signs")
    if transform["sign_mode"] == "explicit":
        return Manifest(path, block, _read_signs(path, signs), _read_roles(path, values.get("tensors")))
    if signs:
        raise TernError(f"{path}: signs is there although transform.sign_mode is 'identity'; expected none")
    return Manifest(path, block, None, _read_roles(path, values.get("tensors")))


def _read_signs(path: Path, values: object) -> dict[int, NDArray[np.int8]]:
    if not isinstance(values, dict) or not values:
        raise _wrong(
            path, "signs", values, "an object of lists by width, as transform.sign_mode is 'explicit'"
        )
    signs = {}
    for width, vector in values.items():
        if not width.isdecimal() or not int(width):
            raise TernError(f"{path}: signs.{width}: expected a width as key")
        if not isinstance(vector, list) or len(vector) != int(width):
            raise TernError(
                f"{path}: signs.{width}: expected {width} values of -1 and +1, found "
                f"{len(vector) if isinstance(vector, list) else type(vector).__name__}"
            )
        for position, value in enumerate(vector):
            if isinstance(value, bool) or value not in (-1, 1):
                raise _wrong(path, f"signs.{width}[{position}]", value, "-1 or +1")
        signs[int(width)] = np.array(vector, np.int8)
    return signs


def _read_roles(path: Path, entries: object) -> dict[str, str]:
    if not isinstance(entries, list) or not entries:
        raise _wrong(path, "tensors", entries, "a list of tensors")
    roles: dict[str, str] = {}
    for position, entry in enumerate(entries):
        field = f"tensors[{position}]"
        if not isinstance(entry, dict):
            raise _wrong(path, field, entry, "an object")
        name = entry.get("name")
        if not isinstance(name, str):
            raise _wrong(path, f"{field}.name", name, "the name of a tensor")
        if name in roles:
            raise TernError(f"{path}: {field}.name is {name!r}, which is there twice; expected it once")
        if not _is_integer(entry.get("axis")) or entry["axis"] != -1:
            raise _wrong(path, f"{field}.axis", entry.get("axis"), "-1, the inputs")
        roles[name] = entry.get("role", _FOLD)
        if roles[name] not in (_FOLD, _INVERSE):
            raise _wrong(path, f"{field}.role", roles[name], f"{_FOLD!r} or {_INVERSE!r}")
    return roles


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(path: Path, values: Mapping[str, Any], field: str, *supported: object) -> None:
    value = values.get(field.rpartition(".")[2])
    if isinstance(value, bool) or value not in supported:
        raise _wrong(path, field, value, " or ".join(map(repr, supported)))


def _wrong(path: Path, field: str, found: object, expected: str) -> TernError:
    if found is None:
        return TernError(f"{path}: has no {field}; expected {expected}")
    shown = repr(found)
    return TernError(
        f"{path}: {field} is {shown if len(shown) <= 80 else shown[:77] + '...'}; expected {expected}"
    )


def apply_manifest(
    manifest: Manifest, architecture: Architecture, specs: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], dict[str, _core.Rotation]]:
    """The tensors of a model that is stored rotated, and the rotation of each that is.

    Raises TernError, naming the manifest, for a tensor that the model does not have or that cannot be
    rotated.
    """
    roles = _by_source(manifest, architecture, specs)
    if architecture.tied and roles.get(_HEAD_SOURCE) == _FOLD:
        if _EMBEDDING_SOURCE not in roles:
            raise manifest.error(
                f"tensors names {_HEAD_SOURCE} and not {_EMBEDDING_SOURCE}, but tie_word_embeddings makes "
                f"them one; expected {_EMBEDDING_SOURCE} with role {_INVERSE!r}"
            )
        del roles[_HEAD_SOURCE]
    found: list[TensorSpec] = []
    rotations: dict[str, _core.Rotation] = {}
    for spec in specs:
        named = [roles.pop(source) for source in spec.sources if source in roles]
        if named:
            if len(named) != len(spec.sources):
                raise manifest.error(
                    f"tensors names {len(named)} of the {len(spec.sources)} tensors that make {spec.name}, "
                    "one tensor in the GGUF file; expected all or none"
                )
            rotations[spec.name] = _rotation(manifest, architecture, spec, named[0])
            if rotations[spec.name].v_heads is not None:
                # Rotated in the order of the checkpoint, of which the file's keys tell.
                spec = replace(spec, column_order=None)
        found.append(spec)
    if roles:
        raise manifest.error(f"tensors names {min(roles)}, which is none of the model's tensors")
    if not any(name != EMBEDDING for name in rotations):
        raise manifest.error(f"tensors names no matrix with role {_FOLD!r}; expected one at least")
    return found, rotations


def _by_source(manifest: Manifest, architecture: Architecture, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """The roles by the names that the specs have for the checkpoint's tensors."""
    sources = {source for spec in specs for source in spec.sources}
    roles: dict[str, str] = {}
    for name, role in manifest.roles.items():
        canonical = architecture.canonical_name(name)
        if canonical is None:
            continue
        bare = canonical
        for wrapper in _WRAPPERS:
            bare = bare.removeprefix(wrapper)
        for candidate in (canonical, f"model.{bare}", bare):
            if candidate in sources:
                canonical = candidate
                break
        else:
            if bare == _HEAD_SOURCE:
                canonical = bare
        if canonical in roles:
            raise manifest.error(
                f"tensors names {name}, which is there twice under two names; expected it once"
            )
        roles[canonical] = role
    return roles


def _rotation(manifest: Manifest, architecture: Architecture, spec: TensorSpec, role: str) -> _core.Rotation:
    name, n_in = spec.sources[0], spec.shape[-1]
    expected = _INVERSE if spec.name == EMBEDDING else _FOLD
    if role != expected:
        raise manifest.error(f"tensors: the role of {name} is {role!r}; expected {expected!r}")
    if n_in % manifest.block:
        raise manifest.error(
            f"transform.block_size is {manifest.block}, which does not divide the {n_in} inputs of {name}"
        )
    if not is_foldable(spec):
        raise manifest.error(f"tensors names {name}, which cannot be rotated in a GGUF file ({spec.name})")
    if manifest.signs is not None and n_in not in manifest.signs:
        raise manifest.error(f"signs has no list for the {n_in} inputs of {name}; expected signs.{n_in}")
    signs = None if manifest.signs is None else manifest.signs[n_in]
    try:
        return make_rotation(spec.name, n_in, manifest.block, signs, architecture.value_heads)
    except ValueError as error:
        raise manifest.error(f"{name}: {error}") from None
