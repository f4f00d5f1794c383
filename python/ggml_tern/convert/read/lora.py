"""LoRA adapters in PEFT's format, merged into the weights as they are read.

A LoRA replaces W by W + s B A, with A (rank, n_in), B (n_out, rank) and s = alpha / rank, or
alpha / sqrt(rank) for rank-stabilized ones. The sum is taken in float32 and never stored: rows are merged
when they are asked for, before anything is rounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.read.config import Config
from ggml_tern.convert.read.decoding import load_rows
from ggml_tern.convert.read.json_files import read_json
from ggml_tern.convert.read.stored_tensors import StoredTensor, open_safetensors
from ggml_tern.errors import TernError
from ggml_tern.gguf.identify import Kind, identify
from ggml_tern.tensors.values import Chosen, Rows, as_float32

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

#: PEFT puts the names of the model's modules behind this.
_PREFIX = "base_model.model."

#: How it calls the copy of an adapted embedding.
_COPY = ".base_layer.weight"

#: Settings of PEFT that make an adapter more than W + s B A.
_NOT_PLAIN = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "arrow_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
)

#: Values of init_lora_weights that leave the model's own weights as they are.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
#: Those that do not: what is trained is the difference to a changed base (peft/tuners/lora/layer.py).
_BASE_CHANGED_BY = ("pissa", "olora", "corda", "loftq", "lora_ga")

#: Rows compared at a time.
_ROWS = 1024

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.weight)?")


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to one matrix: `scale` * b a, with a (rank, n_in) and b (n_out, rank), float32."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


class MergedRows:
    """A matrix with the factors of adapters added, float32."""

    def __init__(self, rows: Rows, factors: list[Factors]) -> None:
        self.shape = rows.shape
        self._rows = rows
        self._factors = factors

    def __getitem__(self, chosen: Chosen, /) -> NDArray[np.float32]:
        merged = as_float32(self._rows[chosen])
        for factors in self._factors:
            merged = merged + np.float32(factors.scale) * (factors.b[chosen] @ factors.a)
        return merged


@dataclass
class Adapter:
    """An opened adapter directory.

    Attributes:
        directory: where it is.
        factors: module name of the model -> what is added to its weight.
        copies: module name -> a copy of the model's own weight, which PEFT stores of adapted embeddings.
    """

    directory: Path
    factors: dict[str, Factors] = field(default_factory=dict)
    copies: dict[str, StoredTensor] = field(default_factory=dict)

    def check_model(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Raise TernError where the model lacks a module, and where a copy differs from its weight: then the
        adapter was trained with a larger vocabulary, or together with the weight."""
        missing = sorted(module for module in self.factors if f"{module}.weight" not in tensors)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise TernError(
                f"{self.directory / WEIGHTS_FILE}: adapts {missing[0]}{more}, which the model does not have; "
                "the adapter is of another model"
            )
        for module, copy in self.copies.items():
            own = tensors.get(f"{module}.weight")
            if own is not None and not _same_values(own, copy):
                raise TernError(
                    f"{copy} differs from {own}; merge such an adapter with PEFT's merge_and_unload and "
                    "convert the result"
                )

    def files(self) -> list[Path]:
        """Every file that is read from: what an output must never overwrite."""
        return [self.directory / CONFIG_FILE, self.directory / WEIGHTS_FILE]


def open_adapter(directory: Path, scale: float = 1.0) -> Adapter:
    """Read an adapter.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scale: multiplies what it adds.

    Raises TernError for a directory that lacks one of these, a kind of adapter that is no plain LoRA, a
    factor without its partner, and factors whose shapes do not fit each other or the rank.
    """
    if not (directory / CONFIG_FILE).exists():
        raise _no_adapter(directory)
    where = directory / CONFIG_FILE
    values = read_json(where)
    config = Config(values, str(where))
    _require_plain(config, values)
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        raise TernError(f"{weights}: no such file; save the adapter as safetensors there")
    adapter = Adapter(directory)
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    for tensor in open_safetensors(weights):
        name = tensor.name.removeprefix(_PREFIX)
        if name.endswith(_COPY):
            adapter.copies[name.removesuffix(_COPY)] = tensor
            continue
        match = _FACTOR.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise TernError(
                f"{tensor} is no factor of a LoRA; merge such an adapter with PEFT's merge_and_unload"
            )
        # An embedding's factors are stored the other way round: A (rank, vocabulary), B (n_embd, rank).
        factor, values_of = match["factor"], _matrix(tensor)
        if match["embedding"]:
            factor, values_of = ("B", values_of.T) if factor == "A" else ("A", values_of.T)
        found.setdefault(match["module"], {})[factor] = values_of
    for module, factors in found.items():
        if missing := {"A", "B"} - factors.keys():
            raise TernError(f"{weights}: module {module} has no lora_{missing.pop()}; save the adapter again")
        a, b = np.ascontiguousarray(factors["A"]), np.ascontiguousarray(factors["B"])
        rank = _for_module(config, "rank_pattern", module, config.integer("r"))
        alpha = _for_module(config, "alpha_pattern", module, config.number("lora_alpha"))
        if (a.shape[0], b.shape[1]) != (rank, rank):
            raise TernError(
                f"{weights}: module {module} has lora_A of shape {list(a.shape)} and lora_B of shape "
                f"{list(b.shape)}; expected rank {rank}"
            )
        divisor = math.sqrt(rank) if config.boolean("use_rslora", False) else rank
        adapter.factors[module] = Factors(a, b, scale * alpha / divisor)
    return adapter


