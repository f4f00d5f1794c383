"""Checkpoints that other engines' quantizers wrote: their names, and what to convert instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_BASE = "convert the model that this one was quantized from; its page on the hub links to it"

#: What `quant_method` says of checkpoints that are not read: the name of the quantizer, and the way out.
_METHODS: dict[str, tuple[str, str]] = {
    "aqlm": ("AQLM", _BASE),
    "auto-round": ("AutoRound", _BASE),
    "autoround": ("AutoRound", _BASE),
    "intel/auto-round": ("AutoRound", _BASE),
    "awq": ("AWQ", _BASE),
    "bitsandbytes": (
        "bitsandbytes",
        "convert the model that this one was quantized from, or what transformers saves after "
        "model.dequantize()",
    ),
    "eetq": ("EETQ", _BASE),
    "exl2": ("EXL2, of exllamav2,", _BASE),
    "exl3": ("EXL3, of exllamav3,", _BASE),
    "fp_quant": ("FP-Quant", _BASE),
    "gptq": ("GPTQ", _BASE),
    "gptqmodel": ("GPTQ", _BASE),
    "higgs": ("HIGGS", _BASE),
    "hqq": ("HQQ", _BASE),
    "mlx": (
        "MLX",
        "convert the model that this one was quantized from, or what `mlx_lm.convert --hf-path MODEL "
        "--mlx-path PLAIN --dequantize` makes of this one",
    ),
    "mxfp4": ("MXFP4", _BASE),
    "quanto": ("Quanto", _BASE),
    "quark": ("Quark", _BASE),
    "quip": ("QuIP", _BASE),
    "spqr": ("SpQR", _BASE),
    "torchao": ("torchao", _BASE),
    "vptq": ("VPTQ", _BASE),
}

#: Ends of the names of tensors that only one quantizer writes, for checkpoints whose configuration does not
#: say.
_TRACES = (
    (re.compile(r".*\.(absmax|quant_map|SCB)|.*\.quant_state\..*"), "bitsandbytes"),
    (re.compile(r".*\.(trellis|suh|svh)"), "exl3"),
    (re.compile(r".*\.(q_weight|q_scale_max|q_groups)"), "exl2"),
    (re.compile(r".*\.(W_q|meta_W_q)"), "hqq"),
    (re.compile(r".*\.(codebooks|codes)"), "aqlm"),
    (re.compile(r".*\.g_idx"), "gptq"),
    (re.compile(r".*\.qzeros"), "awq"),
    (re.compile(r".*_proj\.biases"), "mlx"),
)


def quantizer(values: Mapping[str, Any]) -> str | None:
    """The `quant_method` of a section of config.json, also where only its other keys tell."""
    method = values.get("quant_method")
    if isinstance(method, str):
        return method
    if any(key.startswith(("load_in_", "_load_in_", "bnb_")) for key in values):
        return "bitsandbytes"
    return None


def quantizer_by_tensors(names: Iterable[str]) -> str | None:
    """The quantizer that wrote tensors of such names; None where they are those of a plain checkpoint."""
    for name in names:
        for pattern, method in _TRACES:
            if pattern.fullmatch(name):
                return method
    return None


def not_read(method: str, detail: str = "") -> str:
    """What a quantizer that is not read is called and what to do, to go behind "FILE: KEY ".

    detail: such as the bits.
    """
    name, way_out = _METHODS.get(method.lower(), (f"{method!r}", _BASE))
    return f"the checkpoint is quantized by {name}{detail}, which ternconv does not read; {way_out}"
