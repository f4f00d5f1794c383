"""The command ``tern chat``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from ggml_tern.cli.kv_type import KV_TYPE

EPILOG = """
\b
Examples
  tern chat model.gguf
  tern chat model.gguf "Why is the sky blue?"
      The answer on stdout, and nothing else; the exit code is 1 if there is none.
  tern chat model.gguf --system "Answer in one sentence." --temp 0.6 --context 16384 --kv q8_0
  git diff | tern chat model.gguf --system "Write a commit message for this."
      All of stdin is the question.
  tern chat model.gguf -- --lora adapter.gguf
      What follows -- are options of llama-server.
  tern chat --url http://localhost:8080
      A chat with what runs already, as started by tern serve.
"""


class WithServerOptions(click.Command):
    """A command with options of llama-server behind --, which are none of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, more = args, list[str]()
        if "--" in args:
            at = args.index("--")
            own, more = args[:at], args[at + 1 :]
        ctx.meta[_SERVER_OPTIONS] = tuple(more)
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- OPTIONS]"]


_SERVER_OPTIONS = "ggml_tern.server_options"


@click.command("chat", epilog=EPILOG, cls=WithServerOptions)
@click.argument("model", metavar="MODEL.gguf", required=False)
@click.argument("question", metavar="[QUESTION]", nargs=-1)
@click.option("--url", help="Talk to this llama-server. MODEL, if given, is the name that it has there.")
@click.option(
    "--api-key", envvar="LLAMA_API_KEY", help="For --url, if the server wants one.  [env: LLAMA_API_KEY]"
)
@click.option(
    "--llama-server",
    "server",
    metavar="PROGRAM",
    envvar="TERN_LLAMA_SERVER",
    show_envvar=True,
    default="llama-server",
    help="Start this one, of a llama.cpp built for your GPU, say.  [default: the one that came along]",
)
@click.option("--system", help="The system message.")
@click.option(
    "--complete",
    is_flag=True,
    help="Continue the text that is typed instead of answering it.  [default: for models without a chat "
    "template]",
)
@click.option("--no-think", is_flag=True, help="Tell a model that can think not to.")
@click.option(
    "--temp", "temperature", type=click.FloatRange(0), help="Temperature; 0 always takes the likeliest token."
)
@click.option("--top-p", type=click.FloatRange(0, 1), help="Take of the likeliest tokens with this sum.")
@click.option("--top-k", type=click.IntRange(0), help="Take of this many likeliest tokens; 0: of all.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Drop what is less likely than this share.")
@click.option("--seed", type=click.IntRange(0), help="The same one gives the same answers.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Of one answer.  [default: as many as fit; with --complete, 256]",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens that the conversation can have.  [default: as many as the model was trained for, at most "
    "8192]",
)
@click.option("--threads", type=click.IntRange(1), help="[default: one for each core]")
@click.option(
    "--kv",
    "kv_type",
    type=KV_TYPE,
    help="Type of the KV cache; what is smaller takes less memory.  [default: f16]",
)
@click.option(
    "--stats/--no-stats",
    default=None,
    help="Tokens and speed after each answer.  [default: on a terminal]",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    question: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    server: str,
    system: str | None,
    complete: bool,
    no_think: bool,
    context: int | None,
    threads: int | None,
    kv_type: str | None,
    stats: bool | None,
    **sampling: Any,
) -> None:
    """Chat with a model in the terminal.

    Starts the stock llama-server with the plug-in, for this chat alone and reachable by you alone, and talks
    to it with the model's own chat template. Sampling options that are not given are llama-server's, or the
    model's own. QUESTION is answered on stdout; without one, and where stdin is not a terminal, all of that
    is the question.

    Ctrl-C stops an answer; /help tells the rest.
    """
    server_options: tuple[str, ...] = ctx.meta[_SERVER_OPTIONS]
    asked = " ".join(question).strip() or None
    if url is not None and model is not None and " " in model.strip():
        # No name of a model: there is one only, and this is the question.
        asked, model = " ".join([model, *question]).strip(), None
    own_server = {"--context": context, "--threads": threads, "--kv": kv_type, "OPTIONS": server_options}
    if url is None and model is None:
        raise click.UsageError("Missing argument 'MODEL.gguf'.")
    if url is not None and (unused := [name for name, value in own_server.items() if value]):
        raise click.UsageError(f"{', '.join(unused)}: for a server that is started here, not for --url")
    if complete and system is not None:
        raise click.UsageError("--system: there is none where text is continued (--complete)")
    from ggml_tern.chat import session as chat_session

    # A kill cleans up like Ctrl-C does, and so does closing the terminal.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    options = chat_session.Options(
        system=system,
        completes=complete,
        thinks=not no_think,
        sampling={name: value for name, value in sampling.items() if value is not None},
        shows_stats=sys.stdin.isatty() if stats is None else stats,
    )
    try:
        if url is not None:
            chat_session.chat_with_server(url, model, api_key, options, question=asked)
        elif model is not None:
            chat_session.chat_with_file(
                Path(model),
                options,
                question=asked,
                context=context,
                threads=threads,
                kv_type=kv_type,
                more=server_options,
                server=server,
            )
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
