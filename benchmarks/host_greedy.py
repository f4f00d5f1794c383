"""Greedy tokens from one llama-cpp-python host, as one line of JSON.

Run by check_hosts.py with the Python of that host's own environment, so nothing but the standard library
and llama_cpp (with LLAMA_CPP_LIB_PATH set to the host's libraries) may be imported here.

    host_greedy.py MODEL [--plugin SO] [--n-gpu-layers N] [--prompt IDS] [--count N]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
from typing import Any


def load_plugin(llama_cpp: Any, plugin: str) -> None:
    """Registers the plug-in with the ggml that libllama uses: found through libllama, since a wheel holds
    several copies of libggml, each with a registry of its own once it is loaded."""
    load = llama_cpp.llama_cpp._lib.ggml_backend_load
    load.argtypes = [ctypes.c_char_p]
    load.restype = ctypes.c_void_p
    if not load(plugin.encode()):
        raise SystemExit(f"the host did not load {plugin}")


def greedy(llama_cpp: Any, llm: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """count greedy tokens after prompt, and for each the lead of its log-probability over the second best."""
    n_vocab = llm.n_vocab()
    tokens: list[int] = []
    leads: list[float] = []
    batch = prompt
    for _ in range(count):
        llm.eval(batch)
        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)[:n_vocab]
        best = max(range(n_vocab), key=logits.__getitem__)
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
    args = parser.parse_args()

    llama_cpp = importlib.import_module("llama_cpp")
    if args.plugin:
        load_plugin(llama_cpp, args.plugin)
    llm = llama_cpp.Llama(
        args.model,
        n_gpu_layers=args.n_gpu_layers,
        n_ctx=args.context,
        n_batch=args.context,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=True,
    )
    tokens, leads = greedy(llama_cpp, llm, args.prompt, args.count)
    print(json.dumps({"tokens": tokens, "leads": leads}), flush=True)


if __name__ == "__main__":
    main()
