"""The llama-server that a chat starts for itself: for this user alone, and gone when the chat is gone."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ggml_tern.client.endpoint import ServerError, unix_endpoint
from ggml_tern.errors import TernError
from ggml_tern.host.devices import Choice
from ggml_tern.host.stock import host_environment

#: What sockaddr_un holds, with the NUL.
_LONGEST_SOCKET_PATH = 107
#: Variables of llama-server that must not reach this one, which nobody else can talk to.
_NOT_INHERITED = (
    "LLAMA_API_KEY",
    "LLAMA_ARG_API_KEY_FILE",
    "LLAMA_ARG_API_PREFIX",
    "LLAMA_ARG_SSL_KEY_FILE",
    "LLAMA_ARG_SSL_CERT_FILE",
)
_PR_SET_PDEATHSIG = 1
_SECONDS_TO_STOP = 5.0


class LocalServer:
    """A running llama-server, and the private folder with its socket and its log."""

    def __init__(self, process: subprocess.Popen[bytes], model: Path, socket: Path, log: Path) -> None:
        self._process, self._model, self._log = process, model, log
        self.socket = socket

    def wait_until_ready(self) -> None:
        """Return when the model is loaded.

        Raises:
            TernError: the server ended instead; with what it said.
        """
        while not self._is_ready():
            self.check_alive()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with unix_endpoint(self.socket, str(self._model)).exchange() as exchange:
                exchange.send("/health")
        except ServerError:
            return False
        return True

    def check_alive(self) -> None:
        """Raise a TernError with what is known of its end, unless the server is running."""
        code = self._process.poll()
        if code is None:
            return
        if code == -signal.SIGKILL:
            # Nobody but the kernel's out-of-memory killer does that.
            why = "it was killed, as happens when memory runs out; try a smaller --context or --kv q8_0"
        else:
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            why = f"it ended {how}: {self._errors() or 'it did not say why'}"
        raise TernError(f"{self._model}: llama-server does not run: {why}")

    def _errors(self) -> str:
        """The first errors in the log, which are those nearest to the cause."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"^(?:\S+ E |(?=ggml-tern: |error: ))(.+)$", log, re.MULTILINE)
        return "; ".join(" ".join(line.split()) for line in list(dict.fromkeys(found))[:3])

    def stop(self) -> None:
        """End the process, gently first; returns when it is gone."""
        self._process.terminate()
        try:
            self._process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def local_server(model: Path, options: list[str], program: Path, device: Choice) -> Iterator[LocalServer]:
    """Start the stock llama-server with the plug-in; it is still loading when this returns.

    Args:
        model: the GGUF file.
        options: of llama-server, besides model and address.
        program: the llama-server.
        device: what it runs on.

    Raises:
        TernError: llama-server or the plug-in is missing, or cannot be started.
    """
    environment = host_environment(False, program, device.devices)
    for name in _NOT_INHERITED:
        environment.pop(name, None)
    with _private_folder() as folder:
        socket, log = folder / "llama.sock", folder / "log"
        command = [str(program), "--model", str(model), "--host", str(socket), *options]
        with open(log, "wb") as log_file:
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    # The terminal sends Ctrl-C to all of a session, and this one stops only the answer.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
            except OSError as error:
                raise TernError(f"{program}: cannot be started: {error.strerror}") from error
        server = LocalServer(process, model, socket, log)
        try:
            yield server
        finally:
            server.stop()


def _die_with_parent() -> Callable[[], None]:
    """What the child does before it becomes the program, so that even kill -9 leaves none behind."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return ask_kernel


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, of a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="tern-chat-"))
    if len(os.fsencode(folder / "llama.sock")) > _LONGEST_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tern-chat-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
