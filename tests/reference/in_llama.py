"""Questions to llama-cpp-python in a process of its own: loading, memory, logits.

`ask("load", [...])` runs the function `load` below in a fresh interpreter, with the plug-in loaded or
without it, and returns its answer. A crash there is a CalledProcessError here.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

N_CTX = 128


def ask(question: str, *arguments: Any, plugin: bool = True) -> Any:
    """The answer of one of the functions below; arguments and answer travel as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        subprocess.run(
            [sys.executable, __file__, str(answer)],
            input=json.dumps({"question": question, "arguments": arguments, "plugin": plugin}),
            text=True,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(answer.read_text())


def _llama(path: str, n_gpu_layers: int, logits_all: bool = False) -> Any:
    import llama_cpp

    return llama_cpp.Llama(
        path,
        n_gpu_layers=n_gpu_layers,
        n_ctx=N_CTX,
        n_threads=1,  # of use for models as small as these
        n_threads_batch=1,
        logits_all=logits_all,
        verbose=False,
    )


def load(paths: list[str]) -> list[str]:
    """Loads and frees each: "loaded", or the error's type and text."""
    outcomes = []
    for path in paths:
        try:
            _llama(path, 99).close()
            outcomes.append("loaded")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def _digest(llm: Any, tokens: list[int]) -> str:
    """A hash of the bits of the logits at every position."""
    llm.reset()
    llm.eval(tokens)
    return hashlib.sha256(llm.scores[: len(tokens)].tobytes()).hexdigest()


def digests(paths: list[str], tokens: list[int], n_gpu_layers: int) -> list[str]:
    """One model after the other."""
    return [_digest(_llama(path, n_gpu_layers, True), tokens) for path in paths]


def digests_in_turns(paths: list[str], tokens: list[int], n_gpu_layers: int) -> list[str]:
    """All models loaded; each is evaluated twice, with all others in between."""
    models = [_llama(path, n_gpu_layers, True) for path in paths]
    first = [_digest(llm, tokens) for llm in models]
    second = [_digest(llm, tokens) for llm in reversed(models)][::-1]
    if first != second:
        raise AssertionError("the second evaluation gave other logits")
    return first


def digests_by_threads(paths: list[str], tokens: list[int]) -> list[str]:
    """All loaded at the same moment, each by a thread of its own; evaluated one after the other."""
    together = threading.Barrier(len(paths))

    def load_one(path: str) -> Any:
        together.wait()
        return _llama(path, 99, True)

    with ThreadPoolExecutor(len(paths)) as pool:
        models = list(pool.map(load_one, paths))
    return [_digest(llm, tokens) for llm in models]


def buffers_of_one_while_another_opens(path: str, other: str) -> list[str]:
    """The buffers that the model of `path` gets, by their names in the log, where another thread opens
    `other` after the header of `path` was read and before its tensors look for a place."""
    import llama_cpp

    log: list[str] = []
    opened: list[bool] = []

    def open_other() -> None:
        opened.append(bool(llama_cpp.llama_model_load_from_file(other.encode(), parameters)))

    def on_line(level: int, text: bytes, data: Any) -> None:
        log.append(text.decode(errors="replace"))
        if "loaded meta data" in log[-1] and not opened and threading.current_thread() is loading:
            thread = threading.Thread(target=open_other)
            thread.start()
            thread.join()

    loading = threading.current_thread()
    callback = llama_cpp.llama_log_callback(on_line)
    llama_cpp.llama_log_set(callback, None)
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    if not model or len(opened) != 1:
        raise AssertionError(f"loaded: {bool(model)}; the other was opened {len(opened)} times")
    return re.findall(r"(\S+) model buffer size", "".join(log))


def metadata_keys(path: str) -> list[str]:
    """The keys of a model's metadata as the host has them."""
    return sorted(_llama(path, 99).metadata)


def save(path: str, out: str) -> None:
    """Loads a model and has libllama write it again."""
    import llama_cpp

    write = llama_cpp.llama_cpp._lib.llama_model_save_to_file
    write.argtypes, write.restype = [ctypes.c_void_p, ctypes.c_char_p], None
    llm = _llama(path, 99)
    write(llm.model, out.encode())


def _anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def load_repeatedly(path: str, times: int, n_gpu_layers: int) -> list[int]:
    """Anonymous resident memory, KiB, after each load, evaluation and free."""
    after = []
    for _ in range(times):
        llm = _llama(path, n_gpu_layers)
        llm.eval([1, 2, 3])
        llm.close()
        del llm
        ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later is no leak
        after.append(_anonymous_kib())
    return after


def descriptors_after_loads(path: str, times: int, n_gpu_layers: int) -> list[int]:
    """The number of open file descriptors after each load and free."""
    after = []
    for _ in range(times):
        _llama(path, n_gpu_layers).close()
        after.append(len(os.listdir("/proc/self/fd")))
    return after


def peak_of_loading(path: str, n_gpu_layers: int) -> int:
    """By how many KiB anonymous memory rises while the model (no context) is loaded, at most."""
    import llama_cpp

    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = n_gpu_layers
    before, peak, done = _anonymous_kib(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _anonymous_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    peak = max(peak, _anonymous_kib())
    done.set()
    watcher.join()
    if not model:
        raise AssertionError("the model did not load")
    llama_cpp.llama_model_free(model)
    return peak - before


def greedy(path: str, prompt: str, n_tokens: int, n_gpu_layers: int) -> list[int]:
    """The n_tokens most probable tokens after prompt, one after the other."""
    llm = _llama(path, n_gpu_layers, True)
    llm.eval(llm.tokenize(prompt.encode()))
    found = []
    for _ in range(n_tokens):
        found.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval(found[-1:])
    return found


def load_adapters(path: str, adapters: list[str]) -> list[bool]:
    """Whether each LoRA can be loaded for the model."""
    import llama_cpp

    llm = _llama(path, 99)
    return [bool(llama_cpp.llama_adapter_lora_init(llm.model, adapter.encode())) for adapter in adapters]


def abort_a_decode(path: str) -> list[int]:
    """What llama_decode returns with an abort callback that says stop, and then without it."""
    import llama_cpp

    llm = _llama(path, 99)
    callback = llama_cpp.ggml_abort_callback(lambda _: True)
    codes = []
    for stop in (callback, llama_cpp.ggml_abort_callback()):
        llama_cpp.llama_set_abort_callback(llm.ctx, stop, None)
        token = (llama_cpp.llama_token * 1)(5)
        codes.append(int(llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(token, 1))))
    return codes


class _Tensor(ctypes.Structure):
    """struct ggml_tensor, of the pinned version (unchanged for many)."""


_Tensor._fields_ = (
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
)


def _values(tensor: _Tensor) -> npt.NDArray[np.float32]:
    """The float32 values of a contiguous tensor in host memory, [rows, ne0]."""
    count = int(np.prod(tensor.ne))
    values: npt.NDArray[np.float32] = np.ctypeslib.as_array(
        (ctypes.c_float * count).from_address(tensor.data)
    )
    return values.reshape(-1, tensor.ne[0]).copy()


def products(path: str, tokens: list[int], n_batch: int, n_gpu_layers: int, out: str) -> None:
    """Evaluates tokens and writes every product with a weight matrix to the .npz file out: for weight NAME
    its input NAME/x, float32 [n_tokens, n_in], and its output NAME/y [n_tokens, n_out]."""
    import llama_cpp

    found: dict[str, list[npt.NDArray[np.float32]]] = {}
    describe = llama_cpp.llama_cpp._lib.ggml_op_desc
    describe.argtypes, describe.restype = [ctypes.c_void_p], ctypes.c_char_p

    def on_node(address: int, ask: bool, _: Any) -> bool:
        tensor = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
        if describe(address) != b"MUL_MAT":
            return not ask
        name = tensor.src[0].contents.name.decode()
        if not name.endswith(".weight"):
            return not ask
        if not ask:
            found.setdefault(f"{name}/x", []).append(_values(tensor.src[1].contents))
            found.setdefault(f"{name}/y", []).append(_values(tensor))
        return True

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    model_parameters = llama_cpp.llama_model_default_params()
    model_parameters.n_gpu_layers = n_gpu_layers
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_parameters)
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = N_CTX, n_batch, n_batch
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(on_node)
    parameters.cb_eval = callback
    context = llama_cpp.llama_init_from_model(model, parameters)
    for first in range(0, len(tokens), n_batch):
        part = tokens[first : first + n_batch]
        ids = (llama_cpp.llama_token * len(part))(*part)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(part))) != 0:
            raise AssertionError("llama_decode failed")
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    arrays: dict[str, Any] = {key: np.concatenate(parts) for key, parts in found.items()}
    np.savez(out, **arrays)


def crash() -> None:
    os.abort()


def _main() -> None:
    request = json.load(sys.stdin)
    from ggml_tern.host import stock as host

    if request["plugin"]:
        host.enable()
    else:
        os.environ.update(host.library_variables())
    answer = globals()[request["question"]](*request["arguments"])
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    _main()
