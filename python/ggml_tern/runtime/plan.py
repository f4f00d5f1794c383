"""``tern plan``: the memory that a model will take, from its header alone.

`read_model` gathers what counts from a GGUF file, `plan` adds it up for one way to run it, as the stock
llama-server with the plug-in does: weights, KV cache and recurrent state are what llama.cpp allocates, to the
byte; compute buffers and the rest of the process are estimates, fitted to what llama.cpp says and to what the
system counts (docs/plan.md).
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf_files.reader import GGUFSource, GGUFTensor, printable

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

# What the process takes by itself, and for every token and merge of the vocabulary; fitted to six
# vocabularies of 49 to 262 thousand tokens.
_PROCESS_BYTES = 10 << 20
_TOKEN_BYTES = 150
_MERGE_BYTES = 190


@dataclass(frozen=True)
class Attention:
    """A layer with a KV cache: elements of a key and of a value of one token, those of one head, and the
    tokens that it looks back on, None for all."""

    k_width: int
    v_width: int
    head_widths: tuple[int, int]
    window: int | None = None


@dataclass(frozen=True)
class Model:
    """What of a model decides about its memory.

    Attributes:
        path: its file.
        architecture, name: as the file says.
        tiles: bytes of the ternary matrices as the plug-in holds them.
        mapped: bytes of all other weights, which stay in the file.
        attention: the layers with a KV cache.
        recurrent: floats of the state of each recurrent layer, per conversation.
        activations, delta_net: floats that a token takes at the widest point of the graph, and in a Gated
            DeltaNet; estimates.
        quantized: bytes of a token's activations, quantized for the widest ternary matrix.
        n_embd, n_vocab, n_merges: width, tokens, and merges of the tokenizer.
        context: tokens that the model was trained for.
    """

    path: Path
    architecture: str
    name: str | None
    tiles: int
    mapped: int
    attention: tuple[Attention, ...]
    recurrent: tuple[int, ...]
    activations: int
    delta_net: int
    quantized: int
    n_embd: int
    n_vocab: int
    n_merges: int
    context: int


@dataclass(frozen=True)
class Plan:
    """The memory of one way to run a model, in bytes.

    Attributes:
        context: tokens in the KV cache, of all conversations together, as llama.cpp rounds them.
        kv_type: type of the KV cache.
        parallel: conversations at a time.
        tiles, mapped: the weights.
        kv_cache: of the layers that look back on all of the context.
        window_cache: of the layers that slide a window.
        state: the recurrent state, of all conversations.
        compute: buffers of the graph, inputs and outputs included (estimate).
        process: the program and its vocabulary (estimate).
    """

    context: int
    kv_type: str
    parallel: int
    tiles: int
    mapped: int
    kv_cache: int
    window_cache: int
    state: int
    compute: int
    process: int

    @property
    def total(self) -> int:
        parts = (self.tiles, self.mapped, self.kv_cache, self.window_cache, self.state)
        return sum(parts) + self.compute + self.process


def padded(count: int, step: int) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


# ---- from the header ----


class _Keys:
    """The keys of one architecture; a wrong or missing one is a TernError that names it."""

    def __init__(self, source: GGUFSource, architecture: str) -> None:
        self._source = source
        self._architecture = architecture

    def _error(self, key: str, found: object, expected: str) -> TernError:
        shown = "missing" if found is None else printable(str(found))[:60]
        return TernError(
            f"{self._source.path}: {self._architecture}.{key} is {shown}; expected {expected}; "
            "convert the model again"
        )

    def value(self, key: str) -> Any:
        return self._source.metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**32:
            raise self._error(key, value, f"an integer from {least} on")
        return value

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> list[int]:
        """One integer for each layer; a single one stands for all."""
        value = self.value(key)
        if not isinstance(value, np.ndarray | list):
            return [self.integer(key, default, least=0)] * n_layers
        values = np.asarray(value)
        if values.dtype.kind not in "iu" or len(values) < n_layers or values[:n_layers].min(initial=0) < 0:
            raise self._error(key, value, f"{n_layers} integers")
        return [int(n) for n in values[:n_layers]]

    def flags(self, key: str, n_layers: int) -> list[bool] | None:
        """One flag for each layer; None where the key is not there or is a single number."""
        value = self.value(key)
        if not isinstance(value, np.ndarray | list):
            return None
        if len(value) < n_layers:
            raise self._error(key, value, f"{n_layers} flags")
        return [bool(flag) for flag in value[:n_layers]]


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
    keys = _Keys(source, architecture)
    n_blocks = keys.integer("block_count")
    n_layers = n_blocks
    if architecture in _HYBRID:
        n_layers -= keys.integer("nextn_predict_layers", 0, least=0)
    # The blocks of an MTP head stand behind the others; llama.cpp leaves them in the file.
    left_out = tuple(f"blk.{block}." for block in range(n_layers, n_blocks))
    tensors = [t for name, t in source.tensors.items() if not name.startswith(left_out or ("\0",))]
    n_embd = keys.integer("embedding_length")
    recurrent_layers = _recurrent_layers(keys, architecture, n_layers)
    state = _state_floats(keys) if any(recurrent_layers) else 0
    tokens = source.metadata.get("tokenizer.ggml.tokens", [])
    name = source.metadata.get("general.name")
    attention = _attention(keys, architecture, recurrent_layers, n_embd)
    return Model(
        path=path,
        architecture=architecture,
        name=printable(name) if isinstance(name, str) else None,
        tiles=sum(tiled_bytes(tensor) for tensor in tensors if _is_tiled(tensor)),
        mapped=sum(tensor.data.nbytes for tensor in tensors if not _is_tiled(tensor)),
        attention=attention,
        recurrent=tuple(state for is_recurrent in recurrent_layers if is_recurrent),
        activations=_activations(keys, tensors, attention, n_embd),
        delta_net=_delta_net(keys, n_embd) if state else 0,
        quantized=max((quantized_bytes(t.n_in) for t in tensors if _is_tiled(t)), default=0),
        n_embd=n_embd,
        n_vocab=len(tokens) or keys.integer("vocab_size"),
        n_merges=len(source.metadata.get("tokenizer.ggml.merges", [])),
        context=keys.integer("context_length"),
    )


def _recurrent_layers(keys: _Keys, architecture: str, n_layers: int) -> list[bool]:
    """For each layer whether it keeps a state instead of a KV cache."""
    if architecture not in _HYBRID:
        return [False] * n_layers
    flags = keys.flags("attention.recurrent_layers", n_layers)
    if flags is not None:
        return flags
    interval = keys.integer("full_attention_interval", _HYBRID_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(n_layers)]


def _state_floats(keys: _Keys) -> int:
    """Floats of the state of one Gated DeltaNet layer: the last inputs of its convolution, and its memory, a
    matrix for each head."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    kernel, groups = keys.integer("ssm.conv_kernel"), keys.integer("ssm.group_count")
    return (kernel - 1) * (inner + 2 * groups * state) + state * inner


