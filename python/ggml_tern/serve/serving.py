"""``tern serve``: the stock llama-server with the plug-in, sane defaults and what a file asks for.

What must be known before, memory above all, is settled before. Then this process becomes supervisor.py,
which starts llama-server, passes signals on and sees to its end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import mmap
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.host import run as running
from ggml_tern.host.devices import Choice, choose, named_devices, resolve
from ggml_tern.host.stock import DEVICE, DEVICE_VARIABLE, host_environment, install_dir
from ggml_tern.plan.arithmetic import LAYOUT_VARIABLE, megabytes
from ggml_tern.plan.cards import Division, divide
from ggml_tern.plan.fit import Demand, Fit, Usage, available, fit
from ggml_tern.plan.header import read_model
from ggml_tern.serve import memory, supervisor
from ggml_tern.serve import options as options_of
from ggml_tern.serve.config import Config, Runtime
from ggml_tern.serve.options import DEFAULTS, LEFT_TO_GPUS
from ggml_tern.serve.spellings import MODEL_SOURCES, Options, from_environment, given, removed, without
from ggml_tern.serve.spellings import words as words_of

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
        settled: options that the user's words no longer decide.
        program: the llama-server.
        devices: what it runs on where its words do not say; None: what llama.cpp chooses.
    """

    words: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    preset: str | None = None
    said: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    program: Path = Path("llama-server")
    devices: str | None = DEVICE


def prepare(
    config: Config, budget: int | None, arguments: Sequence[str], server: str = "llama-server"
) -> Launch:
    """Settle everything, and load nothing.

    Args:
        config: whose model may be overridden by `arguments`.
        budget: bytes, instead of what `config` says of it; of main memory, or of each GPU that it runs on.
        arguments: of llama-server; they win over `config`.
        server: the llama-server, a path or a name as `tern run` takes it.

    Raises:
        TernError: something is missing or does not fit.
    """
    user, environment = given(arguments), from_environment()
    common = without(DEFAULTS, environment) | options_of.of_server(config)
    program = running.find_program(server)
    _check_download(environment | user, program)

    def device_of(runtime: Runtime, key: str) -> Choice:
        if runtime.device is None or named_devices(arguments) is not None:
            return choose(program, arguments)
        return resolve(runtime.device, key, program, arguments)

    device = device_of(config.runtime, "runtime.device")
    if budget is None:
        of_gpus = config.memory.max_gpu_memory if device.is_elsewhere else None
        budget = of_gpus if of_gpus is not None else config.budget
    if config.models and not any(source in user for source in MODEL_SOURCES):
        launch = _router(config, budget, common, user, environment, device, device_of)
    else:
        launch = _single(config, budget, common, user, environment, device)
    variables = dict(launch.variables)
    if config.server.api_key is not None and "api-key-file" not in user and "api-key" not in user:
        variables[API_KEY_VARIABLE] = config.server.api_key
    effective = environment | common | user
    host = effective.get("host") or "127.0.0.1"
    said = [
        f"llama-server on http://{host}:{effective.get('port') or '8080'}, {launch.said[0]}",
        *launch.said[1:],
        *map("note: {}".format, config.notes(device.is_elsewhere)),
    ]
    has_key = API_KEY_VARIABLE in variables or "api-key" in effective or "api-key-file" in effective
    if not has_key and not all(map(_is_private, host.split(","))):
        said.append(
            f"warning: whoever reaches {host} may use this server, since it wants no API key: set the "
            f"variable {API_KEY_VARIABLE}, or server.api_key in a file"
        )
    # What was settled here stands in the place of what the user said of it.
    kept = removed(arguments, launch.settled)
    return replace(
        launch, words=[*launch.words, *kept], variables=variables, said=tuple(said), program=program
    )


def _is_private(host: str) -> bool:
    """Whether only this machine reaches an address: a loopback one, or a Unix socket."""
    host = host.strip().strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith((".localhost", ".sock"))


def _check_download(effective: Options, program: Path) -> None:
    """Refuse a model that llama-server is to download where it was built without HTTPS."""
    source = next((name for name in ("hf-repo", "docker-repo", "model-url") if name in effective), None)
    if source is None or "offline" in effective or (effective.get(source) or "").startswith("http://"):
        return
    if not _speaks_https(program):
        what = effective.get(source)
        raise TernError(
            f"--{source} {what}: this llama-server was built without HTTPS and downloads nothing; fetch the "
            "file first, with `hf download` or a browser, and give it as MODEL.gguf"
        )


def _speaks_https(program: Path) -> bool:
    """Whether a llama-server can download over HTTPS; one that cannot has a sentence on that in its code."""
    for file in (program, *program.parent.glob("libllama-common.so*")):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as code:
            if code.find(b"HTTPS is not supported") >= 0:
                return False
    return True


