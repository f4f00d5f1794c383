"""`hadamard_packing.json` beside a checkpoint: its weights are in a rotated basis already, and this file says
which and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.read.json_files import read_json
from ggml_tern.errors import TernError

MANIFEST_FILE = "hadamard_packing.json"

FOLD, INVERSE = "fold-before-matmul", "inverse-after-lookup"


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
        roles[name] = entry.get("role", FOLD)
        if roles[name] not in (FOLD, INVERSE):
            raise _wrong(path, f"{field}.role", roles[name], f"{FOLD!r} or {INVERSE!r}")
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
