"""Token ids: a converted tokenizer in stock llama.cpp gives those of the original, on 2,000 lines of mixed
text.

For every pre-tokenizer that ternconv knows there is a vocabulary trained on the spot, with words that only
its way of splitting makes. The vocabularies that come with llama.cpp's source are those of released models;
with the pre-tokenizers that these models have they must first give the ids that llama.cpp's authors recorded
from the original tokenizers. Two models are there whole.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GemmaTokenizer

import make_hf_dir
from convert_models import (
    PRE_TOKENIZERS,
    character_tokenizer,
    mixed_lines,
    sentencepiece_model,
    tokens_in_llama_cpp,
    trained_tokenizer,
    write_byte_level,
    write_json,
    write_sentencepiece,
    write_vocab_gguf,
)
from ggml_tern import _core
from ggml_tern.convert.model.vocab import Vocab, read_vocab
from ggml_tern.convert.read.sentencepiece_model import BPE, Model
from reference import ROOT

N_LINES = 2000


def ids_in_llama_cpp(vocab: Vocab, lines: list[str], folder: Path) -> list[list[int]]:
    """What llama.cpp makes of lines, special tokens and all."""
    return tokens_in_llama_cpp(write_vocab_gguf(vocab, folder / "vocab.gguf"), lines)


def check_ids(got: list[list[int]], expected: list[list[int]], lines: list[str]) -> None:
    different = [(line, one, two) for line, one, two in zip(lines, got, expected, strict=True) if one != two]
    assert not different, f"{len(different)} of {len(lines)} lines, such as {different[0]}"
    # Worth comparing: words, and not bytes alone.
    assert sum(map(len, expected)) < 0.8 * sum(len(line.encode()) for line in lines)


# ---- trained vocabularies ----


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_of_byte_level_tokenizers(tmp_path: Path, name: str) -> None:
    tokenizer = trained_tokenizer(name)
    write_byte_level(tmp_path, tokenizer)
    vocab = read_vocab(tmp_path, tokenizer.get_vocab_size())
    assert vocab.pre == name.split()[0]
    lines = mixed_lines(N_LINES)
    if vocab.notes:
        # llama.cpp's expression tells case apart in ASCII only, and has no marks in words.
        assert name in ("tekken", "gpt-4o") and "ASCII" in vocab.notes[0]
        lines = [line for line in mixed_lines(3 * N_LINES) if not any(map(beyond_ascii_case, line))]
        assert len(lines) > 500
    expected = [tokenizer.encode(line).ids for line in lines]
    check_ids(ids_in_llama_cpp(vocab, lines, tmp_path), expected, lines)


def beyond_ascii_case(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] == "M" or (not char.isascii() and category in ("Lu", "Ll", "Lt", "Lm"))


@pytest.mark.parametrize("merged", ["tokenizer.model", "tokenizer.json"])
def test_ids_of_a_sentencepiece_model(tmp_path: Path, merged: str) -> None:
    """From SentencePiece's own file, and from what transformers makes of it."""
    write_sentencepiece(tmp_path, sentencepiece_model())
    lines = mixed_lines(N_LINES)
    if merged == "tokenizer.json":
        GemmaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        (tmp_path / "tokenizer.model").unlink()
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        expected = [tokenizer.encode(line).ids for line in lines]
    else:
        # SentencePiece does not look for control tokens in text, llama.cpp does.
        lines = [line for line in mixed_lines(2 * N_LINES) if "<bos>" not in line and "<eos>" not in line]
        assert len(lines) > N_LINES
        pieces = SentencePieceProcessor(model_proto=sentencepiece_model())
        expected = [[pieces.bos_id(), *pieces.encode(line)] for line in lines]
    check_ids(ids_in_llama_cpp(read_vocab(tmp_path, 480), lines, tmp_path), expected, lines)


# ---- released vocabularies ----


@functools.cache
def vocabularies() -> Path:
    """The folder with them."""
    command = [sys.executable, str(ROOT / "tools" / "build_llama_cpp.py"), "fetch", "--json"]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Path(json.loads(made.stdout)["source"]) / "models"


@functools.cache
def released(name: str) -> dict[str, Any]:
    """The tokenizer.ggml fields of a vocabulary in llama.cpp's source."""
    metadata = _core.read_gguf_header(vocabularies() / f"ggml-vocab-{name}.gguf")["metadata"]
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


def recorded(name: str) -> list[tuple[str, list[int]]]:
    """Texts with the ids that the model's own tokenizer was seen to give them."""
    path = vocabularies() / f"ggml-vocab-{name}.gguf"
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


#: Vocabulary -> pre-tokenizer, normalizer, and the models that have them.
RELEASED = {
    "llama-bpe": ("llama-bpe", None),  # Llama 3, BitNet b1.58 2B4T
    "qwen2": ("qwen2", normalizers.NFC()),  # Qwen2, Qwen2.5, Qwen3
    "qwen35": ("qwen35", normalizers.NFC()),  # Qwen3.5
    "gpt-neox": ("gpt-2", normalizers.NFC()),  # TriLM
    "starcoder": ("smollm", None),
    "falcon": ("falcon", None),
}
CONTROL, USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)


