"""One operation on one of the plug-in's devices, through ggml's own C API: what a host does, at its smallest.

Everything here runs in a process of its own (`in_new_process`): a plug-in once loaded stays, and an
assertion of ggml ends the process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ggml_tern.host import stock as host

Answer = TypeVar("Answer")

F32_TYPE, I32_TYPE = 0, 26
# Inside a process the plug-in's types live in two retired type ids; files keep 142 and 143.
SLOTS = {142: 37, 143: 38}
# ... and matrices that need more than a product, as the file tells that they are in, in two more.
TREATED_SLOTS = {142: 31, 143: 32}
IGPU, ACCEL = 2, 3
USAGE_WEIGHTS = 1


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True)
class Op:
    """What to compute. name: mul_mat, mul_mat_id or get_rows.

    weights: uint8 [n_out, row_bytes], or [n_experts, n_out, row_bytes] for mul_mat_id, of n_in weights a row.
    x: float32 [..., n_in] activations (mul_mat: [n_tokens, n_in]; mul_mat_id: [n_tokens, n_used or 1, n_in]).
    ids: int32; row numbers [n] for get_rows, experts [n_tokens, n_used] for mul_mat_id.
    tensor: what the weights are called.
    """

    name: str
    type_id: int
    n_in: int
    weights: npt.NDArray[np.uint8]
    x: npt.NDArray[np.float32] | None = None
    ids: npt.NDArray[np.int32] | None = None
    tensor: str = ""


@dataclass(frozen=True)
class Result:
    """y: float32, shape as numpy sees ggml's; weights_read: the weights as read back from their buffer, in
    one piece; piece_read: their middle third alone; supported: what the device says of the operation."""

    y: npt.NDArray[np.float32]
    weights_read: bytes
    piece_read: bytes
    supported: bool


def in_new_process(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """function(*arguments) in a fresh interpreter. A crash there is a BrokenProcessPool here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


class _Ggml:
    """The host's libraries, with the plug-in loaded; functions are typed as they are called."""

    def __init__(self) -> None:
        folder = host.llama_cpp_dir()
        self._base = ctypes.CDLL(str(folder / "libggml-base.so.0"), mode=ctypes.RTLD_GLOBAL)
        self._registry = ctypes.CDLL(str(folder / "libggml.so.0"), mode=ctypes.RTLD_GLOBAL)
        if not self.pointer("backend_load", str(host.plugin_path()).encode()):
            raise RuntimeError("the plug-in did not load")

    def _call(self, result: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        function = getattr(self._base, f"ggml_{name}", None) or getattr(self._registry, f"ggml_{name}")
        function.restype = result
        function.argtypes = None
        return function(*arguments)

    def pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._call(ctypes.c_void_p, name, arguments))

    def number(self, name: str, *arguments: Any) -> int:
        return int(self._call(ctypes.c_int64, name, arguments))

    def truth(self, name: str, *arguments: Any) -> bool:
        return bool(self._call(ctypes.c_bool, name, arguments))

    def nothing(self, name: str, *arguments: Any) -> None:
        self._call(None, name, arguments)


def run(op: Op, device_type: int, n_threads: int) -> Result:
    """Loads the plug-in and computes op on its device of the given type; call it through in_new_process."""
    return run_all([op], device_type, [n_threads])[0]


def run_all(
    ops: list[Op], device_type: int, thread_counts: list[int], file: Path | None = None
) -> list[Result]:
    """`run` for every op with every number of threads, one after the other in one process. file: a GGUF file
    that libllama opens first; it is no whole model, and refused once its header is read."""
    ggml = _Ggml()
    device = _device(ggml, device_type)
    if file is not None:
        _open(ggml, device, file)
    backend, set_n_threads = _backend(ggml, device)
    results = []
    for op in ops:
        for n_threads in thread_counts:
            set_n_threads(backend, n_threads)
            results.append(_compute(ggml, device, backend, op))
    ggml.nothing("backend_free", backend)
    return results


