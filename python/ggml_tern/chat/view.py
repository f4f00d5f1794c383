"""How an answer looks while it comes, and its figures afterwards."""

from __future__ import annotations

import sys
from contextlib import closing
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ggml_tern.chat.conversation import Conversation
from ggml_tern.client.llama import Chunk, Timings

#: What a model must not send to a terminal: control characters, but for tabs and newlines.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class AnswerWriter:
    """Writes an answer as it comes. Use as a context manager, which ends its last line.

    On a terminal there is more to see: how much of the prompt is read, and dimmed, what the model thinks.

    Attributes:
        timings: of the answer so far.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, Console(file=out, highlight=False)
        self._shows_more = out.isatty()
        self._progress: Status | None = None
        self._last = ""  # character that was written
        self._is_thinking = False
        self.timings: Timings | None = None

    def __enter__(self) -> Self:
        return self

    def write(self, chunk: Chunk) -> None:
        self.timings = chunk.timings or self.timings
        if not self._shows_more:
            self._write(chunk.text)
            return
        if chunk.progress:
            self._show_progress(*chunk.progress)
        if chunk.thought:
            self._hide_progress()
            thought = chunk.thought.translate(_CONTROL)
            self._terminal.print(Text(thought, "dim italic"), end="", soft_wrap=True)
            self._is_thinking, self._last = True, thought[-1:]
        if chunk.text:
            self._hide_progress()
            if self._is_thinking:
                self._write("\n\n")
                self._is_thinking, self._last = False, ""
            self._write(chunk.text.translate(_CONTROL))

    def _write(self, text: str) -> None:
        # Models like to begin with empty lines.
        text = text if self._last else text.lstrip("\n")
        self._out.write(text)
        self._out.flush()
        self._last = text[-1:] or self._last

    def _show_progress(self, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = Status("", console=self._terminal)
            self._progress.start()
        self._progress.update(Text(f"reading {done} of {total} tokens", "dim"))

    def _hide_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide_progress()
        if self._last not in ("", "\n"):
            self._out.write("\n")
            self._out.flush()


def stats_line(timings: Timings, n_context: int) -> str:
    """The figures of one answer."""
    parts = (
        f"prefill {speed(timings.n_prefill, timings.prefill_seconds)}",
        f"decode {speed(timings.n_decode, timings.decode_seconds)}",
        f"context {fill(timings.n_context, n_context)}",
    )
    return " · ".join(parts)


def speed(n_tokens: int, seconds: float) -> str:
    rate = f", {n_tokens / seconds:.1f} tokens/s" if n_tokens and seconds > 0 else ""
    return f"{n_tokens} token{'' if n_tokens == 1 else 's'}{rate}"


def fill(n_used: int, n_context: int) -> str:
    return f"{n_used} of {n_context} ({n_used / n_context:.0%})"


def context_notes(conversation: Conversation) -> list[str]:
    """What the user should know of the last answer."""
    notes = []
    if conversation.n_dropped:
        turns = "turn was" if conversation.n_dropped == 1 else f"{conversation.n_dropped} turns were"
        notes.append(
            f"the context was full: the oldest {turns} dropped; a larger --context holds more, /reset begins "
            "anew"
        )
    if conversation.cut == "context":
        notes.append(
            f"the context of {conversation.n_context} tokens is full and the answer cut; a larger --context "
            "holds more, /reset begins anew"
        )
    elif conversation.cut == "max-tokens":
        notes.append("the answer was cut at --max-tokens")
    return notes


def answer_once(conversation: Conversation, question: str, *, shows_stats: bool) -> None:
    """Answer one question on stdout, for scripts; notes go to stderr."""
    with closing(conversation.ask(question)) as answer, AnswerWriter(sys.stdout) as writer:
        for chunk in answer:
            writer.write(chunk)
    notes = context_notes(conversation)
    if shows_stats and writer.timings:
        notes.append(stats_line(writer.timings, conversation.n_context))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
