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
from ggml_tern.gguf.model_file import require_model
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.host.devices import choose
from ggml_tern.host.run import find_program
from ggml_tern.plan.fit import fit
from ggml_tern.serve.memory import demand
from ggml_tern.serve.spellings import from_environment, given, removed
from ggml_tern.tensors.names import printable

#: Enough for a chat, and little beside the weights; the quarter of a million that models are trained for can
#: take gigabytes.
DEFAULT_CONTEXT = 8192
#: Tokens of an answer where text is continued, which has no natural end.
DEFAULT_CONTINUATION = 256

_TEMPLATE_OPTIONS = ("--chat-template", "--chat-template-file")
#: Architectures of encoders whose files may not say so.
_ENCODERS = ("t5encoder", "gemma-embedding", "llama-embed")


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
    question: str | None,
    context: int | None,
    threads: int | None,
    kv_type: str | None,
    more: Sequence[str],
    server: str = "llama-server",
) -> None:
    """Chat with a GGUF file, in a llama-server that lives as long as the chat.

    Args:
        model: the file; of a split model, any part.
        options: of the conversation.
        question: the one to answer; None for those that are piped or typed.
        context: tokens; None for what the model was trained for, but no more than ``DEFAULT_CONTEXT``.
        threads: of llama-server; None for its default.
        kv_type: of the KV cache; None for llama-server's default.
        more: options of llama-server.
        server: the llama-server, a path or a name as `tern run` takes it.

    Raises:
        TernError: the file is no model that writes, it does not fit, a question gets no answer, ...
    """
    source = GGUFSource(model)
    require_model(source)
    _require_writer(source)
    question = question or _piped_question()
    if "tokenizer.chat_template" not in source.metadata and not any(o in _TEMPLATE_OPTIONS for o in more):
        options = _without_template(model, options)
    words = [*server_options(context, threads, kv_type), *more]
    asked = demand(from_environment() | given(words) | {"model": str(model)})
    program = find_program(server)
    device = choose(program, more)
    found = fit(replace(asked, most=DEFAULT_CONTEXT), is_elsewhere=device.is_elsewhere)
    for note in (*filter(None, [device.said]), *found.notes):
        print(f"note: {printable(note)}", file=sys.stderr)
    if found.context is not None:
        words = [*removed(words, ["ctx-size"]), "--ctx-size", str(found.context)]
    notes = Console(stderr=True)
    with local_server(source.first, words, program, device) as running:
        with notes.status(Text(f"loading {printable(model.name)}", "dim")):
            running.wait_until_ready()
        client = LlamaClient(unix_endpoint(running.socket, str(model)))
        _converse(client, model.name, options, question, running.check_alive)


def server_options(context: int | None, threads: int | None, kv_type: str | None) -> list[str]:
    """The options of llama-server that suit one conversation; arguments as of ``chat_with_file``."""
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


def chat_with_server(
    url: str, model: str | None, key: str | None, options: Options, *, question: str | None
) -> None:
    """Chat with a llama-server that runs.

    Args:
        url: its address.
        model: the name of one of its models; None if it has one only.
        key: its API key.
        options: of the conversation.
        question: the one to answer; None for those that are piped or typed.

    Raises:
        TernError: no server answers, a question gets no answer, ...
    """
    client = LlamaClient(endpoint_of(url, key), model)
    _converse(client, model or url, options, question or _piped_question(), lambda: None)


def _piped_question() -> str | None:
    """All of stdin where it is no terminal, or None."""
    if sys.stdin.isatty():
        return None
    raw = sys.stdin.buffer.read()
    try:
        # As Windows writes it, with a mark in front.
        question = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise TernError(
            f"stdin is not UTF-8 text: byte {error.start + 1} is 0x{raw[error.start]:02x}; "
            "'iconv -f LATIN1 -t UTF-8' makes it so, if it is Latin-1"
        ) from error
    if not question:
        raise TernError(
            "stdin is no terminal and has no question in it; echo one into it, or give it as an argument"
        )
    return question


def _require_writer(source: GGUFSource) -> None:
    """Refuse models that turn text into numbers and write none."""
    architecture = source.architecture or ""
    is_encoder = source.metadata.get(f"{architecture}.attention.causal") is False
    pools = source.metadata.get(f"{architecture}.pooling_type", 0)
    if is_encoder or pools or "bert" in architecture or architecture in _ENCODERS:
        raise TernError(
            f"{source.path}: is an embedding model ({printable(architecture)}), which writes no text; "
            f"'tern serve {source.path} --embedding' serves /v1/embeddings"
        )


def _without_template(model: Path, options: Options) -> Options:
    way_out = "'-- --chat-template chatml' at the end of the command gives it one"
    if options.system is not None:
        raise TernError(f"{model}: has no chat template, and so no system message; {way_out}")
    if not options.completes:
        print(
            f"note: {printable(model.name)} has no chat template and continues what you write; {way_out}",
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
