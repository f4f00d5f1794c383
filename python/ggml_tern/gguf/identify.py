"""What is this? Told from the first bytes of a file, or from what lies in a folder, before anything is read.

People hand in whatever a download left: the page about a file instead of the file, the pointer of Git LFS, an
archive, a folder of another format. Each is named here, with the way to the model. Of the packages nothing
but the error is imported, so that ``tern run`` can ask, too.
"""

from __future__ import annotations

import enum
import json
import re
import shlex
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable

#: Bytes of a file that are looked at.
_HEAD = 4096


class Kind(enum.Enum):
    """What can be read, and all else."""

    GGUF = enum.auto()
    #: A folder with config.json, as the hub serves models.
    CHECKPOINT = enum.auto()
    #: The weights of such a folder, or a part of them.
    SAFETENSORS = enum.auto()
    #: Something else that is known here.
    FOREIGN = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class Identity:
    """What a path holds.

    Attributes:
        path: as it was given.
        kind: what can be read, by its first bytes alone.
        what: the same in words that go behind "is".
        way_out: what to do in order to get a model that can be read.
    """

    path: Path
    kind: Kind
    what: str
    way_out: str

    def refusal(self) -> TernError:
        """The error for a command that reads other things."""
        return TernError(f"{self.path}: is {self.what}; {self.way_out}")


