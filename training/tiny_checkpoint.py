"""Write a trained tiny model as a Hugging Face directory: see train_tiny.py.

The weights are stored in the rotated basis, where they are exactly {-d, 0, +d} in groups of 128, and
hadamard_packing.json says how they were rotated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedTokenizerFast

import tiny_reference as reference
import tiny_text

Tensors = dict[str, Tensor]


def stored_tensors(model: nn.Module) -> tuple[Tensors, list[str]]:
    """The tensors in the rotated basis, bfloat16, and the names of the rotated ones."""
    tensors, rotated = {}, []
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if "parametrizations" not in name:
                tensors[f"{name}.{kind}"] = parameter.detach().bfloat16()
        if parametrize.is_parametrized(module):
            rotation = module.parametrizations.weight
            tensors[f"{name}.weight"] = rotation[0].store(rotation.original.detach()).bfloat16()
            rotated.append(f"{name}.weight")
    return tensors, rotated


def manifest(model: nn.Module, rotated: list[str]) -> dict[str, Any]:
    """What hadamard_packing.json says."""
    signs: dict[str, list[int]] = {}
    for name in rotated:
        rotation = model.get_submodule(name.removesuffix(".weight")).parametrizations.weight[0]
        signs[str(len(rotation.signs))] = [int(sign) for sign in rotation.signs]
    return {
        "schema_version": 2 if model.config.tie_word_embeddings else 1,
        "kind": "hadamard-weight-fold",
        "status": "requires-matching-runtime",
        "transform": {
            "name": "normalized-signed-sylvester-walsh-hadamard",
            "block_size": rotation.block,
            "sign_mode": "explicit",
        },
        "signs": dict(sorted(signs.items(), key=lambda item: int(item[0]))),
        "tensors": [
            {
                "name": name,
                "axis": -1,
                "role": "inverse-after-lookup" if "embed_tokens" in name else "fold-before-matmul",
            }
            for name in rotated
        ],
    }


def write_directory(path: Path, model: Any, tokenizer: Tokenizer, held_out: Tensor, how: str) -> None:
    """Write the directory, whole or not at all. `how`: a sentence for the model card on the training."""
    temporary = path.with_name(f".{path.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors, rotated = stored_tensors(model)
        content = json.dumps(manifest(model, rotated), separators=(",", ":"))
        # One tensor a line.
        (temporary / reference.MANIFEST).write_text(content.replace('{"name":', '\n{"name":') + "\n")
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(temporary)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=tokenizer.id_to_token(0), clean_up_tokenization_spaces=False
        ).save_pretrained(temporary)
        (temporary / "README.md").write_text(_card(path.name, temporary, held_out, how))
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _card(name: str, directory: Path, held_out: Tensor, how: str) -> str:
    model, tokenizer = reference.load(directory)
    config = model.config
    perplexity = reference.perplexity(model, held_out.tolist())
    torch.manual_seed(0)
    samples = [reference.complete(model, tokenizer, prompt, 80, 0.6) for prompt in reference.PROMPTS]
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    quoted = "\n\n".join("> " + sample.replace("\n", "\n> ") for sample in samples)
    return f"""---
language: en
license: mit
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A tiny language model to test and to show ternary weights in a rotated basis: {type(model).__name__},
{config.num_hidden_layers} blocks, {config.hidden_size} wide, vocabulary {config.vocab_size},
{n_weights / 1e6:.2f} M weights. It writes sentences in the style of its text, and knows nothing else.

Every matrix is ternary, {{-d, 0, +d}} with one scale in 128 weights, and was so from the first step of
its training. Norms, convolutions and the like are full precision, and so are `in_proj_a` and
`in_proj_b` where the model has them.

The matrices are stored in a Hadamard-rotated basis, as `{reference.MANIFEST}` says: taken for
plain weights they give nonsense. The plain ones are, row by row and for every tensor that it names,
`w = s * (H w_stored)`: H is the normalized Sylvester-Walsh-Hadamard matrix, blockwise, and s the
+-1 signs of the row's width. `training/tiny_reference.py` does that, in numpy and PyTorch alone, loads
the model into transformers, and with `--save-plain` writes a plain checkpoint.

- Text: stories of the World English Bible, without notes and headings, quotation marks and dashes
  made ASCII: {", ".join(tiny_text.TRAINING)}.
  From Debian's package `{tiny_text.PACKAGE}` {tiny_text.VERSION}, SHA-256
  `{tiny_text.SHA256}`.
  Its translators gave it to the public domain; "World English Bible" is a trademark for the
  unchanged text.
- Training: `training/train_tiny.py {name}`.
  {how}
- Perplexity on `held-out.txt` ({", ".join(tiny_text.HELD_OUT)}; not trained on; {len(held_out)} tokens):
  **{perplexity:.2f}**, by transformers in float32 on these files, in windows of 256 tokens of which
  the second half counts.
- Licence of the weights: MIT, as this repository.

What it writes, at temperature 0.6:

{quoted}
"""
