"""Ternary language models on unmodified llama.cpp.

``Llama`` is llama-cpp-python's class of that name, on the plug-in. ``enable()`` loads the plug-in for code
that uses ``llama_cpp`` itself, and ``python -m ggml_tern SCRIPT`` for programs that are left as they are. The
command ``tern`` does the same for any other llama.cpp program, and ``ternconv`` makes the GGUF files.
``ggml_tern.api`` has these, and what the commands do, as functions.
"""

from typing import TYPE_CHECKING, Any

from ggml_tern.errors import TernError
from ggml_tern.host.stock import enable

if TYPE_CHECKING:
    from ggml_tern import api as api
    from ggml_tern.llama import Llama as Llama

# Asked for seldom, and to find it out takes longer than all else here.
__version__: str
# Llama is not among them: it needs llama-cpp-python, which everything else does without.
__all__ = ["TernError", "__version__", "api", "enable"]


def __getattr__(name: str) -> Any:
    """What takes time to import, or is not always there, when it is asked for."""
    if name == "Llama":
        from ggml_tern.llama import Llama

        return Llama
    if name == "api":
        import ggml_tern.api

        return ggml_tern.api
    if name == "__version__":
        from importlib.metadata import version

        return version("ggml-tern")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "Llama"})
