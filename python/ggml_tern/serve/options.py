"""The options of llama-server that ``tern serve`` sets, from a configuration and by its own defaults; and as
a section of the router's preset file.
"""

from __future__ import annotations

from collections.abc import Mapping

from ggml_tern.errors import TernError
from ggml_tern.serve.config import (
    Adapter,
    Config,
    Model,
    RoutedModel,
    Runtime,
    Sampling,
    kv_type,
    spec_type,
)
from ggml_tern.serve.spellings import Options

#: Sections of a preset file that are about all models.
_GLOBAL_SECTIONS = ("*", "default")

#: Of DEFAULTS, what a GPU's memory and kernels decide, which llama-server looks at itself.
LEFT_TO_GPUS = ("gpu-layers", "flash-attn")
#: What tern serve asks for unless somebody says otherwise. Pages of any site may talk to a server that is
#: open to all origins; the web page of the server itself needs no leave.
DEFAULTS: Options = {"gpu-layers": "all", "flash-attn": "on", "metrics": None, "cors-origins": "localhost"}


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


def preset_section(name: str, options: Mapping[str, str | None]) -> str:
    """The options as a section of the router's preset file.

    Raises TernError for a name or a value that such a file cannot hold."""
    unfit = sorted(set(name) & set("]\n\r"))
    if unfit or not name.strip() or name != name.strip() or name in _GLOBAL_SECTIONS:
        what = f"with {unfit[0]!r} in it" if unfit else "of this kind"
        raise TernError(f"models.{name!r}: llama-server's router takes no name {what}; give it another")
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
