"""Vocabulary: a model directory's tokenizer as the metadata that llama.cpp's own tokenizers read.

Three kinds of tokenizer are read:

- tokenizer.model, a SentencePiece BPE model;
- tokenizer.json with a BPE model over characters and byte fallback, what transformers writes for such a model
  when it drops tokenizer.model: the scores are recovered from the merges;
- tokenizer.json with a BPE model over bytes (GPT-2 and its descendants).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ggml_tern.convert.model.pretokenizers import find_pretokenizer, is_byte_level
from ggml_tern.convert.model.special_tokens import find_added_ends, find_special_ids
from ggml_tern.convert.read.generation import add_sampling, read_sampling
from ggml_tern.convert.read.sentencepiece_model import BPE, MODEL_KINDS, Model
from ggml_tern.convert.read.tokenizer_files import TOKENIZER_FILE, ChatTemplate, TokenizerFiles, token_text
from ggml_tern.errors import TernError

SENTENCEPIECE_FILE = "tokenizer.model"

#: SentencePiece's stand-in for a space.
_SPACE = "▁"

#: Score of tokens that merging never makes; far below any rank.
_NEVER_MERGED = -1e6

#: Added tokens that models forget to mark as special. As CONTROL tokens llama.cpp matches them only where
#: special tokens are parsed, and does not print them.
_CONTROL_LIKE = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<pad>|<mask>")

#: What a special token looks like. Some models name an ordinary one, such as "!", as their padding: as a
#: CONTROL token it would vanish from every answer.
_SPECIAL_LOOKING = re.compile(r"<.+>|\[.+\]", re.DOTALL)

#: Normalizers that leave alone what an added token matches.
_HARMLESS = {"NFC", "Replace"}


@dataclass
class Vocab:
    """A vocabulary for GGUFWriter.

    Attributes:
        model: `tokenizer.ggml.model`: `llama` (SentencePiece) or `gpt2` (byte-level BPE).
        pre: `tokenizer.ggml.pre`.
        tokens, types: text and gguf.TokenType of every id, vocab_size of them.
        scores: SentencePiece scores, None for byte-level BPE.
        merges: of byte-level BPE, the best first, the two parts with a space between.
        add_space_prefix: whether text gets a leading space.
        special_ids: role (`bos`, `eos`, `eot`, `fim_pre`, ...) -> token id.
        adds: whether a text gets a `bos` token before it and an `eos` token after it, and two texts a `sep`
            token between them.
        chat_template: the chat template, or several with names.
        sampling: GGUF key -> default for generation.
        suppressed: tokens never to be generated.
        notes: what the user should know about the way over, a line each.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] = field(default_factory=list)
    add_space_prefix: bool = False
    special_ids: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    chat_template: ChatTemplate | None = None
    sampling: dict[str, int | float] = field(default_factory=dict)
    suppressed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        keys = gguf.Keys.Tokenizer
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        # Told the element type, gguf-py need not look at every element: a second less for 256k tokens.
        for key, values, kind in (
            (keys.LIST, self.tokens, gguf.GGUFValueType.STRING),
            (keys.SCORES, self.scores, gguf.GGUFValueType.FLOAT32),
            (keys.TOKEN_TYPE, self.types, gguf.GGUFValueType.INT32),
            (keys.MERGES, self.merges, gguf.GGUFValueType.STRING),
            ("tokenizer.ggml.suppress_tokens", self.suppressed, gguf.GGUFValueType.INT32),
        ):
            if values:
                writer.add_key_value(key, values, gguf.GGUFValueType.ARRAY, sub_type=kind)
        for role, token in self.special_ids.items():
            writer.add_uint32(getattr(keys, f"{role.upper()}_ID"), token)
        for kind_, value in self.adds.items():
            writer.add_bool(getattr(keys, f"ADD_{kind_.upper()}"), value)
        writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)
        add_sampling(writer, self.sampling)


def read_vocab(directory: Path, vocab_size: int) -> Vocab:
    """The vocabulary of a model directory, padded or cut to the `vocab_size` rows of the embedding.

    Raises TernError for a directory without a tokenizer, a kind or pre-tokenizer that llama.cpp does not
    have, more tokens than rows, two ids with one text (which llama.cpp cannot load), and files that
    contradict themselves.
    """
    try:
        vocab = _read(TokenizerFiles(directory), vocab_size)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, StopIteration) as error:
        raise TernError(f"{directory}: the tokenizer's files are not as expected: {error!r}") from None
    _check_tokens(vocab, directory)
    return vocab


