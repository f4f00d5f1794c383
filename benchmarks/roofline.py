"""What the machine and the kernels do at best, for bench_peers.py --roofline.

Decode has to read all weights, and at a depth the KV cache, for every token: it is bound by the bandwidth.
Prefill has to do all multiply-adds for every token: it is bound by the peak of the instructions. Attention's
own multiply-adds are not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarking import markdown
from ggml_tern import _core

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

#: (n_in, n_out) of the matrices whose products are timed alone: those of models from 0.6B to 27B.
SHAPES = (
    (1024, 3072),
    (2048, 6144),
    (3072, 1024),
    (4096, 12288),
    (5120, 17408),
    (6144, 2048),
    (12288, 4096),
    (17408, 5120),
)
#: Columns of such a product, as in a batch of prefill.
N_COLUMNS = 512


@dataclass
class Model:
    """What a model's file asks of the machine."""

    path: Path
    matrices: list[_core.TiledMatrix]
    prefill_multiply_adds: int  # a token; llama.cpp multiplies with the head for the last one alone
    kv_heads: int  # of all layers that have a KV cache
    head_size: int  # of a key and a value together

    @property
    def weight_bytes(self) -> int:
        """In tiles: what decode reads for a token."""
        return sum(matrix.n_bytes for matrix in self.matrices)

    def kv_bytes(self, depth: float, kv: str) -> float:
        """Of the cache with so many tokens in it: what decode reads of it for a token."""
        block, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kv.upper()]]
        return depth * self.kv_heads * self.head_size * n_bytes / block


def read_model(path: Path) -> Model:
    """A model with its ternary matrices in tiles: all that decode multiplies with."""
    header = _core.read_gguf_header(path)
    names = {tensor["name"] for tensor in header["tensors"]}
    data = np.memmap(path, np.uint8, "r")
    matrices, multiply_adds = [], 0
    for tensor in header["tensors"]:
        if tensor["type"] not in _core.TERNARY_TYPES or len(tensor["shape"]) != 2:
            continue
        if tensor["name"] == EMBEDDING and HEAD in names:
            continue  # only looked up
        n_in, n_out = tensor["shape"]
        start = header["data_offset"] + tensor["offset"]
        rows = data[start : start + tensor["nbytes"]].reshape(n_out, -1)
        matrices.append(_core.TiledMatrix(tensor["type"], rows))
        if tensor["name"] not in (EMBEDDING, HEAD):
            multiply_adds += n_in * n_out
    keys: Mapping[str, Any] = header["metadata"]
    arch = keys["general.architecture"]
    layers = keys[f"{arch}.block_count"] // keys.get(f"{arch}.full_attention_interval", 1)
    return Model(
        path,
        matrices,
        multiply_adds,
        layers * keys[f"{arch}.attention.head_count_kv"],
        keys[f"{arch}.attention.key_length"] + keys[f"{arch}.attention.value_length"],
    )


def random_matrix(n_in: int, n_out: int) -> _core.TiledMatrix:
    """Of ternary weights."""
    rng = np.random.default_rng([n_in, n_out])
    type_id = _core.TYPE_PQ2_0
    trits = rng.integers(-1, 2, (n_out, n_in), dtype=np.int8)
    scales = np.full((n_out, n_in // _core.block_size(type_id)), 0.01, np.float32)
    return _core.TiledMatrix(type_id, _core.pack(type_id, trits, scales))


@dataclass
class Bounds:
    """Samples of the machine's own speed, taken in turn with all the others."""

    threads: int
    bandwidth: list[float] = field(default_factory=list)  # bytes/s
    peak: list[float] = field(default_factory=list)  # multiply-adds/s

    def measure(self) -> None:
        self.bandwidth.append(_core.read_bandwidth(self.threads))
        self.peak.append(_core.multiply_add_peak(self.threads))


@dataclass
class Row:
    """Speeds, in tokens/s, and what one token takes, in bytes or multiply-adds."""

    name: str
    per_token: float
    samples: list[float] = field(default_factory=list)


def time_decode(row: Row, model: Model, threads: int) -> None:
    """Adds samples of all products of a token, and nothing else, to the row."""
    row.samples += [1 / seconds for _, seconds in _core.time_products(model.matrices, 1, threads)]


def time_prefill(row: Row, matrix: _core.TiledMatrix, threads: int, repeats: int = 2) -> None:
    """Adds samples of one product with N_COLUMNS columns to the row."""
    times = _core.time_products([matrix], N_COLUMNS, threads, repeats)
    row.samples += [N_COLUMNS / seconds for _, seconds in times]


def share_table(rows: Sequence[Row], bound: Sequence[float], unit: str, per_token: str) -> str:
    """A Markdown table of the rows that have samples: speeds, and their share of the bound, all medians.

    unit, per_token: the names of 1e9 a second and of 1e6 a token of what the bound is of."""
    limit = statistics.median(bound)
    lines = []
    for row in rows:
        if not row.samples:
            continue
        speed = statistics.median(row.samples)
        lines.append(
            [
                row.name,
                f"{speed:.1f}",
                f"{min(row.samples):.1f} to {max(row.samples):.1f}",
                f"{row.per_token / 1e6:.1f}",
                f"{speed * row.per_token / 1e9:.1f}",
                f"{speed * row.per_token / limit:.0%}",
            ]
        )
    return markdown(["", "tokens/s", "range", per_token, unit, "share"], lines)


def bound_text(bound: Sequence[float], unit: str) -> str:
    low, middle, high = min(bound), statistics.median(bound), max(bound)
    return f"{middle / 1e9:.1f} {unit} ({low / 1e9:.1f} to {high / 1e9:.1f})"
