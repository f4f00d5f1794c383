"""``python -m ggml_tern``: run a Python program that uses llama_cpp, as it is, with the plug-in.

python -m ggml_tern script.py arguments...
python -m ggml_tern -m llama_cpp.server --model model.gguf --n_gpu_layers -1
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ggml_tern.errors import TernError
from ggml_tern.host.stock import enable


def main() -> None:
    """Load the plug-in, and become the script or module that the arguments name."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(f"usage:{(__doc__ or '').partition(chr(10))[2].rstrip()}")
    try:
        enable()
    except TernError as error:
        sys.exit(f"tern: {error}")
    # As the interpreter leaves them: the program first, and where it looks for its own modules.
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
