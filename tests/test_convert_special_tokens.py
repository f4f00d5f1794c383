"""Special tokens, chat templates and generation defaults survive, as llama.cpp itself sees them; what it
cannot honour is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest
from click.testing import CliRunner
from llama_cpp import Llama
from tokenizers import AddedToken, normalizers, processors

from convert_models import (
    byte_level_tokenizer,
    character_tokenizer,
    gpt2_steps,
    llama_dir,
    mixed_lines,
    write_byte_level,
    write_json,
    write_vocab_gguf,
)
from ggml_tern import _core
from ggml_tern.cli.ternconv import main
from ggml_tern.convert.model.vocab import Vocab, read_vocab
from ggml_tern.errors import TernError

SPECIAL = ("<|bos|>", "<|eos|>", "<|turn|>", "<|other|>", "<|third|>", "<|eom_id|>", "<|endoftext|>")
CONTROL, NORMAL = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)


def directory_with(folder: Path, special: tuple[str, ...] = SPECIAL, **config: Any) -> Path:
    write_byte_level(folder, byte_level_tokenizer(gpt2_steps(), special=special), **config)
    return folder


class Loaded:
    """A vocabulary in llama.cpp."""

    def __init__(self, vocab: Vocab, folder: Path) -> None:
        self.llama = Llama(str(write_vocab_gguf(vocab, folder / "out.gguf")), vocab_only=True, verbose=False)
        self.vocab = llama_cpp.llama_model_get_vocab(self.llama.model)

    def stops(self) -> set[int]:
        n_tokens = self.llama.n_vocab()
        return {token for token in range(n_tokens) if llama_cpp.llama_vocab_is_eog(self.vocab, token)}

    def template(self, name: bytes | None) -> str | None:
        found = llama_cpp.llama_model_chat_template(self.llama.model, name)
        return found.decode() if found else None


# ---- chat templates ----

TEMPLATE = "{%- for m in messages %}\r\n  {{ m['content'] }}<|turn|>é🚀{% endfor %}\n\n"


@pytest.mark.parametrize(
    "source", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", "alone"]
)
def test_chat_template_survives_to_the_byte(tmp_path: Path, source: str) -> None:
    """A file of its own goes before tokenizer_config.json, which goes before a processor's."""
    config: dict[str, Any] = {"chat_template": TEMPLATE} if source == "tokenizer_config.json" else {}
    directory_with(tmp_path, **config)
    if source == "chat_template.jinja":
        directory_with(tmp_path, chat_template="another")
    if source in ("chat_template.jinja", "alone"):
        (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.encode())
    if source == "alone":
        (tmp_path / "tokenizer_config.json").unlink()
    write_json(
        tmp_path / "chat_template.json",
        {"chat_template": TEMPLATE if source == "chat_template.json" else "a third"},
    )
    vocab = read_vocab(tmp_path, 500)
    assert vocab.chat_template == TEMPLATE
    assert Loaded(vocab, tmp_path).template(None) == TEMPLATE


@pytest.mark.parametrize("in_files", [False, True])
def test_named_chat_templates(tmp_path: Path, in_files: bool) -> None:
    if in_files:
        directory_with(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    else:
        named = {"default": "plain", "tool_use": "with tools"}
        directory_with(
            tmp_path, chat_template=[{"name": name, "template": text} for name, text in named.items()]
        )
    loaded = Loaded(read_vocab(tmp_path, 500), tmp_path)
    assert loaded.template(None) == "plain"
    assert loaded.template(b"tool_use") == "with tools"
    assert loaded.template(b"rag") is None


def test_templates_without_a_default_are_told(tmp_path: Path) -> None:
    directory_with(tmp_path, chat_template=[{"name": "tool_use", "template": "with tools"}])
    (note,) = read_vocab(tmp_path, 500).notes
    assert "tool_use" in note


# ---- which tokens are special ----


def test_special_tokens_map(tmp_path: Path) -> None:
    """It names what tokenizer_config.json does not; that, where it does, goes before."""
    tokenizer = byte_level_tokenizer(gpt2_steps(), special=())
    tokenizer.add_tokens(["<s>", "</s>", "<pad>", "<x>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "<x>", "lstrip": False}, "pad_token": "<pad>"}
    write_json(tmp_path / "special_tokens_map.json", names)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", "bos_token": None})
    ids = read_vocab(tmp_path, 600).special_ids
    expected = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    assert ids == {role: tokenizer.token_to_id(text) for role, text in expected.items()}


def test_tokens_that_only_the_configuration_calls_special(tmp_path: Path) -> None:
    """As transformers matches them whole, unless they are ordinary text."""
    tokenizer = byte_level_tokenizer(gpt2_steps())
    parsed = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    parsed["model"]["vocab"] |= {"<image>": size, "[INST]": size + 1}
    write_json(tmp_path / "tokenizer.json", parsed)
    names: dict[str, Any] = {"eos_token": "<|eos|>", "pad_token": "!"}
    write_json(
        tmp_path / "tokenizer_config.json",
        names | {"additional_special_tokens": ["<image>", {"content": "[INST]"}]},
    )
    vocab = read_vocab(tmp_path, size + 2)
    assert vocab.types[size:] == [CONTROL, CONTROL]
    assert vocab.types[vocab.special_ids["pad"]] == NORMAL


def test_ways_of_matching_that_llama_cpp_lacks_are_told(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps())
    tokenizer.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=True),
            AddedToken("<right>", rstrip=True, special=True),
            AddedToken("<word>", single_word=True),
            AddedToken("<plain>"),
        ]
    )
    write_byte_level(tmp_path, tokenizer)
    size = tokenizer.get_vocab_size()
    strips, words = read_vocab(tmp_path, size).notes
    assert "<left>, <right>" in strips and "lstrip" in strips and "<word>" not in strips
    assert "<word>" in words and "single_word" in words
    # Without a normalizer it makes no difference whether a token is matched before or after it.
    tokenizer.normalizer = normalizers.Lowercase()
    write_byte_level(tmp_path, tokenizer)
    notes = read_vocab(tmp_path, size).notes
    assert "Lowercase" in notes[0] and "<left>" in notes[3] and "normalized" in notes[3]


