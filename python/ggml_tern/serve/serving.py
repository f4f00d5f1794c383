"""``tern serve``: the stock llama-server with the plug-in, sane defaults and what a file asks for.

What must be known before, memory above all, is settled before. Then this process becomes supervisor.py,
which starts llama-server, passes signals on and sees to its end.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ggml_tern.errors import TernError
from ggml_tern.host import run as running
from ggml_tern.host.stock import DEVICE, DEVICE_VARIABLE, host_environment, plugin_variables
from ggml_tern.plan.arithmetic import LAYOUT_VARIABLE, megabytes
from ggml_tern.serve import memory, supervisor
from ggml_tern.serve import options as options_of
from ggml_tern.serve.config import Config
from ggml_tern.serve.options import DEFAULTS, MODEL_SOURCES, Options, given, without

API_KEY_VARIABLE = "LLAMA_API_KEY"
#: How many models llama-server's router keeps loaded, at most.
ROUTER_MODELS = 4


@dataclass(frozen=True)
class Launch:
    """A llama-server about to be started.

    Attributes:
        words: its command line.
        variables: of its environment, in addition; the API key, which a command line would show to all.
        preset: the text of the router's preset file; None for a single model.
        said: what the user is told, a line each.
    """

    words: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    preset: str | None = None
    said: tuple[str, ...] = ()


def prepare(config: Config, budget: int | None, arguments: Sequence[str]) -> Launch:
    """Settle everything, and load nothing.

    Args:
        config: whose model may be overridden by `arguments`.
        budget: bytes; None for no limit.
        arguments: of llama-server; they win over `config`.

    Raises:
        TernError: something is missing or does not fit.
    """
    user, environment = given(arguments), options_of.from_environment()
    common = without(DEFAULTS, environment) | options_of.of_server(config)
    if config.models and not any(source in user for source in MODEL_SOURCES):
        launch = _router(config, budget, common, user, environment)
    else:
        launch = _single(config, budget, common, user, environment)
    variables = dict(launch.variables)
    if config.server.api_key is not None and "--api-key-file" not in arguments and "api-key" not in user:
        variables[API_KEY_VARIABLE] = config.server.api_key
    effective = environment | common | user
    where = f"http://{effective.get('host') or '127.0.0.1'}:{effective.get('port') or '8080'}"
    said = (
        f"llama-server on {where}, {launch.said[0]}",
        *launch.said[1:],
        *map("note: {}".format, config.notes()),
    )
    return Launch([*launch.words, *arguments], variables, launch.preset, said)


def _single(
    config: Config, budget: int | None, common: Options, user: Options, environment: Options
) -> Launch:
    options = without(common | options_of.of_model(config.model, config.runtime, config.sampling), user)
    effective = environment | options | user
    path = effective.get("model")
    if path is None:
        if budget is not None:
            raise TernError("a memory budget needs the file of the model; give MODEL.gguf")
        return Launch(options_of.words(options), said=("of a model that its options name",))
    use = _usage(effective, budget, chooses_layout=True)
    variables = {}
    name = os.path.basename(path)
    device = (options | user).get("device") or plugin_variables()[DEVICE_VARIABLE]
    if isinstance(use, str):
        said = [f"{name} on {device}", use]
    else:
        if use.model.can_be_dense and LAYOUT_VARIABLE not in os.environ:
            variables[LAYOUT_VARIABLE] = "dense" if use.planned.dense else "fast"
        if budget is not None:
            # The context is settled: nothing is left for llama-server to fit.
            limits = memory.keeping(use, budget - use.total) | {"fit": "off"}
            options |= without(use.options | limits, user)
        said = [
            f"{name} ({use.model.architecture}) on {device}",
            _account(use, budget),
        ]
    return Launch(options_of.words(options), variables, said=tuple(said))


def _router(
    config: Config, budget: int | None, common: Options, user: Options, environment: Options
) -> Launch:
    """Several models: llama-server's router starts a llama-server for each that a request names."""
    asked: dict[str, Options] = {}
    uses: dict[str, memory.Usage | str] = {}
    for name in config.models:
        # What the user gives on the command line, the router gives to all.
        asked[name] = without(options_of.of_model(*config.routed(name)), user)
        # The layout goes by the environment, which is the router's for all of them.
        uses[name] = _usage(environment | common | asked[name] | user, budget, chooses_layout=False)
    known = [use for use in uses.values() if not isinstance(use, str)]
    totals = sorted((use.total for use in known), reverse=True)
    limit = budget if budget is not None else memory.available()
    fitting = sum(sum(totals[: count + 1]) <= limit for count in range(len(totals)))
    loaded = config.memory.max_models
    if "models-max" in environment | user:
        # 0 stands for all of them.
        loaded = memory.number(environment | user, "models-max") or len(uses)
    if loaded is None:
        # A model whose memory is not known may take all of it.
        loaded = max(1, min(fitting, ROUTER_MODELS)) if len(known) == len(uses) else 1
    elif budget is not None and sum(totals[:loaded]) > budget:
        raise TernError(
            f"{loaded} models at a time take up to {megabytes(sum(totals[:loaded]))} MB, and the "
            f"budget is {megabytes(budget)} MB; {fitting} fit, or give each a smaller max_context"
        )
    said = [f"{len(uses)} models on {DEVICE}, at most {loaded} at a time: {', '.join(uses)}"]
    sections = []
    for index, (name, use) in enumerate(uses.items()):
        if isinstance(use, str):
            said.append(f"{name}: {use}")
        else:
            if budget is not None:
                spare = (budget - sum(totals[:loaded])) // loaded
                limits = memory.keeping(use, spare) | {"fit": "off"}
                asked[name] |= without(use.options | limits, user)
            said.append(f"{name}: {_account(use, budget)}")
        if index == 0:
            asked[name]["load-on-startup"] = "true"
        sections.append(options_of.preset_section(name, asked[name]))
    words = options_of.words(without(common | {"models-max": str(loaded)}, user))
    return Launch(words, preset="\n".join(sections), said=tuple(said))


