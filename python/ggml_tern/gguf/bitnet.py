"""What the files of BitNet models say: which activation the gate has, and bitnet.cpp's names for the models.

bitnet.cpp (github.com/microsoft/BitNet) runs the released models in a fork of llama.cpp, under architectures
of its own, ``bitnet-b1.58`` and ``bitnet-25``. Both have one graph there, that of llama.cpp's ``bitnet`` with
squared ReLU in place of SiLU: the same tensors under the same names, rotary embedding of the same kind, the
embedding as head. So a file becomes one that llama.cpp reads by its keys alone.

llama.cpp's graph has SiLU where the released model has squared ReLU (its pull request 25885), and no other
graph has BitNet's norms. A file says which one it wants under the key that other architectures of llama.cpp
read, and the plug-in turns the one into the other in the products with gates of its own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource

ARCHITECTURE = "bitnet"
#: bitnet.cpp's architectures with the graph of llama.cpp's, but for the activation.
FOREIGN_ARCHITECTURES = ("bitnet-b1.58", "bitnet-25")

#: The file's word on the activation of the gate, "silu" where it is missing.
ACTIVATION_KEY = f"{ARCHITECTURE}.hidden_activation"
SQUARED_RELU = "relu2"


def stock_key(key: str, architecture: str) -> str:
    """A key of a file of bitnet.cpp as llama.cpp reads it; any other key as it is."""
    if architecture in FOREIGN_ARCHITECTURES and key.startswith(f"{architecture}."):
        return f"{ARCHITECTURE}{key.removeprefix(architecture)}"
    return key


def has_squared_relu(metadata: Mapping[str, Any]) -> bool:
    """Whether a file wants squared ReLU: by its key, or by being of bitnet.cpp, which has nothing else."""
    if metadata.get("general.architecture") in FOREIGN_ARCHITECTURES:
        return True
    return bool(metadata.get(ACTIVATION_KEY) == SQUARED_RELU)


def check_foreign(source: GGUFSource) -> None:
    """Raise TernError for a file of bitnet.cpp that llama.cpp's graph is too small for."""
    if head := source.tensors.get("output.weight"):
        raise TernError(
            f"{head.where}: the model has a head of its own, and llama.cpp's {ARCHITECTURE} takes the "
            "embedding for it; only bitnet.cpp runs this model"
        )


def renaming_note(architecture: str) -> str:
    """What to tell of a file whose architecture is exchanged."""
    return (
        f"the architecture {architecture}, which only bitnet.cpp knows, is written as {ARCHITECTURE} with "
        f"{ACTIVATION_KEY} = {SQUARED_RELU}"
    )


def notes_on_squared_relu(types: Mapping[str, int]) -> list[str]:
    """What to know of a file with squared ReLU whose tensors, by their names, have these types."""
    gates = {type_id for name, type_id in types.items() if name.endswith(".ffn_gate.weight")}
    if gates <= {_core.TYPE_PTQ1_0, _core.TYPE_PQ2_0}:
        return []
    return [
        "llama.cpp computes SiLU where this model has squared ReLU, which spoils its answers; convert with "
        "--type ptq1_0 or pq2_0, for which ggml-tern computes it"
    ]
