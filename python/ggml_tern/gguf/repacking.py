"""``tern repack``: the same ternary values in another ternary type, tensor by tensor, or not at all; or a
rotated model's weights in the plain basis, in F16 or F32.

All metadata and all other tensors are copied byte for byte; of the header only types, offsets and
general.file_type change, and where weights become plain, the keys of their rotation go. The parts of a split
model become one file, and the architectures that only bitnet.cpp knows llama.cpp's.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.atomic_file import AtomicFile, EarlySync, check_output
from ggml_tern.errors import TernError
from ggml_tern.gguf import bitnet, i2_s
from ggml_tern.gguf.reader import (
    HADAMARD,
    LEGACY_NOTE,
    ROTATED_TYPES_TO_WRITE,
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS,
    GGUFSource,
    GGUFTensor,
    Part,
)
from ggml_tern.ordered import in_order
from ggml_tern.tensors.types import FILE_TYPES
from ggml_tern.tensors.values import as_float32

#: The types that can be written, by the names of an option.
TARGETS = {_core.type_name(type_id).lower(): type_id for type_id in _core.TERNARY_TYPES}

#: The types that plain weights can be written in, and their numpy types.
PLAIN_TARGETS = {"f16": _core.TYPE_F16, "f32": _core.TYPE_F32}
_DTYPES = {_core.TYPE_F16: np.float16, _core.TYPE_F32: np.float32}

#: Weights in one piece of work: large enough to hide the cost of a call, small enough for the caches.
_PIECE = 1 << 20


@dataclass
class Report:
    """What was made.

    Attributes:
        output: the file, `size` bytes long.
        source: what it was made from.
        types: the type of each tensor in it, by name, in file order.
        plain: of the tensors that become plain, the rotation, where they have one.
        notes: one line for each thing that the user should know.
    """

    output: Path
    source: GGUFSource
    types: dict[str, int]
    plain: Mapping[str, _core.Rotation | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    size: int = 0


def repack(
    source: GGUFSource,
    output: Path,
    target: int,
    *,
    force: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Report:
    """Write `source` to the GGUF file `output` with every ternary tensor in the type `target`.

    A tensor whose rows the target's blocks do not divide goes to Q2_0, which holds any ternary tensor; a note
    says so. Rotated tensors stay so.

    Args:
        target: the id of a ternary type, of PQ2_0 or PTQ1_0 where tensors are rotated.
        force: replace an existing output.
        n_threads: threads that repack; 0 for one per core.
        start, advance: told the number of bytes of tensor data, first in total and then as they are written.

    Raises TernError, naming the tensor, where the target cannot hold a tensor's values exactly, and for an
    output that cannot be written; the output then does not exist, or is what it was.
    """
    check_output(output, source.files(), force)
    if not any(tensor.is_ternary for tensor in source.tensors.values()):
        raise TernError(
            f"{source.path}: holds no ternary tensor, so there is nothing to repack; if the model was "
            "trained ternary, `ternconv --type auto` packs it"
        )
    if source.is_rotated and target not in ROTATED_TYPES_TO_WRITE:
        raise TernError(
            f"{source.path}: its weights are rotated, and nothing undoes that in {_core.type_name(target)}; "
            "use --type pq2_0 or --type ptq1_0, or --unrotate for plain weights in F16"
        )
    report = Report(output, source, {name: _fitting(t, target) for name, t in source.tensors.items()})
    if source.architecture in bitnet.FOREIGN_ARCHITECTURES:
        bitnet.check_foreign(source)
    report.notes = _notes(report, target)
    if bitnet.has_squared_relu(source.metadata):
        report.notes += bitnet.notes_on_squared_relu(report.types)
    _write(report, force, n_threads, start, advance)
    return report


def unrotate(
    source: GGUFSource,
    output: Path,
    target: int,
    *,
    force: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Report:
    """Write `source` to the GGUF file `output` with every rotated or ternary tensor plain, in the type
    `target`, F16 or F32, and without the keys of the rotation.

    The other arguments are those of `repack`.

    Raises TernError for a file that is not rotated, keys that break a rule, a value that F16 cannot hold, and
    an output that cannot be written; the output then does not exist, or is what it was.
    """
    check_output(output, source.files(), force)
    if not source.is_rotated:
        raise TernError(f"{source.path}: none of its weights is rotated, so there is nothing for --unrotate")
    rotations = source.rotations
    plain = {
        name: rotations.get(name)
        for name, tensor in source.tensors.items()
        if tensor.is_ternary or name in rotations
    }
    types = {name: target if name in plain else tensor.type for name, tensor in source.tensors.items()}
    report = Report(output, source, types, plain, _notes_on_source(source))
    report.notes.append(f"{len(rotations)} rotated tensors are plain now, in {_core.type_name(target)}")
    _write(report, force, n_threads, start, advance)
    return report


def _write(
    report: Report,
    force: bool,
    n_threads: int,
    start: Callable[[int], None],
    advance: Callable[[int], None],
) -> None:
    """Write the file of a report and note its size there."""
    source = report.source
    sizes = [_nbytes(t, report.types[t.name]) for t in source.tensors.values()]
    alignment = source.parts[0].header["alignment"]
    header = _header(report, sizes, alignment)

    with AtomicFile(report.output, replace=force) as out:
        out.require_space(len(header) + sum(_padded(size, alignment) for size in sizes))
        start(sum(sizes))
        n_threads = n_threads or len(os.sched_getaffinity(0))
        with (
            out.explain(),
            out.temporary.open("r+b") as file,
            ThreadPoolExecutor(n_threads, thread_name_prefix="repack") as pool,
            EarlySync(file) as early,
        ):
            file.write(header)
            for tensor in source.tensors.values():
                for piece in _pieces(tensor, report, pool, n_threads):
                    file.write(piece.data)
                    advance(piece.nbytes)
                    early.wrote(piece.nbytes)
                file.write(bytes(-file.tell() % alignment))
        _verify(out.temporary, report, sizes)
        report.size = out.publish()


def _fitting(tensor: GGUFTensor, target: int) -> int:
    """The type of a tensor in the output."""
    if not tensor.is_ternary:
        return tensor.type
    return target if tensor.n_in % _core.block_size(target) == 0 else _core.TYPE_Q2_0


def _notes_on_source(source: GGUFSource) -> list[str]:
    notes: list[str] = []
    if source.is_legacy:
        notes.append(LEGACY_NOTE)
    if source.architecture in bitnet.FOREIGN_ARCHITECTURES:
        notes.append(bitnet.renaming_note(source.architecture))
    if len(source.parts) > 1:
        notes.append(f"joined the {len(source.parts)} parts of the model")
    return notes


def _notes(report: Report, target: int) -> list[str]:
    notes = _notes_on_source(report.source)
    widths = Counter(
        tensor.n_in
        for tensor in report.source.tensors.values()
        if tensor.is_ternary and report.types[tensor.name] != target
    )
    for n_in, count in widths.items():
        notes.append(
            f"n_in {n_in} is not a multiple of {_core.block_size(target)}, so Q2_0 instead of "
            f"{_core.type_name(target)} in {count} tensor{'s' if count > 1 else ''}"
        )
    return notes


# ---- the header ----


def _header(report: Report, sizes: Sequence[int], alignment: int) -> bytes:
    """Everything that comes before the data, with its padding: the keys of the first part and the tables of
    all, as they are in the file, with types, offsets and general.file_type exchanged."""
    first = report.source.parts[0]
    dropped = {SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS} if len(report.source.parts) > 1 else set()
    if report.plain:
        dropped |= {name for name in first.header["key_extents"] if name.startswith(HADAMARD)}
    keys = [_key_bytes(first, name, report) for name in first.header["key_extents"] if name not in dropped]
    if report.source.architecture in bitnet.FOREIGN_ARCHITECTURES:
        keys.append(_text_key(bitnet.ACTIVATION_KEY, bitnet.SQUARED_RELU))
    table: list[bytes] = []
    offset = 0
    for tensor, size in zip(report.source.tensors.values(), sizes, strict=True):
        begin, end = tensor.extent
        unchanged = tensor.part.data[begin : end - 12].tobytes()
        table.append(unchanged + struct.pack("<IQ", report.types[tensor.name], offset))
        offset += _padded(size, alignment)
    counts = struct.pack("<IQQ", first.header["version"], len(table), len(keys))
    header = b"".join([b"GGUF", counts, *keys, *table])
    return header + bytes(-len(header) % alignment)


def _key_bytes(part: Part, name: str, report: Report) -> bytes:
    begin, end = part.header["key_extents"][name]
    raw = part.data[begin:end].tobytes()
    architecture = report.source.architecture or ""
    if architecture in bitnet.FOREIGN_ARCHITECTURES:
        if name == "general.architecture":
            return _text_key(name, bitnet.ARCHITECTURE)
        raw = _text(bitnet.stock_key(name, architecture)) + raw[len(_text(name)) :]
    # Value type u32, then the value; another type is none that llama.cpp reads.
    if name == "general.file_type" and raw[-8:-4] == struct.pack("<I", 4):
        file_type = _file_type(report)
        return raw if file_type is None else raw[:-4] + struct.pack("<I", file_type)
    return raw


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _text_key(name: str, value: str) -> bytes:
    """A key whose value is a string."""
    return _text(name) + struct.pack("<I", 8) + _text(value)


def _file_type(report: Report) -> int | None:
    """The general.file_type of the output: that of the type that most weights of its matrices have, or None
    where that type is none of those that were repacked."""
    weights: Counter[int] = Counter()
    for tensor in report.source.tensors.values():
        if len(tensor.shape) > 1:
            weights[report.types[tensor.name]] += tensor.n_weights
    commonest = weights.most_common(1)[0][0]
    chosen = {*TARGETS.values(), *(PLAIN_TARGETS.values() if report.plain else ())}
    return FILE_TYPES[commonest] if commonest in chosen else None


def _padded(nbytes: int, alignment: int) -> int:
    return nbytes + -nbytes % alignment


def _nbytes(tensor: GGUFTensor, type_id: int) -> int:
    if type_id == tensor.type and not tensor.is_ternary:
        return tensor.data.nbytes
    return tensor.n_weights // _core.block_size(type_id) * _core.type_size(type_id)


def _verify(path: Path, report: Report, sizes: Sequence[int]) -> None:
    """Read the finished header back and compare it with what was meant."""
    meant = [
        (tensor.name, report.types[tensor.name], list(reversed(tensor.shape)), size)
        for tensor, size in zip(report.source.tensors.values(), sizes, strict=True)
    ]
    try:
        header = _core.read_gguf_header(path)
    except _core.FormatError as error:
        # A few blocks of Q2_0 may be taken for those of old files.
        raise TernError(
            f"{report.output}: would not be read as it is meant: {error}; use another --type"
        ) from None
    found = [(entry["name"], entry["type"], entry["shape"], entry["nbytes"]) for entry in header["tensors"]]
    if found != meant:
        raise AssertionError(f"{path}: the file that was written does not read back as it was meant")
    if report.source.is_rotated and not report.plain:
        try:
            # The parts of a model have tensors that the keys name in one place only now.
            _core.read_hadamard(path)
        except _core.FormatError as error:
            raise TernError(f"{report.source.path}: {error}") from None


# ---- the data ----


def _pieces(
    tensor: GGUFTensor, report: Report, pool: ThreadPoolExecutor, n_threads: int
) -> Iterator[NDArray[np.uint8]]:
    """A tensor's bytes in the output, piece by piece, in order."""
    target = report.types[tensor.name]
    convert: Callable[[GGUFTensor, slice, int], NDArray[np.uint8]]
    if tensor.name in report.plain:
        convert = partial(_plain, rotation=report.plain[tensor.name])
    elif tensor.is_ternary:
        convert = transcoded
    else:
        for begin in range(0, tensor.data.size, _PIECE):
            yield tensor.data[begin : begin + _PIECE]
        return
    rows = max(1, _PIECE // tensor.n_in)
    yield from in_order(
        pool,
        n_threads,
        (
            partial(convert, tensor, slice(begin, begin + rows), target)
            for begin in range(0, tensor.n_rows, rows)
        ),
    )


def _plain(
    tensor: GGUFTensor, rows: slice, target: int, rotation: _core.Rotation | None
) -> NDArray[np.uint8]:
    """Some rows of a tensor in the plain basis, in F16 or F32: uint8, flat."""
    values = as_float32(tensor.rows[rows])
    if rotation is not None:
        values = rotation.unrotate(values, n_threads=1)
    with np.errstate(over="ignore"):
        plain = values.astype(_DTYPES[target])
    if not np.isfinite(plain).all():
        raise TernError(
            f"{tensor.where}: holds weights of up to {np.abs(values).max():g}, too large for "
            f"{_core.type_name(target)}; use --type f32"
        )
    return plain.view(np.uint8).reshape(-1)


def transcoded(tensor: GGUFTensor, rows: slice, target: int) -> NDArray[np.uint8]:
    """Some rows of a ternary tensor in another ternary type: uint8, flat.

    Raises TernError, naming the tensor, where that type cannot hold the values exactly.
    """
    type_id, blocks = tensor.type, tensor.blocks[rows]
    n_weights = blocks.shape[0] * tensor.n_in
    if type_id == _core.TYPE_I2_S:
        if not tensor.has_fp16_scale:
            raise TernError(
                f"{tensor.where}: its scale {tensor.tensor_scale!s} is not exact in fp16, so no other "
                "ternary type holds its values; `ternconv` converts the file with the scale rounded"
            )
        type_id, blocks = _core.TYPE_TQ2_0, i2_s.to_tq2_0(blocks, np.float16(tensor.tensor_scale))
    try:
        data = _core.transcode(type_id, target, blocks, n_threads=1)
    except ValueError as error:
        # The message begins with types and a row of this piece, up to the colon.
        reason = str(error).partition(": ")[2]
        raise TernError(
            f"{tensor.where}: {tensor.type_name} to {_core.type_name(target)} would lose information: "
            f"{reason}; --type q2_0 holds the values of any ternary type"
        ) from None
    # I2_S may have come with zeros at its end, to fill a block.
    return data.reshape(-1)[: n_weights // _core.block_size(target) * _core.type_size(target)]