def _usage(effective: Options, budget: int | None, *, chooses_layout: bool) -> memory.Usage | str:
    """What a model will take; why that is not known, where nothing depends on it."""
    try:
        return memory.usage(memory.demand(effective), budget, chooses_layout=chooses_layout)
    except memory.UnknownMemory as error:
        if budget is not None:
            raise
        return f"memory not known: {error}"


def _account(use: memory.Usage, budget: int | None) -> str:
    said = f"memory, MB: {use}: {megabytes(use.total)}"
    if budget is not None:
        return f"{said} of {megabytes(budget)}"
    free = memory.available()
    if use.total > free:
        return f"{said}; only {megabytes(free)} are free: give a smaller context (-c), or --memory-budget"
    return f"{said} of {megabytes(free)} free"


def shown(launch: Launch) -> str:
    """The command as a shell would take it, for people to read; the API key stays a secret."""
    lines = [
        f"{variable}={'…' if variable == API_KEY_VARIABLE else value}"
        for variable, value in launch.variables.items()
    ]
    lines.append(shlex.join(["llama-server", *launch.words]))
    if launch.preset is not None:
        lines += ["", "# --models-preset", launch.preset.rstrip()]
    return "\n".join(lines)


def start(launch: Launch) -> NoReturn:
    """Replace this process by the supervisor of the llama-server.

    Raises TernError if it cannot be started."""
    words = launch.words
    if launch.preset is not None:
        # The router reads it again whenever it is told to, so it has to last as long as the process does, and
        # no longer.
        descriptor = os.memfd_create("models.ini", flags=0)
        os.write(descriptor, launch.preset.encode())
        words = ["--models-preset", f"/proc/self/fd/{descriptor}", *words]
    program = running.find_program("llama-server")
    environment = host_environment(stock=False) | dict(launch.variables)
    # Isolated: no site-packages, no PYTHON* variables.
    command = [sys.executable, "-IS", supervisor.__file__, str(program), *words]
    sys.stderr.flush()
    try:
        os.execve(sys.executable, command, environment)
    except OSError as error:
        raise TernError(f"{sys.executable}: cannot be started: {error.strerror}") from error
