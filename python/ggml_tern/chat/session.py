"""``tern chat``: the model's server, a conversation with it, and whoever sits at the other end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ggml_tern.chat.conversation import Conversation
from ggml_tern.chat.server import local_server
from ggml_tern.client.endpoint import endpoint_of, unix_endpoint
from ggml_tern.client.llama import LlamaClient
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource

#: Enough for a chat, and little beside the weights; the quarter of a million that models are trained for can
#: take gigabytes.
DEFAULT_CONTEXT = 8192
#: Tokens of an answer where text is continued, which has no natural end.
DEFAULT_CONTINUATION = 256

_TEMPLATE_OPTIONS = ("--chat-template", "--chat-template-file")


@dataclass(frozen=True)
class Options:
    """What a conversation is like, whoever serves it.

    Attributes:
        system: the system message.
        completes: text is continued, no questions answered.
        thinks: a model that can think before it answers does so.
        sampling: fields of the request, like temperature.
        shows_stats: after each answer.
    """

    system: str | None
    completes: bool
    thinks: bool
    sampling: dict[str, float]
    shows_stats: bool


def chat_with_file(
    model: Path,
    options: Options,
    *,
    context: int | None,
    threads: int | None,
    kv_type: str | None,
    more: Sequence[str],
) -> None:
    """Chat with a GGUF file, in a llama-server that lives as long as the chat.

    Args:
        model: the file; of a split model, the first part.
        options: of the conversation.
        context: tokens; None for what the model was trained for, but no more than ``DEFAULT_CONTEXT``.
        threads: of llama-server; None for its default.
        kv_type: of the KV cache; None for llama-server's default.
        more: options of llama-server.

    Raises:
        TernError: the file is no model, it does not load, a piped question gets no answer, ...
    """
    source = GGUFSource(model)
    question = _piped_question()
    if "tokenizer.chat_template" not in source.metadata and not any(o in _TEMPLATE_OPTIONS for o in more):
        options = _without_template(model, options)
    arguments = server_options(source, context, threads, kv_type)
    notes = Console(stderr=True)
    with local_server(model, [*arguments, *more]) as server:
        with notes.status(Text(f"loading {model.name}", "dim")):
            server.wait_until_ready()
        client = LlamaClient(unix_endpoint(server.socket, str(model)))
        _converse(client, model.name, options, question, server.check_alive)


def server_options(
    source: GGUFSource, context: int | None, threads: int | None, kv_type: str | None
) -> list[str]:
    """The options of llama-server that suit one conversation; arguments as of ``chat_with_file``."""
    if context is None:
        trained = source.metadata.get(f"{source.architecture}.context_length")
        context = min(trained, DEFAULT_CONTEXT) if isinstance(trained, int) else DEFAULT_CONTEXT
    options = {
        "--ctx-size": context,
        "--parallel": 1,
        # Conversations that are over are not kept: nobody comes back to them.
        "--cache-ram": 0,
        # A recurrent state cannot be taken back token by token. One of before the last answer is needed
        # when that is asked for again, or when its thoughts are left out; each can have 150 MB.
        "--ctx-checkpoints": 2,
        "--threads": threads,
        "--cache-type-k": kv_type,
        "--cache-type-v": kv_type,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return [*given, "--no-webui"]


def chat_with_server(url: str, model: str | None, key: str | None, options: Options) -> None:
    """Chat with a llama-server that runs.

    Args:
        url: its address.
        model: the name of one of its models; None if it has one only.
        key: its API key.
        options: of the conversation.

    Raises:
        TernError: no server answers, a piped question gets no answer, ...
    """
    client = LlamaClient(endpoint_of(url, key), model)
    _converse(client, model or url, options, _piped_question(), lambda: None)


def _piped_question() -> str | None:
    """All of stdin where it is no terminal, or None."""
    if sys.stdin.isatty():
        return None
    question = sys.stdin.read().strip()
    if not question:
        raise TernError("stdin is no terminal and has no question in it; echo one into it")
    return question


def _without_template(model: Path, options: Options) -> Options:
    way_out = "'-- --chat-template chatml' at the end of the command gives it one"
    if options.system is not None:
        raise TernError(f"{model}: has no chat template, and so no system message; {way_out}")
    if not options.completes:
        print(
            f"note: {model.name} has no chat template and continues what you write; {way_out}",
            file=sys.stderr,
        )
    return replace(options, completes=True)


def _converse(
    client: LlamaClient,
    name: str,
    options: Options,
    question: str | None,
    check_alive: Callable[[], None],
) -> None:
    sampling = dict(options.sampling)
    if options.completes:
        sampling.setdefault("max_tokens", DEFAULT_CONTINUATION)
    conversation = Conversation(
        client,
        system=options.system,
        sampling=sampling,
        template={} if options.thinks else {"enable_thinking": False},
        completes=options.completes,
    )
    # The terminal costs imports, which a piped question need not pay.
    if question is not None:
        from ggml_tern.chat.view import answer_once

        try:
            answer_once(conversation, question, shows_stats=options.shows_stats)
        except TernError:
            check_alive()  # if the server is gone, that is the better explanation
            raise
    else:
        from ggml_tern.chat.terminal import Terminal

        terminal = Terminal(conversation, shows_stats=options.shows_stats, check_alive=check_alive)
        terminal.run(name)
