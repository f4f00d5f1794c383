"""Converted files in stock llama.cpp: its logits are those of transformers, its token ids those of the
tokenizer.

Weights are kept in float32 here, so that whatever differs is the conversion's fault: row order, norms, rotary
parameters, sliding windows, heads, biases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GemmaTokenizer, LlamaTokenizer

from convert_models import (
    LLAMA3_REGEX,
    QWEN2_REGEX,
    SPECIAL,
    byte_level_tokenizer,
    gemma3_dir,
    gpt2_steps,
    llama_config,
    llama_dir,
    mixed_lines,
    random_tensors,
    sentencepiece_model,
    smollm_steps,
    split_steps,
    tokens_in_llama_cpp,
    write_byte_level,
    write_json,
    write_sentencepiece,
    write_weights,
)
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.ternarize import F32, TypeChoice
from llama_cpp import Llama

N_TOKENS = 70


def served_logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    # A float32 KV cache and no flash attention, which would round to float16.
    llama = Llama(
        str(path), n_ctx=128, n_threads=2, n_gpu_layers=0, logits_all=True, type_k=0, type_v=0,
        flash_attn=False, verbose=False,
    )  # fmt: skip
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)], np.float32)
    llama.close()
    return logits


def plain_logits(directory: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama_dir, {}),
        (llama_dir, {"num_key_value_heads": 1, "head_dim": 64, "rope_theta": 500000.0}),
        (llama_dir, {"tie_word_embeddings": False, "attention_bias": True}),
        (llama_dir, {"rope_scaling": LLAMA3_SCALING}),
        (llama_dir, {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        (llama_dir, {"rope_scaling": YARN_SCALING}),
        (gemma3_dir, {}),
        (gemma3_dir, {"tie_word_embeddings": False, "final_logit_softcapping": 5.0}),
        (gemma3_dir, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0}),
        (gemma3_dir, {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]}),
        (gemma3_dir, {"layer_types": ["full_attention"] * 7}),
    ],
    ids=lambda value: value.__name__.removesuffix("_dir") if callable(value) else ",".join(value) or "plain",
)
def test_logits_are_those_of_transformers(tmp_path: Path, make: Any, changes: dict[str, Any]) -> None:
    directory = make(tmp_path / "hf", **changes)
    output = tmp_path / "out.gguf"
    convert(
        directory, output, TypeChoice(F32, F32, None if changes.get("tie_word_embeddings", True) else F32)
    )
    # More positions than the sliding window of 32.
    tokens = np.random.default_rng(1).integers(4, 400, N_TOKENS).tolist()
    expected = plain_logits(directory, tokens)
    # float32 sums in another order; a wrong row order, norm or angle is off by the size of the logits.
    np.testing.assert_allclose(served_logits(output, tokens), expected, atol=2e-3 * float(expected.std()))


# ---- token ids ----


def converted(directory: Path) -> Path:
    """The GGUF of a model directory that has only its tokenizer yet."""
    config = llama_config(num_hidden_layers=1)
    write_json(directory / "config.json", config)
    write_weights(directory, random_tensors(config))
    convert(directory, directory / "out.gguf", TypeChoice(F32, F32))
    return directory / "out.gguf"


@pytest.mark.parametrize(
    ("steps", "ignore_merges"),
    [
        (gpt2_steps(), False),
        (smollm_steps(), False),
        (split_steps(LLAMA3_REGEX), True),
        (split_steps(LLAMA3_REGEX), False),
        (split_steps(QWEN2_REGEX), False),
    ],
    ids=["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2"],
)
def test_ids_of_byte_level_tokenizers(tmp_path: Path, steps: Any, ignore_merges: bool) -> None:
    tokenizer = byte_level_tokenizer(steps, ignore_merges=ignore_merges)
    write_byte_level(tmp_path, tokenizer, add_bos_token=False)
    lines = mixed_lines(400)
    expected = [tokenizer.encode(line).ids for line in lines]
    assert tokens_in_llama_cpp(converted(tmp_path), lines) == expected


def test_ids_of_a_sentencepiece_model(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, sentencepiece_model())
    pieces = SentencePieceProcessor(model_proto=sentencepiece_model())
    # SentencePiece does not look for control tokens in text, llama.cpp does.
    lines = [line for line in mixed_lines(400) if "<bos>" not in line and "<eos>" not in line]
    assert len(lines) > 200
    expected = [[pieces.bos_id(), *pieces.encode(line)] for line in lines]
    assert tokens_in_llama_cpp(converted(tmp_path), lines) == expected


@pytest.mark.parametrize("kind", [GemmaTokenizer, LlamaTokenizer])
def test_ids_of_what_transformers_makes_of_a_sentencepiece_model(tmp_path: Path, kind: Any) -> None:
    """tokenizer.json alone, without and with a space before the text."""
    write_sentencepiece(tmp_path, sentencepiece_model())
    kind.from_pretrained(tmp_path).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lines = mixed_lines(600)
    if kind is LlamaTokenizer:
        # llama.cpp puts a space after every special token too, and before text that starts with one.
        whole = [*SPECIAL, "  "]
        lines = [line for line in lines if line[0] != " " and not any(token in line for token in whole)]
        assert len(lines) > 50
    expected = [tokenizer.encode(line).ids for line in lines]
    assert tokens_in_llama_cpp(converted(tmp_path), lines) == expected
