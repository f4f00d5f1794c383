"""Small Hugging Face model directories for the converter's tests: random weights, and tokenizers trained on
the spot."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama
from safetensors.numpy import save_file
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ggml_tern.convert.model.vocab import Vocab

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
F32Array = npt.NDArray[np.float32]

#: Enough text for tokenizers with merges worth the name: words, digits, code, several scripts, runs of
#: spaces.
TEXT = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back; it's 1234567 miles away.",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # a comment\n\n\n        indented\tand\ttabbed",
    "我想在apple工作1314151天～ 日本語のテキスト, 한국어 문장, Это пример текста, नमस्ते दुनिया",
    "naïve café, façade; 3.14159 + 2.71828 = 5.85987 (approximately)   triple   spaces 🚀🦙 ✅",
] * 4

# As they stand in the tokenizer.json of Llama 3, Qwen2, Qwen3.5, GPT-4, DeepSeek V3, Seed-Coder, Mistral Nemo
# and GPT-4o.
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_REGEX = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK3_REGEX = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


def mistral_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Mistral without a sliding window, which is null as in the released ones."""
    config = llama_config(architectures=["MistralForCausalLM"], model_type="mistral") | {
        "sliding_window": None
    }
    return config | changes


def qwen2_config(**changes: Any) -> dict[str, Any]:
    return llama_config(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | changes)


def qwen3_config(**changes: Any) -> dict[str, Any]:
    return llama_config(
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64} | changes
    )


def qwen3_moe_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Qwen3 with eight experts in every block."""
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    return qwen3_config(**moe | changes)


def bitnet_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a BitNet; with the activation of llama.cpp's graph."""
    return llama_config(**{"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"} | changes)


def qwen35_config(**changes: Any) -> dict[str, Any]:
    """The config.json of a Qwen3.5 text model of four blocks, the last of which has full attention."""
    qwen35 = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    }
    return llama_config(**qwen35 | changes)


def qwen35_mtp_tensors(config: dict[str, Any]) -> Tensors:
    """Zeros in the shapes of a Qwen3.5 text model with its MTP head."""
    n_embd, n_ff, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n_q, n_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    n_value_heads, linear_dim = config["linear_num_value_heads"], config["linear_key_head_dim"]
    n_value = n_value_heads * linear_dim
    n_qkv = 2 * config["linear_num_key_heads"] * linear_dim + n_value
    attention = {
        "self_attn.q_proj.weight": (2 * n_q, n_embd),
        "self_attn.k_proj.weight": (n_kv, n_embd),
        "self_attn.v_proj.weight": (n_kv, n_embd),
        "self_attn.o_proj.weight": (n_embd, n_q),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    delta_net = {
        "linear_attn.in_proj_qkv.weight": (n_qkv, n_embd),
        "linear_attn.in_proj_z.weight": (n_value, n_embd),
        "linear_attn.in_proj_a.weight": (n_value_heads, n_embd),
        "linear_attn.in_proj_b.weight": (n_value_heads, n_embd),
        "linear_attn.conv1d.weight": (n_qkv, 1, 4),
        "linear_attn.dt_bias": (n_value_heads,),
        "linear_attn.A_log": (n_value_heads,),
        "linear_attn.norm.weight": (linear_dim,),
        "linear_attn.out_proj.weight": (n_embd, n_value),
    }
    mlp = {
        "input_layernorm.weight": (n_embd,),
        "post_attention_layernorm.weight": (n_embd,),
        "mlp.gate_proj.weight": (n_ff, n_embd),
        "mlp.up_proj.weight": (n_ff, n_embd),
        "mlp.down_proj.weight": (n_embd, n_ff),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], n_embd),
        "model.norm.weight": (n_embd,),
        "mtp.fc.weight": (n_embd, 2 * n_embd),
        "mtp.norm.weight": (n_embd,),
        "mtp.pre_fc_norm_embedding.weight": (n_embd,),
        "mtp.pre_fc_norm_hidden.weight": (n_embd,),
    }
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in (attention | mlp).items()}
    for block in range(4):
        kind = attention if block == 3 else delta_net
        shapes |= {f"model.layers.{block}.{name}": shape for name, shape in (kind | mlp).items()}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


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
    text: Sequence[str] = TEXT,
) -> Tokenizer:
    """A byte-level BPE tokenizer trained on some text; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def gpt2_steps() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def smollm_steps() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_steps()])


def split_steps(*steps: str | pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Splits by regular expressions, and by other steps, before text becomes bytes."""
    return pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step
                for step in steps
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def falcon_steps() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            gpt2_steps(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )


#: The pre-tokenizers of released models as their tokenizer.json has them, by the name that llama.cpp has for
#: each (and a remark), with the model's ignore_merges.
PRE_TOKENIZERS: dict[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool]] = {
    "gpt-2": (gpt2_steps, False),
    "smollm": (smollm_steps, False),
    "llama-bpe": (lambda: split_steps(LLAMA3_REGEX), True),
    "dbrx": (lambda: split_steps(LLAMA3_REGEX), False),
    "dbrx (cl100k)": (lambda: split_steps(CL100K_REGEX), False),
    "qwen2": (lambda: split_steps(QWEN2_REGEX), False),
    "qwen35": (lambda: split_steps(QWEN35_REGEX), False),
    "falcon": (falcon_steps, False),
    "deepseek-v3": (lambda: split_steps(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3_REGEX), False),
    "seed-coder": (lambda: split_steps(SEED_CODER_REGEX), False),
    "minicpm5": (lambda: split_steps(r"\p{N}{1,3}", LLAMA3_REGEX.replace("{1,3}", "+")), True),
    "tekken": (lambda: split_steps(TEKKEN_REGEX), True),
    "gpt-4o": (lambda: split_steps(GPT4O_REGEX), False),
}


