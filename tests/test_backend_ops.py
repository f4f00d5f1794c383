"""The plug-in's operations: ggml's own test program on the device, and our types against the reference.

`test-backend-ops` compares the device with the stock CPU backend, but knows stock types only; PQ2_0 and
PTQ1_0, and what ggml's test does not ask of the others (identical bits whatever the batch and the threads,
buffers that give their bytes back), are asked here through the same C API.
"""

from __future__ import annotations

import math
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType

import rotated_files
from ggml_tern import _core
from ggml_tern.host import stock as host
from reference import formats as ref
from reference import gguf_files, one_op
from reference.one_op import Op
from reference.random_inputs import any_blocks, assert_matches, random_activations, random_blocks

DEVICES = [pytest.param(one_op.IGPU, id="IGPU"), pytest.param(one_op.ACCEL, id="ACCEL")]
TYPES = [pytest.param(t, id=f.name) for t, f in ref.FORMATS.items()]


# ---- ggml's own test program ----


def backend_ops(*arguments: str) -> tuple[int, str]:
    """(exit code, output without colours) of `test-backend-ops test -b TERN0 ARGUMENTS`."""
    done = subprocess.run(
        [host.llama_cpp_dir() / "test-backend-ops", "test", "-b", host.DEVICE, *arguments],
        env=host.host_environment(stock=False),
        capture_output=True,
        text=True,
    )
    return done.returncode, re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def assert_passes(output: str, code: int, at_least: int) -> None:
    failed = [line for line in output.splitlines() if "FAIL" in line]
    counts = re.search(r"(\d+)/(\d+) tests passed", output)
    assert counts, output[-2000:]
    assert not failed and code == 0, "\n".join(failed[:20])
    assert counts[1] == counts[2] and int(counts[1]) >= at_least


@pytest.mark.parametrize(
    "op, params, at_least",
    [
        ("MUL_MAT", "type_a=(q2_0|tq1_0|tq2_0|f32|f16),", 300),
        ("MUL_MAT_ID", "type_a=(q2_0|tq1_0|tq2_0|f32|f16),", 100),
        ("GET_ROWS", "type=(q2_0|tq1_0|tq2_0|f32|f16),", 20),
        # Head sizes that are ours and one that is not (80); a sample, as the stock reference is slow.
        ("FLASH_ATTN_EXT", "hsk=(64|80|192),.*nb=(1|3),.*max_bias=0.0.*(f16|q8_0|q4_0|q5_1),permute", 200),
        # A quick sample of what is handed on to the stock backend; the whole list takes an hour.
        ("RMS_NORM,SILU,SWIGLU,SCALE,SET_ROWS,SOFT_MAX", "", 500),
    ],
)
def test_stock_backend_ops(op: str, params: str, at_least: int) -> None:
    code, output = backend_ops("-o", op, *(["-p", params] if params else []))
    assert_passes(output, code, at_least)


