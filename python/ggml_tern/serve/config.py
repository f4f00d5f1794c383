"""The YAML file of ``tern serve --config``: its schema, and errors that name line, key and way out.

The sections ``model``, ``runtime`` and ``memory`` take the keys that write-ups about small cards use as they
are; a key that has no meaning here is answered with a note (`Config.notes`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from click import BadParameter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ggml_tern.errors import TernError
from ggml_tern.memory_size import MemorySize

#: The types of a KV cache by bits a value, and by what other engines call them.
KV_BITS = {16: "f16", 8: "q8_0", 5: "q5_0", 4: "q4_0"}
_KV_NAMES = {
    **{kind: kind for kind in KV_BITS.values()},
    **{f"int{bits}": kind for bits, kind in KV_BITS.items() if bits < 16},
    **{f"q{bits}": kind for bits, kind in KV_BITS.items() if bits < 16},
    **dict.fromkeys(("fp16", "none", "off"), "f16"),
}

#: decode_algorithm: what --spec-type of llama-server gets; "" for plain decoding.
_PLAIN = dict.fromkeys(("plain", "none", "autoregressive", "standard", "default", "sampling", "greedy"), "")
_N_GRAM = {"ngram": "ngram-simple", "prompt-lookup": "ngram-simple"} | {
    name: name for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
}
_OWN_HEAD = {"mtp": "draft-mtp"}
_WITH_DRAFT = {
    "draft": "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
DECODE_ALGORITHMS = _PLAIN | _N_GRAM | _OWN_HEAD | _WITH_DRAFT


#: More than any machine has.
_MOST_GB = 10**9
#: Values in a file, those of an alias wherever it stands.
_MOST_VALUES = 10_000


def _memory(value: object) -> int:
    """Bytes of an amount like 6GB or 5.5GiB; a bare number is GB.

    Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_GB:
        return int(value * 10**9)
    try:
        return MemorySize().convert(str(value), None, None)
    except BadParameter as error:
        raise ValueError(error.message) from error


def _file_or_none(value: object) -> object:
    return None if value in ("", "none", "None") else value


def _adapter(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


Amount = Annotated[int, BeforeValidator(_memory)]
Count = Annotated[int, Field(strict=True, ge=1)]
#: 0 stands for all tokens.
TopK = Annotated[int, Field(strict=True, ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FileName = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A mapping in the file; a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Adapter(Section):
    """A LoRA adapter."""

    path: FileName
    scale: float = 1.0


class Sampling(Section):
    """What a request gets that does not say otherwise."""

    temperature: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="0: always the likeliest token"
    )
    top_k: TopK | None = Field(
        default=None, description="of how many of the likeliest tokens to draw; 0: of all"
    )
    top_p: Share | None = Field(default=None, description="of the likeliest that make up this probability")
    min_p: Share | None = Field(
        default=None, description="of those at least this likely, against the likeliest"
    )
    repeat_penalty: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="above 1: against tokens that were there lately"
    )
    seed: Annotated[int, Field(strict=True, ge=-1, lt=2**32)] | None = Field(
        default=None, description="-1: another one for every request"
    )


class _Weights(Section):
    """A model, alone or one of several."""

    path: FileName | None = Field(
        default=None, description="GGUF file; relative to the folder of the YAML file"
    )
    max_context: Count | None = Field(
        default=None, description="tokens in the KV cache, of all conversations together"
    )
    kv_cache_bits: Literal[16, 8, 5, 4] | None = Field(
        default=None, description="of a value in the KV cache: 16, 8, 5 or 4"
    )
    kv_cache_quant: bool | str | None = Field(
        default=None,
        description="`false`: 16 bits; `true`: 8, unless kv_cache_bits says; or a type like `q8_0`",
    )
    quant_type: str | None = Field(default=None, description="no meaning: the file says what its weights are")
    lora: list[Annotated[Adapter, BeforeValidator(_adapter)]] = Field(
        default=[], description="list of adapters, each a path or `{path: FILE, scale: 0.5}`"
    )


class Model(_Weights):
    """The one model."""

    name: FileName | None = Field(default=None, description="what the API calls it; by default as its file")


class Runtime(Section):
    """How models run."""

    device: str | None = Field(
        default=None,
        description="`auto`, `cpu`, `gpu`, `cuda`, `cuda:1`, `vulkan`; or devices of llama-server: `TERN0`",
    )
    threads: Count | None = Field(default=None, description="processor threads")
    max_batch_size: Annotated[int, Field(strict=True, ge=1, le=256)] | None = Field(
        default=None, description="conversations at a time (slots), which share the KV cache"
    )
    max_seq_len: Count | None = Field(default=None, description="the most tokens of one conversation")
    prefill_chunk_size: Annotated[int, Field(strict=True, ge=32)] | None = Field(
        default=None, description="tokens of a prompt in one pass"
    )
    decode_algorithm: str | None = Field(
        default=None, description="`plain`, `greedy`, `ngram` (or one of llama-server's), `draft`, `mtp`"
    )
    draft_model: Annotated[FileName | None, BeforeValidator(_file_or_none)] = Field(
        default=None, description="GGUF file of a small model that drafts"
    )
    draft_tokens: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        default=None, description="the most tokens to draft at a time"
    )


