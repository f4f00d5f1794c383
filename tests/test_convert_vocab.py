"""The vocabulary: tokens, types, scores, special ids, and the name of the pre-tokenizer.

That the ids are those of the original tokenizer is tested in test_convert_tokenizers.py with llama.cpp
itself; here the SentencePiece rule (join the neighbours whose joint token scores highest) is written out in
Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from convert_models import (
    LLAMA3_REGEX,
    PRE_TOKENIZERS,
    QWEN2_REGEX,
    TEXT,
    byte_level_tokenizer,
    character_tokenizer,
    gpt2_steps,
    sentencepiece_model,
    smollm_steps,
    split_steps,
    write_byte_level,
    write_json,
    write_sentencepiece,
)
from ggml_tern.convert.model.vocab import Vocab, read_vocab
from ggml_tern.convert.read.sentencepiece_model import Model
from ggml_tern.errors import TernError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    int(getattr(gguf.TokenType, name))
    for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
)


# ---- byte-level BPE ----


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizer_is_found_by_structure(tmp_path: Path, name: str) -> None:
    steps, ignore_merges = PRE_TOKENIZERS[name]
    write_byte_level(tmp_path, byte_level_tokenizer(steps(), ignore_merges=ignore_merges))
    vocab = read_vocab(tmp_path, 512)
    assert (vocab.model, vocab.pre) == ("gpt2", name.split()[0])
    # No post-processor: nothing goes around a text, whatever llama.cpp does by default.
    assert vocab.adds == {"bos": False}


def test_equivalent_spellings_of_a_pre_tokenizer(tmp_path: Path) -> None:
    """Line ends written as such, and matches kept by removing what does not match."""
    steps = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(LLAMA3_REGEX.replace(r"\r", "\r").replace(r"\n", "\n")), "removed", invert=True
            ),
            pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        ]
    )
    write_byte_level(tmp_path, byte_level_tokenizer(steps, ignore_merges=True))
    assert read_vocab(tmp_path, 512).pre == "llama-bpe"


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "ByteLevel"),
        (split_steps(LLAMA3_REGEX + "|x"), r"|x"),
        (pre_tokenizers.Sequence([gpt2_steps(), pre_tokenizers.Digits(individual_digits=True)]), "digits"),
        (pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), gpt2_steps()]), "Punctuation"),
    ],
)
def test_unknown_pre_tokenizer_is_described(tmp_path: Path, steps: Any, named: str) -> None:
    write_byte_level(tmp_path, byte_level_tokenizer(steps))
    with pytest.raises(TernError) as caught:
        read_vocab(tmp_path, 512)
    message = str(caught.value)
    assert "unknown pre-tokenizer" in message and named in message and "\n" not in message
    assert "gpt-2, smollm, llama-bpe, dbrx, qwen2, qwen35" in message


def test_byte_level_tokens_types_and_merges(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(smollm_steps(), special=("<|bos|>", "<|eos|>", "<think>"))
    write_byte_level(tmp_path, tokenizer)
    parsed = json.loads((tmp_path / "tokenizer.json").read_text())
    parsed["added_tokens"][2]["special"] = False
    write_json(tmp_path / "tokenizer.json", parsed)

    vocab = read_vocab(tmp_path, 507)
    assert vocab.tokens[:500] == [tokenizer.id_to_token(i) for i in range(500)]
    assert vocab.tokens[500:] == [f"[PAD{i}]" for i in range(500, 507)]
    assert vocab.types == [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * 497, *[UNUSED] * 7]
    assert vocab.scores is None
    assert vocab.merges == [" ".join(merge) for merge in parsed["model"]["merges"]]
    assert vocab.special_ids == {"bos": 0, "eos": 1}
    assert not vocab.add_space_prefix and not vocab.notes


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
def test_bos_follows_the_post_processor_and_the_configuration(tmp_path: Path, name: str) -> None:
    steps, ignore_merges = PRE_TOKENIZERS[name]
    tokenizer = byte_level_tokenizer(steps(), ignore_merges=ignore_merges)
    for template, adds in (("<|bos|> $A", True), ("$A", False)):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<|bos|>", 0)]
        )
        write_byte_level(tmp_path, tokenizer)
        assert read_vocab(tmp_path, 500).adds["bos"] is adds
        write_byte_level(tmp_path, tokenizer, add_bos_token=not adds)
        assert read_vocab(tmp_path, 500).adds["bos"] is not adds


def test_normalization_that_llama_cpp_lacks_is_told(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(split_steps(QWEN2_REGEX))
    tokenizer.normalizer = normalizers.NFC()
    write_byte_level(tmp_path, tokenizer)
    (note,) = read_vocab(tmp_path, 500).notes
    assert "NFC" in note


# ---- added and special tokens ----


def test_added_tokens_past_the_embedding_are_left_out_and_told(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps())
    tokenizer.add_tokens(["<extra0>", "<extra1>"])
    write_byte_level(tmp_path, tokenizer)
    vocab = read_vocab(tmp_path, 501)
    assert vocab.tokens[500] == "<extra0>" and vocab.types[500] == USER_DEFINED and len(vocab.tokens) == 501
    (note,) = vocab.notes
    assert "<extra1>" in note and "501" in note


@pytest.mark.parametrize("text", ["<|tool|>", "<｜tool｜>", "<unused12>", "<mask>", "<pad>"])
def test_control_tokens_that_are_not_marked(tmp_path: Path, text: str) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps())
    tokenizer.add_tokens([text])
    write_byte_level(tmp_path, tokenizer)
    assert read_vocab(tmp_path, 501).types[500] == CONTROL


def test_end_of_turn_is_the_other_stop_that_the_template_writes(tmp_path: Path) -> None:
    special = ("<|bos|>", "<|eos|>", "<|turn|>", "<|other|>", "<|eom_id|>")
    write_byte_level(
        tmp_path,
        byte_level_tokenizer(gpt2_steps(), special=special),
        chat_template="{{ messages[0].content }}<|turn|><|eom_id|>",
    )
    assert "eot" not in read_vocab(tmp_path, 500).special_ids
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 3, 4, 2]})
    vocab = read_vocab(tmp_path, 500)
    assert vocab.special_ids["eot"] == 2
    assert vocab.chat_template == "{{ messages[0].content }}<|turn|><|eom_id|>"


def test_special_ids_given_only_by_text(tmp_path: Path) -> None:
    """tokenizer_config.json may name a token that tokenizer.json does not list as added."""
    tokenizer = byte_level_tokenizer(gpt2_steps(), special=())
    config: dict[str, Any] = {
        "eos_token": {"content": tokenizer.id_to_token(8)},
        "unk_token": {"content": "absent"},
    }
    write_byte_level(tmp_path, tokenizer, bos_token=tokenizer.id_to_token(7), **config)
    vocab = read_vocab(tmp_path, 500)
    assert vocab.special_ids == {"bos": 7, "eos": 8}
    # Ordinary tokens, which must not vanish from answers.
    assert vocab.types[7:9] == [NORMAL, NORMAL]
    (note,) = vocab.notes
    assert "unk" in note and "absent" in note


# ---- SentencePiece ----


def joined_by_score(vocab: Vocab, text: str) -> list[str]:
    """Tokenize as SentencePiece BPE does: the best-scored neighbours first, the leftmost of equals, bytes for
    the rest."""
    assert vocab.scores is not None
    score_of = dict(zip(vocab.tokens, vocab.scores, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        best = max(
            (
                (score_of[pieces[i] + pieces[i + 1]], -i)
                for i in range(len(pieces) - 1)
                if pieces[i] + pieces[i + 1] in score_of
            ),
            default=None,
        )
        if best is None:
            break
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    known = set(vocab.tokens)
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in known else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


def pieces_of(model: bytes) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=model)


#: Text without what is matched whole beforehand (the user-defined tokens).
plain_text = st.one_of(
    st.text(st.sampled_from("thequickbrownfox ,.0123日本мнü🚀"), max_size=60),
    st.sampled_from(TEXT).flatmap(lambda s: st.integers(0, len(s)).map(lambda i: s[i : i + 50])),
).map(lambda s: " ".join(s.split()))


@pytest.fixture(scope="module")
def from_model(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    directory = tmp_path_factory.mktemp("spm")
    write_sentencepiece(directory, sentencepiece_model())
    return read_vocab(directory, 480)


@pytest.fixture(scope="module")
def from_merges(tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    """The same tokenizer as transformers leaves it when it drops tokenizer.model."""
    directory = tmp_path_factory.mktemp("merges")
    pieces = pieces_of(sentencepiece_model())
    tokens = [pieces.id_to_piece(i) for i in range(480)]
    ids = set(tokens)
    # The way from scores to merges: all the ways to make a token, tokens in the order of their score.
    normal = [
        t
        for i, t in enumerate(tokens)
        if not (pieces.is_control(i) or pieces.is_unknown(i) or pieces.is_byte(i) or t in ("<turn>", "▁▁"))
    ]
    normal.sort(key=lambda t: -pieces.get_score(pieces.piece_to_id(t)))
    merges = [(t[:i], t[i:]) for t in normal for i in range(1, len(t)) if t[:i] in ids and t[i:] in ids]
    tokenizer = character_tokenizer(tokens, merges)
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>"})
    return read_vocab(directory, 480)


@settings(max_examples=150, deadline=None)
@given(text=plain_text)
def test_scores_of_tokenizer_model_tokenize_like_sentencepiece(from_model: Vocab, text: str) -> None:
    assert joined_by_score(from_model, text) == pieces_of(sentencepiece_model()).encode(text, out_type=str)


@settings(max_examples=150, deadline=None)
@given(text=plain_text)
def test_scores_recovered_from_merges_tokenize_like_sentencepiece(from_merges: Vocab, text: str) -> None:
    assert joined_by_score(from_merges, text) == pieces_of(sentencepiece_model()).encode(text, out_type=str)


def test_sentencepiece_types_and_special_ids(from_model: Vocab, from_merges: Vocab) -> None:
    assert from_model.types[:6] == [CONTROL, CONTROL, CONTROL, UNKNOWN, USER_DEFINED, USER_DEFINED]
    # User-defined tokens are matched in the text as typed.
    assert from_model.tokens[4:6] == ["<turn>", "  "]
    assert from_merges.types[:4] == [CONTROL] * 4
    for vocab in (from_model, from_merges):
        assert (vocab.model, vocab.pre) == ("llama", "default")
        assert vocab.types.count(BYTE) == 256
        assert (vocab.special_ids["bos"], vocab.special_ids["eos"]) == (2, 1)
        assert vocab.adds["bos"] is True and not vocab.adds.get("eos")
        assert vocab.add_space_prefix is False


@pytest.mark.parametrize("prefix", [False, True])
def test_space_prefix(tmp_path: Path, prefix: bool) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_sentencepiece(model, sentencepiece_model(dummy_prefix=prefix))
    assert read_vocab(model, 480).add_space_prefix is prefix

    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    character_tokenizer(tokens, [("▁", "a")], space_prefix=prefix).save(str(tmp_path / "tokenizer.json"))
    assert read_vocab(tmp_path, 300).add_space_prefix is prefix


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_space_prefix_of_metaspace(tmp_path: Path, scheme: str) -> None:
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    tokenizer = character_tokenizer(tokens, [("▁", "a")])
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_vocab(tmp_path, 300).add_space_prefix is (scheme != "never")


# ---- refusals ----


def refusal(directory: Path, vocab_size: int = 512) -> str:
    with pytest.raises(TernError) as caught:
        read_vocab(directory, vocab_size)
    message = str(caught.value)
    assert str(directory) in message and "\n" not in message
    return message


def test_no_tokenizer(tmp_path: Path) -> None:
    assert "neither tokenizer.model nor tokenizer.json" in refusal(tmp_path)


def test_unigram_sentencepiece(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, sentencepiece_model(kind="unigram"))
    assert "unigram" in refusal(tmp_path)


def test_damaged_sentencepiece(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path, sentencepiece_model()[:-7])
    assert "not a SentencePiece model" in refusal(tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0),
        models.WordLevel({"a": 0}, unk_token="a"),
        models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
    ],
)
def test_kinds_that_llama_cpp_lacks(tmp_path: Path, model: Any) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    message = refusal(tmp_path)
    assert type(model).__name__ in message


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    write_byte_level(tmp_path, byte_level_tokenizer(gpt2_steps()))
    assert "token id 499, but the embedding has only 499 rows" in refusal(tmp_path, 499)
    write_sentencepiece(tmp_path, sentencepiece_model())
    assert "480 tokens, but the embedding has only 479 rows" in refusal(tmp_path, 479)


def test_two_ids_with_one_text(tmp_path: Path) -> None:
    write_byte_level(
        tmp_path,
        byte_level_tokenizer(gpt2_steps()),
        added_tokens_decoder={"3": {"content": "<x>"}, "9": {"content": "<x>"}},
    )
    assert "tokens 3 and 9 have the same text '<x>'" in refusal(tmp_path)


def test_sentencepiece_without_byte_fallback(tmp_path: Path) -> None:
    model = Model.FromString(sentencepiece_model())
    for piece in model.pieces:
        piece.type = NORMAL if piece.type == BYTE else piece.type
    write_sentencepiece(tmp_path, model.SerializeToString())
    assert "without byte fallback" in refusal(tmp_path)


def test_tokenizer_model_of_another_kind_beside_tokenizer_json(tmp_path: Path) -> None:
    """Llama 3 has ranks under this name; transformers does not look at them."""
    write_byte_level(tmp_path, byte_level_tokenizer(gpt2_steps()))
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert read_vocab(tmp_path, 500).pre == "gpt-2"
    (tmp_path / "tokenizer.json").unlink()
    assert "not a SentencePiece model" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab": {}}, "vocabulary is empty"),
        ({"vocab": {"a": 0, "b": 0}}, "'a' and 'b' have the same id 0"),
        ({"vocab": {"a": -1, "b": 0}}, "'a' has the id -1"),
        ({"vocab": {"a": True, "b": 0}}, "'a' has the id True"),
        ({"merges": []}, "no merges"),
        ({"merges": ["a"]}, "merge 0 is 'a'; expected two tokens"),
        ({"merges": [["a", "b", "ab"]]}, "expected two tokens"),
        ({"merges": ["a b", ["a", "c"]]}, "merge 1 is ['a', 'c'], but the vocabulary has no token 'c'"),
        ({"merges": ["b a"]}, "no token 'ba'"),
        ({"merges": [7]}, "not as expected"),
        ({"vocab": {"a": 0, "b": 1, "ab": 2, "\ud83d": 3}}, "half a character"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
        ({"continuing_subword_prefix": "##"}, "continuing_subword_prefix '##'"),
    ],
)
def test_broken_bpe_models(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    model = {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": ["a b"],
        "byte_fallback": True,
    } | change
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert says in refusal(tmp_path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not JSON"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": ["a"], "merges": []}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"-1": {"content": "x"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"one": {"content": "x"}}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 7}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", "no"),
        ("generation_config.json", "["),
    ],
)
def test_malformed_files(tmp_path: Path, file: str, text: str) -> None:
    write_byte_level(tmp_path, byte_level_tokenizer(gpt2_steps()))
    (tmp_path / file).write_text(text)
    refusal(tmp_path)
