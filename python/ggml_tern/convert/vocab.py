"""Stage 3, vocabulary: a model directory's tokenizer as the metadata that llama.cpp's own tokenizers read.

Three kinds of tokenizer are read:

- tokenizer.model, a SentencePiece BPE model;
- tokenizer.json with a BPE model over characters and byte fallback, what transformers writes for such a model
  when it drops tokenizer.model: the scores are recovered from the merges;
- tokenizer.json with a BPE model over bytes (GPT-2 and its descendants).

gguf-py's SpecialVocab reads the ids of the special tokens and the chat template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ggml_tern.convert.checkpoint import read_json
from ggml_tern.convert.pretokenizers import find_pretokenizer, is_byte_level
from ggml_tern.convert.sentencepiece_model import BPE, MODEL_KINDS, Model
from ggml_tern.errors import TernError

SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_FILE = "tokenizer.json"

#: SentencePiece's stand-in for a space.
_SPACE = "▁"

#: Score of tokens that merging never makes; far below any rank.
_NEVER_MERGED = -1e6

#: Added tokens that models forget to mark as special. As CONTROL tokens llama.cpp matches them only where
#: special tokens are parsed, and does not print them.
_CONTROL_LIKE = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<pad>|<mask>")


@dataclass
class Vocab:
    """A vocabulary for GGUFWriter.

    Attributes:
        model: `tokenizer.ggml.model`: `llama` (SentencePiece) or `gpt2` (byte-level BPE).
        pre: `tokenizer.ggml.pre`.
        tokens, types: text and gguf.TokenType of every id, vocab_size of them.
        scores: SentencePiece scores, None for byte-level BPE.
        special: chat template, special ids and BOS/EOS flags, as gguf-py read them.
        add_space_prefix: whether text gets a leading space.
        notes: what the user should know about the way over, a line each.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    special: gguf.SpecialVocab
    add_space_prefix: bool
    notes: list[str] = field(default_factory=list)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        # Told the element type, gguf-py need not look at every element: a second less for 256k tokens.
        for key, values, kind in (
            (gguf.Keys.Tokenizer.LIST, self.tokens, gguf.GGUFValueType.STRING),
            (gguf.Keys.Tokenizer.SCORES, self.scores, gguf.GGUFValueType.FLOAT32),
            (gguf.Keys.Tokenizer.TOKEN_TYPE, self.types, gguf.GGUFValueType.INT32),
        ):
            if values is not None:
                writer.add_key_value(key, values, gguf.GGUFValueType.ARRAY, sub_type=kind)
        self.special.add_to_gguf(writer, quiet=True)
        writer.add_add_space_prefix(self.add_space_prefix)


def read_vocab(directory: Path, vocab_size: int) -> Vocab:
    """The vocabulary of a model directory, padded or cut to the `vocab_size` rows of the embedding.

    Raises TernError for a directory without a tokenizer, a kind or pre-tokenizer that llama.cpp does not
    have, more tokens than rows, and two ids with one text (which llama.cpp cannot load).
    """
    try:
        vocab = _read(directory, vocab_size)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise TernError(f"{directory}: the tokenizer's files are not as expected: {error!r}") from None
    _check_unique(vocab, directory)
    return vocab


def _read(directory: Path, vocab_size: int) -> Vocab:
    config = _read_optional(directory / "tokenizer_config.json")
    if (directory / SENTENCEPIECE_FILE).is_file():
        vocab = _read_sentencepiece(directory, vocab_size)
    elif (directory / TOKENIZER_FILE).is_file():
        vocab = _read_tokenizer_json(directory, read_json(directory / TOKENIZER_FILE), vocab_size)
    else:
        raise TernError(
            f"{directory}: has neither {SENTENCEPIECE_FILE} nor {TOKENIZER_FILE}; save the tokenizer there "
            "with transformers' save_pretrained"
        )
    _apply_added_tokens(vocab, _added_tokens(directory, config))
    _find_special_ids(vocab, directory, config)
    return vocab


def _blank(vocab_size: int) -> tuple[list[str], list[int]]:
    """Placeholders for ids that no token has: models round their embedding up."""
    return [f"[PAD{i}]" for i in range(vocab_size)], [int(gguf.TokenType.UNUSED)] * vocab_size


