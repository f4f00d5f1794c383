"""The trained models of models/: stored as they say, and they have learnt their text.

The perplexities are those of training/tiny_reference.py, which is plain numpy and PyTorch: no part of the
plug-in or the converter has a hand in them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import tiny_reference as reference
from reference import ROOT

F32 = npt.NDArray[np.float32]
GROUP = 128
N_TOKENS = 1024
#: Perplexity on the first N_TOKENS of the held-out text, with a margin of some per cent.
BOUNDS = {"tiny-qwen3": 42.5, "tiny-qwen35": 41.0}
DIRECTORIES = {name: ROOT / "models" / name for name in BOUNDS}


@functools.cache
def stored(directory: Path) -> dict[str, F32]:
    """The rotated tensors, as they are stored."""
    tensors = load_file(directory / "model.safetensors")
    return {name: tensors[name].float().numpy() for name in reference.Manifest.read(directory).names}


@functools.cache
def perplexity(name: str, unrotated: bool = True) -> float:
    torch.set_num_threads(1)  # small products, and other tests beside
    model, tokenizer = reference.load(DIRECTORIES[name], unrotated)
    tokens = tokenizer.encode(reference.HELD_OUT.read_text()).ids
    result: float = reference.perplexity(model, tokens[:N_TOKENS])
    return result


@pytest.mark.parametrize("name", BOUNDS)
def test_every_folded_tensor_is_ternary_in_the_stored_basis(name: str) -> None:
    for tensor, values in stored(DIRECTORIES[name]).items():
        groups = values.reshape(-1, GROUP)
        scales = np.abs(groups).max(axis=1, keepdims=True)
        assert ((groups == 0) | (np.abs(groups) == scales)).all(), tensor
        assert (scales > 0).all(), tensor
        assert (scales == scales.astype(np.float16)).all(), f"{tensor}: a scale is no float16"
        assert 0.2 < (groups == 0).mean() < 0.6, tensor


@pytest.mark.parametrize("name", BOUNDS)
def test_no_folded_tensor_is_ternary_in_the_plain_basis(name: str) -> None:
    manifest = reference.Manifest.read(DIRECTORIES[name])
    for tensor, values in stored(DIRECTORIES[name]).items():
        plain = reference.unrotate(values[:8], manifest.signs[values.shape[1]], manifest.block)
        assert len(np.unique(np.abs(plain[0]).round(6))) > 6, tensor


@pytest.mark.parametrize("name", BOUNDS)
def test_the_manifest_names_every_matrix_and_both_signs(name: str) -> None:
    manifest = reference.Manifest.read(DIRECTORIES[name])
    tensors: dict[str, Any] = load_file(DIRECTORIES[name] / "model.safetensors")
    matrices = {
        n for n, t in tensors.items() if t.ndim == 2 and "in_proj_a" not in n and "in_proj_b" not in n
    }
    assert set(manifest.names) == matrices
    assert ("lm_head.weight" in matrices) == (name == "tiny-qwen35")
    for width, signs in manifest.signs.items():
        assert signs.shape == (width,) and width % manifest.block == 0
        assert set(signs.tolist()) == {-1, 1}


@pytest.mark.parametrize("name", BOUNDS)
def test_it_has_learnt_its_text(name: str) -> None:
    assert perplexity(name) < BOUNDS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_taken_for_plain_weights_it_is_lost(name: str) -> None:
    """The control: the perplexity above comes from the rotation being undone."""
    assert perplexity(name, unrotated=False) > 5 * perplexity(name)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_plain_copy_is_the_same_model_to_transformers(name: str, tmp_path: Path) -> None:
    reference.write_plain(DIRECTORIES[name], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(reference.HELD_OUT.read_text()).ids
    assert reference.perplexity(model.eval(), tokens[:N_TOKENS]) == pytest.approx(perplexity(name), rel=1e-3)


@pytest.mark.parametrize("block", [128, 256])
def test_unrotating_undoes_rotating(block: int, rng: np.random.Generator) -> None:
    plain = rng.standard_normal((5, 3 * block)).astype(np.float32)
    signs = rng.choice(np.array([-1, 1], np.int8), 3 * block)
    rotated = reference.rotate(plain, signs, block)
    assert np.abs(rotated - plain).max() > 0.5
    np.testing.assert_allclose(reference.unrotate(rotated, signs, block), plain, atol=1e-5)
    r, c = rng.integers(0, block, 2)
    sign = -1 if bin(r & c).count("1") % 2 else 1
    assert reference.hadamard(block)[r, c] == pytest.approx(sign / np.sqrt(block))
