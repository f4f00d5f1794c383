"""Convert one checkpoint with ternconv and with llama.cpp's own converter, and compare time, memory, result.

    python benchmarks/bench_convert.py                    # a table, and docs/benchmarks/DATE-convert.md
    python benchmarks/bench_convert.py --layers 28        # a smaller model

The checkpoint is a Qwen3 with ternary weights in BF16 (tools/make_synthetic.py's, with the tokenizer of
SmolLM2), written once into the cache. Both converters make TQ1_0 of it, with the embedding in F16, in turn.
The peer is convert_hf_to_gguf.py of the pinned llama.cpp, which needs torch and transformers. Memory is
sampled from /proc while they run: anonymous memory, which is what a machine must have, and resident memory,
which counts the mapped files too.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from safetensors import TensorSpec, serialize_file

import ggml_tern
from benchmarking import ROOT, memory_of_tree
from ggml_tern.gguf.reader import GGUFSource

sys.path.insert(0, str(ROOT / "tools"))
import make_synthetic as synthetic

#: GGUF name -> name in the checkpoint, `N` for the block.
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm.weight": "model.layers.N.input_layernorm.weight",
    "attn_q.weight": "model.layers.N.self_attn.q_proj.weight",
    "attn_k.weight": "model.layers.N.self_attn.k_proj.weight",
    "attn_v.weight": "model.layers.N.self_attn.v_proj.weight",
    "attn_q_norm.weight": "model.layers.N.self_attn.q_norm.weight",
    "attn_k_norm.weight": "model.layers.N.self_attn.k_norm.weight",
    "attn_output.weight": "model.layers.N.self_attn.o_proj.weight",
    "ffn_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "ffn_gate.weight": "model.layers.N.mlp.gate_proj.weight",
    "ffn_up.weight": "model.layers.N.mlp.up_proj.weight",
    "ffn_down.weight": "model.layers.N.mlp.down_proj.weight",
}

#: Weights in one shard, about.
SHARD = 1 << 29


@dataclass
class Converter:
    """One command, and what its runs took: seconds, and peaks in bytes."""

    name: str
    command: list[str | Path]
    output: Path
    wall: list[float] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    def run(self) -> None:
        self.output.unlink(missing_ok=True)
        began = time.monotonic()
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        anonymous = resident = 0
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        said = b""
        while process.poll() is None:
            said += process.stdout.read() or b""
            now = memory_of_tree(process.pid)
            anonymous, resident = max(anonymous, now[0]), max(resident, now[1])
            time.sleep(0.005)
        if process.returncode != 0:
            said += process.stdout.read() or b""
            raise click.ClickException(f"{self.name} failed:\n{said.decode(errors='replace')}")
        self.wall.append(time.monotonic() - began)
        self.anonymous.append(anonymous)
        self.resident.append(resident)


def bfloat16_bits(tensor: synthetic.Tensor) -> npt.NDArray[np.uint16]:
    """The weights in BF16. The one scale of a matrix is rounded to it, and then exact in fp16 too."""
    if tensor.n_out == 0:
        values = synthetic.norm_of(tensor, 0)
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    scale = np.uint16(np.float32(synthetic.scale_of(tensor)).view(np.uint32) >> np.uint32(16))
    table = np.array([scale | np.uint16(0x8000), 0, scale], np.uint16)
    bits: npt.NDArray[np.uint16] = table[synthetic.trits_of(tensor, 0) + np.int8(1)]
    return bits


def checkpoint(shape: synthetic.Shape) -> Path:
    """The cached model directory, written if it is not there yet."""
    directory = synthetic.cache_dir() / "hf" / f"qwen3-synthetic-{shape.layers}-layers"
    if directory.exists():
        return directory
    command = [sys.executable, str(ROOT / "tools" / "make_hf_dir.py"), "smollm2-135m"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    tokenizer = Path(done.stdout.strip().splitlines()[-1])
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, partial / name)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shards = list(shards_of(shape))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_bfloat16_file(partial / name, {hf_name(tensor): bfloat16_bits(tensor) for tensor in tensors})
        weight_map |= {hf_name(tensor): name for tensor in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    os.rename(partial, directory)
    return directory


def shards_of(shape: synthetic.Shape) -> Iterator[list[synthetic.Tensor]]:
    shard: list[synthetic.Tensor] = []
    for tensor in synthetic.tensors(shape):
        shard.append(tensor)
        if sum(t.n_in * max(1, t.n_out) for t in shard) >= SHARD:
            yield shard
            shard = []
    if shard:
        yield shard


def hf_name(tensor: synthetic.Tensor) -> str:
    if not tensor.name.startswith("blk."):
        return HF_NAMES[tensor.name]
    _, block, name = tensor.name.split(".", 2)
    return HF_NAMES[name].replace("N", block, 1)


def write_bfloat16_file(path: Path, tensors: dict[str, npt.NDArray[np.uint16]]) -> None:
    """BF16 bits as a safetensors file."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    serialize_file(
        {
            name: TensorSpec(dtype="bfloat16", shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
            for name, a in arrays.items()
        },
        str(path),
    )


