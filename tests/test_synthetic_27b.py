"""Synthetic rotated models (tools/make_synthetic.py), and a narrow one built like the 27B against torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner

import check_27b
import compare_logits
import make_synthetic as synthetic
from ggml_tern import _core
from ggml_tern.tensors.types import PTQ1_0

Serving = compare_logits.Serving

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

TINY = synthetic.Shape(width=256, ffn=768, layers=2, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)
# What the 27B has, only narrow: three layers of Gated DeltaNet with three value heads to a key head, and one
# of gated attention with a quarter of each head rotated by position.
NARROW = synthetic.HybridShape(
    width=256, ffn=768, layers=4, heads=4, kv_heads=2, head_dim=64, rope_sections=(3, 3, 2, 0),
    key_heads=2, value_heads=6, state=64, vocabulary=2048,
)  # fmt: skip
BLOCK = 128


def data_of(path: Path) -> bytes:
    return path.read_bytes()[_core.read_gguf_header(str(path))["data_offset"] :]


# ---- the files ----


def test_the_27b_has_the_keys_and_tensors_of_the_released_file(tmp_path: Path) -> None:
    path = synthetic.write_header_only(
        tmp_path / "27b.gguf", "ptq1_0", synthetic.MODELS["qwen35-27b"], rotation_block=1024
    )
    header = _core.read_gguf_header(str(path))
    assert Counter(tensor["type"] for tensor in header["tensors"]) == {
        PTQ1_0.id: 402,
        _core.TYPE_F32: 353,
        _core.TYPE_BF16: 96,
    }
    in_bf16 = {t["name"].split(".")[2] for t in header["tensors"] if t["type"] == _core.TYPE_BF16}
    assert in_bf16 == {"ssm_alpha", "ssm_beta"}
    assert abs(path.stat().st_size / 1e9 - 5.95) < 0.01
    assert path.stat().st_blocks * 512 < 20e6

    hadamard = _core.read_hadamard(str(path))
    assert hadamard is not None
    assert (hadamard["version"], hadamard["block_size"], hadamard["sign_mode"]) == (1, 1024, "explicit")
    assert len(hadamard["weight_names"]) == 401
    assert hadamard["inverse_weight_names"] == ["token_embd.weight"]
    assert sorted(hadamard["signs"]) == [5120, 6144, 17408]
    assert hadamard["gdn_v_grouped"] and not hadamard["tied_output"]
    assert hadamard["rotations"]["blk.62.ssm_out.weight"].v_heads == (16, 48)


@pytest.mark.parametrize("shape", [TINY, NARROW], ids=["tied", "hybrid"])
def test_rotation_is_all_that_a_rotated_file_adds(
    shape: synthetic.Shape | synthetic.HybridShape, tmp_path: Path
) -> None:
    """Or speeds with and without it would not be of the same weights."""
    plain, rotated = (
        synthetic.write_synthetic(tmp_path / f"{block}.gguf", "pq2_0", shape, rotation_block=block)
        for block in (None, BLOCK)
    )
    assert data_of(plain) == data_of(rotated)
    assert _core.read_hadamard(str(plain)) is None
    hadamard = _core.read_hadamard(str(rotated))
    assert hadamard is not None
    tensors = _core.read_gguf_header(str(rotated))["tensors"]
    ternary = {t["name"] for t in tensors if t["type"] == _core.TYPE_PQ2_0}
    assert set(hadamard["rotations"]) == ternary
    assert hadamard["tied_output"] == (shape is TINY)
    assert all(abs(signs.mean()) < 0.5 for signs in hadamard["signs"].values())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--type", "tq2_0"], "only PQ2_0 and PTQ1_0 matrices can be rotated"),
        (["--rotation-block", "2048"], "divides the rows of 1024, 2048, 3072"),
        (["--rotation-block", "96"], "a power of two"),
    ],
)
def test_impossible_rotations_are_refused(arguments: list[str], problem: str, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    result = CliRunner().invoke(synthetic.main, ["--rotate", *arguments, "--layers", "1", "--out", str(out)])
    assert result.exit_code == 1
    assert problem in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [TINY, NARROW], ids=["tied", "hybrid"])
def test_a_table_made_in_parts_is_the_whole(
    shape: synthetic.Shape | synthetic.HybridShape, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(synthetic, "CHUNK", int(rng.integers(1, 2000)))
    for tensor in synthetic.tensors(shape):
        if tensor.name in (synthetic.EMBEDDING, synthetic.HEAD):
            tensor = replace(tensor, n_out=100)
            parts = [piece.data for piece in synthetic.pieces(tensor, PTQ1_0, 0)]
            assert len(parts) > 1
            assert np.array_equal(np.concatenate(parts), synthetic.encode(tensor, PTQ1_0, 0))


# ---- the model ----


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    path: Path = synthetic.write_synthetic(folder / "narrow.gguf", "ptq1_0", NARROW, rotation_block=BLOCK)
    return path


@pytest.fixture(scope="module")
def tokens() -> I32:
    """More than the 64 that torch's Gated DeltaNet takes at a time."""
    return np.random.default_rng(0).integers(0, NARROW.vocabulary, 80).astype(np.int32)


@pytest.fixture(scope="module")
def plain(narrow: Path, tokens: I32) -> F32:
    logits: F32 = check_27b.plain_logits(narrow, tokens)
    return logits


def test_hadamard_is_the_kronecker_product_of_smaller_ones() -> None:
    h = check_27b.hadamard(128)
    assert h[5, 6] == -h[0, 0]  # 5 & 6 has one bit
    assert h[5, 5] == h[0, 0]  # 5 & 5 has two
    assert torch.allclose(h @ h, torch.eye(128), atol=1e-6)
    assert torch.equal(torch.kron(check_27b.hadamard(4), check_27b.hadamard(16)), check_27b.hadamard(64))


@pytest.mark.parametrize(("n_gpu_layers", "n_batch"), [(99, 512), (99, 1), (0, 512)])
def test_served_logits_are_those_of_torch_on_plain_weights(
    n_gpu_layers: int, n_batch: int, narrow: Path, tokens: I32, plain: F32
) -> None:
    serving = Serving(n_gpu_layers=n_gpu_layers, n_batch=n_batch, n_threads=1)
    got = compare_logits.compare(plain, compare_logits.host_logits(narrow, tokens, serving))
    print(got)
    assert got.mean_kl <= 1e-3
    assert got.top1 >= 0.9


def test_without_its_rotation_it_is_another_model(
    narrow: Path, tokens: I32, plain: F32, tmp_path: Path
) -> None:
    """The control of the above, and proof that torch would have noticed: the file with its keys hidden is
    far from the plain weights, and just what torch makes of it unrotated."""
    hidden = check_27b.without_rotation(narrow, tmp_path / "hidden.gguf")
    assert _core.read_hadamard(str(hidden)) is None
    served = compare_logits.host_logits(hidden, tokens, Serving(n_threads=1))
    assert compare_logits.compare(plain, served).mean_kl > 1
    assert compare_logits.compare(check_27b.plain_logits(hidden, tokens), served).mean_kl <= 1e-3