# ---- the five types, against the reference ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", TYPES)
def test_mul_mat(type_id: int, device: int, rng: np.random.Generator) -> None:
    """Odd numbers of rows and tokens, and the smallest inputs: fewer rows than a kernel handles at a time."""
    fmt = ref.FORMATS[type_id]
    ops = []
    for n_out, n_blocks, n_tokens in [(1, 1, 1), (3, 2, 5), (67, 3, 1), (130, 5, 33), (1021, 9, 3)]:
        n_in = n_blocks * max(fmt.block, 128)
        weights = random_blocks(rng, fmt, n_out, n_in)
        ops.append(Op("mul_mat", type_id, n_in, weights, random_activations(rng, n_tokens, n_in)))
    for op, result in zip(ops, one_op.in_new_process(one_op.run_all, ops, device, [2]), strict=True):
        assert result.supported
        assert op.x is not None
        assert_matches(fmt, op.weights, op.x, result.y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", TYPES)
def test_same_bits_for_any_batch_and_threads(type_id: int, device: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    n_out, n_in = 515, 1280
    weights = random_blocks(rng, fmt, n_out, n_in)
    x = random_activations(rng, 512, n_in)
    # The same tokens at other places in other batches.
    parts = [slice(0, 512), slice(0, 1), slice(5, 12), slice(64, 128), slice(300, 301), slice(12, 15)]
    ops = [Op("mul_mat", type_id, n_in, weights, np.ascontiguousarray(x[p])) for p in parts]
    results = one_op.in_new_process(one_op.run_all, ops, device, [1, 2, 3])
    whole = results[0].y
    for i, result in enumerate(results):
        part = parts[i // 3]
        assert np.array_equal(result.y.view(np.uint32), whole[part].view(np.uint32)), (part, i % 3 + 1)
    assert_matches(fmt, weights, x, whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", TYPES)
def test_buffers_give_the_bytes_back(type_id: int, device: int, rng: np.random.Generator) -> None:
    """Whatever the layout that the buffer keeps; two-bit types also with the fourth code and odd scales."""
    fmt = ref.FORMATS[type_id]
    n_in = 4 * max(fmt.block, 128)
    ops = []
    for n_out in (1, 7, 64, 201):
        weights = random_blocks(rng, fmt, n_out, n_in) if fmt.base3 else any_blocks(rng, fmt, n_out, n_in)
        ops.append(Op("mul_mat", type_id, n_in, weights, random_activations(rng, 2, n_in)))
    for op, result in zip(ops, one_op.in_new_process(one_op.run_all, ops, device, [2]), strict=True):
        data = op.weights.tobytes()
        third = len(data) // 3
        assert result.weights_read == data
        assert result.piece_read == data[third : 2 * third]


@pytest.mark.parametrize("type_id", [142, 42, 35])
def test_the_fourth_code_counts_as_plus_two(type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    n_in = 3 * max(fmt.block, 128)
    trits = rng.integers(-1, 3, (37, n_in), np.int8)
    weights = ref.pack(fmt, trits, np.full((37, n_in // fmt.block), 0.25, np.float32))
    x = random_activations(rng, 9, n_in)
    result = one_op.in_new_process(one_op.run, Op("mul_mat", type_id, n_in, weights, x), one_op.IGPU, 2)
    assert_matches(fmt, weights, x, result.y)


def test_q2_0_rows_of_an_odd_number_of_blocks(rng: np.random.Generator) -> None:
    """Rows of 64 * odd weights end in half a group of activations."""
    ops = []
    for n_blocks in (1, 3, 11):
        weights = random_blocks(rng, ref.Q2_0, 21, 64 * n_blocks)
        # Without outliers, so that int8 is close whatever the groups.
        x = rng.standard_normal((5, 64 * n_blocks)).astype(np.float32)
        ops.append(Op("mul_mat", 42, 64 * n_blocks, weights, x))
    for op, result in zip(ops, one_op.in_new_process(one_op.run_all, ops, one_op.IGPU, [2]), strict=True):
        assert op.x is not None
        # Such a row may be left to the stock kernel, which quantizes activations in groups of its own.
        want = op.x @ ref.dequantize(ref.Q2_0, op.weights).T
        assert np.linalg.norm(result.y - want) <= 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", _core.available_isas())
def test_bad_activations_stay_with_their_token(isa: str, rng: np.random.Generator) -> None:
    """An infinity or a NaN spoils its own token, visibly, and leaves the bits of the others alone."""
    weights, x = random_blocks(rng, ref.PQ2_0, 33, 512), random_activations(rng, 5, 512)
    good = _core.matmul(142, weights, x, isa=isa)
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = x.copy()
        spoiled[2, 200] = bad
        y = _core.matmul(142, weights, spoiled, isa=isa)
        assert np.array_equal(np.delete(y, 2, 0), np.delete(good, 2, 0))
        assert not np.isfinite(y[2]).any(), bad


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("type_id", TYPES)
def test_mul_mat_id(type_id: int, per_expert: bool, rng: np.random.Generator) -> None:
    """Experts that nobody picks and one that all pick; per_expert: an input of its own for each expert."""
    fmt = ref.FORMATS[type_id]
    n_experts, n_used, n_tokens, n_out, n_in = 6, 3, 19, 70, 2 * max(fmt.block, 128)
    weights = random_blocks(rng, fmt, n_experts * n_out, n_in).reshape(n_experts, n_out, -1)
    x = random_activations(rng, n_tokens, n_used if per_expert else 1, n_in)
    ids = np.stack([rng.permutation(n_experts - 2)[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    ids[:, 0] = n_experts - 1
    op = Op("mul_mat_id", type_id, n_in, weights, x, ids)
    one, two = one_op.in_new_process(one_op.run_all, [op], one_op.IGPU, [1, 2])
    assert one.supported
    assert np.array_equal(one.y.view(np.uint32), two.y.view(np.uint32))
    assert one.weights_read == weights.tobytes()
    for slot in range(n_used):
        for expert in range(n_experts):
            tokens = np.flatnonzero(ids[:, slot] == expert)
            if tokens.size:
                inputs = np.ascontiguousarray(x[tokens, slot if per_expert else 0])
                assert_matches(fmt, weights[expert], inputs, one.y[tokens, slot])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", one_op.TREATED_SLOTS)
@pytest.mark.parametrize("name", ["mul_mat", "get_rows"])
def test_treated_matrices_of_no_file(name: str, type_id: int, device: int, rng: np.random.Generator) -> None:
    """What is to be done with them is not known, so nothing is."""
    weights = random_blocks(rng, ref.FORMATS[type_id], 8, 256)
    x = None if name == "get_rows" else random_activations(rng, 2, 256)
    ids = np.zeros(2, np.int32) if name == "get_rows" else None
    for kind, error in ((type_id, None), (one_op.TREATED_SLOTS[type_id], "graph_compute returned -1")):
        op = Op(name, kind, 256, weights, x, ids, "blk.0.attn_q.weight")
        with pytest.raises(RuntimeError, match=error) if error else nullcontext():
            one_op.in_new_process(one_op.run, op, device, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", one_op.TREATED_SLOTS)
def test_products_through_squared_relu(
    type_id: int, device: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Bit for bit what is made of the plain product, once for each output; rows are as in the plain type."""
    fmt, slot = ref.FORMATS[type_id], one_op.TREATED_SLOTS[type_id]
    n_experts, n_out, n_in = 3, 515, 640
    weights = random_blocks(rng, fmt, n_experts * n_out, n_in).reshape(n_experts, n_out, -1)
    x = rng.standard_normal((70, n_in)).astype(np.float32)
    ids = rng.integers(0, n_experts, (70, 1)).astype(np.int32)
    rows = rng.integers(0, n_out, 20).astype(np.int32)
    gate, gates = "blk.0.ffn_gate.weight", "blk.1.ffn_gate.weight"
    file = gguf_files.write(
        tmp_path / "gates.gguf",
        {"general.architecture": "bitnet", "bitnet.hidden_activation": "relu2"},
        [
            gguf_files.Tensor(gate, type_id, (n_out, n_in), weights[0].tobytes()),
            gguf_files.Tensor(gates, type_id, (n_experts, n_out, n_in), weights.tobytes()),
        ],
    )
    ops = [
        Op("mul_mat", slot, n_in, weights[0], x, tensor=gate),
        Op("mul_mat", slot, n_in, weights[0], x[5:6].copy(), tensor=gate),
        Op("mul_mat_id", slot, n_in, weights, x[:, None], ids, tensor=gates),
        Op("get_rows", slot, n_in, weights[0], ids=rows, tensor=gate),
    ]
    results = one_op.in_new_process(one_op.run_all, ops, device, [1, 2, 3], file)
    assert all(result.supported for result in results)
    expected = [
        _core.squared_relu_for_silu(_core.matmul(type_id, np.ascontiguousarray(matrix), x))
        for matrix in weights
    ]
    assert (expected[0] == 0).any() and (expected[0] > 1).any()
    for result in results[0:3]:
        assert result.y.tobytes() == expected[0].tobytes()
        assert result.weights_read == weights[0].tobytes()
    for result in results[3:6]:
        assert result.y.tobytes() == expected[0][5:6].tobytes()
    for result in results[6:9]:
        chosen = [expected[expert][token] for token, expert in enumerate(ids[:, 0])]
        assert result.y[:, 0].tobytes() == np.stack(chosen).tobytes()
    for result in results[9:12]:
        assert np.array_equal(result.y, ref.dequantize(fmt, weights[0])[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", one_op.TREATED_SLOTS)
@pytest.mark.parametrize("block", [128, 512])
def test_rotated_operations(
    block: int, type_id: int, device: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """Bit for bit the products that _core gives, whatever the number of threads; rows are the plain ones."""
    fmt, slot = ref.FORMATS[type_id], one_op.TREATED_SLOTS[type_id]
    n_experts, n_out, n_in, v_heads = 3, 37, 1536, (3, 6)
    signs = rotated_files.random_signs(rng, n_in)
    shapes = {
        "blk.0.ssm_out.weight": (n_out, n_in),
        "blk.0.ffn_up_exps.weight": (n_experts, n_out, n_in),
        "token_embd.weight": (n_out, n_in),
    }
    weights = {
        name: random_blocks(rng, fmt, math.prod(shape[:-1]), n_in).reshape(*shape[:-1], -1)
        for name, shape in shapes.items()
    }
    out, experts, embedding = weights
    contract = {
        "version": rotated_files.u32(2),
        "block_size": rotated_files.u32(block),
        "transform": rotated_files.text(rotated_files.TRANSFORM),
        "axis": rotated_files.text(rotated_files.AXIS),
        "sign_mode": rotated_files.text("explicit"),
        "sign_widths": rotated_files.array(GGUFValueType.INT32, [n_in]),
        "sign_values": rotated_files.array(GGUFValueType.INT8, signs.tolist()),
        "weight_names": rotated_files.texts([out, experts]),
        "inverse_weight_names": rotated_files.texts([embedding]),
        "tied_output": rotated_files.boolean(True),
        "gdn_v_grouped": rotated_files.boolean(True),
    }
    file = rotated_files.write(
        tmp_path / "rotated.gguf",
        {
            "general.architecture": rotated_files.text("qwen35moe"),
            "qwen35moe.ssm.group_count": rotated_files.u32(v_heads[0]),
            "qwen35moe.ssm.time_step_rank": rotated_files.u32(v_heads[1]),
            **{rotated_files.PREFIX + key: value for key, value in contract.items()},
        },
        [gguf_files.Tensor(name, type_id, shape, weights[name].tobytes()) for name, shape in shapes.items()],
    )
    x = rng.standard_normal((5, n_in)).astype(np.float32)
    ids = rng.integers(0, n_experts, (5, 2)).astype(np.int32)
    rows = rng.integers(0, n_out, 20).astype(np.int32)
    ops = [
        Op("mul_mat", slot, n_in, weights[out], x, tensor=out),
        Op("mul_mat_id", slot, n_in, weights[experts], x[:, None], ids, tensor=experts),
        Op("get_rows", slot, n_in, weights[embedding], ids=rows, tensor=embedding),
    ]
    results = one_op.in_new_process(one_op.run_all, ops, device, [1, 2, 3], file)
    assert all(result.supported for result in results)
    plain, permuted = _core.Rotation(n_in, block, signs), _core.Rotation(n_in, block, signs, v_heads)
    for result in results[0:3]:
        assert result.y.tobytes() == _core.matmul(type_id, weights[out], x, rotation=permuted).tobytes()
        assert result.weights_read == weights[out].tobytes()
    every = [_core.matmul(type_id, matrix, x, rotation=plain) for matrix in weights[experts]]
    for result in results[3:6]:
        assert all(
            result.y[token, used].tobytes() == every[ids[token, used]][token].tobytes()
            for token, used in np.ndindex(ids.shape)
        )
    for result in results[6:9]:
        want = plain.unrotate(np.ascontiguousarray(ref.dequantize(fmt, weights[embedding])[rows]))
        assert result.y.tobytes() == want.tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type_id", TYPES)
def test_get_rows(type_id: int, device: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    n_in = 3 * max(fmt.block, 128)
    weights = random_blocks(rng, fmt, 101, n_in)
    ids = np.concatenate([[0, 100, 100], rng.integers(0, 101, 40)]).astype(np.int32)
    op = Op("get_rows", type_id, n_in, weights, ids=ids)
    for result in one_op.in_new_process(one_op.run_all, [op], device, [1, 2]):
        assert result.supported
        assert np.array_equal(result.y, ref.dequantize(fmt, weights)[ids])


@pytest.mark.parametrize("device", DEVICES)
def test_devices_report_the_memory_there_is(device: int) -> None:
    free, total = one_op.in_new_process(one_op.device_memory, device)
    meminfo = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
    assert total == pytest.approx(int(meminfo["MemTotal"]) * 1024, rel=0.01)
    # What is free changes while the test runs.
    assert free == pytest.approx(int(meminfo["MemAvailable"]) * 1024, abs=0.25 * total)
    assert 0 < free < total


@pytest.mark.parametrize("name", ["mul_mat", "mul_mat_id"])
def test_memory_that_a_thread_lacks_is_a_status(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What threads work in is reserved before they begin; where there is none, the graph fails, and the
    process lives on."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    n_in, n_tokens = 1 << 20, 24
    fmt = ref.FORMATS[_core.TYPE_PQ2_0]
    weights = random_blocks(rng, fmt, 8, n_in)
    x = np.ones((n_tokens, n_in), np.float32)
    if name == "mul_mat":
        op = Op(name, _core.TYPE_PQ2_0, n_in, weights, x)
    else:
        ids = np.zeros((n_tokens, 1), np.int32)
        op = Op(name, _core.TYPE_PQ2_0, n_in, weights[None], x[:, None], ids)
    one, short, two = one_op.in_new_process(one_op.run_short_of_memory, op, one_op.IGPU)
    assert one[0] == two[0] == 0
    assert short[0] == -2  # GGML_STATUS_ALLOC_FAILED
    assert one[1] == two[1]