def _read_sentencepiece(directory: Path, vocab_size: int) -> Vocab:
    path = directory / SENTENCEPIECE_FILE
    try:
        model = Model.FromString(path.read_bytes())
    except DecodeError as error:
        raise TernError(f"{path}: not a SentencePiece model ({error}); download it again") from None
    kind = model.trainer_spec.model_type
    if kind != BPE:
        raise TernError(
            f"{path}: a SentencePiece model of the kind {MODEL_KINDS.get(kind, kind)}; ternconv knows bpe"
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
    special = gguf.SpecialVocab(directory, n_vocab=vocab_size)
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(model.trainer_spec, f"{name}_id")
        if 0 <= token < len(model.pieces):
            special.special_token_ids.setdefault(name, token)
    # Every SentencePiece tokenizer of transformers starts with BOS unless its configuration says otherwise.
    special.add_special_token.setdefault("bos", True)
    vocab = Vocab(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=scores,
        special=special,
        add_space_prefix=model.normalizer_spec.add_dummy_prefix,
    )
    for token, piece in enumerate(model.pieces):
        if piece.type == gguf.TokenType.USER_DEFINED:
            _set_added_token(vocab, token, piece.piece, control=False)
    return vocab


def _read_tokenizer_json(directory: Path, tokenizer: dict[str, Any], vocab_size: int) -> Vocab:
    path = directory / TOKENIZER_FILE
    model: dict[str, Any] = tokenizer["model"]
    if model.get("type") != "BPE":
        raise TernError(
            f"{path}: a tokenizer of the kind {model.get('type')}; ternconv knows BPE over bytes, BPE with "
            f"byte fallback, and {SENTENCEPIECE_FILE}"
        )
    ids: dict[str, int] = model["vocab"]
    if max(ids.values()) >= vocab_size:
        raise TernError(
            f"{path}: has token id {max(ids.values())}, but the embedding has only {vocab_size} rows"
        )
    tokens, types = _blank(vocab_size)
    for text, token in ids.items():
        tokens[token] = text
        types[token] = int(gguf.TokenType.NORMAL)
    if is_byte_level(tokenizer):
        pre = find_pretokenizer(tokenizer, str(path))
        special = gguf.SpecialVocab(directory, load_merges=True, n_vocab=vocab_size)
        special.add_special_token.setdefault("bos", pre.adds_bos and not _leaves_text_alone(tokenizer))
        vocab = Vocab(
            model="gpt2",
            pre=pre.name,
            tokens=tokens,
            types=types,
            scores=None,
            special=special,
            add_space_prefix=False,
        )
        if (normalizer := tokenizer.get("normalizer")) is not None:
            vocab.notes.append(
                f"the tokenizer normalizes text ({normalizer['type']}), which llama.cpp does not: text that "
                "this changes, such as letters with combining accents, gets other tokens"
            )
        return vocab
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
    special = gguf.SpecialVocab(directory, n_vocab=vocab_size)
    special.add_special_token.setdefault("bos", not _leaves_text_alone(tokenizer))
    return Vocab(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        special=special,
        scores=_scores_from_merges(model["merges"], ids, vocab_size),
        add_space_prefix=_prepends_space(tokenizer),
    )


def _scores_from_merges(
    merges: list[str] | list[list[str]], ids: dict[str, int], vocab_size: int
) -> list[float]:
    """SentencePiece scores of a BPE model given as merges, best merge first.

    SentencePiece joins the neighbours whose joint token scores highest. The merges list the ways to make each
    token in that order, so the negated rank of the first way serves as the score.
    """
    scores = [_NEVER_MERGED] * vocab_size
    seen: set[int] = set()
    for rank, merge in enumerate(merges):
        text = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        token = ids.get(text)
        if token is not None and token not in seen:
            seen.add(token)
            scores[token] = float(-rank)
    return scores


def _leaves_text_alone(tokenizer: dict[str, Any]) -> bool:
    """Whether tokenizer.json says in so many words that a text gets no special tokens around it."""
    processor = tokenizer.get("post_processor") or {}
    templates = [
        step["single"]
        for step in processor.get("processors", [processor])
        if step.get("type") == "TemplateProcessing"
    ]
    return bool(templates) and all("Sequence" in item for template in templates for item in template)


def _prepends_space(tokenizer: dict[str, Any]) -> bool:
    """Whether a character-level tokenizer.json puts a space before the text."""

    def steps(node: dict[str, Any] | None) -> list[dict[str, Any]]:
        if node is None:
            return []
        children = node.get("normalizers", node.get("pretokenizers"))
        return [node] if children is None else [step for child in children for step in steps(child)]

    for step in steps(tokenizer.get("normalizer")) + steps(tokenizer.get("pre_tokenizer")):
        if step["type"] == "Prepend" and step.get("prepend") == _SPACE:
            return True
        if step["type"] == "Metaspace":
            # Older files say it with a flag.
            return bool(
                step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never") != "never"
            )
    return False


@dataclass(frozen=True)
class _AddedToken:
    text: str
    special: bool


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _added_tokens(directory: Path, config: dict[str, Any]) -> dict[int, _AddedToken]:
    """The tokens that are matched before tokenization, by id.

    tokenizer_config.json has them all up to transformers 4, tokenizer.json since, added_tokens.json before.
    """
    added: dict[int, _AddedToken] = {}
    for text, token in _read_optional(directory / "added_tokens.json").items():
        added[int(token)] = _AddedToken(text, special=False)
    decoder = config.get("added_tokens_decoder")
    if decoder:
        items = [(token, item) for token, item in decoder.items()]
    else:
        items = [
            (item["id"], item)
            for item in _read_optional(directory / TOKENIZER_FILE).get("added_tokens") or []
        ]
    for token, item in items:
        added[int(token)] = _AddedToken(item["content"], bool(item.get("special")))
    if added and min(added) < 0:
        raise ValueError(f"added token with id {min(added)}")
    return added


def _apply_added_tokens(vocab: Vocab, added: dict[int, _AddedToken]) -> None:
    past = [item.text for token, item in sorted(added.items()) if token >= len(vocab.tokens)]
    if past:
        more = f" and {len(past) - 3} more" if len(past) > 3 else ""
        vocab.notes.append(
            f"left out the added tokens {', '.join(past[:3])}{more}, whose ids lie past the embedding's "
            f"{len(vocab.tokens)} rows"
        )
    for token, item in sorted(added.items()):
        if token >= len(vocab.tokens):
            continue
        control = item.special or _CONTROL_LIKE.fullmatch(item.text) is not None
        _set_added_token(vocab, token, item.text, control)


def _set_added_token(vocab: Vocab, token: int, text: str, control: bool) -> None:
    """Make a token one that is matched whole before the rest is tokenized."""
    # llama.cpp looks for what is not a control token in the text as the user typed it, before spaces are
    # replaced.
    typed = vocab.model == "llama" and not control
    vocab.tokens[token] = text.replace(_SPACE, " ") if typed else text
    vocab.types[token] = int(gguf.TokenType.CONTROL if control else gguf.TokenType.USER_DEFINED)
    if vocab.scores is not None:
        vocab.scores[token] = _NEVER_MERGED


def _find_special_ids(vocab: Vocab, directory: Path, config: dict[str, Any]) -> None:
    """Fill in what gguf-py's SpecialVocab leaves out: ids given only by text, and the end of a turn."""
    ids = vocab.special.special_token_ids
    by_text = {text: token for token, text in enumerate(vocab.tokens)}
    for kind in ("bos", "eos", "unk", "sep", "pad", "mask"):
        value = config.get(f"{kind}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in by_text:
            ids.setdefault(kind, by_text[text])
    # A chat model may stop at more tokens than one, and the tokenizer names only one. Of the others, the one
    # that the chat template writes is the end of a turn; llama.cpp itself knows the end-of-message token of
    # Llama 3.
    stops = _read_optional(directory / "generation_config.json").get("eos_token_id")
    template = (
        json.dumps(vocab.special.chat_template, ensure_ascii=False) if vocab.special.chat_template else ""
    )
    for token in stops if isinstance(stops, list) else []:
        if isinstance(token, int) and 0 <= token < len(vocab.tokens) and token != ids.get("eos"):
            text = vocab.tokens[token]
            if text in template and text != "<|eom_id|>":
                ids.setdefault("eot", token)


def _check_unique(vocab: Vocab, directory: Path) -> None:
    first: dict[str, int] = {}
    for token, text in enumerate(vocab.tokens):
        if text in first:
            raise TernError(
                f"{directory}: tokens {first[text]} and {token} have the same text {text!r}; "
                "llama.cpp needs them distinct"
            )
        first[text] = token
