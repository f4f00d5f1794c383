"""The text that the tiny models of models/ are trained on: the World English Bible, a modern English one.

Its translators gave it to the public domain. It comes from Debian's package sword-text-web, which is fetched
once into the cache and checked against its SHA-256. Out comes plain text, one paragraph a line, in chapters:
no headings, notes or verse numbers, and ASCII quotation marks and dashes. (The name World English Bible is a
trademark that stands for the unchanged text only, so do not call the result by it.)

    python training/tiny_text.py > text.txt
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from ggml_tern.errors import TernError

CACHE = Path(os.environ.get("TERN_CACHE_DIR") or "~/.cache/ggml-tern").expanduser().absolute() / "training"
PACKAGE, VERSION = "sword-text-web", "426.0-1"
SHA256 = "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1"
LICENCE = "public domain"
_MODULE = "./usr/share/sword/modules/texts/ztext/engWEB2015eb/"

#: Books that tell a story, which a tiny model can learn to imitate; lists, laws, prophecies and letters are
#: left out. By their OSIS names.
TRAINING = (
    *("Gen", "Exod", "Josh", "Judg", "1Sam", "2Sam", "1Kgs", "2Kgs", "Jdt", "Dan"),
    *("Matt", "Mark", "Luke", "John", "Acts"),
)

#: Stories that no model is trained on, for perplexity. None of them is told again in another book, as those
#: of the Gospels are.
HELD_OUT = ("Ruth", "Tob", "Esth", "Jonah")

_ASCII = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "..."} | {"\xa0": " "}
)


@dataclass(frozen=True)
class Chapter:
    """book: its OSIS name, such as Gen; text: one paragraph a line."""

    book: str
    text: str


def read_chapters(folder: Path = CACHE) -> list[Chapter]:
    """All chapters, in the order of the books. Fetches the package into `folder` when it is not there yet.

    Raises TernError when it cannot be fetched or is not the one expected.
    """
    chapters = []
    with tarfile.open(fileobj=io.BytesIO(_unpack(_fetch(folder)))) as package:

        def read(name: str) -> bytes:
            file = package.extractfile(_MODULE + name)
            assert file is not None
            return file.read()

        for testament in ("ot", "nt"):
            # Three u32 a block: offset, compressed and original size. A block is a book; the first is empty.
            blocks, compressed = read(f"{testament}.bzs"), read(f"{testament}.bzz")
            for offset, size, _ in struct.iter_unpack("<III", blocks):
                if size:
                    chapters += _split(zlib.decompress(compressed[offset : offset + size]).decode())
    return chapters


def split(chapters: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """The chapters for training, and the held-out ones."""
    return (
        [chapter for chapter in chapters if chapter.book in TRAINING],
        [chapter for chapter in chapters if chapter.book in HELD_OUT],
    )


def _fetch(folder: Path) -> Path:
    path = folder / f"{PACKAGE}_{VERSION}_all.deb"
    if not path.exists():
        if shutil.which("apt-get") is None:
            raise TernError(
                f"{path}: does not exist, and there is no apt-get to fetch the Debian package with"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = ["apt-get", "download", "-q", f"{PACKAGE}={VERSION}"]
            if subprocess.run(command, cwd=temporary, stdout=sys.stderr).returncode != 0:
                raise TernError(f"{' '.join(command)}: failed; put that package's file at {path}")
            (Path(temporary) / path.name).replace(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise TernError(f"{path}: SHA-256 is {found}; expected {SHA256}; remove it to fetch it again")
    return path


def _unpack(package: Path) -> bytes:
    """The tar archive of the package's files."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    try:
        return subprocess.run(command, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise TernError(f"{package}: cannot be unpacked: {error}") from None


def _split(book: str) -> list[Chapter]:
    """The chapters of a book in OSIS markup. What stands before the first is not text."""
    pieces = re.split(r'<chapter [^>]*\bsID="(\w+)\.\d+"[^>]*>', book)[1:]
    chapters = (Chapter(name, _plain(text)) for name, text in zip(pieces[::2], pieces[1::2], strict=True))
    return [chapter for chapter in chapters if chapter.text]


def _plain(markup: str) -> str:
    markup = re.sub(r"<(title|note|rdg|speaker)\b[^>]*(?<!/)>.*?</\1>", " ", markup, flags=re.DOTALL)
    markup = markup.replace("\n", " ")
    # A paragraph or a stanza begins a line.
    markup = re.sub(r'<(div [^>]*sID="[^"]*"[^>]*type="x-p"|lg [^>]*sID)[^>]*>', "\n", markup)
    markup = re.sub(r"</?(w|q|seg|name|catchWord|reference)\b[^>]*>", "", markup)
    text = re.sub(r"<[^>]*>", " ", markup).translate(_ASCII)
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" +([,.;:?!)])", r"\1", text)
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


if __name__ == "__main__":
    try:
        print("\n\n".join(chapter.text for chapter in read_chapters()))
    except TernError as error:
        sys.exit(f"tiny_text.py: {error}")
