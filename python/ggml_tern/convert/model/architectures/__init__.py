"""Map: which tensors and metadata a model has. One class per family, behind a registry."""

from __future__ import annotations

from ggml_tern.convert.model.architectures.base import Architecture, Role, TensorSpec
from ggml_tern.convert.model.architectures.bitnet import BitNet
from ggml_tern.convert.model.architectures.gemma3 import Gemma3
from ggml_tern.convert.model.architectures.llama import Llama, Mistral
from ggml_tern.convert.model.architectures.qwen import Qwen2, Qwen3, Qwen3Moe
from ggml_tern.convert.model.architectures.qwen35 import Qwen35
from ggml_tern.convert.read.checkpoint import Checkpoint
from ggml_tern.convert.read.config import Config
from ggml_tern.convert.read.json_files import CONFIG_FILE
from ggml_tern.errors import TernError

#: config.json's `architectures` entry -> the class that serves it.
REGISTRY: dict[str, type[Architecture]] = {
    name: architecture
    for architecture in (BitNet, Gemma3, Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, Qwen35)
    for name in architecture.hf_names
}


#: config.json's `model_type` -> the same.
_BY_MODEL_TYPE = {name: kind for kind in REGISTRY.values() for name in kind.model_types}


def find_architecture(checkpoint: Checkpoint, *, keep_mtp: bool = False) -> Architecture:
    """The architecture of a checkpoint, with its configuration checked.

    Args:
        keep_mtp: convert the multi-token prediction head too.

    Raises TernError naming the known architectures when it is none of them.
    """
    where = str(checkpoint.directory / CONFIG_FILE)
    config = Config(checkpoint.config, where)
    names = config.strings("architectures")
    model_type = config.string("model_type", "")
    known = next((REGISTRY[name] for name in names if name in REGISTRY), None)
    # Without its head, transformers saves a model as LlamaModel, Qwen3Model, ...; other tools name none.
    by_type = known is None and all(name.endswith("Model") for name in names)
    if by_type:
        known = _BY_MODEL_TYPE.get(model_type)
    if known is None:
        found = f"architecture {', '.join(names)}" if names else "no architecture"
        also = f" and model_type is {model_type!r}" if by_type and model_type else ""
        raise TernError(
            f"{where}: {found} in architectures{also}; ternconv knows {', '.join(sorted(REGISTRY))}"
        )
    architecture = known(config)
    if by_type:
        said = f"architectures names {', '.join(names)}" if names else "there is no key architectures"
        architecture.notes.append(f"{said}; by its model_type, {model_type}, it is a {known.hf_names[0]}")
    if keep_mtp:
        architecture.keep_mtp_head()
    left_out = {part for name in checkpoint.tensors if (part := architecture.part_left_out(name)) is not None}
    architecture.notes += [f"{part} is left out" for part in sorted(left_out)]
    return architecture


__all__ = ["REGISTRY", "Architecture", "Role", "TensorSpec", "find_architecture"]