def _attention(
    keys: _Keys, architecture: str, recurrent_layers: list[bool], n_embd: int
) -> tuple[Attention, ...]:
    n_layers = len(recurrent_layers)
    heads = keys.per_layer("attention.head_count", n_layers)
    kv_heads = heads
    if keys.value("attention.head_count_kv") is not None:
        kv_heads = keys.per_layer("attention.head_count_kv", n_layers)
    k_head = keys.integer("attention.key_length", n_embd // max(heads[0], 1))
    v_head = keys.integer("attention.value_length", n_embd // max(heads[0], 1))
    windows: list[int | None] = [None] * n_layers
    if architecture in _WINDOW_PATTERN and keys.integer("attention.sliding_window", 0, least=0):
        window = keys.integer("attention.sliding_window")
        slides = keys.flags("attention.sliding_window_pattern", n_layers)
        if slides is None:
            pattern = keys.integer("attention.sliding_window_pattern", _WINDOW_PATTERN[architecture])
            slides = [layer % pattern < pattern - 1 for layer in range(n_layers)]
        windows = [window if sliding else None for sliding in slides]
    return tuple(
        Attention(n * k_head, n * v_head, (k_head, v_head), window)
        for n, window, is_recurrent in zip(kv_heads, windows, recurrent_layers, strict=True)
        if not is_recurrent
    )


def _is_tiled(tensor: GGUFTensor) -> bool:
    return tensor.type in _core.TERNARY_TYPES


def tiled_bytes(tensor: GGUFTensor) -> int:
    """Bytes of a ternary matrix, or a stack of them, in the tiles that csrc/cpu/tiles.h describes."""
    *outer, n_out, n_in = (1, *tensor.shape)
    group = min(_core.block_size(tensor.type), 128)
    codes, scales = n_in // 4 * _TILE_ROWS, n_in // group * _TILE_ROWS * 2
    tile = padded(codes + scales, _TILE_ALIGNMENT)
    matrix = _TILES_HEADER + padded(n_out, _TILE_ROWS) // _TILE_ROWS * tile
    return int(np.prod(outer, dtype=np.int64)) * matrix


def quantized_bytes(n_in: int) -> int:
    """Bytes of one token's activations as the kernels read them: int8, and a float scale for every 128."""
    return n_in + 4 * -(-n_in // 128)


def _activations(
    keys: _Keys, tensors: list[GGUFTensor], attention: tuple[Attention, ...], n_embd: int
) -> int:
    """Floats of one token at the widest point of the graph, as llama.cpp reuses its memory.

    A fit to what it allocates: three vectors each of the model's width and of the feed-forward part's;
    attention holds queries, keys and values twice; experts keep their outputs apart. docs/plan.md compares.
    """

    def widest(*kinds: str) -> int:
        endings = tuple(f".{kind}.weight" for kind in kinds)
        return max((tensor.shape[-2] for tensor in tensors if tensor.name.endswith(endings)), default=0)

    kv_width = max((layer.k_width + layer.v_width for layer in attention), default=0)
    widths = [3 * (n_embd + widest("ffn_up", "ffn_gate")), n_embd + 2 * widest("attn_q") + kv_width]
    used = keys.integer("expert_used_count", 0, least=0)
    if used:
        widths.append(5 * n_embd + 2 * used * max(n_embd, widest("ffn_up_exps", "ffn_gate_exps")))
    return max(widths)


def _delta_net(keys: _Keys, n_embd: int) -> int:
    """Floats of one token in a Gated DeltaNet: three vectors each of the model's width, the keys and the
    values."""
    key = keys.integer("ssm.group_count") * keys.integer("ssm.state_size")
    return 3 * (n_embd + key + keys.integer("ssm.inner_size"))


# ---- the sums ----


def fits_heads(model: Model, kv_type: str) -> bool:
    """Whether the blocks of a KV type divide the heads; llama.cpp refuses one that does not."""
    block, _ = KV_TYPES[kv_type]
    return all(width % block == 0 for layer in model.attention for width in layer.head_widths)


def plan(model: Model, context: int, kv_type: str = "f16", parallel: int | None = None) -> Plan:
    """What `model` takes in llama-server with --ctx-size `context`.

    Args:
        context: tokens in the KV cache, of all conversations together.
        kv_type: one of KV_TYPES.
        parallel: conversations at a time (--parallel), each with its share of the context; None: 4, which
            share all of it, as llama-server does by default.

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

    # The embedded tokens, and for every kind of attention its mask in fp16.
    masks = sum(cells_of(window) for window in {layer.window for layer in model.attention})
    inputs = n_tokens * (4 * model.n_embd + 2 * masks)
    state = 4 * n_seqs * sum(model.recurrent)
    # The states of one Gated DeltaNet are gathered, updated, and kept for the write back.
    delta_net = 4 * (n_tokens * model.delta_net + 3 * n_seqs * max(model.recurrent, default=0))
    activations = max(4 * n_tokens * model.activations, delta_net) + n_tokens * model.quantized
    logits = 4 * n_seqs * model.n_vocab
    return Plan(
        context=cells * streams,
        kv_type=kv_type,
        parallel=n_seqs,
        tiles=model.tiles,
        mapped=model.mapped,
        kv_cache=sum(cache(layer) for layer in model.attention if layer.window is None),
        window_cache=sum(cache(layer) for layer in model.attention if layer.window is not None),
        state=state,
        compute=inputs + activations + logits,
        process=_PROCESS_BYTES + _TOKEN_BYTES * model.n_vocab + _MERGE_BYTES * model.n_merges,
    )


def largest_context(model: Model, memory: int, kv_type: str = "f16", parallel: int | None = None) -> int:
    """The most tokens, up to those that the model was trained for, that fit into `memory` bytes; 0 for
    none."""
    step = CACHE_STEP * (parallel or 1)
    contexts = range(step, max(model.context, step) + 1, step)
    fitting = bisect.bisect_right(
        contexts, memory, key=lambda context: plan(model, context, kv_type, parallel).total
    )
    return contexts[fitting - 1] if fitting else 0


def trade_offs(model: Model, memory: int, parallel: int | None = None) -> dict[str, dict[str, int]]:
    """The largest context that fits into `memory` bytes: for `parallel` and for one conversation alone
    (`parallel_4_shared` stands for None, `parallel_1` for 1), by type of KV cache; 0 for none.

    Types whose blocks do not divide the heads are left out.
    """
    kv_types = [kv_type for kv_type in KV_TYPES if fits_heads(model, kv_type)]
    return {
        f"parallel_{n or f'{DEFAULT_PARALLEL}_shared'}": {
            kv_type: largest_context(model, memory, kv_type, n) for kv_type in kv_types
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


def as_json(model: Model, planned: Plan, memory: int | None, parallel: int | None) -> dict[str, Any]:
    """The plan as JSON can hold it: bytes, tokens. fits and largest_context are null without `memory`."""
    return {
        "file": str(model.path),
        "architecture": model.architecture,
        **asdict(planned),
        "total": planned.total,
        "memory": memory,
        "fits": None if memory is None else planned.total <= memory,
        "largest_context": None if memory is None else trade_offs(model, memory, parallel),
    }


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"


def print_plan(
    model: Model, planned: Plan, memory: int | None, parallel: int | None, console: Console
) -> None:
    """The plan as a table; with `memory`, whether it fits, and which contexts would."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False)

    sharing = "shared by" if parallel is None else "in equal parts for"
    conversations = "1 conversation" if planned.parallel == 1 else f"{planned.parallel} conversations"
    say(f"{model.path.name}: {model.architecture}" + (f", {model.name}" if model.name else ""))
    say(f"{planned.context:,} tokens of context {sharing} {conversations}\n")
    table = Table(box=None, padding=(0, 2, 0, 0), show_footer=True)
    table.add_column("", footer="total", no_wrap=True)
    table.add_column("MB", footer=megabytes(planned.total), justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, nbytes, what in _rows(model, planned):
        if nbytes:
            table.add_row(name, megabytes(nbytes), what)
    console.print(table)
    say("\nnot counted:")
    for note in not_counted(model):
        say(f"- {note}")
    if memory is not None:
        fits = planned.total <= memory
        verdict = f"{'fits' if fits else 'does not fit'} into {megabytes(memory)} MB"
        say(f"\n{verdict}; the largest contexts that do:", "green" if fits else "bold red")
        console.print(_context_table(trade_offs(model, memory, parallel)))


def _context_table(largest: dict[str, dict[str, int]]) -> Table:
    """Rows of conversations, columns of KV types."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for kv_type in next(iter(largest.values())):
        table.add_column(f"--kv {kv_type}", justify="right")
    for conversations, contexts in largest.items():
        shared = conversations.endswith("_shared")
        name = f"{DEFAULT_PARALLEL} conversations share" if shared else "--" + conversations.replace("_", " ")
        table.add_row(name, *(f"{context:,}" if context else "none" for context in contexts.values()))
    return table


def _rows(model: Model, planned: Plan) -> list[tuple[str, int, str]]:
    """Name, bytes and explanation of each part."""
    windows = Counter(layer.window for layer in model.attention)
    full = windows.pop(None, 0)
    cache = f"{full} layers in {planned.kv_type}: {planned.kv_cache / planned.context / 1024:.4g} KiB a token"
    sliding = ", ".join(f"{count} layers that look back {window:,}" for window, count in windows.items())
    recurrent = f"{len(model.recurrent)} layers: {megabytes(4 * sum(model.recurrent))} MB a conversation"
    return [
        ("ternary weights", planned.tiles, "in tiles: 2 bits and scales, whatever the type in the file"),
        ("other weights", planned.mapped, "mapped from the file"),
        ("KV cache", planned.kv_cache, cache),
        ("window KV cache", planned.window_cache, sliding),
        ("recurrent state", planned.state, recurrent),
        ("compute buffers", planned.compute, f"estimate, for {N_UBATCH} tokens at a time"),
        ("process", planned.process, f"estimate: the program, and {model.n_vocab:,} tokens"),
    ]