def _read(files: TokenizerFiles, vocab_size: int) -> Vocab:
    vocab, defaults, adds_bos = _read_model(files, vocab_size)
    _apply_added_tokens(vocab, files)
    vocab.special_ids = find_special_ids(vocab.tokens, files, defaults, vocab.notes)
    vocab.adds = find_added_ends(files, vocab.tokens, vocab.special_ids, adds_bos, vocab.notes)
    vocab.chat_template = files.chat_template
    if isinstance(vocab.chat_template, list) and not any(t["name"] == "default" for t in vocab.chat_template):
        names = ", ".join(template["name"] for template in vocab.chat_template)
        vocab.notes.append(f"no chat template is the default one, of {names}: llama.cpp will use its own")
    vocab.sampling = read_sampling(files, vocab.notes)
    vocab.suppressed = [
        token for token in files.generation.get("suppress_tokens") or [] if 0 <= token < len(vocab.tokens)
    ]
    return vocab


def _read_model(files: TokenizerFiles, vocab_size: int) -> tuple[Vocab, dict[str, int], bool]:
    """The vocabulary proper, the special ids that it brings, and whether text gets BOS unless a file says
    otherwise."""
    path = files.directory / SENTENCEPIECE_FILE
    if path.is_file():
        model = _parse_sentencepiece(path)
        if model is not None:
            return _read_sentencepiece(files, path, model, vocab_size)
        # Other tokenizers save their ranks under this name too; transformers then reads tokenizer.json.
        if not files.tokenizer:
            raise TernError(f"{path}: not a SentencePiece model; download it again")
    if not files.tokenizer:
        raise TernError(
            f"{files.directory}: has neither {SENTENCEPIECE_FILE} nor {TOKENIZER_FILE}; save the tokenizer "
            "there with transformers' save_pretrained"
        )
    return _read_tokenizer_json(files, vocab_size)


def _blank(vocab_size: int) -> tuple[list[str], list[int]]:
    """Placeholders for ids that no token has: models round their embedding up."""
    return [f"[PAD{i}]" for i in range(vocab_size)], [int(gguf.TokenType.UNUSED)] * vocab_size


# ---- SentencePiece ----


def _parse_sentencepiece(path: Path) -> Any | None:
    """The model, or None if it is something else, which protobuf may take for a model without tokens."""
    try:
        model = Model.FromString(path.read_bytes())
    except OSError as error:
        raise TernError(f"{path}: cannot be read: {error.strerror}") from None
    except DecodeError:
        return None
    return model if model.pieces else None


def _read_sentencepiece(
    files: TokenizerFiles, path: Path, model: Any, vocab_size: int
) -> tuple[Vocab, dict[str, int], bool]:
    kind = model.trainer_spec.model_type
    if kind != BPE:
        raise TernError(
            f"{path}: a SentencePiece model of the kind {MODEL_KINDS.get(kind, kind)}; ternconv knows bpe"
        )
    if not any(piece.type == gguf.TokenType.BYTE for piece in model.pieces):
        raise TernError(
            f"{path}: a SentencePiece model without byte fallback; llama.cpp cannot tokenize what lies "
            "outside its alphabet"
        )
    if len(model.pieces) > vocab_size:
        raise TernError(
            f"{path}: has {len(model.pieces)} tokens, but the embedding has only {vocab_size} rows"
        )
    tokens, types = _blank(vocab_size)
    scores = [_NEVER_MERGED] * vocab_size
    for token, piece in enumerate(model.pieces):
        # SentencePiece's types have the numbers of gguf.TokenType.
        tokens[token], types[token], scores[token] = piece.piece, piece.type, piece.score
    normalizer = model.normalizer_spec
    vocab = Vocab("llama", "default", tokens, types, scores)
    vocab.add_space_prefix = normalizer.add_dummy_prefix and files.config.get("add_prefix_space") is not False
    if files.tokenizer:
        _add_space_prefix(vocab, files)
    if normalizer.name not in ("", "identity") or normalizer.remove_extra_whitespaces:
        vocab.notes.append(
            f"the tokenizer normalizes text ({normalizer.name or 'extra spaces'}), which llama.cpp does not: "
            "text that this changes gets other tokens"
        )
    for token, piece in enumerate(model.pieces):
        if piece.type == gguf.TokenType.USER_DEFINED:
            _set_added_token(vocab, token, piece.piece, control=False)
    ids = {kind: getattr(model.trainer_spec, f"{kind}_id") for kind in ("bos", "eos", "unk", "pad")}
    defaults = {kind: token for kind, token in ids.items() if 0 <= token < len(model.pieces)}
    # Every SentencePiece tokenizer of transformers starts with BOS unless its configuration says otherwise.
    return vocab, defaults, True