def same_values(one: Path, other: Path) -> bool:
    """Whether two files have the same tensors with the same values."""
    first, second = GGUFSource(one), GGUFSource(other)
    return first.tensors.keys() == second.tensors.keys() and all(
        np.array_equal(tensor.rows[:], second.tensors[name].rows[:]) for name, tensor in first.tensors.items()
    )


def table(converters: list[Converter]) -> str:
    """A Markdown table of medians; ratios are to the first."""
    lines = [
        "| | wall s | faster | peak anonymous MB | share | peak resident MB | file MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    base = converters[0]
    for c in converters:
        wall, anonymous = statistics.median(c.wall), statistics.median(c.anonymous)
        lines.append(
            f"| {c.name} | {wall:.1f} | {statistics.median(base.wall) / wall:.1f}x | {anonymous / 1e6:.0f} "
            f"| {anonymous / statistics.median(base.anonymous):.2f} "
            f"| {statistics.median(c.resident) / 1e6:.0f} | {c.output.stat().st_size / 1e6:.0f} |"
        )
    return "\n".join(lines)


@click.command(help=__doc__.split("\n")[0])
@click.option("--layers", type=click.IntRange(1), default=112, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "docs" / "benchmarks",
    help="The folder for the table.  [default: docs/benchmarks]",
)
def main(layers: int, rounds: int, out: Path) -> None:
    shape = synthetic.Shape(layers=layers)
    model = checkpoint(shape)
    weights = sum(tensor.n_in * max(1, tensor.n_out) for tensor in synthetic.tensors(shape))
    fetch = [sys.executable, str(ROOT / "tools" / "build_llama_cpp.py"), "fetch", "--json"]
    source = Path(json.loads(subprocess.run(fetch, stdout=subprocess.PIPE, check=True).stdout)["source"])
    scratch = synthetic.cache_dir() / "scratch"
    scratch.mkdir(exist_ok=True)
    ternconv = str(Path(sys.executable).parent / "ternconv")
    script = source / "convert_hf_to_gguf.py"
    theirs, ours, smallest = scratch / "theirs.gguf", scratch / "ours.gguf", scratch / "ptq1_0.gguf"
    converters = [
        Converter(
            "convert_hf_to_gguf.py --outtype tq1_0",
            [
                sys.executable,
                script,
                "--outtype",
                "tq1_0",
                "--outfile",
                theirs,
                model,
            ],
            theirs,
        ),
        Converter(
            "ternconv --type tq1_0 --embed f16",
            [ternconv, "--force", "--type", "tq1_0", "--embed", "f16", str(model), ours],
            ours,
        ),
        Converter(
            "ternconv --type ptq1_0 (embedding ternary too)",
            [ternconv, "--force", "--type", "ptq1_0", str(model), smallest],
            smallest,
        ),
    ]
    load = os.getloadavg()[0]
    console = Console()
    for _ in range(rounds):
        for converter in converters:
            converter.run()
            console.print(f"{converter.name}: {converter.wall[-1]:.1f} s", highlight=False)
    text = table(converters)
    verdict = "the same" if same_values(theirs, ours) else "DIFFERENT"
    text += f"\n\nThe first two files hold {verdict} values in every tensor."
    console.print(text, markup=False, highlight=False)
    now = datetime.datetime.now(datetime.UTC)
    path = out / f"{now:%Y-%m-%d}-convert.md"
    path.write_text(
        f"# ternconv and convert_hf_to_gguf.py, {now:%Y-%m-%d}\n\n"
        f"A ternary Qwen3 of {weights / 1e9:.2f} G parameters in BF16 ({layers} layers), {rounds} rounds in\n"
        "turn, medians. Written by `benchmarks/bench_convert.py`.\n\n"
        f"- {os.cpu_count()} processors, load average at the start {load:.2f}\n"
        f"- ggml-tern {ggml_tern.__version__}\n\n{text}\n",
        encoding="utf-8",
    )
    console.print(f"written to {path}", markup=False, highlight=False)
    for converter in converters:
        converter.output.unlink()


if __name__ == "__main__":
    main()
