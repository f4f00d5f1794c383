"""Which tokens mean something: where a text begins, where a turn ends, what goes around code to fill in.

A GGUF names one token per role. llama.cpp also knows many by their text; those need no name, and what neither
can tell goes to the notes.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ggml_tern.convert.read.tokenizer_files import TokenizerFiles

#: Roles that transformers names too: `bos_token` in tokenizer_config.json, `bos_token_id` in config.json.
_KINDS = ("bos", "eos", "unk", "sep", "pad", "mask")

#: At these llama.cpp stops whatever the file says.
_KNOWN_STOPS = {
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
    ),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
}

#: Role -> the texts that models use for it. Prefix, suffix and middle make a model that fills in.
_FILL_IN = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>", "<|code_middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def find_special_ids(
    tokens: list[str], files: TokenizerFiles, defaults: dict[str, int], notes: list[str]
) -> dict[str, int]:
    """Role -> token id. `defaults` are roles that the vocabulary itself gives."""
    by_text = {text: token for token, text in enumerate(tokens)}
    ids: dict[str, int] = {}
    for kind in _KINDS:
        text = files.named(kind)
        if text in by_text:
            ids[kind] = by_text[text]
            continue
        # One whose id lies past the embedding has been told of with the added tokens.
        if text is not None and text not in {item.text for item in files.added.values()}:
            notes.append(f"the {kind} token {text} is left out: the vocabulary has no such token")
        for token in _ids([defaults.get(kind, files.model.get(f"{kind}_token_id"))], tokens):
            ids[kind] = token
    _add_stops(ids, tokens, files, notes)
    for kind, texts in _FILL_IN.items():
        found = [by_text[text] for text in texts if text in by_text]
        if found:
            ids[kind] = found[0]
    if not {"fim_pre", "fim_suf", "fim_mid"} <= ids.keys():
        # Single ones have other uses: llama.cpp would stop at them.
        ids = {kind: token for kind, token in ids.items() if not kind.startswith("fim_")}
    return ids


def _ids(values: list[Any], tokens: list[str]) -> list[int]:
    """The values that are token ids."""
    return [value for value in values if type(value) is int and 0 <= value < len(tokens)]


def _add_stops(ids: dict[str, int], tokens: list[str], files: TokenizerFiles, notes: list[str]) -> None:
    """A chat model may stop at more tokens than one, and the tokenizer names only one.

    Of the others, the one that the chat template writes is the end of a turn. What llama.cpp does not know by
    its text takes the roles that are left, end of turn and end of message: it stops at both.
    """
    named = files.generation.get("eos_token_id")
    if named is None:
        named = files.model.get("eos_token_id")
    stops = _ids(named if isinstance(named, list) else [named], tokens)
    if stops:
        ids.setdefault("eos", stops[0])
    others = [token for token in dict.fromkeys(stops) if token != ids.get("eos")]
    template = json.dumps(files.chat_template, ensure_ascii=False)
    eot = files.named("eot")
    in_turn = [token for token in others if tokens[token] in template and tokens[token] != "<|eom_id|>"]
    if in_turn:
        ids["eot"] = in_turn[0]
    elif eot in tokens:
        ids["eot"] = tokens.index(eot)
    unknown = [token for token in others if token not in ids.values() and tokens[token] not in _KNOWN_STOPS]
    for role in ("eot", "eom"):
        if unknown and role not in ids:
            ids[role] = unknown.pop(0)
    if unknown:
        names = ", ".join(tokens[token] for token in unknown)
        notes.append(f"generation will not stop at {names}: a GGUF names three tokens to stop at, all taken")
    if "eos" not in ids:
        notes.append(
            "the model names no token that ends a text: generation stops only at the length that you give"
        )


class _Template(NamedTuple):
    """The special tokens that tokenizer.json puts before and after a text, and between two."""

    first: list[str]
    last: list[str]
    between: list[str]


def find_added_ends(
    files: TokenizerFiles, tokens: list[str], ids: dict[str, int], default: bool, notes: list[str]
) -> dict[str, bool]:
    """Whether a text gets a BOS token before it and an EOS token after it, and two a separator between them.

    What tokenizer_config.json says goes before tokenizer.json's post-processor; `default` is what holds for
    BOS when neither says anything. A last token that is not EOS becomes it, and EOS the end of a turn: only
    EOS can stand there in llama.cpp, and it stops at both.
    """
    found = _template(files.tokenizer.get("post_processor"))
    first, last, between = found or _Template([], [], [])
    adds = {"bos": default}
    if found is not None:
        separators = {files.named("sep"), files.named("eos")}
        adds = {"bos": bool(first), "eos": bool(last), "sep": not separators.isdisjoint(between)}
    says = {kind: files.config.get(f"add_{kind}_token") for kind in ("bos", "eos")}
    adds |= {kind: value for kind, value in says.items() if isinstance(value, bool)}
    if adds["bos"] and first and first[0] in tokens:
        ids.setdefault("bos", tokens.index(first[0]))
    if adds.get("eos") and last and last[0] in tokens and last[0] != _text(ids, "eos", tokens):
        if "eos" in ids:
            ids.setdefault("eot", ids["eos"])
        ids["eos"] = tokens.index(last[0])
    for kind in ("bos", "eos"):
        if adds.get(kind) and kind not in ids:
            adds[kind] = False
            notes.append(f"the tokenizer asks for a {kind} token around a text, but the model has none")
    if (adds["bos"] and first and first != [_text(ids, "bos", tokens)]) or len(last) > 1:
        notes.append(
            f"the tokenizer makes {' '.join((*first, 'TEXT', *last))} of a text; llama.cpp puts only the bos "
            "token before it and the eos token after it"
        )
    return adds


def _text(ids: dict[str, int], role: str, tokens: list[str]) -> str | None:
    return tokens[ids[role]] if role in ids else None


def _template(processor: dict[str, Any] | None) -> _Template | None:
    """What tokenizer.json's post-processor adds; None if it says nothing of that."""
    for step in (processor or {}).get("processors", [processor or {}]):
        match step.get("type"):
            case "TemplateProcessing":
                # Texts lie between runs of tokens: one in `single`, two in `pair`.
                (first, last), pair = _runs(step["single"]), _runs(step["pair"])
                return _Template(first, last, pair[1])
            case "RobertaProcessing" | "BertProcessing":
                return _Template([step["cls"][0]], [step["sep"][0]], [step["sep"][0]])
    return None


def _runs(items: list[dict[str, Any]]) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for item in items:
        if "Sequence" in item:
            runs.append([])
        else:
            runs[-1].append(item["SpecialToken"]["id"])
    return runs
