"""Rotary position embedding: its parameters, spelled in two ways in config.json, and what llama.cpp reads."""

from __future__ import annotations

import math

import gguf
import numpy as np
from numpy.typing import NDArray

from ggml_tern.convert.architectures.config import Config

#: Scaling kinds that llama.cpp computes as transformers does.
_KNOWN_KINDS = ("default", "linear", "llama3", "yarn")


class Rope:
    """The rotary embedding of one kind of layer.

    Attributes:
        base: the frequency base (`rope_theta`).
        kind: `default`, `linear`, `llama3` or `yarn`.
        scaling: the section that holds the scaling's own parameters; None for `default`.
    """

    def __init__(self, base: float, scaling: Config | None) -> None:
        self.base = base
        # Older checkpoints call the kind "type".
        kind = "default"
        if scaling is not None:
            kind = scaling.string("rope_type", scaling.string("type", "default"))
            if kind not in _KNOWN_KINDS:
                raise scaling.error(
                    f"rope scaling {kind!r} is not supported; known: {', '.join(_KNOWN_KINDS)}"
                )
        self.kind = kind
        self.scaling = scaling if kind != "default" else None

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
        writer.add_rope_scaling_orig_ctx_len(self.scaling.integer("original_max_position_embeddings"))
        if self.scaling.has("attention_factor"):
            writer.add_rope_scaling_yarn_attn_factor(self.scaling.number("attention_factor"))
        if self.scaling.has("beta_fast"):
            writer.add_rope_scaling_yarn_beta_fast(self.scaling.number("beta_fast"))
        if self.scaling.has("beta_slow"):
            writer.add_rope_scaling_yarn_beta_slow(self.scaling.number("beta_slow"))

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
        context = self.scaling.integer("original_max_position_embeddings")
        frequencies = self.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        wavelengths = 2 * math.pi / frequencies
        smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def read_rope(config: Config, default_base: float) -> Rope:
    """The rotary embedding of a model whose layers all share one.

    transformers 5 writes `rope_parameters`; older releases write `rope_theta` beside an optional
    `rope_scaling`.
    """
    parameters = config.section("rope_parameters")
    if parameters is not None:
        return Rope(parameters.number("rope_theta", config.number("rope_theta", default_base)), parameters)
    return Rope(config.number("rope_theta", default_base), config.section("rope_scaling"))
