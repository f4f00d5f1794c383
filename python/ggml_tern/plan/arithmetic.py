"""The memory of one way to run a model, as the stock llama-server with the plug-in does.

Weights, KV cache and recurrent state are what llama.cpp allocates, to the byte; compute buffers and the rest
of the process are estimates, fitted to what llama.cpp says and to what the system counts (docs/plan.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import gguf

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.plan.header import N_UBATCH, Attention, Model

#: Conversations at a time that llama-server has unless it is told otherwise; they share one KV cache.
DEFAULT_PARALLEL = 4
#: llama.cpp rounds the tokens of a KV cache up to a multiple of this.
CACHE_STEP = 256

#: The types of a KV cache: name, weights in a block, bytes of a block.
KV_TYPES = {
    kind.name.lower(): gguf.GGML_QUANT_SIZES[kind]
    for kind in (
        gguf.GGMLQuantizationType.F16,
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q5_0,
        gguf.GGMLQuantizationType.Q4_0,
    )
}

#: The environment variable of the plug-in that chooses between the layouts of ternary weights.
LAYOUT_VARIABLE = "TERN_LAYOUT"
#: Its values.
LAYOUTS = ("auto", "fast", "dense")

# What the process takes by itself, for every node that llama.cpp makes room for in its graphs, and for every
# token and merge of the vocabulary; fitted to graphs of 1024 to 20480 nodes and vocabularies of 2 to 262
# thousand tokens.
_PROCESS_BYTES = 5 << 20
_NODE_BYTES = 1380
_TOKEN_BYTES = 200
_MERGE_BYTES = 90


@dataclass(frozen=True)
class Plan:
    """The memory of one way to run a model, in bytes.

    Attributes:
        context: tokens in the KV cache, of all conversations together, as llama.cpp rounds them.
        kv_type: type of the KV cache.
        parallel: conversations at a time.
        dense: whether ternary weights are in the dense layout.
        tiles, mapped: the weights.
        kv_cache: of the layers that look back on all of the context.
        window_cache: of the layers that slide a window.
        state: the recurrent state, of all conversations.
        compute: buffers of the graph, inputs and outputs included (estimate).
        process: the program and its vocabulary (estimate).
        on_host: of each part, by its name here, what the host holds; the rest is the device's.
    """

    context: int
    kv_type: str
    parallel: int
    dense: bool
    tiles: int
    mapped: int
    kv_cache: int
    window_cache: int
    state: int
    compute: int
    process: int
    on_host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        parts = (self.tiles, self.mapped, self.kv_cache, self.window_cache, self.state)
        return sum(parts) + self.compute + self.process


def padded(count: int, step: int) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


def fits_heads(model: Model, kv_type: str) -> bool:
    """Whether the blocks of a KV type divide the heads; llama.cpp refuses one that does not."""
    block, _ = KV_TYPES[kv_type]
    return all(width % block == 0 for layer in model.attention for width in layer.head_widths)


def plan(
    model: Model,
    context: int,
    kv_type: str = "f16",
    parallel: int | None = None,
    n_gpu_layers: int | None = None,
    dense: bool = False,
) -> Plan:
    """What `model` takes in llama-server with --ctx-size `context`.

    Args:
        context: tokens in the KV cache, of all conversations together.
        kv_type: one of KV_TYPES.
        parallel: conversations at a time (--parallel), each with its share of the context; None: 4, which
            share all of it, as llama-server does by default.
        n_gpu_layers: layers on the device (--n-gpu-layers), the last ones, what is behind them counted as
            one; None: all.
        dense: with ternary weights in the dense layout, where their types allow it.

    Raises TernError where llama.cpp refuses that KV type for these heads.
    """
    if not fits_heads(model, kv_type):
        raise TernError(
            f"{model.path}: its heads do not divide into the blocks of a KV cache in {kv_type}, of "
            f"{KV_TYPES[kv_type][0]}; use --kv f16"
        )
    n_seqs = parallel or DEFAULT_PARALLEL
    streams = parallel or 1
    cells = padded(padded(context, CACHE_STEP) // streams, CACHE_STEP)
    block, block_bytes = KV_TYPES[kv_type]
    n_tokens = min(N_UBATCH, cells * streams)

    def cells_of(window: int | None) -> int:
        if window is None:
            return cells
        looks_back = window * n_seqs if parallel is None else window
        return padded(min(cells, looks_back + N_UBATCH), CACHE_STEP)

    def cache(layer: Attention) -> int:
        n_blocks = (layer.k_width + layer.v_width) // block
        return streams * cells_of(layer.window) * n_blocks * block_bytes

    n_layers = len(model.weights) - 1
    first = 0 if n_gpu_layers is None else max(0, n_layers + 1 - n_gpu_layers)
    # llama.cpp gives fused attention up where a layer of it is on another device than its operation, and
    # keeps it where the cache is quantized.
    is_fused = kv_type != "f16" or all(layer.layer >= first for layer in model.attention)
    # The embedded tokens, and for every kind of attention its mask: in fp16, or else in F32.
    masks = sum(cells_of(window) for window in {layer.window for layer in model.attention})
    inputs = n_tokens * (4 * model.n_embd + (2 if is_fused else 4) * masks)
    states = [4 * n_seqs * floats for floats in model.recurrent]
    # The states of one Gated DeltaNet are gathered, updated, and kept for the write back.
    delta_net = 4 * (n_tokens * model.delta_net + 3 * n_seqs * max(model.recurrent, default=0))
    scores = 0 if is_fused else n_tokens * model.heads * cells
    attended = 4 * (n_tokens * model.attended + scores)
    activations = max(4 * n_tokens * model.activations, delta_net, attended)
    # What the kernels keep: activations quantized, scores in fp16 to multiply with, or sums of pieces.
    kernels = n_tokens * model.quantized + 2 * scores + (attention_scratch(model, cells) if is_fused else 0)
    logits = 4 * n_seqs * model.n_vocab
    vocabulary = _TOKEN_BYTES * model.n_vocab + _MERGE_BYTES * model.n_merges
    process = _PROCESS_BYTES + _NODE_BYTES * model.nodes + vocabulary

    def caches(layers: Iterable[Attention], slides: bool) -> int:
        return sum(cache(layer) for layer in layers if (layer.window is not None) is slides)

    of_host = [layer for layer in model.attention if layer.layer < first]
    weights_of_host = (model.embedding, *model.weights[:first])
    return Plan(
        context=cells * streams,
        kv_type=kv_type,
        parallel=n_seqs,
        dense=dense and model.can_be_dense,
        tiles=model.dense_tiles if dense else model.tiles,
        mapped=model.mapped,
        kv_cache=caches(model.attention, slides=False),
        window_cache=caches(model.attention, slides=True),
        state=sum(states),
        compute=inputs + activations + kernels + logits,
        process=process,
        on_host={
            "tiles": sum(weights.dense if dense else weights.tiles for weights in weights_of_host),
            "mapped": sum(weights.mapped for weights in weights_of_host),
            "kv_cache": caches(of_host, slides=False),
            "window_cache": caches(of_host, slides=True),
            "state": sum(
                nbytes for layer, nbytes in zip(model.recurrent_layers, states, strict=True) if layer < first
            ),
            "compute": inputs + logits,
            "process": process,
        },
    )


def attention_scratch(model: Model, cells: int) -> int:
    """Bytes of the sums that attention keeps, in the pass whose length makes them the most."""
    shapes = {
        (layer.k_width // k_head, *layer.head_widths, min(cells, layer.window or cells))
        for layer in model.attention
        if (k_head := layer.head_widths[0]) and layer.k_width
    }
    return max(
        (
            _core.most_attention_scratch(
                N_UBATCH, max(model.heads, n_kv_heads), n_kv_heads, k_head, v_head, n_kv
            )
            for n_kv_heads, k_head, v_head, n_kv in shapes
        ),
        default=0,
    )


def decode_bytes(model: Model, context: float, kv_type: str = "f16", dense: bool = False) -> float:
    """What decode reads for a token when `context` tokens are before it: weights, KV cache, state."""
    block, block_bytes = KV_TYPES[kv_type]
    looks_back = (
        min(context, layer.window or context) * (layer.k_width + layer.v_width) for layer in model.attention
    )
    read = model.read_dense if dense else model.read
    return read + sum(looks_back) * block_bytes / block + 4 * sum(model.recurrent)


def largest_context(
    model: Model,
    memory: int,
    kv_type: str = "f16",
    parallel: int | None = None,
    n_gpu_layers: int | None = None,
    dense: bool = False,
) -> int:
    """The most tokens, up to those that the model was trained for, that fit into `memory` bytes; 0 for
    none."""

    def takes(context: int) -> int:
        return plan(model, context, kv_type, parallel, n_gpu_layers, dense).total

    return most_tokens(model, memory, parallel, takes)


def most_tokens(model: Model, memory: int, parallel: int | None, takes: Callable[[int], int]) -> int:
    """The same by another count than `plan`'s: `takes` tells the bytes of a context, which grow with it."""
    step = CACHE_STEP * (parallel or 1)
    contexts = range(step, max(model.context, step) + 1, step)
    fitting = bisect.bisect_right(contexts, memory, key=takes)
    return contexts[fitting - 1] if fitting else 0


