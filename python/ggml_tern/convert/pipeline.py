"""The stages in a row: model, types, quantization, file; or, in a dry run, what they would make."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import gguf

from ggml_tern import _core
from ggml_tern.atomic_file import check_output
from ggml_tern.convert.model.architectures import Role
from ggml_tern.convert.model.choice import TypeChoice, check_choice
from ggml_tern.convert.model.hadamard import EMBEDDING, FOLDED_TYPES, add_rotation_keys
from ggml_tern.convert.model.input_model import InputModel
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.quantize.rotated_targets import check_folded_types, folded_rotations, kept_target
from ggml_tern.convert.quantize.targets import Target, choose_target
from ggml_tern.convert.quantize.ternarize import Stats, encode, is_ternary, sample
from ggml_tern.convert.read.lora import Adapter
from ggml_tern.convert.rotate.rotated_ternary import find_rotation, folded, is_plain_ternary, snaps
from ggml_tern.convert.rotate.rotation import RotationChoice, plan_rotation
from ggml_tern.convert.verdict import Judgement, judge
from ggml_tern.convert.write.writer import OutputFile, measure
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import F16, FILE_TYPES, type_by_id


@dataclass
class Report:
    """What a conversion made.

    Attributes:
        output: the file, `size` bytes long.
        targets: its tensors in file order, with what quantizing each cost in `stats`.
        notes: one line for each thing that the user should know.
        chats: whether it holds a chat template, as models do that answer and do not only go on with a text.
        dry: nothing was written, and `stats` are estimates from some rows of each tensor.
    """

    output: Path
    targets: list[Target] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: int = 0
    chats: bool = False
    dry: bool = False

    @property
    def judgement(self) -> Judgement:
        """What became of the model."""
        return judge(zip(self.targets, self.stats, strict=True))


@dataclass(frozen=True)
class Conversion:
    """What converting a model will make; nothing of it is written yet.

    Attributes:
        model: the model, which stays as it is.
        targets: the tensors of the file, in file order, with their types.
        rotations: of the tensors that this conversion folds, by name.
        lossless: refuse what is not `Stats.is_lossless`.
        notes: one line for each thing that the user should know.
    """

    model: InputModel
    targets: list[Target]
    rotations: Mapping[str, _core.Rotation]
    lossless: bool
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(target.nbytes for target in self.targets)


def convert(
    path: Path,
    output: Path,
    choice: TypeChoice,
    *,
    rotation: RotationChoice | None = None,
    adapters: Sequence[Adapter] = (),
    keep_mtp: bool = False,
    force: bool = False,
    dry: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Report:
    """Convert the model in `path`, a Hugging Face model directory or a GGUF file, to the GGUF file `output`.

    Args:
        choice: the types of the tensors.
        rotation: how to rotate weights; None: only those of a model that is ternary in no other way.
        adapters: LoRAs to merge first.
        keep_mtp: convert the multi-token prediction head too.
        force: replace an existing output.
        dry: write nothing, and report what would be made.
        n_threads: threads that quantize; 0 for one per core.
        start, advance: told the number of bytes of tensor data, first in total and then as they are written.

    Raises TernError for anything that the user can mend; the output then does not exist, or is what it was.
    """
    model = open_model(path, adapters, keep_mtp=keep_mtp)
    check_output(output, model.files(), force)
    conversion = prepare(model, choice, rotation)
    if dry:
        return foresee(conversion, output)
    return write(conversion, output, force=force, n_threads=n_threads, start=start, advance=advance)


def prepare(model: InputModel, choice: TypeChoice, rotation: RotationChoice | None = None) -> Conversion:
    """Choose the type and the basis of every tensor. Reads some weights where they decide, and writes
    nothing.

    Raises TernError for a choice that does not fit the model.
    """
    if model.tied and choice.head is not None:
        raise TernError(
            f"{model.path}: its head is its embedding, so --head has no effect; give the type with --embed"
        )
    check_choice(choice, model.specs)
    rotations, notes = _rotations(model, choice, rotation)
    targets = _choose_targets(model, choice, rotations)
    check_folded_types(model, targets)
    rotations = folded_rotations(targets, rotations)
    if (rotation is not None or rotations) and not rotations.keys() - {EMBEDDING}:
        raise TernError(
            f"{model.path}: no matrix gets {' or '.join(t.name for t in FOLDED_TYPES)}; drop --rotate"
        )
    notes = [*model.notes, *notes, *_rotation_notes(targets, rotations)]
    notes += model.notes_for({target.spec.name: target.type.id for target in targets})
    return Conversion(model, targets, rotations, choice.lossless, notes)


def write(
    conversion: Conversion,
    output: Path,
    *,
    force: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Report:
    """Write the file that a conversion makes. The other arguments are those of `convert`.

    Raises TernError for weights that a type cannot hold, an output that cannot be written, and one that has
    appeared meanwhile, which without `force` is left as it is.
    """
    model, targets = conversion.model, conversion.targets
    n_threads = n_threads or len(os.sched_getaffinity(0))
    with OutputFile(output, model.arch, replace=force) as file:
        report = _begin(conversion, output, file.metadata)
        file.write_header(targets)
        start(conversion.nbytes)
        with ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
            for target in targets:
                # Mapped while this tensor is written, and no longer.
                sources = model.sources[target.spec.name]
                pieces = encode(target, sources, pool, n_threads, lossless=conversion.lossless)
                try:
                    stats = file.write_tensor(target, pieces, advance)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                report.stats.append(stats)
        report.size = file.commit()
    return report


def foresee(conversion: Conversion, output: Path) -> Report:
    """What `write` would make: the size of the file exactly, what quantizing costs from some rows of each
    tensor. Nothing is written.

    Raises TernError for what `write` would refuse, as far as these rows, the metadata and the disk tell.
    """
    metadata = gguf.GGUFWriter(None, conversion.model.arch)
    report = _begin(conversion, output, metadata)
    report.dry = True
    report.size = measure(output, metadata, conversion.targets)
    for target in conversion.targets:
        sources = conversion.model.sources[target.spec.name]
        report.stats.append(sample(target, sources, lossless=conversion.lossless))
    return report


def _begin(conversion: Conversion, output: Path, metadata: gguf.GGUFWriter) -> Report:
    """Add all keys to the metadata of a file, and begin the report on it."""
    targets = conversion.targets
    report = Report(output, targets, notes=list(conversion.notes))
    report.notes += conversion.model.add_metadata(metadata)
    report.chats = any(gguf.Keys.Tokenizer.CHAT_TEMPLATE in part for part in metadata.kv_data)
    if conversion.rotations:
        add_rotation_keys(metadata, conversion.rotations, [target.spec.name for target in targets])
    metadata.add_file_type(_file_type(targets))
    metadata.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return report


def _rotations(
    model: InputModel, choice: TypeChoice, asked: RotationChoice | None
) -> tuple[dict[str, _core.Rotation], list[str]]:
    """The rotations of the tensors to fold, and what the user should know of them."""
    if asked is not None:
        notes = []
        if is_plain_ternary(model, choice):
            notes.append(
                "the weights are ternary as they are stored and not when they are rotated, which loses much "
                "of what they were trained to be; drop --rotate"
            )
        return plan_rotation(model, choice, asked), notes
    if model.rotations or (choice.matrix is not None and choice.matrix not in FOLDED_TYPES):
        return {}, []
    found = find_rotation(model, choice)
    if found is None:
        return {}, []
    note = (
        f"the weights are ternary in a rotated basis (Hadamard blocks of {found.block}, no signs), so they "
        f"are stored in it, as with --rotate --rotation-block {found.block}"
    )
    return plan_rotation(model, choice, found), [note]


def _choose_targets(
    model: InputModel, choice: TypeChoice, rotations: Mapping[str, _core.Rotation]
) -> list[Target]:
    """The type of every tensor. Those with a rotation are folded if that type can be."""
    targets = []
    for plain in model.specs:
        sources = model.sources[plain.name]
        stored = type_by_id(sources[0].type_id)
        kept = kept_target(plain, stored, choice.lossless) if rotations or model.rotations else None
        if kept is not None:
            targets.append(kept)
            continue
        rotation = rotations.get(plain.name)
        spec = plain if rotation is None else folded(plain, sources, rotation)
        # What is stored rotated can only be ternary.
        check = partial(is_ternary, spec, sources) if plain.name not in model.rotations else lambda: True
        target = choose_target(spec, choice, stored, check)
        targets.append(target if target.type in FOLDED_TYPES else replace(target, spec=plain))
    return targets


def _rotation_notes(targets: Sequence[Target], rotations: Mapping[str, _core.Rotation]) -> list[str]:
    if not rotations:
        return []
    rotation = next(iter(rotations.values()))
    signs = "no signs" if rotation.signs is None else "signs"
    lines = [f"rotated: {len(rotations)} tensors, Hadamard blocks of {rotation.block}, {signs}"]
    if snapped := [target for target in targets if snaps(target.spec)]:
        lines.append(
            f"ternary in the rotated basis but for the rounding of what is stored, and taken as ternary: "
            f"{len(snapped)} of {len(rotations)} rotated tensors"
        )
    return lines


def _file_type(targets: Sequence[Target]) -> int:
    """The general.file_type of the type that most weights of the matrices have."""
    weights: Counter[int] = Counter()
    for target in targets:
        if target.spec.role is Role.MATRIX:
            weights[target.type.id] += target.n_weights
    commonest = weights.most_common(1)[0][0] if weights else F16.id
    return FILE_TYPES.get(commonest, FILE_TYPES[F16.id])
