"""The command ``tern run``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ggml_tern.errors import TernError
from ggml_tern.host import devices as devices_of
from ggml_tern.host import run as running
from ggml_tern.tensors.names import printable

#: Of llama.cpp's programs, what names a model to load.
MODEL_OPTIONS = ("-m", "--model", "-md", "--model-draft", "--spec-draft-model")
MODEL_VARIABLE = "LLAMA_ARG_MODEL"
# With these they load nothing, or fetch first what -m names.
_LOADS_NOTHING = frozenset(("-h", "--help", "--usage", "--version", "--list-devices", "--cache-list", "-cl"))
_LOADS_NO_FILE = _LOADS_NOTHING | {"-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"}


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--stock", is_flag=True, help="Run it without the plug-in.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(stock: bool, program: str, arguments: tuple[str, ...]) -> None:
    """Run a stock llama.cpp PROGRAM with the plug-in.

    PROGRAM is the name of one that came with ggml-tern (llama-server, llama-bench, ...), of one on the PATH,
    or a path. All that follows it is passed on; its output, signals and exit code come through. A model that
    llama.cpp would not load (-m FILE) is refused before it starts, with the reason.

    It runs on the devices that --device or LLAMA_ARG_DEVICE names; else on the GPUs that this llama.cpp has;
    else on TERN0, the processor.
    """
    path = running.find_program(program)
    words = look_at_models(path, list(arguments))
    choice = (
        devices_of.Choice() if stock or _LOADS_NOTHING.intersection(words) else devices_of.choose(path, words)
    )
    if choice.said:
        click.echo(f"tern run: {printable(choice.said)}", err=True)
    running.run(path, words, stock=stock, devices=choice.devices)


def look_at_models(program: Path, arguments: list[str]) -> list[str]:
    """Look at the models that a llama.cpp program is to load, before it starts.

    It would only log what is wrong with one, and may end before that is written.

    Args:
        program: the file; of what is no llama.cpp program the options mean something else, and nothing is
            looked at.
        arguments: as they were given.

    Returns:
        The arguments, with the first part of a split model in place of any other part of it.

    Raises:
        TernError: a model is missing, damaged, or no model.
    """
    if not devices_of.is_llama_cpp(program) or _LOADS_NO_FILE.intersection(arguments):
        return arguments
    takes_several = program.name.startswith("llama-bench")
    found = list(arguments)
    named = False
    for i, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        option = option.replace("_", "-") if option.startswith("--") else option
        if option not in MODEL_OPTIONS or (not equals and i + 1 == len(arguments)):
            continue
        value, at = (value, i) if equals else (arguments[i + 1], i + 1)
        named = named or option in ("-m", "--model")
        models = [_first_part(program, model) for model in (value.split(",") if takes_several else [value])]
        found[at] = f"{option}=" * bool(equals) + ",".join(models)
    if not named and not takes_several and (model := os.environ.get(MODEL_VARIABLE)):
        _first_part(program, model)
    return found


def _first_part(program: Path, model: str) -> str:
    """What the program must be given for this model. Raises TernError for what it could not load."""
    # Imported here, for it takes time.
    from ggml_tern.gguf.model_file import model_file
    from ggml_tern.gguf.reader import GGUFSource

    try:
        first = GGUFSource(Path(model)).first if _reads_vocabularies(program) else model_file(Path(model))
    except TernError as error:
        # A llama.cpp of somebody's own may be newer than what is known here.
        if "has unknown type" in str(error) and program.name not in running.bundled_programs():
            return model
        raise
    # As it was given, where it is that file.
    return model if first == Path(model) else str(first)


def _reads_vocabularies(program: Path) -> bool:
    """Whether a file without weights is enough for it."""
    return program.name == "llama-tokenize"
