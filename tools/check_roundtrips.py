"""Show that ternary weights go from type to type and through floats, and come out the same bit for bit.

    python tools/check_roundtrips.py                     # 10 million random blocks
    python tools/check_roundtrips.py --blocks 0 MODEL.gguf ...   # the ternary tensors of real models

Every path starts with packed blocks of 128 weights and ends with packed blocks again: PQ2_0 to PTQ1_0 and
back, and each of them through unpacked float32, and float16, into either. Decoded values are compared as
bits; packed bytes as well where the way there and back is by transcoding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import transcoded

PQ2_0, PTQ1_0 = _core.TYPE_PQ2_0, _core.TYPE_PTQ1_0
BLOCK = 128
#: Blocks that are checked at once: 8 million weights, 32 MB as float32.
CHUNK = 1 << 16
#: The largest finite fp16, as bits.
LARGEST = 0x7BFF
#: As the bits of a float32.
NEGATIVE_ZERO = 0x80000000


def random_blocks(rng: np.random.Generator, n: int) -> NDArray[np.uint8]:
    """n random PQ2_0 blocks, uint8 [n, 34].

    Every trit and every positive fp16 scale is as likely as any other, subnormal ones included; one block in
    64 has no weight but zero, and one in 64 a single one.
    """
    trits = rng.integers(-1, 2, (n, BLOCK), np.int8)
    trits[::64] = 0
    trits[1::64] = 0
    trits[1::64, rng.integers(BLOCK)] = 1
    scales = rng.integers(1, LARGEST + 1, n, np.uint16).view(np.float16).astype(np.float32)
    return _core.pack(PQ2_0, trits, scales[:, None])


def tensor_blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The ternary tensors of a file as PQ2_0 blocks, chunk by chunk. Blocks that decode to negative zeros,
    which floats do not keep apart, are left out."""
    for tensor in GGUFSource(path).tensors.values():
        if not tensor.is_ternary or tensor.n_in % BLOCK:
            continue
        step = max(1, CHUNK * BLOCK // tensor.n_in)
        for row in range(0, tensor.n_rows, step):
            blocks = transcoded(tensor, slice(row, row + step), PQ2_0).reshape(-1, 34)
            bits = _core.dequantize(PQ2_0, blocks).view(np.uint32)
            yield blocks[~(bits == NEGATIVE_ZERO).any(axis=1)]


def check(blocks: NDArray[np.uint8]) -> None:
    """Send PQ2_0 blocks, uint8 [n, 34], along all paths. Raises AssertionError naming the path that fails."""
    row = blocks.reshape(1, -1)
    values = _core.dequantize(PQ2_0, row)
    packed = {PQ2_0: row, PTQ1_0: _core.transcode(PQ2_0, PTQ1_0, row)}
    for type_id, data in packed.items():
        _same_bits(_core.dequantize(type_id, data), values, f"decoding {_core.type_name(type_id)}")
    back = _core.transcode(PTQ1_0, PQ2_0, packed[PTQ1_0])
    assert np.array_equal(back, row), "PQ2_0 to PTQ1_0 and back changed the bytes"

    halves = values.astype(np.float16)
    _same_bits(halves.astype(np.float32), values, "unpacking to float16")
    for floats, type_id in product((values, halves), packed):
        data, _ = _core.ternarize(type_id, floats)
        name = f"{floats.dtype} to {_core.type_name(type_id)}"
        _same_bits(_core.dequantize(type_id, data), values, name)
        # And on from there into the other one.
        other = PTQ1_0 if type_id == PQ2_0 else PQ2_0
        _same_bits(
            _core.dequantize(other, _core.transcode(type_id, other, data)),
            values,
            f"{name} to {_core.type_name(other)}",
        )


def _same_bits(found: NDArray[np.float32], expected: NDArray[np.float32], path: str) -> None:
    differ = found.view(np.uint32) != expected.view(np.uint32)
    if differ.any():
        at = int(np.argmax(differ))
        raise AssertionError(
            f"{path}: {np.count_nonzero(differ)} values differ, the first in block {at // BLOCK}: "
            f"{found.flat[at]} for {expected.flat[at]}"
        )


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--blocks", default=10_000_000, show_default=True, help="Random blocks to check.")
@click.option("--seed", type=int, help="Repeats a run.  [default: a new one]")
def main(files: tuple[Path, ...], blocks: int, seed: int | None) -> None:
    """Check random blocks, and the ternary tensors of FILES."""
    if seed is None:
        seed = int.from_bytes(np.random.bytes(4), "little")
    rng = np.random.default_rng(seed)
    sources = {f"random blocks, seed {seed}": _chunks_of_random(rng, blocks)} if blocks else {}
    for file in files:
        sources[str(file)] = tensor_blocks(file)
    for name, chunks in sources.items():
        start = time.monotonic()
        n = 0
        try:
            for chunk in chunks:
                check(chunk)
                n += len(chunk)
        except (AssertionError, TernError) as error:
            click.echo(f"{name}: FAILED after {n:,} blocks: {error}")
            sys.exit(1)
        click.echo(f"{name}: {n:,} blocks, bit-exact on every path, {time.monotonic() - start:.0f} s")


def _chunks_of_random(rng: np.random.Generator, n: int) -> Iterator[NDArray[np.uint8]]:
    for begin in range(0, n, CHUNK):
        yield random_blocks(rng, min(CHUNK, n - begin))


if __name__ == "__main__":
    main()
