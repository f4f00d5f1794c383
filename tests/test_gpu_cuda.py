"""Our types and rotations on the released ggml-cuda, under a CUDA that computes nothing (gpu/fake_cuda.py).

What is launched, and what lies in the memory of the device, is that of llama.cpp with Q2_0, and the nodes of
the rotations besides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpu import models, running
from gpu.fake_cuda import FakeCuda, Launch, Record, repeated
from gpu.models import LARGE_BLOCKS, Forms
from gpu.running import Load, Outcome
from llama_server import ROOT
from reference import formats as ref
from rotated_files import RECIPES

N_GENERATED = 8
#: The prompt, a token whose graph is new, and one that is found to be alike: then the captured graph.
N_REPLAYED = N_GENERATED - 2

RECIPES_HERE = {
    "PQ2_0": replace(RECIPES["qwen3"], formats=(ref.PQ2_0,)),
    "PTQ1_0": replace(RECIPES["qwen3"], formats=(ref.PTQ1_0,)),
    "TQ1_0": replace(RECIPES["qwen3"], formats=(ref.TQ1_0,)),
    "TQ2_0": replace(RECIPES["qwen3"], formats=(ref.TQ2_0,)),
}
ROTATED_HERE = {name: RECIPES[name] for name in ("qwen3, tied", "qwen35", "qwen3moe", "qwen3next")} | {
    "blocks of 1024": LARGE_BLOCKS
}


@dataclass(frozen=True)
class Run:
    outcome: Outcome
    record: Record
    cuda: FakeCuda

    @property
    def captured(self) -> list[Launch]:
        return [launch for launch in self.record.launches if launch.captured]


RunModel = Callable[..., Run]


@pytest.fixture
def run_model(tmp_path: Path) -> RunModel:
    def run_model(load: Load, plugin: bool = True, devices: int = 1) -> Run:
        folder = tmp_path / f"cuda-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        cuda = FakeCuda(folder, devices)
        host = cuda.host()
        commands = [*running.first_commands(host), *load.commands("m"), f"greedy M {N_GENERATED} 5 6"]
        # Its self-test computes, which nothing does here.
        variables = {"TERN_GPU_SELF_TEST": "0"}
        outcome = running.run(host, [*commands, "free M", "free m"], plugin, variables)
        return Run(outcome, cuda.read(), cuda)

    return run_model


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Forms]:
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Forms]()

    def forms(name: str) -> Forms:
        if name not in made:
            recipe = (RECIPES_HERE | ROTATED_HERE)[name]
            made[name] = Forms(folder, name, recipe, rotated=name in ROTATED_HERE)
        return made[name]

    return forms


def assert_sound(run: Run) -> None:
    """Nothing by way of cuBLAS, nothing left behind; a graph is captured once and launched for each token."""
    record = run.record
    assert record.cublas == record.unexpected == []
    assert not record.left()
    assert record.count("capture", "begin") == record.count("graph", "instantiate") == 1
    assert record.count("graph", "launch") == N_REPLAYED


def shape(launches: list[Launch]) -> list[tuple[str, tuple[int, int, int]]]:
    return [(launch.short, launch.grid) for launch in launches]


@pytest.mark.parametrize("name", RECIPES_HERE)
def test_types_without_a_rotation_run_as_q2_0(
    name: str, run_model: RunModel, forms: Callable[[str], Forms]
) -> None:
    """The very launches of llama.cpp alone with the same weights in Q2_0, whose bytes are in the memory."""
    form = forms(name)
    ours, stock = run_model(Load(form.ours)), run_model(Load(form.q2_0), plugin=False)
    assert_sound(ours)
    assert_sound(stock)
    assert [launch.name for launch in ours.record.launches] == [other.name for other in stock.record.launches]
    assert shape(ours.record.launches) == shape(stock.record.launches)
    assert ours.outcome.numbers("splits") == stock.outcome.numbers("splits") == [[2] * N_GENERATED]
    for tensor in form.model.stored.values():
        assert ours.cuda.memory_holds(models.in_q2_0(tensor).data) == (tensor.name != "token_embd.weight")


@pytest.mark.parametrize("name", ROTATED_HERE)
def test_rotations_are_kernels_in_the_same_graph(
    name: str, run_model: RunModel, forms: Callable[[str], Forms]
) -> None:
    form = forms(name)
    ours, stock = run_model(Load(form.ours)), run_model(Load(form.q2_0), plugin=False)
    assert_sound(ours)
    assert ours.outcome.numbers("splits") == stock.outcome.numbers("splits")
    more = Counter(launch.short for launch in ours.captured)
    more.subtract(launch.short for launch in stock.captured)
    print({kernel: n for kernel, n in more.items() if n})
    # The products are those of llama.cpp, fused as it fuses them; gate and up of the last layer may be, too.
    assert -1 <= more["mul_mat_vec_q"] == more["quantize_q8_1"] <= 0
    transforms = [launch for launch in ours.captured if "fwht" in launch.name or "hadamard" in launch.name]
    assert transforms
    # Beside the transforms nothing but the signs, and sums and differences for blocks beyond 512.
    others = {kernel for kernel, n in more.items() if n > 0} - {launch.short for launch in transforms}
    assert others <= {"k_bin_bcast", "cpy_scalar"}, others


def test_a_layer_split_over_two_gpus(run_model: RunModel, forms: Callable[[str], Forms]) -> None:
    form = forms("qwen3, tied")
    ours = run_model(Load(form.ours), devices=2)
    stock = run_model(Load(form.q2_0), plugin=False, devices=2)
    assert ours.outcome.numbers("splits") == stock.outcome.numbers("splits") == [[3] * N_GENERATED]
    assert ours.record.cublas == ours.record.unexpected == [] and not ours.record.left()
    for key in (("capture", "begin"), ("graph", "instantiate"), ("graph", "launch")):
        assert ours.record.count(*key) == stock.record.count(*key), key


def test_parts_of_the_layers_on_the_processor(run_model: RunModel, forms: Callable[[str], Forms]) -> None:
    """The device computes several pieces of a graph for each token, and each is captured once."""
    form = forms("qwen3, tied")
    ours = run_model(Load(form.ours, on_cpu="ffn_down"))
    stock = run_model(Load(form.q2_0, on_cpu="ffn_down"), plugin=False)
    assert ours.outcome.numbers("splits") == stock.outcome.numbers("splits")
    assert min(ours.outcome.numbers("splits")[0]) > 4
    assert ours.record.cublas == [] and not ours.record.left()
    for key in (("capture", "begin"), ("graph", "instantiate"), ("graph", "launch")):
        assert ours.record.count(*key) == stock.record.count(*key) > 0, key


def test_a_decode_step_of_a_trained_hybrid(run_model: RunModel) -> None:
    ours = run_model(Load(ROOT / "models" / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"))
    record = ours.record
    assert record.unexpected == [] and not record.left()
    assert record.count("capture", "begin") == record.count("graph", "instantiate") == 1
    assert record.count("graph", "launch") == N_REPLAYED
    # cuBLAS for its F16 matrices, for the two tokens of the prompt alone.
    words = [line[0] for line in record.words]
    assert "cublas" not in words[words.index("capture") :]
    for kernel, n in repeated(ours.captured):
        print(kernel, n)
    kinds = Counter(launch.short for launch in ours.captured)
    assert kinds["fwht_cuda"] > 0 and kinds["gated_delta_net_cuda"] > 0
    # A transform is shared by the products of an activation: q, k and v, gate and up.
    assert kinds["fwht_cuda"] < kinds["mul_mat_vec_q"]


# ---- what goes wrong ----


def test_a_gpu_that_computes_wrongly_is_left_alone(forms: Callable[[str], Forms], tmp_path: Path) -> None:
    """This one computes nothing. Its self-test says so in one line, and no matrix of ours goes there."""
    form = forms("qwen3, tied")
    cuda = FakeCuda(tmp_path)
    commands = [*running.first_commands(cuda.host()), *Load(form.ours).commands("m"), "greedy M 2 5 6"]
    outcome = running.run(cuda.host(), [*commands, "free M", "free m"])
    (line,) = outcome.of_plugin
    assert re.fullmatch(
        r"ggml-tern: CUDA0 is left alone: its self-test failed: MUL_MAT with \w+ is off by \S+ of its mean "
        r"square; ternary matrices stay on the CPU \(TERN_GPU_SELF_TEST=0 takes the device at its word\)",
        line,
    )
    assert "CUDA0_TERN" not in outcome.said and "TERN_TILES model buffer size" in outcome.said
    for tensor in form.model.stored.values():
        if tensor.type_id in ref.FORMATS:
            assert not cuda.memory_holds(models.in_q2_0(tensor).data)
    assert not cuda.read().left()


@pytest.mark.parametrize("self_test", ["0", "1"])
def test_a_gpu_without_memory(self_test: str, forms: Callable[[str], Forms], tmp_path: Path) -> None:
    """llama.cpp's own words for a device that is too small; one that cannot even be tested is left alone."""
    cuda = FakeCuda(tmp_path, memory=1 << 15)
    commands = [*running.first_commands(cuda.host()), *Load(forms("PTQ1_0").ours).commands("m")]
    variables = {"TERN_GPU_SELF_TEST": self_test}
    outcome = running.run(cuda.host(), commands, variables=variables, must_end_well=False)
    assert outcome.code == 1 and "out of memory" in outcome.said
    assert len(outcome.of_plugin) == int(self_test)
    assert all("it has no memory for it" in line for line in outcome.of_plugin)


