"""Check a model shaped like the released 27B in stock llama.cpp: its first four layers, and its whole header.

    python benchmarks/check_27b.py                # serve four layers, compare their logits with torch
    python benchmarks/check_27b.py --full-header  # load all 64 layers dry, and plan the memory for them

The four layers (three of Gated DeltaNet, one of attention; tools/make_synthetic.py) have the keys, names,
shapes and types of the released file, random ternary weights and a rotation with random signs. The stock
llama-server with the plug-in answers a request, and llama-cpp-python computes logits at every position of a
text. They are compared with transformers in float32 on plain weights, which are turned back with a dense
Hadamard matrix, layer by layer. The control is the same file without its prism.hadamard.* keys: what comes
out when the rotation is ignored.

Exits with 1 where the mean KL divergence is above 1e-3, or that of the control below 0.1.
"""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from benchmarking import ROOT
from compare_logits import Agreement, Serving, compare, entropy, host_logits
from ggml_tern import _core
from ggml_tern.errors import TernError

sys.path.insert(0, str(ROOT / "tools"))
import demo
from make_synthetic import CHUNK, EMBEDDING, HEAD, cached_synthetic, with_layers, write_header_only

MODEL, LAYERS, BLOCK = "qwen35-27b", 4, 1024
MAX_KL, MIN_KL_OF_CONTROL = 1e-3, 0.1
PROMPT = "The integral of a sum is the sum of the integrals, and so"
N_PREDICT = 16
TERN = Path(sys.executable).parent / "tern"

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

# Loads the header without data and reserves the graphs of a context, as llama.cpp does to fit a model.
DRY_LOAD = """
import sys
from ggml_tern.host import stock as host
host.enable()
import llama_cpp.llama_cpp as lib

lib.llama_backend_init()
how = lib.llama_model_default_params()
how.no_alloc, how.n_gpu_layers, how.load_mode = True, int(sys.argv[2]), 0
model = lib.llama_model_load_from_file(sys.argv[1].encode(), how)
if not model:
    sys.exit("llama.cpp did not load the header")
how = lib.llama_context_default_params()
how.n_ctx = int(sys.argv[3])
context = lib.llama_init_from_model(model, how)
if not context:
    sys.exit("llama.cpp made no context")
print(lib.llama_model_n_layer(model), lib.llama_model_n_params(model), lib.llama_model_size(model))
"""


# ---- the plain weights ----


def hadamard(size: int) -> torch.Tensor:
    """float32 [size, size], H[r][c] = (-1)^popcount(r & c) / sqrt(size)."""
    index = np.arange(size)
    signs = 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index) % 2)
    return torch.from_numpy(signs / np.sqrt(size)).float()


