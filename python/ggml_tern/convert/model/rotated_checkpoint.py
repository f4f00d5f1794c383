"""Which tensors of a checkpoint are stored rotated, and how, as the manifest beside it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Architecture, TensorSpec
from ggml_tern.convert.model.hadamard import EMBEDDING, is_foldable, make_rotation
from ggml_tern.convert.read.hadamard_manifest import FOLD, INVERSE, Manifest

#: What models may be wrapped in; a manifest may leave it out.
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_HEAD_SOURCE, _EMBEDDING_SOURCE = "lm_head.weight", "model.embed_tokens.weight"


def apply_manifest(
    manifest: Manifest, architecture: Architecture, specs: Sequence[TensorSpec]
) -> tuple[list[TensorSpec], dict[str, _core.Rotation]]:
    """The tensors of a model that is stored rotated, and the rotation of each that is.

    Raises TernError, naming the manifest, for a tensor that the model does not have or that cannot be
    rotated.
    """
    roles = _by_source(manifest, architecture, specs)
    if architecture.tied and roles.get(_HEAD_SOURCE) == FOLD:
        if _EMBEDDING_SOURCE not in roles:
            raise manifest.error(
                f"tensors names {_HEAD_SOURCE} and not {_EMBEDDING_SOURCE}, but tie_word_embeddings makes "
                f"them one; expected {_EMBEDDING_SOURCE} with role {INVERSE!r}"
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
        raise manifest.error(f"tensors names no matrix with role {FOLD!r}; expected one at least")
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
    expected = INVERSE if spec.name == EMBEDDING else FOLD
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