def trained_tokenizer(name: str) -> Tokenizer:
    """A byte-level tokenizer with one of PRE_TOKENIZERS and 4,000 tokens, trained on text like that of
    mixed_lines: its words are those that the pre-tokenizer makes. Where merges are ignored, some tokens have
    none."""
    steps, ignore_merges = PRE_TOKENIZERS[name]
    tokenizer = byte_level_tokenizer(
        steps(),
        ignore_merges=ignore_merges,
        vocab_size=4000,
        text=[*TEXT, *PIECES, *mixed_lines(3000, (), seed=1)],
    )
    if ignore_merges:
        parsed = json.loads(tokenizer.to_str())
        parsed["model"]["merges"] = [merge for n, merge in enumerate(parsed["model"]["merges"]) if n % 5]
        tokenizer = Tokenizer.from_str(json.dumps(parsed))
    return tokenizer


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
    tokens: list[str], merges: list[tuple[str, str]], *, space_prefix: bool = False, bos: str = "<bos>"
) -> Tokenizer:
    """The tokenizer.json that transformers makes of a SentencePiece BPE model."""
    vocab = {text: token for token, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
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


SPACES = [
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\u00a0",
    "\u3000",
    " \t ",
    "\r\n\r\n",
    "\t\t\t",
]
SPECIAL = ["<|bos|>", "<|eos|>", "<turn>", "<bos>", "<eos>"]
#: What tokenizers trip over: sequences joined by U+200D, flags, skin tones, keycaps; combining marks, alone
#: and in runs; right-to-left text with vowel points and marks of direction; contractions; code; long runs.
PIECES = [
    *["👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "👍🏽", "🇯🇵🇧🇷", "1️⃣", "🧑🏿\u200d🚀", "❤️\u200d🔥"],
    *[
        "e\u0301te\u0301",
        "n\u0303",
        "Z\u0351\u036b\u0343a\u0328\u0323l\u0334g\u0321o",
        "\u0301",
        "क्षि",
        "กำลัง",
        "각",
    ],
    *["שָׁלוֹם עולם", "مَرْحَبًا بالعالم", "\u200fabc\u200e", "اردو ۱۲۳", "١٢٣٤٥", "Ⅻ½²", "𝟘𝟙𝒳"],
    *["don't", "WE'LL", "'tis", "I'M", "it's", "o'clock", "''s", "l'été"],
    *[
        "for (int i = 0; i < n; ++i) {\n\t\tx[i] += y*2;\n}",
        "#include <stdio.h>",
        "a->b::c()",
        "$HOME/.x",
        "</div>\n\n\n",
    ],
    *[
        "import os\n\n\ndef f():\n        return 0x1F\n",
        "SELECT * FROM t WHERE a='b';",
        "\\\\n",
        "\ufeffx",
        "--- ###",
        "…—“”",
    ],
    *[
        " " * 7,
        " " * 31,
        " " * 70,
        "\n" * 5,
        "\t" * 4,
        "\n \n  \n",
        "   \r\n   ",
        "12345678901234567890",
        "3.14e-10",
    ],
]


def mixed_lines(count: int, special: Sequence[str] = SPECIAL, seed: int = 7) -> list[str]:
    """Lines of words, digits, code, scripts, emoji, runs of spaces, special tokens and random characters."""
    rng = random.Random(seed)
    words = [word for text in TEXT[:4] for word in text.split()]
    ranges = [(32, 126), (0xA1, 0x24F), (0x370, 0x5FF), (0x900, 0x97F), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(words))
            elif kind < 0.65:
                parts.append(rng.choice(PIECES))
            elif kind < 0.75:
                parts.append("".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 8))))
            elif kind < 0.82:
                parts.append(str(rng.randint(0, 10 ** rng.randint(1, 12))))
            elif kind < 0.88 and special:
                parts.append(rng.choice(special))
            if kind > 0.1:
                parts.append(rng.choice(SPACES))
        lines.append("".join(parts))
    return lines


def write_vocab_gguf(vocab: Vocab, path: Path) -> Path:
    """A file with a vocabulary, and no more beside it than llama.cpp needs to load that alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab.add_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokens_in_llama_cpp(path: Path, lines: list[str]) -> list[list[int]]:
    llama = Llama(str(path), vocab_only=True, verbose=False)
    ids = [llama.tokenize(line.encode(), add_bos=True, special=True) for line in lines]
    llama.close()
    return ids


# ---- ternary models ----

Scales = Callable[[np.random.Generator, tuple[int, int]], F32Array]


def per_group(size: int) -> Scales:
    """Scales for groups of `size` weights, fp16 numbers."""

    def scales(rng: np.random.Generator, shape: tuple[int, int]) -> F32Array:
        groups = rng.uniform(0.01, 0.1, (shape[0], shape[1] // size)).astype(np.float16)
        return np.repeat(groups.astype(np.float32), size, axis=1)

    return scales


def per_tensor(value: float) -> Scales:
    return lambda rng, shape: np.full(shape, value, np.float32)


def ternary_dir(
    directory: Path, scales: Scales, *, embedding: bool = False, seed: int = 1, **changes: Any
) -> Path:
    """A Llama whose matrices are ternary with these scales; the embedding too if asked."""
    model = llama_dir(directory, **changes)
    config = llama_config(**changes)
    tensors = random_tensors(config, seed)
    rng = np.random.default_rng(seed)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (embedding or "embed" not in name):
            trits = rng.integers(-1, 2, tensor.shape).astype(np.float32)
            tensors[name] = trits * scales(rng, tensor.shape)
    write_weights(model, tensors)
    return model