class PlainWeights:
    """The weights that a qwen35 file means, not rotated, in float32 and in transformers' order.

    Written from the definition of the format: a row w that is stored as H(s * w) is s * H(stored).
    """

    def __init__(self, path: Path) -> None:
        header = _core.read_gguf_header(str(path))
        self.keys: dict[str, Any] = header["metadata"]
        self._tensors = {tensor["name"]: tensor for tensor in header["tensors"]}
        self._data_offset: int = header["data_offset"]
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.n_key_heads: int = self.key("ssm.group_count")
        self.n_value_heads: int = self.key("ssm.time_step_rank")
        self._rotated = self._contract("weight_names", []) + self._contract("inverse_weight_names", [])
        self._block: int = self._contract("block_size", 0)
        self._signs = self._read_signs()

    def key(self, name: str) -> Any:
        return self.keys[f"qwen35.{name}"]

    def _contract(self, name: str, default: Any) -> Any:
        return self.keys.get(f"prism.hadamard.{name}", default)

    def _read_signs(self) -> dict[int, torch.Tensor]:
        """Of each width, -1 and +1."""
        widths = [int(width) for width in self._contract("sign_widths", [])]
        values = torch.tensor(self._contract("sign_values", []), dtype=torch.float32)
        return dict(zip(widths, values.split(widths), strict=True))

    def tensor(self, name: str, rows: range | None = None) -> torch.Tensor:
        """[n_out, n_in] or [n], in the file's order of rows; rows: only those of a matrix."""
        entry = self._tensors[name]
        n_in, n_out = entry["shape"][0], int(np.prod(entry["shape"][1:]))
        rows = range(n_out) if rows is None else rows
        values = torch.empty(len(rows), n_in)
        at_once = max(1, CHUNK // n_in)
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            decoded = torch.from_numpy(self._decode(entry, part))
            if name in self._rotated:
                decoded = self._turn_back(decoded)
            values[start : start + len(part)] = decoded
        return values if len(entry["shape"]) > 1 else values[0]

    def _decode(self, entry: dict[str, Any], rows: range) -> F32:
        n_out = int(np.prod(entry["shape"][1:]))
        row_bytes = entry["nbytes"] // n_out
        start = self._data_offset + entry["offset"] + rows.start * row_bytes
        data = np.frombuffer(self._bytes, np.uint8, len(rows) * row_bytes, start).reshape(len(rows), -1)
        if entry["type"] in _core.TERNARY_TYPES:
            return _core.dequantize(entry["type"], data)
        return gguf.dequantize(data, gguf.GGMLQuantizationType(entry["type"])).astype(np.float32)

    def _turn_back(self, stored: torch.Tensor) -> torch.Tensor:
        n_rows, n_in = stored.shape
        # The matrix of a block is the Kronecker product of two smaller ones: H(a * b) = H(a) x H(b).
        bits = self._block.bit_length() - 1
        left, right = hadamard(2 ** (bits // 2)), hadamard(2 ** (bits - bits // 2))
        turned = left @ stored.reshape(-1, len(left), len(right)) @ right
        return turned.reshape(n_rows, n_in) * self._signs[n_in]

    def layer(self, n: int) -> dict[str, torch.Tensor]:
        """The state of transformers' decoder layer n."""
        names = {
            "input_layernorm.weight": "attn_norm.weight",
            "post_attention_layernorm.weight": "post_attention_norm.weight",
            "mlp.gate_proj.weight": "ffn_gate.weight",
            "mlp.up_proj.weight": "ffn_up.weight",
            "mlp.down_proj.weight": "ffn_down.weight",
        }
        if f"blk.{n}.ssm_a" in self._tensors:
            names |= {
                "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
                "linear_attn.in_proj_z.weight": "attn_gate.weight",
                "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
                "linear_attn.in_proj_b.weight": "ssm_beta.weight",
                "linear_attn.conv1d.weight": "ssm_conv1d.weight",
                "linear_attn.dt_bias": "ssm_dt.bias",
                "linear_attn.A_log": "ssm_a",
                "linear_attn.norm.weight": "ssm_norm.weight",
                "linear_attn.out_proj.weight": "ssm_out.weight",
            }
        else:
            names |= {f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"}
            names |= {f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"}
            names["self_attn.o_proj.weight"] = "attn_output.weight"
        return {name: self._as_in_transformers(f"blk.{n}.{ours}") for name, ours in names.items()}

    def _as_in_transformers(self, name: str) -> torch.Tensor:
        values = self.tensor(name)
        match name.split(".")[2]:
            case "attn_qkv":
                return self._grouped(values, self._n_query_and_key())
            case "ssm_conv1d":
                return self._grouped(values, self._n_query_and_key())[:, None]
            case "attn_gate" | "ssm_alpha" | "ssm_beta" | "ssm_dt":
                return self._grouped(values)
            case "ssm_a":
                return self._grouped(values).neg().log()
            case "ssm_out":
                in_our_order = self._contract("gdn_v_grouped", False)
                return values if in_our_order else self._grouped(values.T).T.contiguous()
            case "attn_norm" | "post_attention_norm" | "attn_q_norm" | "attn_k_norm":
                return values - 1  # transformers multiplies by 1 + weight, the file holds the sum
            case _:
                return values

    def _n_query_and_key(self) -> int:
        return 2 * self.n_key_heads * int(self.key("ssm.state_size"))

    def _grouped(self, values: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Puts the value heads, whose rows begin at `start`, from the order of the file, [which of a key
        head's value heads, key head], into that of transformers, [key head, which of its value heads]."""
        repeats = self.n_value_heads // self.n_key_heads
        heads = values[start:].reshape(repeats, self.n_key_heads, -1, *values.shape[1:])
        return torch.cat([values[:start], heads.transpose(0, 1).reshape(values[start:].shape)])

    def config(self) -> Qwen3_5TextConfig:
        sections = [int(n) for n in self.key("rope.dimension_sections")]
        head_dim = self.key("attention.key_length")
        config = Qwen3_5TextConfig(
            vocab_size=self._tensors[EMBEDDING]["shape"][1],
            hidden_size=self.key("embedding_length"),
            intermediate_size=self.key("feed_forward_length"),
            num_hidden_layers=self.key("block_count"),
            num_attention_heads=self.key("attention.head_count"),
            num_key_value_heads=self.key("attention.head_count_kv"),
            head_dim=head_dim,
            rms_norm_eps=self.key("attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self.key("rope.freq_base"),
                "mrope_section": sections[:3],
                "partial_rotary_factor": self.key("rope.dimension_count") / head_dim,
            },
            linear_conv_kernel_dim=self.key("ssm.conv_kernel"),
            linear_key_head_dim=self.key("ssm.state_size"),
            linear_value_head_dim=self.key("ssm.inner_size") // self.n_value_heads,
            linear_num_key_heads=self.n_key_heads,
            linear_num_value_heads=self.n_value_heads,
            full_attention_interval=self.key("full_attention_interval"),
        )
        config._attn_implementation = "eager"
        return config


def plain_logits(path: Path, tokens: I32) -> F32:
    """Logits at every position by transformers, int32 [n_tokens] -> float32 [n_tokens, vocabulary].

    One layer is in memory at a time, and of embedding and head a few rows.
    """
    weights = PlainWeights(path)
    config = weights.config()
    n = len(tokens)
    causal = torch.full((n, n), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        embedded = [weights.tensor(EMBEDDING, range(token, token + 1)) for token in tokens.tolist()]
        hidden = torch.cat(embedded)[None]
        rotary = qwen.Qwen3_5TextRotaryEmbedding(config)(hidden, torch.arange(n).expand(3, 1, n))
        for i, kind in enumerate(config.layer_types):
            with torch.device("meta"):
                layer = qwen.Qwen3_5DecoderLayer(config, i).eval()
            layer.load_state_dict(weights.layer(i), assign=True)
            mask = causal if kind == "full_attention" else None
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=mask)
            del layer
        norm = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.weight.copy_(weights.tensor("output_norm.weight") - 1)
        hidden = norm(hidden)[0]
        logits = np.empty((n, config.vocab_size), np.float32)
        at_once = max(1, CHUNK // config.hidden_size)
        for start in range(0, config.vocab_size, at_once):
            rows = range(start, min(start + at_once, config.vocab_size))
            logits[:, rows.start : rows.stop] = hidden @ weights.tensor(HEAD, rows).T
    return logits


# ---- the checks ----


def without_rotation(path: Path, out: Path) -> Path:
    """Copies the file and hides its prism.hadamard.* keys under other names. Returns out."""
    shutil.copyfile(path, out)
    end = _core.read_gguf_header(str(path))["data_offset"]
    with open(out, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at = data.find(b"prism.hadamard.", 0, end)
        while at >= 0:
            data[at : at + 5] = b"plain"
            at = data.find(b"prism.hadamard.", at, end)
    return out


def ask_server(model: Path) -> list[int]:
    """Lets the stock llama-server with the plug-in answer PROMPT; returns the tokens of both."""
    with demo.served(model) as url:
        prompt: list[int] = demo.ask(f"{url}/tokenize", {"content": PROMPT})["tokens"]
        answer = demo.ask(
            f"{url}/completion",
            {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "top_k": 1, "return_tokens": True},
        )
    click.echo(f"llama-server: {PROMPT!r} -> {answer['content']!r}, tokens {answer['tokens']}")
    return prompt + list(answer["tokens"])


def check_layers(positions: int, type_name: str) -> bool:
    """Serves the four layers and compares their logits; says whether they are right."""
    model = cached_synthetic(type_name, LAYERS, model=MODEL, rotation_block=BLOCK)
    answered = ask_server(model)
    # The prompt, what the server made of it, and then other tokens, of which the random model knows no less.
    rng = np.random.default_rng(0)
    tokens = np.concatenate([answered, rng.integers(0, 49152, positions)]).astype(np.int32)[:positions]
    plain = plain_logits(model, tokens)

    n_answered = len(answered)
    first = n_answered - N_PREDICT
    greedy = plain[first - 1 : n_answered - 1].argmax(axis=1)
    same = int((greedy == answered[first:]).sum())
    click.echo(f"llama-server and torch agree on {same} of {len(greedy)} greedy tokens")

    click.echo(f"{model.name}: {positions} positions, plain entropy {entropy(plain):.2f} nats")
    table = Table()
    for heading in ("what is served", "-ngl", "batch", "mean KL", "max KL", "top-1 %"):
        table.add_column(heading, justify="left" if heading.startswith("what") else "right")

    def add_row(what: str, path: Path, serving: Serving) -> Agreement:
        got = compare(plain, host_logits(path, tokens, serving))
        numbers = (f"{got.mean_kl:.2e}", f"{got.max_kl:.2e}", f"{100 * got.top1:.2f}")
        table.add_row(what, str(serving.n_gpu_layers), str(serving.n_batch), *numbers)
        return got

    everything = Serving()
    ways = (everything, replace(everything, n_batch=1), replace(everything, n_gpu_layers=0))
    results = [add_row("the file", model, serving) for serving in ways]
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        copy = without_rotation(model, Path(folder) / "without-rotation.gguf")
        control = add_row("its keys for the rotation hidden", copy, everything)
    Console(width=110).print(table)
    good = all(result.mean_kl <= MAX_KL for result in results) and control.mean_kl >= MIN_KL_OF_CONTROL
    wanted = f"a mean KL of at most {MAX_KL:g}, and of at least {MIN_KL_OF_CONTROL:g} for the control"
    click.echo(f"{'good' if good else 'BAD'}: wanted is {wanted}")
    return good


def check_header(type_name: str, n_context: int) -> bool:
    """Loads the header of all layers dry, and lets `tern plan` plan for it; says whether both succeeded."""
    shape = with_layers(MODEL, None)
    with tempfile.TemporaryDirectory() as folder:
        path = write_header_only(Path(folder) / f"{MODEL}-{type_name}.gguf", type_name, shape, 0, BLOCK)
        size = path.stat()
        tensors = _core.read_gguf_header(str(path))["tensors"]
        counts = {kind: sum(tensor["type"] == kind for tensor in tensors) for kind in _types(tensors)}
        named = ", ".join(f"{count} {_type_name(kind)}" for kind, count in counts.items())
        click.echo(f"{len(tensors)} tensors: {named}")
        click.echo(f"file: {size.st_size / 1e9:.2f} GB, on disk {size.st_blocks * 512 / 1e6:.1f} MB")
        good = True
        for n_gpu_layers in (99, 0):
            command = [sys.executable, "-c", DRY_LOAD, str(path), str(n_gpu_layers), str(n_context)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                click.echo(done.stderr)
                good = False
                continue
            n_layers, n_weights, n_bytes = map(int, done.stdout.split())
            click.echo(
                f"dry load, -ngl {n_gpu_layers}, context {n_context}: {n_layers} layers, "
                f"{n_weights / 1e9:.2f} G weights, {n_bytes / 1e9:.2f} GB"
            )
        click.echo(f"$ tern plan {path.name}")
        good &= subprocess.run([TERN, "plan", path]).returncode == 0
    return good


def _types(tensors: list[dict[str, Any]]) -> list[int]:
    return list(dict.fromkeys(tensor["type"] for tensor in tensors))


def _type_name(kind: int) -> str:
    return _core.type_name(kind) if kind in _core.TERNARY_TYPES else gguf.GGMLQuantizationType(kind).name


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--type", "type_name", type=click.Choice(["ptq1_0", "pq2_0"]), default="ptq1_0", show_default=True
)
@click.option("--positions", default=80, show_default=True, help="Length of the text in tokens.")
@click.option("--full-header", is_flag=True, help="All 64 layers instead, without their data.")
@click.option("--context", default=4096, show_default=True, help="Of the dry load, in tokens.")
def main(type_name: str, positions: int, full_header: bool, context: int) -> None:
    try:
        good = check_header(type_name, context) if full_header else check_layers(positions, type_name)
    except (TernError, demo.DemoError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
