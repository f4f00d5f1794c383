"""``tern plan``: the memory that a model will take, from its header alone.

`read_model` gathers what counts from a GGUF file, `plan` adds it up for one way to run it, as the stock
llama-server with the plug-in does: weights, KV cache and recurrent state are what llama.cpp allocates, to the
byte; compute buffers and the rest of the process are estimates, fitted to what llama.cpp says and to what the
system counts (docs/plan.md).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.keys import Keys
from ggml_tern.gguf.reader import GGUFSource, GGUFTensor
from ggml_tern.host.stock import DEVICE
from ggml_tern.limits import MAX_EXPERTS, MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY
from ggml_tern.plots import Panel, write_plot
from ggml_tern.tensors.names import printable

#: What llama-server takes unless it is told otherwise: tokens in one pass, and conversations at a time, which
#: then share one KV cache.
N_UBATCH = 512
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

#: Architectures whose layers all attend to all of the context.
_FULL_ATTENTION = ("llama", "qwen2", "qwen3", "qwen3moe", "bitnet")
#: Architectures whose layers slide a window but for the last of every round, and the layers of a round.
_WINDOW_PATTERN = {"gemma3": 6}
#: Architectures with Gated DeltaNet layers, and how many layers make a round where the file does not say.
_HYBRID = ("qwen35", "qwen35moe", "qwen3next")
_HYBRID_INTERVAL = 4

# csrc/cpu/tiles.h: tiles of 8 rows of 2-bit codes and fp16 scales, padded to 64 bytes, behind a header.
_TILE_ROWS = 8
_TILE_ALIGNMENT = 64
_TILES_HEADER = 64
# csrc/cpu/dense_tiles.h: the same rows of the base-3 types, 104 words of 16 bits for every 128 inputs.
_DENSE_TYPES = (_core.TYPE_PTQ1_0, _core.TYPE_TQ1_0)
_DENSE_GROUP, _DENSE_WORDS = 128, 104
#: The environment variable of the plug-in that chooses between the two.
LAYOUT_VARIABLE = "TERN_LAYOUT"

# csrc/cpu/attention.cpp: queries of a KV head in tiles of at most so many rows and values; where there are
# fewer than so many tiles, each is split into pieces of the context, whose sums are kept until all are done.
_ATTENTION_ROWS, _ATTENTION_VALUES = 64, 8192
_ATTENTION_TILES = 64
_ATTENTION_PIECE = 256
_ATTENTION_SCRATCH = 32 << 20  # bytes, at most

# What the process takes by itself, for every node that llama.cpp makes room for in its graphs, and for every
# token and merge of the vocabulary; fitted to graphs of 1024 to 20480 nodes and vocabularies of 2 to 262
# thousand tokens.
_PROCESS_BYTES = 5 << 20
_NODE_BYTES = 1380
_TOKEN_BYTES = 200
_MERGE_BYTES = 90
# That room: by tensors, and at least so many; for hybrids by tensors and by the tokens of a pass.
_NODES_PER_TENSOR, _LEAST_NODES = 8, 1024
_HYBRID_NODES_PER_TENSOR, _HYBRID_NODES_PER_TOKEN = 32, 40

#: What the host, beside the device, is called in tables.
HOST = "host CPU"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
#: Columns of a bar in the terminal.
_BAR_WIDTH = 36


@dataclass(frozen=True)
class Attention:
    """A layer with a KV cache: which one, elements of a key and of a value of one token, those of one head,
    and the tokens that it looks back on, None for all."""

    layer: int
    k_width: int
    v_width: int
    head_widths: tuple[int, int]
    window: int | None = None


@dataclass(frozen=True)
class Weights:
    """Bytes of ternary matrices as the plug-in holds them, in its fast layout and in its dense one; and of
    all others, which stay in the file."""

    tiles: int
    dense: int
    mapped: int


@dataclass(frozen=True)
class Model:
    """What of a model decides about its memory.

    Attributes:
        path: its file.
        architecture, name: as the file says.
        weights: those of each layer, then those behind the last layer. An embedding that is the head too
            counts as the latter.
        embedding: the weights of which a token's row is looked up; always the host's.
        read, read_dense: bytes of the weights that decode reads for a token, by layout.
        attention: the layers with a KV cache.
        recurrent_layers, recurrent: the recurrent layers, and floats of the state of each, per conversation.
        activations, delta_net: floats that a token takes at the widest point of the graph, and in a Gated
            DeltaNet; estimates.
        attended, heads: floats that a token takes around attention, an estimate, and its most heads.
        quantized: bytes of a token's activations, quantized for the widest ternary matrix.
        nodes: for how many llama.cpp makes room in its graphs.
        n_embd, n_vocab, n_merges: width, tokens, and merges of the tokenizer.
        context: tokens that the model was trained for.
    """

    path: Path
    architecture: str
    name: str | None
    weights: tuple[Weights, ...]
    embedding: Weights
    read: int
    read_dense: int
    attention: tuple[Attention, ...]
    recurrent_layers: tuple[int, ...]
    recurrent: tuple[int, ...]
    activations: int
    delta_net: int
    attended: int
    heads: int
    quantized: int
    nodes: int
    n_embd: int
    n_vocab: int
    n_merges: int
    context: int

    @property
    def tiles(self) -> int:
        return self.embedding.tiles + sum(layer.tiles for layer in self.weights)

    @property
    def dense_tiles(self) -> int:
        return self.embedding.dense + sum(layer.dense for layer in self.weights)

    @property
    def can_be_dense(self) -> bool:
        """Whether the dense layout saves anything."""
        return self.dense_tiles < self.tiles

    @property
    def mapped(self) -> int:
        return self.embedding.mapped + sum(layer.mapped for layer in self.weights)


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


# ---- from the header ----


def read_model(path: Path) -> Model:
    """Read the header of a GGUF file; of a split model, any part stands for all.

    Raises TernError for what is no GGUF file of a language model, and for an architecture whose memory is not
    known here.
    """
    source = GGUFSource(path)
    architecture = source.architecture
    if architecture is None:
        raise TernError(f"{path}: has no general.architecture, so it is no model; give a model's GGUF file")
    kind = source.metadata.get("general.type", "model")
    if architecture == "clip" or kind != "model":
        what = "a vision projector" if architecture == "clip" else f"of general.type {printable(str(kind))}"
        raise TernError(f"{path}: is {what}, not a language model; give the model that it belongs to")
    if not source.tensors:
        raise TernError(f"{path}: holds no weights, only a vocabulary; give a model's GGUF file")
    known = (*_FULL_ATTENTION, *_WINDOW_PATTERN, *_HYBRID)
    if architecture not in known:
        raise TernError(
            f"{path}: architecture {printable(architecture)}: how llama.cpp lays out its memory is not known "
            f"here; known are {', '.join(sorted(known))}"
        )
    keys = Keys(source, architecture)
    n_blocks = keys.integer("block_count", most=MAX_LAYERS)
    n_layers = n_blocks
    if architecture in _HYBRID:
        n_layers -= keys.integer("nextn_predict_layers", 0, least=0, most=n_blocks - 1)
    # The blocks of an MTP head stand behind the others; llama.cpp leaves them in the file.
    left_out = tuple(f"blk.{block}." for block in range(n_layers, n_blocks))
    tensors = [t for name, t in source.tensors.items() if not name.startswith(left_out or ("\0",))]
    n_embd = keys.integer("embedding_length")
    recurrent_layers = _recurrent_layers(keys, architecture, n_layers)
    state = _state_floats(keys) if any(recurrent_layers) else 0
    tokens = source.metadata.get("tokenizer.ggml.tokens", [])
    name = source.metadata.get("general.name")
    attention = _attention(keys, architecture, recurrent_layers, n_embd)
    weights, embedding = _by_layer(tensors, n_layers)
    return Model(
        path=path,
        architecture=architecture,
        name=printable(name) if isinstance(name, str) else None,
        weights=weights,
        embedding=embedding,
        read=_read_for_a_token(keys, tensors, dense=False),
        read_dense=_read_for_a_token(keys, tensors, dense=True),
        attention=attention,
        recurrent_layers=tuple(layer for layer, is_recurrent in enumerate(recurrent_layers) if is_recurrent),
        recurrent=tuple(state for is_recurrent in recurrent_layers if is_recurrent),
        activations=_activations(keys, tensors, attention, n_embd),
        delta_net=_delta_net(keys, n_embd) if state else 0,
        attended=_attended(tensors, attention, n_embd),
        heads=max(keys.per_layer("attention.head_count", n_layers)),
        quantized=max((quantized_bytes(t.n_in) for t in tensors if _is_tiled(t)), default=0),
        nodes=_nodes(architecture, len(tensors)),
        n_embd=n_embd,
        n_vocab=len(tokens) or keys.integer("vocab_size", most=MAX_VOCABULARY),
        n_merges=len(source.metadata.get("tokenizer.ggml.merges", [])),
        context=keys.integer("context_length", most=MAX_TOKENS),
    )


def _recurrent_layers(keys: Keys, architecture: str, n_layers: int) -> list[bool]:
    """For each layer whether it keeps a state instead of a KV cache."""
    if architecture not in _HYBRID:
        return [False] * n_layers
    flags = keys.flags("attention.recurrent_layers", n_layers)
    if flags is not None:
        return flags
    interval = keys.integer("full_attention_interval", _HYBRID_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(n_layers)]


def _state_floats(keys: Keys) -> int:
    """Floats of the state of one Gated DeltaNet layer: the last inputs of its convolution, and its memory, a
    matrix for each head."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    kernel, groups = keys.integer("ssm.conv_kernel"), keys.integer("ssm.group_count")
    return (kernel - 1) * (inner + 2 * groups * state) + state * inner


