"""Write the seed corpus of the GGUF fuzzer: small headers, good ones and ones broken in one way each.

The files are committed; run this again only to add a seed.
"""

from __future__ import annotations

import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
PQ2_0, PTQ1_0, Q2_0, F32 = 142, 143, 42, 0
RANKS = {"time_step_rank": 4, "group_count": 2}


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, type_id: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + payload


def tensor(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", type_id, offset)


def header(
    keys: list[bytes],
    tensors: list[bytes],
    *,
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


def padded(data: bytes, payload: int, alignment: int = 32) -> bytes:
    return data + bytes(-len(data) % alignment) + bytes(payload)


def _text(value: str) -> bytes:
    return struct.pack("<I", 8) + string(value)


def _texts(*values: str) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(string, values))


def rotated(**changes: bytes | None) -> bytes:
    """A file with rotated weights; `changes` replaces keys of the contract, or leaves them out."""
    signs = bytes(1 if i % 3 else 255 for i in range(128))
    contract = {
        "version": struct.pack("<II", 4, 2),
        "block_size": struct.pack("<II", 4, 128),
        "transform": _text("normalized-sylvester-walsh-hadamard"),
        "axis": _text("input-last-dimension"),
        "sign_mode": _text("explicit"),
        "sign_widths": struct.pack("<IIQi", 9, 5, 1, 128),
        "sign_values": struct.pack("<IIQ", 9, 1, 128) + signs,
        "weight_names": _texts("blk.0.ssm_out.weight"),
        "inverse_weight_names": _texts("token_embd.weight"),
        "tied_output": struct.pack("<IB", 7, 1),
        "gdn_v_grouped": struct.pack("<IB", 7, 1),
        **changes,
    }
    keys = [string("general.architecture") + _text("qwen35")]
    keys += [key(f"qwen35.ssm.{name}", 4, struct.pack("<I", n)) for name, n in RANKS.items()]
    keys += [
        string(f"prism.hadamard.{name}") + value for name, value in contract.items() if value is not None
    ]
    tensors = [
        tensor("blk.0.ssm_out.weight", (128, 2), PTQ1_0, 0),
        tensor("token_embd.weight", (128, 2), PQ2_0, 64),
    ]
    return padded(header(keys, tensors), 132)


def rotated_alike(n_tensors: int, width: int) -> bytes:
    """A header alone whose names all want the same vector of signs."""
    names = [f"blk.{i}.ffn_up.weight" for i in range(n_tensors)]
    contract = {
        "version": struct.pack("<II", 4, 1),
        "block_size": struct.pack("<II", 4, 128),
        "transform": _text("normalized-sylvester-walsh-hadamard"),
        "axis": _text("input-last-dimension"),
        "sign_mode": _text("explicit"),
        "sign_widths": struct.pack("<IIQI", 9, 4, 1, width),
        "sign_values": struct.pack("<IIQ", 9, 1, width) + b"\x01\xff" * (width // 2),
        "weight_names": _texts(*names),
    }
    keys = [string("general.architecture") + _text("llama")]
    keys += [string(f"prism.hadamard.{name}") + value for name, value in contract.items()]
    step = -(-width // 128 * 34 // 32) * 32
    tensors = [tensor(name, (width, 1), PQ2_0, i * step) for i, name in enumerate(names)]
    return padded(header(keys, tensors), 0)


def seeds() -> dict[str, bytes]:
    architecture = key("general.architecture", 8, string("llama"))
    names = key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + string("a") + string("bc"))
    numbers = key("sizes", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3))
    pq2 = tensor("blk.0.attn_q.weight", (128, 2), PQ2_0, 0)
    ptq1 = tensor("blk.0.attn_k.weight", (128, 1), PTQ1_0, 96)
    norm = tensor("output_norm.weight", (3,), F32, 128)
    good = header([architecture, names, numbers], [pq2, ptq1, norm])
    return {
        "good": padded(good, 140),
        "version-2": padded(header([architecture], [pq2], version=2), 68),
        "no-tensors": header([architecture], []),
        "alignment-64": padded(header([key("general.alignment", 4, struct.pack("<I", 64))], [pq2]), 68, 64),
        "alignment-0": header([key("general.alignment", 4, struct.pack("<I", 0))], []),
        "legacy-q2_0": padded(header([], [tensor("t", (128, 2), Q2_0, 0)]), 72),
        "truncated-data": padded(good, 64),
        "truncated-header": good[:-5],
        "billion-tensors": header([], [], n_tensors=10**9),
        "huge-counts": header([], [], n_tensors=2**64 - 1, n_keys=2**64 - 1),
        "huge-string": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 4),
        "huge-array": header([key("k", 9, struct.pack("<IQ", 10, 2**61 + 1))], []),
        "nested-array": header([key("k", 9, struct.pack("<IQIQ", 9, 1, 0, 0))], []),
        "huge-shape": header([], [tensor("t", (2**40, 2**40), PQ2_0, 0)]),
        "overlap": padded(header([], [pq2, tensor("u", (128, 2), PQ2_0, 32)]), 200),
        "type-edge": padded(header([], [tensor("t", (128, 1), 2**31, 0)]), 64),
        "rotated": rotated(),
        "rotated-identity": rotated(
            sign_mode=struct.pack("<I", 8) + string("identity"), sign_widths=None, sign_values=None
        ),
        "rotated-alike": rotated_alike(32, 1024),
        "twice": padded(header([architecture, architecture], [pq2]), 68),
    }


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, data in seeds().items():
        (CORPUS / name).write_bytes(data)
