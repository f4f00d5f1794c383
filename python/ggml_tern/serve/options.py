"""The options of llama-server that ``tern serve`` sets or looks at: from a configuration, from its own
defaults, and as the user spells them.

Options are a mapping from the long name without its dashes to the value, None for a flag: as command-line
words (`words`) and as a section of the router's preset file (`preset_section`) they mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ggml_tern.errors import TernError
from ggml_tern.serve.config import (
    Adapter,
    Config,
    Model,
    RoutedModel,
    Runtime,
    Sampling,
    is_kind_of_device,
    kv_type,
    spec_type,
)

Options = dict[str, str | None]


@dataclass(frozen=True)
class Spelling:
    """How llama-server knows an option. aliases: besides the long name, with dashes; those of a flag's
    opposite too. variable: of the environment. takes_value: False for a flag."""

    aliases: tuple[str, ...] = ()
    variable: str | None = None
    takes_value: bool = True


#: tests/test_serve.py holds this against llama-server --help.
SPELLINGS = {
    "model": Spelling(("-m",), "LLAMA_ARG_MODEL"),
    "hf-repo": Spelling(("-hf", "-hfr"), "LLAMA_ARG_HF_REPO"),
    "model-url": Spelling(("-mu",), "LLAMA_ARG_MODEL_URL"),
    "docker-repo": Spelling(("-dr",), "LLAMA_ARG_DOCKER_REPO"),
    "models-dir": Spelling((), "LLAMA_ARG_MODELS_DIR"),
    "models-preset": Spelling((), "LLAMA_ARG_MODELS_PRESET"),
    "models-max": Spelling((), "LLAMA_ARG_MODELS_MAX"),
    "alias": Spelling(("-a",), "LLAMA_ARG_ALIAS"),
    "lora": Spelling(),
    "lora-scaled": Spelling(),
    "ctx-size": Spelling(("-c",), "LLAMA_ARG_CTX_SIZE"),
    "cache-type-k": Spelling(("-ctk",), "LLAMA_ARG_CACHE_TYPE_K"),
    "cache-type-v": Spelling(("-ctv",), "LLAMA_ARG_CACHE_TYPE_V"),
    "parallel": Spelling(("-np",), "LLAMA_ARG_N_PARALLEL"),
    "kv-unified": Spelling(("-kvu", "-no-kvu", "--no-kv-unified"), "LLAMA_ARG_KV_UNIFIED", takes_value=False),
    "kv-unified-per-slot": Spelling((), "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    "batch-size": Spelling(("-b",), "LLAMA_ARG_BATCH"),
    "ubatch-size": Spelling(("-ub",), "LLAMA_ARG_UBATCH"),
    "threads": Spelling(("-t",), "LLAMA_ARG_THREADS"),
    "device": Spelling(("-dev",), "LLAMA_ARG_DEVICE"),
    "gpu-layers": Spelling(("-ngl", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS"),
    "flash-attn": Spelling(("-fa",), "LLAMA_ARG_FLASH_ATTN"),
    "fit": Spelling(("-fit",), "LLAMA_ARG_FIT"),
    "cache-ram": Spelling(("-cram",), "LLAMA_ARG_CACHE_RAM"),
    "ctx-checkpoints": Spelling(("-ctxcp", "--swa-checkpoints"), "LLAMA_ARG_CTX_CHECKPOINTS"),
    "spec-type": Spelling((), "LLAMA_ARG_SPEC_TYPE"),
    "spec-draft-model": Spelling(("-md", "--model-draft"), "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    "spec-draft-n-max": Spelling((), "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    "spec-ngram-mod-n-max": Spelling(),
    "spec-ngram-mod-n-min": Spelling(),
    "spec-ngram-simple-size-m": Spelling(),
    "spec-ngram-map-k-size-m": Spelling(),
    "spec-ngram-map-k4v-size-m": Spelling(),
    "temp": Spelling(("--temperature",), "LLAMA_ARG_TEMPERATURE"),
    "top-k": Spelling((), "LLAMA_ARG_TOP_K"),
    "top-p": Spelling((), "LLAMA_ARG_TOP_P"),
    "min-p": Spelling((), "LLAMA_ARG_MIN_P"),
    "repeat-penalty": Spelling((), "LLAMA_ARG_REPEAT_PENALTY"),
    "seed": Spelling(("-s",)),
    "host": Spelling((), "LLAMA_ARG_HOST"),
    "port": Spelling((), "LLAMA_ARG_PORT"),
    "metrics": Spelling((), "LLAMA_ARG_ENDPOINT_METRICS", takes_value=False),
    "cors-origins": Spelling((), "LLAMA_ARG_CORS_ORIGINS"),
    "api-key": Spelling((), "LLAMA_API_KEY"),
}
_BY_ALIAS = {
    alias: name for name, spelling in SPELLINGS.items() for alias in (f"--{name}", *spelling.aliases)
}

#: Any of these says which model it is to be.
MODEL_SOURCES = ("model", "hf-repo", "model-url", "docker-repo", "models-dir", "models-preset")

#: What tern serve asks for unless somebody says otherwise. Pages of any site may talk to a server that is
#: open to all origins; the web page of the server itself needs no leave.
DEFAULTS: Options = {"gpu-layers": "all", "flash-attn": "on", "metrics": None, "cors-origins": "localhost"}


def given(arguments: Sequence[str]) -> Options:
    """Those of SPELLINGS that are among the user's words; of one that is there twice, the last."""
    found: Options = {}
    words = iter(arguments)
    for word in words:
        # llama-server takes --ctx_size too.
        name = _BY_ALIAS.get(word.replace("_", "-") if word.startswith("--") else word)
        if name is not None:
            found[name] = next(words, "") if SPELLINGS[name].takes_value else None
    return found


