"""The models of an evaluation: in llama.cpp, through llama-cpp-python with the plug-in."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.errors import TernError
from ggml_tern.gguf.identify import require_gguf
from ggml_tern.host.stock import enable, library_variables

if TYPE_CHECKING:
    from ggml_tern.evaluate.scoring import F32, I32

#: What C holds a pointer to, and Python must not forget.
_kept: list[Any] = []


class Model:
    """A GGUF file in llama.cpp, with a context of ``context`` tokens.

    Raises TernError where it cannot be loaded.
    """

    def __init__(self, path: Path, context: int, n_gpu_layers: int = -1, threads: int | None = None) -> None:
        require_gguf(path)
        llama_cpp = _quiet_llama_cpp()

        self.path = path
        try:
            self._llama: Any = llama_cpp.Llama(
                str(path),
                n_ctx=context,
                n_batch=context,
                n_ubatch=min(context, 512),
                n_gpu_layers=n_gpu_layers,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=True,
                logits_all=True,
                verbose=False,
            )
        except (ValueError, RuntimeError) as error:
            raise TernError(
                f"{path}: llama.cpp does not load it; `tern inspect {path}` says what it is"
            ) from error

    def close(self) -> None:
        self._llama.close()

    @property
    def first_token(self) -> int | None:
        """The token that every text begins with, for models that want one."""
        vocabulary = self._llama._model
        return int(vocabulary.token_bos()) if vocabulary.add_bos_token() else None

    def tokens(self, text: str) -> I32:
        """Of a text, without what it begins with. Words that look like control tokens are taken as text."""
        return np.array(self._llama.tokenize(text.encode(), add_bos=False, special=False), np.int32)

    def logits(self, tokens: I32) -> F32:
        """At every position of a text that begins with these tokens, float32 [n_tokens, vocabulary].

        Valid until the next call."""
        self._llama.reset()
        self._llama.eval(tokens.tolist())
        return self._llama.scores[: len(tokens)]  # type: ignore[no-any-return]


@functools.cache
def _quiet_llama_cpp() -> Any:
    """llama-cpp-python with the plug-in. llama.cpp is silent from now on; the plug-in says what it must."""
    os.environ.update(library_variables())
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError):
        enable()  # which says why not
        raise
    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    _kept.append(silence)
    enable()
    return llama_cpp


@contextlib.contextmanager
def as_gguf(path: Path, beside: Path) -> Iterator[Path]:
    """A GGUF file of a model, for as long as it is needed.

    Itself, or for a checkpoint one with its weights as they are, in a folder beside ``beside``.
    Raises TernError.
    """
    if not path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix=".tern-eval-", dir=beside.absolute().parent) as folder:
        file = Path(folder) / f"{path.resolve().name}.gguf"
        convert(path, file, TypeChoice(lossless=True))
        yield file