def released_tokenizer(name: str) -> tuple[Tokenizer, list[str]]:
    """The tokenizer of a released model, and its special tokens."""
    pre, normalizer = RELEASED[name]
    fields = released(name)
    types = fields["token_type"]
    ids = {text: token for token, text in enumerate(fields["tokens"]) if not text.startswith("[PAD")}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    steps, ignore_merges = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = steps()
    special = []
    for token, text in enumerate(fields["tokens"]):
        if types[token] in (CONTROL, USER_DEFINED) and text in ids:
            tokenizer.add_tokens([AddedToken(text, special=types[token] == CONTROL, normalized=False)])
            special.append(text)
    return tokenizer, special


@pytest.mark.parametrize("name", RELEASED)
def test_ids_of_released_vocabularies(tmp_path: Path, name: str) -> None:
    tokenizer, special = released_tokenizer(name)
    if name != "gpt-neox":
        for text, ids in recorded(name):
            # Decomposed letters were recorded without the normalizer.
            if unicodedata.is_normalized("NFC", text):
                assert tokenizer.encode(text).ids == ids, text
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": special[0]})
    vocab = read_vocab(tmp_path, len(released(name)["tokens"]))
    assert vocab.pre == RELEASED[name][0]
    lines = mixed_lines(N_LINES, special[:8])
    expected = [tokenizer.encode(line).ids for line in lines]
    if tokenizer.normalizer is not None:
        # The one thing that llama.cpp leaves out, as the note says.
        assert len(vocab.notes) == 1 and "NFC" in vocab.notes[0]
        lines = [unicodedata.normalize("NFC", line) for line in lines]
    else:
        assert not vocab.notes
    check_ids(ids_in_llama_cpp(vocab, lines, tmp_path), expected, lines)


def llama2_model() -> bytes:
    """The tokenizer.model of Llama 2."""
    fields = released("llama-spm")
    model = Model()
    for text, score, kind in zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True):
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    data: bytes = model.SerializeToString()
    return data


def test_ids_of_llama_2(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(llama2_model())
    pieces = SentencePieceProcessor(model_proto=llama2_model())
    for text, ids in recorded("llama-spm"):
        assert pieces.encode(text) == ids, text
    vocab = read_vocab(tmp_path, 32000)
    assert vocab.adds["bos"] and vocab.add_space_prefix and not vocab.notes
    lines = mixed_lines(N_LINES, ())
    expected = [[1, *pieces.encode(line)] for line in lines]
    check_ids(ids_in_llama_cpp(vocab, lines, tmp_path), expected, lines)


def llama2_tokenizer(prefix: str) -> Tokenizer:
    """The tokenizer.json of Llama 2 and its kin. What puts the space before the text has changed: at first a
    normalizer, then Metaspace, with one of its schemes."""
    fields = released("llama-spm")
    tokens = fields["tokens"]
    merges = make_hf_dir.merges_from_scores(tokens, fields["token_type"], fields["scores"])
    tokenizer = character_tokenizer(
        tokens, [(left, right) for left, right in merges], space_prefix=prefix == "normalizer", bos="<s>"
    )
    if prefix != "normalizer":
        tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("prefix", "chat", "note"),
    [
        ("normalizer", False, ""),
        ("normalizer", True, ""),
        ("always", True, "also before text that begins with one"),
        ("first", False, "also after special tokens and before text that begins with one"),
        ("first", True, "nowhere, as suits a conversation"),
        ("never", False, ""),
    ],
)
def test_ids_of_llama_2_from_merges(tmp_path: Path, prefix: str, chat: bool, note: str) -> None:
    tokenizer = llama2_tokenizer(prefix)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = {"chat_template": "<s>{{ messages }}"} if chat else {}
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"} | template)
    vocab = read_vocab(tmp_path, 32000)
    special = ["<s>", "</s>"]
    lines = mixed_lines(N_LINES, special)
    if note:
        (only,) = vocab.notes
        assert note in only
        if "nowhere" in note:
            lines = [f"<s>{line}" for line in lines]
        else:
            # A text that begins with a space, and, with "first", any text after a special token.
            after = "" if prefix == "first" else " "
            lines = [
                line
                for line in mixed_lines(2 * N_LINES, special)
                if line[0] != " " and not any(text + after in line for text in special)
            ]
            assert len(lines) > N_LINES / 2
    else:
        assert not vocab.notes
    expected = [tokenizer.encode(line).ids for line in lines]
    check_ids(ids_in_llama_cpp(vocab, lines, tmp_path), expected, lines)


# ---- whole models ----


@pytest.mark.parametrize(
    ("name", "from_json"), [("smollm2-135m", True), ("gemma3-270m", False), ("gemma3-270m", True)]
)
def test_ids_of_whole_models(tmp_path: Path, name: str, from_json: bool) -> None:
    """With transformers' own choice of class; from tokenizer.model where there is one, and without it."""
    directory = make_hf_dir.make(name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    copy = tmp_path / "hf"
    copy.mkdir()
    for path in directory.glob("*token*"):
        if not (from_json and path.name == "tokenizer.model"):
            (copy / path.name).symlink_to(path)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    vocab = read_vocab(copy, vocab_size)
    special = [*tokenizer.all_special_tokens, "<start_of_turn>", "<table>", "</h1>"]
    lines = mixed_lines(N_LINES, special)
    expected = tokenizer(lines)["input_ids"]
    check_ids(ids_in_llama_cpp(vocab, lines, tmp_path), expected, lines)