def from_environment() -> Options:
    """Those of SPELLINGS that the environment sets, which llama-server takes where no word says otherwise."""
    variables = {name: spelling.variable for name, spelling in SPELLINGS.items() if spelling.variable}
    return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}


def of_model(model: Model | RoutedModel, runtime: Runtime, sampling: Sampling) -> Options:
    """What one model of a configuration asks for.

    Raises TernError for a LoRA adapter whose name llama-server cannot take."""
    values: dict[str, object] = {
        "model": model.path,
        "alias": model.name if isinstance(model, Model) else None,
        "ctx-size": model.max_context,
        "cache-type-k": kv_type(model),
        "cache-type-v": kv_type(model),
        "lora-scaled": ",".join(_adapter(adapter) for adapter in model.lora) or None,
        "device": None if is_kind_of_device(runtime.device) else runtime.device,
        "threads": runtime.threads,
        "parallel": runtime.max_batch_size,
        "kv-unified-per-slot": runtime.max_seq_len,
        "batch-size": runtime.prefill_chunk_size,
        "ubatch-size": runtime.prefill_chunk_size,
        "temp": sampling.temperature,
        "top-k": sampling.top_k,
        "top-p": sampling.top_p,
        "min-p": sampling.min_p,
        "repeat-penalty": sampling.repeat_penalty,
        "seed": sampling.seed,
    }
    if sampling.temperature is None and (runtime.decode_algorithm or "").lower() == "greedy":
        values["temp"] = 0
    options: Options = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }
    if runtime.max_batch_size is not None and runtime.max_batch_size > 1:
        options["kv-unified"] = None
    return options | _speculation(runtime)


def of_server(config: Config) -> Options:
    values = {"host": config.server.host, "port": config.server.port}
    return {name: str(value) for name, value in values.items() if value is not None}


def _speculation(runtime: Runtime) -> Options:
    kind = spec_type(runtime)
    if not kind:
        return {}
    options: Options = {"spec-type": kind}
    if kind.startswith("draft-") and runtime.draft_model:
        options["spec-draft-model"] = runtime.draft_model
    if runtime.draft_tokens is not None:
        most = {"ngram-mod": "spec-ngram-mod-n-max"} | {
            name: f"spec-{name}-size-m" for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
        }
        options[most.get(kind, "spec-draft-n-max")] = str(runtime.draft_tokens)
        if kind == "ngram-mod":
            # The least, 48 by default, must not be more than the most.
            options["spec-ngram-mod-n-min"] = str(max(1, runtime.draft_tokens // 2))
    return options


def _adapter(adapter: Adapter) -> str:
    for letter in ',:"':
        if letter in adapter.path:
            raise TernError(
                f"{adapter.path}: llama-server takes no LoRA adapter with {letter} in its name; rename it"
            )
    return f"{adapter.path}:{adapter.scale:g}"


def words(options: Mapping[str, str | None]) -> list[str]:
    """The options as a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]


def preset_section(name: str, options: Mapping[str, str | None]) -> str:
    """The options as a section of the router's preset file.

    Raises TernError for a value that such a file cannot hold."""
    lines = [f"[{name}]"]
    for option, value in options.items():
        text = "true" if value is None else value
        unfit = sorted(set(text) & set(";#\n\r"))
        if unfit or text != text.strip():
            raise TernError(
                f"models.{name}: {text}: llama-server's router takes no {unfit[0] if unfit else 'space'!r} "
                "in a value; rename the file"
            )
        lines.append(f"{option} = {text}")
    return "\n".join(lines) + "\n"


def without(options: Mapping[str, str | None], names: Iterable[str]) -> Options:
    """The options but for some."""
    left_out = set(names)
    return {name: value for name, value in options.items() if name not in left_out}