def test_tokens_matched_in_normalized_text_really_differ(tmp_path: Path) -> None:
    """The note is no idle one: after a space is put before it, such a token is not found inside a word."""
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "<x>"]
    tokenizer = character_tokenizer(tokens, [("▁", "a")], space_prefix=True)
    for normalized in (False, True):
        tokenizer.add_tokens([AddedToken("<x>", normalized=normalized)])
        found = tokenizer.token_to_id("<x>") in tokenizer.encode("a<x>a").ids
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        told = any("normalized" in note for note in read_vocab(tmp_path, 300).notes)
        assert (found, told) == (not normalized, normalized)


# ---- where a text ends ----


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_llama_cpp_stops_where_the_model_does(tmp_path: Path, file: str) -> None:
    directory_with(tmp_path, chat_template="{{ messages }}<|turn|>")
    write_json(tmp_path / file, {"eos_token_id": [1, 3, 2, 6, 10_000]})
    vocab = read_vocab(tmp_path, 500)
    assert vocab.special_ids == {"bos": 0, "eos": 1, "eot": 2, "eom": 3}
    # Two that llama.cpp knows by their text: one has no role left, the other is no stop of this model's.
    assert Loaded(vocab, tmp_path).stops() == {1, 2, 3, 5, 6}
    assert not vocab.notes


def test_more_stops_than_roles_are_told(tmp_path: Path) -> None:
    directory_with(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 2, 3, 4]})
    vocab = read_vocab(tmp_path, 500)
    assert vocab.special_ids == {"bos": 0, "eos": 1, "eot": 2, "eom": 3}
    (note,) = vocab.notes
    assert "<|third|>" in note and "<|other|>" not in note


def test_no_end_is_told(tmp_path: Path) -> None:
    directory_with(tmp_path, eos_token=None)
    (note,) = read_vocab(tmp_path, 500).notes
    assert "no token that ends a text" in note


# ---- what goes around a text ----

ENDS = (("<|eos|>", 1), ("<|bos|>", 0))


@pytest.mark.parametrize(
    ("processor", "adds", "ids"),
    [
        (None, (False, False), {"eos": 1}),
        ("<|bos|> $A", (True, False), {"eos": 1}),
        ("<|bos|> $A <|eos|>", (True, True), {"eos": 1}),
        ("$A <|turn|>", (False, True), {"eos": 2, "eot": 1}),
        (processors.RobertaProcessing(*ENDS), (True, True), {"eos": 1}),
        (
            processors.Sequence(
                [processors.ByteLevel(), processors.BertProcessing(("<|eos|>", 1), ("<|bos|>", 0))]
            ),
            (True, True),
            {"eos": 1},
        ),
    ],
)
def test_what_goes_around_a_text(
    tmp_path: Path, processor: Any, adds: tuple[bool, bool], ids: dict[str, int]
) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps(), special=SPECIAL)
    if isinstance(processor, str):
        processor = processors.TemplateProcessing(
            single=processor, special_tokens=[(text, token) for token, text in enumerate(SPECIAL)]
        )
    tokenizer.post_processor = processor or processors.ByteLevel()
    write_byte_level(tmp_path, tokenizer)
    vocab = read_vocab(tmp_path, 500)
    assert (vocab.adds["bos"], vocab.adds.get("eos", False)) == adds
    assert vocab.special_ids == {"bos": 0} | ids
    assert not vocab.notes
    loaded = Loaded(vocab, tmp_path)
    for line in mixed_lines(50, SPECIAL):
        assert loaded.llama.tokenize(line.encode(), special=True) == tokenizer.encode(line).ids


