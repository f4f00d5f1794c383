"""A real llama-server for a test: on a free port, waited for, and stopped and reaped whatever happens.

with serving(TINY, "-c", "512") as server:
    server.post("/completion", {"prompt": "Once", "n_predict": 4})
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
#: Half a megabyte of ternary, Hadamard-rotated model that writes English.
TINY = ROOT / "models" / "tiny-qwen3" / "tiny-qwen3-ptq1_0.gguf"

TERN = str(Path(sys.executable).parent / "tern")
#: Commands that take a model and options of llama-server.
TERN_SERVE = (TERN, "serve")
LLAMA_SERVER = (TERN, "run", "llama-server", "-m")

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

#: Limits for a machine that has much else to do, no promises.
SECONDS_TO_START = 180.0
SECONDS_TO_STOP = 120.0
SECONDS_TO_ANSWER = 180.0


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Reply:
    """An HTTP answer, of whatever status."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Server:
    """A server that runs. url: without a slash at its end."""

    url: str
    process: subprocess.Popen[bytes]
    api_key: str | None = None
    _log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    @property
    def pid(self) -> int:
        """Of llama-server itself, which tern serve starts as its one child."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        is_supervisor = Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() != "llama-server"
        return int(children[0]) if is_supervisor and children else pid

    def log(self) -> str:
        """All that it has printed so far."""
        return os.pread(self._log.fileno(), 1 << 26, 0).decode(errors="replace")

    def _request(self, path: str, body: Any) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return urllib.request.Request(self.url + path, data, headers)

    def get(self, path: str, body: Any = None, timeout: float = SECONDS_TO_ANSWER) -> Reply:
        try:
            with urllib.request.urlopen(self._request(path, body), timeout=timeout) as answer:
                return Reply(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read().decode(errors="replace"))

    def post(self, path: str, body: Any, timeout: float = SECONDS_TO_ANSWER) -> Reply:
        """body: sent as JSON; bytes as they are."""
        return self.get(path, body, timeout)

    @contextlib.contextmanager
    def stream(self, path: str, body: Any, timeout: float = SECONDS_TO_ANSWER) -> Iterator[Iterator[Any]]:
        """The events of a streamed answer, as they come; leaving the block early disconnects."""
        with urllib.request.urlopen(self._request(path, body | {"stream": True}), timeout=timeout) as answer:
            lines = (line.decode().strip().removeprefix("data: ") for line in answer)
            yield (json.loads(line) for line in lines if line.startswith("{"))

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = SECONDS_TO_STOP) -> int:
        """Send a signal, and wait for the end: the exit code, negative for the signal that ended it."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serving(
    model: Path | None = TINY,
    *options: str,
    command: Sequence[str] = TERN_SERVE,
    variables: Mapping[str, str] | None = None,
    api_key: str | None = None,
    port: int | None = None,
    threads: int | None = 1,
    timeout: float = SECONDS_TO_START,
) -> Iterator[Server]:
    """A server that answers /health, until the block is left.

    model: None where a file names it. options: of the command. variables: of its environment, besides our
    own. api_key: what requests carry, not what the server wants. threads: unless the options say; None for
    llama-server's default. Two that wait for each other crawl on a busy machine.

    Raises RuntimeError, with what it printed, if it ends or does not answer in time."""
    port = port or free_port()
    threading = {} if threads is None else {"LLAMA_ARG_THREADS": str(threads)}
    words = [*command, *([str(model)] if model else []), "--port", str(port), *options]
    # A session of its own: whatever the server started can be ended with it.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | threading | dict(variables or {}),
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        server = Server(f"http://127.0.0.1:{port}", process, api_key, log)
        try:
            _await_health(server, words, timeout)
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_TO_STOP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_with_parent() -> None:
    """In the new process: be killed when the tests are, which then clean up nothing."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _await_health(server: Server, words: Sequence[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while server.process.poll() is None and time.monotonic() < deadline:
        # Refused until it listens, 503 until the model is loaded.
        with contextlib.suppress(OSError):
            if server.get("/health", timeout=5).status == 200:
                return
        time.sleep(0.05)
    code = server.process.poll()
    ended = f"did not answer within {timeout:.0f} seconds" if code is None else f"ended with exit code {code}"
    raise RuntimeError(f"{' '.join(words)} {ended}:\n{server.log()}")
