"""The client of llama-server: whatever a server sends is an event, a refusal or one clear line."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_tern.client.endpoint import Endpoint, Problem, ServerError, endpoint_of
from ggml_tern.client.events import Event, StreamError, events
from ggml_tern.client.llama import Chunk, ContextFullError, LlamaClient
from ggml_tern.errors import TernError

TOKEN = {"choices": [{"delta": {"content": "a"}}]}
DONE = "data: [DONE]\n\n"


def data(*values: Any) -> str:
    return "".join(f"data: {json.dumps(value)}\n\n" for value in values)


def read(text: str | bytes) -> list[Event]:
    raw = text.encode() if isinstance(text, str) else text
    return list(events(raw.splitlines(keepends=True)))


@contextmanager
def saying(answer: bytes) -> Iterator[Endpoint]:
    """A server that has one answer to all requests, byte for byte."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                # Headers, and a body that is shorter than what is read at once.
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1 << 16)
                headers, _, body = head.partition(b"\r\n\r\n")
                length = next(
                    (int(h.split(b":")[1]) for h in headers.lower().split(b"\r\n") if b"content-length" in h),
                    0,
                )
                while len(body) < length:
                    body += connection.recv(1 << 16)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield endpoint_of(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def chat(body: str | bytes, status: str = "200 OK") -> list[Chunk]:
    raw = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
    with saying(head + raw) as endpoint:
        return list(LlamaClient(endpoint).answer([{"role": "user", "content": "?"}], {}, {}))


# ------------------------------------------------------------------------------------------------------------
# Streams
# ------------------------------------------------------------------------------------------------------------


def test_streams_as_servers_send_them() -> None:
    """With and without a space, with comments to keep the connection open, other fields, CRLF, and data over
    several lines."""
    text = (
        ': ping\n\nevent: message\nid: 3\ndata:{"choices":\ndata: [{"text": "b"}]}\n\n' + data(TOKEN) + DONE
    )
    for raw in (text, text.replace("\n", "\r\n")):
        first, second = read(raw)
        assert first.choices is not None and first.choices[0].text == "b"
        assert second.choices is not None and second.choices[0].delta is not None
        assert second.choices[0].delta.content == "a"
    assert read("data: [DONE]") == []
    (usage,) = read(data({"choices": [], "usage": {"prompt_tokens": 3}, "timings": None}) + DONE)
    assert usage.usage is not None and usage.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {\n\n", "it is no JSON"),
        ("data: hello\n\n", "it is no JSON"),
        ("data: [1]\n\n", "it is no JSON object"),
        ("data: 7\n\n", "it is no JSON object"),
        ("data: null\n\n", "it is no JSON object"),
        ("data: " + "[" * 100_000 + "\n\n", "it is no JSON"),
        (data({"choices": {"delta": 1}}), "choices has the wrong type"),
        (data({"choices": [1]}), "choices.0 has the wrong type"),
        (data({"choices": [{"delta": {"content": ["a"]}}]}), "choices.0.delta.content has the wrong type"),
        (data({"timings": {"prompt_n": 1}}), "timings.cache_n is missing"),
        (data({"prompt_progress": {"total": 1}}), "prompt_progress.processed is missing"),
        ('data: {"usage": {"prompt_tokens": NaN}}\n\n', "usage.prompt_tokens has the wrong type"),
        (data(TOKEN), "broke off in the middle of an answer"),
        ("", "broke off in the middle of an answer"),
        ("data: " + json.dumps(TOKEN), "broke off in the middle of an answer"),
    ],
    ids=str,
)  # fmt: skip
def test_streams_that_are_none(text: str, said: str) -> None:
    with pytest.raises(StreamError, match=said) as error:
        read(text)
    assert "\n" not in str(error.value)
    with pytest.raises(ServerError, match=said) as refusal:
        chat(text)
    assert str(refusal.value).startswith("http://127.0.0.1:") and "\n" not in str(refusal.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("choices", "delta", "content", "text", "timings", "prompt_progress", "usage", "error",
                 "message", "code", "processed", "total", "cache_n", "prompt_n", "prompt_ms", "finish_reason")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)  # fmt: skip
