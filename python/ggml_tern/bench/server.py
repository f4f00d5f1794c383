"""``tern bench --serve``: what users of a running OpenAI-compatible server get, one or many at a time.

Each user streams one chat completion after the other. No two prompts begin alike, so that no server answers
from a cache of prompts. A level, so many users at a time, ends after its seconds or its requests; what is
still being answered then is cut off, and counts with the tokens that it got.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggml_tern.bench.report import Grid, Report
from ggml_tern.client.endpoint import PATIENCE, Endpoint, Exchange, ServerError, endpoint_of
from ggml_tern.client.events import Delta, Event
from ggml_tern.client.llama import model_names
from ggml_tern.plots import Panel

#: Words that are about one token each in most vocabularies.
_TEXT = (
    "the of and a to in is was it for on with as by at from his that her he she they we had not but all one "
    "time day year way man world life hand part place case week number night point home water room mother"
)
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Server:
    """A server to measure. model: the name that requests give."""

    endpoint: Endpoint
    model: str

    @property
    def url(self) -> str:
        return self.endpoint.name


def open_server(url: str, api_key: str | None, model: str | None) -> Server:
    """Of a URL like http://localhost:8080 or http://localhost:8080/v1; asks for the model's name unless it is
    given.

    Raises TernError."""
    endpoint = endpoint_of(url, api_key)
    names = [model] if model is not None else model_names(endpoint)
    if not names:
        raise ServerError(f"{endpoint.name}: /v1/models names no model; give --model-name")
    return Server(endpoint, names[0])


# ---- one completion ----


class Deadline:
    """When requests end, be they answered or not."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._sockets: set[socket.socket] = set()

    @property
    def left(self) -> float:
        """Seconds, more than 0, since a socket takes 0 for something else."""
        return max(self._at - time.monotonic(), 0.001)

    @property
    def has_passed(self) -> bool:
        # A socket may give up a moment early.
        return time.monotonic() >= self._at - 0.01

    def end_now(self) -> None:
        """For the requests of all threads."""
        self._at = time.monotonic()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def ends(self, sock: socket.socket) -> Iterator[None]:
        """Whatever is done with the socket in the block."""
        self._sockets.add(sock)
        try:
            yield
        finally:
            self._sockets.discard(sock)

    def watched(self, exchange: Exchange) -> Iterator[bytes]:
        """The lines of an answer, for as long as there is time."""
        for line in exchange.lines():
            yield line
            if self.has_passed:
                return
            exchange.socket.settimeout(self.left)


@dataclass
class Answer:
    """A completion, times in seconds of the monotonic clock.

    Attributes:
        start: when it was asked for.
        arrivals: when each piece of text came.
        n_tokens: as the server counts them, or the pieces.
        n_prompt: tokens of the prompt, 0 where the server did not say.
        cut: ended by us.
        error: why it failed, in one line.
    """

    start: float
    arrivals: list[float] = field(default_factory=list)
    n_tokens: int = 0
    n_prompt: int = 0
    cut: bool = False
    error: str | None = None


def prompt_of(n_words: int, rng: random.Random) -> str:
    return " ".join([f"{rng.getrandbits(32):08x}", *rng.choices(WORDS, k=max(n_words - 5, 0))])


