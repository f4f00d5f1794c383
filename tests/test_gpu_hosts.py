"""What the tests of GPUs stand on: stock hosts with GPU backends, with stock types and without the plug-in.

If these fail, the machine or the ready-made hosts are at fault, and not the plug-in.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

import compare_logits
from gpu import hosts, models, rpc, running
from gpu.fake_cuda import FakeCuda
from gpu.models import N_PROMPT, TOKENS
from gpu.running import Load, evaluate
from rotated_files import RECIPES

VULKAN = {"PyPI": hosts.vulkan_of_pypi, "npm": hosts.vulkan_of_npm}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> models.Forms:
    return models.Forms(tmp_path_factory.mktemp("models"), "qwen3", RECIPES["qwen3"], rotated=False)


@pytest.mark.parametrize("host", VULKAN)
def test_vulkan_computes_what_the_processor_does(host: str, qwen3: models.Forms) -> None:
    found = VULKAN[host]()
    [on_gpu] = evaluate(found, Load(qwen3.q2_0), tokens=TOKENS, n_prompt=N_PROMPT, plugin=False)
    [on_cpu, other] = evaluate(
        found,
        Load(qwen3.q2_0, 0, devices="CPU"),
        Load(qwen3.f16, 0, devices="CPU"),
        tokens=TOKENS,
        n_prompt=N_PROMPT,
        plugin=False,
    )
    assert compare_logits.compare(other.logits, on_cpu.logits).mean_kl <= 1e-3
    agreement = compare_logits.compare(other.logits, on_gpu.logits)
    print(agreement)
    assert agreement.mean_kl <= 1e-4
    # Not the same to the last bit: it was another device.
    assert not np.array_equal(on_gpu.logits, on_cpu.logits)
    # The embedding on the processor, all else on the device.
    assert set(on_gpu.splits) == {2} and set(on_cpu.splits) == {1}


def test_a_machine_without_a_gpu_runs_cuda(qwen3: models.Forms, tmp_path: Path) -> None:
    """All but the arithmetic: what is launched, graphs that are captured once and launched for each token."""
    cuda = FakeCuda(tmp_path)
    host = cuda.host()
    commands = [*running.first_commands(host), "devices", *Load(qwen3.q2_0).commands("m")]
    outcome = running.run(host, [*commands, "greedy M 8 1 2 3", "free M", "free m"], plugin=False)
    assert outcome.after("device") == [["CUDA0"], ["CPU"]]
    assert outcome.numbers("splits") == [[2] * 8]
    record = cuda.read()
    assert record.cublas == record.unexpected == [] and not record.left()
    # The prompt, a first token and a second that is found to be alike; from then on the captured graph.
    assert record.count("capture", "begin") == record.count("graph", "instantiate") == 1
    assert record.count("graph", "launch") == 6
    captured = [launch for launch in record.launches if launch.captured]
    products = [launch for launch in captured if launch.short == "mul_mat_vec_q"]
    # q, k, v, output, gate with up, down of two layers, and the head; in the last layer gate and up are two.
    assert len(products) == 14 and all("(ggml_type)42" in launch.name for launch in products)
    assert captured[0].short == "rms_norm_f32" and captured[-1].short == "mul_mat_vec_q"
    # The weights are in its memory as they are in the file.
    for name, tensor in qwen3.model.stored.items():
        assert cuda.memory_holds(models.in_q2_0(tensor).data) == (name != "token_embd.weight"), name


def test_two_gpus_and_too_little_memory(qwen3: models.Forms, tmp_path: Path) -> None:
    for folder in ("two", "small"):
        (tmp_path / folder).mkdir()
    two = FakeCuda(tmp_path / "two", devices=2)
    commands = [*running.first_commands(two.host()), "devices", *Load(qwen3.q2_0).commands("m")]
    outcome = running.run(two.host(), [*commands, "greedy M 3 1"], plugin=False)
    assert outcome.after("device") == [["CUDA0"], ["CUDA1"], ["CPU"]]
    assert set(outcome.numbers("splits")[0]) == {3}
    small = FakeCuda(tmp_path / "small", memory=1 << 16)
    outcome = running.run(small.host(), commands, plugin=False, must_end_well=False)
    assert outcome.code == 1 and "cudaMalloc failed: out of memory" in outcome.said


def test_rpc_computes_what_the_processor_does(qwen3: models.Forms) -> None:
    host = hosts.pinned()
    generate = "greedy M 12 1 2 3"
    load = Load(qwen3.q2_0, 2)
    with rpc.serving() as server:
        commands = [*rpc.first_commands(server.endpoint), "devices", *load.commands("m"), generate]
        outcome = running.run(host, commands, plugin=False)
        assert outcome.after("device") == [["CPU"], ["RPC0"]]
        assert re.search(r"RPC0\S* model buffer size", outcome.said)
        # It answers again, and only while it lives.
        assert running.run(host, commands, plugin=False).after("tokens") == outcome.after("tokens")
        server.kill()
        ended = running.run(host, commands, plugin=False, must_end_well=False)
        assert ended.code == -signal.SIGABRT and f"Failed to connect to {server.endpoint}" in ended.said
    alone = running.run(host, [*Load(qwen3.q2_0, 0).commands("m"), generate], plugin=False)
    assert alone.after("tokens") == outcome.after("tokens")
