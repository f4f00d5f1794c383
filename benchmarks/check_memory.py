"""How much memory ternconv takes for a model of 27 billion parameters: a synthetic checkpoint in BF16.

    python benchmarks/check_memory.py               # 4 and 8 layers of 64, and what follows for all
    python benchmarks/check_memory.py --layers 64   # the whole of it: 54 GB on the disk, removed afterwards

The checkpoint has the shape of Qwen3.5 27B (5120 wide, 64 layers, vocabulary 248320, head of its own) in
shards of a layer each, ternary with a scale for every 128 weights, and the vocabulary that llama.cpp's
source brings for Qwen3.5. Layers of one kind hold the same weights, so that writing takes no longer than the
disk does.
Printed: peak anonymous and resident memory, time, and what `tern verify` says with --verify.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from bench_convert import Converter, write_bfloat16_file
from benchmarking import ROOT
from ggml_tern import _core
from ggml_tern.convert.model.architectures import Role, TensorSpec
from ggml_tern.convert.model.architectures.qwen35 import Qwen35
from ggml_tern.convert.read.config import Config

sys.path.insert(0, str(ROOT / "tools"))
from make_synthetic import cache_dir

#: The pre-tokenizer of Qwen3.5, as it stands in its tokenizer.json.
QWEN35_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": layers,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    }


def ternary(shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.uint16]:
    """BF16 bits of random ternary weights with a scale for every 128."""
    n_rows, n_in = int(np.prod(shape[:-1])), shape[-1]
    scales = rng.integers(0x3C00, 0x3C80, (n_rows, n_in // 128, 1), np.uint16)
    codes = rng.integers(0, 3, (n_rows, n_in // 128, 128), np.uint8)
    bits = np.where(codes == 0, np.uint16(0), scales | (codes == 2).astype(np.uint16) << np.uint16(15))
    return bits.reshape(shape)


def values_of(spec: TensorSpec, rng: np.random.Generator) -> npt.NDArray[np.uint16]:
    shape = spec.source_shape or spec.shape
    if spec.role is not Role.VECTOR:
        return ternary(shape, rng)
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def write_checkpoint(directory: Path, layers: int) -> None:
    rng = np.random.default_rng(0)
    values = config(layers)
    (directory / "config.json").write_text(json.dumps(values))
    shards: dict[str, list[TensorSpec]] = {}
    for spec in Qwen35(Config(values, "config.json")).tensors():
        (source,) = spec.sources
        parts = source.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else source, []).append(spec)
    weight_map: dict[str, str] = {}
    layer_of_kind: dict[tuple[str, ...], list[npt.NDArray[np.uint16]]] = {}
    for number, (shard, specs) in enumerate(shards.items(), start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        kind = tuple(spec.sources[0].removeprefix(f"model.layers.{shard}.") for spec in specs)
        tensors = layer_of_kind.get(kind) or [values_of(spec, rng) for spec in specs]
        if shard.isdigit():
            layer_of_kind[kind] = tensors
        named = {spec.sources[0]: tensor for spec, tensor in zip(specs, tensors, strict=True)}
        write_bfloat16_file(directory / name, named)
        weight_map |= dict.fromkeys(named, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_tokenizer(directory: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "build_llama_cpp.py"), "fetch", "--json"]
    source = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["source"]
    fields = _core.read_gguf_header(Path(source) / "models" / "ggml-vocab-qwen35.gguf")["metadata"]
    texts, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    ids = {text: token for token, text in enumerate(texts) if not text.startswith("[PAD")}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    split = pre_tokenizers.Split(Regex(QWEN35_REGEX), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    special = [text for token, text in enumerate(texts) if types[token] == 3 and text in ids]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))


@click.command(help=__doc__.split("\n")[0])
@click.option("--layers", type=click.IntRange(4, 64), multiple=True, default=(4, 8), show_default=True)
@click.option("--verify", is_flag=True, help="Run `tern verify` on the result too.")
def main(layers: tuple[int, ...], verify: bool) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("layers", "checkpoint GB", "file GB", "wall s", "peak anonymous MB", "peak resident MB"):
        table.add_column(title, justify="right")
    scripts = Path(sys.executable).parent
    for count in layers:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="memory-") as folder:
            model, output = Path(folder) / "model", Path(folder) / "out.gguf"
            model.mkdir()
            write_tokenizer(model)
            write_checkpoint(model, count)
            size = sum(path.stat().st_size for path in model.iterdir())
            run = Converter("ternconv", [scripts / "ternconv", "--lossless", str(model), str(output)], output)
            run.run()
            table.add_row(
                str(count),
                f"{size / 1e9:.2f}",
                f"{output.stat().st_size / 1e9:.2f}",
                f"{run.wall[0]:.0f}",
                f"{run.anonymous[0] / 1e6:.0f}",
                f"{run.resident[0] / 1e6:.0f}",
            )
            if verify:
                done = subprocess.run(
                    [scripts / "tern", "verify", model, output], stdout=subprocess.PIPE, text=True, check=True
                )
                console.print(f"{count} layers: {done.stdout.strip().splitlines()[-1]}")
            shutil.rmtree(model)
    console.print(table)


if __name__ == "__main__":
    main()
