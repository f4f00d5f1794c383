"""Requests that no server should answer with success, as the bytes that go over the wire.

Each ends by itself: a client that promises more than it sends hangs up afterwards. `requests` gives as many
as are wanted: every kind once, then broken variants of a whole request.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple


class Malformed(NamedTuple):
    """name: of what is wrong with it."""

    name: str
    data: bytes


def post(path: str, body: bytes, *headers: str, length: int | str | None = None) -> bytes:
    """length: what Content-Length says, where that is not the length of the body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        f"Content-Length: {len(body) if length is None else length}",
        *(headers or ["Content-Type: application/json"]),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(target: str, *headers: str, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    lines = [f"{method} {target} {version}", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


COMPLETION: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 4}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

#: Fields that spoil a completion, the rest of which is whole.
WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"prompt": {"text": "Once"}},
    {"prompt": [[], "Once", {}]},
    {"prompt": [-1]},
    {"prompt": [2**31]},
    {"prompt": [10**6]},
    {"n_predict": "many"},
    {"n_predict": [4]},
    {"n_predict": {}},
    {"temperature": "hot"},
    {"temperature": {}},
    {"top_k": "all"},
    {"top_p": []},
    {"seed": "x"},
    {"samplers": [[1, 2], {}]},
    {"grammar": "root ::= ("},
    {"grammar": "root ::= undefined-rule"},
    {"json_schema": {"type": "no such type"}},
    {"json_schema": {"$ref": "#/nowhere"}},
    {"stream": "yes"},
    {"cache_prompt": "yes"},
    {"dry_sequence_breakers": []},
)

#: The same for a chat.
WRONG_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": "Hello"},
    {"messages": 5},
    {"messages": None},
    {"messages": [1, 2, 3]},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "hologram", "data": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no url"}}]}]},
    {"tools": 5},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "no such format"}},
    {"max_tokens": "many"},
)

