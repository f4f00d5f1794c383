"""Matrices in tiles, the machine's bounds, products without a host; and the tables of bench_peers.py.

Nothing here depends on how fast anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import bench_peers
import benchmarking
import make_synthetic as synthetic
import roofline
from ggml_tern import _core

ISAS = _core.available_isas()


TINY = synthetic.Shape(width=256, ffn=768, layers=2, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)


def random_rows(rng: np.random.Generator, type_id: int, n_out: int, n_in: int) -> Any:
    return _core.ternarize(type_id, rng.standard_normal((n_out, n_in)).astype(np.float32))[0]


# ---- ggml_tern._core ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_id", _core.TERNARY_TYPES, ids=_core.type_name)
def test_products_of_a_packed_matrix(rng: np.random.Generator, type_id: int, isa: str) -> None:
    """Those of matmul, bit for bit, again and again, with a rotation and without."""
    for n_out in (1, 8, 37):
        n_in = _core.block_size(type_id) * 2 * int(rng.integers(1, 5))
        rows = random_rows(rng, type_id, n_out, n_in)
        matrix = _core.TiledMatrix(type_id, rows)
        assert (matrix.n_in, matrix.n_out) == (n_in, n_out)
        signs = rng.choice(np.array([-1, 1], np.int8), n_in)
        for n_cols, rotation in ((1, None), (7, _core.Rotation(n_in, 64, signs)), (19, None)):
            x = rng.standard_normal((n_cols, n_in)).astype(np.float32)
            expected = _core.matmul(type_id, rows, x, isa, 1, rotation)
            assert matrix.matmul(x, isa, 2, rotation).tobytes() == expected.tobytes()


def test_bytes_of_a_packed_matrix(rng: np.random.Generator) -> None:
    """What has to be there, and little more: 2 bits a weight, a scale a group, rows up to the next tile."""
    for type_id in (_core.TYPE_PQ2_0, _core.TYPE_Q2_0):
        n_out, n_in = int(rng.integers(1, 100)), 128 * int(rng.integers(1, 20))
        least = n_out * n_in / _core.block_size(type_id) * _core.type_size(type_id)
        n_bytes = _core.TiledMatrix(type_id, random_rows(rng, type_id, n_out, n_in)).n_bytes
        assert least <= n_bytes <= least * (n_out + 16) / n_out + 64 * (n_out + 16)


def test_a_packed_matrix_keeps_no_hold_of_the_rows(rng: np.random.Generator) -> None:
    rows = random_rows(rng, _core.TYPE_PQ2_0, 20, 256)
    matrix = _core.TiledMatrix(_core.TYPE_PQ2_0, rows)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    expected = _core.matmul(_core.TYPE_PQ2_0, rows, x)
    rows[:] = 0
    assert matrix.matmul(x).tobytes() == expected.tobytes()


@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_bounds_are_measured(n_threads: int) -> None:
    """With more threads than processors too, and for every instruction set."""
    assert 1e6 < _core.read_bandwidth(n_threads, n_bytes=3 << 20, seconds=0.01) < 1e15
    for isa in ISAS:
        assert 1e6 < _core.multiply_add_peak(n_threads, isa, seconds=0.01) < 1e15


@pytest.mark.parametrize("isa", [*ISAS, None])
def test_products_are_timed(rng: np.random.Generator, isa: str | None) -> None:
    shapes = ((128, 9), (512, 300), (256, 1))
    matrices = [
        _core.TiledMatrix(_core.TYPE_PQ2_0, random_rows(rng, _core.TYPE_PQ2_0, n_out, n_in))
        for n_in, n_out in shapes
    ]
    for n_cols in (1, 13):
        times = _core.time_products(matrices, n_cols, n_threads=2, repeats=4, isa=isa)
        assert len(times) == 4
        assert all(prepare > 0 and multiply > 0 for prepare, multiply in times)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: _core.read_bandwidth(n_bytes=0), "n_bytes must be positive"),
        (lambda m: _core.read_bandwidth(seconds=-1), "seconds must be positive"),
        (lambda m: _core.multiply_add_peak(seconds=float("nan")), "seconds must be positive"),
        (lambda m: _core.multiply_add_peak(isa="z80"), "z80"),
        (lambda m: _core.time_products([m], 0), "n_cols must be positive"),
        (lambda m: _core.time_products([m], 1, repeats=0), "repeats must be positive"),
        (lambda m: _core.time_products([], 1), "no matrices"),
        (lambda m: _core.time_products([m, None], 1), "None"),  # type: ignore[list-item]
        (lambda m: m.matmul(np.zeros((1, 64), np.float32)), "n_in = 128"),
        (lambda m: m.matmul(np.zeros((1, 128))), "float32"),
        (lambda m: _core.TiledMatrix(_core.TYPE_F16, np.zeros((1, 34), np.uint8)), "not ternary"),
        (lambda m: _core.TiledMatrix(_core.TYPE_PQ2_0, np.zeros((1, 33), np.uint8)), "33 bytes"),
        (lambda m: _core.TiledMatrix(_core.TYPE_PQ2_0, np.zeros(34, np.uint8)), "2 dimensions"),
    ],
)
def test_wrong_arguments(call: Any, error: str) -> None:
    matrix = _core.TiledMatrix(_core.TYPE_PQ2_0, np.zeros((1, 34), np.uint8))
    with pytest.raises((ValueError, TypeError), match=error):
        call(matrix)


# ---- benchmarks/roofline.py ----


def test_what_a_model_asks_of_the_machine(tmp_path: Path) -> None:
    path = synthetic.write_synthetic(tmp_path / "tiny.gguf", "pq2_0", TINY)
    model = roofline.read_model(path)
    layer = (256 + 128 + 128) * 256 + 256 * 256 + 3 * 768 * 256
    assert model.prefill_multiply_adds == 2 * layer
    # Embedding and head are one table, which decode multiplies with.
    assert [matrix.n_out for matrix in model.matrices].count(1024) == 1
    assert sum(matrix.n_in * matrix.n_out for matrix in model.matrices) == 2 * layer + 1024 * 256
    assert model.weight_bytes >= (2 * layer + 1024 * 256) * 34 / 128
    # 2 layers of 2 heads with 64 elements in key and value.
    assert model.kv_bytes(100, "f16") == 100 * 2 * 2 * 128 * 2
    assert model.kv_bytes(100, "q4_0") == 100 * 2 * 2 * 128 * 18 / 32


def test_hybrid_models_have_a_head_and_few_caches(tmp_path: Path) -> None:
    shape = synthetic.HybridShape(
        width=256, ffn=768, layers=4, heads=4, kv_heads=2, head_dim=64, rope_sections=(3, 3, 2, 0),
        key_heads=2, value_heads=6, state=64, vocabulary=2048,
    )  # fmt: skip
    model = roofline.read_model(synthetic.write_synthetic(tmp_path / "tiny.gguf", "pq2_0", shape))
    assert [matrix.n_out for matrix in model.matrices].count(2048) == 1  # the embedding is only looked up
    assert model.kv_bytes(1, "f16") == 2 * 128 * 2


def test_share_of_a_bound() -> None:
    rows = [roofline.Row("a", 2e6, [400.0, 100.0, 500.0]), roofline.Row("not measured", 1e6)]
    table = roofline.share_table(rows, [1e9, 3e9, 1.6e9], "GB/s", "MB a token")
    assert table.splitlines()[0] == "|  | tokens/s | range | MB a token | GB/s | share |"
    assert table.splitlines()[2:] == ["| a | 400.0 | 100.0 to 500.0 | 2.0 | 0.8 | 50% |"]
    assert roofline.bound_text([1e9, 3e9, 1.6e9], "GB/s") == "1.6 GB/s (1.0 to 3.0)"


# ---- benchmarks/bench_peers.py ----


def test_table_of_a_phase() -> None:
    samples = {"stock": [50.0, 40.0, 60.0], "ours": [100.0, 90.0], "peer": [25.0]}
    lines = bench_peers.phase_table(samples, ["stock", "not measured", "peer"]).splitlines()
    assert lines[0] == "|  | t/s | range | against stock | against peer | samples |"
    assert lines[2:] == [
        "| stock | 50.0 | 40.0 to 60.0 | 1.00 | 2.00 | 3 |",
        "| ours | 95.0 | 90.0 to 100.0 | 1.90 | 3.80 | 2 |",
        "| peer | 25.0 | 25.0 to 25.0 | 0.50 | 1.00 | 1 |",
    ]


def test_all_contenders_in_turn() -> None:
    fast, slow = (
        bench_peers.Contender(name, benchmarking.STOCK, Path(f"{name}.gguf"), name == "slow")
        for name in ("fast", "slow")
    )
    benches = [benchmarking.LlamaBench(512, 64, 2, kv=kv) for kv in ("q8_0", "q4_0")]
    rounds = bench_peers.schedule([fast, slow], benches, rounds=2, slow_rounds=1)
    assert [[(call.contender.name, call.bench.kv) for call in calls] for calls in rounds] == [
        [("fast", "q8_0"), ("slow", "q8_0"), ("fast", "q4_0"), ("slow", "q4_0")],
        [("fast", "q8_0"), ("fast", "q4_0")],
    ]
    # A slow one does less, and counts as the others do.
    first, second = rounds[0][:2]
    assert second.bench.n_prompt < first.bench.n_prompt
    assert second.phases == first.phases == ("pp512, q8_0 KV", "tg64, q8_0 KV")
    assert second.estimate(4e8) > 0


def test_benches_at_a_depth() -> None:
    common = benchmarking.LlamaBench(512, 64, 2, flash_attention=True)
    fill, after = bench_peers.own_benches(common, 8192, ["q8_0"])
    assert " ".join(fill.arguments) == "-p 8192 -n 0 -t 2 -r 1 -ctk q8_0 -ctv q8_0 -fa 1 --no-warmup"
    assert " ".join(after.arguments) == "-p 512 -n 64 -t 2 -r 3 -d 8192 -ctk q8_0 -ctv q8_0 -fa 1"
    assert bench_peers.phases(after)[1] == "tg64 after 8192 tokens, q8_0 KV"
    assert bench_peers.own_benches(common, 0, [""]) == [common]


def test_peers_are_named(tmp_path: Path) -> None:
    program, other = tmp_path / "llama-bench", tmp_path / "c.gguf"
    program.touch(0o755)
    other.touch()
    peer = bench_peers.parse_peer(f"ik={program}:{other}", "qwen3-0.6b")
    assert (peer.name, peer.engine.program, peer.model) == ("ik", program, other)
    assert not peer.engine.plugin
    for text, error in (
        ("ik", "NAME=LLAMA_BENCH"),
        (f"={program}", "NAME=LLAMA_BENCH"),
        (f"ik={tmp_path}:{other}", "is no program"),
        (f"ik={other}:tq2_0", "is no program"),
        (f"ik={program}:{tmp_path / 'none.gguf'}", "neither a file nor one of the types"),
    ):
        with pytest.raises(click.BadParameter, match=error):
            bench_peers.parse_peer(text, "qwen3-0.6b")


def test_rounds_of_llama_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, with the plug-in and without; a peer that fails is asked once, and costs the others
    nothing."""
    models = {t: synthetic.write_synthetic(tmp_path / f"{t}.gguf", t, TINY) for t in ("tq2_0", "pq2_0")}
    contenders = [
        bench_peers.Contender("stock", benchmarking.STOCK, models["tq2_0"]),
        bench_peers.Contender("plug-in", benchmarking.PLUGIN, models["pq2_0"]),
        bench_peers.Contender("false", benchmarking.Engine(program=Path("/bin/false")), models["tq2_0"]),
        bench_peers.Contender("echo", benchmarking.Engine(program=Path("/bin/echo")), models["tq2_0"]),
        # Without the plug-in the type is unknown.
        bench_peers.Contender("stock PQ2_0", benchmarking.STOCK, models["pq2_0"]),
    ]
    bench = benchmarking.LlamaBench(6, 4, 2, depth=16, kv="q8_0", flash_attention=True)
    results = bench_peers.Results()
    rounds = bench_peers.schedule(contenders, [bench], 2, 0)
    own = [c for c in contenders if c.name == "plug-in"]
    monkeypatch.setattr(roofline, "SHAPES", ((128, 9), (256, 64)))
    measured = bench_peers.Roofline(own, 2)
    assert bench_peers.run(rounds, 1e6, results, Console(quiet=True), measured.measure)

    prompt, generated = "pp6 after 16 tokens, q8_0 KV", "tg4 after 16 tokens, q8_0 KV"
    assert {phase: list(found) for phase, found in results.samples.items()} == {
        prompt: ["stock", "plug-in"],
        generated: ["stock", "plug-in"],
    }
    assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in results.samples[generated].values())
    assert [key.split(",")[0] for key in results.failures] == ["false", "echo", "stock PQ2_0"]
    false, echo, stock = results.failures.values()
    assert (false, echo) == ("exit code 1, and not a word", "what it wrote is not JSON")
    assert "pq2_0.gguf" in stock
    processor = results.hosts["plug-in"].processor
    assert "ggml-tern" in processor
    isa = next(name for name in _core.available_isas() if f"({name})" in processor)
    assert bench_peers.subject("roofline", "qwen3-1.7b", 0, processor) == f"roofline-qwen3-1.7b-{isa}"
    assert bench_peers.subject("peers", "qwen3-0.6b", 8192, processor) == f"peers-d8192-{isa}"
    # A host without the plug-in names no kernels.
    assert bench_peers.subject("peers", "qwen3-0.6b", 0, results.hosts["stock"].processor) == "peers"

    text = bench_peers.tables(results, ["stock"])
    assert f"## {prompt}\n\n|  | t/s | range | against stock | samples |" in text
    shares = measured.tables(results, [bench])
    for name in ("products alone, plug-in", f"{generated}, plug-in", "product alone, 256 x 64"):
        assert f"| {name} | " in shares


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kv", "q8_0,q3_0"], "'q3_0' is none of f32"),
        (["--roofline", "--peer", "ik=/bin/true"], "leave --peer and --baseline out"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_options(arguments: list[str], error: str) -> None:
    result = CliRunner().invoke(bench_peers.main, arguments)
    assert result.exit_code == 2
    assert error in result.output


def test_interrupted_rounds_keep_what_they_have(tmp_path: Path) -> None:
    model = synthetic.write_synthetic(tmp_path / "tiny.gguf", "tq2_0", TINY)
    contender = bench_peers.Contender("stock", benchmarking.STOCK, model)
    rounds = bench_peers.schedule([contender], [benchmarking.LlamaBench(4, 2, 1)], 3, 0)
    results = bench_peers.Results()
    n_rounds = 0

    def interrupt_the_second() -> None:
        nonlocal n_rounds
        n_rounds += 1
        if n_rounds == 2:
            raise KeyboardInterrupt

    assert not bench_peers.run(rounds, 1e6, results, Console(quiet=True), interrupt_the_second)
    assert len(results.samples["pp4"]["stock"]) == 1