# ---- tokenizer.json ----


def _read_tokenizer_json(files: TokenizerFiles, vocab_size: int) -> tuple[Vocab, dict[str, int], bool]:
    path = files.directory / TOKENIZER_FILE
    model: dict[str, Any] = files.tokenizer["model"]
    if model.get("type") != "BPE":
        raise TernError(
            f"{path}: a tokenizer of the kind {model.get('type')}; ternconv knows BPE over bytes, BPE with "
            f"byte fallback, and {SENTENCEPIECE_FILE}"
        )
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise TernError(
                f"{path}: a BPE model with {option} {model[option]!r}, which llama.cpp does not have"
            )
    ids = _checked_ids(model["vocab"], path, vocab_size)
    merges = _checked_merges(model["merges"], ids, path)
    tokens, types = _blank(vocab_size)
    for text, token in ids.items():
        tokens[token] = text
        types[token] = int(gguf.TokenType.NORMAL)
    if is_byte_level(files.tokenizer):
        pre = find_pretokenizer(files.tokenizer, str(path))
        vocab = Vocab("gpt2", pre.name, tokens, types, merges=[" ".join(merge) for merge in merges])
        if pre.caveat:
            vocab.notes.append(pre.caveat)
        if normalizers := _normalizers(files):
            vocab.notes.append(
                f"the tokenizer normalizes text ({', '.join(normalizers)}), which llama.cpp does not: text "
                "that this changes, such as letters with combining accents, gets other tokens"
            )
        return vocab, {}, False
    if not model.get("byte_fallback"):
        raise TernError(
            f"{path}: a BPE tokenizer neither over bytes nor with byte fallback; llama.cpp has none such"
        )
    for byte in range(256):
        token = ids.get(f"<0x{byte:02X}>", -1)
        if token >= 0:
            types[token] = int(gguf.TokenType.BYTE)
    unknown = ids.get(model.get("unk_token") or "", -1)
    if unknown >= 0:
        types[unknown] = int(gguf.TokenType.UNKNOWN)
    vocab = Vocab("llama", "default", tokens, types, _scores_from_merges(merges, ids, vocab_size))
    _add_space_prefix(vocab, files)
    return vocab, {}, True


def _checked_ids(ids: dict[str, int], path: Path, vocab_size: int) -> dict[str, int]:
    if not ids:
        raise TernError(f"{path}: its vocabulary is empty; save the tokenizer again")
    if max(ids.values()) >= vocab_size:
        raise TernError(
            f"{path}: has token id {max(ids.values())}, but the embedding has only {vocab_size} rows"
        )
    seen: dict[int, str] = {}
    for text, token in ids.items():
        if type(token) is not int or token < 0:
            raise TernError(f"{path}: token {text!r} has the id {token!r}; expected a whole number from 0")
        if token in seen:
            raise TernError(f"{path}: tokens {seen[token]!r} and {text!r} have the same id {token}")
        seen[token] = text
    return ids


def _checked_merges(
    merges: list[str] | list[list[str]], ids: dict[str, int], path: Path
) -> list[tuple[str, str]]:
    """The merges as pairs; older files have both parts in one text. Those that make no token are refused, as
    the tokenizers package refuses them."""
    if not merges:
        raise TernError(
            f"{path}: has no merges, so no text can be tokenized with it; save the tokenizer again"
        )
    pairs = []
    for rank, merge in enumerate(merges):
        parts = tuple(merge.split(" ") if isinstance(merge, str) else merge)
        if len(parts) != 2:
            raise TernError(f"{path}: merge {rank} is {merge!r}; expected two tokens")
        for text in (*parts, "".join(parts)):
            if text not in ids:
                raise TernError(
                    f"{path}: merge {rank} is {merge!r}, but the vocabulary has no token {text!r}"
                )
        pairs.append(parts)
    return pairs


def _scores_from_merges(
    merges: Iterable[tuple[str, str]], ids: dict[str, int], vocab_size: int
) -> list[float]:
    """SentencePiece scores of a BPE model given as merges, best merge first.

    SentencePiece joins the neighbours whose joint token scores highest. The merges list the ways to make each
    token in that order, so the negated rank of the first way serves as the score.
    """
    scores = [_NEVER_MERGED] * vocab_size
    seen: set[int] = set()
    for rank, (left, right) in enumerate(merges):
        token = ids[left + right]
        if token not in seen:
            seen.add(token)
            scores[token] = float(-rank)
    return scores


