"""Where a server is, and one request to it: sent, answered, and explained in one line where that fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from ggml_tern.client.events import Event, StreamError, events, problem_of
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable

#: Seconds for a server to accept a connection, and to answer what is no completion.
PATIENCE = 10.0
#: Bytes of a line of a stream, and of an answer, that are read at most.
_LONGEST_LINE, _LONGEST_ANSWER = 1 << 20, 1 << 26

_Answer = TypeVar("_Answer", bound=BaseModel)


class Problem(BaseModel):
    """The ``error`` of an answer, in OpenAI's form; the last two are llama-server's, of a prompt too long."""

    message: str = ""
    type: str | None = None
    code: int | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None

    @classmethod
    def of(cls, error: Any) -> Problem:
        """Of whatever stands there."""
        try:
            return cls.model_validate(error)
        except ValidationError:
            message = error.get("message") if isinstance(error, dict) else error
            return cls(message=message if isinstance(message, str) else json.dumps(message))


class ServerError(TernError):
    """A server that cannot be reached, refuses, or breaks off; in one line.

    Attributes:
        problem: what the server itself says, if it does.
    """

    def __init__(self, message: str, problem: Problem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@dataclass(frozen=True)
class Endpoint:
    """A server.

    Attributes:
        name: in messages; its URL without /v1, or what the user knows it by.
        connect: makes a connection, not open yet, with so many seconds of patience, None for any.
        base: path in front of all others.
        key: the API key, if the server wants one.
    """

    name: str
    connect: Callable[[float | None], http.client.HTTPConnection]
    base: str = ""
    key: str | None = None

    @contextlib.contextmanager
    def exchange(self, patience: float | None = PATIENCE) -> Iterator[Exchange]:
        """A connection for one request; what goes wrong with it in the block is a ServerError.

        patience: seconds, for each step."""
        connection = self.connect(patience)
        try:
            connection.connect()
            yield Exchange(self, connection)
        except TimeoutError as error:
            within = "" if patience is None else f" within {patience:.0f} seconds"
            raise ServerError(f"{self.name}: does not answer{within}") from error
        except http.client.HTTPException as error:
            raise ServerError(
                f"{self.name}: broke off ({type(error).__name__}); its log may say why"
            ) from error
        except OSError as error:
            raise ServerError(
                f"{self.name}: no server answers there ({error.strerror or error}); is it running? "
                "'tern serve MODEL.gguf' starts one"
            ) from error
        except StreamError as error:
            raise ServerError(f"{self.name}: {error}") from error
        finally:
            connection.close()

    def ask(
        self,
        kind: type[_Answer],
        path: str,
        request: Mapping[str, Any] | None = None,
        patience: float | None = PATIENCE,
    ) -> _Answer:
        """The answer to a GET, or to a POST of `request`, as far as `kind` has fields.

        Raises ServerError."""
        with self.exchange(patience) as exchange:
            exchange.send(path, request)
            text = exchange.read()
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise ServerError(
                f"{self.name}: its answer to {path} is not a llama-server's: {problem_of(error)}; give the "
                "address of one"
            ) from error

    def refusal(self, problem: Problem, status: int | None = None) -> ServerError:
        """What a server says no with, and the way out."""
        code = status or problem.code
        said = printable(" ".join(problem.message.split()))[:200]
        way_out = {503: "; try again when its model is loaded"}.get(code or 0, "")
        if code in (401, 403):
            way_out = "; pass the right --api-key" if self.key else "; pass its --api-key"
        what = f"answered {code}" if code else "met an error"
        return ServerError(f"{self.name}: {what}{f': {said}' if said else ''}{way_out}", problem)


class Exchange:
    """One request and its answer, on a connection of its own.

    Attributes:
        socket: of the connection, to change its patience or to end it.
    """

    def __init__(self, endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
        self._endpoint, self._connection = endpoint, connection
        # The response keeps the socket, the connection may not.
        self.socket: socket.socket = connection.sock
        self._response: http.client.HTTPResponse | None = None

    def send(self, path: str, request: Mapping[str, Any] | None = None) -> None:
        """Send a GET, or a POST of `request`, and wait for the answer to begin.

        Raises ServerError for an answer that is a refusal."""
        headers = {"Content-Type": "application/json"}
        if self._endpoint.key:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        body = None if request is None else json.dumps(request)
        method = "GET" if request is None else "POST"
        self._connection.request(method, self._endpoint.base + path, body, headers)
        self._response = self._connection.getresponse()
        if self._response.status != http.client.OK:
            text = self._response.read(1 << 16).decode(errors="replace")
            problem = Problem(message=text)
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                problem = Problem.of(json.loads(text)["error"])
            raise self._endpoint.refusal(problem, self._response.status)

    def read(self) -> bytes:
        """All of the answer."""
        assert self._response is not None
        return self._response.read(_LONGEST_ANSWER)

    def lines(self) -> Iterator[bytes]:
        """The lines of the answer, as they come."""
        assert self._response is not None
        while line := self._response.readline(_LONGEST_LINE):
            yield line

    def events(self, lines: Iterable[bytes] | None = None) -> Iterator[Event]:
        """The events of the answer, as they come. lines: those of `lines`, if somebody has watched them.

        Raises ServerError for an event that is an error, StreamError for what is none."""
        for event in events(self.lines() if lines is None else lines):
            if event.error is not None:
                raise self._endpoint.refusal(Problem.of(event.error))
            yield event


def endpoint_of(url: str, key: str | None = None) -> Endpoint:
    """Of a URL like http://localhost:8080, https://host/prefix or localhost:8080/v1.

    Raises TernError if it is none, and for a key that HTTP cannot carry."""
    parts = urlsplit("")
    with contextlib.suppress(ValueError):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        _ = parts.port
    host, scheme = parts.hostname, parts.scheme
    try:
        port = parts.port
    except ValueError:
        host = None
    # HTTP would not carry what is not printable, and takes a space for the end of the path.
    is_plain = parts.path.isascii() and parts.path.isprintable() and " " not in parts.path
    if not host or scheme not in ("http", "https") or port == 0 or not is_plain:
        raise TernError(f"{url}: not the address of a server; it looks like http://localhost:8080")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise TernError("--api-key: has letters that HTTP cannot carry; copy it again")
    base = parts.path.rstrip("/").removesuffix("/v1")
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection

    def connect(patience: float | None) -> http.client.HTTPConnection:
        return kind(host, port, timeout=patience)

    return Endpoint(f"{scheme}://{parts.netloc.rpartition('@')[2]}{base}", connect, base, key)


def unix_endpoint(path: Path, name: str) -> Endpoint:
    """Of a Unix socket; name: in messages."""
    return Endpoint(name, lambda patience: UnixConnection(path, patience))
