"""``Llama``: llama-cpp-python's class of that name, with the plug-in loaded.

Importing this module loads llama.cpp and the plug-in; ``import ggml_tern`` alone does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from ggml_tern.host.stock import enable

# Before llama_cpp is imported, which may need to be told where its libraries are.
enable()

import llama_cpp  # noqa: E402

_P = ParamSpec("_P")

#: Of n_gpu_layers: all of them, on TERN0. llama-cpp-python's own default is none.
ALL_LAYERS = -1


def _parameters_of(original: Callable[_P, None]) -> Callable[[Callable[..., None]], Callable[_P, None]]:
    """Give a function the parameters of another, for type checkers, ``help()`` and editors, without a copy of
    fifty of them that would be wrong for the next version. One default is changed, that of n_gpu_layers."""

    def decorate(function: Callable[..., None]) -> Callable[_P, None]:
        signature = inspect.signature(original)
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                parameter.replace(default=ALL_LAYERS) if name == "n_gpu_layers" else parameter
                for name, parameter in signature.parameters.items()
            ]
        )
        function.__doc__ = original.__doc__
        return function

    return decorate


class Llama(llama_cpp.Llama):
    """``llama_cpp.Llama`` for ternary models: all layers are computed by the plug-in, on its device TERN0.

    Its methods and parameters are those of ``llama_cpp.Llama``; only n_gpu_layers is all by default. Other
    models work too.

    >>> llm = Llama("model.gguf", n_ctx=4096, verbose=False)
    >>> llm.create_chat_completion([{"role": "user", "content": "Hello"}])["choices"][0]["message"]
    """

    @_parameters_of(llama_cpp.Llama.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"n_gpu_layers": ALL_LAYERS, **options})