def _single(
    config: Config,
    budget: int | None,
    common: Options,
    user: Options,
    environment: Options,
    device: Choice,
) -> Launch:
    if device.is_elsewhere:
        common = without(common, LEFT_TO_GPUS)
    options = without(common | options_of.of_model(config.model, config.runtime, config.sampling), user)
    effective = environment | options | user
    path = effective.get("model")
    if path is None:
        if budget is not None:
            raise TernError("a memory budget needs the file of the model; give MODEL.gguf")
        said = ["of a model that its options name", *filter(None, [device.said])]
        return Launch(words_of(options), said=tuple(said), devices=device.devices)
    asked = replace(memory.demand(effective), spelled=_spelled, takes_budget=True)
    found = fit(asked, budget, chooses_layout=True, is_elsewhere=device.is_elsewhere)
    settled = _settled(found, asked)
    on_cards: list[str] = []
    if device.is_elsewhere and budget is not None:
        division = _divided(asked, device, budget)
        settled["ctx-size"] = str(division.planned.context)
        options |= without({"gpu-layers": str(division.n_gpu_layers), "fit": "off"}, user)
        if len(division.cards) > 1:
            # In equal parts, as planned.
            options["tensor-split"] = ",".join("1" for _ in division.cards)
        held = max(card.total for card in division.cards)
        on_cards.append(
            f"memory, MB: {division.n_gpu_layers} of {division.n_layers} layers on the GPU, "
            f"{megabytes(held)} of {megabytes(budget)}; main memory {megabytes(division.main_memory)}; "
            f"{division.planned.context:,} tokens of context in {division.planned.kv_type}"
        )
    variables = {}
    name = os.path.basename(path)
    if "alias" not in effective:
        # Or else the API would call it by all of its path; commas part several names.
        options["alias"] = name.replace(",", "_")
    if found.usage is None:
        said = [f"{name} on {device}", *on_cards]
    else:
        use = found.usage
        if use.model.can_be_dense and LAYOUT_VARIABLE not in os.environ:
            variables[LAYOUT_VARIABLE] = "dense" if use.planned.dense else "fast"
        if budget is not None:
            # The context is settled: nothing is left for llama-server to fit.
            options |= without(memory.keeping(use, budget - use.total) | {"fit": "off"}, user)
        said = [f"{name} ({use.model.architecture}) on {device}", _account(use, budget)]
    said += [f"note: {note}" for note in (*filter(None, [device.said]), *found.notes)]
    if _lacks_template(found.source, effective):
        said.append(
            f"note: {name} has no chat template, so its answers to a chat, as on the web page, will ramble; "
            "it is for /v1/completions, or give it one with --chat-template"
        )
    return Launch(
        words_of(options | settled),
        variables,
        said=tuple(said),
        settled=tuple(settled),
        devices=device.devices,
    )


def _divided(asked: Demand, device: Choice, budget: int) -> Division:
    """What is asked for on GPUs that have `budget` bytes each.

    Raises TernError where no layer fits, and where it is not known what a GPU would hold."""
    if device.devices is None:
        raise TernError("a memory budget needs devices that are named: --device RPC0,CUDA0, say")
    if asked.kv_type is None or asked.draft is not None:
        raise TernError(
            "a memory budget on a GPU is for one model with a KV cache in f16, q8_0, q5_0 or q4_0"
        )
    cards = [budget] * len(device.devices.split(","))
    model = read_model(asked.path)
    division = divide(model, cards, asked.context, asked.kv_type, asked.parallel)
    if division.n_gpu_layers == 0:
        raise TernError(
            f"{asked.path}: no layer fits into {megabytes(budget)} MB of a GPU with "
            f"{division.planned.context:,} tokens of context; a smaller one (-c), or --device {DEVICE}"
        )
    return division


def _settled(found: Fit, asked: Demand) -> Options:
    """What the check changes of what was asked for."""
    settled: Options = {}
    if found.context != asked.context:
        settled["ctx-size"] = str(found.context)
    if found.parallel is not None:
        settled["parallel"] = str(found.parallel)
    if found.source.first != asked.path:
        settled["model"] = str(found.source.first)
    return settled


def _spelled(context: int, kv_type: str, parallel: int | None) -> str:
    alone = "-np 1 " if parallel == 1 else ""
    return f"{alone}-c {context} -ctk {kv_type} -ctv {kv_type}"


def _lacks_template(source: GGUFSource, effective: Options) -> bool:
    others = ("chat-template", "chat-template-file", "embedding", "rerank")
    return "tokenizer.chat_template" not in source.metadata and not any(name in effective for name in others)


