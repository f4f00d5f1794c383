"""What a checkpoint's `quantization_config` says, and which tensors of scales belong to which weights.

Which tensors are quantized is not asked of the configuration but seen from what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ggml_tern.convert.read.decoding import ROWS_PER_BYTE
from ggml_tern.convert.read.quantizers import not_read, quantizer, quantizer_by_tensors
from ggml_tern.convert.read.stored_tensors import Scale, StoredTensor, map_tensor
from ggml_tern.errors import TernError

#: The values of `quant_method` whose checkpoints are read.
METHODS = ("bitnet", "compressed-tensors", "fbgemm_fp8", "fp8", "modelopt")

#: compressed-tensors formats in which a stored element is one weight.
_FORMATS = ("dense", "float-quantized", "int-quantized", "naive-quantized")

#: Scales of activations and of the KV cache: the runtime quantizes those itself.
_ACTIVATION_SCALES = (
    ".activation_scale",
    ".input_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
)

_FLOATS = ("BF16", "F16", "F32")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        method: `quant_method`; "" without a quantization_config.
        where: names the file and the key in errors.
        block: rows and columns that share a scale, where the method cuts matrices into blocks.
        divides: scales divide the codes.
        absmean: the linear layers hold masters, which the model rounds to ternary itself.
        kept: the modules that do not, as transformers' `modules_to_not_convert` spells them.
    """

    method: str = ""
    where: str = ""
    block: tuple[int, int] | None = None
    divides: bool = False
    absmean: bool = False
    kept: tuple[str, ...] = ()

    def keeps(self, module: str) -> bool:
        """Whether transformers leaves a linear layer as it is: a name in `kept` is a suffix, or a regular
        expression that matches up to the end of a part of the module's name."""
        return any(
            module.endswith(name) or re.match(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", module)
            for name in self.kept
        )


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization:
    """The quantization that config.json (`where`) describes.

    Raises TernError for a method or a variant of it that ternconv does not read.
    """
    text_config = config.get("text_config")
    sections = (config, text_config if isinstance(text_config, dict) else {})
    for section in sections:
        # MLX writes this key, often besides a copy of it under the one that transformers has.
        mlx = section.get("quantization")
        if isinstance(mlx, dict) and "bits" in mlx and "quant_method" not in mlx:
            raise TernError(f"{where}: quantization: {not_read('mlx', _bits(mlx))}")
        for key in ("quantization_config", "compression_config"):
            values = section.get(key)
            if values is None:
                continue
            if not isinstance(values, dict):
                raise TernError(f"{where}: {key} is {values!r}; expected an object")
            return _read_section(values, f"{where}: {key}")
    return Quantization()


def _read_section(values: dict[str, Any], where: str) -> Quantization:
    method = quantizer(values)
    if isinstance(method, str) and method not in METHODS:
        raise TernError(f"{where}: quant_method is {method!r}: {not_read(method, _bits(values))}")
    if method is None:
        given = values.get("quant_method")
        found = "has no quant_method" if given is None else f"quant_method is {given!r}"
        raise TernError(
            f"{where}: {found}; ternconv reads {', '.join(METHODS)} and checkpoints that are not quantized, "
            "so convert the model that this one was quantized from"
        )
    if method == "bitnet":
        return _read_bitnet(values, where)
    if method == "compressed-tensors":
        _require(values, where, "format", *_FORMATS)
        sparsity = values.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity:
            _require(sparsity, f"{where}: sparsity_config", "format", "dense")
        if values.get("transform_config"):
            raise TernError(
                f"{where}: transform_config rotates activations at run time, which llama.cpp does not; "
                "convert the model that this one was quantized from"
            )
        return Quantization(method, where, _block_structure(values, where))
    if method == "modelopt":
        _require(values, where, "quant_algo", "FP8")
        return Quantization(method, where)
    if method == "fp8":
        _require(values, where, "expert_dtype", "fp8")
        # Null means one scale for a tensor; not given means blocks of 128.
        block = values.get("weight_block_size", [128, 128])
        return Quantization(
            method, where, None if block is None else _block(block, where, "weight_block_size")
        )
    return Quantization(method, where)


def _bits(values: Mapping[str, Any]) -> str:
    bits = values.get("bits")
    return f" ({bits} bits)" if isinstance(bits, int) else ""


def _read_bitnet(values: dict[str, Any], where: str) -> Quantization:
    _require(values, where, "linear_class", "bitlinear", "autobitlinear")
    _require(values, where, "quantization_mode", "offline", "online")
    _require(values, where, "use_rms_norm", False)
    kept = values.get("modules_to_not_convert")
    if kept is None:
        kept = ["lm_head"]
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise TernError(f"{where}: modules_to_not_convert is {kept!r}; expected a list of strings")
    for name in kept:
        try:
            re.compile(name)
        except re.error as error:
            raise TernError(f"{where}: modules_to_not_convert: {name!r} is no pattern: {error}") from None
    # BitLinear divides by its scale. AutoBitLinear multiplies by it, or has none and rounds its weights.
    auto = values.get("linear_class") == "autobitlinear"
    online = values.get("quantization_mode") == "online"
    return Quantization("bitnet", where, divides=not auto, absmean=auto and online, kept=tuple(kept))


def _require(values: Mapping[str, Any], where: str, key: str, *supported: object) -> None:
    """Raise TernError unless `key` is absent, null or one of the values that ternconv reads."""
    value = values.get(key)
    if value is not None and value not in supported:
        expected = " or ".join(repr(one) for one in supported)
        raise TernError(
            f"{where}: {key} is {value!r}; ternconv reads {expected}, so convert the model that this one was "
            "quantized from"
        )


def _block_structure(values: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """The one block structure among the groups of a compressed-tensors configuration."""
    found = set()
    groups = values.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        structure = weights.get("block_structure") if isinstance(weights, dict) else None
        if structure is not None:
            found.add(_block(structure, where, "block_structure"))
    if len(found) > 1:
        raise TernError(f"{where}: config_groups has several block structures: {sorted(found)}; expected one")
    return found.pop() if found else None


def _block(value: object, where: str, key: str) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)
    ):
        return value[0], value[1]
    raise TernError(f"{where}: {key} is {value!r}; expected two positive integers")


