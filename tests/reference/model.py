"""A ternary GGUF as a plain numpy language model: Llama, Qwen3 and Gemma 3, all positions at once, float32.

Written for checking what a host computes from the same file, so it follows the conventions of GGUF files
(which tensor is what, norm weights of Gemma stored with their +1, query and key rows of Llama reordered
for rotation of neighbouring pairs) and nothing of any engine. Attention keeps no cache; there are no
batches, and no shortcuts.

A matrix product runs either on the decoded weights ("float": what the file means) or with the integer
arithmetic of the kernels ("int8": what a kernel should compute almost bit for bit).
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from ggml_tern import _core
from reference import formats

F32 = npt.NDArray[np.float32]
Arithmetic = Literal["float", "int8"]

GEMMA3_LOCAL_ROPE_BASE = 10000.0
GEMMA3_WINDOW_PERIOD = 6


class Model:
    """One GGUF file. logits(tokens) is all there is to call."""

    def __init__(self, path: Path, arithmetic: Arithmetic = "float") -> None:
        self.arithmetic = arithmetic
        header = _core.read_gguf_header(str(path))
        self._keys: dict[str, Any] = header["metadata"]
        self._tensors = {t["name"]: t for t in header["tensors"]}
        self._data_offset: int = header["data_offset"]
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.arch: str = self._keys["general.architecture"]
        if self.arch not in ("llama", "qwen3", "gemma3"):
            raise ValueError(f"{path}: no reference for architecture {self.arch}")
        self.n_layers: int = self._key("block_count")
        self.n_heads: int = self._key("attention.head_count")
        self.n_kv_heads: int = self._key("attention.head_count_kv", self.n_heads)
        self.width: int = self._key("embedding_length")
        self.head_dim: int = self._key("attention.key_length", self.width // self.n_heads)
        self.eps = np.float32(self._key("attention.layer_norm_rms_epsilon"))

    def _key(self, name: str, *default: Any) -> Any:
        key = f"{self.arch}.{name}"
        return self._keys.get(key, *default) if default else self._keys[key]

    def raw(self, name: str) -> tuple[int, npt.NDArray[np.uint8]]:
        """(type id, uint8 [n_out, row_bytes]) of a tensor; a vector is one row."""
        t = self._tensors[name]
        n_out = int(np.prod(t["shape"][1:]))
        data = np.frombuffer(self._bytes, np.uint8, t["nbytes"], self._data_offset + t["offset"])
        return t["type"], data.reshape(n_out, -1)

    def weights(self, name: str, rows: npt.NDArray[np.integer] | None = None) -> F32:
        """float32 [n_out, n_in], or only some rows of it, decoded by the reference codecs, or gguf-py's for
        stock types."""
        kind, data = self.raw(name)
        data = data if rows is None else data[rows]
        if kind in formats.FORMATS:
            return formats.dequantize(formats.FORMATS[kind], data)
        values: F32 = gguf.dequantize(data, gguf.GGMLQuantizationType(kind)).astype(np.float32)
        return values

    def _linear(self, x: F32, name: str) -> F32:
        """float32 [n_tokens, n_in] -> [n_tokens, n_out]."""
        kind, data = self.raw(name)
        if self.arithmetic == "int8" and kind in formats.FORMATS:
            return formats.matmul(formats.FORMATS[kind], data, x)
        product: F32 = x @ self.weights(name).T
        return product

    def _norm(self, x: F32, name: str) -> F32:
        """RMS norm over the last axis, times the weights of tensor `name`."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + self.eps) * self.weights(name)[0]
        return normed

    def _rotate(self, x: F32, base: float) -> F32:
        """Rotary position embedding of x, float32 [n_tokens, heads, head_dim]: Llama files rotate
        neighbouring pairs, the others element i with i + head_dim/2."""
        n_tokens, _, dim = x.shape
        frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        angles = np.arange(n_tokens)[:, None] * frequencies
        if self.arch == "gemma3" and base != GEMMA3_LOCAL_ROPE_BASE:
            angles = angles / self._key("rope.scaling.factor", 1.0)
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        out = np.empty_like(x)
        if self.arch == "llama":
            a, b, first, second = x[..., ::2], x[..., 1::2], out[..., ::2], out[..., 1::2]
        else:
            half = dim // 2
            a, b, first, second = x[..., :half], x[..., half:], out[..., :half], out[..., half:]
        first[:], second[:] = a * cos - b * sin, a * sin + b * cos
        return out

    def _attention(self, x: F32, n: int) -> F32:
        n_tokens = x.shape[0]
        block = f"blk.{n}"
        q, k, v = (
            self._linear(x, f"{block}.attn_{which}.weight").reshape(n_tokens, -1, self.head_dim)
            for which in "qkv"
        )
        if self.arch != "llama":
            q, k = self._norm(q, f"{block}.attn_q_norm.weight"), self._norm(k, f"{block}.attn_k_norm.weight")
        local = self.arch == "gemma3" and (n + 1) % GEMMA3_WINDOW_PERIOD != 0
        base = GEMMA3_LOCAL_ROPE_BASE if local else float(self._key("rope.freq_base", 10000.0))
        q, k = self._rotate(q, base), self._rotate(k, base)

        distance = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
        hidden = distance < 0
        if local:
            hidden |= distance >= self._key("attention.sliding_window")
        out = np.empty_like(q)
        for head in range(self.n_heads):
            kv_head = head * self.n_kv_heads // self.n_heads
            scores = q[:, head] @ k[:, kv_head].T / np.float32(np.sqrt(self.head_dim))
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, kv_head]
        return self._linear(out.reshape(n_tokens, -1), f"{block}.attn_output.weight")

    def _feed_forward(self, x: F32, n: int) -> F32:
        gate = self._linear(x, f"blk.{n}.ffn_gate.weight")
        if self.arch == "gemma3":  # GELU, the tanh form
            inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
            gate = np.float32(0.5) * gate * (1 + np.tanh(inner))
        else:  # SiLU
            gate = gate / (1 + np.exp(-gate))
        return self._linear(gate * self._linear(x, f"blk.{n}.ffn_up.weight"), f"blk.{n}.ffn_down.weight")

    def logits(self, tokens: npt.NDArray[np.integer]) -> F32:
        """int [n_tokens] -> float32 [n_tokens, vocabulary]."""
        gemma = self.arch == "gemma3"
        x = self.weights("token_embd.weight", tokens)
        if gemma:
            x = x * np.float32(np.sqrt(self.width))
        for n in range(self.n_layers):
            y = self._attention(self._norm(x, f"blk.{n}.attn_norm.weight"), n)
            x = x + (self._norm(y, f"blk.{n}.post_attention_norm.weight") if gemma else y)
            y = self._feed_forward(self._norm(x, f"blk.{n}.ffn_norm.weight"), n)
            x = x + (self._norm(y, f"blk.{n}.post_ffw_norm.weight") if gemma else y)
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return self._linear(self._norm(x, "output_norm.weight"), head)
