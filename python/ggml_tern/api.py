"""All of ggml-tern for programs in Python: what the commands do, as functions.

``convert``, ``verify``, ``repack``, ``inspect`` and ``plan`` take what ``ternconv`` and the commands of
``tern`` of these names take, and return what those print; ``Llama`` and ``enable`` run models in
llama-cpp-python. What the user can mend is a TernError of one line.

They are here and not in ``ggml_tern`` itself, where ``convert`` and ``plan`` are the rooms that do the work.
Each imports what it needs when it is called, so that this module costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggml_tern.errors import TernError
from ggml_tern.host.stock import enable

if TYPE_CHECKING:
    from ggml_tern.convert.pipeline import Report
    from ggml_tern.convert.verify import Finding
    from ggml_tern.gguf import repacking
    from ggml_tern.llama import Llama as Llama
    from ggml_tern.tensors.types import TensorType

__all__ = ["TernError", "convert", "enable", "inspect", "plan", "repack", "verify"]

#: A path as the standard library takes it.
AnyPath = str | PathLike[str]
#: A LoRA's directory, or that and its scale.
Lora = AnyPath | tuple[AnyPath, float]


def _ignore(nbytes: int) -> None:
    """Of progress: told a number of bytes."""


def convert(
    source: AnyPath,
    output: AnyPath,
    *,
    type: str = "ptq1_0",
    embed: str | None = None,
    head: str | None = None,
    keep: Mapping[str, str] | None = None,
    group_size: int | None = None,
    lossless: bool = False,
    rotate: bool = False,
    rotation_block: int | None = None,
    signs: int | None = None,
    lora: Sequence[Lora] = (),
    mtp: bool = False,
    force: bool = False,
    dry_run: bool = False,
    threads: int = 0,
    start: Callable[[int], None] = _ignore,
    advance: Callable[[int], None] = _ignore,
) -> Report:
    """Convert a model directory or a GGUF file to the GGUF file `output`, as ``ternconv`` does.

    Args:
        source: the model.
        output: the file to write.
        type: of the matrices in the blocks, as --type, "auto" included.
        embed, head: types of embedding and head.
        keep: pattern of names -> type; of several that match, the last counts.
        group_size: weights that share a scale.
        lossless: refuse to lose anything but the rounding of scales to fp16.
        rotate: fold a Hadamard rotation into the weights, of `rotation_block` values (None: the most up to
            1024 that fit) and the signs of the seed `signs` (None: all +1).
        lora: adapters to merge first.
        mtp: keep the multi-token prediction head.
        force: replace an existing output.
        dry_run: write nothing, and report what would be made, the stats estimated from some rows of each
            tensor.
        threads: that quantize; 0 for one per core.
        start, advance: told the bytes of tensor data, first in total and then as they are written.

    Returns a report: `size` in bytes, `notes`, the tensors as `targets` with their `stats`, and as
    `judgement` the verdict, whose `line` is what ``ternconv`` prints.

    Raises TernError; the output then does not exist, or is what it was.
    """
    from ggml_tern.convert import pipeline
    from ggml_tern.convert.model.choice import Keep, TypeChoice
    from ggml_tern.convert.rotate.rotation import BLOCKS, RotationChoice
    from ggml_tern.tensors.types import GROUP_TYPES, MATRIX_TYPES, TENSOR_TYPES

    def named(option: str, name: str, known: Mapping[str, TensorType]) -> TensorType:
        _one_of(option, name, known)
        return known[name]

    if group_size is not None:
        _one_of("group_size", group_size, GROUP_TYPES)
    if rotation_block is not None:
        _one_of("rotation_block", rotation_block, BLOCKS)
    if not rotate and (rotation_block is not None or signs is not None):
        raise TernError("rotation_block and signs go with rotate=True")
    choice = TypeChoice(
        matrix=None if type == "auto" else named("type", type, MATRIX_TYPES),
        embedding=None if embed is None else named("embed", embed, TENSOR_TYPES),
        head=None if head is None else named("head", head, TENSOR_TYPES),
        keep=tuple(Keep(name, named("keep", kind, TENSOR_TYPES)) for name, kind in (keep or {}).items()),
        group=group_size,
        lossless=lossless,
    )
    return pipeline.convert(
        Path(source),
        Path(output),
        choice,
        rotation=RotationChoice(rotation_block, signs) if rotate else None,
        adapters=_adapters(lora),
        keep_mtp=mtp,
        force=force,
        dry=dry_run,
        n_threads=threads,
        start=start,
        advance=advance,
    )


def verify(
    source: AnyPath,
    file: AnyPath,
    *,
    lora: Sequence[Lora] = (),
    mtp: bool = False,
    threads: int = 0,
    start: Callable[[int], None] = _ignore,
    advance: Callable[[int], None] = _ignore,
) -> list[Finding]:
    """Compare `file` with what `source`, the model that it was converted from, gives in the same types, as
    ``tern verify`` does. The other arguments are those of `convert`.

    Returns one finding for each tensor: `name`, `type_name`, `verdict` ("exact", "different", ...; see
    ggml_tern.convert.verify.Verdict), `stats` and, of a different one, `first_difference`, its row.

    Raises TernError where the two cannot be compared.
    """
    from ggml_tern.convert import verify as verification

    return list(
        verification.verify(
            Path(source),
            Path(file),
            adapters=_adapters(lora),
            keep_mtp=mtp,
            n_threads=threads,
            start=start,
            advance=advance,
        )
    )


def repack(
    source: AnyPath,
    output: AnyPath,
    type: str,
    *,
    force: bool = False,
    threads: int = 0,
    start: Callable[[int], None] = _ignore,
    advance: Callable[[int], None] = _ignore,
) -> repacking.Report:
    """Write the ternary weights of a GGUF file in another ternary type, without loss, as ``tern repack``
    does.

    Args:
        type: pq2_0, ptq1_0, q2_0, tq2_0 or tq1_0; of a rotated model also f16 and f32, which make it plain.
        force, threads, start, advance: as for `convert`.

    Returns a report: `size` in bytes, `notes`, and `types`, the id of every tensor's type by name.

    Raises TernError for what the type cannot hold exactly; the output then does not exist, or is what it was.
    """
    from ggml_tern.gguf import repacking
    from ggml_tern.gguf.reader import GGUFSource

    _one_of("type", type, repacking.TARGETS | repacking.PLAIN_TARGETS)
    plain = type in repacking.PLAIN_TARGETS
    write = repacking.unrotate if plain else repacking.repack
    target = (repacking.PLAIN_TARGETS if plain else repacking.TARGETS)[type]
    return write(
        GGUFSource(Path(source)),
        Path(output),
        target,
        force=force,
        n_threads=threads,
        start=start,
        advance=advance,
    )


def inspect(file: AnyPath, *, stats: bool = False) -> dict[str, Any]:
    """What a GGUF file holds, and what will run it: the JSON of ``tern inspect --json``, whose keys
    ggml_tern.gguf.inspection.describe lists. stats: count the zeros too, for which all weights are read.

    Raises TernError for a file that is none.
    """
    from ggml_tern.gguf.inspection import describe
    from ggml_tern.gguf.reader import GGUFSource

    return describe(GGUFSource(Path(file)), stats=stats)


def plan(
    file: AnyPath,
    *,
    context: int | None = None,
    kv: str = "f16",
    memory: int | None = None,
    parallel: int | None = None,
    n_gpu_layers: int | None = None,
    layout: str = "auto",
    cards: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What memory a model takes, from the header of its file: the JSON of ``tern plan --json``, in bytes:
    `total` and its parts, `context`, and with `memory` whether it `fits`, and `largest_context`.

    Args:
        context: tokens in the KV cache, of all conversations together; None: the most that fit into `memory`,
            or those that the model was trained for.
        kv: type of the KV cache: f16, q8_0, q5_0 or q4_0.
        memory: bytes that there are.
        parallel: conversations at a time; None: 4 that share the context.
        n_gpu_layers: layers on the device; None: all.
        layout: of ternary weights: auto, fast or dense.
        cards: bytes that are free on each graphics card; the JSON then is that of ``--vram``, and `memory` is
            main memory. Goes without n_gpu_layers.

    Raises TernError for what is no model, and for an architecture whose memory is not known.
    """
    from ggml_tern.plan import arithmetic, tables
    from ggml_tern.plan.cards import divide
    from ggml_tern.plan.header import read_model

    _one_of("kv", kv, arithmetic.KV_TYPES)
    _one_of("layout", layout, arithmetic.LAYOUTS)
    model = read_model(Path(file))
    if cards is not None:
        if n_gpu_layers is not None:
            raise TernError("cards finds the layers itself: it goes without n_gpu_layers")
        division = divide(model, cards, context, kv, parallel, layout == "dense")
        return tables.division_as_json(model, division, memory)
    planned = arithmetic.choose(model, context, kv, memory, parallel, n_gpu_layers, layout)
    return tables.as_json(model, planned, memory, parallel, n_gpu_layers)


def _one_of(option: str, value: object, known: Mapping[Any, object] | Sequence[Any]) -> None:
    if value not in known:
        raise TernError(f"{option}={value!r}: expected one of {', '.join(map(str, known))}")


def _adapters(lora: Sequence[Lora]) -> list[Any]:
    from ggml_tern.convert.read.lora import open_adapter

    pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in lora]
    return [open_adapter(Path(directory), scale) for directory, scale in pairs]


def __getattr__(name: str) -> Any:
    # It needs llama-cpp-python, which everything else does without.
    if name == "Llama":
        from ggml_tern.llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "Llama"])
