"""Stage 5, write: a GGUF file that appears whole or not at all.

gguf-py's GGUFWriter writes header, metadata and tensor table; the tensor data is streamed behind it.
Everything goes to a temporary file beside the output, which is checked, synced and renamed only when it is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import gguf
import numpy as np

from ggml_tern import _core
from ggml_tern.convert.ternarize import Piece, Stats, Target
from ggml_tern.errors import TernError


def check_output(path: Path, inputs: Sequence[Path], force: bool) -> None:
    """Refuse an output that cannot or must not be written, before any work is done."""
    for source in inputs:
        with contextlib.suppress(OSError):
            if path.samefile(source):
                raise TernError(
                    f"{path}: is a file of the model that is being converted; give another output"
                )
    if path.is_dir():
        raise TernError(f"{path}: is a directory; give the name of the GGUF file to write")
    if path.exists() and not path.is_file():
        raise TernError(f"{path}: is not a regular file; give the name of the GGUF file to write")
    if path.exists() and not force:
        raise TernError(f"{path}: already exists; pass --force to replace it")
    parent = path.parent
    if not parent.is_dir():
        raise TernError(f"{path}: the directory {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TernError(f"{path}: the directory {parent} is not writable; choose another one")


class OutputFile:
    """The GGUF file being written. Use as a context manager: leaving it by an exception removes what was
    written.

    `metadata` is the GGUFWriter to add keys to before `write_header`; after it, each tensor goes through
    `write_tensor` in the order of the table, and `commit` makes the file appear under its name.
    """

    def __init__(self, path: Path, arch: gguf.MODEL_ARCH) -> None:
        self.path = path
        # Same directory, so that the rename cannot cross file systems; the random part keeps two conversions
        # apart.
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self.metadata = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[arch])
        self._targets: list[Target] = []
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        with contextlib.suppress(OSError):
            self.metadata.close()
        self.temporary.unlink(missing_ok=True)

    def write_header(self, targets: Sequence[Target]) -> None:
        """Write everything that comes before the data. Raises TernError when the disk cannot hold the
        file."""
        self._targets = list(targets)
        for target in self._targets:
            # With a dtype that is not uint8, gguf-py takes the shape as counted in weights and the type id as
            # it is: this is how ids that it has no name for (PQ2_0, PTQ1_0) get into the table.
            self.metadata.add_tensor_info(
                target.spec.name,
                target.spec.shape,
                np.dtype(np.float32),
                target.nbytes,
                raw_dtype=target.type.id,  # type: ignore[arg-type]
            )
        with self._explain():
            needed = sum(_padded(target.nbytes) for target in self._targets)
            free = shutil.disk_usage(self.path.parent).free
            if needed > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.metadata.write_header_to_file(self.temporary)
            self.metadata.write_kv_data_to_file()
            self.metadata.write_ti_data_to_file()
            assert self.metadata.fout is not None
            self._file = self.metadata.fout[0]
            self._pad()

    def write_tensor(self, target: Target, pieces: Iterator[Piece], progress: Callable[[int], None]) -> Stats:
        """Append one tensor's pieces; `progress` is told the number of bytes as they are written."""
        assert self._file is not None
        total = Stats()
        written = 0
        for piece in pieces:
            with self._explain():
                self._file.write(piece.data.data)
            written += piece.data.nbytes
            total.add(piece.stats)
            progress(piece.data.nbytes)
        if written != target.nbytes:
            raise AssertionError(f"{target.spec.name}: wrote {written} bytes, the table says {target.nbytes}")
        with self._explain():
            self._pad()
        return total

    def commit(self) -> int:
        """Sync, check and rename the file; return its size in bytes."""
        assert self._file is not None
        with self._explain():
            self._file.flush()
            os.fsync(self._file.fileno())
            self.metadata.close()
            self._verify()
            size = self.temporary.stat().st_size
            os.replace(self.temporary, self.path)
            # The rename itself survives a crash only once the directory is on disk.
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        return size

    def _verify(self) -> None:
        """Read the finished header back and compare it with what was meant."""
        header = _core.read_gguf_header(str(self.temporary))
        meant = [
            (target.spec.name, target.type.id, list(reversed(target.spec.shape)), target.nbytes)
            for target in self._targets
        ]
        found: list[tuple[str, int, list[int], int]] = [
            (tensor["name"], tensor["type"], list(tensor["shape"]), tensor["nbytes"])
            for tensor in header["tensors"]
        ]
        if found != meant:
            raise AssertionError(
                f"{self.temporary}: the file that was written does not read back as it was meant"
            )

    def _pad(self) -> None:
        assert self._file is not None
        self._file.write(bytes(-self._file.tell() % self.metadata.data_alignment))

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        """Turn an operating system error into a TernError that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                needed = sum(_padded(target.nbytes) for target in self._targets)
                with contextlib.suppress(OSError):
                    free = shutil.disk_usage(self.path.parent).free
                    raise TernError(
                        f"{self.path}: no space left on device: the file needs {needed / 1e6:.1f} MB, "
                        f"{(free + _size(self.temporary)) / 1e6:.1f} MB are free in {self.path.parent}"
                    ) from None
            raise TernError(f"{self.path}: cannot be written: {error.strerror or error}") from None


def _padded(nbytes: int) -> int:
    return gguf.GGUFWriter.ggml_pad(nbytes, gguf.GGUF_DEFAULT_ALIGNMENT)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