def ask(server: Server, prompt: str, n_generate: int, deadline: Deadline, answer: Answer) -> None:
    """Stream one completion into `answer`.

    Raises ServerError."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_generate,
        "stream": True,
        "stream_options": {"include_usage": True},
        # An answer as long as the others, where the server knows how.
        "ignore_eos": True,
    }
    try:
        with (
            server.endpoint.exchange(min(PATIENCE, deadline.left)) as exchange,
            deadline.ends(exchange.socket),
        ):
            exchange.socket.settimeout(deadline.left)
            exchange.send("/v1/chat/completions", body)
            for event in exchange.events(deadline.watched(exchange)):
                _take(event, answer)
    except ServerError:
        if not deadline.has_passed:
            raise
        answer.cut = True


def _take(event: Event, answer: Answer) -> None:
    for choice in event.choices or ():
        delta = choice.delta or Delta()
        if delta.content or delta.reasoning_content:
            answer.arrivals.append(time.monotonic())
            answer.n_tokens = max(answer.n_tokens, len(answer.arrivals))
    if event.usage is not None:
        answer.n_tokens = event.usage.completion_tokens or answer.n_tokens
        answer.n_prompt = event.usage.prompt_tokens or 0


# ---- many of them ----


@dataclass(frozen=True)
class Load:
    """n_prompt: words of a prompt; n_generate: tokens of an answer; seconds, requests: the most that a level
    takes."""

    n_prompt: int = 128
    n_generate: int = 64
    seconds: float = 15.0
    requests: int = 64


@dataclass
class Level:
    """So many users at a time. seconds: how long it took."""

    users: int
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def first_tokens(self) -> list[float]:
        """Seconds from a request to the first token."""
        return [answer.arrivals[0] - answer.start for answer in self.answers if answer.arrivals]

    @property
    def gaps(self) -> list[float]:
        """Seconds between a piece of text and the next."""
        return [gap for answer in self.answers for gap in np.diff(answer.arrivals).tolist()]

    @property
    def user_speeds(self) -> list[float]:
        """Tokens/s of each answer, from the request on."""
        return [
            answer.n_tokens / (answer.arrivals[-1] - answer.start)
            for answer in self.answers
            if answer.arrivals
        ]

    @property
    def speed(self) -> float:
        """Tokens/s of all users together."""
        return sum(answer.n_tokens for answer in self.answers) / self.seconds if self.seconds else 0.0


class _Users:
    """The threads of a level."""

    def __init__(self, server: Server, load: Load, level: Level) -> None:
        self._server, self._load, self._level = server, load, level
        self._lock = threading.Lock()
        self._left = load.requests
        self._rng = random.Random()
        self._deadline = Deadline(load.seconds)
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(level.users)]

    def _ask_on(self) -> None:
        """One request after the other. A user who met an error leaves, or a server that is gone would be
        asked a thousand times a second."""
        while True:
            with self._lock:
                if self._left <= 0 or self._deadline.has_passed:
                    return
                self._left -= 1
                prompt = prompt_of(self._load.n_prompt, self._rng)
                answer = Answer(time.monotonic())
                self._level.answers.append(answer)
            try:
                ask(self._server, prompt, self._load.n_generate, self._deadline, answer)
            except ServerError as error:
                answer.error = str(error)
                return

    def run(self) -> None:
        start = time.monotonic()
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(0.1)
        finally:
            # On Ctrl-C: those under way end at once, and no more begin.
            self._deadline.end_now()
            for thread in self._threads:
                thread.join(1.0)
            self._level.seconds = time.monotonic() - start


def warm_up(server: Server, load: Load) -> None:
    """One short completion. Raises ServerError, in particular for what all others would end with."""
    answer = Answer(time.monotonic())
    ask(server, prompt_of(load.n_prompt, random.Random()), 2, Deadline(6 * PATIENCE), answer)
    if answer.cut:
        raise ServerError(f"{server.url}: gave no answer within {6 * PATIENCE:.0f} seconds")


def measure(
    server: Server, load: Load, users: Sequence[int], levels: list[Level], start: Callable[[Level], None]
) -> bool:
    """Adds a level for each number of users; what is done stays there whatever exception comes.

    Returns False where a level had nothing but errors, and those after it were left out."""
    for count in users:
        level = Level(count)
        levels.append(level)
        start(level)
        _Users(server, load, level).run()
        if level.errors and len(level.errors) == len(level.answers):
            return False
    return True


# ---- what was found ----


def _percentiles(seconds: Sequence[float], digits: int, factor: float = 1.0) -> list[str]:
    if not seconds:
        return ["-", "-"]
    return [f"{factor * value:.{digits}f}" for value in np.percentile(seconds, (50, 95))]


def report(server: Server, load: Load, levels: Sequence[Level], complete: bool) -> Report:
    prompts = [answer.n_prompt for level in levels for answer in level.answers if answer.n_prompt]
    n_prompt = f"{np.median(prompts):.0f} tokens" if prompts else f"{load.n_prompt} words"
    facts = [
        f"{server.model}: prompts of {n_prompt}, no two alike, answers of up to {load.n_generate} tokens",
        f"each number of users: up to {load.seconds:g} seconds or {load.requests} requests; what is then "
        "still being answered is cut off, and counts with its tokens",
        "each: median tokens/s of a request, waiting included; first: seconds until the first token; next: "
        "ms between two pieces of the stream",
    ]
    facts += sorted({error for level in levels for error in level.errors})
    if not complete:
        facts.append("ended before all was measured")
    columns = [
        *("users", "s", "whole", "cut", "failed", "t/s in all", "each"),
        *("first p50", "p95", "next p50", "p95"),
    ]
    rows = [
        [
            f"{level.users}",
            f"{level.seconds:.1f}",
            f"{sum(not answer.cut and answer.error is None for answer in level.answers)}",
            f"{sum(answer.cut for answer in level.answers)}",
            f"{len(level.errors)}",
            f"{level.speed:.1f}",
            f"{np.median(level.user_speeds):.1f}" if level.user_speeds else "-",
            *_percentiles(level.first_tokens, 3),
            *_percentiles(level.gaps, 1, 1000),
        ]
        for level in levels
    ]
    measured = [level for level in levels if level.first_tokens and level.user_speeds]
    speeds = {
        "all together": [(level.users, level.speed) for level in measured],
        "a user": [(level.users, float(np.median(level.user_speeds))) for level in measured],
    }
    waits = {
        name: [(level.users, float(np.percentile(level.first_tokens, percent))) for level in measured]
        for name, percent in (("median", 50), ("95th percentile", 95))
    }
    panels = [
        Panel("Speed", "users at a time", "tokens/s", speeds),
        Panel("Time to the first token", "users at a time", "seconds", waits),
    ]
    return Report(
        f"tern bench: {server.url}",
        facts,
        [Grid(columns, rows)],
        panels,
        _as_json(server, load, levels, complete),
    )


def _as_json(server: Server, load: Load, levels: Sequence[Level], complete: bool) -> dict[str, Any]:
    """Speeds in tokens/s, times in seconds."""
    return {
        "url": server.url,
        "model": server.model,
        "n_prompt": load.n_prompt,
        "n_generate": load.n_generate,
        "complete": complete,
        "levels": [
            {
                "users": level.users,
                "seconds": level.seconds,
                "requests": len(level.answers),
                "cut": sum(answer.cut for answer in level.answers),
                "errors": level.errors,
                "tokens": sum(answer.n_tokens for answer in level.answers),
                "tokens_per_second": level.speed,
                "tokens_per_second_of_users": level.user_speeds,
                "first_token": level.first_tokens,
                "next_token_p50": float(np.percentile(level.gaps, 50)) if level.gaps else None,
                "next_token_p95": float(np.percentile(level.gaps, 95)) if level.gaps else None,
            }
            for level in levels
        ],
    }
