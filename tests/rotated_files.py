"""Small rotated models, each with its twin: a plain file with the float weights that the rotated ones mean.

A model is drawn at random in the rotated basis, so that its weights are ternary there without loss. The
contract of rotated files (the prism.hadamard.* keys) is computed here in plain numpy from its own formulas.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGUFValueType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from reference import formats as ref
from reference import gguf_files

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]

PREFIX = "prism.hadamard."
TRANSFORM = "normalized-sylvester-walsh-hadamard"
AXIS = "input-last-dimension"


# ---- the contract ----


@cache
def hadamard(block: int) -> F64:
    """H[r][c] = (-1)^popcount(r & c) / sqrt(block), float64 [block, block]."""
    index = np.arange(block)
    odd = np.bitwise_count(index[:, None] & index) % 2
    matrix: F64 = (1.0 - 2.0 * odd) / np.sqrt(block)
    return matrix


@dataclass(frozen=True)
class Rotation:
    """The rotation of one weight of n_in inputs: y = W_stored . H(s * P(x)).

    signs: s, int8 [n_in] of -1 and +1, or None for ones. v_heads: (n_k, n_v) where P takes the activation of
    ssm_out from llama.cpp's order of value heads to the checkpoint's; None where P is the identity.
    """

    n_in: int
    block: int
    signs: I8 | None = None
    v_heads: tuple[int, int] | None = None

    def _transformed(self, x: npt.NDArray[Any]) -> F64:
        # One product: numpy would take every row for a matrix of its own.
        blocks = x.astype(np.float64).reshape(-1, self.block)
        transformed: F64 = (blocks @ hadamard(self.block)).reshape(x.shape)
        return transformed

    def _signed(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return x if self.signs is None else x * self.signs

    def rotate(self, x: F32) -> F32:
        """H(s * P(x)) of the rows of x, [..., n_in]; of plain weights, their stored form."""
        if self.v_heads is not None:
            n_k, n_v = self.v_heads
            # ggml's [head, n_k, repeat], the first running fastest, to [head, repeat, n_k].
            x = x.reshape(*x.shape[:-1], n_v // n_k, n_k, -1).swapaxes(-3, -2).reshape(x.shape)
        return self._transformed(self._signed(x)).astype(np.float32)

    def unrotate(self, z: F32) -> F32:
        """P^-1(s * H(z)) of the rows of z, [..., n_in]: the plain weights that stored ones stand for."""
        x = self._signed(self._transformed(z))
        if self.v_heads is not None:
            n_k, n_v = self.v_heads
            x = x.reshape(*x.shape[:-1], n_k, n_v // n_k, -1).swapaxes(-3, -2).reshape(x.shape)
        return x.astype(np.float32)


def random_signs(rng: np.random.Generator, n_in: int) -> I8:
    """int8 [n_in] of -1 and +1."""
    return (2 * rng.integers(0, 2, n_in) - 1).astype(np.int8)


# ---- files ----


class Key(NamedTuple):
    """A metadata value with its type in the file; element: that of an array's values."""

    kind: Kind
    value: Any
    element: Kind | None = None


def u32(value: int) -> Key:
    return Key(Kind.UINT32, value)


def f32(value: float) -> Key:
    return Key(Kind.FLOAT32, value)


def text(value: str) -> Key:
    return Key(Kind.STRING, value)


def boolean(value: bool) -> Key:
    return Key(Kind.BOOL, value)


def array(element: Kind, values: Sequence[Any]) -> Key:
    return Key(Kind.ARRAY, list(values), element)


def texts(values: Sequence[str]) -> Key:
    return array(Kind.STRING, values)


class _Writer(gguf.GGUFWriter):
    """gguf-py's writer, which refuses empty arrays."""

    def _pack_val(self, val: Any, vtype: Kind, add_vtype: bool, sub_type: Kind | None = None) -> bytes:
        if vtype == Kind.ARRAY and len(val) == 0:
            assert add_vtype and sub_type is not None
            return struct.pack("<IIQ", vtype, sub_type, 0)
        packed: bytes = super()._pack_val(val, vtype, add_vtype, sub_type)
        return packed


