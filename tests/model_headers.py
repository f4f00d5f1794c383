"""GGUF files with the header of a model and a hole for data, for what reads headers alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reference import gguf_files as files

F32, BF16, Q8_0, Q2_0, PQ2_0, PTQ1_0 = 0, 30, 8, 42, 142, 143


#: Weights in a block and its bytes.
BLOCKS = {F32: (1, 4), BF16: (1, 2), Q8_0: (32, 34), Q2_0: (64, 18), PQ2_0: (128, 34), PTQ1_0: (128, 28)}


@dataclass
class Header:
    """A GGUF file whose data is one hole: keys of its architecture, and tensors as name -> (type, shape)."""

    architecture: str
    keys: dict[str, Any]
    tensors: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    n_vocab: int = 300
    n_merges: int = 1

    def add(self, type_id: int, **shapes: tuple[int, ...]) -> None:
        """Weights; in a name, __ stands for a dot."""
        self.tensors |= {
            f"{name.replace('__', '.')}.weight": (type_id, shape) for name, shape in shapes.items()
        }

    def write(self, path: Path, **changes: Any) -> Path:
        """Changes to the architecture's keys; None takes one out."""
        keys = {key: value for key, value in (self.keys | changes).items() if value is not None}
        metadata: dict[str, Any] = {"general.architecture": self.architecture, "general.name": "made by hand"}
        metadata |= {f"{self.architecture}.{key}": value for key, value in keys.items()}
        metadata |= tokenizer(self.n_vocab)
        metadata["tokenizer.ggml.merges"] = ["a b"] * self.n_merges
        table, offset = b"", 0
        for name, (type_id, shape) in self.tensors.items():
            block, nbytes = BLOCKS[type_id]
            table += files.string(name) + struct.pack("<I", len(shape))
            table += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", type_id, offset)
            offset += -(-int(np.prod(shape)) // block * nbytes // 32) * 32
        pairs = b"".join(files.string(key) + files.value(value) for key, value in metadata.items())
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(metadata)) + pairs + table
        with path.open("wb") as file:
            file.write(head + bytes(-len(head) % 32))
            file.truncate(file.tell() + offset)
        return path


def tokenizer(n_vocab: int) -> dict[str, Any]:
    """Bytes as byte-level BPE spells them, and tokens that no text has."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printing] + [chr(256 + i) for i in range(256 - len(printing))]
    tokens = [*letters, "<end>", *(f"<unused {i}>" for i in range(n_vocab - 257))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
    }


def decoder_header(architecture: str, n_layers: int = 2, **keys: Any) -> Header:
    """A decoder of plain attention layers, 256 wide, with 4 heads of 64 and 2 KV heads, in PTQ1_0."""
    made = Header(
        architecture,
        {
            "context_length": 8192,
            "embedding_length": 256,
            "block_count": n_layers,
            "feed_forward_length": 1024,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 10000.0,
        }
        | keys,
    )
    made.add(PTQ1_0, token_embd=(300, 256))
    made.add(F32, output_norm=(256,))
    for n in range(n_layers):
        block = f"blk__{n}__"
        made.add(F32, **{f"{block}attn_norm": (256,), f"{block}ffn_norm": (256,)})
        made.add(PTQ1_0, **{f"{block}attn_q": (256, 256), f"{block}attn_output": (256, 256)})
        made.add(PTQ1_0, **{f"{block}attn_k": (128, 256), f"{block}attn_v": (128, 256)})
        made.add(PTQ1_0, **{f"{block}ffn_gate": (1024, 256), f"{block}ffn_up": (1024, 256)})
        made.add(PTQ1_0, **{f"{block}ffn_down": (256, 1024)})
        if architecture in ("qwen3", "gemma3"):
            made.add(F32, **{f"{block}attn_q_norm": (64,), f"{block}attn_k_norm": (64,)})
        if architecture == "gemma3":
            made.add(F32, **{f"{block}post_attention_norm": (256,), f"{block}post_ffw_norm": (256,)})
    return made


def hybrid_header(
    n_layers: int,
    type_id: int,
    n_embd: int,
    n_ff: int,
    heads: tuple[int, int, int],
    delta_net: tuple[int, int, int],
    n_vocab: int = 300,
    **keys: Any,
) -> Header:
    """A qwen35: three Gated DeltaNets, then one attention layer. heads: query heads, KV heads, width of one;
    delta_net: key heads, value heads, width of one."""
    n_q, n_kv, head = heads
    key_heads, value_heads, state = delta_net
    key, value = key_heads * state, value_heads * state
    made = Header(
        "qwen35",
        {
            "context_length": 262144,
            "embedding_length": n_embd,
            "block_count": n_layers,
            "feed_forward_length": n_ff,
            "attention.head_count": n_q,
            "attention.head_count_kv": n_kv,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "rope.dimension_count": head // 4,
            "rope.dimension_sections": [head // 16, head // 16, 0, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": state,
            "ssm.group_count": key_heads,
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": value,
            "full_attention_interval": 4,
        }
        | keys,
        n_vocab=n_vocab,
    )
    made.add(type_id, token_embd=(n_vocab, n_embd), output=(n_vocab, n_embd))
    made.add(F32, output_norm=(n_embd,))
    for n in range(n_layers):
        block = f"blk__{n}__"
        made.add(F32, **{f"{block}attn_norm": (n_embd,), f"{block}post_attention_norm": (n_embd,)})
        made.add(type_id, **{f"{block}ffn_gate": (n_ff, n_embd), f"{block}ffn_up": (n_ff, n_embd)})
        made.add(type_id, **{f"{block}ffn_down": (n_embd, n_ff)})
        if n % 4 == 3:
            made.add(type_id, **{f"{block}attn_q": (2 * n_q * head, n_embd)})
            made.add(type_id, **{f"{block}attn_k": (n_kv * head, n_embd)})
            made.add(type_id, **{f"{block}attn_v": (n_kv * head, n_embd)})
            made.add(type_id, **{f"{block}attn_output": (n_embd, n_q * head)})
            made.add(F32, **{f"{block}attn_q_norm": (head,), f"{block}attn_k_norm": (head,)})
            continue
        made.add(type_id, **{f"{block}attn_qkv": (2 * key + value, n_embd)})
        made.add(type_id, **{f"{block}attn_gate": (value, n_embd), f"{block}ssm_out": (n_embd, value)})
        made.add(
            BF16, **{f"{block}ssm_alpha": (value_heads, n_embd), f"{block}ssm_beta": (value_heads, n_embd)}
        )
        made.add(F32, **{f"{block}ssm_conv1d": (2 * key + value, 4), f"{block}ssm_norm": (state,)})
        made.tensors |= {
            f"blk.{n}.ssm_dt.bias": (F32, (value_heads,)),
            f"blk.{n}.ssm_a": (F32, (value_heads,)),
        }
    return made


def released_27b(type_id: int) -> Header:
    """The shape of Ternary-Bonsai-2-27B."""
    return hybrid_header(64, type_id, 5120, 17408, (24, 4, 256), (16, 48, 128), n_vocab=248320)
