"""Greedy tokens from one host of Python, as one line of JSON.

Run by check_hosts.py with the Python of that host's own environment, so nothing but the standard library
and the host's package may be imported here: llama_cpp, with LLAMA_CPP_LIB_PATH set to its libraries, or
llama_cpp_py_sync, which brings them.

    host_greedy.py MODEL [--plugin SO] [--n-gpu-layers N] [--prompt IDS] [--count N] [--py-sync]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Evaluates tokens and returns the logits after the last of them.
Evaluate = Callable[[list[int]], Sequence[float]]


def load_plugin(libllama: Any, plugin: str) -> None:
    """Registers the plug-in with the ggml that libllama uses: found through libllama, since a wheel holds
    several copies of libggml, each with a registry of its own once it is loaded."""
    load = libllama.ggml_backend_load
    load.argtypes = [ctypes.c_char_p]
    load.restype = ctypes.c_void_p
    if not load(plugin.encode()):
        raise SystemExit(f"the host did not load {plugin}")


def llama_cpp(args: argparse.Namespace) -> Evaluate:
    """llama-cpp-python."""
    package = importlib.import_module("llama_cpp")
    if args.plugin:
        load_plugin(package.llama_cpp._lib, args.plugin)
    llm = package.Llama(
        args.model,
        n_gpu_layers=args.n_gpu_layers,
        n_ctx=args.context,
        n_batch=args.context,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=True,
    )

    def evaluate(tokens: list[int]) -> Sequence[float]:
        llm.eval(tokens)
        logits: Sequence[float] = package.llama_get_logits_ith(llm.ctx, -1)[: llm.n_vocab()]
        return logits

    return evaluate


def py_sync(args: argparse.Namespace) -> Evaluate:
    """llama-cpp-py-sync: the structures of its llama.h, by cffi. The package itself wants more."""
    package = importlib.util.find_spec("llama_cpp_py_sync")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llama_cpp_py_sync is not installed")
    file = Path(package.submodule_search_locations[0]) / "_cffi_bindings.py"
    spec = importlib.util.spec_from_file_location("bindings", file)
    assert spec is not None and spec.loader is not None
    bindings: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bindings)
    lib, ffi = bindings.get_lib(), bindings.get_ffi()
    if args.plugin:
        load_plugin(ctypes.CDLL(bindings._find_library()), args.plugin)
    parameters = lib.llama_model_default_params()
    parameters.n_gpu_layers = args.n_gpu_layers
    model = lib.llama_model_load_from_file(args.model.encode(), parameters)
    if not model:
        raise SystemExit(f"the host did not load {args.model}")
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = args.context
    settings.n_threads = settings.n_threads_batch = args.threads
    settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # as llama-cpp-python has it
    context = lib.llama_init_from_model(model, settings)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def evaluate(tokens: list[int]) -> Sequence[float]:
        # The batch points into it.
        memory = ffi.new("llama_token[]", tokens)
        if lib.llama_decode(context, lib.llama_batch_get_one(memory, len(tokens))) != 0:
            raise SystemExit("llama_decode failed")
        logits: Sequence[float] = ffi.unpack(lib.llama_get_logits_ith(context, -1), n_vocab)
        return logits

    return evaluate


def greedy(evaluate: Evaluate, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """count greedy tokens after prompt, and for each the lead of its log-probability over the second best."""
    tokens: list[int] = []
    leads: list[float] = []
    batch = prompt
    for _ in range(count):
        logits = evaluate(batch)
        best = max(range(len(logits)), key=logits.__getitem__)
        leads.append(logits[best] - max(x for i, x in enumerate(logits) if i != best))
        tokens.append(best)
        batch = [best]
    return tokens, leads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--plugin")
    parser.add_argument("--n-gpu-layers", type=int, default=99)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=lambda s: [int(t) for t in s.split(",")], default=[1])
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--py-sync", action="store_true", help="the host is llama-cpp-py-sync")
    args = parser.parse_args()

    evaluate = py_sync(args) if args.py_sync else llama_cpp(args)
    tokens, leads = greedy(evaluate, args.prompt, args.count)
    print(json.dumps({"tokens": tokens, "leads": leads}), flush=True)


if __name__ == "__main__":
    main()