def write(path: Path, keys: dict[str, Key], tensors: Sequence[gguf_files.Tensor]) -> Path:
    """A GGUF file with these keys and tensors, in their order."""
    writer = _Writer(None, keys["general.architecture"].value)
    for name, key in keys.items():
        if name != "general.architecture":
            writer.add_key_value(name, key.value, key.kind, sub_type=key.element)
    for tensor in tensors:
        # With a type that is not uint8, gguf-py takes any id and the shape as counted in weights.
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            len(tensor.data),
            raw_dtype=tensor.type_id,  # type: ignore[arg-type]
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            file.write(tensor.data)
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
    return path


# ---- models ----


@dataclass
class RotatedModel:
    """A model in both forms. `stored` and `keys` are the rotated file, to be changed at will before it is
    written; `plain` has every tensor as the floats that it stands for."""

    keys: dict[str, Key]
    stored: dict[str, gguf_files.Tensor] = field(default_factory=dict)
    plain: dict[str, F32] = field(default_factory=dict)
    rotations: dict[str, Rotation] = field(default_factory=dict)

    def _plain_keys(self) -> dict[str, Key]:
        return {name: key for name, key in self.keys.items() if not name.startswith(PREFIX)}

    def write(self, path: Path) -> Path:
        """The rotated file."""
        return write(path, self.keys, list(self.stored.values()))

    def write_twin(self, path: Path) -> Path:
        """The plain file: all tensors in float32, no word of a rotation."""
        tensors = [gguf_files.plain(name, 0, values) for name, values in self.plain.items()]
        return write(path, self._plain_keys(), tensors)

    def write_stripped(self, path: Path) -> Path:
        """The rotated weights without the keys that say so: a valid file of another model, which talks
        nonsense."""
        return write(path, self._plain_keys(), list(self.stored.values()))


@dataclass(frozen=True)
class Recipe:
    """What to make. Widths are multiples of the block.

    tied: version 2, where the rotated embedding is the head too. inverse: a rotated embedding; else it is
    float16. unfolded: kinds of matrices that are ternary in the plain basis. grouped: gdn_v_grouped. formats:
    the matrices take them in turns.
    """

    arch: str
    block: int = 128
    explicit_signs: bool = True
    tied: bool = False
    inverse: bool = True
    unfolded: tuple[str, ...] = ()
    grouped: bool = True
    formats: tuple[ref.Format, ...] = (ref.PTQ1_0, ref.PQ2_0)
    width: int = 256
    ffn: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 4
    experts_used: int = 3
    fused: bool = False  # gate and up of the experts in one tensor
    # Gated DeltaNet: three value heads to each of two key heads.
    n_k: int = 2
    n_v: int = 6
    state: int = 128

    @property
    def is_hybrid(self) -> bool:
        """Whether every other layer is a Gated DeltaNet."""
        return self.arch in ("qwen35", "qwen35moe", "qwen3next")

    @property
    def has_experts(self) -> bool:
        return self.arch in ("qwen3moe", "qwen35moe", "qwen3next")


#: Every architecture that the contract knows, in all the ways that it can be rotated.
RECIPES = {
    "llama": Recipe("llama", explicit_signs=False),
    "llama, in part": Recipe(
        "llama", block=512, width=512, head_dim=128, inverse=False, unfolded=("attn_k", "ffn_up")
    ),
    "llama, small blocks": Recipe("llama", block=32, formats=(ref.PTQ1_0,)),
    "qwen3": Recipe("qwen3"),
    "qwen3, tied": Recipe("qwen3", block=256, tied=True),
    "qwen3, q2_0": Recipe("qwen3", formats=(ref.Q2_0,)),
    "qwen35": Recipe("qwen35", block=256, head_dim=128, heads=2, kv_heads=1),
    "qwen35, not grouped": Recipe("qwen35", grouped=False, head_dim=128, heads=2, kv_heads=1),
    "qwen3moe": Recipe("qwen3moe", ffn=256),
    "qwen3moe, identity": Recipe("qwen3moe", block=256, explicit_signs=False, tied=True, ffn=256),
    "qwen35moe": Recipe("qwen35moe", head_dim=128, heads=2, kv_heads=1, ffn=256),
    "qwen3next": Recipe("qwen3next", block=256, head_dim=128, heads=2, kv_heads=1, ffn=256, fused=True),
}

N_BYTES, N_PAIRS = 256, 256
#: Tokens: every byte, pairs of letters, and three control tokens. Odd, as a vocabulary may be.
N_VOCABULARY = N_BYTES + N_PAIRS + 3
#: The standard deviation of the logits.
LOGITS = 1.5