def _steps(node: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre_tokenizer, sequences taken apart."""
    if node is None:
        return []
    return (
        [step for child in node[children] for step in _steps(child, children)] if children in node else [node]
    )


def _normalizers(files: TokenizerFiles) -> list[str]:
    return [step["type"] for step in _steps(files.tokenizer.get("normalizer"), "normalizers")]


def _add_space_prefix(vocab: Vocab, files: TokenizerFiles) -> None:
    """Whether a tokenizer.json over characters puts a space before the text.

    llama.cpp puts one before the text and after every special token, as the normalizer `Prepend` does, or
    nowhere. `Metaspace` puts none before a space, and with the scheme `first` none after special tokens: a
    conversation, where all text comes after them, is then right without.
    """
    vocab.add_space_prefix = False
    for step in _steps(files.tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            vocab.add_space_prefix = True
    for step in _steps(files.tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] != "Metaspace":
            continue
        # Older files say it with a flag.
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        if scheme == "never":
            continue
        vocab.add_space_prefix = scheme == "always" or files.chat_template is None
        if scheme == "always":
            differs = "before text that begins with one: such text gets other tokens"
        elif vocab.add_space_prefix:
            differs = "after special tokens and before text that begins with one: such text gets other tokens"
        else:
            differs = "nowhere, as suits a conversation: the first word of a bare prompt gets other tokens"
        here = "also " if vocab.add_space_prefix else ""
        vocab.notes.append(f"the tokenizer puts a space before the text, llama.cpp {here}{differs}")


# ---- added tokens ----


def _apply_added_tokens(vocab: Vocab, files: TokenizerFiles) -> None:
    added = files.added
    past = [item.text for token, item in sorted(added.items()) if token >= len(vocab.tokens)]
    if past:
        vocab.notes.append(
            f"left out the added tokens {_some(past)}, whose ids lie past the embedding's "
            f"{len(vocab.tokens)} rows"
        )
    for token, item in sorted(added.items()):
        if token < len(vocab.tokens):
            control = item.special or _CONTROL_LIKE.fullmatch(item.text) is not None
            _set_added_token(vocab, token, item.text, control)
    # transformers also makes added tokens of those that only its configuration calls special.
    named = {text for value in files.special_tokens.values() for text in _texts(value)}
    for token, text in enumerate(vocab.tokens):
        if text in named and vocab.types[token] == gguf.TokenType.NORMAL and _SPECIAL_LOOKING.fullmatch(text):
            _set_added_token(vocab, token, text, control=True)
    _tell_flags(vocab, files)


def _texts(value: Any) -> Iterable[str]:
    """The texts of one special token or of a list of them."""
    for item in value if isinstance(value, list) else [value]:
        if text := token_text(item):
            yield text


def _tell_flags(vocab: Vocab, files: TokenizerFiles) -> None:
    """Note the ways of matching added tokens that llama.cpp does not have."""
    here = [item for token, item in sorted(files.added.items()) if token < len(vocab.tokens)]
    told = [
        ("take the spaces beside them (lstrip, rstrip)", [i.text for i in here if i.lstrip or i.rstrip]),
        ("count only as whole words (single_word)", [i.text for i in here if i.single_word]),
    ]
    if not set(_normalizers(files)) <= _HARMLESS:
        told.append(
            ("are looked for in normalized text (normalized)", [i.text for i in here if i.normalized])
        )
    for what, texts in told:
        if texts:
            vocab.notes.append(
                f"the added tokens {_some(texts)} {what}, which llama.cpp does not heed: text with them may "
                "get other tokens"
            )


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _set_added_token(vocab: Vocab, token: int, text: str, control: bool) -> None:
    """Make a token one that is matched whole before the rest is tokenized."""
    # llama.cpp looks for what is not a control token in the text as the user typed it, before spaces are
    # replaced.
    typed = vocab.model == "llama" and not control
    vocab.tokens[token] = text.replace(_SPACE, " ") if typed else text
    vocab.types[token] = int(gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED)
    if vocab.scores is not None:
        vocab.scores[token] = _NEVER_MERGED


def _check_tokens(vocab: Vocab, directory: Path) -> None:
    first: dict[str, int] = {}
    for token, text in enumerate(vocab.tokens):
        if text in first:
            raise TernError(
                f"{directory}: tokens {first[text]} and {token} have the same text {text!r}; "
                "llama.cpp needs them distinct"
            )
        first[text] = token
    try:
        "".join((*vocab.tokens, *vocab.merges)).encode()
    except UnicodeEncodeError as error:
        raise TernError(
            f"{directory}: a token holds half a character ({error.object[error.start]!a}); save the "
            "tokenizer again"
        ) from None
