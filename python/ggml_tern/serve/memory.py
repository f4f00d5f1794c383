"""What the models of ``tern serve`` will take, and which context fits into a budget: ``tern plan`` applied to
the options of llama-server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.plan import arithmetic
from ggml_tern.plan.arithmetic import megabytes
from ggml_tern.plan.header import N_UBATCH, Model, read_model
from ggml_tern.serve.options import Options

MIB = 1 << 20
#: llama-server's own limits, where nothing is said: MiB of past prompts, and checkpoints of a conversation.
CACHE_RAM = 8192
CHECKPOINTS = 32
#: A context that is chosen here is at least this for four conversations, or else it is for one alone.
COMFORTABLE_CONTEXT = 4096

#: A type of KV cache that plans know and that is at least as large, for those that they do not know.
_AS_LARGE = {"bf16": "f16", "q5_1": "q8_0", "q4_1": "q5_0", "iq4_nl": "q4_0"}


class UnknownMemory(TernError):
    """A model that may well run, of which nobody here knows what it takes."""


@dataclass(frozen=True)
class Demand:
    """What the options of one llama-server ask for. context: None for what the model was trained for.
    parallel: None for llama-server's four that share."""

    path: Path
    context: int | None
    kv_type: str
    parallel: int | None
    n_ubatch: int
    draft: Path | None
    adapters: tuple[Path, ...]


