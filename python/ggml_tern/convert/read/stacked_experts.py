"""Experts that stand in one tensor, as tensors of their own.

Three spellings are about. A checkpoint of transformers has `experts.N.gate_proj.weight` and so on, a tensor
for each expert. A model that is saved as it lies in memory there has `experts.gate_up_proj`, [n_expert, 2
n_ff, n_in] with the gate's rows first, and `experts.down_proj`, [n_expert, n_in, n_ff]. MLX stacks each of
the three: `switch_mlp.gate_proj.weight`, [n_expert, n_ff, n_in]. In all of them an expert's rows lie side by
side, so that it is a range of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gguf.utility import LocalTensor, LocalTensorRange

from ggml_tern.convert.read.stored_tensors import StoredTensor
from ggml_tern.limits import MAX_EXPERTS

_STACKED = re.compile(
    r"(?P<prefix>.*\.)(experts|switch_mlp)\.(?P<what>gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?"
)
#: What the rows of a stacked tensor are of, in order.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}


def unstacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with those of its experts one by one, under the names that transformers
    gives them in files. What does not divide evenly stays as it is."""
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        parts = _PARTS.get(match["what"], (match["what"],)) if match is not None else ()
        if match is None or not _divides(tensor, len(parts)):
            result[name] = tensor
            continue
        for expert, part, piece in _pieces(tensor, parts):
            own = f"{match['prefix']}experts.{expert}.{part}.weight"
            result[own] = replace(piece, name=own)
    return result


def _divides(tensor: StoredTensor, n_parts: int) -> bool:
    shape = tensor.data.shape
    return (
        len(shape) == 3
        and 0 < shape[0] <= MAX_EXPERTS
        and shape[1] % n_parts == 0
        and tensor.data.data_range.size % (shape[0] * n_parts) == 0
    )


def _pieces(tensor: StoredTensor, parts: tuple[str, ...]) -> Iterator[tuple[int, str, StoredTensor]]:
    """The parts of every expert: its number, the part, and the range of the file."""
    n_experts, n_rows, n_in = tensor.data.shape
    whole = tensor.data.data_range
    nbytes = whole.size // (n_experts * len(parts))
    shape = (n_rows // len(parts), n_in)
    for number in range(n_experts * len(parts)):
        expert, part = divmod(number, len(parts))
        place = LocalTensorRange(whole.filename, whole.offset + number * nbytes, nbytes)
        data = LocalTensor(tensor.data.dtype, shape, place)
        yield expert, parts[part], replace(tensor, shape=shape, data=data)