class RoutedModel(_Weights):
    """One of several models, with what it has for itself of ``runtime`` and ``sampling``."""

    runtime: Runtime = Field(default=Runtime(), description="keys of `runtime` for this model alone")
    sampling: Sampling = Field(default=Sampling(), description="keys of `sampling` for this model alone")


class Memory(Section):
    """What there is to use."""

    budget: Amount | None = Field(default=None, description="like 6GB: refuse before loading what takes more")
    max_gpu_memory: Amount | None = Field(
        default=None,
        description="of each GPU, which gets the layers that fit; without GPUs, as `budget`",
    )
    weight_offload: bool | str | float | None = Field(
        default=None, description="no meaning: what does not fit on a GPU stays in main memory"
    )
    max_models: Count | None = Field(
        default=None, description="models that stay loaded; by default as many as fit"
    )


class Server(Section):
    """Who may ask."""

    host: FileName | None = Field(default=None, description="address to listen on; 0.0.0.0: from everywhere")
    port: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = Field(
        default=None, description="8080 by default"
    )
    api_key: FileName | None = Field(default=None, description="what a client must present")


class Config(Section):
    """All of the file."""

    model: Model = Model()
    models: dict[str, RoutedModel] = {}
    runtime: Runtime = Runtime()
    memory: Memory = Memory()
    sampling: Sampling = Sampling()
    server: Server = Server()

    @property
    def budget(self) -> int | None:
        return self.memory.budget if self.memory.budget is not None else self.memory.max_gpu_memory

    def routed(self, name: str) -> tuple[RoutedModel, Runtime, Sampling]:
        """One of `models`, with the common settings where it has none of its own."""
        model = self.models[name]
        runtime = self.runtime.model_copy(update=_given(model.runtime))
        return model, runtime, self.sampling.model_copy(update=_given(model.sampling))

    def notes(self, on_gpus: bool) -> list[str]:
        """What in the file is taken otherwise than it may have been meant, one line for each key."""
        found = list(_model_notes("model", self.model)) + list(_runtime_notes("runtime", self.runtime))
        for name, model in self.models.items():
            found += _model_notes(f"models.{name}", model)
            found += _runtime_notes(f"models.{name}.runtime", model.runtime)
        if self.memory.weight_offload is not None:
            found.append(
                "memory.weight_offload: no meaning here; what does not fit on a GPU stays in main memory"
            )
        if self.memory.max_gpu_memory is not None and not on_gpus:
            unused = self.memory.budget is not None
            taken = "memory.budget wins" if unused else "TERN0 uses main memory; taken as memory.budget"
            found.append(f"memory.max_gpu_memory: {taken}")
        return found


