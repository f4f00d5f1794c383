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
_DIGIT_RUNS = "digit runs"
_PUNCTUATION_RUNS = "punctuation runs"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_REGEX = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_REGEX = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_CL100K_REGEX = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3_STEPS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SEED_CODER_REGEX = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
# Words that begin with capitals and end with small letters, or the other way round.
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O_REGEX = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

#: Other ways to write a step. (`\s*` takes line ends too, so that one more after it is as good as many.)
_SAME = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2_REGEX,
    r"\p{N}": _SINGLE_DIGITS,
    _CL100K_REGEX: _LLAMA3_REGEX,
    _CL100K_REGEX.replace(r"\p{N}{1,3}", r"\p{N}"): _QWEN2_REGEX,
}

_ASCII_CASE = (
    "llama.cpp's version of this pre-tokenizer tells capitals from small letters only in ASCII and leaves "
    "combining marks out of words: text with accented capitals inside words or with combining marks may get "
    "other tokens"
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp.

    Attributes:
        name: the value of `tokenizer.ggml.pre`.
        steps: what tokenizer.json's pre_tokenizer must do.
        ignore_merges: llama.cpp takes a word that is a token as it is, whatever the merges say;
            tokenizer.json's model must have asked for the same.
        caveat: where llama.cpp splits otherwise than tokenizer.json says; empty where it does not.
    """

    name: str
    steps: tuple[str, ...]
    ignore_merges: bool = False
    caveat: str = ""


#: All but those with a caveat were found to give the ids of the tokenizers package.
KNOWN = (
    PreTokenizer("gpt-2", (_GPT2_REGEX,)),
    PreTokenizer("smollm", (_SINGLE_DIGITS, _GPT2_REGEX)),
    PreTokenizer("llama-bpe", (_LLAMA3_REGEX,), ignore_merges=True),
    PreTokenizer("dbrx", (_LLAMA3_REGEX,)),
    PreTokenizer("qwen2", (_QWEN2_REGEX,)),
    PreTokenizer("qwen35", (_QWEN35_REGEX,)),
    PreTokenizer("falcon", (_PUNCTUATION_RUNS, _GPT2_REGEX, _DIGIT_RUNS, "[0-9][0-9][0-9]")),
    PreTokenizer("deepseek-v3", _DEEPSEEK3_STEPS),
    PreTokenizer("seed-coder", (_SEED_CODER_REGEX,)),
    PreTokenizer(
        "minicpm5",
        (r"\p{N}{1,3}", _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}+")),
        ignore_merges=True,
    ),
    PreTokenizer("tekken", (_TEKKEN_REGEX,), ignore_merges=True, caveat=_ASCII_CASE),
    PreTokenizer("gpt-4o", (_GPT4O_REGEX,), caveat=_ASCII_CASE),
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
            case {"type": "Digits", "individual_digits": bool(single)}:
                steps.append(_SINGLE_DIGITS if single else _DIGIT_RUNS)
            case {"type": "Punctuation", "behavior": "Contiguous"}:
                steps.append(_PUNCTUATION_RUNS)
            # "Removed" of what does not match keeps the matches: the same for an expression that covers all
            # text.
            case {
                "type": "Split",
                "pattern": {"Regex": str(regex)},
                "behavior": "Isolated",
                "invert": False,
            } | {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Removed", "invert": True}:
                regex = regex.replace("\r", r"\r").replace("\n", r"\n")
                steps.append(_SAME.get(regex, regex))
            case _:
                options = ", ".join(f"{key}={value}" for key, value in step.items() if key != "type")
                steps.append(f"{step['type']}({options})")
    return steps