_LINES = st.lists(
    st.one_of(
        _JSON.map(lambda value: f"data: {json.dumps(value)}\n\n".encode()),
        _JSON.map(lambda value: f"error: {json.dumps(value)}\n\n".encode()),
        st.just(data(TOKEN).encode()),
        st.just(DONE.encode()),
        st.just(b": \n\n"),
        st.binary(max_size=40),
        st.binary(max_size=20).map(lambda raw: b"data: " + raw + b"\n\n"),
    ),
    max_size=5,
).map(b"".join)


@given(_LINES)
@settings(deadline=None, max_examples=500)
def test_any_stream_is_events_or_one_line(raw: bytes) -> None:
    endpoint = endpoint_of("http://localhost")
    try:
        for event in events(raw.splitlines(keepends=True)):
            if event.error is not None:
                assert "\n" not in str(endpoint.refusal(Problem.of(event.error)))
    except StreamError as error:
        assert "\n" not in str(error) and str(error).isprintable()


@given(_LINES)
@settings(deadline=None, max_examples=40)
def test_any_answer_is_text_or_one_line(raw: bytes) -> None:
    """Through the sockets, as tern chat meets it."""
    try:
        for chunk in chat(raw):
            assert isinstance(chunk.text, str) and isinstance(chunk.thought, str)
    except TernError as error:
        assert str(error).isprintable()


# ------------------------------------------------------------------------------------------------------------
# Answers
# ------------------------------------------------------------------------------------------------------------


def test_what_servers_refuse() -> None:
    def refused(status: str, body: Any) -> str:
        with pytest.raises(TernError) as error:
            chat(body if isinstance(body, (str, bytes)) else json.dumps(body), status)
        assert str(error.value).isprintable()
        return str(error.value)

    assert "answered 404: File Not Found" in refused("404 X", {"error": {"message": "File Not Found"}})
    assert "answered 401" in refused("401 X", {"error": "no"}) and "--api-key" in refused("401 X", "")
    assert "try again when its model is loaded" in refused("503 X", {"error": {"message": "Loading"}})
    assert r"answered 500: \x1b[31m<html>" in refused("500 X", "\x1b[31m<html>")
    assert "answered 500: 7" in refused("500 X", {"error": 7})
    assert "answered 302" in refused("302 Found", "")
    for body in (b"\xff" * 9, "[" * 100_000, "null", "[]", '{"error": {"message": 5, "code": "x"}}'):
        refused("400 X", body)
    full = {"type": "exceed_context_size_error", "message": "", "n_prompt_tokens": 900, "n_ctx": 512}
    with pytest.raises(ContextFullError, match=r"900 tokens .* has 512"):
        chat(json.dumps({"error": full}), "400 X")
    # In the middle of a stream, in both ways that llama-servers have.
    assert "answered 500: out of memory" in refused(
        "200 OK", data({"error": {"code": 500, "message": "out of\nmemory"}})
    )
    assert "met an error: gone" in refused("200 OK", 'error: {"message": "gone"}\n\n')


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
    ],
    ids=["nothing", "another protocol", "half", "no object"],
)  # fmt: skip
def test_what_is_no_server_of_ours(answer: bytes) -> None:
    with saying(answer) as endpoint:
        client = LlamaClient(endpoint)
        for ask in (
            client.n_context,
            lambda: client.count_tokens("a", {}),
            lambda: list(client.answer("a", {}, {})),
        ):
            with pytest.raises(ServerError) as error:
                ask()
            assert str(error.value).startswith(f"{endpoint.name}: ") and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("url", "name", "base"),
    [
        ("localhost:8080", "http://localhost:8080", ""),
        ("http://localhost:8080/v1/", "http://localhost:8080", ""),
        ("https://host/prefix/v1", "https://host/prefix", "/prefix"),
        ("http://user:secret@host:1", "http://host:1", ""),
        ("http://[::1]:8080", "http://[::1]:8080", ""),
    ],
)
def test_addresses(url: str, name: str, base: str) -> None:
    endpoint = endpoint_of(url)
    assert (endpoint.name, endpoint.base) == (name, base)


@pytest.mark.parametrize(
    "url", ["", "ftp://host", "http://", "http://[", "http://host:port", "http://host:0", "http://host/a b", "://"]
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(TernError, match="not the address of a server; it looks like"):
        endpoint_of(url)
    with pytest.raises(TernError, match="--api-key"):
        endpoint_of("http://localhost", "two\nlines")
