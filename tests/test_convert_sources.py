"""Quantized checkpoints: what is decoded is what torch and the layers of transformers make of the same
tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant, pack_weights
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from convert_models import llama_config, llama_dir, random_tensors, write_json
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.read.checkpoint import Checkpoint
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import PQ2_0, Q8_0
from ggml_tern.tensors.values import as_float32

F32Array = npt.NDArray[np.float32]
Torch = dict[str, torch.Tensor]

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The BitNet layers of transformers are compiled; run them as they are written."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(1 << 40)))


def opened(directory: Path, tensors: Torch, **quantization: Any) -> Checkpoint:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    write_json(directory / "config.json", {"quantization_config": quantization} if quantization else {})
    return Checkpoint(directory)


def values(checkpoint: Checkpoint, rng: np.random.Generator, name: str = "x.weight") -> F32Array:
    """The decoded tensor, after reading it in slices and by row numbers gave the same."""
    stored = checkpoint.tensors[name]
    rows = checkpoint.load(stored)
    assert rows.shape == stored.shape
    n_rows = rows.shape[0]
    whole = as_float32(rows[0:n_rows])
    cuts = [0, *sorted(rng.integers(0, n_rows + 1, 3)), n_rows]
    pieces = [as_float32(rows[start:stop]) for start, stop in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), whole, equal_nan=True)
    order = rng.permutation(n_rows)
    assert np.array_equal(as_float32(rows[order]), whole[order], equal_nan=True)
    return whole


def odd_shape(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(1, 400)), int(rng.integers(1, 400))


def random_trits(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 2, shape, generator=generator)


# ---- 8-bit floats ----


@pytest.mark.parametrize("dtype", FLOAT8.values(), ids=FLOAT8)
def test_every_float8_code(tmp_path: Path, rng: np.random.Generator, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(32, 8)
    got = values(opened(tmp_path, {"x.weight": codes}), rng)
    assert np.array_equal(got, codes.float().numpy(), equal_nan=True)
    assert np.isnan(got).any()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("dtype", FLOAT8.values(), ids=FLOAT8)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (3, 5)])
def test_float8_in_blocks(
    tmp_path: Path,
    rng: np.random.Generator,
    generator: torch.Generator,
    block: tuple[int, int],
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> None:
    """Against the dequantization of transformers; the last blocks of rows and columns are cut off."""
    shape = odd_shape(rng)
    weight = torch.randn(shape, generator=generator).to(dtype)
    grid = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    if scale_dtype in (torch.float8_e8m0fnu, torch.uint8):
        scale = torch.randint(100, 140, grid, generator=generator, dtype=torch.uint8).view(scale_dtype)
    else:
        scale = torch.rand(grid, generator=generator).to(scale_dtype)
    checkpoint = opened(
        tmp_path,
        {"x.weight": weight, "x.weight_scale_inv": scale, "x.activation_scale": torch.ones(())},
        quant_method="fp8",
        weight_block_size=list(block),
    )
    assert list(checkpoint.tensors) == ["x.weight"]
    assert "x.activation_scale" in " ".join(checkpoint.notes)
    # Transformers keeps exponents in bytes under the type that says so.
    numbers = scale.view(torch.float8_e8m0fnu) if scale_dtype == torch.uint8 else scale
    expected = _dequantize_fp8_weight(weight, numbers.float(), list(block), torch.float32)
    assert np.array_equal(values(checkpoint, rng), expected.numpy())


@pytest.mark.parametrize("configured", [True, False])
def test_blocks_of_128_by_default(
    tmp_path: Path, rng: np.random.Generator, generator: torch.Generator, configured: bool
) -> None:
    weight = torch.randn((300, 200), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand((3, 2), generator=generator)
    quantization = {"quant_method": "fp8"} if configured else {}
    checkpoint = opened(tmp_path, {"x.weight": weight, "x.weight_scale_inv": scale}, **quantization)
    expected = _dequantize_fp8_weight(weight, scale, [128, 128], torch.float32)
    assert np.array_equal(values(checkpoint, rng), expected.numpy())


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
    ids=lambda config: config["quant_method"],
)
@pytest.mark.parametrize("scaled", ["tensor", "scalar", "row", "column vector"])
def test_float8_by_row_and_by_tensor(
    tmp_path: Path,
    rng: np.random.Generator,
    generator: torch.Generator,
    config: dict[str, Any],
    scaled: str,
) -> None:
    n_rows, n_in = odd_shape(rng)
    shape = {"tensor": (1,), "scalar": (), "row": (n_rows,), "column vector": (n_rows, 1)}[scaled]
    weight = torch.randn((n_rows, n_in), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator).bfloat16()
    tensors = {"x.weight": weight, "x.weight_scale": scale, "x.input_scale": torch.ones(1)}
    checkpoint = opened(tmp_path, tensors, **config)
    assert list(checkpoint.tensors) == ["x.weight"]
    expected = weight.float() * (scale.float() if scaled != "row" else scale.float()[:, None])
    assert np.array_equal(values(checkpoint, rng), expected.numpy())


def test_compressed_tensors_blocks(
    tmp_path: Path, rng: np.random.Generator, generator: torch.Generator
) -> None:
    weight = torch.randn((130, 70), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand((3, 3), generator=generator)
    group = {"weights": {"strategy": "block", "block_structure": [64, 32]}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    checkpoint = opened(tmp_path, {"x.weight": weight, "x.weight_scale": scale}, **config)
    expected = _dequantize_fp8_weight(weight, scale, [64, 32], torch.float32)
    assert np.array_equal(values(checkpoint, rng), expected.numpy())


# ---- BitNet ----


def packed(trits: torch.Tensor) -> torch.Tensor:
    return pack_weights(trits.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layer_class", ["bitlinear", "autobitlinear"])
def test_bitnet_packed(
    tmp_path: Path,
    rng: np.random.Generator,
    generator: torch.Generator,
    layer_class: str,
    dtype: torch.dtype,
) -> None:
    """The unit vectors through the layer give its weights, and with them which way the scale goes."""
    n_out, n_in = 4 * int(rng.integers(1, 90)), int(rng.integers(1, 300))
    trits = random_trits((n_out, n_in), generator)
    scale = (torch.rand(1, generator=generator) + 0.5).to(dtype)
    checkpoint = opened(
        tmp_path,
        {"x.weight": packed(trits), "x.weight_scale": scale},
        quant_method="bitnet",
        linear_class=layer_class,
        quantization_mode="offline",
    )
    assert list(checkpoint.tensors) == ["x.weight"]
    assert checkpoint.tensors["x.weight"].shape == (n_out, n_in)
    got = values(checkpoint, rng)

    if layer_class == "bitlinear":
        layer = BitLinear(n_in, n_out, bias=False, dtype=torch.float32)
        layer.weight = torch.nn.Buffer(packed(trits))
        expected = trits.float() / scale.float()
    else:
        layer = AutoBitLinear(n_in, n_out, bias=False, dtype=torch.float32)
        layer.weight = torch.nn.Parameter(trits.float())
        expected = trits.float() * scale.float()
    layer.weight_scale = torch.nn.Buffer(scale.float())
    assert np.array_equal(got, expected.numpy())
    with torch.no_grad():
        assert np.allclose(got.T, layer(torch.eye(n_in)).numpy(), rtol=1e-5, atol=0)


def test_bitnet_is_bitlinear_by_default(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {
        "x.weight": torch.full((2, 3), 0b10101010, dtype=torch.uint8),
        "x.weight_scale": torch.tensor([4.0]),
    }
    assert np.all(values(opened(tmp_path, tensors, quant_method="bitnet"), rng) == 0.25)


def test_autobitlinear_unpacked(tmp_path: Path, rng: np.random.Generator, generator: torch.Generator) -> None:
    trits = random_trits(odd_shape(rng), generator).bfloat16()
    scale = torch.rand(1, generator=generator).bfloat16()
    config = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    checkpoint = opened(tmp_path, {"x.weight": trits, "x.weight_scale": scale}, **config)
    assert list(checkpoint.tensors) == ["x.weight"]
    assert np.array_equal(values(checkpoint, rng), (trits.float() * scale.float()).numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_autobitlinear_online(
    tmp_path: Path, rng: np.random.Generator, generator: torch.Generator, dtype: torch.dtype
) -> None:
    """The values that the layer multiplies with; tables, norms and the head stay what they are."""
    n_rows, n_in = odd_shape(rng)
    spread = float(rng.uniform(1e-3, 3))
    master = (torch.randn((n_rows, n_in), generator=generator) * spread).to(dtype)
    plain = {
        "model.embed_tokens.weight": master.clone(),
        "lm_head.weight": master.clone(),
        "model.norm.weight": master[0].clone(),
        "x.bias": master[:, 0].clone(),
    }
    checkpoint = opened(
        tmp_path,
        {"x.weight": master, **plain},
        quant_method="bitnet",
        linear_class="autobitlinear",
        quantization_mode="online",
    )
    expected = WeightQuant.apply(master).float().numpy()
    got = values(checkpoint, rng)
    # A sum in another order moves the mean, and with it the values, by last bits: what is almost halfway
    # between two of them may go to either.
    ratio = np.abs(master.double().numpy()) / float(master.double().abs().mean())
    clear = np.abs(ratio - 0.5) > 1e-6
    assert clear.mean() > 0.9
    assert np.allclose(got[clear], expected[clear], rtol=max(1e-6, torch.finfo(dtype).eps), atol=0)
    assert len(np.unique(np.abs(got[got != 0]))) <= 1
    for name, tensor in plain.items():
        stored = checkpoint.load(checkpoint.tensors[name])
        assert np.array_equal(as_float32(stored[0 : tensor.shape[0]]), tensor.float().numpy())
    assert len(checkpoint.notes) == 1 and "masters of 1 matrices" in checkpoint.notes[0]


def test_modules_that_online_bitnet_leaves_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    names = ["a.q_proj", "a.k_proj", "b.layers.1.up", "b.layers.11.up", "lm_head"]
    tensors = {f"{name}.weight": torch.tensor([[0.1, 1.0]]) for name in names}
    checkpoint = opened(
        tmp_path,
        tensors,
        quant_method="bitnet",
        linear_class="autobitlinear",
        quantization_mode="online",
        modules_to_not_convert=["k_proj", "b.layers.1"],
    )
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name in names:
        rounded = not np.array_equal(
            values(checkpoint, rng, f"{name}.weight"), np.array([[0.1, 1.0]], np.float32)
        )
        assert rounded == should_convert_module(name, ["k_proj", "b.layers.1"]), name


# ---- int8 ----


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scales", "scale", "scales"])
@pytest.mark.parametrize("kind", ["scalar", "one", "row", "column vector", "groups"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_int8_with_scales(
    tmp_path: Path,
    rng: np.random.Generator,
    generator: torch.Generator,
    suffix: str,
    kind: str,
    dtype: torch.dtype,
) -> None:
    n_rows, n_groups, group = (int(n) for n in rng.integers(2, 30, 3))
    shape = {
        "scalar": (),
        "one": (1,),
        "row": (n_rows,),
        "column vector": (n_rows, 1),
        "groups": (n_rows, n_groups),
    }[kind]
    n_in = n_groups * group
    scale = torch.rand(shape, generator=generator).to(dtype)
    if dtype == torch.float64:
        scale = scale.float().double()
    for weight in (
        random_trits((n_rows, n_in), generator).to(torch.int8),
        torch.randint(-128, 128, (n_rows, n_in), generator=generator, dtype=torch.int8),
    ):
        checkpoint = opened(tmp_path, {"x.weight": weight, f"x.{suffix}": scale})
        assert list(checkpoint.tensors) == ["x.weight"]
        grid = scale.float()
        if kind == "row":
            grid = grid[:, None]
        elif kind == "groups":
            grid = grid.repeat_interleave(group, dim=1)
        assert np.array_equal(values(checkpoint, rng), (weight.float() * grid).numpy())


def test_symmetric_zero_points_are_dropped(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {
        "x.weight": torch.tensor([[3, -4]], dtype=torch.int8),
        "x.weight_scale": torch.tensor([[0.5]]),
        "x.weight_zero_point": torch.zeros((1, 1), dtype=torch.int8),
    }
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    checkpoint = opened(tmp_path, tensors, **config)
    assert list(checkpoint.tensors) == ["x.weight"]
    assert np.array_equal(values(checkpoint, rng), [[1.5, -2.0]])
    tensors["x.weight_zero_point"] += 1
    with pytest.raises(TernError, match=r"x\.weight is quantized with zero points"):
        opened(tmp_path, tensors, **config)


# ---- float64 ----


def test_float64_that_float32_can_hold(tmp_path: Path, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal(odd_shape(rng)).astype(np.float32)
    numbers[0, 0] = np.nan
    checkpoint = opened(tmp_path, {"x.weight": torch.from_numpy(numbers).double()})
    assert np.array_equal(values(checkpoint, rng), numbers, equal_nan=True)


@pytest.mark.parametrize("number", [0.1, 1e300, 1e-60])
def test_float64_that_float32_would_change(tmp_path: Path, number: float) -> None:
    checkpoint = opened(
        tmp_path, {"x.weight": torch.tensor([[1.0, 2.0], [3.0, number]], dtype=torch.float64)}
    )
    rows = checkpoint.load(checkpoint.tensors["x.weight"])
    assert np.array_equal(rows[0:1], [[1, 2]])
    with pytest.raises(TernError, match=r"x\.weight is stored as F64, and .* is no float32 number"):
        rows[0:2]


# ---- what does not fit ----


CODES = torch.tensor([[0b00011000] * 6] * 2, dtype=torch.uint8)
INT8 = torch.ones((8, 6), dtype=torch.int8)
FP8 = torch.ones((8, 6)).to(torch.float8_e4m3fn)
BITNET = {"quant_method": "bitnet"}
ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"x.weight": INT8}, {}, r"x\.weight is stored as I8 and no scale is beside it"),
        ({"x.weight": CODES}, BITNET, r"x\.weight is stored as U8 and no scale"),
        ({"x.weight": CODES, "x.weight_scale": ONE}, {}, "quant_method bitnet"),
        ({"x.weight": FP8}, {"quant_method": "fp8"}, r"x\.weight_scale_inv, is missing"),
        ({"x.weight": FP8, "y.weight": FP8, "y.weight_scale": ONE}, {}, r"tensor x\.weight .* is missing"),
        ({"x.weight": INT8, "x.weight_scale": torch.ones(7)}, {}, r"x\.weight_scale has shape \[7\]"),
        ({"x.weight": INT8, "x.weight_scale": torch.ones(6)}, {}, r"expected one value, one for each row"),
        ({"x.weight": INT8, "x.weight_scale": torch.ones((8, 4))}, {}, r"shape \[8, 4\]"),
        ({"x.weight": INT8, "x.weight_scale": torch.ones((6, 8))}, {}, r"shape \[6, 8\]"),
        (
            {"x.weight": FP8, "x.weight_scale_inv": torch.ones((2, 1))},
            {"quant_method": "fp8", "weight_block_size": [4, 4]},
            r"x\.weight_scale_inv has shape \[2, 1\] .* each block of 4x4",
        ),
        ({"x.weight": CODES, "x.weight_scale": torch.ones(2)}, BITNET, r"weights of shape \[8, 6\]"),
        ({"x.weight": INT8, "x.weight_scale": ONE.int()}, {}, r"x\.weight_scale is stored as I32"),
        ({"x.weight": INT8, "x.weight_scale": ONE, "x.scale": ONE.clone()}, {}, "two scales"),
        ({"x.weight": INT8[0], "x.weight_scale": ONE}, {}, r"shape \[6\] and a scale"),
        ({"x.weight": INT8, "x.weight_scale": ONE}, {"quant_method": "fp8"}, "4-bit floats"),
        ({"x.weight": INT8, "x.weight_scale": ONE * np.nan}, {}, "x.weight_scale holds the scale nan"),
        ({"x.weight": INT8, "x.weight_scale": ONE * np.inf}, {}, "x.weight_scale holds the scale inf"),
        ({"x.weight": CODES, "x.weight_scale": ONE * 0}, BITNET, "x.weight_scale holds the scale 0.0"),
        ({"x.weight": CODES | 0b1100, "x.weight_scale": ONE}, BITNET, r"row 2 holds the code 3"),
        ({"x.weight": INT8.int(), "x.weight_scale": ONE}, {}, "stored as I32; ternconv reads BF16"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, tensors: Torch, config: dict[str, Any], message: str) -> None:
    with pytest.raises(TernError, match=message) as caught:
        checkpoint = opened(tmp_path, tensors, **config)
        for tensor in checkpoint.tensors.values():
            checkpoint.load(tensor)[0 : tensor.shape[0]]
    assert str(tmp_path / "model.safetensors") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": ["fp8"]},
        {"bits": 2},
        [1],
        {"quant_method": "bitnet", "linear_class": "other"},
        {"quant_method": "bitnet", "quantization_mode": "never"},
        {"quant_method": "bitnet", "use_rms_norm": True},
        {"quant_method": "bitnet", "modules_to_not_convert": "lm_head"},
        {"quant_method": "bitnet", "modules_to_not_convert": ["("]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, -1]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["top", "text_config", "compression_config"])
def test_quantizations_that_are_not_read(tmp_path: Path, config: Any, place: str) -> None:
    save_file({"x.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    key = "compression_config" if place == "compression_config" else "quantization_config"
    whole = {key: config}
    write_json(tmp_path / "config.json", {"text_config": whole} if place == "text_config" else whole)
    with pytest.raises(TernError, match=rf"config\.json: {key}") as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


# ---- whole models ----


def quantized(kind: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Torch, torch.Tensor]:
    """A random matrix of the shape of `weight` as a checkpoint stores it, by suffix, and its values."""
    trits = random_trits((weight.shape[0], weight.shape[1]), generator)
    if kind == "bitnet":
        scale = (torch.rand(1, generator=generator) + 30).bfloat16()
        return {"weight": packed(trits), "weight_scale": scale}, trits.float() / scale.float()
    if kind == "int8":
        scale = torch.rand((weight.shape[0], 1), generator=generator).bfloat16()
        return {"weight": trits.to(torch.int8), "weight_scale": scale}, trits * scale.float()
    if kind == "fp8":
        fp8 = weight.to(torch.float8_e4m3fn)
        grid = [-(-size // 64) for size in weight.shape]
        scale = torch.rand(grid, generator=generator)
        expected = _dequantize_fp8_weight(fp8, scale, [64, 64], torch.float32)
        return {"weight": fp8, "weight_scale_inv": scale}, expected
    bf16 = weight.bfloat16()
    # WeightQuant, with a mean that does not hang on the order of a sum.
    scale = 1 / bf16.double().abs().mean().float()
    return {"weight": bf16}, (bf16.float() * scale).round().clamp(-1, 1) * (1 / scale).bfloat16()


CONFIGS: dict[str, dict[str, Any] | None] = {
    "bitnet": {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]},
    "int8": None,
    "fp8": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "online": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_model_converts_like_its_values(
    tmp_path: Path, generator: torch.Generator, kind: str
) -> None:
    """Down to the last byte, and through the row orders of a Llama."""
    stored: Torch = {}
    plain: Torch = {}
    for name, array in random_tensors(llama_config()).items():
        tensor = torch.from_numpy(array).bfloat16()
        if "_proj" in name:
            parts, decoded = quantized(kind, tensor.float(), generator)
            stored |= {name.removesuffix("weight") + part: data for part, data in parts.items()}
            plain[name] = decoded
        else:
            stored[name] = plain[name] = tensor
    model = llama_dir(tmp_path / "hf")
    choice = TypeChoice(PQ2_0, Q8_0)
    save_file(plain, model / "model.safetensors")
    convert(model, tmp_path / "plain.gguf", choice)
    save_file(stored, model / "model.safetensors")
    write_json(model / "config.json", llama_config(quantization_config=CONFIGS[kind]))
    report = convert(model, tmp_path / "quantized.gguf", choice)
    assert (tmp_path / "quantized.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    if kind != "fp8":
        matrices = [stats for stats in report.stats if stats.groups]
        assert matrices and all(stats.ternary_groups == stats.groups for stats in matrices)
