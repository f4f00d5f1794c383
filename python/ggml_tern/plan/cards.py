"""What graphics cards hold of a model, and what stays in main memory.

As stock llama.cpp divides it: the last layers go to the cards, in order, to each by its share of the memory;
the others and the token embedding stay with the processor. Ternary weights on a card are Q2_0, of 2.25 bits.
Compute buffers are estimates. What a driver takes for itself is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ggml_tern.plan.arithmetic import Plan, most_tokens, plan
from ggml_tern.plan.header import N_UBATCH, Model

#: Tokens of context where not all layers fit and nobody asked for any: more would push more layers out.
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Card:
    """What one card holds, in bytes. n_layers: what is behind the last layer counted as one."""

    memory: int
    n_layers: int
    weights: int
    kv_cache: int
    state: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.state + self.compute


@dataclass(frozen=True)
class Division:
    """A model on cards and in main memory.

    Attributes:
        planned: for both together.
        n_gpu_layers: as -ngl of llama.cpp.
        n_layers: of the model, counted in the same way.
        embedding: bytes of a second copy of the embedding, which is the head too, in main memory.
    """

    planned: Plan
    n_gpu_layers: int
    n_layers: int
    cards: tuple[Card, ...]
    embedding: int

    @property
    def is_whole(self) -> bool:
        return self.n_gpu_layers == self.n_layers

    @property
    def on_host(self) -> dict[str, int]:
        """Bytes of each part in main memory. Layers there need buffers like those on a card."""
        parts = dict(self.planned.on_host) | {"embedding": self.embedding}
        return parts if self.is_whole else parts | {"compute": self.planned.compute}

    @property
    def main_memory(self) -> int:
        """Bytes."""
        return sum(self.on_host.values())

    def options(self) -> list[str]:
        """Of llama-server."""
        kind = self.planned.kv_type
        words = ["-ngl", str(self.n_gpu_layers), "-c", str(self.planned.context), "-ctk", kind, "-ctv", kind]
        if len(self.cards) > 1:
            words += ["-ts", ",".join(f"{card.memory / 1e9:g}" for card in self.cards)]
        return words


def divide(
    model: Model,
    memories: Sequence[int],
    context: int | None = None,
    kv_type: str = "f16",
    parallel: int | None = None,
    dense: bool = False,
) -> Division:
    """The most layers on cards that have these bytes free.

    context: tokens, of all conversations together; None for the most that leave all layers on the cards, or
    else DEFAULT_CONTEXT. The other arguments, and what is raised, are those of `plan`.
    """
    n_layers = len(model.weights)

    def at(n_gpu_layers: int, tokens: int) -> Division:
        return _divided(
            model, memories, plan(model, tokens, kv_type, parallel, n_gpu_layers, dense), n_gpu_layers
        )

    if context is None:
        # The card that is the fullest decides.
        limit = 1 << 40
        context = most_tokens(
            model, limit, parallel, lambda tokens: int(limit * _fullness(at(n_layers, tokens).cards))
        ) or min(DEFAULT_CONTEXT, model.context)
    fitting = (at(n, context) for n in range(n_layers, 0, -1))
    return next((found for found in fitting if _fullness(found.cards) <= 1), at(0, context))


def _fullness(cards: Sequence[Card]) -> float:
    return max(card.total / card.memory for card in cards)


def _divided(model: Model, memories: Sequence[int], planned: Plan, n_gpu_layers: int) -> Division:
    n_layers = len(model.weights)
    first = n_layers - n_gpu_layers
    shares = [ends / sum(memories) for ends in itertools.accumulate(memories)]
    where = {
        layer: next(i for i, end in enumerate(shares) if (layer - first) / n_gpu_layers < end)
        for layer in range(first, n_layers)
    }
    held = [
        _on_one(model, planned, [layer for layer, at in where.items() if at == i])
        for i in range(len(memories))
    ]
    cards = tuple(
        Card(memory, n, weights, cache, state, compute)
        for memory, (n, weights, cache, state, compute) in zip(memories, held, strict=True)
    )
    looked_up = model.embedding
    # A head that is the embedding too is on a card, and what is looked up stays here.
    is_tied = not looked_up.tiles and not looked_up.mapped and n_gpu_layers > 0
    head = model.weights[-1]
    embedding = (head.dense if planned.dense else head.tiles) + head.mapped if is_tied else 0
    return Division(planned, n_gpu_layers, n_layers, cards, embedding)


def _on_one(model: Model, planned: Plan, layers: list[int]) -> tuple[int, int, int, int, int]:
    """Number of layers, and bytes of weights, KV cache, state and compute buffers."""
    mine = set(layers)
    weights = sum(model.weights[layer].twins + model.weights[layer].mapped for layer in mine)
    full = [layer for layer in model.attention if layer.window is None]
    sliding = [layer for layer in model.attention if layer.window is not None]
    cache = 0
    for kind, nbytes in ((full, planned.kv_cache), (sliding, planned.window_cache)):
        # Layers of a kind have as many cells each.
        width = sum(layer.k_width + layer.v_width for layer in kind)
        own = sum(layer.k_width + layer.v_width for layer in kind if layer.layer in mine)
        cache += nbytes * own // width if width else 0
    floats = sum(n for layer, n in zip(model.recurrent_layers, model.recurrent, strict=True) if layer in mine)
    state = 4 * planned.parallel * floats
    # A rotation needs its result, and scratch of the same size, of the widest activation.
    rotated = 2 * 4 * N_UBATCH * model.quantized
    compute = planned.compute + rotated if mine else 0
    return len(mine), weights, cache, state, compute
