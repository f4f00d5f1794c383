"""Ternary language models on unmodified llama.cpp.

``enable()`` loads the plug-in into the llama.cpp that llama-cpp-python uses in this process. The command
``tern`` does the same for any other llama.cpp program, and ``ternconv`` makes the GGUF files.
"""

from importlib.metadata import version

from ggml_tern.errors import TernError
from ggml_tern.runtime.host import enable

__version__ = version("ggml-tern")
__all__ = ["TernError", "__version__", "enable"]
