"""A client of llama-server: its answers as it writes them, and what its model and context are."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ggml_tern.errors import TernError

Connect = Callable[[], http.client.HTTPConnection]
#: OpenAI's form: {"role": "user", "content": "..."}.
Message = dict[str, str]
#: What is to be continued: the messages of a chat, or plain text.
Prompt = list[Message] | str


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path, timeout: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ContextFullError(TernError):
    """The prompt does not fit into the context.

    Attributes:
        n_prompt: tokens of the prompt.
        n_context: tokens that there is room for.
    """

    def __init__(self, n_prompt: int, n_context: int) -> None:
        super().__init__(
            f"the question is too long: {n_prompt} tokens with all that goes with it, and the context has "
            f"{n_context}; shorten it, or give a larger --context"
        )
        self.n_prompt, self.n_context = n_prompt, n_context


@dataclass(frozen=True)
class Timings:
    """The server's own figures of an answer, up to some token of it.

    Attributes:
        n_cached: tokens of the prompt that were in the KV cache from before.
        n_prefill, prefill_seconds: tokens of the prompt that were read, and how long that took.
        n_decode, decode_seconds: tokens that were written, and how long that took.
    """

    n_cached: int = 0
    n_prefill: int = 0
    prefill_seconds: float = 0.0
    n_decode: int = 0
    decode_seconds: float = 0.0

    @classmethod
    def of(cls, timings: Mapping[str, Any]) -> Timings:
        """From llama-server's ``timings``, which are in milliseconds."""
        return cls(
            timings["cache_n"],
            timings["prompt_n"],
            timings["prompt_ms"] / 1e3,
            timings["predicted_n"],
            timings["predicted_ms"] / 1e3,
        )

    @property
    def n_context(self) -> int:
        """Tokens that the conversation takes up."""
        return self.n_cached + self.n_prefill + self.n_decode


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer.

    Attributes:
        text: of the answer itself.
        thought: of what the model thinks before it answers.
        progress: while the prompt is read: tokens read so far, and tokens in all.
        timings: up to here.
        finish_reason: in the last piece: "stop" where the model ended, "length" where it was cut.
    """

    text: str = ""
    thought: str = ""
    progress: tuple[int, int] | None = None
    timings: Timings | None = None
    finish_reason: str | None = None


#: An answer as it comes. Closing it makes the server stop.
Answer = Generator[Chunk, None, None]


class LlamaClient:
    """Talks to one llama-server; each call is a connection of its own."""

    def __init__(self, connect: Connect, name: str, model: str | None = None, key: str | None = None) -> None:
        """
        Args:
            connect: makes a connection, which need not be open yet.
            name: of the server, for messages.
            model: which one to use of a server that has several.
            key: the API key, if the server wants one.
        """
        self._connect, self._name, self._key = connect, name, key
        self._model = {} if model is None else {"model": model}

    def n_context(self) -> int:
        """How many tokens a conversation can have."""
        path = "/props" + (f"?model={quote(self._model['model'])}" if self._model else "")
        n_context = self._ask("GET", path).get("default_generation_settings", {}).get("n_ctx")
        if not n_context:
            names = [model["id"] for model in self._ask("GET", "/v1/models")["data"]]
            raise TernError(
                f"{self._name}: this server has several models; name one of them: "
                f"tern chat NAME --url {self._name} ({', '.join(names)})"
            )
        return int(n_context)

    def count_tokens(self, prompt: Prompt, template: Mapping[str, Any]) -> int:
        """The tokens of a prompt, with those of the chat template."""
        if not isinstance(prompt, str):
            chat = {"messages": prompt, "chat_template_kwargs": template}
            prompt = self._ask("POST", "/apply-template", chat)["prompt"]
        text = {"content": prompt, "add_special": True, "parse_special": True}
        return len(self._ask("POST", "/tokenize", text)["tokens"])

    def answer(self, prompt: Prompt, sampling: Mapping[str, float], template: Mapping[str, Any]) -> Answer:
        """The answer, piece by piece.

        Args:
            prompt: messages, or a text to be continued.
            sampling: fields of the request like temperature and max_tokens; what is not there is the
                server's default.
            template: variables of the chat template.

        Raises:
            ContextFullError: the prompt alone is too long.
            TernError: whatever else is in the way.
        """
        request: dict[str, Any] = {**sampling, "stream": True, "timings_per_token": True}
        request["return_progress"] = True
        if isinstance(prompt, str):
            path, request["prompt"] = "/v1/completions", prompt
        else:
            path, request["messages"] = "/v1/chat/completions", prompt
            request["chat_template_kwargs"] = template
        connection = self._connect()
        try:
            for event in self._events(self._send(connection, "POST", path, request)):
                yield _chunk(event)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The server-sent events of a response, up to the one that says that it is complete."""
        for line in response:
            kind, _, data = line.decode("utf-8", "replace").strip().partition(": ")
            if data == "[DONE]":
                return
            # What begins with a colon is sent only to keep the connection open.
            if kind in ("data", "error"):
                event = json.loads(data)
                if kind == "error" or "error" in event:
                    raise self._refusal(event)
                yield event
        raise TernError(f"{self._name}: the answer ended in the middle; has the server stopped?")

    def _ask(self, method: str, path: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = self._connect()
        try:
            answer: dict[str, Any] = json.load(self._send(connection, method, path, request))
            return answer
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        request: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        body = None if request is None else json.dumps({**self._model, **request})
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            try:
                answer = json.load(response)
            except ValueError:
                answer = {}
            raise self._refusal(answer, f"HTTP {response.status} for {path}; is it a llama-server?")
        return response

    def _refusal(self, answer: Any, otherwise: str = "an error that it does not explain") -> TernError:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            return TernError(f"{self._name}: {otherwise}")
        if error.get("type") == "exceed_context_size_error":
            return ContextFullError(error["n_prompt_tokens"], error["n_ctx"])
        if error.get("type") == "authentication_error":
            return TernError(f"{self._name}: the server wants an API key; give it with --api-key")
        return TernError(f"{self._name}: {error.get('message', otherwise)}")

    def _lost(self, error: Exception) -> TernError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return TernError(
            f"{self._name}: no llama-server answers here ({reason}); 'tern serve MODEL.gguf' starts one"
        )


def _chunk(event: Mapping[str, Any]) -> Chunk:
    choice = event["choices"][0] if event.get("choices") else {}
    delta = choice.get("delta", {})
    progress, timings = event.get("prompt_progress"), event.get("timings")
    return Chunk(
        text=delta.get("content") or choice.get("text") or "",
        thought=delta.get("reasoning_content") or "",
        progress=(progress["processed"], progress["total"]) if progress else None,
        timings=Timings.of(timings) if timings else None,
        finish_reason=choice.get("finish_reason"),
    )


def connect_to(url: str) -> Connect:
    """For ``LlamaClient``, of a URL like http://localhost:8080 or https://host/prefix.

    Raises:
        TernError: it is no such URL.
    """
    refusal = TernError(f"{url}: not the address of a server; it looks like http://localhost:8080")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    # OpenAI's clients want the address with /v1 at its end.
    if host is None or parts.scheme not in ("http", "https") or parts.path.strip("/") not in ("", "v1"):
        raise refusal
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return lambda: kind(host, port)
