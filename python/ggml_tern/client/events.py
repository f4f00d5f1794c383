"""Server-sent events of a completion, from bytes to checked values.

What a server streams is somebody else's: each event is checked against the fields that are used here, and
what does not fit is a `StreamError` of a few words, whatever it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

#: Behind it nothing comes.
_DONE = b"[DONE]"


class StreamError(ValueError):
    """A stream that is none of a completion; in a few words."""


class Progress(BaseModel):
    """How many tokens of the prompt have been read, of how many."""

    processed: int
    total: int


class ServerTimings(BaseModel):
    """What llama-server says of an answer, up to some token of it; times in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class Usage(BaseModel):
    """Tokens as the server counts them."""

    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class Delta(BaseModel):
    """What is new in a chat: of the answer, or of what the model thinks before it."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(BaseModel):
    """What is new; text where there is no chat."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Event(BaseModel):
    """One event. error: whatever a server puts there."""

    choices: list[Choice] | None = None
    prompt_progress: Progress | None = None
    timings: ServerTimings | None = None
    usage: Usage | None = None
    error: Any = None


def events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of the lines of a stream, up to the one that says that it is complete.

    Raises StreamError for what is no event of a completion, and for a stream that ends before."""
    data: list[bytes] = []
    is_error = False
    for line in lines:
        name, _, value = line.rstrip(b"\r\n").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data" and value.strip() == _DONE:
            return
        # What begins with a colon is sent only to keep the connection open.
        if name in (b"data", b"error"):
            # Old llama-servers have a field of their own for what goes wrong in the middle.
            is_error = name == b"error"
            data.append(value)
        elif name == b"" and not line.startswith(b":") and data:
            yield _event(b"\n".join(data), is_error)
            data, is_error = [], False
    raise StreamError("broke off in the middle of an answer; its log may say why")


def _event(text: bytes, is_error: bool) -> Event:
    try:
        event = Event.model_validate_json(text)
    except ValidationError as error:
        raise StreamError(f"streams what is no completion: {problem_of(error)}") from error
    if is_error and event.error is None:
        # The object itself is the error.
        return Event(error=json.loads(text))
    return event


def problem_of(error: ValidationError) -> str:
    """The first thing that is wrong with an answer, in a few words."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return "it is no JSON"
    where = ".".join(map(str, first["loc"]))
    if not where:
        return "it is no JSON object"
    return f"{where} is missing" if first["type"] == "missing" else f"{where} has the wrong type"
