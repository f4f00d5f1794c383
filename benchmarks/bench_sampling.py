"""Measure how settings of the sampler change how much a model repeats itself.

    python benchmarks/bench_sampling.py models/tiny-qwen3/tiny-qwen3-ptq1_0.gguf
    python benchmarks/bench_sampling.py MODEL.gguf --text prose.txt --write    # and docs/benchmarks/DATE-…

The model continues sentences of a text. Of what it writes, and of what the text itself goes on with, two
things are counted in words:

repeated   share of the sequences of 4 words that were there before in the same answer: loops
distinct   different pairs of words in all answers, as a share of all pairs: variety

What a person wrote is the mark: settings that repeat far more loop, those that vary more than it drift.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from benchmarking import ROOT, markdown, out_option, write_report
from ggml_tern import Llama

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalty 1.1": {"temperature": 0.0, "repeat_penalty": 1.1},
    "0.3": {"temperature": 0.3},
    "0.7": {"temperature": 0.7},
    "0.7, penalty 1.1": {"temperature": 0.7, "repeat_penalty": 1.1},
    "0.7, top-p 0.8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "0.7, min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "0.7, min-p 0.1": {"temperature": 0.7, "min_p": 0.1},
    "1.0": {"temperature": 1.0},
    "1.0, min-p 0.1": {"temperature": 1.0, "min_p": 0.1},
}
#: What a setting does not say: nothing that cuts or penalizes.
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}

#: Of a paragraph, what the model is given.
N_BEGINNING = 12
#: Words that are compared of each answer.
N_WORDS = 120


def words_of(text: str) -> list[str]:
    return re.findall(r"[\w'’]+", text.lower())


def n_grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def repeated(words: Sequence[str]) -> float:
    """The share of sequences of 4 words that were there before."""
    sequences = n_grams(words, 4)
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def distinct(answers: Sequence[Sequence[str]]) -> float:
    """Different pairs of words, as a share of all pairs, in all answers."""
    pairs = [pair for words in answers for pair in n_grams(words, 2)]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


def beginnings(text: str, count: int) -> list[tuple[str, list[str]]]:
    """From evenly spread places of a text: a sentence's first words, and the words that follow it."""
    starts = [match.end() for match in re.finditer(r"[.!?][\"”]?\s+(?=[A-Z])", text)]
    starts = [start for start in starts if len(text[start:].split()) >= N_BEGINNING + N_WORDS]
    if len(starts) < count:
        raise click.ClickException(f"the text has {len(starts)} beginnings of sentences; expected {count}")
    found = []
    for start in starts[:: len(starts) // count][:count]:
        words = text[start:].split()
        following = " ".join(words[N_BEGINNING:])
        found.append((" ".join(words[:N_BEGINNING]), words_of(following)[:N_WORDS]))
    return found


def row(name: str, answers: Sequence[Sequence[str]]) -> tuple[str, str, str]:
    mean = sum(map(repeated, answers)) / len(answers)
    return name, f"{mean:.1%}", f"{distinct(answers):.1%}"


def measure(
    generate: Callable[[str, dict[str, Any]], str], found: Sequence[tuple[str, list[str]]]
) -> list[tuple[str, str, str]]:
    """A row for the text, and one for each setting. generate: an answer to a beginning."""
    rows = [row("the text itself", [words for _, words in found])]
    for name, setting in track(SETTINGS.items(), "measuring"):
        answers = [words_of(generate(beginning, NEUTRAL | setting))[:N_WORDS] for beginning, _ in found]
        rows.append(row(f"temperature {name}", answers) if name[0].isdigit() else row(name, answers))
    return rows


@click.command(help=__doc__.split("\n")[0])
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--text", type=click.Path(exists=True, path_type=Path), default=ROOT / "models/held-out.txt")
@click.option("--count", default=24, show_default=True, help="Answers for each setting.")
@click.option("--seed", default=1, show_default=True)
@click.option("--write", is_flag=True, help="Write DATE-sampling.md too.")
@out_option
def main(model: Path, text: Path, count: int, seed: int, write: bool, out: Path) -> None:
    found = beginnings(text.read_text(encoding="utf-8"), count)
    llm = Llama(str(model), n_ctx=512, seed=seed, verbose=False)

    def generate(beginning: str, setting: dict[str, Any]) -> str:
        pieces = llm(beginning, max_tokens=2 * N_WORDS, stream=True, **setting)
        return "".join(piece["choices"][0]["text"] for piece in pieces if not isinstance(piece, str))

    table = markdown(["", "repeated", "distinct"], measure(generate, found))
    Console().print(Markdown(table))
    if write:
        what = (
            f"{model.name} continues {count} sentences of {text.name}, of which it is given {N_BEGINNING} "
            f"words. Repeated: the share of\nsequences of 4 words that were there before in the same answer "
            f"of up to {N_WORDS} words. Distinct: different pairs of words in\nall answers, as a share of "
            "all pairs. Written by `benchmarks/bench_sampling.py`."
        )
        facts = [
            "but for what is named, the sampler draws from all tokens: top-k 0, top-p 1, min-p 0, penalty 1"
        ]
        path = write_report(out, "sampling", "Sampling and repetition", what, [*facts, f"seed {seed}"], table)
        click.echo(path)


if __name__ == "__main__":
    main()
