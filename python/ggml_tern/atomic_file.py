"""Files that appear whole or not at all: written beside their place, synced, and renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ggml_tern.errors import TernError

#: Bytes that are written before the disk is told to write them.
_SYNC = 1 << 25


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


class AtomicFile:
    """A file that appears whole or not at all. Use as a context manager: leaving it by an exception removes
    what was written to `temporary`; `publish` makes it appear under its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Same directory, so that the rename cannot cross file systems; the random part keeps two conversions
        # apart.
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._needed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.temporary.unlink(missing_ok=True)

    def require_space(self, nbytes: int) -> None:
        """Raise TernError when the disk cannot hold the file, whose size will be about `nbytes`."""
        self._needed = nbytes
        with self.explain():
            if nbytes > shutil.disk_usage(self.path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def publish(self) -> int:
        """Sync and rename the file, which must be closed or flushed; return its size in bytes."""
        with self.explain():
            _sync(self.temporary)
            size = self.temporary.stat().st_size
            os.replace(self.temporary, self.path)
            # The rename itself survives a crash only once the directory is on disk.
            _sync(self.path.parent)
        return size

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Turn an operating system error into a TernError that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                with contextlib.suppress(OSError):
                    free = shutil.disk_usage(self.path.parent).free
                    raise TernError(
                        f"{self.path}: no space left on device: the file needs {self._needed / 1e6:.1f} MB, "
                        f"{(free + _size(self.temporary)) / 1e6:.1f} MB are free in {self.path.parent}"
                    ) from None
            raise TernError(f"{self.path}: cannot be written: {error.strerror or error}") from None


class EarlySync:
    """Has the disk write while more is being made, so that the sync at the end has little left to do."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._running: Future[None] | None = None
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def wrote(self, nbytes: int) -> None:
        """Told of every write. Raises OSError for one that the disk did not take."""
        self._waiting += nbytes
        if self._waiting < _SYNC or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        self._file.flush()
        self._running = self._pool.submit(os.fdatasync, self._file.fileno())
        self._waiting = 0

    def finish(self) -> None:
        """Wait for the disk. Raises OSError for a write that it did not take."""
        self._pool.shutdown()
        # An error that a sync has seen is not told to the next one.
        if self._running is not None:
            self._running.result()

    def abandon(self) -> None:
        """Wait, before the file is closed, whatever became of the writes."""
        self._pool.shutdown()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
