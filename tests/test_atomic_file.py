"""Output files appear whole or not at all, take nobody's place unasked, and leave nothing behind unsaid."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convert_models import llama_dir
from ggml_tern.atomic_file import AtomicFile, check_output, stale_parts
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.errors import TernError
from ggml_tern.gguf import repacking
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.types import Q8_0
from reference import formats as ref
from reference import gguf_files as files

TERN = Path(sys.executable).parent / "tern"
TERNCONV = Path(sys.executable).parent / "ternconv"


@pytest.fixture(params=["renameat2", "link", "neither"])
def renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ways of a rename that replaces nothing, the later ones as file systems have them that lack the
    earlier."""

    class NoRenameat2:
        def __init__(self, *arguments: object, **options: object) -> None:
            pass

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if request.param != "renameat2":
        monkeypatch.setattr("ctypes.CDLL", NoRenameat2)
    if request.param == "neither":
        monkeypatch.setattr("os.link", refuse)
    yield


@pytest.mark.usefixtures("renames")
def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for number in (1, 2):
        with pytest.raises(TernError) as caught, AtomicFile(path, replace=False) as file:
            file.temporary.write_text(f"new {number}")
            path.write_text("of somebody else")
            file.publish()
        assert f"{path}: has appeared" in str(caught.value) and f"what was made is {path}.{number}" in str(
            caught.value
        )
    found = {entry.name: entry.read_text() for entry in tmp_path.iterdir()}
    assert found == {"m.gguf": "of somebody else", "m.gguf.1": "new 1", "m.gguf.2": "new 2"}


@pytest.mark.usefixtures("renames")
def test_a_file_that_nobody_made_meanwhile_appears(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "m.gguf", replace=False) as file:
        file.temporary.write_text("new")
        assert file.publish() == 3
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("m.gguf", "new")]


def test_force_replaces_what_appears_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with AtomicFile(path) as file:
        file.temporary.write_text("new")
        path.write_text("of somebody else")
        file.publish()
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("m.gguf", "new")]


@pytest.mark.parametrize("force", [False, True])
def test_conversions_that_are_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool) -> None:
    """Something else makes the output while ternconv and repack are at work."""
    model = llama_dir(tmp_path / "hf")
    trits = np.ones((4, 256), np.int8)
    packed = files.write(
        tmp_path / "in.gguf",
        {"general.architecture": "llama"},
        [files.ternary("w", ref.PQ2_0, trits, np.ones((4, 2), np.float32))],
    )
    for name in ("converted", "repacked"):
        path = tmp_path / f"{name}.gguf"

        def appear(total: int, path: Path = path) -> None:
            path.write_text("of somebody else")

        def make(path: Path = path, name: str = name, appear: object = appear) -> None:
            if name == "converted":
                convert(model, path, TypeChoice(Q8_0), force=force, start=appear)  # type: ignore[arg-type]
            else:
                target = repacking.TARGETS["tq2_0"]
                repacking.repack(GGUFSource(packed), path, target, force=force, start=appear)  # type: ignore[arg-type]

        if force:
            make()
            assert GGUFSource(path).tensors
        else:
            with pytest.raises(TernError, match=r"has appeared while it was being made"):
                make()
            assert path.read_text() == "of somebody else"
            assert GGUFSource(tmp_path / f"{name}.gguf.1").tensors
    assert not list(tmp_path.glob(".*"))


def test_a_link_to_nothing_is_something(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.symlink_to("elsewhere")
    with pytest.raises(TernError, match="is a link to elsewhere"):
        check_output(path, [], force=False)
    check_output(path, [], force=True)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.EROFS, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_refuses_to_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    path = tmp_path / "m.gguf"
    with AtomicFile(path) as file:
        file.temporary.write_text("new")
        file.publish()
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("number", "fails"), [(errno.EINVAL, False), (errno.ENOSYS, False), (errno.EIO, True)]
)
def test_a_file_that_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    """A file system may have no sync; one whose disk fails must be heard."""

    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fsync)
    path = tmp_path / "m.gguf"
    try:
        with AtomicFile(path) as file:
            file.temporary.write_text("new")
            file.publish()
    except TernError as error:
        assert fails and "Input/output error" in str(error)
    assert path.exists() is not fails and not list(tmp_path.glob(".*"))


# ---- what a kill leaves behind ----


def test_parts_that_nobody_writes_are_told(tmp_path: Path) -> None:
    """Those that are being written, and other files, are not."""
    stale = tmp_path / ".old name.gguf.0123abcd.part"
    stale.write_bytes(bytes(2_500_000))
    for name in ("m.gguf", ".m.gguf.0123abcd", ".m.gguf.0123abc.part", "m.gguf.0123abcd.part"):
        (tmp_path / name).touch()
    (tmp_path / ".m.gguf.00000000.part").symlink_to(stale)
    (tmp_path / ".m.gguf.00000001.part").mkdir()
    with AtomicFile(tmp_path / "new.gguf"):
        (line,) = stale_parts(tmp_path)
        assert line.startswith(f"{stale} (2.5 MB) was left") and line.endswith(f"rm '{stale}'")
        with stale.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert stale_parts(tmp_path) == []
    assert stale_parts(tmp_path / "nowhere") == []


def a_large_file(path: Path) -> Path:
    """Holes, which read as zeros: 4 GB of weights that take no room."""
    n_rows = 1 << 20
    tensors = [files.Tensor("w", 142, (n_rows, 1 << 14), b"")]
    files.write(path, {"general.architecture": "llama"}, tensors)
    os.truncate(path, path.stat().st_size + n_rows * 34 * 128)
    return path


def started(command: list[Path | str], out: Path) -> subprocess.Popen[str]:
    """A command that has begun to write into `out`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size > 1 << 20 for path in out.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("program", ["ternconv", "tern repack"])
def test_what_a_kill_leaves_is_told_to_the_next(tmp_path: Path, program: str) -> None:
    source, out = a_large_file(tmp_path / "in.gguf"), tmp_path / "out"
    out.mkdir()
    command: list[Path | str] = [TERNCONV, source, out / "m.gguf", "--type", "pq2_0"]
    if program == "tern repack":
        command = [TERN, "repack", source, out / "m.gguf", "--type", "ptq1_0"]
    process = started(command, out)
    process.kill()
    process.communicate(timeout=60)
    (left,) = out.iterdir()

    small = files.write(
        tmp_path / "small.gguf",
        {"general.architecture": "llama"},
        [files.ternary("w", ref.PQ2_0, np.ones((4, 256), np.int8), np.ones((4, 2), np.float32))],
    )
    command[command.index(source)] = small
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"note: {left} (" in done.stderr and f"rm {left}" in done.stderr and done.stderr.count("\n") == 1
    assert left.exists()


@pytest.mark.parametrize("ignored", [False, True], ids=["as a terminal that closes", "under nohup"])
def test_hanging_up(tmp_path: Path, ignored: bool) -> None:
    source, out = a_large_file(tmp_path / "in.gguf"), tmp_path / "out"
    out.mkdir()
    command: list[Path | str] = [TERNCONV, source, out / "m.gguf", "--type", "pq2_0"]
    process = started(["nohup", *command] if ignored else command, out)
    process.send_signal(signal.SIGHUP)
    if ignored:
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (143 if ignored else 129), stderr
    assert list(out.iterdir()) == [] and "Traceback" not in stderr
