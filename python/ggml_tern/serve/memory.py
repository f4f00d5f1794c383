"""What options of llama-server ask of the memory, and limits to what it keeps as it goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ggml_tern.errors import TernError
from ggml_tern.plan import arithmetic
from ggml_tern.plan.fit import Demand, Usage
from ggml_tern.plan.header import N_UBATCH
from ggml_tern.serve.spellings import Options

MIB = 1 << 20
#: llama-server's own limits, where nothing is said: MiB of past prompts, and checkpoints of a conversation.
CACHE_RAM = 8192
CHECKPOINTS = 32

#: A type of KV cache that plans know and that is at least as large, for those that they do not know.
_AS_LARGE = {"bf16": "f16", "q5_1": "q8_0", "q4_1": "q5_0", "iq4_nl": "q4_0"}
#: Options that scale positions, so that a context may be longer than the model was trained for.
_STRETCHING = ("rope-scaling", "rope-scale", "rope-freq-scale", "rope-freq-base")


def number(options: Mapping[str, str | None], name: str) -> int | None:
    """The value of an option, None where it is not there.

    Raises TernError for one that is no number."""
    value = options.get(name)
    try:
        return None if value is None else int(value)
    except ValueError as error:
        raise TernError(f"--{name} {value}: is no whole number") from error


def demand(options: Mapping[str, str | None]) -> Demand:
    """The demand in options that name a model.

    Raises TernError for a value that is no number."""
    parallel = number(options, "parallel")
    parallel = parallel if parallel and parallel > 0 else None
    context = number(options, "ctx-size") or None
    per_slot = number(options, "kv-unified-per-slot")
    if context is None and per_slot:
        context = per_slot * (parallel or arithmetic.DEFAULT_PARALLEL)
    kinds = [options.get(f"cache-type-{which}") or "f16" for which in "kv"]
    kinds = [_AS_LARGE.get(kind, kind) for kind in kinds]
    is_known = all(kind in arithmetic.KV_TYPES for kind in kinds)
    adapters = (options.get("lora") or "").split(",")
    adapters += [entry.rpartition(":")[0] for entry in (options.get("lora-scaled") or "").split(",")]
    files = {Path(adapter): "LoRA adapter" for adapter in adapters if adapter}
    if options.get("mmproj"):
        files[Path(options["mmproj"] or "")] = "projector (--mmproj)"
    trained = re.findall(r"\w+\.context_length=int:(\d+)", options.get("override-kv") or "")
    draft = options.get("spec-draft-model")
    return Demand(
        path=Path(options["model"] or ""),
        context=context,
        trained=int(trained[-1]) if trained else None,
        stretches=any(name in options for name in _STRETCHING),
        # Keys and values may differ: the larger counts for both.
        kv_type=min(kinds, key=list(arithmetic.KV_TYPES).index) if is_known else None,
        parallel=parallel,
        n_ubatch=number(options, "ubatch-size") or N_UBATCH,
        draft=Path(draft) if draft else None,
        files=files,
    )


def keeping(use: Usage, spare: int) -> Options:
    """Limits to what llama-server keeps as it goes, for `spare` bytes: checkpoints get half of them, where
    the model needs any, and past prompts the rest."""
    options: Options = {}
    checkpoint = 4 * sum(use.model.recurrent) + use.planned.window_cache // use.planned.parallel
    if checkpoint:
        of_all = checkpoint * use.planned.parallel
        count = min(CHECKPOINTS, spare // 2 // of_all)
        spare -= count * of_all
        options["ctx-checkpoints"] = str(count)
    return options | {"cache-ram": str(min(CACHE_RAM, spare // MIB))}
