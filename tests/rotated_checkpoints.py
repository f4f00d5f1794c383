"""Model directories whose weights are ternary in a rotated basis: stored in it, with a manifest, or in the
plain one. The rotation is that of `rotated_files`, in plain numpy from its formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from convert_models import (
    byte_level_tokenizer,
    llama_config,
    qwen3_config,
    qwen3_moe_config,
    qwen35_config,
    qwen35_mtp_tensors,
    random_tensors,
    smollm_steps,
    write_byte_level,
    write_json,
)
from ggml_tern import _core
from ggml_tern.gguf.reader import GGUFSource
from rotated_files import Rotation, random_signs

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
Tensors = dict[str, F32]
Signs = dict[int, I8]

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
#: Three value heads to each of two key heads; the last of two blocks has full attention.
QWEN35 = {
    "num_hidden_layers": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama, tied": llama_config(**WIDE),
    "qwen3": qwen3_config(**WIDE, tie_word_embeddings=False),
    "qwen3moe": qwen3_moe_config(**WIDE, num_experts=3, moe_intermediate_size=256, tie_word_embeddings=False),
    "qwen35, tied": qwen35_config(**WIDE | QWEN35),
}
#: What is not rounded: routers, and the small projections of a Gated DeltaNet.
KEPT = ("mlp.gate.weight", "in_proj_a.weight", "in_proj_b.weight", "conv1d.weight")


def is_matrix(name: str, values: F32) -> bool:
    """Whether a tensor of a checkpoint is one that a rotated model folds."""
    return values.ndim == 2 and not name.endswith(KEPT)


def checkpoint(config: dict[str, Any], rng: np.random.Generator) -> Tensors:
    """Random weights under the names of a configuration's checkpoint."""
    kind = config["architectures"][0]
    if kind.startswith("Qwen3_5"):
        shapes = qwen35_mtp_tensors(config | {"num_hidden_layers": 4})
        last = config["num_hidden_layers"] - 1
        tensors = {}
        for name, values in shapes.items():
            block = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
            # Its fourth block is the one with full attention.
            if name.startswith("mtp.") or (last <= block < 3):
                continue
            tensors[name.replace("layers.3.", f"layers.{last}.")] = values
    else:
        tensors = random_tensors(config)
        for name in list(tensors):
            if "Qwen3" in kind and name.endswith("q_proj.weight"):
                for one in "qk":
                    tensors[name.replace("q_proj", f"{one}_norm")] = np.zeros(config["head_dim"], np.float32)
            if "Moe" in kind and ".mlp." in name:
                values = tensors.pop(name)
                n_embd, n_ff = config["hidden_size"], config["moe_intermediate_size"]
                shape = (n_embd, n_ff) if "down" in name else (n_ff, n_embd)
                for expert in range(config["num_experts"]):
                    tensors[name.replace("mlp.", f"mlp.experts.{expert}.")] = np.zeros(shape, np.float32)
                router = name.rpartition("mlp.")[0] + "mlp.gate.weight"
                tensors[router] = np.zeros((config["num_experts"], n_embd), np.float32)
    for name, values in tensors.items():
        drawn = rng.standard_normal(values.shape)
        drawn = drawn / np.sqrt(values.shape[-1]) if values.ndim > 1 else 1 + 0.1 * drawn
        tensors[name] = drawn.astype(np.float32)
    return tensors


def draw_signs(config: dict[str, Any], rng: np.random.Generator) -> Signs:
    return {values.shape[-1]: random_signs(rng, values.shape[-1])
            for name, values in checkpoint(config, rng).items() if is_matrix(name, values)}  # fmt: skip


def make_ternary(tensors: Tensors, block: int, signs: Signs | None, rng: np.random.Generator) -> Tensors:
    """The tensors with every matrix ternary in groups of 128, with scales that fp16 holds, as they are stored
    in the rotated basis. In place, `tensors` become what these stand for."""
    rotated = {}
    for name, values in tensors.items():
        rotated[name] = values
        if is_matrix(name, values):
            scales = rng.uniform(0.5, 1.5, (*values.shape[:-1], values.shape[-1] // 128)) * values.std()
            trits = rng.integers(-1, 2, values.shape)
            trits[:, ::128] = 1  # no group without its scale
            rotated[name] = (trits * np.repeat(scales.astype(np.float16), 128, axis=1)).astype(np.float32)
            width = values.shape[-1]
            rotation = Rotation(width, block, None if signs is None else signs[width])
            tensors[name] = rotation.unrotate(rotated[name])
    return rotated


def write_model(
    directory: Path, config: dict[str, Any], tensors: Tensors, dtype: torch.dtype = torch.float32
) -> Path:
    """A model directory; the matrices have the type."""
    directory.mkdir()
    write_json(directory / "config.json", config)
    save_file(
        {
            name: torch.from_numpy(values.copy()).to(dtype if is_matrix(name, values) else torch.float32)
            for name, values in tensors.items()
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory


def manifest(tensors: Tensors, block: int, signs: Signs | None) -> dict[str, Any]:
    """What hadamard_packing.json says of a checkpoint in which all matrices are rotated."""
    entries = []
    for name, values in tensors.items():
        if is_matrix(name, values):
            role = "inverse-after-lookup" if "embed_tokens" in name else "fold-before-matmul"
            entries.append({"name": name, "axis": -1, "role": role})
    found: dict[str, Any] = {
        "schema_version": 2,
        "kind": "hadamard-weight-fold",
        "status": "requires-matching-runtime",
        "transform": {
            "name": "normalized-signed-sylvester-walsh-hadamard",
            "block_size": block,
            "sign_mode": "identity" if signs is None else "explicit",
        },
        "tensors": entries,
    }
    if signs is not None:
        found["signs"] = {str(width): vector.tolist() for width, vector in signs.items()}
    return found


def decoded(path: Path) -> dict[str, F32]:
    """Every tensor of a GGUF file in float32, in its shape."""
    found = {}
    for name, tensor in GGUFSource(path).tensors.items():
        rows = np.asarray(tensor.rows[0 : tensor.n_rows])
        if tensor.type == _core.TYPE_BF16:
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        found[name] = rows.astype(np.float32).reshape(tensor.shape)
    return found