@pytest.mark.parametrize(
    ("pair", "adds"), [("$A <|eos|> $B", True), ("$A $B", False), ("$A <|turn|> $B", False)]
)
def test_what_goes_between_two_texts(tmp_path: Path, pair: str, adds: bool) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps(), special=SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair=pair, special_tokens=[("<|eos|>", 1), ("<|turn|>", 2)]
    )
    write_byte_level(tmp_path, tokenizer)
    assert read_vocab(tmp_path, 500).adds == {"bos": False, "eos": False, "sep": adds}


def test_what_llama_cpp_cannot_put_around_a_text_is_told(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(gpt2_steps(), special=SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|turn|> <|bos|> $A", special_tokens=[("<|turn|>", 2), ("<|bos|>", 0)]
    )
    write_byte_level(tmp_path, tokenizer)
    (note,) = read_vocab(tmp_path, 500).notes
    assert "<|turn|> <|bos|> TEXT" in note
    directory_with(tmp_path, bos_token=None, add_bos_token=True)
    vocab = read_vocab(tmp_path, 500)
    assert vocab.adds["bos"] is False and "asks for a bos token" in vocab.notes[0]


# ---- filling in ----


def test_fill_in_tokens(tmp_path: Path) -> None:
    special = (
        "<|bos|>",
        "<|eos|>",
        "<fim_prefix>",
        "<fim_middle>",
        "<fim_suffix>",
        "<fim_pad>",
        "<reponame>",
    )
    directory_with(tmp_path, special)
    vocab = read_vocab(tmp_path, 500)
    roles = {"fim_pre": 2, "fim_mid": 3, "fim_suf": 4, "fim_pad": 5, "fim_rep": 6}
    assert vocab.special_ids == {"bos": 0, "eos": 1} | roles
    loaded = Loaded(vocab, tmp_path)
    for role, token in roles.items():
        assert getattr(llama_cpp, f"llama_vocab_{role}")(loaded.vocab) == token
    # Without all three a model does not fill in.
    directory_with(tmp_path, ("<|bos|>", "<|eos|>", "<fim_prefix>", "<fim_pad>"))
    assert read_vocab(tmp_path, 500).special_ids == {"bos": 0, "eos": 1}


# ---- generation defaults ----


def test_generation_defaults(tmp_path: Path) -> None:
    directory = llama_dir(tmp_path / "hf")
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0}
    settings |= {"num_beams": 1, "repetition_penalty": 1.05, "suppress_tokens": [7, 9]}
    write_json(directory / "generation_config.json", settings)
    done = CliRunner().invoke(main, ["--type", "q8_0", str(directory), str(tmp_path / "out.gguf")])
    assert done.exit_code == 0, done.output
    metadata = _core.read_gguf_header(tmp_path / "out.gguf")["metadata"]
    sampling = {key: value for key, value in metadata.items() if key.startswith("general.sampling.")}
    expected = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05}
    assert sampling == pytest.approx({f"general.sampling.{key}": value for key, value in expected.items()})
    assert list(metadata["tokenizer.ggml.suppress_tokens"]) == [7, 9]


def test_generation_without_sampling_is_temperature_0(tmp_path: Path) -> None:
    directory_with(tmp_path)
    write_json(tmp_path / "generation_config.json", {"do_sample": False, "no_repeat_ngram_size": 3})
    vocab = read_vocab(tmp_path, 500)
    assert vocab.sampling == {"general.sampling.temp": 0.0}
    (note,) = vocab.notes
    assert "no_repeat_ngram_size 3" in note


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "0.7"), ("top_k", 50.0), ("top_p", True), ("min_p", float("nan")), ("top_k", [1])],
)
def test_generation_defaults_that_are_no_numbers(tmp_path: Path, key: str, value: Any) -> None:
    directory_with(tmp_path)
    write_json(tmp_path / "generation_config.json", {key: value})
    with pytest.raises(TernError, match=f"generation_config.json: {key} is .*expected a") as caught:
        read_vocab(tmp_path, 500)
    assert "\n" not in str(caught.value)