def tokenizer_keys() -> dict[str, Key]:
    """A byte-level tokenizer."""
    letters = "etaoinshrdlucmfw"
    pairs = [(a, b) for a in letters for b in letters]
    tokens = [*sorted(ByteLevel.alphabet()), *(a + b for a, b in pairs), "<s>", "</s>", "<pad>"]
    normal, control = 1, 3
    return {
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text("smollm"),
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.token_type": array(Kind.INT32, [normal] * (N_VOCABULARY - 3) + [control] * 3),
        "tokenizer.ggml.merges": texts([f"{a} {b}" for a, b in pairs]),
        "tokenizer.ggml.bos_token_id": u32(N_VOCABULARY - 3),
        "tokenizer.ggml.eos_token_id": u32(N_VOCABULARY - 2),
        "tokenizer.ggml.add_bos_token": boolean(False),
    }


def model_keys(recipe: Recipe) -> dict[str, Key]:
    """All keys but those of the rotation."""
    head = recipe.arch + "."
    keys = {
        "general.architecture": text(recipe.arch),
        head + "context_length": u32(2048),
        head + "block_count": u32(recipe.layers),
        head + "embedding_length": u32(recipe.width),
        head + "feed_forward_length": u32(recipe.ffn),
        head + "attention.head_count": u32(recipe.heads),
        head + "attention.head_count_kv": u32(recipe.kv_heads),
        head + "attention.key_length": u32(recipe.head_dim),
        head + "attention.value_length": u32(recipe.head_dim),
        head + "attention.layer_norm_rms_epsilon": f32(1e-6),
        head + "rope.freq_base": f32(10000.0),
    }
    if recipe.has_experts:
        keys[head + "expert_count"] = u32(recipe.experts)
        keys[head + "expert_used_count"] = u32(recipe.experts_used)
        keys[head + "expert_feed_forward_length"] = u32(recipe.ffn)
    if recipe.is_hybrid:
        if recipe.has_experts:
            keys[head + "expert_shared_feed_forward_length"] = u32(recipe.ffn)
        keys[head + "rope.dimension_count"] = u32(recipe.head_dim // 4)
        keys[head + "rope.dimension_sections"] = array(Kind.INT32, [6, 5, 5, 0])
        keys[head + "full_attention_interval"] = u32(2)
        keys[head + "ssm.conv_kernel"] = u32(4)
        keys[head + "ssm.state_size"] = u32(recipe.state)
        keys[head + "ssm.group_count"] = u32(recipe.n_k)
        keys[head + "ssm.time_step_rank"] = u32(recipe.n_v)
        keys[head + "ssm.inner_size"] = u32(recipe.n_v * recipe.state)
    return keys | tokenizer_keys()


class _Maker:
    """Draws the tensors of one model. No branch is much louder than the token itself, so that rounding errors
    fade instead of growing from layer to layer."""

    def __init__(self, recipe: Recipe, rng: np.random.Generator) -> None:
        self.recipe, self.rng = recipe, rng
        self.model = RotatedModel(model_keys(recipe))
        self.signs: dict[int, I8] = {}
        self.n_matrices = 0

    def rotation(self, name: str, n_in: int) -> Rotation:
        recipe = self.recipe
        signs = None
        if recipe.explicit_signs:
            if n_in not in self.signs:
                self.signs[n_in] = random_signs(self.rng, n_in)
            signs = self.signs[n_in]
        grouped = recipe.grouped and "ssm_out" in name
        return Rotation(n_in, recipe.block, signs, (recipe.n_k, recipe.n_v) if grouped else None)

    def float_tensor(self, name: str, values: npt.NDArray[Any]) -> None:
        values = values.astype(np.float32)
        self.model.plain[name] = values
        self.model.stored[name] = gguf_files.plain(name, 0, values)

    def norm(self, name: str, n: int, gain: float = 1.0) -> None:
        self.float_tensor(name, gain * self.rng.uniform(0.8, 1.2, n))

    def trits(self, shape: tuple[int, ...]) -> I8:
        return self.rng.integers(-1, 2, shape, np.int8)

    def matrix(self, name: str, shape: tuple[int, ...], gain: float = 1.0, trits: I8 | None = None) -> None:
        """A ternary tensor, rotated unless the recipe says otherwise. gain: the standard deviation of its
        outputs for inputs of unit variance."""
        trits = self.trits(shape) if trits is None else trits
        fmt = self.recipe.formats[self.n_matrices % len(self.recipe.formats)]
        self.n_matrices += 1
        n_in = shape[-1]
        # Scales that differ from group to group; the variance of a trit is 2/3.
        scales = (
            gain * np.sqrt(1.5 / n_in) * self.rng.uniform(0.7, 1.3, (trits.size // n_in, n_in // fmt.block))
        )
        scales = scales.astype(np.float16).astype(np.float32)
        self.model.stored[name] = gguf_files.ternary(name, fmt, trits, scales)
        values = trits.astype(np.float32) * np.repeat(scales, fmt.block, axis=1).reshape(shape)
        if not any(f".{kind}." in name for kind in self.recipe.unfolded):
            rotation = self.model.rotations[name] = self.rotation(name, n_in)
            values = rotation.unrotate(values)
        self.model.plain[name] = values

    def embedding(self) -> None:
        shape = (N_VOCABULARY, self.recipe.width)
        if self.recipe.inverse:
            self.matrix("token_embd.weight", shape, np.sqrt(self.recipe.width))
            return
        values = self.rng.standard_normal(shape).astype(np.float16)
        self.model.stored["token_embd.weight"] = gguf_files.plain("token_embd.weight", 1, values)
        self.model.plain["token_embd.weight"] = values.astype(np.float32)

    def attention(self, block: str) -> None:
        recipe = self.recipe
        n_q, n_kv = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
        # In hybrids every query is followed by the gate of its head.
        self.matrix(f"{block}.attn_q.weight", (n_q * (2 if recipe.is_hybrid else 1), recipe.width))
        self.matrix(f"{block}.attn_k.weight", (n_kv, recipe.width))
        self.matrix(f"{block}.attn_v.weight", (n_kv, recipe.width))
        if recipe.arch != "llama":
            self.norm(f"{block}.attn_q_norm.weight", recipe.head_dim, 1.3)
            self.norm(f"{block}.attn_k_norm.weight", recipe.head_dim, 1.3)
        self.matrix(f"{block}.attn_output.weight", (recipe.width, n_q), 0.7)

    def delta_net(self, block: str) -> None:
        recipe = self.recipe
        n_key, n_value = recipe.n_k * recipe.state, recipe.n_v * recipe.state
        trits = self.trits((2 * n_key + n_value, recipe.width))
        kernels = self.rng.standard_normal((len(trits), 4)) / 2
        # Keys that resemble queries, as trained ones do: what a Gated DeltaNet computes is normalized, and
        # where a key is at right angles to the query only rounding would be left.
        alike = self.rng.random((n_key, recipe.width)) < 0.8
        trits[n_key : 2 * n_key][alike] = trits[:n_key][alike]
        kernels[n_key : 2 * n_key] = kernels[:n_key] + 0.1 * kernels[n_key : 2 * n_key]
        self.matrix(f"{block}.attn_qkv.weight", trits.shape, trits=trits)
        self.matrix(f"{block}.attn_gate.weight", (n_value, recipe.width))
        self.float_tensor(f"{block}.ssm_conv1d.weight", kernels)
        self.float_tensor(f"{block}.ssm_dt.bias", self.rng.standard_normal(recipe.n_v))
        self.float_tensor(f"{block}.ssm_a", -np.exp(self.rng.standard_normal(recipe.n_v) - 1))
        alpha_beta = self.rng.standard_normal((2 * recipe.n_v, recipe.width)) / np.sqrt(recipe.width)
        if recipe.arch == "qwen3next":
            self.float_tensor(f"{block}.ssm_ba.weight", alpha_beta)
        else:
            for kind, weights in zip(("ssm_alpha", "ssm_beta"), np.split(alpha_beta, 2), strict=True):
                self.float_tensor(f"{block}.{kind}.weight", weights)
        self.norm(f"{block}.ssm_norm.weight", recipe.state)
        self.matrix(f"{block}.ssm_out.weight", (recipe.width, n_value), 0.7)

    def feed_forward(self, block: str) -> None:
        recipe = self.recipe
        if not recipe.has_experts:
            self.gated(block)
            return
        # A router that knows what it wants: between experts as good as each other, rounding would decide.
        router = 5 * self.rng.standard_normal((recipe.experts, recipe.width)) / np.sqrt(recipe.width)
        self.float_tensor(f"{block}.ffn_gate_inp.weight", router)
        self.gated(block, "_exps", (recipe.experts,))
        if recipe.is_hybrid:
            gate = self.rng.standard_normal(recipe.width) / np.sqrt(recipe.width)
            self.float_tensor(f"{block}.ffn_gate_inp_shexp.weight", gate)
            self.gated(block, "_shexp")

    def gated(self, block: str, suffix: str = "", experts: tuple[int, ...] = ()) -> None:
        """Gate, up and down, or as many of them as there are experts."""
        recipe = self.recipe
        if experts and recipe.fused:
            self.matrix(f"{block}.ffn_gate_up{suffix}.weight", (*experts, 2 * recipe.ffn, recipe.width))
        else:
            for kind in ("gate", "up"):
                self.matrix(f"{block}.ffn_{kind}{suffix}.weight", (*experts, recipe.ffn, recipe.width))
        self.matrix(f"{block}.ffn_down{suffix}.weight", (*experts, recipe.width, recipe.ffn), 0.9)

    def make(self) -> RotatedModel:
        recipe, width = self.recipe, self.recipe.width
        self.embedding()
        for layer in range(recipe.layers):
            block = f"blk.{layer}"
            self.norm(f"{block}.attn_norm.weight", width)
            if recipe.is_hybrid and layer % 2 == 0:
                self.delta_net(block)
            else:
                self.attention(block)
            second_norm = "post_attention_norm" if recipe.is_hybrid else "ffn_norm"
            self.norm(f"{block}.{second_norm}.weight", width)
            self.feed_forward(block)
        # Logits that are neither flat nor certain. Random signs keep a tied head from naming the input token.
        self.norm("output_norm.weight", width)
        if recipe.tied:
            values = self.model.plain["output_norm.weight"] * random_signs(self.rng, width)
            self.float_tensor("output_norm.weight", values * LOGITS / np.sqrt(width))
        else:
            self.matrix("output.weight", (N_VOCABULARY, width), LOGITS)
        self.model.keys |= self.rotation_keys()
        return self.model

    def rotation_keys(self) -> dict[str, Key]:
        recipe = self.recipe
        folded = [name for name in self.model.rotations if name != "token_embd.weight"]
        keys = {
            "version": u32(2 if recipe.tied else 1),
            "block_size": u32(recipe.block),
            "transform": text(TRANSFORM),
            "axis": text(AXIS),
            "sign_mode": text("explicit" if recipe.explicit_signs else "identity"),
            "weight_names": texts(folded),
        }
        if recipe.explicit_signs:
            keys["sign_widths"] = array(Kind.INT32, list(self.signs))
            keys["sign_values"] = array(Kind.INT8, np.concatenate(list(self.signs.values())).tolist())
        if recipe.inverse:
            keys["inverse_weight_names"] = texts(["token_embd.weight"])
        if recipe.tied:
            keys["tied_output"] = boolean(True)
        if recipe.is_hybrid:
            keys["gdn_v_grouped"] = boolean(recipe.grouped)
        return {PREFIX + name: key for name, key in keys.items()}


def make(recipe: Recipe, rng: np.random.Generator) -> RotatedModel:
    """A random model made after the recipe."""
    return _Maker(recipe, rng).make()


# ---- adapters ----


def write_lora(path: Path, model: RotatedModel, rng: np.random.Generator) -> Path:
    """An adapter of every rotated weight, experts too, whose effect is as large as the weights'. (Not of a
    table that is the head too: llama.cpp wants its factors in two orders at once.)"""
    arch = model.keys["general.architecture"].value
    keys = {
        "general.architecture": text(arch),
        "general.type": text("adapter"),
        "adapter.type": text("lora"),
        "adapter.lora.alpha": f32(4.0),
    }
    tensors = []
    rank = 4
    for name in model.rotations:
        if name == "token_embd.weight" and "output.weight" not in model.plain:
            continue
        *experts, n_out, n_in = model.plain[name].shape
        if name == "token_embd.weight":
            # llama.cpp looks up a column of lora_a for each token, and multiplies with lora_b.
            a, b = rng.standard_normal((n_out, rank)), rng.standard_normal((n_in, rank)) / 4
        else:
            a = rng.standard_normal((*experts, rank, n_in)) / np.sqrt(n_in)
            b = rng.standard_normal((*experts, n_out, rank)) / 4
        for factor, values in (("lora_a", a), ("lora_b", b)):
            tensors.append(gguf_files.plain(f"{name}.{factor}", 0, values.astype(np.float32)))
    return write(path, keys, tensors)
