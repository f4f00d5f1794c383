"""Write: a GGUF file that appears whole or not at all.

gguf-py's GGUFWriter writes header, metadata and tensor table; the tensor data is streamed behind it.
Everything goes to a temporary file beside the output, which is checked, synced and renamed only when it is
complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import gguf
import numpy as np

from ggml_tern import _core
from ggml_tern.atomic_file import AtomicFile, EarlySync
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Piece, Stats
from ggml_tern.errors import TernError


class OutputFile(AtomicFile):
    """The GGUF file being written.

    `metadata` is the GGUFWriter to add keys to before `write_header`; after it, each tensor goes through
    `write_tensor` in the order of the table, and `commit` makes the file appear under its name.
    """

    def __init__(self, path: Path, arch: str, *, replace: bool = True) -> None:
        super().__init__(path, replace=replace)
        self.metadata = gguf.GGUFWriter(None, arch)
        self._targets: list[Target] = []
        self._file: IO[bytes] | None = None
        self._early: EarlySync | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._early is not None:
                self._early.abandon()
            with contextlib.suppress(OSError):
                self.metadata.close()
        super().__exit__(kind, error, trace)

    def write_header(self, targets: Sequence[Target]) -> None:
        """Write everything that comes before the data. Raises TernError when the disk cannot hold the
        file."""
        self._targets = list(targets)
        self.require_space(_data_bytes(targets))
        with self.explain():
            self._file = _write_header(self.metadata, self._targets, self.temporary)
            self._early = EarlySync(self._file)
            self._pad()

    def write_tensor(self, target: Target, pieces: Iterator[Piece], progress: Callable[[int], None]) -> Stats:
        """Append one tensor's pieces; `progress` is told the number of bytes as they are written."""
        assert self._file is not None and self._early is not None
        total = Stats()
        written = 0
        for piece in pieces:
            with self.explain():
                self._file.write(piece.data.data)
                self._early.wrote(piece.data.nbytes)
            written += piece.data.nbytes
            total.add(piece.stats)
            progress(piece.data.nbytes)
        if written != target.nbytes:
            raise AssertionError(f"{target.spec.name}: wrote {written} bytes, the table says {target.nbytes}")
        with self.explain():
            self._pad()
        return total

    def commit(self) -> int:
        """Sync, check and rename the file; return its size in bytes."""
        assert self._file is not None and self._early is not None
        with self.explain():
            self._early.finish()
            self.metadata.close()
            _verify(self.temporary, self._targets, self.path)
        return self.publish()

    def _pad(self) -> None:
        assert self._file is not None
        self._file.write(bytes(-self._file.tell() % self.metadata.data_alignment))


def measure(path: Path, metadata: gguf.GGUFWriter, targets: Sequence[Target]) -> int:
    """The bytes of the file that `OutputFile` would write of this metadata, which has no tensors yet. Nothing
    is written to any disk. Raises TernError when the disk cannot hold it, and where its header would not be
    read as it is meant."""
    output = AtomicFile(path)
    output.require_space(_data_bytes(targets))
    with contextlib.closing(os.fdopen(os.memfd_create("header"), "rb")) as memory, output.explain():
        in_memory = Path(f"/proc/self/fd/{memory.fileno()}")
        try:
            size = _padded(_write_header(metadata, targets, in_memory).tell()) + _data_bytes(targets)
        finally:
            metadata.close()
        # A reader wants all the data to be there: a hole, which takes no memory.
        os.truncate(memory.fileno(), size)
        _verify(in_memory, targets, path)
    return size


def _write_header(metadata: gguf.GGUFWriter, targets: Sequence[Target], path: Path) -> IO[bytes]:
    """Write all that comes before the data. Returns the file, which `metadata.close` closes."""
    for target in targets:
        # With a dtype that is not uint8, gguf-py takes the shape as counted in weights and the type id as
        # it is: this is how ids that it has no name for (PQ2_0, PTQ1_0) get into the table.
        metadata.add_tensor_info(
            target.spec.name,
            target.spec.shape,
            np.dtype(np.float32),
            target.nbytes,
            raw_dtype=target.type.id,  # type: ignore[arg-type]
        )
    metadata.write_header_to_file(path)
    metadata.write_kv_data_to_file()
    metadata.write_ti_data_to_file()
    assert metadata.fout is not None
    return metadata.fout[0]


def _verify(written: Path, targets: Sequence[Target], path: Path) -> None:
    """Read the header that was written for `path` back and compare it with what was meant."""
    try:
        header = _core.read_gguf_header(written)
    except _core.FormatError as error:
        # A few blocks of Q2_0 may be taken for those of old files.
        raise TernError(f"{path}: would not be read as it is meant: {error}; use another --type") from None
    meant = [
        (target.spec.name, target.type.id, list(reversed(target.spec.shape)), target.nbytes)
        for target in targets
    ]
    found: list[tuple[str, int, list[int], int]] = [
        (tensor["name"], tensor["type"], list(tensor["shape"]), tensor["nbytes"])
        for tensor in header["tensors"]
    ]
    if found != meant:
        raise AssertionError(f"{written}: the file that was written does not read back as it was meant")


def _data_bytes(targets: Sequence[Target]) -> int:
    """Bytes of all tensor data in the file."""
    return sum(_padded(target.nbytes) for target in targets)


def _padded(nbytes: int) -> int:
    return gguf.GGUFWriter.ggml_pad(nbytes, gguf.GGUF_DEFAULT_ALIGNMENT)