def needs_dense(
    model: Model, memory: int, context: int | None, kv_type: str, parallel: int | None = None
) -> bool:
    """Whether `context` tokens, None for any, fit into `memory` bytes at best in the dense layout."""
    return model.can_be_dense and plan(model, context or CACHE_STEP, kv_type, parallel).total > memory


def choose(
    model: Model,
    context: int | None,
    kv_type: str,
    memory: int | None,
    parallel: int | None = None,
    n_gpu_layers: int | None = None,
    layout: str = "auto",
) -> Plan:
    """The plan for what was asked. `memory`: bytes that there are, None for any; `layout`: one of LAYOUTS.

    Without a context it is the largest that fits into `memory`, or else the one that the model was trained
    for; where nothing fits, the plan shows what is too much about the least that could be. "auto" is the
    dense layout where the fast one does not fit. The other arguments, and what is raised, are those of
    `plan`.
    """
    dense = layout == "dense"
    if layout == "auto" and memory is not None:
        dense = needs_dense(model, memory, context, kv_type, parallel)
    if context is None and memory is not None:
        context = largest_context(model, memory, kv_type, parallel, n_gpu_layers, dense) or CACHE_STEP
    return plan(model, context or model.context, kv_type, parallel, n_gpu_layers, dense)


def trade_offs(
    model: Model,
    memory: int,
    parallel: int | None = None,
    n_gpu_layers: int | None = None,
    dense: bool = False,
) -> dict[str, dict[str, int]]:
    """The largest context that fits into `memory` bytes: for `parallel` and for one conversation alone
    (`parallel_4_shared` stands for None, `parallel_1` for 1), by type of KV cache; 0 for none.

    Types whose blocks do not divide the heads are left out.
    """
    kv_types = [kv_type for kv_type in KV_TYPES if fits_heads(model, kv_type)]
    return {
        f"parallel_{n or f'{DEFAULT_PARALLEL}_shared'}": {
            kv_type: largest_context(model, memory, kv_type, n, n_gpu_layers, dense) for kv_type in kv_types
        }
        for n in dict.fromkeys((parallel, 1))
    }


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"


def kv_bits(kv_type: str) -> float:
    """Bits of an element of the KV cache, scales included."""
    block, block_bytes = KV_TYPES[kv_type]
    return 8 * block_bytes / block