def identify(path: Path) -> Identity:
    """What `path` is. Of a file, the first 4 KiB are read; of a folder, its list.

    Raises TernError where nothing is there, and for what cannot be opened.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            kind, what, way_out = _folder(path)
        elif not stat.S_ISREG(status.st_mode):
            # Opening a pipe would wait for its other end.
            kind, what, way_out = Kind.FOREIGN, "not a regular file", "give a model's GGUF file or folder"
        else:
            with path.open("rb") as file:
                kind, what, way_out = _file(path, file.read(_HEAD), status.st_size)
    except FileNotFoundError:
        raise _missing(path) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TernError(f"{path}: cannot be read: {reason}") from None
    return Identity(path, kind, what, way_out)


def require_gguf(path: Path) -> None:
    """Raise the one line that says what `path` is, unless it begins as a GGUF file of this byte order does.

    That it is sound, and a language model, is not looked at: see ``model_file``.
    """
    found = identify(path)
    if found.kind is not Kind.GGUF:
        raise found.refusal()


def _missing(path: Path) -> TernError:
    if path.is_symlink():
        return TernError(f"{path}: is a link to {path.readlink()}, which leads nowhere; finish the download")
    hint = ""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)) and not path.parent.exists():
        hint = f"; if it is a model of the hub, fetch it first: hf download {path} --local-dir {path.name}"
    return TernError(f"{path}: no such file or directory{hint}")


# ---- files ----

_Found = tuple[Kind, str, str]

_AGAIN = "download it again"

#: What files of other kinds begin with.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"lmgg", "of a format that llama.cpp had before GGUF (GGML)", "convert the model anew"),
    (b"fmgg", "of a format that llama.cpp had before GGUF (GGMF)", "convert the model anew"),
    (b"tjgg", "of a format that llama.cpp had before GGUF (GGJT)", "convert the model anew"),
    (b"algg", "a LoRA in a format that llama.cpp had before GGUF", "convert the adapter anew"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it first (gunzip, or tar xzf for a .tar.gz)"),
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it first (unxz, or tar xJf for a .tar.xz)"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it first (unzstd)"),
    (b"BZh", "compressed with bzip2", "unpack it first (bunzip2, or tar xjf for a .tar.bz2)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive", "unpack it first (7z x)"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"\x93NUMPY", "a numpy array", "give a model's GGUF file or folder"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes", "save the model as safetensors first"),
    (b"\x7fELF", "a program or library and no model", "give a model's GGUF file or folder"),
    (b"MZqFpD", "a llamafile, a program with a model inside", "take the GGUF file out first (unzip FILE)"),
    (b"%PDF", "a PDF document", "give a model's GGUF file or folder"),
)

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/\S+\n(?:.*\n)*?size (\d+)")


def _file(path: Path, head: bytes, size: int) -> _Found:
    """kind, what and way_out of a file of `size` bytes that begins with `head`."""
    if not head:
        return Kind.UNKNOWN, "empty", _AGAIN
    if head.startswith(b"GGUF"):
        return _gguf(path, head)
    if len(head) > 8 and head[8:9] == b"{" and 2 <= struct.unpack_from("<Q", head)[0] <= size - 8:
        return _safetensors(path, head)
    if match := _POINTER.match(head):
        return (
            Kind.FOREIGN,
            f"a Git LFS pointer to a file of {int(match[1]) / 1e6:.1f} MB, and not that file",
            f"fetch it with `git lfs pull` in {shlex.quote(str(path.parent))}",
        )
    for magic, what, way_out in _MAGIC:
        if head.startswith(magic):
            return Kind.FOREIGN, what, way_out
    if head.startswith(b"PK\x03\x04"):
        if b"/data.pkl" in head[:256] or b"/.data/serialization_id" in head[:256]:
            return _pytorch()
        return Kind.FOREIGN, "a zip archive", "unpack it first (unzip)"
    # A pickle begins with its protocol; PyTorch's oldest format begins with a pickled number.
    if re.match(rb"\x80[\x02-\x05]", head):
        return _pytorch()
    if head[257:262] == b"ustar":
        return Kind.FOREIGN, "a tar archive", "unpack it first (tar xf)"
    if _is_old_imatrix(head):
        return _IMATRIX
    if not head.strip(b"\0"):
        return (
            Kind.FOREIGN,
            "a file that begins with nothing but zeros, as a download does that has not come to its "
            "beginning yet",
            "finish the download",
        )
    return _text(path, head)


_IMATRIX = (
    Kind.FOREIGN,
    "an importance matrix (imatrix), which steers llama-quantize, and no model",
    "give the model's GGUF file",
)


def _gguf(path: Path, head: bytes) -> _Found:
    version = head[4:8]
    if len(version) == 4 and version[:3] == b"\0\0\0" and version[3]:
        return (
            Kind.FOREIGN,
            "a GGUF file in big endian byte order, for machines such as s390x",
            f"gguf-py turns a copy of it round: gguf-convert-endian {shlex.quote(str(path))} little",
        )
    if version == b"\x01\0\0\0":
        return (
            Kind.FOREIGN,
            "a GGUF file of version 1, which llama.cpp reads no more",
            "convert the model anew",
        )
    return Kind.GGUF, "a GGUF file", "give it as it is"


def _safetensors(path: Path, head: bytes) -> _Found:
    folder = path.parent
    if path.name == "adapter_model.safetensors":
        return (
            Kind.SAFETENSORS,
            "the weights of an adapter",
            f"give the model that it was trained for, and `--lora {folder}` to ternconv",
        )
    if (folder / "config.json").is_file():
        way_out = f"give the folder that it is in to ternconv, {folder}"
    else:
        way_out = (
            "ternconv reads it in a folder together with config.json and the tokenizer of the model, so "
            "download these too"
        )
    return Kind.SAFETENSORS, "a safetensors file, the weights of a checkpoint alone", way_out


def _pytorch() -> _Found:
    return (
        Kind.FOREIGN,
        "a PyTorch file (pickle), which can run code when it is opened",
        "save the model as safetensors first (transformers: save_pretrained), and convert that folder",
    )


def _is_old_imatrix(head: bytes) -> bool:
    """Whether a file begins as llama-imatrix wrote them before GGUF: the number of entries, and the name of
    the first with its length."""
    if len(head) < 16:
        return False
    count, length = struct.unpack_from("<ii", head)
    name = head[8 : 8 + max(0, length)]
    return 0 < count < 1 << 20 and 6 < length < 128 and re.fullmatch(rb"[\w.]+\.weight", name) is not None


def _text(path: Path, head: bytes) -> _Found:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = start[:64].lower()
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<!--")):
        return (
            Kind.FOREIGN,
            "a web page (HTML)",
            "download the file itself; on the hub its address has /resolve/ in place of /blob/",
        )
    if lower.startswith(b"<?xml"):
        return Kind.FOREIGN, "XML, such as the error of a file server", _AGAIN
    if start.startswith((b"{", b"[")):
        return _json(path, start)
    try:
        # The last character may be cut in two.
        text = start.decode(errors="strict") if len(head) < _HEAD else start[:-4].decode(errors="ignore")
        is_text = "\0" not in text
    except UnicodeDecodeError:
        is_text = False
    # What has fewer characters may be the rest of anything.
    if is_text and len(head) >= 8:
        line = printable(start.decode(errors="replace").splitlines()[0] if start else "")
        return Kind.FOREIGN, f'text that begins with "{line[:60]}"', f"if it should be a model, {_AGAIN}"
    return (
        Kind.UNKNOWN,
        f"of no format that is known here (it begins with the bytes {head[:8].hex(' ')})",
        "expected a GGUF file, which begins with 'GGUF', or a Hugging Face model directory",
    )


def _json(path: Path, start: bytes) -> _Found:
    if path.name.endswith((".index.json", "config.json")):
        return Kind.FOREIGN, "a JSON file of a model directory", f"give the folder to ternconv, {path.parent}"
    try:
        error = json.loads(start).get("error")
    except (ValueError, AttributeError, RecursionError):
        error = None
    if isinstance(error, str):
        return Kind.FOREIGN, f'the error of a server, "{printable(error[:100])}"', _AGAIN
    return Kind.FOREIGN, "a JSON file", "give a model's GGUF file or folder"


# ---- folders ----


#: The names of the weights that ternconv reads, and of their index.
_READ_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def _folder(path: Path) -> _Found:
    """kind, what and way_out of a folder."""
    names = sorted(entry.name for entry in path.iterdir())
    shown = shlex.quote(str(path))
    found = _gguf_files(path, names)
    is_checkpoint = (
        Kind.CHECKPOINT,
        "a Hugging Face model directory and no GGUF file",
        f"give one of those in it, {path / found[0]}"
        if found
        else f"make one of it with `ternconv {shown} OUT.gguf`",
    )
    if "config.json" in names and any(_READ_WEIGHTS.fullmatch(name) for name in names):
        return is_checkpoint
    if not names:
        return (
            Kind.FOREIGN,
            "an empty directory, so it has no config.json",
            "give a model's GGUF file or folder",
        )
    if "adapter_config.json" in names:
        return (
            Kind.FOREIGN,
            f"an adapter{_base_of(path)} (adapter_config.json) and no model",
            f"give the model that it was trained for, and `--lora {shown}` to ternconv",
        )
    if "snapshots" in names and path.name.startswith("models--"):
        inside = sorted(entry.name for entry in (path / "snapshots").iterdir())
        way_out = f"give {path / 'snapshots' / inside[-1]}" if inside else "finish the download"
        return Kind.FOREIGN, "a folder of the hub's cache, which keeps a model by its snapshots", way_out
    if own := [name for name in names if re.fullmatch(r"consolidated.*\.(safetensors|pth|pt)", name)]:
        return (
            Kind.FOREIGN,
            f"a directory with a model in its maker's own format ({_listed(own)}, params.json)",
            "ternconv reads the files for transformers, config.json and model*.safetensors, which the same "
            "page on the hub or one with -hf in its name has; download these",
        )
    if "config.json" in names:
        # What it lacks, its reader says.
        return is_checkpoint
    if found:
        return Kind.FOREIGN, f"a directory with {_listed(found)}", f"give one of them, {path / found[0]}"
    if "model_index.json" in names:
        return Kind.FOREIGN, "a pipeline of diffusers, which makes images", "give a language model"
    if "manifests" in names and "blobs" in names:
        return (
            Kind.FOREIGN,
            "Ollama's store of models",
            "the largest of the files in blobs is a model's GGUF file; `ollama show --modelfile NAME` tells "
            "which",
        )
    if below := [name for name in names if (path / name / "config.json").is_file()]:
        return Kind.FOREIGN, "a directory of directories", f"give the one with the model, {path / below[0]}"
    weights = [n for n in names if n.endswith((".safetensors", ".bin", ".pt", ".pth", ".npz"))]
    if weights:
        return (
            Kind.FOREIGN,
            f"a directory that has {_listed(weights)} but has no config.json",
            "download config.json and the files of the tokenizer into it, too",
        )
    return (
        Kind.FOREIGN,
        "a directory that has no config.json, and no GGUF file in it",
        "give a model's GGUF file, or a Hugging Face model directory",
    )


def _gguf_files(path: Path, names: list[str]) -> list[str]:
    """The GGUF files of a folder; of a split one, the first part alone."""
    return [
        name
        for name in names
        if name.endswith(".gguf")
        and not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", name)
        and (path / name).is_file()
    ]


def _base_of(path: Path) -> str:
    """ " of NAME" where an adapter says of what it is one."""
    try:
        base = json.loads((path / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return f" of {printable(base[:100])}" if isinstance(base, str) and base else ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