def pair_scales(
    tensors: Mapping[str, StoredTensor], quantization: Quantization
) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of the model itself, with their scales, and notes for the user.

    Scales, and what only concerns activations, are no tensors of their own in the result.

    Raises TernError for tensors that another engine's quantizer wrote, and for a scale that is missing, of a
    shape that does not fit its weights, or ambiguous.
    """
    if not quantization.method and (engine := quantizer_by_tensors(tensors)):
        some = next(iter(tensors.values())).file.parent
        raise TernError(f"{some}: {not_read(engine)}")
    consumed: set[str] = set()
    scale_of: dict[str, StoredTensor] = {}
    for tensor in tensors.values():
        if _may_be_scaled(tensor, quantization):
            found = [name for name in _scale_names(tensor) if name in tensors]
            if len(found) > 1:
                raise TernError(f"{tensor} has two scales, {' and '.join(found)}; expected one")
            if found:
                scale_of[tensor.name] = tensors[found[0]]
                consumed.add(found[0])
                _check_zero_point(tensors, tensor, consumed)
    left_out = set()
    if quantization.method:
        left_out = {name for name in tensors if name.endswith(_ACTIVATION_SCALES)} - consumed

    result: dict[str, StoredTensor] = {}
    n_absmean = 0
    for name, tensor in tensors.items():
        if name in consumed or name in left_out:
            continue
        if name in scale_of:
            tensor = _with_scale(tensor, scale_of[name], quantization)
        elif tensor.dtype in _FLOAT8 and (quantization.method or scale_of):
            raise TernError(
                f"{tensor} is stored as {tensor.dtype} and its scale, {_scale_names(tensor)[0]} or "
                f"{_scale_names(tensor)[1]}, is missing; download the checkpoint again"
            )
        elif quantization.absmean and _is_master(tensor, quantization):
            tensor = replace(tensor, absmean=True)
            n_absmean += 1
        result[name] = tensor

    notes = []
    if n_absmean:
        notes.append(
            f"the checkpoint holds masters of {n_absmean} matrices, which the model rounds to -a, 0 and a "
            "(the mean of their absolute values) whenever it runs; the rounded ones are converted"
        )
    if left_out:
        notes.append(f"scales of activations, such as {min(left_out)}, are left out: llama.cpp finds its own")
    return result, notes


def _may_be_scaled(tensor: StoredTensor, quantization: Quantization) -> bool:
    if tensor.dtype in (*_FLOAT8, "I8", "U8"):
        return True
    # AutoBitLinear takes its ternary weights unpacked, too.
    return quantization.method == "bitnet" and tensor.dtype in _FLOATS and len(tensor.shape) == 2


def _scale_names(tensor: StoredTensor) -> list[str]:
    name = tensor.name
    names = [f"{name}_scale", f"{name}_scale_inv", f"{name}_scales"]
    if name.endswith(".weight"):
        names += [name.removesuffix("weight") + "scale", name.removesuffix("weight") + "scales"]
    return names


def _check_zero_point(tensors: Mapping[str, StoredTensor], tensor: StoredTensor, consumed: set[str]) -> None:
    zero_point = tensors.get(f"{tensor.name}_zero_point")
    if zero_point is None:
        return
    if map_tensor(zero_point).any():
        raise TernError(
            f"{tensor} is quantized with zero points; ternconv reads symmetric quantization, so convert the "
            "model that this one was quantized from"
        )
    consumed.add(zero_point.name)


def _is_master(tensor: StoredTensor, quantization: Quantization) -> bool:
    """Whether a tensor is the weight of a linear layer that rounds it."""
    module = tensor.name.removesuffix(".weight")
    return (
        module != tensor.name
        and len(tensor.shape) == 2
        and tensor.dtype in _FLOATS
        and "embed" not in module
        and not quantization.keeps(module)
    )


def _with_scale(tensor: StoredTensor, scale: StoredTensor, quantization: Quantization) -> StoredTensor:
    if len(tensor.shape) != 2 or not all(tensor.shape):
        raise TernError(
            f"{tensor} has shape {list(tensor.shape)} and a scale; ternconv reads scaled matrices"
        )
    if tensor.dtype == "I8" and quantization.method == "fp8":
        raise TernError(
            f"{tensor} is stored as I8, which in an fp8 checkpoint holds 4-bit floats; convert the model "
            "that this one was quantized from"
        )
    if tensor.dtype == "U8":
        if quantization.method != "bitnet":
            raise TernError(
                f"{tensor} is stored as U8, which ternconv reads as BitNet's packed codes where config.json "
                "has quantization_config with quant_method bitnet"
            )
        tensor = replace(tensor, shape=(ROWS_PER_BYTE * tensor.shape[0], tensor.shape[1]))
    dtypes = [*_FLOATS, "F64", "F8_E8M0"] + (["U8"] if quantization.method == "fp8" else [])
    if scale.dtype not in dtypes:
        raise TernError(f"{scale} is stored as {scale.dtype}; expected a scale in {', '.join(dtypes)}")
    block = quantization.block
    if block is None and not quantization.method and scale.name.endswith("_scale_inv"):
        block = 128, 128
    grid, block = _find_grid(tensor, scale, block)
    return replace(tensor, scale=Scale(scale, grid, block, quantization.divides))


def _find_grid(
    tensor: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid that the shape of a scale means, and the rows and columns of its blocks."""
    n_rows, n_in = tensor.shape
    known: dict[tuple[int, ...], tuple[int, int]] = {(): (n_rows, n_in), (1,): (n_rows, n_in)}
    known |= {(1, 1): (n_rows, n_in), (n_rows,): (1, n_in), (n_rows, 1): (1, n_in)}
    if block is not None:
        known[-(-n_rows // block[0]), -(-n_in // block[1])] = block
    shape = scale.shape
    if len(shape) == 2 and shape[0] == n_rows and shape[1] > 1 and n_in % shape[1] == 0:
        known.setdefault(shape, (1, n_in // shape[1]))
    if shape not in known:
        expected = "one value, one for each row, or one for each group of columns of a row"
        if block is not None:
            expected += f", or one for each block of {block[0]}x{block[1]}"
        raise TernError(
            f"{scale} has shape {list(shape)} for weights of shape {list(tensor.shape)}; expected {expected}"
        )
    rows, columns = known[shape]
    return (-(-n_rows // rows), -(-n_in // columns)), (rows, columns)
