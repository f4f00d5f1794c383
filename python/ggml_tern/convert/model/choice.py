"""What the user asked for: the types of a model's tensors, by their roles and by their names."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import kind_name
from ggml_tern.tensors.types import GROUP_TYPES, PTQ1_0, TensorType


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


def asked_type(spec: TensorSpec, choice: TypeChoice) -> TensorType | None:
    """The type that was asked for a tensor that is no vector, by its name or its role; None: none was."""
    kept = [keep.type for keep in choice.keep if keep.matches(spec)]
    if kept:
        return kept[-1]
    asked = {Role.EMBEDDING: choice.embedding, Role.HEAD: choice.head, Role.MATRIX: choice.matrix}
    return asked.get(spec.role)


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
