"""A conversation with a model: its turns, and how it stays within the context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_tern.atomic_file import AtomicFile
from ggml_tern.client.llama import Answer, ContextFullError, LlamaClient, Message, Prompt, Timings
from ggml_tern.errors import TernError


@dataclass(eq=False)  # the same words twice are two turns
class Turn:
    """A question and what has been answered to it so far."""

    question: str
    answer: str = ""


@dataclass
class Totals:
    """Of all answers of a session: how many there were, and the sums of their timings."""

    n_answers: int = 0
    n_prefill: int = 0
    prefill_seconds: float = 0.0
    n_decode: int = 0
    decode_seconds: float = 0.0

    def add(self, timings: Timings) -> None:
        self.n_answers += 1
        self.n_prefill += timings.n_prefill
        self.prefill_seconds += timings.prefill_seconds
        self.n_decode += timings.n_decode
        self.decode_seconds += timings.decode_seconds


class Conversation:
    """Asks, and remembers what was asked and answered.

    Attributes:
        system: the system message; None for none.
        completes: whether text is continued, instead of questions answered.
        turns: those that the model is told of, oldest first.
        n_context: tokens that there is room for.
        n_used: tokens of the turns, as of the last answer.
        n_dropped: turns that were forgotten to make room for the last answer.
        cut: why the last answer is not complete: "context" or "max-tokens"; None if it is.
        totals: of the session.
    """

    def __init__(
        self,
        client: LlamaClient,
        *,
        system: str | None = None,
        sampling: Mapping[str, float] | None = None,
        template: Mapping[str, Any] | None = None,
        completes: bool = False,
    ) -> None:
        """
        Args:
            client: whom to ask.
            system: the system message.
            sampling: fields of the request; see ``LlamaClient.answer``.
            template: variables of the chat template.
            completes: no chat, but a text that user and model write in turns, without a system message, as
                suits a model that knows no chat template.
        """
        self._client, self.completes = client, completes
        self._sampling, self._template = dict(sampling or {}), dict(template or {})
        self.system = system
        self.turns: list[Turn] = []
        self.n_context = client.n_context()
        self.n_used = self.n_dropped = 0
        self.cut: str | None = None
        self.totals = Totals()
        self._last: Turn | None = None

    def prompt(self) -> Prompt:
        """All that the model is told."""
        if self.completes:
            return "\n".join(turn.question + turn.answer for turn in self.turns)
        return self.messages()

    def messages(self) -> list[Message]:
        """The conversation in OpenAI's form."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.answer:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def ask(self, question: str) -> Answer:
        """The answer, piece by piece. It may be left at any time: what was written until then is kept.

        Raises:
            ContextFullError: the question does not fit into the context, even alone.
            TernError: whatever else is in the way.
        """
        turn = self._last = Turn(question)
        self.turns.append(turn)
        self.n_dropped, self.cut = 0, None
        timings, finish_reason = None, None
        try:
            self._make_room()
            with closing(self._client.answer(self.prompt(), self._sampling, self._template)) as chunks:
                for chunk in chunks:
                    turn.answer += chunk.text
                    timings = chunk.timings or timings
                    finish_reason = chunk.finish_reason or finish_reason
                    yield chunk
        finally:
            if not turn.answer:  # templates want questions and answers in turns
                self.turns.remove(turn)
            if timings:
                self.totals.add(timings)
                self.n_used = timings.n_context
            if finish_reason == "length":
                self.cut = "context" if self.n_used >= self.n_context else "max-tokens"

    def retry(self) -> Answer:
        """Another answer to the last question."""
        if self._last is None:
            raise TernError("there is no question to ask again")
        if self._last in self.turns:
            self.turns.remove(self._last)
        return self.ask(self._last.question)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.turns.clear()
        self._last, self.n_used = None, 0

    def _make_room(self) -> None:
        """Drop the oldest turns if the last question and an answer would not fit into the context.

        Half of the context is cleared at a time: what is left has to be read again, which should be rare.
        """
        n_prompt = self._client.count_tokens(self.prompt(), self._template)
        for_answer = min(self._sampling.get("max_tokens", self.n_context), self.n_context // 4)
        if n_prompt + for_answer <= self.n_context:
            return
        turns = list(self.turns)
        while len(self.turns) > 1 and n_prompt > self.n_context // 2:
            del self.turns[0]
            self.n_dropped += 1
            n_prompt = self._client.count_tokens(self.prompt(), self._template)
        if n_prompt >= self.n_context:
            self.turns, self.n_dropped = turns, 0  # for nothing
            raise ContextFullError(n_prompt, self.n_context)

    def save(self, path: Path) -> None:
        """Write the conversation: as JSON messages if the name ends in .json, or else as Markdown.

        Raises:
            TernError: it cannot be written.
        """
        if path.suffix == ".json":
            text = json.dumps(self.messages(), ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"**{m['role'].capitalize()}:**\n\n{m['content']}\n" for m in self.messages())
        with AtomicFile(path) as file, file.explain():
            file.temporary.write_text(text, encoding="utf-8")
            file.publish()
