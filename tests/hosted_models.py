"""Small rotated models in llama-cpp-python, llama-bench and llama-server: logits, and what is said."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import compare_logits
from ggml_tern.host import stock as host
from llama_server import free_port
from reference.one_op import in_new_process
from rotated_files import N_VOCABULARY

F32 = npt.NDArray[np.float32]

TOKENS = [(37 * i * i + 101 * i + 7) % (N_VOCABULARY - 3) for i in range(48)]


@dataclass(frozen=True)
class Run:
    """How llama.cpp is to load a model and to evaluate it. n_batch 1 is decoding, token by token."""

    path: Path
    n_gpu_layers: int = 99
    n_batch: int = 64
    n_threads: int = 1
    lora: Path | None = None
    use_mmap: bool = True


def load(run: Run) -> Any:
    import llama_cpp

    # A float32 KV cache, no flash attention: int8 activations are all that lies between a model and its twin.
    return llama_cpp.Llama(
        str(run.path), n_gpu_layers=run.n_gpu_layers, n_ctx=128, n_batch=run.n_batch, n_ubatch=run.n_batch,
        n_threads=run.n_threads, n_threads_batch=run.n_threads, type_k=0, type_v=0, flash_attn=False,
        logits_all=True, lora_path=None if run.lora is None else str(run.lora), use_mmap=run.use_mmap,
        verbose=False,
    )  # fmt: skip


def evaluate(runs: list[Run], plugin: bool) -> list[F32]:
    """The logits of TOKENS for each run, float32 [n_tokens, N_VOCABULARY]; call it through in_new_process."""
    if plugin:
        host.enable()
    logits = []
    for run in runs:
        llm = load(run)
        llm.eval(TOKENS)
        logits.append(np.array(llm.scores[: len(TOKENS)], np.float32))
        llm.close()
    return logits


def evaluate_in_turns(groups: list[list[Run]]) -> list[F32]:
    """The same with all models of a group loaded, each evaluating a part of the tokens before the next one
    goes on; one group after the other."""
    host.enable()
    logits = []
    for runs in groups:
        models = [load(run) for run in runs]
        for part in (TOKENS[:20], TOKENS[20:21], TOKENS[21:]):
            for llm in models:
                llm.eval(part)
        logits += [np.array(llm.scores[: len(TOKENS)], np.float32) for llm in models]
    return logits


def with_plugin(*runs: Run) -> list[F32]:
    return in_new_process(evaluate, list(runs), True)


def without_plugin(*runs: Run) -> list[F32]:
    return in_new_process(evaluate, list(runs), False)


def assert_agree(wanted: F32, served: F32) -> None:
    """What a model and its twin must have in common."""
    agreement = compare_logits.compare(wanted, served)
    print(agreement)
    assert agreement.mean_kl <= 1e-3
    assert agreement.top1 >= 0.9


def assert_bits(wanted: F32, found: F32) -> None:
    assert np.array_equal(wanted.view(np.uint32), found.view(np.uint32))


def load_in_turns(paths: list[Path]) -> list[tuple[str, str]]:
    """("loaded" or the exception, what was written to stderr) for each; call it through in_new_process."""
    host.enable()
    import llama_cpp

    outcomes = []
    for path in paths:
        with tempfile.TemporaryFile() as log:
            stderr = os.dup(2)
            os.dup2(log.fileno(), 2)
            try:
                llama_cpp.Llama(str(path), n_gpu_layers=99, n_ctx=64, n_threads=1, verbose=True).close()
                outcome = "loaded"
            except ValueError as error:
                outcome = repr(error)
            finally:
                sys.stderr.flush()
                os.dup2(stderr, 2)
                os.close(stderr)
            log.seek(0)
            outcomes.append((outcome, log.read().decode(errors="replace")))
    return outcomes


def said_by_plugin(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("ggml-tern: ")]


def run_llama_bench(path: Path) -> tuple[int, str]:
    command = [host.llama_cpp_dir() / "llama-bench", "-m", path, "-t", "1", "-p", "4", "-n", "1", "-r", "1"]
    return _run(command)


def run_llama_server(path: Path) -> tuple[int, str]:
    """Ends by itself only if the model is refused."""
    command = [host.llama_cpp_dir() / "llama-server", "-m", path, "--port", str(free_port())]
    return _run(command)


def _run(command: list[Any]) -> tuple[int, str]:
    done = subprocess.run(
        command, env=host.host_environment(stock=False), capture_output=True, text=True, errors="replace",
        timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr
