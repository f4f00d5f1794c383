"""What the header of a GGUF file says that decides about memory: weights, heads, windows, states.

Sizes of ternary matrices are those of the plug-in's tiles, to the byte; how wide the graph gets is an
estimate, fitted to what llama.cpp allocates (docs/plan.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.keys import Keys
from ggml_tern.gguf.model_file import require_model
from ggml_tern.gguf.reader import GGUFSource, GGUFTensor
from ggml_tern.limits import MAX_EXPERTS, MAX_LAYERS, MAX_TOKENS, MAX_VOCABULARY
from ggml_tern.tensors.names import printable

#: Tokens that llama-server takes in one pass unless it is told otherwise.
N_UBATCH = 512

#: Architectures whose layers all attend to all of the context.
_FULL_ATTENTION = ("llama", "qwen2", "qwen3", "qwen3moe", "bitnet")
#: Architectures whose layers slide a window but for the last of every round, and the layers of a round.
_WINDOW_PATTERN = {"gemma3": 6}
#: Architectures with Gated DeltaNet layers, and how many layers make a round where the file does not say.
_HYBRID = ("qwen35", "qwen35moe", "qwen3next")
_HYBRID_INTERVAL = 4

# For how many nodes llama.cpp makes room in its graphs: by tensors, and at least so many; for hybrids by
# tensors and by the tokens of a pass.
_NODES_PER_TENSOR, _LEAST_NODES = 8, 1024
_HYBRID_NODES_PER_TENSOR, _HYBRID_NODES_PER_TOKEN = 32, 40

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

#: Heads of a layer, and values of a head.
MAX_HEADS = 1 << 14


@dataclass(frozen=True)
class Attention:
    """A layer with a KV cache: which one, elements of a key and of a value of one token, those of one head,
    and the tokens that it looks back on, None for all."""

    layer: int
    k_width: int
    v_width: int
    head_widths: tuple[int, int]
    window: int | None = None


#: Weights in a block of Q2_0, and its bytes: what ternary weights are on a GPU.
Q2_0_BLOCK, Q2_0_BYTES = 64, 18


@dataclass(frozen=True)
class Weights:
    """Bytes of ternary matrices as the plug-in holds them, in its fast layout and in its dense one; and of
    all others, which stay in the file. twins: bytes of the ternary ones on a GPU, as Q2_0."""

    tiles: int
    dense: int
    mapped: int
    twins: int


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


class UnknownMemoryError(TernError):
    """A model that may well run, of which nobody here knows what it takes."""


def read_model(path: Path) -> Model:
    """Read the header of a GGUF file; of a split model, any part stands for all.

    Raises TernError for what is no GGUF file of a language model, and UnknownMemoryError for an architecture
    whose memory is not known here.
    """
    return model_of(GGUFSource(path))


def model_of(source: GGUFSource) -> Model:
    """The same of a file that is open."""
    require_model(source)
    path, architecture = source.path, source.architecture
    assert architecture is not None
    known = (*_FULL_ATTENTION, *_WINDOW_PATTERN, *_HYBRID)
    if architecture not in known:
        raise UnknownMemoryError(
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
        heads=max(keys.per_layer("attention.head_count", n_layers, most=MAX_HEADS)),
        quantized=max((_core.column_bytes(t.n_in) for t in tensors if _is_tiled(t)), default=0),
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
    heads = keys.per_layer("attention.head_count", n_layers, most=MAX_HEADS)
    kv_heads = heads
    if keys.value("attention.head_count_kv") is not None:
        kv_heads = keys.per_layer("attention.head_count_kv", n_layers, most=MAX_HEADS)
    width = min(max(n_embd // max(heads[0], 1), 1), MAX_HEADS)
    k_head = keys.integer("attention.key_length", width, most=MAX_HEADS)
    v_head = keys.integer("attention.value_length", width, most=MAX_HEADS)
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
    count = int(np.prod(outer, dtype=np.int64))
    return count * _core.tiled_bytes(tensor.type, n_in, n_out, dense)


def held_bytes(tensor: GGUFTensor, dense: bool = False) -> int:
    """Bytes of any tensor in memory."""
    return tiled_bytes(tensor, dense) if _is_tiled(tensor) else tensor.data.nbytes


def _by_layer(tensors: list[GGUFTensor], n_layers: int) -> tuple[tuple[Weights, ...], Weights]:
    """The weights of each layer and of what is behind the last; and those that are only looked up."""
    is_tied = all(tensor.name != HEAD for tensor in tensors)
    tiles, dense, mapped, twins = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
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
            twins[layer] += int(np.prod(tensor.shape, dtype=np.int64)) // Q2_0_BLOCK * Q2_0_BYTES
        else:
            mapped[layer] += held_bytes(tensor)
    layers = range(-1, n_layers + 1)
    embedding, *weights = (
        Weights(tiles[layer], dense[layer], mapped[layer], twins[layer]) for layer in layers
    )
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
