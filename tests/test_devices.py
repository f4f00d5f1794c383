"""On which devices programs run: what the user names, else a llama.cpp's own GPUs, else TERN0."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ggml_tern.errors import TernError
from ggml_tern.host import devices
from ggml_tern.host.devices import Choice, Device, choose, may_have_gpus, resolve
from ggml_tern.host.stock import DEVICE_VARIABLE, llama_cpp_dir
from ggml_tern.plan.cards import divide
from ggml_tern.plan.header import read_model
from ggml_tern.serve.config import Config, Memory
from ggml_tern.serve.serving import prepare
from ggml_tern.serve.spellings import Options, given
from gpu.hosts import vulkan_of_pypi
from llama_server import TINY
from tern_command import tern

TERN0 = Device("TERN0", "ggml-tern CPU kernels", "igpu", 1 << 34, 1 << 34)
CPU = Device("CPU", "a processor", "cpu", 1 << 34, 1 << 34)
CUDA0 = Device("CUDA0", "a card", "gpu", 1 << 33, 1 << 33, is_taught=True)
CUDA1 = replace(CUDA0, name="CUDA1")
VULKAN0 = replace(CUDA0, name="Vulkan0")
VULKAN1 = replace(CUDA0, name="Vulkan1", description="on the processor's chip", kind="igpu")
OPENCL = replace(CUDA0, name="GPUOpenCL", is_taught=False, refusal="its backend has no kernels for Q2_0")
SERVER = Path("/opt/llama.cpp/llama-server")


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DEVICE_VARIABLE, devices.RPC_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def has(monkeypatch: pytest.MonkeyPatch, *found: Device) -> None:
    monkeypatch.setattr(devices, "devices_of", lambda program: [*found, CPU, TERN0])


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], "TERN0"),
        ([CUDA0], "CUDA0"),
        ([CUDA0, CUDA1], "CUDA0,CUDA1"),
        # The same card twice, and an integrated GPU beside it.
        ([CUDA0, VULKAN0, VULKAN1], "CUDA0"),
        ([VULKAN1, VULKAN0], "Vulkan0"),
        ([VULKAN1], "Vulkan1"),
        ([OPENCL], "TERN0"),
        ([OPENCL, CUDA0], "CUDA0"),
    ],
)
def test_gpus_go_before_the_processor(
    monkeypatch: pytest.MonkeyPatch, found: list[Device], chosen: str
) -> None:
    has(monkeypatch, *found)
    choice = choose(SERVER)
    assert choice.devices == chosen
    assert choice.is_elsewhere == (chosen != "TERN0")
    # Nothing is said where nothing is new.
    assert bool(choice.said) == bool(found)
    if found == [OPENCL]:
        assert "no kernels for Q2_0" in choice.said


def test_what_the_user_names_goes_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, CUDA0)
    assert choose(SERVER, ["-m", "x.gguf", "--device", "TERN0"]) == Choice("TERN0")
    assert choose(SERVER, ["-dev", "CUDA1"]).devices == "CUDA1"
    # "none" alone has no backend loaded.
    assert choose(SERVER, ["--device", "none"]).devices == "TERN0"
    assert choose(SERVER, ["--rpc", "other:50052"]) == Choice(None)
    monkeypatch.setenv(DEVICE_VARIABLE, "Vulkan3")
    assert choose(SERVER).devices == "Vulkan3"
    assert choose(SERVER, ["--device", "CUDA0"]).devices == "CUDA0"


def test_other_programs_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, CUDA0)
    assert choose(Path("/bin/sh")) == Choice()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("auto", "CUDA0,CUDA1"),
        ("cpu", "TERN0"),
        ("gpu", "CUDA0,CUDA1"),
        ("gpu:1", "CUDA1"),
        ("cuda", "CUDA0,CUDA1"),
        ("CUDA:1", "CUDA1"),
        ("vulkan", "Vulkan0,Vulkan1"),
        ("Vulkan1", "Vulkan1"),
        ("Vulkan1,CUDA0", "Vulkan1,CUDA0"),
        ("TERN0", "TERN0"),
        ("none", "none"),
    ],
)
def test_kinds_and_names(monkeypatch: pytest.MonkeyPatch, wanted: str, found: str) -> None:
    has(monkeypatch, CUDA0, CUDA1, VULKAN0, VULKAN1)
    assert resolve(wanted, "runtime.device", SERVER).devices == found


@pytest.mark.parametrize("wanted", ["cuda", "gpu:1", "CUDA0", "Vulkan0,CUDA0", "nonsense"])
def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    has(monkeypatch, VULKAN0)
    with pytest.raises(TernError) as error:
        resolve(wanted, "runtime.device", SERVER)
    said = str(error.value)
    assert said.startswith(f"runtime.device: {wanted}: {SERVER} has no such device; it has Vulkan0 (a card)")
    assert "docs/gpu.md" in said and "\n" not in said


def test_gpus_are_known_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = llama_cpp_dir() / "llama-server"
    assert not may_have_gpus(ours)

    def refuse(*arguments: object) -> None:
        raise AssertionError("of a llama.cpp without GPUs, nothing is started")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert [device.name for device in devices.devices_of(ours)] == ["TERN0"]
    assert not may_have_gpus(tmp_path / "missing")
    shutil.copy(ours, tmp_path)
    (tmp_path / "libggml-cpu.so.0").touch()
    assert not may_have_gpus(tmp_path / "llama-server")
    (tmp_path / "libggml-cuda.so").touch()
    assert may_have_gpus(tmp_path / "llama-server")


def test_one_that_cannot_be_looked_into(tmp_path: Path) -> None:
    """It looks as if it had a GPU, and its libraries are missing: it will say so itself."""
    shutil.copy(llama_cpp_dir() / "llama-server", tmp_path)
    (tmp_path / "libggml-cuda.so").write_bytes(b"no library")
    assert choose(tmp_path / "llama-server") == Choice()


def test_a_budget_is_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, CUDA0, CUDA1)
    words = ["--model", str(TINY), "-c", "1024", "-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"]
    division = divide(read_model(TINY), [100_000_000] * 2, 1024, "q8_0", 1)
    assert division.n_gpu_layers > 0

    def options_of(config: Config, budget: int | None, *more: str) -> Options:
        launch = prepare(config, budget, [*words, *more])
        assert launch.devices == "CUDA0,CUDA1"
        return given([*launch.words])

    found = options_of(Config(), 100_000_000)
    assert found["gpu-layers"] == str(division.n_gpu_layers) and found["fit"] == "off"
    assert found["ctx-size"] == "1024"
    memory = Memory(budget=1, max_gpu_memory=100_000_000)
    assert options_of(Config(memory=memory), None) == found
    # Without a budget, llama-server looks at the memory itself; what the user says stays.
    assert not {"gpu-layers", "fit"} & options_of(Config(), None).keys()
    assert options_of(Config(), 100_000_000, "-ngl", "1")["gpu-layers"] == "1"
    with pytest.raises(TernError, match=r"no layer fits into 0\.1 MB of a GPU"):
        prepare(Config(), 100_000, words)
    # On the processor it is main memory's, as ever.
    launch = prepare(Config(), 10**9, [*words, "--device", "TERN0"])
    assert given(launch.words)["gpu-layers"] == "all"


def test_a_real_gpu_backend(tmp_path: Path) -> None:
    """ggml-vulkan on a driver that computes on the processor, in a llama-server that is not ours."""
    host = vulkan_of_pypi()
    environment = host.environment(plugin=False)
    named = {"LD_LIBRARY_PATH": environment["LD_LIBRARY_PATH"], **host.variables}
    run = tern("env", str(host.server), **named)
    assert "export LLAMA_ARG_DEVICE=Vulkan0\n" in run.stdout
    assert run.stderr.startswith("tern env: on Vulkan0 (llvmpipe") and run.stderr.count("\n") == 1

    def serve(device: str) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "serve.yaml"
        config.write_text(f"model: {{path: {TINY}}}\nruntime: {{device: {device}}}\n")
        return tern("serve", "--config", config, "--llama-server", str(host.server), "--dry-run", **named)

    run = serve("vulkan:0")
    assert run.stdout.startswith(f"LLAMA_ARG_DEVICE=Vulkan0\n{host.server} ")
    # How many layers fit is llama-server's to find out.
    assert "--gpu-layers" not in run.stdout
    run = serve("cuda")
    assert run.returncode == 1 and "has no such device; it has Vulkan0 (llvmpipe" in run.stderr
    run = serve("cpu")
    assert "LLAMA_ARG_DEVICE" not in run.stdout and "--gpu-layers all" in run.stdout