def _given(section: Section) -> dict[str, Any]:
    return {key: getattr(section, key) for key in section.model_fields_set}


def kv_type(model: _Weights) -> str | None:
    """The type of the KV cache that a model asks for; None for llama-server's default."""
    if model.kv_cache_quant is False:
        return "f16"
    if model.kv_cache_bits is not None:
        return KV_BITS[model.kv_cache_bits]
    if model.kv_cache_quant is True:
        return "q8_0"
    if model.kv_cache_quant is None:
        return None
    return _KV_NAMES.get(model.kv_cache_quant.lower())


def spec_type(runtime: Runtime) -> str:
    """What --spec-type of llama-server gets; empty for plain decoding."""
    asked = (runtime.decode_algorithm or "").lower().replace("_", "-").removeprefix("draft-")
    by_default = "draft-simple" if runtime.draft_model else ""
    if asked == "speculative":
        return by_default or _N_GRAM["ngram"]
    kind = DECODE_ALGORITHMS.get(asked, by_default)
    return "" if kind in _WITH_DRAFT.values() and not runtime.draft_model else kind


def _model_notes(path: str, model: _Weights) -> Iterator[str]:
    quant, bits = model.kv_cache_quant, model.kv_cache_bits
    if model.quant_type is not None:
        yield f"{path}.quant_type: no meaning here; the file says what its weights are"
    if quant is False and bits not in (None, 16):
        yield f"{path}.kv_cache_quant: false, so kv_cache_bits {bits} is not used"
    if isinstance(quant, str) and bits is None and kv_type(model) is None:
        yield f"{path}.kv_cache_quant: {quant} is not known here; set kv_cache_bits to 16, 8, 5 or 4"


def _runtime_notes(path: str, runtime: Runtime) -> Iterator[str]:
    asked = (runtime.decode_algorithm or "plain").lower().replace("_", "-").removeprefix("draft-")
    kind = spec_type(runtime) or "plain decoding"
    if asked == "speculative" or asked not in DECODE_ALGORITHMS:
        why = "" if asked == "speculative" else " is not known here"
        yield f"{path}.decode_algorithm: {runtime.decode_algorithm}{why}; taken as {kind}"
    elif asked in _WITH_DRAFT and not runtime.draft_model:
        yield f"{path}.decode_algorithm: {runtime.decode_algorithm} needs a draft_model; taken as {kind}"
    elif runtime.draft_model and kind not in _WITH_DRAFT.values():
        yield f"{path}.draft_model: not used, since decode_algorithm is {runtime.decode_algorithm}"


# ---- reading ----