def _no_adapter(directory: Path) -> TernError:
    """The error for a path that is no adapter's folder."""
    expected = f"expected the folder of a PEFT adapter, with {CONFIG_FILE} and {WEIGHTS_FILE}"
    if directory.is_dir():
        return TernError(f"{directory / CONFIG_FILE}: no such file; {expected}")
    if directory.is_file():
        found = identify(directory)
        if found.kind is Kind.GGUF:
            return TernError(f"{directory}: is a GGUF file, which llama.cpp takes with --lora; {expected}")
        return TernError(f"{directory}: is {found.what}; {expected}")
    return TernError(f"{directory}: no such directory; {expected}")


def merge(rows: Rows, tensor: StoredTensor, adapters: Sequence[Adapter]) -> Rows:
    """The tensor's rows with what the adapters add to them.

    Raises TernError where the shapes do not fit.
    """
    module = tensor.name.removesuffix(".weight")
    factors: list[Factors] = []
    for adapter in adapters:
        added = adapter.factors.get(module)
        if added is None:
            continue
        shape = (added.b.shape[0], added.a.shape[1])
        if shape != tuple(rows.shape):
            raise TernError(
                f"{adapter.directory / WEIGHTS_FILE}: module {module} is of shape {list(shape)}, "
                f"{tensor} is of {list(rows.shape)}; the adapter is of another model"
            )
        factors.append(added)
    return MergedRows(rows, factors) if factors else rows


def _require_plain(config: Config, values: dict[str, Any]) -> None:
    """Refuse what W + s B A does not say."""
    if values.get("peft_type") != "LORA":
        raise config.error(f"peft_type is {values.get('peft_type')!r}; ternconv merges LORA adapters")
    for key in _NOT_PLAIN:
        if values.get(key):
            raise config.error(
                f"{key} is {values[key]!r}, which ternconv does not merge; merge the adapter with PEFT's "
                "merge_and_unload and convert the result"
            )
    if values.get("alora_invocation_tokens"):
        raise config.error(
            "alora_invocation_tokens makes the adapter work only behind these tokens (an activated LoRA); "
            "merged weights work everywhere; run it with a program that knows such adapters"
        )
    init = values.get("init_lora_weights")
    if init not in _PLAIN_INITS:
        reason = "which ternconv does not know"
        if isinstance(init, str) and init.lower().startswith(_BASE_CHANGED_BY):
            reason = (
                "which changed the model's own weights before the training, so that the adapter does not "
                "belong to the model as it is stored"
            )
        raise config.error(
            f"init_lora_weights is {init!r}, {reason}; merge the adapter with PEFT's merge_and_unload, or "
            "save it with path_initial_model_for_weight_conversion, which makes a plain one of it"
        )
    if values.get("bias", "none") != "none":
        raise config.error(
            f"bias is {values['bias']!r}; expected 'none', so merge the adapter with PEFT's merge_and_unload"
        )


def _for_module(config: Config, key: str, module: str, default: float) -> float:
    """The value that a pattern has for a module: its keys match the end of the name, as regular
    expressions."""
    section = config.section(key)
    for pattern in section.keys() if section is not None else ():
        try:
            matches = re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
        except re.error as error:
            raise config.error(f"{key} has {pattern!r}, which is no regular expression: {error}") from None
        if matches and section is not None:
            return section.number(pattern)
    return default


def _matrix(tensor: StoredTensor) -> NDArray[np.float32]:
    values = as_float32(load_rows(tensor)[:])
    if not np.isfinite(values).all():
        raise TernError(f"{tensor} holds NaN or Inf; the adapter is damaged")
    return values


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    rows, copies = load_rows(one), load_rows(other)
    return all(
        np.array_equal(as_float32(rows[start : start + _ROWS]), as_float32(copies[start : start + _ROWS]))
        for start in range(0, one.shape[0], _ROWS)
    )
