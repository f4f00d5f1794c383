"""Stage 1, read: a Hugging Face model directory as one flat set of lazily mapped tensors.

The safetensors package validates every file (header, extents, total size); gguf-py's reader of the same
format gives the byte range of each tensor, which is mapped when it is asked for and unmapped when the array
is dropped. A tensor therefore costs page cache and no anonymous memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ggml_tern.errors import TernError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: safetensors dtype -> numpy dtype of the array that `Checkpoint.load` returns. BF16 has no numpy dtype: its
#: bits come as uint16.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `file` is the safetensors file, `dtype` its safetensors name (BF16, F16, F32,
    ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: LocalTensor


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises TernError when it is missing, unreadable, not JSON or not an
    object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TernError(f"{path}: no such file") from None
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TernError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise TernError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Checkpoint:
    """An opened model directory.

    Attributes:
        directory: the model directory.
        config: the content of config.json.
        tensors: name -> StoredTensor, over all shards, in file order.

    Raises TernError for a directory without config.json or safetensors, a missing shard, an index that
    disagrees with the shards, and a truncated or malformed safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.exists():
            raise TernError(
                f"{directory}: no such directory; expected a Hugging Face model directory with {CONFIG_FILE}"
            )
        if not directory.is_dir():
            raise TernError(
                f"{directory}: not a directory; give the model directory that holds {CONFIG_FILE}"
            )
        if not (directory / CONFIG_FILE).is_file():
            raise TernError(f"{directory}: has no {CONFIG_FILE}; expected a Hugging Face model directory")
        self.directory = directory
        self.config = read_json(directory / CONFIG_FILE)
        self.tensors: dict[str, StoredTensor] = {}
        if (directory / INDEX_FILE).is_file():
            self._open_shards()
        elif (directory / SINGLE_FILE).is_file():
            for tensor in _open_safetensors(directory / SINGLE_FILE):
                self.tensors[tensor.name] = tensor
        else:
            found = sorted(
                path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
            )
            hint = f"; found {', '.join(found[:3])}, save the model as safetensors first" if found else ""
            raise TernError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")

    def _open_shards(self) -> None:
        index_path = self.directory / INDEX_FILE
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TernError(f"{index_path}: has no weight_map; download the file again")
        shards: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            # A shard name is a plain file name: a path would let an index reach files outside the model
            # directory.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise TernError(
                    f"{index_path}: tensor {name} names the shard {shard!r}, which is not a plain file name"
                )
            shards.setdefault(shard, []).append(name)
        missing = [shard for shard in sorted(shards) if not (self.directory / shard).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise TernError(
                f"{self.directory}: shard {missing[0]}{more} is missing, of {len(shards)} that {INDEX_FILE} "
                "lists; finish the download"
            )
        for shard in sorted(shards):
            expected = set(shards[shard])
            for tensor in _open_safetensors(self.directory / shard):
                if tensor.name not in expected:
                    raise TernError(
                        f"{self.directory / shard}: holds {tensor.name}, which {INDEX_FILE} has elsewhere"
                    )
                expected.discard(tensor.name)
                self.tensors[tensor.name] = tensor
            if expected:
                raise TernError(
                    f"{self.directory / shard}: lacks {min(expected)}, which {INDEX_FILE} places there"
                )

    def files(self) -> list[Path]:
        """Every file that the conversion may read from: what an output must never overwrite."""
        return sorted(path for path in self.directory.iterdir() if path.is_file())

    def load(self, tensor: StoredTensor) -> NDArray[Any]:
        """The tensor as a read-only mapped array of its stored shape: float32, float16, or uint16 holding
        bfloat16 bits."""
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise TernError(
                f"{tensor.file}: tensor {tensor.name} is stored as {tensor.dtype}; ternconv reads "
                f"{', '.join(_DTYPES)}, so save the model in one of these"
            )
        if tensor.data.data_range.size == 0:
            return np.empty(tensor.shape, dtype)
        raw = np.memmap(
            tensor.file, mode="r", offset=tensor.data.data_range.offset, shape=tensor.data.data_range.size
        )
        return raw.view(dtype).reshape(tensor.shape)


def _open_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file, after the safetensors package has accepted it."""
    try:
        with safe_open(path, framework="np"):
            pass
        header = SafetensorsLocal(path).tensors
    except (SafetensorError, ValueError, KeyError) as error:
        raise TernError(
            f"{path}: truncated or damaged safetensors file of {path.stat().st_size} bytes ({error}); "
            "download it again"
        ) from None
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [StoredTensor(name, path, data.dtype, data.shape, data) for name, data in header.items()]
