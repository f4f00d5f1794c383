"""A client of llama-server: its answers as it writes them, and what its model and context are."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel

from ggml_tern.client.endpoint import Endpoint, ServerError
from ggml_tern.client.events import Choice, Delta, Event, ServerTimings
from ggml_tern.errors import TernError
from ggml_tern.tensors.names import printable

#: OpenAI's form: {"role": "user", "content": "..."}.
Message = dict[str, str]
#: What is to be continued: the messages of a chat, or plain text.
Prompt = list[Message] | str


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


class _Settings(BaseModel):
    n_ctx: int = 0


class _Properties(BaseModel):
    default_generation_settings: _Settings = _Settings()


class _Named(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Named]


class _Prompt(BaseModel):
    prompt: str


class _Tokens(BaseModel):
    tokens: list[int]


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
    def of(cls, timings: ServerTimings) -> Timings:
        return cls(
            timings.cache_n,
            timings.prompt_n,
            timings.prompt_ms / 1e3,
            timings.predicted_n,
            timings.predicted_ms / 1e3,
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


def model_names(endpoint: Endpoint) -> list[str]:
    """The models that a server lists. Raises ServerError."""
    return [model.id for model in endpoint.ask(_Models, "/v1/models").data]


class LlamaClient:
    """Talks to one llama-server; each call is a connection of its own."""

    def __init__(self, endpoint: Endpoint, model: str | None = None) -> None:
        """
        Args:
            endpoint: the server.
            model: which one to use of a server that has several.
        """
        self._endpoint = endpoint
        self._model = {} if model is None else {"model": model}

    def n_context(self) -> int:
        """How many tokens a conversation can have."""
        path = "/props" + (f"?model={quote(self._model['model'])}" if self._model else "")
        # A router loads the model first.
        properties = self._endpoint.ask(_Properties, path, patience=None)
        n_context = properties.default_generation_settings.n_ctx
        if n_context <= 0:
            names = printable(", ".join(model_names(self._endpoint)))
            raise TernError(
                f"{self._endpoint.name}: this server has several models; name one of them: "
                f"tern chat NAME --url {self._endpoint.name} ({names})"
            )
        return n_context

    def count_tokens(self, prompt: Prompt, template: Mapping[str, Any]) -> int:
        """The tokens of a prompt, with those of the chat template."""
        if not isinstance(prompt, str):
            chat = self._model | {"messages": prompt, "chat_template_kwargs": template}
            prompt = self._endpoint.ask(_Prompt, "/apply-template", chat, patience=None).prompt
        text = self._model | {"content": prompt, "add_special": True, "parse_special": True}
        return len(self._endpoint.ask(_Tokens, "/tokenize", text, patience=None).tokens)

    def answer(self, prompt: Prompt, sampling: Mapping[str, float], template: Mapping[str, Any]) -> Answer:
        """The answer, piece by piece.

        Args:
            prompt: messages, or a text to be continued.
            sampling: fields of the request like temperature and max_tokens; what is not there is the
                server's default.
            template: variables of the chat template.

        Raises:
            ContextFullError: the prompt alone is too long.
            ServerError: whatever else is in the way.
        """
        request: dict[str, Any] = {**self._model, **sampling, "stream": True, "timings_per_token": True}
        request["return_progress"] = True
        if isinstance(prompt, str):
            path, request["prompt"] = "/v1/completions", prompt
        else:
            path, request["messages"] = "/v1/chat/completions", prompt
            request["chat_template_kwargs"] = template
        try:
            # It may take its time: a long prompt is read before the first token comes.
            with self._endpoint.exchange(patience=None) as exchange:
                exchange.send(path, request)
                for event in exchange.events():
                    yield _chunk(event)
        except ServerError as error:
            problem = error.problem
            if problem is None or problem.type != "exceed_context_size_error":
                raise
            raise ContextFullError(problem.n_prompt_tokens or 0, problem.n_ctx or 0) from error


def _chunk(event: Event) -> Chunk:
    choice = event.choices[0] if event.choices else Choice()
    delta = choice.delta or Delta()
    progress = event.prompt_progress
    return Chunk(
        text=delta.content or choice.text or "",
        thought=delta.reasoning_content or "",
        progress=(progress.processed, progress.total) if progress else None,
        timings=Timings.of(event.timings) if event.timings else None,
        finish_reason=choice.finish_reason,
    )
