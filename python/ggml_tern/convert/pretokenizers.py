"""Which of llama.cpp's pre-tokenizers a byte-level BPE tokenizer uses.

llama.cpp does not read regular expressions from the file: `tokenizer.ggml.pre` names one of those that it has
built in. The name is found from the structure of tokenizer.json's `pre_tokenizer`, step by step, because two
models that split text alike must get the same name whatever their vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ggml_tern.errors import TernError

#: The steps that a pre_tokenizer is reduced to. A `Split` step is represented by its regular expression.
_GPT2_REGEX = "byte-level regex"
_SINGLE_DIGITS = "single digits"

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp.

    Attributes:
        name: the value of `tokenizer.ggml.pre`.
        steps: what tokenizer.json's pre_tokenizer must do.
        ignore_merges: llama.cpp takes a word that is a token as it is, whatever the merges say;
            tokenizer.json's model must have asked for the same.
        adds_bos: whether llama.cpp puts a BOS token first unless the file says otherwise.
    """

    name: str
    steps: tuple[str, ...]
    ignore_merges: bool
    adds_bos: bool


KNOWN = (
    PreTokenizer("gpt-2", (_GPT2_REGEX,), ignore_merges=False, adds_bos=False),
    PreTokenizer("smollm", (_SINGLE_DIGITS, _GPT2_REGEX), ignore_merges=False, adds_bos=False),
    PreTokenizer("llama-bpe", (_LLAMA3_REGEX,), ignore_merges=True, adds_bos=True),
    PreTokenizer("dbrx", (_LLAMA3_REGEX,), ignore_merges=False, adds_bos=False),
    PreTokenizer("qwen2", (_QWEN2_REGEX,), ignore_merges=False, adds_bos=False),
)


def find_pretokenizer(tokenizer: dict[str, Any], where: str) -> PreTokenizer:
    """The pre-tokenizer of a parsed tokenizer.json. `where` names the file in errors.

    Raises TernError, with the steps found and the names known, when llama.cpp is not known to have it.
    """
    steps = tuple(_steps(tokenizer.get("pre_tokenizer")))
    ignore_merges = bool(tokenizer["model"].get("ignore_merges", False))
    for known in KNOWN:
        if known.steps == steps and known.ignore_merges == ignore_merges:
            return known
    raise TernError(
        f"{where}: unknown pre-tokenizer: steps {list(steps)}, ignore_merges {str(ignore_merges).lower()}; "
        f"ternconv knows those of {', '.join(known.name for known in KNOWN)}"
    )


def is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether a parsed tokenizer.json maps text to GPT-2's printable stand-ins for bytes before it merges."""
    return any(step["type"] == "ByteLevel" for step in _flatten(tokenizer.get("pre_tokenizer")))


def _flatten(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    if node is None:
        return []
    if node["type"] == "Sequence":
        return [step for child in node["pretokenizers"] for step in _flatten(child)]
    return [node]


def _steps(node: dict[str, Any] | None) -> list[str]:
    """The steps that split text; ones that only recode it leave nothing."""
    steps = []
    for step in _flatten(node):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
                pass
            # Written before the option existed, when the regex was always used.
            case {"type": "ByteLevel", "add_prefix_space": False}:
                steps.append(_GPT2_REGEX)
            case {"type": "Digits", "individual_digits": True}:
                steps.append(_SINGLE_DIGITS)
            # "Removed" of what does not match keeps the matches: the same for an expression that covers all
            # text.
            case {
                "type": "Split",
                "pattern": {"Regex": str(regex)},
                "behavior": "Isolated",
                "invert": False,
            } | {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True}:
                steps.append(regex.replace("\r", r"\r").replace("\n", r"\n"))
            case _:
                options = ", ".join(f"{key}={value}" for key, value in step.items() if key != "type")
                steps.append(f"{step['type']}({options})")
    return steps
