"""The seed of random inputs: the same in every run, so that a gate says the same of the same sources.

TERN_TEST_SEED=<number> gives other inputs; `make fuzz` takes a fresh number, and prints it.
"""

from __future__ import annotations

import os
import zlib

import numpy as np

SEED = int(os.environ.get("TERN_TEST_SEED") or 0)


def seed_of(name: str) -> int:
    """Another one for each name, whatever else is tested."""
    return zlib.crc32(f"{SEED} {name}".encode())


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(seed_of(name))
