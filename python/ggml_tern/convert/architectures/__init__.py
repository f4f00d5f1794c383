"""Stage 2, map: which tensors and metadata a model has. One class per family, behind a registry."""

from __future__ import annotations

from ggml_tern.convert.architectures.base import Architecture, Role, TensorSpec
from ggml_tern.convert.architectures.config import Config
from ggml_tern.convert.architectures.gemma3 import Gemma3
from ggml_tern.convert.architectures.llama import Llama
from ggml_tern.convert.checkpoint import CONFIG_FILE, Checkpoint
from ggml_tern.errors import TernError

#: config.json's `architectures` entry -> the class that serves it.
REGISTRY: dict[str, type[Architecture]] = {
    name: architecture for architecture in (Gemma3, Llama) for name in architecture.hf_names
}


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture of a checkpoint, with its configuration checked.

    Raises TernError naming the known architectures when it is none of them.
    """
    where = str(checkpoint.directory / CONFIG_FILE)
    config = Config(checkpoint.config, where)
    names = config.strings("architectures")
    for name in names:
        if name in REGISTRY:
            return REGISTRY[name](config)
    found = f"architecture {', '.join(names)}" if names else "no architecture"
    raise TernError(f"{where}: {found} in architectures; ternconv knows {', '.join(sorted(REGISTRY))}")


__all__ = ["REGISTRY", "Architecture", "Role", "TensorSpec", "find_architecture"]
