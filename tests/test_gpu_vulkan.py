"""Our types and rotations on stock Vulkan backends, of two released hosts, which a software driver runs.

The truth is a file with the same weights in F16, or F32, on the same device, without the plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compare_logits
import rotated_files
from ggml_tern.convert.pipeline import convert
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import unrotate
from ggml_tern.tensors.types import F16, PTQ1_0
from gpu import hosts, running
from gpu.hosts import Host
from gpu.models import LARGE_BLOCKS, TOKENS, Forms
from gpu.running import Evaluation, Load
from llama_server import ROOT
from reference import formats as ref
from rotated_files import RECIPES
from transformers_models import float_tables, plain_logits, plain_model, transformers_dir

#: nats between the decoded weights and ours. On these devices activations stay floats; our own kernels take
#: int8.
MAX_KL, MAX_KL_OF_INT8 = 1e-4, 1e-3

HOSTS = {"PyPI": hosts.vulkan_of_pypi, "npm": hosts.vulkan_of_npm}
ROTATED = RECIPES | {"blocks of 1024": LARGE_BLOCKS}
TYPES = {fmt.name: fmt for fmt in (ref.PQ2_0, ref.PTQ1_0, ref.TQ1_0, ref.TQ2_0)}

#: Tokens of the trained models, which have one vocabulary.
PROMPT = [100, 200, 300, 7]

MakeForms = Callable[[str], Forms]


def trained(name: str) -> Path:
    """Rotated, half a megabyte, writes English."""
    return ROOT / "models" / name / f"{name}-ptq1_0.gguf"


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> MakeForms:
    """Models by the name of a recipe, for a rotated one, or of a type; made when they are first asked for."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Forms]()

    def forms(name: str) -> Forms:
        if name not in made:
            recipe = ROTATED.get(name) or replace(RECIPES["qwen3"], formats=(TYPES[name],))
            made[name] = Forms(folder, name, recipe, rotated=name in ROTATED)
        return made[name]

    return forms


def evaluate(
    host: Host,
    form: Forms,
    *loads: Load,
    plugin: bool = True,
    variables: Mapping[str, str] | None = None,
) -> list[Evaluation]:
    n_prompt = form.n_prompt
    return running.evaluate(
        host, *loads, tokens=TOKENS, n_prompt=n_prompt, plugin=plugin, variables=variables
    )


#: For the second host, whose shaders are others and take their time to compile.
SOME = ("PQ2_0", "qwen3, tied", "qwen35", "qwen3moe", "blocks of 1024")


@pytest.mark.parametrize(
    ("host", "name"), [("PyPI", name) for name in (*TYPES, *ROTATED)] + [("npm", name) for name in SOME]
)
def test_what_the_weights_mean(host: str, name: str, forms: MakeForms) -> None:
    """Logits of a prompt and of what follows, and the graph in as many pieces as with Q2_0."""
    form = forms(name)
    ours, stock = evaluate(HOSTS[host](), form, Load(form.ours), Load(form.q2_0))
    [truth] = evaluate(HOSTS[host](), form, Load(form.truth), plugin=False)
    agreement = compare_logits.compare(truth.logits, ours.logits)
    print(agreement)
    assert agreement.mean_kl <= MAX_KL
    assert ours.splits == stock.splits
    if form.rotated:
        # Without their rotation the same weights are another model.
        assert compare_logits.compare(truth.logits, stock.logits).mean_kl > 0.1
    elif name in ("PQ2_0", "PTQ1_0"):
        # For TQ1_0 and TQ2_0, Vulkan has kernels of its own.
        assert np.array_equal(ours.logits, stock.logits)


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen35", "qwen3moe"])
def test_layers_that_stay_on_the_processor(name: str, forms: MakeForms) -> None:
    """Their products are ours, whose activations are int8."""
    form = forms(name)
    loads = [Load(form.ours, layers) for layers in (0, 1, 2)]
    # Sent by name into the buffer that knows nothing of us, a matrix is fetched from there for each product.
    loads += [Load(form.ours, on_cpu="ffn_down"), Load(form.ours, on_gpu="attn_output")]
    [truth] = evaluate(hosts.vulkan_of_pypi(), form, Load(form.f16), plugin=False)
    for load, found in zip(loads, evaluate(hosts.vulkan_of_pypi(), form, *loads), strict=True):
        agreement = compare_logits.compare(truth.logits, found.logits)
        print(load.n_gpu_layers, load.on_cpu, load.on_gpu, found.splits, agreement)
        assert agreement.mean_kl <= MAX_KL_OF_INT8


