"""The real model directories: transformers reads them, they make sense, and ternconv gets back what they came
from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compare_logits
import make_hf_dir
from convert_models import mixed_lines, tokens_in_llama_cpp
from ggml_tern import _core
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.tensors.types import Q8_0

F32Array = npt.NDArray[np.float32]

#: Keys whose values a conversion of the made directory cannot or need not repeat, and why.
DIFFERENT = {
    # Names of the original repository, which the packages do not carry on.
    "general.name",
    "general.basename",
    "general.organization",
    "general.finetune",
    # Q8_0 here, Q4_1 and Q4_K there.
    "general.file_type",
    # Added tokens are matched before scores count: any low value does.
    "tokenizer.ggml.scores",
    # llama.cpp's default, written out.
    "gemma3.rope.freq_base_swa",
}


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> tuple[str, Path, Path]:
    """(name, directory, original GGUF), made into the cache at the first use on a machine."""
    name: str = request.param
    return name, make_hf_dir.make(name), make_hf_dir.original_gguf(name)


@pytest.fixture(scope="module")
def output(model: tuple[str, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "q8_0.gguf"
    convert(model[1], path, TypeChoice(Q8_0, Q8_0))
    return path


def some_rows(path: Path, tensor: dict[str, Any], data_offset: int) -> F32Array:
    """The first 200 rows of a tensor, decoded."""
    *outer, n_in = reversed(tensor["shape"])
    kind = gguf.GGMLQuantizationType(tensor["type"])
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    n_rows = min(200, math.prod(outer))
    start = data_offset + tensor["offset"]
    data = np.memmap(path, np.uint8, "r", start, (n_rows, n_in // block * nbytes))
    values = data.view(np.float32) if tensor["type"] == 0 else gguf.quants.dequantize(data, kind)
    return values.astype(np.float32)


def test_the_original_comes_back(model: tuple[str, Path, Path], output: Path) -> None:
    original, ours = (_core.read_gguf_header(str(path)) for path in (model[2], output))

    values, expected = ours["metadata"], original["metadata"]
    different = {
        key
        for key in values.keys() | expected.keys()
        if not np.array_equal(values.get(key), expected.get(key))
    }
    assert different <= DIFFERENT
    if "tokenizer.ggml.scores" in different:
        types = np.array(values["tokenizer.ggml.token_type"])
        ordinary = (types == gguf.TokenType.NORMAL) | (types == gguf.TokenType.BYTE)
        scores = [np.array(found["tokenizer.ggml.scores"])[ordinary] for found in (values, expected)]
        assert np.array_equal(*scores) and ordinary.sum() > 200_000

    sources = {tensor["name"]: tensor for tensor in original["tensors"]}
    assert {tensor["name"] for tensor in ours["tensors"]} == set(sources)
    for tensor in ours["tensors"]:
        source = sources[tensor["name"]]
        assert tensor["shape"] == source["shape"]
        got = some_rows(output, tensor, ours["data_offset"])
        want = some_rows(model[2], source, original["data_offset"])
        # bfloat16 and Q8_0 each cost a few 1e-5 of the energy; a wrong row order costs all of it.
        assert np.sum(np.square(got - want)) <= 1e-4 * np.sum(np.square(want)), tensor["name"]


def test_token_ids_agree_everywhere(model: tuple[str, Path, Path], output: Path) -> None:
    """transformers, llama.cpp with the original file, and llama.cpp with ours."""
    _, directory, original = model
    lines = [
        *mixed_lines(470),
        *(line + f"<|im_start|>{n}<start_of_turn>" for n, line in enumerate(mixed_lines(30))),
    ]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = [tokenizer(line).input_ids for line in lines]
    assert tokens_in_llama_cpp(original, lines) == expected
    assert tokens_in_llama_cpp(output, lines) == expected


def test_it_talks_sense_and_llama_cpp_agrees(model: tuple[str, Path, Path], output: Path) -> None:
    name, directory, _ = model
    tokenizer = AutoTokenizer.from_pretrained(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt, answer = {
        "smollm2-135m": ("The capital of France is", "Paris"),
        "gemma3-270m": ("Water boils at", "100 degrees Celsius"),
    }[name]
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        written = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )[0]
        logits = reference(written[None]).logits[0].double()
    assert answer in tokenizer.decode(written)

    # On the plug-in's device, where llama.cpp multiplies as on every processor. With Q8_0 on its own CPU list
    # stock llama.cpp crashes on some that have AMX.
    serving = compare_logits.Serving(plugin=True, n_gpu_layers=99)
    served = torch.tensor(compare_logits.host_logits(output, written.numpy(), serving)).double()
    # Q8_0 in weights and activations costs some thousandths of a nat.
    log_p, log_q = logits.log_softmax(-1), served.log_softmax(-1)
    assert (log_p.exp() * (log_p - log_q)).sum(-1).mean() < 0.02
    assert (logits.argmax(-1) == served.argmax(-1)).double().mean() > 0.8


def test_chat_template(model: tuple[str, Path, Path]) -> None:
    name, directory, _ = model
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if name == "gemma3-270m":
        assert tokenizer.chat_template is None
        return
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(click.ClickException, match="holds something else"):
        make_hf_dir.make("smollm2-135m", tmp_path / "other")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make_hf_dir, "write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        make_hf_dir.make("smollm2-135m", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
