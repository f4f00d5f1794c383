"""Models that ternconv rotates, in stock llama.cpp with the plug-in: the logits of transformers. And made
plain again, in stock llama.cpp alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import compare_logits
from ggml_tern import _core
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.rotate.rotation import RotationChoice, random_signs
from ggml_tern.gguf.reader import HADAMARD, GGUFSource
from ggml_tern.gguf.repacking import unrotate
from ggml_tern.tensors.types import PQ2_0, PTQ1_0
from rotated_checkpoints import is_matrix
from rotated_files import Rotation
from transformers_models import plain_logits, plain_model, served_logits, ternary, transformers_dir

SEED, BLOCK = 2026, 128


def rotated_dir(directory: Path, family: str, case: str) -> Path:
    """A model as transformers saves it, with every matrix ternary in the rotated basis."""
    transformers_dir(directory, family, case)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        if is_matrix(name, values.numpy()):
            rotation = Rotation(values.shape[-1], BLOCK, random_signs(SEED, values.shape[-1]))
            stored = ternary(torch.from_numpy(rotation.rotate(values.numpy())))
            tensors[name] = torch.from_numpy(rotation.unrotate(stored.numpy()))
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def without_the_keys(path: Path, output: Path) -> Path:
    """The same weights in a file that says nothing of a rotation."""
    source = GGUFSource(path)
    header = source.parts[0].header
    data = path.read_bytes()
    table = min(tensor.extent[0] for tensor in source.tensors.values())
    kept = [extent for name, extent in header["key_extents"].items() if not name.startswith(HADAMARD)]
    head = data[:16] + len(kept).to_bytes(8, "little") + b"".join(data[b:e] for b, e in kept)
    head += data[table : max(tensor.extent[1] for tensor in source.tensors.values())]
    output.write_bytes(head + bytes(-len(head) % header["alignment"]) + data[header["data_offset"] :])
    return output


@pytest.mark.parametrize(
    ("family", "case"),
    [("llama", ""), ("qwen3", ""), ("qwen3", "head 128, tied"), ("qwen3moe", ""), ("qwen35", "")],
)
def test_a_rotated_model_is_served_as_it_is(tmp_path: Path, family: str, case: str) -> None:
    directory = rotated_dir(tmp_path / "hf", family, case)
    tied = json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    choice = TypeChoice(PTQ1_0, PQ2_0, None if tied else PQ2_0)
    report = convert(directory, tmp_path / "out.gguf", choice, rotation=RotationChoice(BLOCK, SEED))
    rotations = (_core.read_hadamard(report.output) or {})["rotations"]
    packed = {t.spec.name: s for t, s in zip(report.targets, report.stats, strict=True) if s.groups}
    assert packed.keys() == rotations.keys()
    assert all(stats.ternary_groups == stats.groups for stats in packed.values())

    tokens = np.random.default_rng(1).integers(4, 400, 100).astype(np.int32)
    expected = plain_logits(plain_model(directory), tokens.tolist())
    assert 0.3 < compare_logits.entropy(expected) < 6

    def agreement(path: Path, layers: int) -> Any:
        serving = compare_logits.Serving(n_gpu_layers=layers, kv_type=_core.TYPE_F32)
        found = compare_logits.compare(expected, compare_logits.host_logits(path, tokens, serving))
        print(family, case, path.name, layers, found)
        return found

    for layers in (99, 0):
        served = agreement(report.output, layers)
        assert served.mean_kl <= 1e-3 and served.top1 >= 0.97
    # Without the rotation it would be another model.
    assert agreement(without_the_keys(report.output, tmp_path / "ignored.gguf"), 99).mean_kl > 0.1

    unrotate(GGUFSource(report.output), tmp_path / "plain.gguf", _core.TYPE_F32)
    np.testing.assert_allclose(
        served_logits(tmp_path / "plain.gguf", tokens.tolist()),
        expected,
        rtol=2e-3,
        atol=5e-3 * float(expected.std()),
    )