def test_gpus_can_be_left_alone_by_wish(forms: Callable[[str], Forms], tmp_path: Path) -> None:
    cuda = FakeCuda(tmp_path)
    commands = [*running.first_commands(cuda.host()), *Load(forms("PTQ1_0").ours).commands("m")]
    outcome = running.run(cuda.host(), commands, variables={"TERN_GPU": "0"})
    assert outcome.of_plugin == [] and "CUDA0_TERN" not in outcome.said


def test_backends_are_unloaded_in_any_order(forms: Callable[[str], Forms], tmp_path: Path) -> None:
    """The GPU's first, and what is loaded then runs on the processor; or ours first, with a model of it at
    work, which goes on."""
    form = forms("qwen3, tied")
    variables = {"TERN_GPU_SELF_TEST": "0"}
    answers = []
    for unload in ("CUDA", ""):
        folder = tmp_path / (unload or "none")
        folder.mkdir()
        cuda = FakeCuda(folder)
        commands = running.first_commands(cuda.host())
        if unload:
            commands += [
                *Load(form.ours).commands("g"),
                "greedy G 3 5 6",
                "free G",
                "free g",
                f"unload {unload}",
            ]
        commands += ["devices", *Load(form.ours, n_gpu_layers=0).commands("m"), "greedy M 8 5 6"]
        outcome = running.run(cuda.host(), commands, variables=variables)
        assert (["CUDA0"] in outcome.after("device")) == (not unload)
        answers.append(outcome.after("tokens")[-1])
    assert answers[0] == answers[1]
    folder = tmp_path / "ours"
    folder.mkdir()
    cuda = FakeCuda(folder)
    commands = [*running.first_commands(cuda.host()), *Load(form.ours).commands("m"), "greedy M 3 5 6"]
    commands += ["unload TERN", "greedy M 3 5 6", "free M", "free m"]
    outcome = running.run(cuda.host(), commands, variables=variables)
    assert outcome.of_plugin == [] and len(outcome.after("tokens")) == 2
    assert not cuda.read().left()
