"""The command ``tern serve``."""

from __future__ import annotations

from pathlib import Path

import click

from ggml_tern.memory_size import MemorySize
from ggml_tern.tensors.names import printable

EPILOG = """
\b
Examples
  tern serve model.gguf
      A web page and an OpenAI-style API on http://127.0.0.1:8080; stop it with Ctrl-C.
  tern serve model.gguf --memory-budget 6GB
      With the largest context that fits.
  tern serve model.gguf --memory-budget 6GB -c 32768 -ctk q8_0 -ctv q8_0
      Refused before loading if it takes more, with a list of what fits.
  tern serve --config serve.yaml --port 9000
      As the file says, but for the port.
  tern serve --config serve.yaml --dry-run
      What it would start.
  tern run llama-server --help
      All options of llama-server.
"""

SETTINGS = {
    "ignore_unknown_options": True,
    # -h goes to llama-server otherwise, and so would -hf.
    "help_option_names": ["--help"],
}


@click.command("serve", context_settings=SETTINGS, epilog=EPILOG)
@click.option(
    "--config",
    "file",
    metavar="FILE.yaml",
    type=click.Path(path_type=Path),
    help="What to serve and how; docs/serve.md has its keys. Options on the command line win.",
)
@click.option(
    "--memory-budget",
    "budget",
    type=MemorySize(),
    help="Refuse before loading what takes more, like 6GB or 5.5GiB; without -c, take the largest context "
    "that fits. With GPUs: of each, which then gets as many layers as fit.",
)
@click.option(
    "--llama-server",
    "program",
    metavar="PROGRAM",
    envvar="TERN_LLAMA_SERVER",
    show_envvar=True,
    default="llama-server",
    help="Start this one, of a llama.cpp built for your GPU, say.  [default: the one that came along]",
)
@click.option("--dry-run", is_flag=True, help="Check everything, print the command, and start nothing.")
@click.argument(
    "arguments", metavar="[MODEL.gguf] [LLAMA-SERVER-OPTIONS]...", nargs=-1, type=click.UNPROCESSED
)
@click.pass_context
def command(
    ctx: click.Context,
    file: Path | None,
    budget: int | None,
    program: str,
    dry_run: bool,
    arguments: tuple[str, ...],
) -> None:
    """Serve MODEL.gguf with the stock llama-server: an OpenAI-style API, a web page, /health and /metrics.

    It runs on the GPUs that this llama-server has, else on TERN0, the processor, with all layers and flash
    attention on. Only this machine may connect. Every other option is llama-server's and is passed on to it.
    Says where memory goes first. Ctrl-C or SIGTERM stops it, within three seconds even while it answers; the
    exit code is llama-server's.
    """
    if "-h" in arguments:
        click.echo(ctx.get_help())
        return
    from ggml_tern.serve import config as server_config
    from ggml_tern.serve import serving
    from ggml_tern.serve.spellings import MODEL_SOURCES, given

    words = list(arguments)
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    config = server_config.read(file) if file is not None else server_config.Config()
    if not config.models and config.model.path is None and not set(MODEL_SOURCES) & set(given(words)):
        raise click.UsageError("Give MODEL.gguf before any option, or --config FILE.yaml that names a model.")
    launch = serving.prepare(config, budget, words, program)
    for line in launch.said:
        click.echo(f"tern serve: {printable(line)}", err=True)
    if dry_run:
        click.echo(serving.shown(launch))
        return
    serving.start(launch)
