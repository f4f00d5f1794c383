"""tern plan --vram: what cards hold, against sums by hand and what a llama-server with a GPU allocates."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ggml_tern.cli.tern import cli
from ggml_tern.host.stock import DEVICE_VARIABLE
from ggml_tern.plan.arithmetic import plan
from ggml_tern.plan.cards import divide
from ggml_tern.plan.header import read_model
from gpu.hosts import vulkan_of_pypi
from model_headers import PQ2_0, PTQ1_0, hybrid_header, released_27b
from reference import ROOT

HYBRID = ROOT / "models" / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"
GB = 10**9
MIB = 1 << 20


@pytest.fixture(scope="module")
def whole_27b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("27b") / "27b.gguf"
    header = released_27b(PTQ1_0)
    header.n_merges = header.n_vocab
    header.write(path)
    return path


def small(tmp_path: Path) -> Path:
    header = hybrid_header(8, PQ2_0, 256, 512, (4, 2, 64), (2, 4, 32))
    path = tmp_path / "hybrid.gguf"
    header.write(path)
    return path


@pytest.mark.parametrize("gigabytes", [6, 8, 12, 24])
def test_one_card(whole_27b: Path, gigabytes: int) -> None:
    model = read_model(whole_27b)
    found = divide(model, [gigabytes * GB], kv_type="q8_0", parallel=1)
    [card] = found.cards
    assert card.total <= card.memory and card.n_layers == found.n_gpu_layers
    # 2.25 bits for every weight that has 2.125 in tiles, which are filled up a little.
    first = found.n_layers - found.n_gpu_layers
    tiles = sum(layer.tiles for layer in model.weights[first:])
    mapped = sum(layer.mapped for layer in model.weights[first:])
    assert 0 <= tiles * 18 / 17 - (card.weights - mapped) < 1e-5 * tiles
    if found.is_whole:
        # Nothing but the embedding stays, and no larger context would fit.
        assert found.on_host["tiles"] == model.embedding.tiles
        more = divide(model, [gigabytes * GB], found.planned.context + 256, "q8_0", 1)
        assert found.planned.context == model.context or not more.is_whole
    else:
        assert found.planned.context == 4096
        held = plan(model, 4096, "q8_0", 1, found.n_gpu_layers).on_host
        assert found.on_host["kv_cache"] == held["kv_cache"] and found.on_host["state"] == held["state"]
        assert card.kv_cache == found.planned.kv_cache - held["kv_cache"]
        assert card.state == found.planned.state - held["state"]
        # One layer more is too much.
        smaller = divide(model, [card.total - 1], 4096, "q8_0", 1)
        assert smaller.n_gpu_layers < found.n_gpu_layers
    assert found.is_whole == (gigabytes > 6)


def test_several_cards_share_by_their_memory(whole_27b: Path) -> None:
    model = read_model(whole_27b)
    found = divide(model, [4 * GB, 8 * GB], 8192, "q8_0", 1)
    first, second = found.cards
    assert first.n_layers + second.n_layers == found.n_gpu_layers == 65
    # llama.cpp: layer i of n is the first card's while i / n is below its share, a third.
    assert first.n_layers == sum(3 * i < 65 for i in range(65))
    assert first.total <= 4 * GB and second.total <= 8 * GB
    one = divide(model, [100 * GB], 8192, "q8_0", 1).cards[0]
    for part in ("weights", "kv_cache", "state"):
        assert getattr(first, part) + getattr(second, part) == getattr(one, part)
    assert found.options()[-2:] == ["-ts", "4,8"]


def test_none_fits(tmp_path: Path) -> None:
    found = divide(read_model(small(tmp_path)), [1000], 1024)
    assert found.n_gpu_layers == 0 and not any(card.total for card in found.cards)
    assert found.main_memory >= found.planned.tiles


def tern_plan(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def test_command(tmp_path: Path) -> None:
    path = small(tmp_path)
    result = tern_plan(path, "--vram", "1GB,2GB", "--context", 1024, "--parallel", 1)
    assert result.exit_code == 0
    assert "GPU 0" in result.output and "GPU 1" in result.output and "main memory" in result.output
    assert re.search(
        r"^llama-server -m \S+ -ngl \d+ -c 1024 .* -ts 1,2 -np 1 --fit off$", result.output, re.M
    )
    found = json.loads(
        tern_plan(path, "--vram", "1GB", "--context", 1024, "--memory", "8GB", "--json").output
    )
    assert found["fits"] is True and found["n_gpu_layers"] == found["n_layers"]
    assert found["host_total"] == sum(found["on_host"].values())
    assert tern_plan(path, "--vram", "1MB", "--context", 1024).exit_code == 1
    assert tern_plan(path, "--vram", "1GB", "--context", 1024, "--memory", "1MB").exit_code == 1
    for wrong in (["--vram", "0GB"], ["--vram", "1GB,"], ["--vram", "1GB", "-ngl", "3"]):
        assert tern_plan(path, *wrong).exit_code == 2


@pytest.mark.parametrize("n_gpu_layers", [5, 3])
def test_a_llama_server_with_a_gpu_allocates_what_is_planned(n_gpu_layers: int, tmp_path: Path) -> None:
    """ggml-vulkan on a driver that computes on the processor; the log says what is where."""
    host = vulkan_of_pypi()
    model = read_model(HYBRID)
    whole = divide(model, [GB], 1024, "q8_0", 1)
    assert whole.n_gpu_layers == 5
    [card] = whole.cards
    if n_gpu_layers < 5:
        # The least memory that holds so many layers.
        sizes = range(card.total, 0, -1024)
        fewer = (divide(model, [size], 1024, "q8_0", 1) for size in sizes)
        [card] = next(found for found in fewer if found.n_gpu_layers == n_gpu_layers).cards
    log = tmp_path / "log"
    words = ["-m", HYBRID, "-c", "1024", "-np", "1", "-ngl", n_gpu_layers, "-ctk", "q8_0", "-ctv", "q8_0"]
    words += ["--no-warmup", "--fit", "off", "-lv", "4", "--host", tmp_path / "socket.sock"]
    # Nothing is computed: that driver spoils its heap now and then.
    environment = host.environment(plugin=True) | {DEVICE_VARIABLE: "Vulkan0", "TERN_GPU_SELF_TEST": "0"}
    with log.open("wb") as file:
        command = [str(host.server), *map(str, words)]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and "compute buffer size" not in log.read_text(errors="replace"):
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")

    def logged(what: str) -> float:
        return sum(map(float, re.findall(rf"Vulkan0 {what} buffer size = +([\d.]+) MiB", text)))

    # Each of the buffers is rounded to a hundredth.
    assert logged("model") == pytest.approx(card.weights / MIB, abs=0.02), text
    assert logged("KV") == pytest.approx(card.kv_cache / MIB, abs=0.02)
    assert logged("RS") == pytest.approx(card.state / MIB, abs=0.02)
