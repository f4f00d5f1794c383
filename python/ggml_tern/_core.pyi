"""Types of the extension module; its docstrings are in csrc/bindings/. n_threads 0: all of them."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

TYPE_F32: Final[int]
TYPE_F16: Final[int]
TYPE_Q8_0: Final[int]
TYPE_BF16: Final[int]
TYPE_TQ1_0: Final[int]
TYPE_TQ2_0: Final[int]
TYPE_I2_S: Final[int]
TYPE_Q2_0: Final[int]
TYPE_PQ2_0: Final[int]
TYPE_PTQ1_0: Final[int]
TERNARY_TYPES: Final[tuple[int, ...]]
ROTATED_ARCHITECTURES: Final[tuple[str, ...]]

class FormatError(ValueError): ...

def type_name(type: int) -> str: ...
def block_size(type: int) -> int: ...
def type_size(type: int) -> int: ...
def ternarize(
    type: int,
    weights: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    out: NDArray[np.uint8] | None = None,
    n_threads: int = 0,
) -> tuple[NDArray[np.uint8], dict[str, Any]]: ...
def pack(
    type: int, trits: NDArray[np.int8], scales: NDArray[np.float32], n_threads: int = 0
) -> NDArray[np.uint8]: ...
def unpack(
    type: int, data: NDArray[np.uint8], n_threads: int = 0
) -> tuple[NDArray[np.int8], NDArray[np.float32]]: ...
def dequantize(type: int, data: NDArray[np.uint8], n_threads: int = 0) -> NDArray[np.float32]: ...
def transcode(
    source_type: int, target_type: int, data: NDArray[np.uint8], n_threads: int = 0
) -> NDArray[np.uint8]: ...
def matmul(
    type: int,
    data: NDArray[np.uint8],
    x: NDArray[np.float32],
    isa: str | None = None,
    n_threads: int = 0,
    rotation: Rotation | None = None,
) -> NDArray[np.float32]: ...

class TiledMatrix:
    def __init__(self, type: int, data: NDArray[np.uint8], dense: bool = False) -> None: ...
    @property
    def n_in(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...
    def matmul(
        self,
        x: NDArray[np.float32],
        isa: str | None = None,
        n_threads: int = 0,
        rotation: Rotation | None = None,
    ) -> NDArray[np.float32]: ...

def read_bandwidth(n_threads: int = 0, n_bytes: int = ..., seconds: float = 0.5) -> float: ...
def multiply_add_peak(n_threads: int = 0, isa: str | None = None, seconds: float = 0.3) -> float: ...
def time_products(
    matrices: list[TiledMatrix],
    n_cols: int,
    n_threads: int = 0,
    repeats: int = 5,
    isa: str | None = None,
) -> list[tuple[float, float]]: ...
def attention(
    q: NDArray[np.float32],
    type_k: int,
    k: NDArray[np.uint8],
    type_v: int,
    v: NDArray[np.uint8],
    mask: NDArray[np.float16] | None = None,
    scale: float | None = None,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    sinks: Sequence[float] | None = None,
    isa: str | None = None,
    n_threads: int = 0,
) -> NDArray[np.float32]: ...
def squared_relu_for_silu(x: NDArray[np.float32], isa: str | None = None) -> NDArray[np.float32]: ...
def available_isas() -> list[str]: ...
def tiles_roundtrip(type: int, data: NDArray[np.uint8], dense: bool = False) -> NDArray[np.uint8]: ...
def tiled_bytes(type: int, n_in: int, n_out: int, dense: bool = False) -> int: ...
def column_bytes(n_in: int) -> int: ...
def most_attention_scratch(
    n_tokens: int, n_heads: int, n_kv_heads: int, d_k: int, d_v: int, n_kv: int
) -> int: ...
def machine_memory(root: str = "") -> tuple[int, int]: ...
def read_gguf_header(path: str | PathLike[str]) -> dict[str, Any]: ...

class Rotation:
    def __init__(
        self,
        n_in: int,
        block: int,
        signs: NDArray[np.int8] | None = None,
        v_heads: tuple[int, int] | None = None,
    ) -> None: ...
    @property
    def n_in(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def signs(self) -> NDArray[np.int8] | None: ...
    @property
    def v_heads(self) -> tuple[int, int] | None: ...
    def rotate(self, x: NDArray[np.float32], n_threads: int = 0) -> NDArray[np.float32]: ...
    def unrotate(self, z: NDArray[np.float32], n_threads: int = 0) -> NDArray[np.float32]: ...

def may_be_rotated(name: str) -> bool: ...
def read_hadamard(path: str | PathLike[str]) -> dict[str, Any] | None: ...