#: Bodies that are no JSON.
BROKEN_JSON: tuple[tuple[str, bytes], ...] = (
    ("empty body", b""),
    ("blank body", b" \r\n "),
    ("half a word", b"nul"),
    ("NaN", b'{"prompt": "a", "temperature": NaN}'),
    ("trailing comma", b'{"prompt": "a",}'),
    ("single quotes", b"{'prompt': 'a'}"),
    ("two documents", b'{"prompt": "a"}{"prompt": "b"}'),
    ("control character", b'{"prompt": "a\x00b"}'),
    ("UTF-16", json.dumps(COMPLETION).encode("utf-16")),
    ("a number too large", b'{"prompt": "a", "n_predict": ' + b"9" * 400 + b"}"),
    ("an exponent too large", b'{"prompt": "a", "temperature": 1e999}'),
    ("100000 brackets", b"[" * 100_000),
    ("100000 objects", b'{"a":' * 100_000),
    ("50000 brackets, closed", b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    ("wrong UTF-8: 0xff", b'{"prompt": "a\xff\xfe", "n_predict": 4}'),
    ("wrong UTF-8: half a character", b'{"prompt": "\xe2\x82", "n_predict": 4}'),
    ("wrong UTF-8: overlong", b'{"prompt": "\xc0\xaf", "n_predict": 4}'),
    ("wrong UTF-8: surrogate", b'{"prompt": "\xed\xa0\x80", "n_predict": 4}'),
    ("half a surrogate pair", b'{"prompt": "\\ud800", "n_predict": 4}'),
    ("a random file", bytes(range(256)) * 16),
)

WHOLE = json.dumps(COMPLETION).encode()

#: What is wrong before the body is reached.
BROKEN_HTTP: tuple[tuple[str, bytes], ...] = (
    ("negative Content-Length", post("/completion", WHOLE, length=-1)),
    ("Content-Length of words", post("/completion", WHOLE, length="many")),
    ("Content-Length of 2**64", post("/completion", WHOLE, length=2**64)),
    ("Content-Length of a terabyte", post("/completion", WHOLE, length=2**40)),
    ("truncated body", post("/completion", WHOLE[:-9], length=len(WHOLE))),
    ("no body after all", post("/completion", b"", length=len(WHOLE))),
    (
        "two Content-Lengths",
        post("/completion", WHOLE, "Content-Type: application/json", "Content-Length: 3", length=2),
    ),
    ("chunk of no size", get("/completion", "Transfer-Encoding: chunked", method="POST") + b"xyz\r\n"),
    ("truncated chunk", get("/completion", "Transfer-Encoding: chunked", method="POST") + b"ff\r\nabc"),
    ("form", post("/completion", b"prompt=Once", "Content-Type: application/x-www-form-urlencoded")),
    (
        "multipart without parts",
        post("/completion", b"--x--\r\n", "Content-Type: multipart/form-data; boundary=x"),
    ),
    (
        "multipart without boundary",
        post("/completion", WHOLE, "Content-Type: multipart/form-data"),
    ),
    (
        "gzip that is none",
        post("/completion", WHOLE, "Content-Type: application/json", "Content-Encoding: gzip"),
    ),
    ("plain text", post("/completion", b"Once upon a time", "Content-Type: text/plain")),
    ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n"),
    ("a line feed", b"\n"),
    ("half a request line", b"POST /comp"),
    ("no such method", get("/completion", method="BREW")),
    ("no such version", get("/health", version="HTTP/9.9")),
    ("no version", b"GET /health\r\n\r\n"),
    ("GET where POST is meant", get("/completion")),
    ("no such page", get("/no/such/page")),
    ("out of the folder", get("/../../../../etc/passwd")),
    ("out of the folder, encoded", get("/%2e%2e/%2e%2e/%2e%2e/etc/passwd")),
    ("half an escape", get("/%")),
    ("64 KiB of path", get("/" + "a" * 65536)),
    ("64 KiB of header", get("/no/such/page", "X-Long: " + "a" * 65536)),
    ("1000 headers", get("/no/such/page", *(f"X-{i}: {i}" for i in range(1000)))),
    ("header without colon", get("/no/such/page", "what is this")),
    ("range out of range", get("/no/such/page", "Range: bytes=5-2")),
    ("NUL in a header", get("/no/such/page", "X-Nul: a\0b")),
)

#: Good bodies to the wrong place, or of the wrong shape for it.
MISPLACED: tuple[tuple[str, Any], ...] = (
    ("/completion", []),
    ("/completion", "Once"),
    ("/completion", 5),
    ("/completion", None),
    ("/completion", {}),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", []),
    ("/infill", {"input_prefix": 5}),
    ("/embedding", {"content": 5}),
    ("/v1/embeddings", {}),
    ("/rerank", {"query": 5, "documents": "x"}),
    ("/detokenize", {"tokens": ["a"]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [10**6]}),
    ("/apply-template", {"messages": 5}),
    ("/slots/0?action=save", {"filename": "../../etc/passwd"}),
    ("/slots/99?action=erase", {}),
    ("/slots/-1?action=erase", {}),
    ("/slots/x?action=explode", {}),
    ("/lora-adapters", {"id": 0}),
    ("/no/such/page", COMPLETION),
)


def kinds() -> Iterator[Malformed]:
    """Every kind of malformed request, once."""
    for name, data in BROKEN_HTTP:
        yield Malformed(name, data)
    for name, body in BROKEN_JSON:
        yield Malformed(name, post("/completion", body))
    for fields in WRONG_FIELDS:
        body = json.dumps(COMPLETION | fields).encode()
        yield Malformed(f"completion with {json.dumps(fields)}", post("/completion", body))
    for fields in WRONG_CHATS:
        body = json.dumps(CHAT | fields).encode()
        yield Malformed(f"chat with {json.dumps(fields)}", post("/v1/chat/completions", body))
    for path, content in MISPLACED:
        yield Malformed(f"{json.dumps(content)} to {path}", post(path, json.dumps(content).encode()))


def spoiled(rng: random.Random) -> Iterator[Malformed]:
    """Whole requests, cut off somewhere or with a byte in them that UTF-8 does not know, without end."""
    whole = {"/completion": COMPLETION, "/v1/chat/completions": CHAT}
    while True:
        path = rng.choice(list(whole))
        body = json.dumps(whole[path]).encode()
        place = rng.randrange(1, len(body))
        cut = body[:place]
        yield rng.choice(
            [
                Malformed(f"{path}: body cut at {place}", post(path, cut)),
                Malformed(f"{path}: hung up at {place}", post(path, cut, length=len(body))),
                Malformed(f"{path}: byte 0xff at {place}", post(path, cut + b"\xff" + body[place:])),
            ]
        )


def requests(count: int, seed: int) -> list[Malformed]:
    """`count` requests in random order: every kind as far as they go, then spoiled ones."""
    rng = random.Random(seed)
    every = list(kinds())
    chosen = rng.sample(every, min(count, len(every)))
    chosen += itertools.islice(spoiled(rng), count - len(chosen))
    rng.shuffle(chosen)
    return chosen
