"""Layers of our models on a stock RPC server, which has no plug-in and knows nothing of us."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import compare_logits
from gpu import hosts, rpc, running
from gpu.models import TOKENS, Forms
from gpu.running import Load
from llama_server import ROOT
from reference import formats as ref
from rotated_files import RECIPES

MODELS = {
    "types": replace(RECIPES["qwen3"], formats=(ref.PQ2_0, ref.TQ1_0, ref.PTQ1_0, ref.TQ2_0)),
    "qwen3, tied": RECIPES["qwen3, tied"],
    "qwen35": RECIPES["qwen35"],
    "qwen3moe": RECIPES["qwen3moe"],
}
#: nats between what the weights mean and ours, where activations go to int8, as they do on every processor.
MAX_KL = 1e-3

MakeForms = Callable[[str], Forms]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> MakeForms:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: Forms(folder, name, MODELS[name], rotated=name in RECIPES)


@pytest.mark.parametrize("name", MODELS)
def test_layers_on_a_server_without_the_plug_in(name: str, forms: MakeForms, tmp_path: Path) -> None:
    form, host = forms(name), hosts.pinned()
    [truth] = running.evaluate(host, Load(form.f16, 0), tokens=TOKENS, n_prompt=form.n_prompt, plugin=False)
    with rpc.serving() as server:
        commands = rpc.first_commands(server.endpoint)
        contexts = []
        for layers in (99, 2):
            contexts.append(f"N{layers}")
            commands += Load(form.ours, layers).commands(f"n{layers}")
            commands += running.evaluation_commands(contexts[-1], tmp_path, TOKENS, form.n_prompt)
        outcome = running.run(host, commands)
    assert "RPC0" in outcome.said and not [line for line in outcome.of_plugin if "left alone" in line]
    found = running.read_evaluations(outcome, contexts, tmp_path, len(TOKENS), form.n_prompt)
    for evaluation in found:
        agreement = compare_logits.compare(truth.logits, evaluation.logits)
        print(evaluation.splits[:2], agreement)
        assert agreement.mean_kl <= MAX_KL


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen35"])
def test_the_text_of_a_trained_model(name: str) -> None:
    """With half its layers there it says what it says here."""
    model, host = ROOT / "models" / name / f"{name}-ptq1_0.gguf", hosts.pinned()
    generate = "greedy M 24 100 200 300 7"
    here = running.run(host, [*running.first_commands(host), *Load(model).commands("m"), generate])
    with rpc.serving() as server:
        load = Load(model, 3).commands("m")
        there = running.run(host, [*rpc.first_commands(server.endpoint), *load, generate])
    assert there.numbers("tokens") == here.numbers("tokens")


def test_a_server_that_dies_in_the_middle_of_an_answer() -> None:
    """llama.cpp ends with its own line, at once."""
    model, host = ROOT / "models" / "tiny-qwen3" / "tiny-qwen3-ptq1_0.gguf", hosts.pinned()
    with rpc.serving() as server:
        commands = [*rpc.first_commands(server.endpoint), *Load(model).commands("m"), "greedy M 200 100 7"]
        process = subprocess.Popen(
            [running.driver(), host.libllama],
            env=host.environment(plugin=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n".join(commands) + "\n")
        process.stdin.close()
        process.stdin = None
        first = process.stdout.readline()
        server.kill()
        _, said = process.communicate(timeout=running.SECONDS)
    assert first.startswith("token "), said
    assert process.returncode != 0
    lines = [line for line in said.splitlines() if "RPC server" in line]
    assert len(lines) == 1, said[-2000:]
