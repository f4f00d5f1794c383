"""Small models in the forms that a GPU's results are compared with: our types, F16, and stock Q2_0.

A GPU has no kernels for our types. The same weights in F16 on the same device say what the logits should be;
in Q2_0, a type of llama.cpp's own, how llama.cpp runs such a model without us.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rotated_files
from reference import formats as ref
from reference import gguf_files
from rotated_files import N_VOCABULARY, Recipe, RotatedModel

F32 = npt.NDArray[np.float32]

GGML_F32, GGML_F16 = 0, 1

TOKENS = [(37 * i * i + 101 * i + 7) % (N_VOCABULARY - 3) for i in range(36)]
#: How many of them come in one batch, before the others come one by one.
N_PROMPT = 32
#: With experts. The software Vulkan driver crashes on more, whatever the type of the weights.
N_PROMPT_OF_EXPERTS = 4


#: Blocks larger than what GPUs transform at once, as the released 27B has.
LARGE_BLOCKS = Recipe("llama", block=1024, width=1024, ffn=1024, head_dim=128, heads=8, layers=1)


class Forms:
    """A model, and the files that are made of it when they are first asked for, in `folder`."""

    def __init__(self, folder: Path, name: str, recipe: Recipe, rotated: bool) -> None:
        self.rotated = rotated
        self.n_prompt = N_PROMPT_OF_EXPERTS if recipe.has_experts else N_PROMPT
        # Plain weights of larger blocks are rounded by F16 as much as is to be seen.
        self._f16_will_do = recipe.block <= 512
        self._path = folder / name.replace(", ", "-").replace(" ", "-")
        self.model: RotatedModel = rotated_files.make(recipe, np.random.default_rng(3))

    def _file(self, form: str) -> Path:
        return self._path.with_name(f"{self._path.name}-{form}.gguf")

    @property
    def ours(self) -> Path:
        """The file with our types, rotated or not."""
        path = self._file("ours")
        if not path.exists():
            if self.rotated:
                self.model.write(path)
            else:
                self.model.write_stripped(path)
        return path

    @property
    def f16(self) -> Path:
        """What the weights mean, in F16."""
        return self._written("f16", (_f16(name, values) for name, values in self._meaning().items()))

    @property
    def truth(self) -> Path:
        """What the weights mean: in F16, or in F32 where that rounds too much."""
        if self._f16_will_do:
            return self.f16
        path = self._file("f32")
        return path if path.exists() else self.model.write_twin(path)

    @property
    def q2_0(self) -> Path:
        """The stored weights in Q2_0, which llama.cpp runs as if they were not rotated."""
        return self._written("q2_0", (in_q2_0(tensor) for tensor in self.model.stored.values()))

    def _meaning(self) -> dict[str, F32]:
        return self.model.plain if self.rotated else {t.name: decoded(t) for t in self.model.stored.values()}

    def _written(self, form: str, tensors: Iterable[gguf_files.Tensor]) -> Path:
        path = self._file(form)
        if not path.exists():
            stored = {tensor.name: tensor for tensor in tensors}
            replace(self.model, stored=stored).write_stripped(path)
        return path


def _is_ternary(tensor: gguf_files.Tensor) -> bool:
    return tensor.type_id in ref.FORMATS


def _rows(tensor: gguf_files.Tensor) -> npt.NDArray[np.uint8]:
    return np.frombuffer(tensor.data, np.uint8).reshape(int(np.prod(tensor.shape[:-1])), -1)


def decoded(tensor: gguf_files.Tensor) -> F32:
    if _is_ternary(tensor):
        return ref.dequantize(ref.FORMATS[tensor.type_id], _rows(tensor)).reshape(tensor.shape)
    dtype = np.float16 if tensor.type_id == GGML_F16 else np.float32
    return np.frombuffer(tensor.data, dtype).astype(np.float32).reshape(tensor.shape)


def _f16(name: str, values: F32) -> gguf_files.Tensor:
    """Matrices in F16. Vectors and what is no weight of a product stay in F32."""
    if values.ndim < 2 or "conv1d" in name or "ffn_gate_inp" in name:
        return gguf_files.plain(name, GGML_F32, values)
    return gguf_files.plain(name, GGML_F16, values.astype(np.float16))


def in_q2_0(tensor: gguf_files.Tensor) -> gguf_files.Tensor:
    """A ternary tensor with the same trits and scales in Q2_0; others as they are."""
    if not _is_ternary(tensor):
        return tensor
    fmt = ref.FORMATS[tensor.type_id]
    trits, scales = ref.unpack(fmt, _rows(tensor))
    scales = np.repeat(scales, fmt.block // ref.Q2_0.block, axis=1)
    return gguf_files.ternary(tensor.name, ref.Q2_0, trits.reshape(tensor.shape), scales)
