"""Small Hugging Face model directories for the converter's tests: random weights, and tokenizers trained on
the spot."""

from __future__ import annotations

import functools
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llama_cpp import Llama

Array = npt.NDArray[Any]
Tensors = dict[str, Array]

#: Enough text for tokenizers with merges worth the name: words, digits, code, several scripts, runs of
#: spaces.
TEXT = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back; it's 1234567 miles away.",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # a comment\n\n\n        indented\tand\ttabbed",
    "我想在apple工作1314151天～ 日本語のテキスト, 한국어 문장, Это пример текста, नमस्ते दुनिया",
    "naïve café, façade; 3.14159 + 2.71828 = 5.85987 (approximately)   triple   spaces 🚀🦙 ✅",
] * 4

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Llama of two blocks, 128 wide. A change to None takes the key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": 512,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def gemma3_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Gemma 3 text model of seven blocks, 128 wide: both kinds of attention occur."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 512,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def random_tensors(config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Tensors:
    """The checkpoint of a configuration: what transformers calls each tensor, with random values."""
    rng = np.random.default_rng(seed)
    n_embd, n_ff = config["hidden_size"], config["intermediate_size"]
    n_heads = config["num_attention_heads"]
    n_kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim", n_embd // n_heads)
    gemma = config["architectures"][0].startswith("Gemma3")

    def matrix(n_out: int, n_in: int) -> Array:
        values: Array = rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)
        return values.astype(dtype)

    def norm(size: int) -> Array:
        centre = 0.0 if gemma else 1.0
        values: Array = centre + 0.1 * rng.standard_normal(size)
        return values.astype(dtype)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], n_embd),
        "model.norm.weight": norm(n_embd),
    }
    if not config.get("tie_word_embeddings", gemma):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], n_embd)
    for block in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{block}."
        names = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        tensors |= {f"{prefix}{name}.weight": norm(n_embd) for name in names}
        if gemma:
            tensors |= {f"{prefix}self_attn.{name}_norm.weight": norm(head_dim) for name in "qk"}
        for name, n_out, n_in in (
            ("self_attn.q_proj", n_heads * head_dim, n_embd),
            ("self_attn.k_proj", n_kv_heads * head_dim, n_embd),
            ("self_attn.v_proj", n_kv_heads * head_dim, n_embd),
            ("self_attn.o_proj", n_embd, n_heads * head_dim),
            ("mlp.gate_proj", n_ff, n_embd),
            ("mlp.up_proj", n_ff, n_embd),
            ("mlp.down_proj", n_embd, n_ff),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(n_out, n_in)
            if config.get("attention_bias") and "self_attn" in name:
                tensors[f"{prefix}{name}.bias"] = matrix(n_out, 1)[:, 0]
    return tensors


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_weights(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """model.safetensors, or an index and `shards` files among which the tensors are dealt out."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def byte_level_tokenizer(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    special: tuple[str, ...] = ("<|bos|>", "<|eos|>"),
    ignore_merges: bool = False,
    vocab_size: int = 500,
) -> Tokenizer:
    """A byte-level BPE tokenizer trained on TEXT; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def gpt2_steps() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def smollm_steps() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_steps()])


def split_steps(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def write_byte_level(directory: Path, tokenizer: Tokenizer, **config: Any) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json", {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **config}
    )


@functools.cache
def sentencepiece_model(kind: str = "bpe", dummy_prefix: bool = False) -> bytes:
    """A SentencePiece model with byte fallback; a BPE model has 480 tokens. `<turn>` and `▁▁` are user
    defined."""
    output = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=output,
        model_type=kind,
        vocab_size=480 if kind == "bpe" else 360,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<turn>", "▁▁"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        bos_piece="<bos>",
        eos_piece="<eos>",
        minloglevel=2,
    )
    return output.getvalue()


def write_sentencepiece(directory: Path, model: bytes, **config: Any) -> None:
    (directory / "tokenizer.model").write_bytes(model)
    write_json(directory / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>", **config})


def character_tokenizer(
    tokens: list[str], merges: list[tuple[str, str]], *, space_prefix: bool = False
) -> Tokenizer:
    """The tokenizer.json that transformers makes of a SentencePiece BPE model."""
    vocab = {text: token for token, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def llama_dir(directory: Path, *, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """A whole Llama model directory with a byte-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = llama_config(**changes)
    write_json(directory / "config.json", config)
    write_weights(directory, random_tensors(config, seed), shards)
    write_byte_level(directory, byte_level_tokenizer(smollm_steps()))
    return directory


def gemma3_dir(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A whole Gemma 3 model directory with a SentencePiece tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = gemma3_config(**changes)
    write_json(directory / "config.json", config)
    write_weights(directory, random_tensors(config, seed))
    write_sentencepiece(directory, sentencepiece_model())
    return directory


SPACES = [" ", "  ", "    ", "\t", "\n", "\n\n", " \n", "\r\n", "\u00a0", "\u3000", " \t "]
SPECIAL = ["<|bos|>", "<|eos|>", "<turn>", "<bos>", "<eos>"]


def mixed_lines(count: int) -> list[str]:
    """Lines of words, digits, code, scripts, emoji, runs of spaces, special tokens and random characters."""
    rng = random.Random(7)
    words = [word for text in TEXT[:4] for word in text.split()]
    ranges = [(32, 126), (0xA1, 0x24F), (0x370, 0x5FF), (0x900, 0x97F), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.6:
                parts.append(rng.choice(words))
            elif kind < 0.7:
                parts.append("".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 8))))
            elif kind < 0.8:
                parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
            elif kind < 0.85:
                parts.append(rng.choice(SPECIAL))
            parts.append(rng.choice(SPACES))
        lines.append("".join(parts))
    return lines


def tokens_in_llama_cpp(path: Path, lines: list[str]) -> list[list[int]]:
    llama = Llama(str(path), vocab_only=True, verbose=False)
    ids = [llama.tokenize(line.encode(), add_bos=True, special=True) for line in lines]
    llama.close()
    return ids
