"""``tern hash``: whether two files hold the same weights, whatever ternary type they are packed in.

A tensor's hash is the SHA-256 of a line of JSON, [name, shape, kind], and what follows it:

* for a ternary type, kind "ternary" and the values as Q2_0 blocks (fp16 scale, then 16 bytes of 2-bit codes,
  for 64 weights each) in the one spelling that each group has: a group that is all zero has scale 0 and
  codes 1, and no scale is negative. Equal values therefore have equal hashes. (Groups with the reserved code
  3, which ternary weights do not have, are taken as they are stored.) An I2_S tensor whose scale fp16 cannot
  hold, and whose values no other type can have, has blocks of scale 1, and the scale in the JSON line.
* for any other type, kind is the name of the type, and its bytes as they are stored.

The hash of all is the SHA-256 of the lines "HASH  NAME", sorted. It depends on neither the order of the
tensors nor metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf import i2_s
from ggml_tern.gguf.reader import GGUFSource, GGUFTensor
from ggml_tern.tensors.names import printable

# In a byte, or in eight, the low bits of the 2-bit codes.
_LOW_BITS = np.uint64(0x5555555555555555)
_ALL_ZERO = _LOW_BITS
#: Stands for all tensors in a list of hashes.
_ALL = "(all tensors)"
#: Weights in one piece of work.
_PIECE = 1 << 20


def hash_tensors(
    source: GGUFSource, *, n_threads: int = 0, advance: Callable[[int], None] = lambda nbytes: None
) -> dict[str, str]:
    """The hash of every tensor in hexadecimal, by name, in file order.

    n_threads: 0 for one per core. advance: told the number of bytes as they are hashed.
    """
    tensors = list(source.tensors.values())
    hashes: dict[str, str] = {}
    with ThreadPoolExecutor(n_threads or None, thread_name_prefix="hash") as pool:
        for tensor, digest in zip(tensors, pool.map(_hash, tensors), strict=True):
            hashes[printable(tensor.name)] = digest
            advance(tensor.data.nbytes)
    return hashes


def hash_all(hashes: dict[str, str]) -> str:
    """The hash of a whole file from those of its tensors."""
    lines = sorted(f"{digest}  {name}\n" for name, digest in hashes.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def as_list(hashes: dict[str, str]) -> str:
    """A line "HASH  NAME" for each tensor, and one for all of them."""
    lines = [f"{digest}  {name}\n" for name, digest in hashes.items()]
    return "".join([*lines, f"{hash_all(hashes)}  {_ALL}\n"])


def _hash(tensor: GGUFTensor) -> str:
    head: list[Any] = [tensor.name, list(tensor.shape), "ternary" if tensor.is_ternary else tensor.type_name]
    if not tensor.is_ternary:
        digest = hashlib.sha256(json.dumps(head).encode() + b"\n")
        digest.update(tensor.data.data)
        return digest.hexdigest()
    if tensor.type == _core.TYPE_I2_S and not tensor.has_fp16_scale:
        head.append(float(tensor.tensor_scale).hex())
    digest = hashlib.sha256(json.dumps(head).encode() + b"\n")
    for blocks in canonical_blocks(tensor):
        digest.update(blocks.data)
    return digest.hexdigest()


def canonical_blocks(tensor: GGUFTensor) -> Iterator[NDArray[np.uint8]]:
    """A ternary tensor as Q2_0 blocks, uint8 [n, 18], in the spelling described above, piece by piece."""
    step = max(1, _PIECE // tensor.n_in)
    for begin in range(0, tensor.n_rows, step):
        type_id, packed = tensor.type, tensor.blocks[begin : begin + step]
        n_blocks = packed.shape[0] * tensor.n_in // _core.block_size(_core.TYPE_Q2_0)
        if type_id == _core.TYPE_I2_S:
            scale = np.float16(tensor.tensor_scale) if tensor.has_fp16_scale else np.float16(1)
            type_id, packed = _core.TYPE_TQ2_0, i2_s.to_tq2_0(packed, scale)
        blocks = _core.transcode(type_id, _core.TYPE_Q2_0, packed, n_threads=1)
        yield _normalized(blocks.reshape(-1, _core.type_size(_core.TYPE_Q2_0))[:n_blocks])


def _normalized(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Q2_0 blocks, uint8 [n, 18], changed in place to the one spelling of their values."""
    scales = blocks[:, :2].copy().view("<u2")[:, 0]
    codes = blocks[:, 2:].copy().view("<u8")
    is_finite = scales & 0x7C00 != 0x7C00
    zero = (scales & 0x7FFF == 0) | (is_finite & (codes == _ALL_ZERO).all(axis=1))
    if zero.any():
        scales[zero] = 0
        codes[zero] = _ALL_ZERO
    reserved = (codes & codes >> np.uint64(1) & _LOW_BITS).any(axis=1)
    negative = (scales & 0x8000 != 0) & ~reserved
    if negative.any():
        scales[negative] &= 0x7FFF
        # 0 and 2 trade places; a code with its low bit set, which is 1, stays.
        low = codes[negative] & _LOW_BITS
        codes[negative] ^= ~(low << np.uint64(1)) & ~_LOW_BITS
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = codes.view(np.uint8).reshape(-1, 16)
    return blocks


def compare(found: dict[str, str], text: str, name: str) -> list[str]:
    """What differs between `found` and a saved list, the output of ``tern hash`` in the file `name`: one line
    for each difference.

    Raises TernError when `text` is no such list.
    """
    saved: dict[str, str] = {}
    for line in text.splitlines():
        digest, separator, tensor = line.partition("  ")
        if len(digest) != 64 or not separator or not tensor:
            raise TernError(f"{name}: is not a list of hashes; make one with `tern hash FILE > {name}`")
        saved[tensor] = digest
    saved.pop(_ALL, None)
    return (
        [f"{tensor}: differs" for tensor in saved if tensor in found and found[tensor] != saved[tensor]]
        + [f"{tensor}: is missing" for tensor in saved if tensor not in found]
        + [f"{tensor}: is not in {name}" for tensor in found if tensor not in saved]
    )
