"""Rotary position embedding: its parameters, spelled in two ways in config.json, and what llama.cpp reads."""

from __future__ import annotations

import math

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.read.config import Config
from ggml_tern.limits import MAX_TOKENS

#: Scaling kinds that every graph of llama.cpp computes as transformers does.
COMMON_KINDS = ("default", "linear", "yarn")


class Rope:
    """The rotary embedding of one kind of layer.

    Args:
        base: the frequency base.
        scaling: the section of config.json that describes the scaling, None where there is none.
        kinds: the kinds that the graph computes. llama3 is a tensor, which few graphs read.

    Attributes:
        base: the frequency base (`rope_theta`).
        kind: `default`, `linear`, `llama3` or `yarn`.
        scaling: the section that holds the scaling's own parameters; None for `default`.
    """

    def __init__(self, base: float, scaling: Config | None, kinds: tuple[str, ...] = COMMON_KINDS) -> None:
        self.base = base
        # Older checkpoints call the kind "type".
        kind = "default"
        if scaling is not None:
            kind = scaling.string("rope_type", scaling.string("type", "default"))
            if kind not in kinds:
                raise scaling.error(
                    f"rope scaling {kind!r} is not supported; llama.cpp runs this architecture with "
                    f"{', '.join(kinds)}"
                )
        self.kind = kind
        self.scaling = scaling if kind != "default" else None
        if self.scaling is not None and kind == "yarn":
            # The graphs that we write for read none of these.
            self.scaling.require("beta_fast", 32.0, 32.0)
            self.scaling.require("beta_slow", 1.0, 1.0)
            self.scaling.require("truncate", True, True)

    def add_scaling(self, writer: gguf.GGUFWriter) -> None:
        """Write the scaling's metadata. llama3 has none: it becomes a tensor, `llama3_factors`."""
        if self.scaling is None or self.kind == "llama3":
            return
        if self.kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self.scaling.number("factor"))
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(self.scaling.number("factor"))
        writer.add_rope_scaling_orig_ctx_len(self._original_context(self.scaling))
        attention_factor = self._relative_attention_factor(self.scaling)
        if attention_factor != 1.0:
            key = gguf.Keys.Rope.SCALING_ATTN_FACTOR.format(arch=writer.arch)
            writer.add_float32(key, attention_factor)

    @staticmethod
    def _original_context(scaling: Config) -> int:
        return scaling.integer("original_max_position_embeddings", most=MAX_TOKENS)

    @staticmethod
    def _relative_attention_factor(scaling: Config) -> float:
        """What YaRN multiplies sine and cosine by, relative to the 1 + 0.1 ln(factor) of the paper
        (arXiv:2309.00071), which llama.cpp applies by itself."""

        def magnitude(weight: float = 1.0) -> float:
            return 1.0 + 0.1 * weight * math.log(max(1.0, scaling.number("factor")))

        if scaling.has("attention_factor"):
            return scaling.number("attention_factor") / magnitude()
        if scaling.has("mscale") and scaling.has("mscale_all_dim"):
            mine, all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
            return magnitude(mine) / magnitude(all_dim) / magnitude()
        return 1.0

    def llama3_factors(self, head_dim: int) -> NDArray[np.float32] | None:
        """What each of the head_dim/2 frequencies is divided by under Llama 3 scaling, float32; None for
        other kinds.

        Wavelengths below the high-frequency bound keep their frequency, those above the low-frequency bound
        are slowed by `factor`, and between the two the frequency is interpolated linearly in
        original_context/wavelength (Llama 3.1 release, `apply_scaling`).
        """
        if self.scaling is None or self.kind != "llama3":
            return None
        factor = self.scaling.number("factor")
        low = self.scaling.number("low_freq_factor")
        high = self.scaling.number("high_freq_factor")
        if high <= low:
            raise self.scaling.error(f"high_freq_factor {high} is not above low_freq_factor {low}")
        context = self._original_context(self.scaling)
        frequencies = self.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        wavelengths = 2 * math.pi / frequencies
        smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def read_rope(config: Config, default_base: float, kinds: tuple[str, ...] = COMMON_KINDS) -> Rope:
    """The rotary embedding of a model whose layers all share one.

    transformers 5 writes `rope_parameters`; older releases write `rope_theta` beside an optional
    `rope_scaling`.
    """
    parameters = config.section("rope_parameters")
    if parameters is not None:
        base = parameters.number("rope_theta", config.number("rope_theta", default_base))
        return Rope(base, parameters, kinds)
    return Rope(config.number("rope_theta", default_base), config.section("rope_scaling"), kinds)


def rotated_part(config: Config, default: float) -> float:
    """The part of every head that is rotated: `partial_rotary_factor`, which transformers 5 writes into
    `rope_parameters`."""
    part = config.number("partial_rotary_factor", default, most=1.0)
    parameters = config.section("rope_parameters")
    return part if parameters is None else parameters.number("partial_rotary_factor", part, most=1.0)