def read(path: Path) -> Config:
    """Read and check a file; file names in it become paths that start where it is.

    Raises TernError with a line for each error."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TernError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TernError(f"{path}: is not UTF-8 text; give a YAML file, as docs/serve.md describes") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        for n_values, _ in enumerate(_values(root)):
            if n_values > _MOST_VALUES:
                raise TernError(
                    f"{path}: has more than {_MOST_VALUES:,} values; no configuration has so many"
                )
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise TernError(f"{path}{line}: is not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(values, dict) or root is None:
        found = "empty" if values is None else f"a {type(values).__name__}"
        raise TernError(f"{path}: is {found}; expected the sections {', '.join(Config.model_fields)}")
    problems = [f"{path}:{line}: {dotted}: given twice" for line, dotted in _repeated(root)]
    try:
        # A section that holds nothing is as good as none.
        config = Config.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        problems += [_problem(path, root, dict(detail)) for detail in error.errors()]
    if problems:
        raise TernError("\n".join(problems))
    if config.models and _given(config.model):
        raise TernError(f"{path}:{_line(root, ('models',))}: both model and models; give one of them")
    for name, model in config.models.items():
        if model.path is None:
            raise TernError(f"{path}:{_line(root, ('models', name))}: models.{name}: has no path")
    return _located(config, path.resolve().parent)


def _located(config: Config, folder: Path) -> Config:
    """All file names of the configuration made absolute."""

    def located(section: Any) -> Any:
        changes: dict[str, Any] = {}
        for key in section.model_fields_set:
            value = getattr(section, key)
            if key in ("path", "draft_model") and value is not None:
                changes[key] = str(folder / Path(value).expanduser())
            elif isinstance(value, Section):
                changes[key] = located(value)
            elif isinstance(value, list):
                changes[key] = [located(entry) for entry in value]
            elif isinstance(value, dict):
                changes[key] = {name: located(entry) for name, entry in value.items()}
        return section.model_copy(update=changes)

    result: Config = located(config)
    return result


def _values(node: yaml.Node | None, inside: tuple[yaml.Node, ...] = ()) -> Iterator[yaml.Node]:
    """All values, those of an alias wherever it stands.

    Raises YAMLError for an alias that contains itself."""
    if node is None:
        return
    if any(node is outer for outer in inside):
        raise yaml.MarkedYAMLError(problem="an alias that contains itself", problem_mark=node.start_mark)
    yield node
    if isinstance(node, yaml.CollectionNode):
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                yield from _values(part, (*inside, node))


def _repeated(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[int, str]]:
    """Line and name of keys that are there twice, of which YAML silently takes the last."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            here = (*path, str(key.value))
            if key.value in seen:
                yield key.start_mark.line + 1, ".".join(here)
            seen.add(key.value)
            yield from _repeated(value, here)


def _line(root: yaml.Node, location: Sequence[str | int]) -> int:
    """The line of the deepest part of a location that is in the file."""
    node, line = root, root.start_mark.line
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(part)]
            if not pairs:
                break
            node, line = pairs[-1][1], pairs[-1][0].start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
    return int(line) + 1


def _problem(path: Path, root: yaml.Node, detail: dict[str, Any]) -> str:
    """One line about one error of pydantic's."""
    location = tuple(detail["loc"])
    if detail["type"] == "extra_forbidden":
        what = f"unknown key; {_hint(location)}"
    elif detail["type"] == "value_error":
        what = str(detail["ctx"]["error"])
    else:
        # "Input should be ...", "Field required"
        said = str(detail["msg"]).replace("Input should be", f"is {detail['input']!r}; should be")
        what = said if detail["type"] != "string_type" else f"{said}; put it in quotes"
    # Behind a list or a choice of types, pydantic names the type that it tried.
    dotted = ".".join(
        str(part) for part in location if not re.search(r"[\[\]]|^(bool|str|float)$", str(part))
    )
    return f"{path}:{_line(root, location)}: {dotted}: {what}"


def _section_at(location: Sequence[str | int]) -> type[Section]:
    """The section that is at a location."""
    section: type[Section] = Config
    for part in location:
        if part == "models":
            section = RoutedModel
        elif part == "lora":
            section = Adapter
        elif isinstance(part, str) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            section = (
                annotation if isinstance(annotation, type) and issubclass(annotation, Section) else section
            )
    return section


def _hint(location: Sequence[str | int]) -> str:
    """The known key that an unknown one is nearest to: of its section, then of another."""
    key = str(location[-1])
    own = list(_section_at(location[:-1]).model_fields)
    near = difflib.get_close_matches(key, own, n=1)
    # In `models`, the name of the model comes between the section and the key.
    elsewhere = [name for name in keys() if "." in name and "NAME" not in name]
    near = near or [name for name in elsewhere if name.split(".")[1] == key]
    return f"did you mean {near[0]}?" if near else f"known here are {', '.join(sorted(own))}"


def keys() -> dict[str, str]:
    """All keys of the file, with dots, and what they are for."""
    sections: dict[str, type[Section]] = {
        "model": Model,
        "models.NAME": RoutedModel,
        "runtime": Runtime,
        "memory": Memory,
        "sampling": Sampling,
        "server": Server,
    }
    return {
        f"{name}.{key}": field.description or ""
        for name, section in sections.items()
        for key, field in section.model_fields.items()
    }
