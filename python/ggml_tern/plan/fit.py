"""Before anything is loaded: which context a model gets, and whether that fits.

`fit` is the one check of all commands that load a model. A context beyond what the model was trained for is
cut, since no conversation could use it and llama.cpp would allocate it all the same; what does not fit is
refused with what does; and where nobody asked for a context, the largest that fits is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.keys import Keys
from ggml_tern.gguf.model_file import require_model
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.limits import MAX_TOKENS
from ggml_tern.plan import arithmetic
from ggml_tern.plan.arithmetic import DEFAULT_PARALLEL, Plan, megabytes
from ggml_tern.plan.header import N_UBATCH, Model, UnknownMemoryError, model_of

#: A context that is chosen here is at least this for four conversations, or else it is for one alone.
COMFORTABLE_CONTEXT = 4096


@dataclass(frozen=True)
class Demand:
    """What is asked of one model.

    Attributes:
        path: its file; of a split model, any part.
        context: tokens in the KV cache, of all conversations; None where nobody asked for any.
        most: where nobody asked, at most so many tokens.
        trained: tokens that a conversation can have, where somebody knows better than the file.
        stretches: whether positions are scaled (RoPE), so that a context may be longer than trained.
        kv_type: of the KV cache; None for one of which no plan knows the size.
        parallel: conversations at a time, each with its share; None for llama-server's, which share all.
        n_ubatch: tokens in one pass.
        draft: a model that drafts.
        files: what is loaded besides, by what it is, such as "LoRA adapter"; as many bytes as on the disk.
        logits: of how many tokens of a pass.
        keeps_copy: whether a copy of the KV cache is kept, as llama-bench does.
        spelled: the options for a context, a type of KV cache and conversations.
        takes_budget: whether there is an option --memory-budget.
    """

    path: Path
    context: int | None = None
    most: int | None = None
    trained: int | None = None
    stretches: bool = False
    kv_type: str | None = "f16"
    parallel: int | None = None
    n_ubatch: int = N_UBATCH
    draft: Path | None = None
    files: Mapping[Path, str] = field(default_factory=dict)
    logits: int = 0
    keeps_copy: bool = False
    spelled: Callable[[int, str, int | None], str] = lambda context, kv_type, _: (
        f"--context {context} --kv {kv_type}"
    )
    takes_budget: bool = False


@dataclass(frozen=True)
class Usage:
    """What one model takes. besides: bytes of what a plan does not count."""

    model: Model
    planned: Plan
    besides: int

    @property
    def total(self) -> int:
        return self.planned.total + self.besides

    @property
    def in_memory(self) -> int:
        """All but what is mapped from the file, which the system can read again."""
        return self.total - self.planned.mapped

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
            "drafts, adapters, projector, larger passes": self.besides,
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


@dataclass(frozen=True)
class Fit:
    """How a model can be loaded.

    Attributes:
        source: its file; `source.first` is what llama.cpp must be given.
        context: tokens to ask llama.cpp for; None to leave it at what the model was trained for.
        parallel: conversations to ask for; None to leave them.
        usage: what it takes; None where that is not known.
        notes: what the user is told, a line each.
    """

    source: GGUFSource
    context: int | None
    parallel: int | None
    usage: Usage | None
    notes: tuple[str, ...] = ()


def fit(
    asked: Demand, budget: int | None = None, *, chooses_layout: bool = False, is_elsewhere: bool = False
) -> Fit:
    """Settle the context of a model, within `budget` bytes, or else within the memory that is free.

    chooses_layout: weights go into the dense layout where the fast one leaves too little room, unless
    TERN_LAYOUT says which. is_elsewhere: it goes into memory of which nothing is known here, so that nothing
    is refused and llama.cpp itself decides what goes where.

    Raises TernError for what does not fit, saying what would, for what is no model, and with a budget for an
    architecture whose memory is not known."""
    source = GGUFSource(asked.path)
    require_model(source)
    for path, what in asked.files.items():
        if not path.is_file():
            raise TernError(f"{path}: no such {what}; give one in GGUF")
    asked, notes = _within_training(asked, source)
    if is_elsewhere:
        return Fit(source, asked.most if asked.context is None else asked.context, None, None, tuple(notes))
    try:
        if asked.kv_type is None:
            raise UnknownMemoryError(
                f"{asked.path}: the size of that type of KV cache is not known here; known are "
                f"{', '.join(arithmetic.KV_TYPES)}"
            )
        model = model_of(source)
        draft = None if asked.draft is None else model_of(GGUFSource(asked.draft))
    except UnknownMemoryError as error:
        if budget is not None:
            raise
        if asked.context is None and asked.most is not None:
            asked = replace(asked, context=asked.most)
        return Fit(source, asked.context, None, None, (*notes, f"memory not known: {error}"))
    if asked.trained is not None:
        model = replace(model, context=asked.trained)
    return _Fitting(asked, source, model, draft, budget, chooses_layout).fit(notes)


def _within_training(asked: Demand, source: GGUFSource) -> tuple[Demand, list[str]]:
    """The demand with a context that its conversations can use."""
    if asked.trained is None and source.architecture is not None:
        keys = Keys(source, source.architecture)
        # Not all architectures have a limit.
        if keys.value("context_length") is not None:
            asked = replace(asked, trained=keys.integer("context_length", most=MAX_TOKENS))
    trained = asked.trained
    if trained is None:
        return asked, []
    if asked.most is not None:
        asked = replace(asked, most=min(asked.most, trained))
    n_conversations = asked.parallel or DEFAULT_PARALLEL
    useful = trained * n_conversations
    if asked.context is None or asked.context <= useful:
        return asked, []
    if asked.stretches:
        return asked, [
            f"llama-server keeps each conversation within {trained:,} tokens, whatever the scaling; to "
            f"have more of them: --override-kv {source.architecture}.context_length=int:{asked.context}"
        ]
    of_all = ""
    if n_conversations > 1:
        of_all = f", and {n_conversations} conversations take no more than {useful:,}"
    note = (
        f"{asked.path.name} was trained for {trained:,} tokens{of_all}: a context of {asked.context:,} "
        f"is cut to {useful:,}"
    )
    return replace(asked, context=useful), [note]


def available() -> int:
    """Bytes that the system, or the container, would give without swapping."""
    total, free = _core.machine_memory()
    if total == 0:
        raise TernError("/proc/meminfo: cannot be read; give --memory-budget")
    return free


class _Fitting:
    """One model between its demand and a limit."""

    def __init__(
        self,
        asked: Demand,
        source: GGUFSource,
        model: Model,
        draft: Model | None,
        budget: int | None,
        chooses_layout: bool,
    ) -> None:
        self._asked, self._source, self._model, self._draft = asked, source, model, draft
        self._budget, self._limit = budget, available() if budget is None else budget
        self._kv_type = asked.kv_type or "f16"
        self._files = sum(path.stat().st_size for path in asked.files)
        wish = os.environ.get(arithmetic.LAYOUT_VARIABLE)
        # Whether dense; the better one first.
        self._layouts = [wish == "dense"]
        if chooses_layout and wish not in ("fast", "dense") and model.can_be_dense:
            self._layouts = [False, True]

    def fit(self, notes: list[str]) -> Fit:
        asked = self._asked
        if asked.context is not None:
            found = self._at_demand(asked.context)
            if self._counted(found) > self._limit:
                raise TernError(self._refusal(found))
            return self._found(found, asked.context, None, notes)
        if self._budget is None:
            wished = asked.most or self._model.context
            found = self._at_demand(wished)
            if self._counted(found) <= self._limit:
                return self._found(found, asked.most, None, notes)
        best = self._best()
        if best is None:
            raise TernError(self._refusal(self._at(arithmetic.CACHE_STEP, asked.parallel, self._layouts[-1])))
        context = best.planned.context
        if self._budget is None:
            notes = [
                *notes,
                f"a context of {context:,} tokens, the most that fit into the memory that is free",
            ]
        alone = asked.parallel is None and best.planned.parallel == 1
        return self._found(best, context, 1 if alone else None, notes)

    def _found(self, use: Usage, context: int | None, parallel: int | None, notes: list[str]) -> Fit:
        if self._budget is None and use.total > self._limit:
            notes = [
                *notes,
                f"only {megabytes(self._limit)} MB are free: weights that are mapped from the file will be "
                "read from the disk again and again",
            ]
        return Fit(self._source, context, parallel, use, tuple(notes))

    def _counted(self, use: Usage) -> int:
        """A budget is for all; without one, what is mapped can be given up."""
        return use.total if self._budget is not None else use.in_memory

    def _at(self, context: int, parallel: int | None, dense: bool, kv_type: str | None = None) -> Usage:
        asked = self._asked
        planned = arithmetic.plan(self._model, context, kv_type or self._kv_type, parallel, dense=dense)
        # Passes of more tokens than plans are made for, and logits of more than one token a conversation.
        besides = self._files + max(0, planned.compute * (asked.n_ubatch - N_UBATCH) // N_UBATCH)
        besides += 4 * asked.logits * self._model.n_vocab
        if asked.keeps_copy:
            besides += planned.kv_cache + planned.window_cache + planned.state
        if self._draft is not None:
            # Its KV cache is as long as the model's; the process is there already.
            of_draft = arithmetic.plan(self._draft, planned.context, "f16", parallel)
            besides += of_draft.total - of_draft.process
        return Usage(self._model, planned, besides)

    def _at_demand(self, context: int) -> Usage:
        """In the first layout that fits, or else in the last."""
        found = self._at(context, self._asked.parallel, self._layouts[0])
        for dense in self._layouts[1:]:
            if self._counted(found) > self._limit:
                found = self._at(context, self._asked.parallel, dense)
        return found

    def _largest(self, parallel: int | None, dense: bool, kv_type: str | None = None) -> Usage | None:
        most = self._model.context
        if self._asked.context is None and self._asked.most is not None:
            most = min(most, self._asked.most)
        context = arithmetic.most_tokens(
            replace(self._model, context=most),
            self._limit,
            parallel,
            lambda n: self._counted(self._at(n, parallel, dense, kv_type)),
        )
        return self._at(context, parallel, dense, kv_type) if context else None

    def _best(self) -> Usage | None:
        """The largest context, of as many conversations and in the layout that are asked for where these
        leave a comfortable one."""
        enough = min(COMFORTABLE_CONTEXT, self._model.context)

        def is_comfortable(use: Usage | None) -> bool:
            return use is not None and use.planned.context >= enough

        best = None
        for dense in self._layouts:
            if is_comfortable(best):
                break
            best = self._largest(self._asked.parallel, dense) or best
            if self._asked.parallel is None and not is_comfortable(best):
                best = self._largest(1, dense) or best
        return best

    def _refusal(self, found: Usage) -> str:
        """What it takes, and what would fit; several lines."""
        asked, planned = self._asked, found.planned
        there_is = f"the budget is {megabytes(self._limit)} MB"
        if self._budget is None:
            unless = " (--memory-budget says otherwise)" if asked.takes_budget else ""
            there_is = f"only {megabytes(self._limit)} MB are free{unless}"
        said = (
            f"{asked.path}: takes {megabytes(found.total)} MB with {planned.context:,} tokens of context "
            f"({found}), and {there_is}."
        )

        def largest(parallel: int | None) -> dict[str, int]:
            found = {kind: self._largest(parallel, planned.dense, kind) for kind in kv_types}
            return {kind: use.planned.context if use is not None else 0 for kind, use in found.items()}

        kv_types = [kind for kind in arithmetic.KV_TYPES if arithmetic.fits_heads(self._model, kind)]
        together = largest(asked.parallel)
        offers = self._offers(together, dict.fromkeys(kv_types, 0), asked.parallel)
        if asked.parallel != 1:
            offers += self._offers(largest(1), together, 1)
        if offers:
            return "\n".join([f"{said} What fits at most:", *offers])
        smallest = min(
            self._at(arithmetic.CACHE_STEP, 1, planned.dense, kv_type).total for kv_type in kv_types
        )
        return f"{said} No context fits; the least budget for this model is {megabytes(smallest)} MB"

    def _offers(self, contexts: dict[str, int], less: dict[str, int], parallel: int | None) -> list[str]:
        """A line for each context, from the most bits to the fewest, which are worth it only for more
        context; and all of them only for more than `less`."""
        offers, most = [], 0
        for kv_type, context in contexts.items():
            if context > max(most, less[kv_type]):
                most = context
                offers.append(f"  {self._asked.spelled(context, kv_type, parallel)}")
        return offers