@pytest.mark.parametrize(("flash_attn", "kv_type"), [(0, running.F16), (1, running.Q8_0)])
def test_kv_caches(flash_attn: int, kv_type: int, forms: MakeForms) -> None:
    form = forms("qwen3, tied")
    ways: dict[str, Any] = {"flash_attn": flash_attn, "type_k": kv_type, "type_v": kv_type}
    [truth] = evaluate(hosts.vulkan_of_pypi(), form, Load(form.f16, **ways), plugin=False)
    [ours] = evaluate(hosts.vulkan_of_pypi(), form, Load(form.ours, **ways))
    agreement = compare_logits.compare(truth.logits, ours.logits)
    print(agreement)
    assert agreement.mean_kl <= MAX_KL


def test_two_models_and_loading_again(forms: MakeForms, tmp_path: Path) -> None:
    """What a model computes does not depend on what else is there, or was."""
    host, one, other = hosts.vulkan_of_pypi(), forms("qwen3, tied"), forms("qwen35")
    alone = [evaluate(host, form, Load(form.ours))[0] for form in (one, other)]
    commands = running.first_commands(host)
    for form, name in ((one, "a"), (other, "b")):
        commands += Load(form.ours).commands(name)
    for line in zip(
        *(running.evaluation_commands(context, tmp_path, TOKENS, one.n_prompt) for context in "AB"),
        strict=True,
    ):
        commands += line
    commands += ["free A", "free a", *Load(one.ours).commands("c"), "free B", "free b"]
    commands += running.evaluation_commands("C", tmp_path, TOKENS, one.n_prompt)
    outcome = running.run(host, commands)
    a, b, c = running.read_evaluations(outcome, "ABC", tmp_path, len(TOKENS), one.n_prompt)
    for found, expected in ((a, alone[0]), (b, alone[1]), (c, alone[0])):
        assert np.array_equal(found.logits, expected.logits)


def test_lora_on_top(forms: MakeForms, tmp_path: Path) -> None:
    form = forms("qwen3")
    lora = rotated_files.write_lora(tmp_path / "lora.gguf", form.model, np.random.default_rng(5))
    host = hosts.vulkan_of_pypi()
    [truth] = evaluate(host, form, Load(form.f16, lora=lora), plugin=False)
    without, adapted = evaluate(host, form, Load(form.ours), Load(form.ours, lora=lora))
    assert compare_logits.compare(truth.logits, without.logits).mean_kl > 0.05
    agreement = compare_logits.compare(truth.logits, adapted.logits)
    print(agreement)
    assert agreement.mean_kl <= MAX_KL


def test_gates_of_squared_relu(tmp_path: Path) -> None:
    """What transformers computes; the gates as they are for SiLU would be another model."""
    directory = transformers_dir(tmp_path / "hf", "bitnet", "squared ReLU", is_ternary=True)
    path = tmp_path / "bitnet.gguf"
    convert(directory, path, float_tables("bitnet", "squared ReLU", PTQ1_0))
    tokens = [4 + token % 396 for token in TOKENS]
    [found] = running.evaluate(hosts.vulkan_of_pypi(), Load(path), tokens=tokens, n_prompt=32)
    agreement = compare_logits.compare(plain_logits(plain_model(directory), tokens), found.logits)
    print(agreement)
    # Not the same device's arithmetic, and squares are large.
    assert agreement.mean_kl <= MAX_KL_OF_INT8
    # Its head is the embedding, which llama.cpp keeps on the processor for this architecture.
    assert set(found.splits) == {3}


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen35"])
def test_the_text_of_a_trained_model(name: str, tmp_path: Path) -> None:
    model, host = trained(name), hosts.vulkan_of_pypi()
    unrotate(GGUFSource(model), plain := tmp_path / "plain.gguf", F16.id)
    generate = f"greedy M 48 {' '.join(map(str, PROMPT))}"
    [expected], [found] = (
        running.run(host, [*running.first_commands(host), *Load(path).commands("m"), generate], plugin).after(
            "tokens"
        )
        for path, plugin in ((plain, False), (model, True))
    )
    assert found == expected and len(set(found)) > 10


def test_a_gpu_that_is_to_be_left_alone(forms: MakeForms) -> None:
    """TERN_GPU=0: its own types as ever, ours on the processor, and nothing wrong."""
    form, host = forms("qwen3, tied"), hosts.vulkan_of_pypi()
    [truth] = evaluate(host, form, Load(form.f16), plugin=False)
    [found] = evaluate(host, form, Load(form.ours), variables={"TERN_GPU": "0"})
    assert compare_logits.compare(truth.logits, found.logits).mean_kl <= MAX_KL_OF_INT8
    assert min(found.splits) > 2
