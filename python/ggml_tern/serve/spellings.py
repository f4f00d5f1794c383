"""How llama-server spells its options: as words of a command line, as variables of the environment.

Options are a mapping from the long name without its dashes to the value, None for a flag.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Options = dict[str, str | None]


@dataclass(frozen=True)
class Spelling:
    """How llama-server knows an option. aliases: besides the long name, with dashes; those of a flag's
    opposite too. variable: of the environment. takes_value: False for a flag. adds: given twice, both count;
    values are lists with commas."""

    aliases: tuple[str, ...] = ()
    variable: str | None = None
    takes_value: bool = True
    adds: bool = False


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
    "lora": Spelling(adds=True),
    "lora-scaled": Spelling(adds=True),
    "mmproj": Spelling(("-mm",), "LLAMA_ARG_MMPROJ"),
    "override-kv": Spelling(adds=True),
    "rope-scaling": Spelling((), "LLAMA_ARG_ROPE_SCALING_TYPE"),
    "rope-scale": Spelling((), "LLAMA_ARG_ROPE_SCALE"),
    "rope-freq-scale": Spelling((), "LLAMA_ARG_ROPE_FREQ_SCALE"),
    "rope-freq-base": Spelling((), "LLAMA_ARG_ROPE_FREQ_BASE"),
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
    "api-key-file": Spelling((), "LLAMA_ARG_API_KEY_FILE"),
    "chat-template": Spelling((), "LLAMA_ARG_CHAT_TEMPLATE"),
    "chat-template-file": Spelling((), "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    "embedding": Spelling(("--embeddings",), "LLAMA_ARG_EMBEDDINGS", takes_value=False),
    "rerank": Spelling(("--reranking",), "LLAMA_ARG_RERANKING", takes_value=False),
    "offline": Spelling((), "LLAMA_ARG_OFFLINE", takes_value=False),
}
_BY_ALIAS = {
    alias: name for name, spelling in SPELLINGS.items() for alias in (f"--{name}", *spelling.aliases)
}

#: Any of these says which model it is to be.
MODEL_SOURCES = ("model", "hf-repo", "model-url", "docker-repo", "models-dir", "models-preset")


def given(arguments: Sequence[str]) -> Options:
    """Those of SPELLINGS that are among the user's words; of one that is there twice the last, or all where
    they add up."""
    found: Options = {}
    words = iter(arguments)
    for word in words:
        name = _name_of(word)
        if name is not None and SPELLINGS[name].takes_value:
            value = next(words, "")
            before = found.get(name) if SPELLINGS[name].adds else None
            found[name] = f"{before},{value}" if before else value
        elif name is not None:
            found[name] = None
    return found


def removed(arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """The user's words without some options and their values."""
    gone, kept = set(names), list[str]()
    words = iter(arguments)
    for word in words:
        name = _name_of(word)
        taken = [word]
        if name is not None and SPELLINGS[name].takes_value:
            taken.extend(itertools.islice(words, 1))
        if name not in gone:
            kept += taken
    return kept


def _name_of(word: str) -> str | None:
    # llama-server takes --ctx_size too.
    return _BY_ALIAS.get(word.replace("_", "-") if word.startswith("--") else word)


def from_environment() -> Options:
    """Those of SPELLINGS that the environment sets, which llama-server takes where no word says otherwise."""
    variables = {name: spelling.variable for name, spelling in SPELLINGS.items() if spelling.variable}
    return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}


def words(options: Mapping[str, str | None]) -> list[str]:
    """The options as a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]


def without(options: Mapping[str, str | None], names: Iterable[str]) -> Options:
    """The options but for some."""
    left_out = set(names)
    return {name: value for name, value in options.items() if name not in left_out}
