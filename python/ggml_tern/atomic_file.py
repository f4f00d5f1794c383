"""Files that appear whole or not at all: written beside their place, synced, and renamed when complete.

A part file is locked for as long as the process that writes it lives, by which a later one can tell what was
left behind by a kill or a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ggml_tern.errors import TernError

#: Bytes that are written before the disk is told to write them.
_SYNC = 1 << 25

#: What a file system answers that has no use for being told to write, or cannot do it.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

#: The names of part files.
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")

# renameat2 of Linux: <fcntl.h>, <linux/fs.h>
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


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
    if path.is_symlink() and not path.exists() and not force:
        raise TernError(
            f"{path}: is a link to {path.readlink()}, which leads nowhere; pass --force to replace it"
        )
    parent = path.parent
    if not parent.is_dir():
        raise TernError(f"{path}: the directory {parent} does not exist; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TernError(f"{path}: the directory {parent} is not writable; choose another one")


def stale_parts(folder: Path) -> list[str]:
    """A line about each part file in `folder` that nobody writes any more, with the way to remove it.

    They are not removed: on a file system of the network, the process may live on another machine.
    """
    lines = []
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _PART.fullmatch(entry.name))
    except OSError:
        return []
    for name in names:
        path = folder / name
        if not path.is_symlink() and path.is_file() and not _is_locked(path):
            lines.append(
                f"{path} ({_size(path) / 1e6:.1f} MB) was left by a run that was killed; if none of another "
                f"machine writes it, remove it: rm {shlex.quote(str(path))}"
            )
    return lines


def _is_locked(path: Path) -> bool:
    """Whether a process has the lock of a part file, or whether that cannot be told."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class AtomicFile:
    """A file that appears whole or not at all. Use as a context manager: leaving it by an exception removes
    what was written to `temporary`, which is there and empty at first; `publish` makes it appear under its
    name.

    replace: whether it takes the place of a file that is there by then.
    """

    def __init__(self, path: Path, *, replace: bool = True) -> None:
        self.path = path
        # Same directory, so that the rename cannot cross file systems; the random part keeps two conversions
        # apart.
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        self._replace = replace
        self._needed = 0
        self._lock: int | None = None

    def __enter__(self) -> Self:
        with self.explain():
            self._lock = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            # Where there are no locks, nobody will call the file stale, either.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also where it was published, or nothing was written after all.
        self.temporary.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require_space(self, nbytes: int) -> None:
        """Raise TernError when the disk cannot hold the file, whose size will be about `nbytes`."""
        self._needed = nbytes
        with self.explain():
            if nbytes > shutil.disk_usage(self.path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def publish(self) -> int:
        """Sync and rename the file, which must be closed or flushed; return its size in bytes.

        Raises TernError where a file has appeared that is not to be replaced. What was made is then kept
        under another name, which the message tells.
        """
        with self.explain():
            _sync(self.temporary)
            size = self.temporary.stat().st_size
            if self._replace:
                os.replace(self.temporary, self.path)
            elif not _rename_to_new(self.temporary, self.path):
                raise self._keep_aside()
        # The rename itself survives a crash only once the directory is on disk; some refuse to be told so,
        # and the file is there all the same.
        with contextlib.suppress(OSError):
            _sync(self.path.parent)
        return size

    def _keep_aside(self) -> TernError:
        """Keep the file under a name that is free, and the error that tells it."""
        number = 1
        while not _rename_to_new(self.temporary, aside := self.path.with_name(f"{self.path.name}.{number}")):
            number += 1
        return TernError(
            f"{self.path}: has appeared while it was being made, and stays as it is; what was made is {aside}"
        )

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
        self._running = self._pool.submit(_sync_descriptor, self._file.fileno())
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


def _rename_to_new(old: Path, new: Path) -> bool:
    """Rename a file unless the new name is taken; False if it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        source, target = os.fsencode(old), os.fsencode(new)
        if libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) == 0:
            return True
        if ctypes.get_errno() == errno.EEXIST:
            return False
    # An older kernel or another file system. A hard link is not made over a file, either.
    try:
        os.link(old, new)
    except FileExistsError:
        return False
    except OSError:
        # None of these: all that is left is to look first.
        if os.path.lexists(new):
            return False
        os.rename(old, new)
        return True
    os.unlink(old)
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _sync_descriptor(descriptor: int) -> None:
    """Raises OSError for a write that the disk did not take."""
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