def _router(
    config: Config,
    budget: int | None,
    common: Options,
    user: Options,
    environment: Options,
    default: Choice,
    device_of: Callable[[Runtime, str], Choice],
) -> Launch:
    """Several models: llama-server's router starts a llama-server for each that a request names."""
    asked: dict[str, Options] = {}
    fits: dict[str, Fit] = {}
    used: list[str] = []
    notes: list[str] = []
    # A context on the command line is for all of them, and what becomes of it is each model's.
    for_each = {name: value for name, value in user.items() if name == "ctx-size"}
    own = {
        name: device_of(model.runtime, f"models.{name}.runtime.device")
        for name, model in config.models.items()
        if model.runtime.device is not None
    }
    # Where a model is on a GPU, these are each model's.
    each_its_own = LEFT_TO_GPUS if any(one.is_elsewhere for one in (default, *own.values())) else ()
    if each_its_own and budget is not None:
        notes.append(
            "note: the memory budget is for models on TERN0; on GPUs llama-server fits each of several"
        )
    for name in config.models:
        device = own.get(name, default)
        # What the user gives on the command line, the router gives to all.
        asked[name] = without(options_of.of_model(*config.routed(name)), user) | for_each
        if device.devices != default.devices and device.devices is not None:
            asked[name]["device"] = device.devices
        if not device.is_elsewhere:
            asked[name] |= {key: common[key] for key in each_its_own if key in common and key not in user}
        used.append(str(device))
        notes += [f"note: {name}: {device.said}"] if name in own and device.said else []
        effective = environment | common | asked[name] | user
        demand = replace(memory.demand(effective), spelled=_spelled, takes_budget=True)
        # The layout goes by the environment, which is the router's for all of them.
        fits[name] = fit(demand, budget, is_elsewhere=device.is_elsewhere)
        asked[name] |= _settled(fits[name], demand)
    uses = {name: found.usage for name, found in fits.items() if found.usage is not None}
    totals = sorted((use.total for use in uses.values()), reverse=True)
    limit = budget if budget is not None else available()
    fitting = sum(sum(totals[: count + 1]) <= limit for count in range(len(totals)))
    loaded = config.memory.max_models
    if "models-max" in environment | user:
        # 0 stands for all of them.
        loaded = memory.number(environment | user, "models-max") or len(fits)
    if loaded is None:
        # A model whose memory is not known may take all of it.
        loaded = max(1, min(fitting, ROUTER_MODELS)) if len(uses) == len(fits) else 1
    elif budget is not None and sum(totals[:loaded]) > budget:
        raise TernError(
            f"{loaded} models at a time take up to {megabytes(sum(totals[:loaded]))} MB, and the "
            f"budget is {megabytes(budget)} MB; {fitting} fit, or give each a smaller max_context"
        )
    on = ", ".join(dict.fromkeys(used))
    notes = [*(f"note: {said}" for said in filter(None, [default.said])), *notes]
    said = [f"{len(fits)} models on {on}, at most {loaded} at a time: {', '.join(fits)}"]
    sections = []
    for index, (name, found) in enumerate(fits.items()):
        if found.usage is not None:
            if budget is not None:
                spare = (budget - sum(totals[:loaded])) // loaded
                asked[name] |= without(memory.keeping(found.usage, spare) | {"fit": "off"}, user)
            said.append(f"{name}: {_account(found.usage, budget)}")
        said += [f"note: {name}: {note}" for note in found.notes]
        if index == 0:
            asked[name]["load-on-startup"] = "true"
        sections.append(options_of.preset_section(name, asked[name]))
    words = words_of(without(common | {"models-max": str(loaded)}, (*user, *each_its_own)))
    return Launch(
        words,
        preset="\n".join(sections),
        said=(*said, *notes),
        settled=tuple(for_each),
        devices=default.devices,
    )


def _account(use: Usage, budget: int | None) -> str:
    limit = f"{megabytes(available())} free" if budget is None else megabytes(budget)
    return f"memory, MB: {use}: {megabytes(use.total)} of {limit}"


def shown(launch: Launch) -> str:
    """The command as a shell would take it, for people to read; the API key stays a secret."""
    lines = [] if launch.devices in (None, DEVICE) else [f"{DEVICE_VARIABLE}={launch.devices}"]
    lines += [
        f"{variable}={'…' if variable == API_KEY_VARIABLE else value}"
        for variable, value in launch.variables.items()
    ]
    ours = launch.program.parent == install_dir() / "llama.cpp"
    lines.append(shlex.join([launch.program.name if ours else str(launch.program), *launch.words]))
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
    program = launch.program
    environment = host_environment(False, program, launch.devices) | dict(launch.variables)
    # Isolated: no site-packages, no PYTHON* variables.
    command = [sys.executable, "-IS", supervisor.__file__, str(program), *words]
    sys.stderr.flush()
    try:
        os.execve(sys.executable, command, environment)
    except OSError as error:
        raise TernError(f"{sys.executable}: cannot be started: {error.strerror}") from error
