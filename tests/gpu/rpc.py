"""llama.cpp's RPC: its server, and the backend by which a host finds servers, of the pinned source as it is.

    with serving() as server:
        run(hosts.pinned(), rpc.first_commands(server.endpoint) + [...])

They are compiled once into the cache folder, against the libraries of the pinned build.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import build_llama_cpp
import debian_packages
from ggml_tern.host import stock
from gpu import hosts, running
from isa import tools
from llama_server import SECONDS_TO_START, free_port

BACKEND, PROGRAM = "libggml-rpc.so", "ggml-rpc-server"
#: As llama.cpp's CMake files compile a backend that is loaded at run time.
MODULE = ["-shared", "-fPIC", "-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED"]
OPTIONS = ["-std=c++17", "-O1", "-DGGML_SHARED", "-D_GNU_SOURCE"]


@functools.cache
def built() -> Path:
    """The folder of the backend and the server."""
    cxx = tools.compiler()
    source = build_llama_cpp.Layout.from_environment().source
    libraries = [str(stock.llama_cpp_dir() / f"lib{name}.so.0") for name in ("ggml", "ggml-base")]
    include = [f"-I{source / 'ggml' / folder}" for folder in ("include", "src")]
    of_backend = [str(source / "ggml/src/ggml-rpc" / f"{name}.cpp") for name in ("ggml-rpc", "transport")]
    commands = {
        BACKEND: [*OPTIONS, *MODULE, *include, *of_backend, libraries[1]],
        PROGRAM: [*OPTIONS, *include, str(source / "tools/rpc/rpc-server.cpp"), *libraries],
    }
    key = hashlib.sha256(f"{cxx.run('--version')}{stock.llama_cpp_version()}{commands}".encode()).hexdigest()
    folder = debian_packages.cache_dir().parent / "rpc" / key[:24]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            whole = Path(name) / "whole"
            whole.mkdir()
            for target, words in commands.items():
                cxx.run(*words, "-o", str(whole / target))
            with contextlib.suppress(OSError):  # by another test run that was faster
                whole.rename(folder)
    return folder


@dataclass
class Server:
    endpoint: str
    process: subprocess.Popen[bytes]
    _log: IO[bytes]

    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 26, 0).decode(errors="replace")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A stock server on this machine's loopback, with the processor as its device and without the plug-in."""
    port = free_port()
    environment = hosts.pinned().environment(plugin=False)
    with tempfile.TemporaryFile() as log:
        words: list[str | Path] = [built() / PROGRAM, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--device", "CPU", "-t", "1"]
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        server = Server(f"127.0.0.1:{port}", process, log)
        try:
            _await_listening(server, port)
            yield server
        finally:
            server.kill()


def _await_listening(server: Server, port: int) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the RPC server does not listen: {server.log()}")


def first_commands(*endpoints: str) -> list[str]:
    """Of a process that is to see these servers' devices, which appear after all backends are loaded."""
    return [
        f"backend {built() / BACKEND}",
        *running.first_commands(hosts.pinned()),
        *(f"rpc {endpoint}" for endpoint in endpoints),
    ]