def _attention(
    keys: Keys, architecture: str, recurrent_layers: list[bool], n_embd: int
) -> tuple[Attention, ...]:
    n_layers = len(recurrent_layers)
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = heads
    if keys.value("attention.head_count_kv") is not None:
        kv_heads = keys.per_layer("attention.head_count_kv", n_layers)
    k_head = keys.integer("attention.key_length", n_embd // max(heads[0], 1))
    v_head = keys.integer("attention.value_length", n_embd // max(heads[0], 1))
    windows: list[int | None] = [None] * n_layers
    window = 0
    if architecture in _WINDOW_PATTERN:
        window = keys.integer("attention.sliding_window", 0, least=0, most=MAX_TOKENS)
    if window:
        slides = keys.flags("attention.sliding_window_pattern", n_layers)
        if slides is None:
            pattern = keys.integer("attention.sliding_window_pattern", _WINDOW_PATTERN[architecture])
            slides = [layer % pattern < pattern - 1 for layer in range(n_layers)]
        windows = [window if sliding else None for sliding in slides]
    return tuple(
        Attention(layer, kv_heads[layer] * k_head, kv_heads[layer] * v_head, (k_head, v_head), windows[layer])
        for layer, is_recurrent in enumerate(recurrent_layers)
        if not is_recurrent
    )


def _is_tiled(tensor: GGUFTensor) -> bool:
    return tensor.type in _core.TERNARY_TYPES


def tiled_bytes(tensor: GGUFTensor, dense: bool = False) -> int:
    """Bytes of a ternary matrix, or a stack of them, in tiles, or in dense ones where its type allows it."""
    *outer, n_out, n_in = (1, *tensor.shape)
    group = min(_core.block_size(tensor.type), 128)
    codes, scales = n_in // 4 * _TILE_ROWS, n_in // group * _TILE_ROWS * 2
    if dense and tensor.type in _DENSE_TYPES:
        codes = n_in // _DENSE_GROUP * _DENSE_WORDS * 2
    tile = padded(codes + scales, _TILE_ALIGNMENT)
    matrix = _TILES_HEADER + padded(n_out, _TILE_ROWS) // _TILE_ROWS * tile
    return int(np.prod(outer, dtype=np.int64)) * matrix


def held_bytes(tensor: GGUFTensor, dense: bool = False) -> int:
    """Bytes of any tensor in memory."""
    return tiled_bytes(tensor, dense) if _is_tiled(tensor) else tensor.data.nbytes


def _by_layer(tensors: list[GGUFTensor], n_layers: int) -> tuple[tuple[Weights, ...], Weights]:
    """The weights of each layer and of what is behind the last; and those that are only looked up."""
    is_tied = all(tensor.name != HEAD for tensor in tensors)
    tiles, dense, mapped = Counter[int](), Counter[int](), Counter[int]()
    for tensor in tensors:
        first, *rest = tensor.name.split(".")
        layer = n_layers
        if first == "blk" and rest and rest[0].isascii() and rest[0].isdecimal():
            layer = int(rest[0])
        elif tensor.name == EMBEDDING and not is_tied:
            layer = -1
        if _is_tiled(tensor):
            tiles[layer] += held_bytes(tensor)
            dense[layer] += held_bytes(tensor, dense=True)
        else:
            mapped[layer] += held_bytes(tensor)
    layers = range(-1, n_layers + 1)
    embedding, *weights = (Weights(tiles[layer], dense[layer], mapped[layer]) for layer in layers)
    return tuple(weights), embedding


def _nodes(architecture: str, n_tensors: int) -> int:
    if architecture in _HYBRID:
        return max(N_UBATCH * _HYBRID_NODES_PER_TOKEN, n_tensors * _HYBRID_NODES_PER_TENSOR)
    return max(_LEAST_NODES, n_tensors * _NODES_PER_TENSOR)


def _read_for_a_token(keys: Keys, tensors: list[GGUFTensor], dense: bool) -> int:
    """Bytes of all that is multiplied with, of the experts as many as a token has; a row of the embedding
    is not counted."""
    used, n_experts = (
        keys.integer(f"expert_{which}", 0, least=0, most=MAX_EXPERTS) for which in ("used_count", "count")
    )
    is_tied = all(tensor.name != HEAD for tensor in tensors)
    nbytes = 0
    for tensor in tensors:
        if tensor.name == EMBEDDING and not is_tied:
            continue
        is_expert = n_experts and tensor.name.endswith("_exps.weight")
        held = held_bytes(tensor, dense)
        nbytes += held * used // n_experts if is_expert else held
    return nbytes


def quantized_bytes(n_in: int) -> int:
    """Bytes of one token's activations as the kernels read them: int8, and a float scale for every 128."""
    return n_in + 4 * -(-n_in // 128)


def _activations(keys: Keys, tensors: list[GGUFTensor], attention: tuple[Attention, ...], n_embd: int) -> int:
    """Floats of one token at the widest point of the graph, as llama.cpp reuses its memory.

    A fit to what it allocates: three vectors each of the model's width and of the feed-forward part's;
    attention holds queries, keys and values twice; experts keep their outputs apart. docs/plan.md compares.
    """
    widths = [
        3 * (n_embd + _widest(tensors, "ffn_up", "ffn_gate")),
        _attended(tensors, attention, n_embd),
    ]
    used = keys.integer("expert_used_count", 0, least=0, most=MAX_EXPERTS)
    if used:
        widest = max(n_embd, _widest(tensors, "ffn_up_exps", "ffn_gate_exps"))
        widths.append(5 * n_embd + 2 * used * widest)
    return max(widths)


def _attended(tensors: list[GGUFTensor], attention: tuple[Attention, ...], n_embd: int) -> int:
    kv_width = max((layer.k_width + layer.v_width for layer in attention), default=0)
    return n_embd + 2 * _widest(tensors, "attn_q") + kv_width


def _widest(tensors: list[GGUFTensor], *kinds: str) -> int:
    """The most rows that a matrix of these kinds has."""
    endings = tuple(f".{kind}.weight" for kind in kinds)
    return max((tensor.shape[-2] for tensor in tensors if tensor.name.endswith(endings)), default=0)


def _delta_net(keys: Keys, n_embd: int) -> int:
    """Floats of one token in a Gated DeltaNet: three vectors each of the model's width, the keys and the
    values."""
    key = keys.integer("ssm.group_count") * keys.integer("ssm.state_size")
    return 3 * (n_embd + key + keys.integer("ssm.inner_size"))


# ---- the sums ----


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
    """Bytes of the sums of all pieces, in the pass whose length makes them the most."""
    most = 0
    for layer in model.attention:
        k_head, v_head = layer.head_widths
        n_kv_heads = layer.k_width // max(k_head, 1)
        if not n_kv_heads:
            continue
        rows_per_tile = min(max(_ATTENTION_VALUES // max(k_head, v_head) // 4 * 4, 8), _ATTENTION_ROWS)
        rows_per_head = (_ATTENTION_TILES - 1) // n_kv_heads * rows_per_tile
        n_rows = min(n_kv_heads * rows_per_head, N_UBATCH * model.heads)
        n_pieces = -(-min(cells, layer.window or cells) // _ATTENTION_PIECE)
        most = max(most, 4 * n_rows * n_pieces * (v_head + 2))
    return min(most, _ATTENTION_SCRATCH)


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


def not_counted(model: Model) -> list[str]:
    """What llama-server may take beyond a plan, one line each."""
    notes = ["prompts of the past, up to 8 GiB: llama-server --cache-ram 0 keeps none"]
    if model.recurrent or any(layer.window is not None for layer in model.attention):
        size = f" of {megabytes(4 * sum(model.recurrent))} MB" if model.recurrent else ""
        notes.append(f"checkpoints{size}, up to 32 a conversation: llama-server --ctx-checkpoints N")
    return notes


# ---- for people and programs ----


def as_json(
    model: Model, planned: Plan, memory: int | None, parallel: int | None, n_gpu_layers: int | None = None
) -> dict[str, Any]:
    """The plan as JSON can hold it: bytes, tokens. fits and largest_context are null without `memory`."""
    largest = None if memory is None else trade_offs(model, memory, parallel, n_gpu_layers, planned.dense)
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        **asdict(planned),
        "total": planned.total,
        "memory": memory,
        "fits": None if memory is None else planned.total <= memory,
        "largest_context": largest,
    }


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"


def print_plan(
    model: Model,
    planned: Plan,
    memory: int | None,
    parallel: int | None,
    console: Console,
    n_gpu_layers: int | None = None,
) -> None:
    """The plan as a table, by device where `n_gpu_layers` is given; with `memory`, whether it fits, and which
    contexts would."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False)

    sharing = "shared by" if parallel is None else "in equal parts for"
    conversations = "1 conversation" if planned.parallel == 1 else f"{planned.parallel} conversations"
    say(f"{model.path.name}: {model.architecture}" + (f", {model.name}" if model.name else ""))
    say(f"{planned.context:,} tokens of context {sharing} {conversations}\n")
    console.print(_memory_table(model, planned, split=n_gpu_layers is not None))
    say("\nnot counted:")
    for note in not_counted(model):
        say(f"- {note}")
    if memory is not None:
        fits = planned.total <= memory
        verdict = f"{'fits' if fits else 'does not fit'} into {megabytes(memory)} MB"
        say(f"\n{verdict}; the largest contexts that do:", "green" if fits else "bold red")
        largest = trade_offs(model, memory, parallel, n_gpu_layers, planned.dense)
        console.print(_context_chart(largest))


def _memory_table(model: Model, planned: Plan, split: bool) -> Table:
    host = sum(planned.on_host.values())
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("", footer="total", no_wrap=True)
    table.add_column("MB", footer=megabytes(planned.total), justify="right", no_wrap=True)
    if split:
        table.add_column(DEVICE, footer=megabytes(planned.total - host), justify="right", no_wrap=True)
        table.add_column(HOST, footer=megabytes(host), justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for part, name, what in _rows(model, planned):
        nbytes = getattr(planned, part)
        held = planned.on_host[part]
        cells = [nbytes, *([nbytes - held, held] if split else [])]
        if nbytes:
            table.add_row(name, *(megabytes(cell) for cell in cells), what)
    return table


def _named(conversations: str) -> str:
    """A key of `trade_offs` in words."""
    shared = conversations.endswith("_shared")
    return f"{DEFAULT_PARALLEL} conversations share" if shared else "--" + conversations.replace("_", " ")


def kv_bits(kv_type: str) -> float:
    """Bits of an element of the KV cache, scales included."""
    block, block_bytes = KV_TYPES[kv_type]
    return 8 * block_bytes / block


def _context_chart(largest: dict[str, dict[str, int]]) -> Table:
    """A bar for each KV type, as long as its context."""
    most = max(context for contexts in largest.values() for context in contexts.values())
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("bits", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("")
    for conversations, contexts in largest.items():
        name = _named(conversations)
        for kv_type, context in contexts.items():
            bar = Bar(max(most, 1), 0, context, width=_BAR_WIDTH)
            table.add_row(
                name, f"--kv {kv_type}", f"{kv_bits(kv_type):g}", f"{context:,}" if context else "none", bar
            )
            name = ""
    return table


def draw_plan(
    path: Path,
    model: Model,
    memory: int | None,
    parallel: int | None,
    n_gpu_layers: int | None = None,
    dense: bool = False,
) -> None:
    """A PNG file: memory against context for each KV type, and, with `memory`, KV bits against the largest
    context.

    Raises TernError."""
    step = CACHE_STEP * (parallel or 1)
    contexts = [step << n for n in range(max(1, (model.context // step).bit_length()))]
    kv_types = [kv_type for kv_type in KV_TYPES if fits_heads(model, kv_type)]
    lines = {
        f"--kv {kv_type}, {kv_bits(kv_type):g} bits": [
            (context, plan(model, context, kv_type, parallel, n_gpu_layers, dense).total / 1e9)
            for context in contexts
        ]
        for kv_type in kv_types
    }
    limits = {} if memory is None else {f"--memory {memory / 1e9:g}GB": memory / 1e9}
    panels = [Panel("What it takes", "tokens of context", "GB", lines, limits, log_x=True)]
    if memory is not None:
        largest = {
            _named(conversations): [(kv_bits(kv_type), context) for kv_type, context in found.items()]
            for conversations, found in trade_offs(model, memory, parallel, n_gpu_layers, dense).items()
        }
        panels.append(
            Panel(f"What fits into {memory / 1e9:g} GB", "bits of the KV cache", "tokens of context", largest)
        )
    write_plot(path, model.path.name, panels)


def _rows(model: Model, planned: Plan) -> list[tuple[str, str, str]]:
    """Field, name and explanation of each part."""
    windows = Counter(layer.window for layer in model.attention)
    full = windows.pop(None, 0)
    cache = f"{full} layers in {planned.kv_type}: {planned.kv_cache / planned.context / 1024:.4g} KiB a token"
    sliding = ", ".join(f"{count} layers that look back {window:,}" for window, count in windows.items())
    tiles = "in tiles: 2 bits and scales, whatever the type in the file"
    if planned.dense:
        tiles = f"in dense tiles: 1.6 bits and scales, with slower decode ({LAYOUT_VARIABLE}=dense)"
    recurrent = f"{len(model.recurrent)} layers: {megabytes(4 * sum(model.recurrent))} MB a conversation"
    return [
        ("tiles", "ternary weights", tiles),
        ("mapped", "other weights", "mapped from the file"),
        ("kv_cache", "KV cache", cache),
        ("window_cache", "window KV cache", sliding),
        ("state", "recurrent state", recurrent),
        ("compute", "compute buffers", f"estimate, for {N_UBATCH} tokens at a time"),
        ("process", "process", f"estimate: the program, its graphs, and {model.n_vocab:,} tokens"),
    ]
