"""A CUDA without a GPU: libraries in the place of CUDA's own, and what a host asked of them.

    cuda = FakeCuda(folder)
    run(cuda.host(), commands, variables=cuda.variables)
    cuda.read().launches

fake_cuda/runtime.cpp says what they do. It is compiled without CUDA's headers.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpu import hosts
from gpu.hosts import Host
from isa import tools

_folder = tempfile.TemporaryDirectory(prefix="fake-cuda-")


@functools.cache
def libraries() -> Path:
    """The folder of the libraries."""
    folder, sources = Path(_folder.name), Path(__file__).parent / "fake_cuda"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fvisibility=default"]
    runtime = "libcudart.so.13"
    for source, library, others in (
        ("runtime", runtime, []),
        ("cublas", "libcublas.so.13", [f"-l:{runtime}"]),
        ("driver_api", "libcuda.so.1", [f"-l:{runtime}"]),
    ):
        # Functions have versions, which are called as the library is. The driver's have none.
        versions = folder / f"{source}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        own = [] if source == "driver_api" else [f"-Wl,--version-script={versions}"]
        tools.build(
            folder / library,
            tools.compiler(),
            {sources / f"{source}.cpp": []},
            flags,
            [*own, f"-Wl,-soname,{library}", f"-L{folder}", *others],
        )
    return folder


@dataclass(frozen=True)
class Launch:
    """A kernel. grid: in blocks, x, y, z; captured: into a graph, and not run."""

    name: str
    grid: tuple[int, int, int]
    captured: bool

    @property
    def short(self) -> str:
        """Its name without types and arguments."""
        name = self.name.removeprefix("void ")
        end = min((at for at in (name.find("<"), name.find("(")) if at >= 0), default=len(name))
        return name[:end]


@dataclass
class Record:
    """What happened, in order. words: the lines of the log."""

    words: list[list[str]]
    launches: list[Launch] = field(default_factory=list)
    cublas: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for first, *rest in self.words:
            if first in ("launch", "captured"):
                x, y, z = map(int, rest[0].split(","))
                self.launches.append(Launch(" ".join(rest[2:]), (x, y, z), first == "captured"))
            elif first == "cublas":
                self.cublas += rest
            elif first == "unexpected":
                self.unexpected.append(" ".join(rest))

    def count(self, *words: str) -> int:
        """Of lines that begin so."""
        return sum(line[: len(words)] == list(words) for line in self.words)

    def copied(self, kind: int) -> list[int]:
        """Bytes of each copy of a kind, in order."""
        return [int(line[2]) for line in self.words if line[:2] == ["copy", str(kind)]]

    def left(self) -> Counter[str]:
        """What was allocated and never freed: how many of each kind."""
        alive: dict[tuple[str, str], None] = {}
        for word, *rest in self.words:
            if word == "alloc":
                alive[rest[0], rest[1]] = None
            elif word == "free":
                del alive[rest[0], rest[1]]
        return Counter(kind for kind, _ in alive)


@dataclass(frozen=True)
class FakeCuda:
    """A log, and memory as it was when it was freed, in a folder of one process's own."""

    folder: Path
    devices: int = 1
    memory: int = 4 << 30

    def host(self) -> Host:
        stock = hosts.cuda_of_npm()
        return replace(
            stock,
            libraries=(*stock.libraries, libraries()),
            variables={
                "FAKE_CUDA_LOG": str(self.folder / "log"),
                "FAKE_CUDA_DUMP": str(self.folder),
                "FAKE_CUDA_DEVICES": str(self.devices),
                "FAKE_CUDA_MEMORY": str(self.memory),
            },
        )

    def read(self) -> Record:
        lines = (self.folder / "log").read_text().splitlines()
        return Record([line.split() for line in lines])

    def memory_holds(self, data: bytes) -> bool:
        """Whether these bytes, of a tensor, were in the memory of the device, in one piece."""
        return any(data in path.read_bytes() for path in self.folder.iterdir() if path.name.isdigit())


def repeated(launches: Sequence[Launch]) -> list[tuple[str, int]]:
    """Short names with how often each stands in a row."""
    rows: list[tuple[str, int]] = []
    for launch in launches:
        if rows and rows[-1][0] == launch.short:
            rows[-1] = (launch.short, rows[-1][1] + 1)
        else:
            rows.append((launch.short, 1))
    return rows
