"""tern plan: its sums against sums by hand and what llama-server allocates; its words and exit codes."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

import check_plan
import make_presets
from ggml_tern import _core
from ggml_tern.cli.tern import cli
from ggml_tern.errors import TernError
from ggml_tern.host import stock as host
from ggml_tern.plan import tables
from ggml_tern.plan.arithmetic import (
    KV_TYPES,
    attention_scratch,
    decode_bytes,
    largest_context,
    plan,
    trade_offs,
)
from ggml_tern.plan.cards import divide
from ggml_tern.plan.header import read_model, tiled_bytes
from model_headers import (
    F32,
    PQ2_0,
    PTQ1_0,
    Q2_0,
    Q8_0,
    Header,
    decoder_header,
    hybrid_header,
    released_27b,
)
from reference import ROOT
from reference import gguf_files as files

PRESETS = ROOT / "models" / "presets"
TERN = str(Path(sys.executable).parent / "tern")
MIB = 1 << 20


# ------------------------------------------------------------------------------------------------------------
# Arithmetic
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_id", [PQ2_0, PTQ1_0])
def test_the_released_27b(tmp_path: Path, type_id: int) -> None:
    """7.2 GB of weights, 64 KiB of KV cache a token, and 48 states; whichever type the file has."""
    header = released_27b(type_id)
    assert len(header.tensors) == 851
    path = header.write(tmp_path / "27b.gguf")
    assert path.stat().st_blocks * 512 < 64 * MIB  # a hole: no test writes 7 GB
    model = read_model(path)
    attention = 5120 * (12288 + 2 * 1024) + 6144 * 5120
    delta_net = 5120 * (10240 + 6144) + 6144 * 5120
    n_ternary = 2 * 248320 * 5120 + 64 * 3 * 17408 * 5120 + 16 * attention + 48 * delta_net
    assert model.tiles == n_ternary * 17 // 64 + 402 * 64
    n_float = 5120 + 64 * 2 * 5120 + 16 * 2 * 256 + 48 * (4 * 10240 + 128 + 2 * 48)
    assert model.mapped == 4 * n_float + 2 * 48 * 2 * 48 * 5120
    assert model.tiles + model.mapped == pytest.approx(7.2e9, rel=2e-3)

    planned = plan(model, 8192, parallel=1)
    assert planned.kv_cache == 64 * 1024 * 8192
    assert planned.window_cache == 0
    assert planned.state == 48 * 4 * (3 * (6144 + 2 * 16 * 128) + 128 * 6144)
    assert plan(model, 8192).state == 4 * planned.state
    assert plan(model, 8192, "q8_0", 1).kv_cache == 64 * 1024 * 8192 * 17 // 32
    assert plan(model, 8192, "q5_0", 1).kv_cache == 64 * 1024 * 8192 * 11 // 32
    assert plan(model, 8192, "q4_0", 1).kv_cache == 64 * 1024 * 8192 * 9 // 32


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "bitnet"])
def test_full_attention(tmp_path: Path, architecture: str) -> None:
    model = read_model(decoder_header(architecture, 3).write(tmp_path / "m.gguf"))
    planned = plan(model, 1000, parallel=1)
    # 1000 tokens are rounded up to 1024, of 3 layers with keys and values of 2 heads of 64 in two bytes each.
    assert planned.context == 1024
    assert planned.kv_cache == 1024 * 3 * (2 * 64 + 2 * 64) * 2
    assert (planned.window_cache, planned.state, planned.parallel) == (0, 0, 1)
    # Tiles of 8 rows: 2 bits a weight, fp16 scales for 128, filled up to 64 bytes; 300 rows make 38 tiles.
    per_256 = 8 * 256 // 4 + 2 * 8 * 2 + 32
    per_1024 = 8 * 1024 // 4 + 8 * 8 * 2
    rows_of_256 = 2 * 256 + 2 * 128 + 2 * 1024
    layer = rows_of_256 // 8 * per_256 + 256 // 8 * per_1024 + 7 * 64
    assert model.tiles == 38 * per_256 + 64 + 3 * layer
    assert planned.total == sum(
        (model.tiles, model.mapped, planned.kv_cache, planned.compute, planned.process)
    )


def test_heads_by_default_and_by_layer(tmp_path: Path) -> None:
    """Without lengths a head is the width by the heads; without KV heads there are as many as heads."""
    plain = decoder_header("llama", 2)
    path = plain.write(
        tmp_path / "m.gguf",
        **{"attention.key_length": None, "attention.value_length": None, "attention.head_count_kv": None},
    )
    assert plan(read_model(path), 256, parallel=1).kv_cache == 256 * 2 * (256 + 256) * 2
    path = plain.write(tmp_path / "m.gguf", **{"attention.head_count_kv": [1, 4]})
    assert plan(read_model(path), 256, parallel=1).kv_cache == 256 * (1 + 4) * (64 + 64) * 2


def test_conversations_share_or_split_the_context(tmp_path: Path) -> None:
    model = read_model(decoder_header("qwen3").write(tmp_path / "m.gguf"))
    assert plan(model, 2000).context == 2048
    assert plan(model, 2000).kv_cache == plan(model, 2048, parallel=1).kv_cache
    # 2048 / 3 = 682, which each of the three has rounded up to 768.
    assert plan(model, 2000, parallel=3).context == 3 * 768


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [0, 1, 2, 3, 4, 6]),  # every sixth layer attends to all, unless the file says otherwise
        (2, [0, 2, 4, 6]),
        ([True, False, True, True, True, True, True], [0, 2, 3, 4, 5, 6]),
    ],
)
def test_sliding_windows(tmp_path: Path, pattern: Any, windows: list[int]) -> None:
    header = decoder_header("gemma3", 7, **{"attention.sliding_window": 512})
    path = header.write(tmp_path / "m.gguf", **{"attention.sliding_window_pattern": pattern})
    model = read_model(path)
    assert [n for n, layer in enumerate(model.attention) if layer.window == 512] == windows
    a_token = (128 + 128) * 2
    alone, shared = plan(model, 8192, parallel=1), plan(model, 8192)
    assert alone.kv_cache == shared.kv_cache == (7 - len(windows)) * 8192 * a_token
    # A window, and the tokens of one pass, rounded up; of one conversation, and of four.
    assert alone.window_cache == len(windows) * 1024 * a_token
    assert shared.window_cache == len(windows) * 2560 * a_token
    assert plan(model, 8192, parallel=2).window_cache == 2 * alone.window_cache
    assert plan(model, 256, parallel=1).window_cache == len(windows) * 256 * a_token


def test_no_window_is_full_attention(tmp_path: Path) -> None:
    model = read_model(decoder_header("gemma3", 7).write(tmp_path / "m.gguf"))
    assert {layer.window for layer in model.attention} == {None}


def small_hybrid(**keys: Any) -> Header:
    return hybrid_header(4, PQ2_0, 256, 512, (4, 2, 64), (2, 6, 64), **keys)


def test_recurrent_layers(tmp_path: Path) -> None:
    """One by one where the file lists them; without the head that predicts a second token."""
    plain = read_model(small_hybrid().write(tmp_path / "plain.gguf"))
    assert (len(plain.recurrent), len(plain.attention)) == (3, 1)
    default = read_model(small_hybrid(full_attention_interval=None).write(tmp_path / "default.gguf"))
    assert len(default.recurrent) == 3
    listed = {"attention.recurrent_layers": [True, False, False, True], "full_attention_interval": None}
    assert len(read_model(small_hybrid(**listed).write(tmp_path / "listed.gguf")).recurrent) == 2

    header = small_hybrid(nextn_predict_layers=1, block_count=5)
    header.add(PQ2_0, blk__4__attn_q=(512, 256), blk__4__nextn__eh_proj=(256, 512))
    with_head = read_model(header.write(tmp_path / "mtp.gguf"))
    assert plan(with_head, 1024) == plan(plain, 1024)


def test_experts_and_other_types(tmp_path: Path) -> None:
    """A stack of experts has a header for each; what is not ternary is mapped as it is."""
    header = decoder_header("qwen3moe", 1, expert_count=5, expert_used_count=2)
    before = read_model(header.write(tmp_path / "before.gguf"))
    header.add(PQ2_0, blk__0__ffn_up_exps=(5, 24, 256))
    header.add(Q2_0, blk__0__ffn_gate_exps=(5, 24, 64))
    header.add(Q8_0, output=(300, 256))
    after = read_model(header.write(tmp_path / "after.gguf"))
    per_256, per_64 = 576, 8 * 64 // 4 + 8 * 2 + 48
    assert after.tiles - before.tiles == 5 * (64 + 3 * per_256) + 5 * (64 + 3 * per_64)
    assert after.mapped - before.mapped == 300 * 256 // 32 * 34


def test_tiles_of_odd_shapes(tmp_path: Path, rng: np.random.Generator) -> None:
    n_out, groups = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    header = decoder_header("llama", 1)
    header.add(PTQ1_0, blk__0__odd=(n_out, groups * 128))
    from ggml_tern.gguf.reader import GGUFSource

    tensor = GGUFSource(header.write(tmp_path / "m.gguf")).tensors["blk.0.odd.weight"]
    tile = -(-(8 * groups * 128 // 4 + 8 * groups * 2) // 64) * 64
    assert tiled_bytes(tensor) == 64 + -(-n_out // 8) * tile


def test_largest_context(tmp_path: Path, rng: np.random.Generator) -> None:
    """The step before the first that does not fit."""
    model = read_model(small_hybrid().write(tmp_path / "m.gguf"))
    for parallel in (None, 1, 3):
        for kv_type in KV_TYPES:
            least = plan(model, 256, kv_type, parallel).total
            memory = least + int(rng.integers(1, 200 * MIB))
            found = largest_context(model, memory, kv_type, parallel)
            step = 256 * (parallel or 1)
            assert found > 0 and found % step == 0
            assert plan(model, found, kv_type, parallel).total <= memory
            assert plan(model, found + step, kv_type, parallel).total > memory or found + step > 262144
            assert largest_context(model, least - 1, kv_type, 1 if parallel == 1 else None) in (0, 256)
    assert largest_context(model, 10**12) == 262144
    assert largest_context(model, 1) == 0


def test_heads_that_do_not_divide_into_blocks(tmp_path: Path) -> None:
    path = decoder_header("llama").write(
        tmp_path / "m.gguf", **{"attention.key_length": 40, "attention.value_length": 40}
    )
    model = read_model(path)
    with pytest.raises(TernError, match=r"m\.gguf: its heads .* q8_0, of 32; use --kv f16"):
        plan(model, 256, "q8_0")
    assert list(trade_offs(model, 10**9)["parallel_1"]) == ["f16"]


# ------------------------------------------------------------------------------------------------------------
# What llama-server says
# ------------------------------------------------------------------------------------------------------------


def buffers_of_llama_server(
    model: Path, *arguments: str, layout: str = "fast"
) -> dict[str, dict[str, float]]:
    """MiB of every kind of buffer, by what holds it, in the log of a stock llama-server with the plug-in."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(host.llama_cpp_dir() / "llama-server"), "-m", str(model), "--port", port]
    process = subprocess.Popen(
        [*command, "--verbose", "--no-warmup", "--fit", "off", "--threads", "1", *arguments],
        env=host.host_environment(stock=False) | {"TERN_LAYOUT": layout},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    found: dict[str, dict[str, float]] = {}
    log = []
    with process.stdout as lines:
        for line in lines:
            log.append(line)
            match = re.search(r": +(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB", line)
            if match is not None:
                kind = "tiles" if match[1] in ("TERN_TILES", "TERN_DENSE_TILES") else match[2]
                holders = found.setdefault(kind, {})
                holders[match[1]] = holders.get(match[1], 0) + float(match[3])
            if "listening on" in line:
                process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, "".join(log[-20:])
    return found


@pytest.mark.parametrize(
    ("header", "arguments", "context", "kv_type", "parallel"),
    [
        (decoder_header("qwen3"), ["-c", "2000"], 2000, "f16", None),
        (decoder_header("llama"), ["-c", "4096", "-np", "3"], 4096, "f16", 3),
        (
            decoder_header("gemma3", 7, **{"attention.sliding_window": 128}),
            ["-c", "3000"],
            3000,
            "f16",
            None,
        ),
        (small_hybrid(), ["-c", "4096", "-np", "2", "-ctk", "q8_0", "-ctv", "q8_0"], 4096, "q8_0", 2),
        (small_hybrid(), ["-c", "8192"], 8192, "f16", None),
    ],
    ids=["qwen3", "llama in 3 parts", "gemma3", "qwen35 q8_0", "qwen35"],
)
def test_llama_server_allocates_what_is_planned(
    tmp_path: Path, header: Header, arguments: list[str], context: int, kv_type: str, parallel: int | None
) -> None:
    path = header.write(tmp_path / "m.gguf")
    model = read_model(path)
    planned = plan(model, context, kv_type, parallel)
    buffers = buffers_of_llama_server(path, *arguments)
    found = {kind: sum(holders.values()) for kind, holders in buffers.items()}
    # llama.cpp says them in hundredths of a MiB.
    assert found["tiles"] == pytest.approx(planned.tiles / MIB, abs=0.006)
    assert found["KV"] == pytest.approx((planned.kv_cache + planned.window_cache) / MIB, abs=0.011)
    assert found.get("RS", 0) == pytest.approx(planned.state / MIB, abs=0.006)
    # The estimate, without the plug-in's own parts of it.
    cells = planned.context // (parallel or 1)
    own = 512 * model.quantized + attention_scratch(model, cells)
    estimate = (planned.compute - own) / MIB
    assert found["compute"] + found["output"] == pytest.approx(estimate, rel=0.2)


def test_dense_tiles(tmp_path: Path) -> None:
    """Of base-3 types alone: 104 words of 16 bits for 128 inputs of 8 rows, and scales."""
    header = decoder_header("qwen3")
    header.add(PQ2_0, output=(300, 256))
    path = header.write(tmp_path / "m.gguf")
    model = read_model(path)
    planned = plan(model, 1024, parallel=1, dense=True)
    assert model.can_be_dense and planned.dense
    pq2_0 = 38 * (8 * 256 // 4 + 2 * 8 * 2 + 32) + 64
    per_256, per_1024 = 2 * (208 + 16), 8 * (208 + 16)
    rows_of_256 = 2 * 256 + 2 * 128 + 2 * 1024
    layer = rows_of_256 // 8 * per_256 + 256 // 8 * per_1024 + 7 * 64
    assert planned.tiles == pq2_0 + 38 * per_256 + 64 + 2 * layer
    # The embedding is only looked up, since there is a head.
    read = decode_bytes(model, 0) - decode_bytes(model, 0, dense=True)
    assert read == model.tiles - model.embedding.tiles - (planned.tiles - model.embedding.dense) > 0
    found = buffers_of_llama_server(path, "-c", "1024", "-np", "1", layout="dense")
    assert found["tiles"] == {"TERN_DENSE_TILES": pytest.approx(planned.tiles / MIB, abs=0.006)}

    plain = read_model(small_hybrid().write(tmp_path / "pq2_0.gguf"))
    assert not plain.can_be_dense and plan(plain, 256, dense=True) == plan(plain, 256)


@pytest.mark.parametrize(
    ("header", "n_gpu_layers", "kv_type"),
    [
        (decoder_header("qwen3", 4), 2, "f16"),
        (decoder_header("qwen3", 4), 2, "q8_0"),
        (decoder_header("gemma3", 7, **{"attention.sliding_window": 128}), 3, "q8_0"),
        (small_hybrid(), 2, "f16"),
        (small_hybrid(), 0, "f16"),
    ],
    ids=["qwen3", "qwen3 q8_0", "gemma3", "qwen35", "qwen35 on the host"],
)
def test_what_each_device_holds(tmp_path: Path, header: Header, n_gpu_layers: int, kv_type: str) -> None:
    path = header.write(tmp_path / "m.gguf")
    planned = plan(read_model(path), 4096, kv_type, 1, n_gpu_layers)
    options = ("-c", "4096", "-np", "1", "-ctk", kv_type, "-ctv", kv_type, "-ngl", str(n_gpu_layers))
    found = buffers_of_llama_server(path, *options)
    on_host = planned.on_host
    cache = on_host["kv_cache"] + on_host["window_cache"]
    all_caches = planned.kv_cache + planned.window_cache
    assert found["KV"].get("CPU", 0) == pytest.approx(cache / MIB, abs=0.011)
    assert found["KV"].get("TERN", 0) == pytest.approx((all_caches - cache) / MIB, abs=0.011)
    state = found.get("RS", {})
    assert state.get("CPU", 0) == pytest.approx(on_host["state"] / MIB, abs=0.006)
    assert state.get("TERN", 0) == pytest.approx((planned.state - on_host["state"]) / MIB, abs=0.006)
    # Estimates.
    inputs = found["compute"]["CPU"] + found["output"]["CPU"]
    assert inputs == pytest.approx(on_host["compute"] / MIB, rel=0.25)
    model = read_model(path)
    is_fused = kv_type != "f16" or not on_host["kv_cache"]
    own = attention_scratch(model, 4096) if is_fused else 2 * 512 * model.heads * 4096
    activations = (planned.compute - on_host["compute"] - 512 * model.quantized - own) / MIB
    assert found["compute"]["TERN"] == pytest.approx(activations, rel=0.25)


def test_layers_on_the_host(tmp_path: Path) -> None:
    """The last layers are the device's, then what is behind them; an embedding that is looked up never is."""
    model = read_model(small_hybrid().write(tmp_path / "m.gguf"))
    parts = ("tiles", "mapped", "kv_cache", "window_cache", "state", "compute", "process")
    everywhere = plan(model, 4096, "f16", 1)
    assert everywhere.on_host["tiles"] == model.embedding.tiles > 0
    assert everywhere.on_host["kv_cache"] == everywhere.on_host["state"] == everywhere.on_host["mapped"] == 0
    assert plan(model, 4096, "f16", 1, 99) == everywhere == plan(model, 4096, "f16", 1, 5)
    nowhere = plan(model, 4096, "f16", 1, 0)
    assert all(nowhere.on_host[part] == getattr(nowhere, part) for part in parts if part != "compute")
    # One counts as what is behind the layers; two, with the one attention layer, which is the last.
    assert plan(model, 4096, "f16", 1, 1).on_host["tiles"] == model.tiles - model.weights[-1].tiles
    two = plan(model, 4096, "f16", 1, 2)
    assert two.on_host["kv_cache"] == 0 and two.on_host["state"] == two.state > 0
    three = plan(model, 4096, "f16", 1, 3)
    assert three.on_host["state"] == three.state * 2 // 3
    tied = read_model(decoder_header("qwen3").write(tmp_path / "tied.gguf"))
    assert plan(tied, 256, n_gpu_layers=1).on_host["tiles"] == sum(w.tiles for w in tied.weights[:2])
    assert (tied.embedding.tiles, tied.embedding.mapped) == (0, 0)


@pytest.mark.parametrize(
    "way",
    [{"context": 1024}, {"context": 4096, "kv_type": "q8_0", "parallel": 4}],
    ids=["1024", "4096 in 4 parts, q8_0"],
)
def test_the_process_takes_what_is_planned(tmp_path: Path, way: dict[str, Any]) -> None:
    """The anonymous memory of a llama-server whose context is full."""
    made = decoder_header("llama", 8, n_vocab=300).write(tmp_path / "m.gguf")
    for path in (*check_plan.TINY, made):
        found = check_plan.run(path, check_plan.Way(**way))
        assert found.is_good, found


# ------------------------------------------------------------------------------------------------------------
# Presets
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_27b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside copies of the presets, under the name that they give. No tokenizer has more merges than tokens;
    all that count is how many there are."""
    folder = tmp_path_factory.mktemp("27b")
    header = released_27b(PTQ1_0)
    header.n_merges = header.n_vocab
    for path in PRESETS.glob("*.yaml"):
        shutil.copy(path, folder)
    return header.write(folder / "Ternary-Bonsai-2-27B.gguf")


def test_presets_are_those_that_plan_computes() -> None:
    made = [preset for preset in make_presets.presets().values() if preset is not None]
    expected = {preset.name: preset.text() for preset in made}
    expected |= {card.name: card.text() for card in make_presets.card_presets()}
    assert {path.name: path.read_text() for path in PRESETS.iterdir()} == expected


@pytest.mark.parametrize("gigabytes", [6, 8, 12, 16, 24])
def test_presets_fit_their_cards(whole_27b: Path, gigabytes: int) -> None:
    """With as many layers as fit, and where those are all, as many tokens."""
    model = read_model(whole_27b)
    config = yaml.safe_load((PRESETS / f"ternary-27b-gpu-{gigabytes}gb.yaml").read_text())
    assert config["runtime"]["device"] == "gpu"
    free = int(float(config["memory"]["max_gpu_memory"].removesuffix("GB")) * 10**9)
    assert free <= 0.93 * gigabytes * 10**9
    kv_type = {16: "f16", 8: "q8_0", 5: "q5_0", 4: "q4_0"}[config["model"]["kv_cache_bits"]]
    parallel = config["runtime"].get("max_batch_size")
    context = config["model"]["max_context"]
    found = divide(model, [free], context, kv_type, parallel)
    assert found.cards[0].total <= free
    assert found.is_whole == (gigabytes >= 12)
    if found.is_whole:
        more = divide(model, [free], context + 256, kv_type, parallel)
        assert not more.is_whole or context == model.context


def test_presets_fit_and_use_their_memory(whole_27b: Path) -> None:
    model = read_model(whole_27b)
    for gigabytes in (8, 12, 16, 24):
        config = yaml.safe_load((PRESETS / f"ternary-27b-{gigabytes}gb.yaml").read_text())
        assert config["memory"]["budget"] == f"{gigabytes}GB"
        kv_type = {16: "f16", 8: "q8_0", 5: "q5_0", 4: "q4_0"}[config["model"]["kv_cache_bits"]]
        parallel = config.get("runtime", {}).get("max_batch_size")
        context = config["model"]["max_context"]
        assert plan(model, context, kv_type, parallel).total <= 0.98 * gigabytes * 10**9
        assert plan(model, context + 256, kv_type, parallel).total > 0.979 * gigabytes * 10**9


@pytest.mark.parametrize("gigabytes", [8, 24])
def test_presets_are_served(whole_27b: Path, gigabytes: int) -> None:
    preset = whole_27b.parent / f"ternary-27b-{gigabytes}gb.yaml"
    result = subprocess.run(
        [TERN, "serve", "--config", str(preset), "--dry-run"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert f"of {gigabytes * 1000:,}.0" in result.stdout + result.stderr


def test_smaller_memories_do_not_hold_the_27b(whole_27b: Path) -> None:
    """Not one conversation at the fewest bits, in either layout."""
    model = read_model(whole_27b)
    for gigabytes in (4, 6):
        for dense in (False, True):
            largest = trade_offs(model, gigabytes * 10**9, 1, dense=dense)
            assert set(largest["parallel_1"].values()) == {0}
        assert not (PRESETS / f"ternary-27b-{gigabytes}gb.yaml").exists()
    assert plan(model, 256, "q4_0", 1).total == pytest.approx(7.554e9, rel=2e-3)
    assert plan(model, 256, "q4_0", 1, dense=True).total == pytest.approx(6.295e9, rel=2e-3)


def test_the_dense_layout_is_taken_where_the_fast_one_does_not_fit(tmp_path: Path) -> None:
    path = decoder_header("qwen3", 24).write(tmp_path / "m.gguf")
    model = read_model(path)
    fast, dense = (plan(model, 1024, parallel=1, dense=dense).total for dense in (False, True))
    between, little = f"{(fast + dense) / 2e6:.3f}MB", f"{dense / 1e6 - 0.01:.3f}MB"

    def found(*arguments: str) -> tuple[bool, bool]:
        options = ["--parallel", "1", "--context", "1024", "--json", *arguments]
        result = CliRunner().invoke(cli, ["plan", str(path), *options])
        plan_of = json.loads(result.output)
        assert result.exit_code == (0 if plan_of["fits"] else 1)
        return plan_of["dense"], plan_of["fits"]

    assert found("--memory", f"{fast / 1e6 + 0.01:.3f}MB") == (False, True)
    assert found("--memory", between) == found("--memory", between, "--layout", "dense") == (True, True)
    assert found("--memory", between, "--layout", "fast") == (False, False)
    assert found("--memory", little) == (True, False)
    table = CliRunner().invoke(
        cli, ["plan", str(path), "--memory", between, "--parallel", "1", "--context", "1024"]
    )
    assert "dense tiles" in table.output and "TERN_LAYOUT=dense" in " ".join(table.output.split())


# ------------------------------------------------------------------------------------------------------------
# The command
# ------------------------------------------------------------------------------------------------------------


def tern_plan(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TERN, "plan", *map(str, arguments)], capture_output=True, text=True, timeout=300)


def test_table(tmp_path: Path) -> None:
    path = released_27b(PTQ1_0).write(tmp_path / "27b.gguf")
    result = tern_plan(path, "--context", "8192", "--parallel", "1")
    assert result.returncode == 0 and result.stderr == ""
    assert "TERN0" not in result.stdout
    words = " ".join(result.stdout.split())
    assert "27b.gguf: qwen35, made by hand 8,192 tokens of context in equal parts for 1 conversation" in words
    assert "ternary weights 7,137.3" in words
    assert "KV cache 536.9 16 layers in f16: 64 KiB a token" in words
    assert "recurrent state 156.9 48 layers: 156.9 MB a conversation" in words
    assert "checkpoints of 156.9 MB" in words
    assert "window KV cache" not in words and "largest" not in words


def test_table_by_device(tmp_path: Path) -> None:
    path = released_27b(PTQ1_0).write(tmp_path / "27b.gguf")
    result = tern_plan(path, "--context", "8192", "--parallel", "1", "-ngl", "20")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert re.fullmatch(r" +MB +TERN0 +host CPU *", lines[3])
    planned = plan(read_model(path), 8192, "f16", 1, 20)
    host = sum(planned.on_host.values())
    (total,) = (line.split() for line in lines if line.startswith("total"))
    assert total[1:] == [f"{size / 1e6:,.1f}" for size in (planned.total, planned.total - host, host)]
    (cache,) = (line.split() for line in lines if line.startswith("KV cache"))
    # 19 of 64 layers, 5 of them with a cache; what is behind the layers counts as one.
    assert cache[2:5] == ["536.9", "167.8", "369.1"]


def test_bars_are_as_long_as_their_contexts(tmp_path: Path) -> None:
    path = small_hybrid().write(tmp_path / "m.gguf")
    memory = plan(read_model(path), 65536).total
    result = tern_plan(path, "--memory", f"{memory / 1e6:.2f}MB", "--parallel", "1")
    bars = re.findall(r"--kv \S+ +([\d.]+) +([\d,]+) +(\S+) *$", result.stdout, re.MULTILINE)
    assert [bits for bits, _, _ in bars] == ["16", "8.5", "5.5", "4.5"]
    contexts = [int(context.replace(",", "")) for _, context, _ in bars]
    assert contexts == sorted(contexts) and len(set(contexts)) == 4
    for context, (_, _, bar) in zip(contexts, bars, strict=True):
        assert len(bar) == pytest.approx(36 * context / contexts[-1], abs=1)


def test_picture(tmp_path: Path) -> None:
    path = small_hybrid().write(tmp_path / "m.gguf")
    picture = tmp_path / "plan.png"
    for memory in ([], ["--memory", "200MB"]):
        result = tern_plan(path, "--png", picture, "--json", *memory)
        assert (result.returncode, result.stderr) == (0, f"drawn into {picture}\n")
        json.loads(result.stdout)
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        picture.unlink()
    result = tern_plan(path, "--png", tmp_path / "nowhere" / "plan.png")
    assert (result.returncode, result.stdout) == (2, "")
    assert "nowhere does not exist; create it first" in result.stderr


def test_memory_decides_the_exit_code(tmp_path: Path) -> None:
    path = small_hybrid().write(tmp_path / "m.gguf")
    needed = plan(read_model(path), 4096).total
    enough = f"{needed / 1e6 + 0.01:.2f}MB"
    fits = tern_plan(path, "--context", "4096", "--memory", enough)
    assert fits.returncode == 0 and "\nfits into" in fits.stdout
    small = tern_plan(path, "--context", "4352", "--memory", enough)
    assert small.returncode == 1 and "\ndoes not fit into" in small.stdout and small.stderr == ""
    # Without a context it is the largest that fits.
    largest = tern_plan(path, "--memory", enough)
    assert largest.returncode == 0 and "\n4,096 tokens of context" in largest.stdout
    nothing = tern_plan(path, "--memory", "1MB")
    least = plan(read_model(path), 256, "q4_0", 1).total
    assert nothing.returncode == 1
    assert " ".join(nothing.stdout.split()).endswith(
        "does not fit into 1.0 MB, and no context does; the least that it takes is "
        f"{least / 1e6:.1f} MB (--context 256 --parallel 1 --kv q4_0)"
    )
    everything = tern_plan(path, "--memory", "900GB")
    assert everything.returncode == 0
    assert " ".join(everything.stdout.split()).endswith(
        "fits into 900,000.0 MB; so do all of the 262,144 tokens that it was trained for, in every type of "
        "KV cache"
    )
    # One that fits, in one type, is a table with "none" in it.
    some = tern_plan(path, "--memory", f"{least / 1e6 + 0.01:.2f}MB", "--parallel", "1")
    assert some.returncode == 1
    assert re.findall(r"--kv (\S+) +[\d.]+ +(none|256) ", some.stdout) == [
        ("f16", "none"),
        ("q8_0", "none"),
        ("q5_0", "none"),
        ("q4_0", "256"),
    ]


def test_tables_fit_a_terminal(tmp_path: Path) -> None:
    """No line is cut or wrapped into the columns of others, at widths that people have."""
    path = small_hybrid().write(tmp_path / "m.gguf")
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        model = read_model(path)
        tables.print_plan(model, plan(model, 4096), 10**8, None, console)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)


def test_json(tmp_path: Path) -> None:
    path = small_hybrid().write(tmp_path / "m.gguf")
    result = tern_plan(path, "--memory", "1GiB", "--context", "2048", "--kv", "q8_0", "--json")
    assert result.returncode == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    planned = plan(read_model(path), 2048, "q8_0")
    assert found["total"] == planned.total and found["kv_cache"] == planned.kv_cache
    assert (found["memory"], found["fits"], found["parallel"]) == (2**30, True, 4)
    assert found["largest_context"]["parallel_4_shared"]["q4_0"] == largest_context(
        read_model(path), 2**30, "q4_0"
    )
    without = json.loads(tern_plan(path, "--json").stdout)
    assert without["context"] == 262144
    assert without["memory"] is without["fits"] is without["largest_context"] is None


@pytest.mark.parametrize("size", ["6", "6KB", "-6GB", "six GB", "6GBs", "nanGB"])
def test_sizes_that_are_none(tmp_path: Path, size: str) -> None:
    path = decoder_header("llama").write(tmp_path / "m.gguf")
    result = CliRunner().invoke(cli, ["plan", str(path), f"--memory={size}"])
    assert result.exit_code == 2 and "give one like 6GB" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("size", "expected"),
    [("6GB", 6 * 10**9), ("6GiB", 6 << 30), ("5.5 GiB", 11 << 29), ("800mb", 8 * 10**8), ("1MiB", 1 << 20)],
)
def test_sizes(tmp_path: Path, size: str, expected: int) -> None:
    path = decoder_header("llama").write(tmp_path / "m.gguf")
    result = CliRunner().invoke(cli, ["plan", str(path), "--memory", size, "--json"])
    assert json.loads(result.output)["memory"] == expected


def test_errors_are_one_line(tmp_path: Path) -> None:
    result = tern_plan(tmp_path / "missing.gguf")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == f"tern: {tmp_path}/missing.gguf: no such file or directory\n"


def refusal(path: Path) -> str:
    """What the command prints as its one line."""
    with pytest.raises(TernError) as error:
        read_model(path)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{path}: ")
    return line


def test_what_is_no_model(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("no model\n")
    assert "is text" in refusal(text)
    assert "is a directory" in refusal(tmp_path)
    made = decoder_header("llama")
    cut = made.write(tmp_path / "cut.gguf")
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 100_000)
    refusal(cut)
    nothing = Header("llama", made.keys)
    assert "is a vocabulary and no model" in refusal(nothing.write(tmp_path / "vocabulary.gguf"))
    assert "is a projector" in refusal(Header("clip", {}).write(tmp_path / "mmproj.gguf"))
    assert "no general.architecture" in refusal(files.write(tmp_path / "no.gguf", {"a": 1}, []))
    adapter = files.write(
        tmp_path / "lora.gguf", {"general.architecture": "llama", "general.type": "adapter"}, []
    )
    assert "is an adapter" in refusal(adapter)
    unknown = decoder_header("mamba\x1b[31m").write(tmp_path / "mamba.gguf")
    assert r"architecture mamba\x1b[31m" in refusal(unknown) and "known are bitnet, gemma3" in refusal(
        unknown
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("block_count", None, "has no llama.block_count; expected an integer from 1 to 512; convert"),
        ("block_count", 0, "llama.block_count is 0; expected"),
        # Lists of that length would take gigabytes.
        ("block_count", 2**32 - 1, "llama.block_count is 4294967295; expected an integer from 1 to 512"),
        ("attention.head_count", 2**32 - 1, "llama.attention.head_count is 4294967295; expected"),
        (
            "attention.head_count_kv",
            [2, 10**9],
            r"llama.attention.head_count_kv\[1\] is 10+; expected",
        ),
        ("attention.key_length", 10**9, "llama.attention.key_length is 1000000000; expected"),
        ("context_length", 2**31, "llama.context_length is 2147483648; expected"),
        ("context_length", "long", "llama.context_length is 'long'; expected"),
        ("attention.head_count", 2.5, "llama.attention.head_count is 2.5; expected"),
        ("attention.head_count_kv", [2], "llama.attention.head_count_kv is .*; expected 2 integers"),
        (
            "attention.head_count",
            ["a", "b"],
            r"llama.attention.head_count\[0\] is .a.; expected an integer",
        ),
        ("embedding_length", True, "llama.embedding_length is True; expected"),
    ],
)
def test_broken_keys(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    path = decoder_header("llama").write(tmp_path / "m.gguf", **{key: value})
    assert re.search(expected, refusal(path))


def test_more_prediction_heads_than_layers(tmp_path: Path) -> None:
    path = small_hybrid(nextn_predict_layers=4).write(tmp_path / "m.gguf")
    assert "qwen35.nextn_predict_layers is 4; expected an integer from 0 to 3" in refusal(path)


def test_numbers_at_their_bounds_are_planned(tmp_path: Path) -> None:
    """Nothing runs over where a file says the largest numbers that are taken."""
    keys = {"attention.head_count": 2**14, "attention.head_count_kv": 2**14, "context_length": 2**31 - 1}
    keys |= {"attention.key_length": 2**14, "attention.value_length": 2**14}
    model = read_model(decoder_header("llama").write(tmp_path / "m.gguf", **keys))
    planned = plan(model, model.context, parallel=1)
    assert planned.kv_cache == 2 * 2**31 * 2 * 2**28 * 2
    assert 0 <= attention_scratch(model, 2**31) <= 32 * MIB
    assert largest_context(model, 10**9) == 0


def test_sizes_that_the_kernels_do_not_have() -> None:
    wrongs: tuple[Callable[[], int], ...] = (
        lambda: _core.tiled_bytes(PQ2_0, 100, 8),
        lambda: _core.tiled_bytes(F32, 128, 8),
        lambda: _core.tiled_bytes(PQ2_0, -128, 8),
        lambda: _core.column_bytes(2**40),
        lambda: _core.most_attention_scratch(512, 0, 1, 64, 64, 256),
        lambda: _core.most_attention_scratch(10**6, 1, 1, 64, 64, 256),
    )
    for wrong in wrongs:
        with pytest.raises(ValueError):
            wrong()