@dataclass(frozen=True)
class Usage:
    """What one model takes while it is served. besides: bytes of what a plan does not count. options: the
    context and the conversations, where they were chosen for a budget."""

    model: Model
    planned: arithmetic.Plan
    besides: int
    options: Options

    @property
    def total(self) -> int:
        return self.planned.total + self.besides

    def __str__(self) -> str:
        planned = self.planned
        weights = [
            f"{megabytes(nbytes)} {where}"
            for nbytes, where in (
                (planned.tiles, "in dense tiles" if planned.dense else "in tiles"),
                (planned.mapped, "mapped"),
            )
            if nbytes
        ]
        parts = {
            "state": planned.state,
            "drafts, adapters, larger passes": self.besides,
            "compute": planned.compute,
            "program": planned.process,
        }
        return ", ".join(
            [
                f"weights {' and '.join(weights)}",
                f"KV cache {megabytes(planned.kv_cache + planned.window_cache)} "
                f"for {planned.context:,} tokens in {planned.kv_type}",
                *(f"{name} {megabytes(nbytes)}" for name, nbytes in parts.items() if nbytes),
            ]
        )


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

    Raises TernError for a value that is no number, UnknownMemory for a KV type whose size is not known."""
    parallel = number(options, "parallel")
    parallel = parallel if parallel and parallel > 0 else None
    context = number(options, "ctx-size") or None
    per_slot = number(options, "kv-unified-per-slot")
    if context is None and per_slot:
        context = per_slot * (parallel or arithmetic.DEFAULT_PARALLEL)
    kinds = [options.get(f"cache-type-{which}") or "f16" for which in "kv"]
    kinds = [_AS_LARGE.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in arithmetic.KV_TYPES:
            raise UnknownMemory(
                f"--cache-type-k {kind}: its memory is not known; use {', '.join(arithmetic.KV_TYPES)}"
            )
    adapters = [*(options.get("lora") or "").split(",")]
    adapters += [entry.rpartition(":")[0] for entry in (options.get("lora-scaled") or "").split(",")]
    draft = options.get("spec-draft-model")
    return Demand(
        path=Path(options["model"] or ""),
        context=context,
        # Keys and values may differ: the larger counts for both.
        kv_type=min(kinds, key=list(arithmetic.KV_TYPES).index),
        parallel=parallel,
        n_ubatch=number(options, "ubatch-size") or N_UBATCH,
        draft=Path(draft) if draft else None,
        adapters=tuple(Path(adapter) for adapter in adapters if adapter),
    )


def usage(asked: Demand, budget: int | None, *, chooses_layout: bool) -> Usage:
    """What a model takes; with a budget, at the largest context that fits where none was asked for.

    chooses_layout: weights go into the dense layout where the fast one leaves too little room, unless
    TERN_LAYOUT says which.

    Raises TernError for what does not fit, saying what would, and for what is no model; UnknownMemory for an
    architecture that plans do not know."""
    model = _read(asked.path)
    draft = _read(asked.draft) if asked.draft is not None else None
    adapters = sum(_adapter_bytes(adapter) for adapter in asked.adapters)
    wish = os.environ.get(arithmetic.LAYOUT_VARIABLE)
    layouts = [wish == "dense"]  # whether dense; the better one first
    if chooses_layout and wish not in ("fast", "dense") and model.can_be_dense:
        layouts = [False, True]

    def at(context: int, parallel: int | None, dense: bool) -> Usage:
        planned = arithmetic.plan(model, context, asked.kv_type, parallel, dense=dense)
        # Passes of more tokens than plans are made for.
        wider = max(0, planned.compute * (asked.n_ubatch - N_UBATCH) // N_UBATCH)
        drafting = 0
        if draft is not None:
            # Its KV cache is as long as the model's; the process is there already.
            of_draft = arithmetic.plan(draft, planned.context, "f16", parallel)
            drafting = of_draft.total - of_draft.process
        return Usage(model, planned, adapters + wider + drafting, {})

    def largest(parallel: int | None, budget: int, dense: bool) -> Usage | None:
        context = arithmetic.most_tokens(model, budget, parallel, lambda n: at(n, parallel, dense).total)
        return at(context, parallel, dense) if context else None

    if budget is None or asked.context is not None:
        limit = available() if budget is None else budget
        for dense in layouts:
            found = at(asked.context or model.context, asked.parallel, dense)
            if found.total <= limit:
                break
        if budget is not None and found.total > budget:
            raise TernError(_refusal(found, asked, budget))
        return found
    enough = min(COMFORTABLE_CONTEXT, model.context)

    def is_comfortable(use: Usage | None) -> bool:
        return use is not None and use.planned.context >= enough

    best = None
    for dense in layouts:
        if is_comfortable(best):
            break
        best = largest(asked.parallel, budget, dense) or best
        if asked.parallel is None and not is_comfortable(best):
            best = largest(1, budget, dense) or best
    if best is None:
        raise TernError(_refusal(at(arithmetic.CACHE_STEP, asked.parallel, layouts[-1]), asked, budget))
    chosen: Options = {"ctx-size": str(best.planned.context)}
    if asked.parallel is None and best.planned.parallel == 1:
        chosen["parallel"] = "1"
    return replace(best, options=chosen)


def _read(path: Path) -> Model:
    try:
        return read_model(path)
    except TernError as error:
        # What is no GGUF file at all fails here again.
        GGUFSource(path)
        raise UnknownMemory(str(error)) from error


def _adapter_bytes(path: Path) -> int:
    if not path.is_file():
        raise TernError(f"{path}: no such LoRA adapter; give one in GGUF")
    return path.stat().st_size


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


def _refusal(found: Usage, asked: Demand, budget: int) -> str:
    """What it takes, and what would fit; several lines."""
    planned = found.planned
    said = (
        f"{asked.path}: takes {megabytes(found.total)} MB with {planned.context:,} tokens of context "
        f"({found}), and the budget is {megabytes(budget)} MB."
    )
    largest = arithmetic.trade_offs(found.model, budget - found.besides, asked.parallel, dense=planned.dense)
    fitting = []
    together = next(iter(largest.values()))
    for name, contexts in largest.items():
        most = 0
        for kv_type, context in contexts.items():
            # From the most bits to the fewest, which are worth it only for more context; and so is one
            # conversation alone.
            if context > most and (contexts is together or context > together[kv_type]):
                most = context
                alone = "-np 1 " if name.endswith("_1") else ""
                fitting.append(f"  {alone}-c {context} -ctk {kv_type} -ctv {kv_type}")
    if fitting:
        return "\n".join([f"{said} What fits at most:", *fitting])
    smallest = min(
        arithmetic.plan(found.model, arithmetic.CACHE_STEP, kv_type, 1, dense=planned.dense).total
        + found.besides
        for kv_type in together
    )
    return f"{said} No context fits; the least budget for this model is {megabytes(smallest)} MB"


def available() -> int:
    """Bytes that the system, or the container, would give without swapping."""
    total, free = _core.machine_memory()
    if total == 0:
        raise TernError("/proc/meminfo: cannot be read; give --memory-budget")
    return free