def _backend(ggml: _Ggml, device: ctypes.c_void_p) -> tuple[ctypes.c_void_p, Callable[..., None]]:
    """A backend on the device, and the function that sets its number of threads."""
    backend = ggml.pointer("backend_dev_init", device, None)
    registry = ggml.pointer("backend_dev_backend_reg", device)
    address = ggml.pointer("backend_reg_get_proc_address", registry, b"ggml_backend_set_n_threads")
    return backend, ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address.value or 0)


def _open(ggml: _Ggml, device: ctypes.c_void_p, file: Path) -> None:
    import ggml_tern

    ggml_tern.enable()
    import llama_cpp

    # libllama is new in this process; the plug-in gets a hold of it when it is asked this, as hosts do first.
    ggml.number("backend_dev_type", device)
    params = llama_cpp.llama_model_default_params()
    if llama_cpp.llama_model_load_from_file(str(file).encode(), params) is not None:
        raise RuntimeError(f"{file} is a model")


def device_memory(device_type: int) -> tuple[int, int]:
    """(free, total) bytes, as the device tells the host."""
    ggml = _Ggml()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.nothing("backend_dev_memory", _device(ggml, device_type), ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _device(ggml: _Ggml, device_type: int) -> ctypes.c_void_p:
    """The plug-in's device of that type; the host has no other of it."""
    for i in range(ggml.number("backend_dev_count")):
        device = ggml.pointer("backend_dev_get", ctypes.c_size_t(i))
        name = ctypes.string_at(ggml.pointer("backend_dev_name", device).value or 0).decode()
        if name.startswith("TERN") and ggml._call(ctypes.c_int, "backend_dev_type", (device,)) == device_type:
            return device
    raise RuntimeError(f"the plug-in registered no device of type {device_type}")


def _context(ggml: _Ggml) -> ctypes.c_void_p:
    return ggml.pointer("init", _InitParams(1 << 20, None, True))


def _tensor(ggml: _Ggml, context: ctypes.c_void_p, kind: int, ne: tuple[int, ...]) -> ctypes.c_void_p:
    dims = (ctypes.c_int64 * len(ne))(*ne)
    return ggml.pointer("new_tensor", context, ctypes.c_int(kind), ctypes.c_int(len(ne)), dims)


def _set(ggml: _Ggml, tensor: ctypes.c_void_p, values: npt.NDArray[Any]) -> None:
    data = np.ascontiguousarray(values).tobytes()
    if ggml.number("nbytes", tensor) != len(data):
        raise RuntimeError(f"the host wants {ggml.number('nbytes', tensor)} bytes, there are {len(data)}")
    ggml.nothing("backend_tensor_set", tensor, data, ctypes.c_size_t(0), ctypes.c_size_t(len(data)))


def _get(ggml: _Ggml, tensor: ctypes.c_void_p, first: int, count: int) -> bytes:
    buffer = ctypes.create_string_buffer(count)
    ggml.nothing("backend_tensor_get", tensor, buffer, ctypes.c_size_t(first), ctypes.c_size_t(count))
    return buffer.raw


@dataclass(frozen=True)
class _Loaded:
    """An operation with its tensors in memory."""

    graph: ctypes.c_void_p
    weights: ctypes.c_void_p
    result: ctypes.c_void_p
    buffers: tuple[ctypes.c_void_p, ...]
    contexts: tuple[ctypes.c_void_p, ...]

    def y(self, ggml: _Ggml, op: Op) -> npt.NDArray[np.float32]:
        raw = _get(ggml, self.result, 0, ggml.number("nbytes", self.result))
        return np.frombuffer(raw, np.float32).reshape(_y_shape(op))

    def free(self, ggml: _Ggml) -> None:
        for buffer in self.buffers:
            ggml.nothing("backend_buffer_free", buffer)
        for context in self.contexts:
            ggml.nothing("free", context)


def _load(ggml: _Ggml, backend: ctypes.c_void_p, op: Op) -> _Loaded:
    weight_context, context = _context(ggml), _context(ggml)
    kind = SLOTS.get(op.type_id, op.type_id)
    ne = (op.n_in, *op.weights.shape[-2::-1])
    weights = _tensor(ggml, weight_context, kind, ne)
    ggml.pointer("set_name", weights, op.tensor.encode())
    weight_buffer = ggml.pointer("backend_alloc_ctx_tensors", weight_context, backend)
    ggml.nothing("backend_buffer_set_usage", weight_buffer, ctypes.c_int(USAGE_WEIGHTS))

    x = None if op.x is None else _tensor(ggml, context, F32_TYPE, op.x.shape[::-1])
    ids = None if op.ids is None else _tensor(ggml, context, I32_TYPE, op.ids.shape[::-1])
    result = ggml.pointer(op.name, context, weights, *(t for t in (x, ids) if t is not None))
    graph = ggml.pointer("new_graph", context)
    ggml.nothing("build_forward_expand", graph, result)
    buffer = ggml.pointer("backend_alloc_ctx_tensors", context, backend)

    _set(ggml, weights, op.weights)
    if x is not None and op.x is not None:
        _set(ggml, x, op.x)
    if ids is not None and op.ids is not None:
        _set(ggml, ids, op.ids)
    return _Loaded(graph, weights, result, (buffer, weight_buffer), (context, weight_context))


def _run(ggml: _Ggml, backend: ctypes.c_void_p, loaded: _Loaded) -> int:
    """What ggml_backend_graph_compute returns."""
    return int(ggml._call(ctypes.c_int, "backend_graph_compute", (backend, loaded.graph)))


def _compute(ggml: _Ggml, device: ctypes.c_void_p, backend: ctypes.c_void_p, op: Op) -> Result:
    loaded = _load(ggml, backend, op)
    supported = ggml.truth("backend_dev_supports_op", device, loaded.result)
    status = _run(ggml, backend, loaded)
    if status != 0:
        raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
    third = op.weights.nbytes // 3
    answer = Result(
        loaded.y(ggml, op),
        _get(ggml, loaded.weights, 0, op.weights.nbytes),
        _get(ggml, loaded.weights, third, third),
        supported,
    )
    loaded.free(ggml)
    return answer


def run_short_of_memory(op: Op, device_type: int) -> list[tuple[int, bytes]]:
    """The status and the result of op with one thread; with two, when there is next to no memory left; and
    with two when there is memory again. It must be called through in_new_process, with every large piece of
    memory asked of the system (MALLOC_MMAP_THRESHOLD_, MALLOC_ARENA_MAX=1)."""
    ggml = _Ggml()
    backend, set_n_threads = _backend(ggml, _device(ggml, device_type))
    loaded = _load(ggml, backend, op)
    # Starts the host's second thread, whose stack takes memory too, and gives our backend no other work.
    other, set_n_threads_of_other = _backend(ggml, _device(ggml, device_type))
    set_n_threads_of_other(other, 2)
    x = None if op.x is None else op.x[:1]
    ids = None if op.ids is None else op.ids[:1]
    small = Op(op.name, op.type_id, op.n_in, op.weights, x, ids)
    if _run(ggml, other, _load(ggml, other, small)) != 0:
        raise RuntimeError("the host cannot compute with two threads")

    found = []
    for n_threads, spare in ((1, None), (2, 1 << 20), (2, None)):
        set_n_threads(backend, n_threads)
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard if spare is None else size + spare, hard))
        status = _run(ggml, backend, loaded)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        found.append((status, loaded.y(ggml, op).tobytes()))
    return found


def _y_shape(op: Op) -> tuple[int, ...]:
    n_out = op.weights.shape[-2]
    if op.name == "get_rows":
        assert op.ids is not None
        return (*op.ids.shape, op.n_in)
    if op.name == "mul_mat_id":
        assert op.ids is not None
        return (*op.ids.shape, n_out)
    assert op.x is not None
    return (*op.x.shape[:-1], n_out)
