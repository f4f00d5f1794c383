"""Answer a question from your own texts, with everything on this machine.

    tern serve MODEL.gguf --port 8080
    tern run --stock llama-server -m all-minilm-l6-v2-f16.gguf --embeddings --port 8081
    python examples/retrieval.py "How long does a conversion take?" docs/*.md

Texts are cut into passages, and each passage is turned into a vector by an embedding model. The passages
whose vectors lie nearest to that of the question go to the ternary model, which answers from them. Needs
``pip install click openai usearch``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from openai import OpenAI, OpenAIError
from usearch.index import Index

F32 = npt.NDArray[np.float32]

#: Of a passage. The embedding model reads 256 tokens and no more, which is a thousand characters of English.
MAX_CHARACTERS = 800
#: Texts in one request.
BATCH = 16

SYSTEM = "Answer the question from the passages alone. If they do not hold the answer, say so."


@dataclass(frozen=True)
class Passage:
    """A piece of a file, small enough to be embedded as a whole."""

    source: Path
    text: str


def passages(source: Path) -> Iterator[Passage]:
    """The paragraphs of a text file, joined as long as they fit, each with its heading."""
    heading, pending = "", ""
    for paragraph in source.read_text(encoding="utf-8").split("\n\n"):
        paragraph = paragraph.strip()
        is_heading = paragraph.startswith("#") and "\n" not in paragraph
        if pending and (is_heading or len(pending) + len(paragraph) > MAX_CHARACTERS):
            yield Passage(source, pending)
            pending = ""
        if is_heading:
            heading = paragraph.lstrip("# ")
            continue
        for piece in pieces(paragraph):
            if pending and len(pending) + len(piece) > MAX_CHARACTERS:
                yield Passage(source, pending)
                pending = ""
            pending = f"{pending}\n\n{piece}" if pending else f"{heading}\n\n{piece}".strip()
    if pending:
        yield Passage(source, pending)


def pieces(paragraph: str) -> list[str]:
    """A paragraph cut between words where it is too long, its lines kept as they are."""
    return textwrap.wrap(paragraph, MAX_CHARACTERS, replace_whitespace=False, drop_whitespace=False)


class Library:
    """Passages, and an index of their vectors."""

    def __init__(self, embedder: OpenAI, found: Sequence[Passage]) -> None:
        self._embedder = embedder
        self._passages = found
        vectors = self._embed([passage.text for passage in found])
        self._index = Index(ndim=vectors.shape[1], metric="cos")
        self._index.add(np.arange(len(found)), vectors)

    def _embed(self, texts: Sequence[str]) -> F32:
        """[len(texts), width]"""
        vectors: list[list[float]] = []
        for begin in range(0, len(texts), BATCH):
            batch = list(texts[begin : begin + BATCH])
            answer = self._embedder.embeddings.create(model="", input=batch, encoding_format="float")
            vectors += [item.embedding for item in answer.data]
        return np.array(vectors, np.float32)

    def nearest(self, question: str, count: int) -> list[tuple[float, Passage]]:
        """The passages nearest to the question, with the cosine of the angle between."""
        matches = self._index.search(self._embed([question])[0], count)
        found = zip(matches.keys, matches.distances, strict=True)
        return [(1 - float(distance), self._passages[int(key)]) for key, distance in found]


def answer(model: OpenAI, question: str, found: Sequence[Passage], max_tokens: int) -> Iterator[str]:
    """The model's answer from these passages, piece by piece."""
    context = "\n\n".join(f"[{number}] {passage.text}" for number, passage in enumerate(found, 1))
    stream = model.chat.completions.create(
        model="",
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{context}\n\nQuestion: {question}"},
        ],
        max_tokens=max_tokens,
        stream=True,
    )
    for event in stream:
        if event.choices:
            yield event.choices[0].delta.content or ""


@click.command(help=__doc__.split("\n")[0])
@click.argument("question")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--model", "model_url", default="http://127.0.0.1:8080/v1", show_default=True, help="tern serve"
)
@click.option(
    "--embeddings",
    "embeddings_url",
    default="http://127.0.0.1:8081/v1",
    show_default=True,
    help="llama-server --embeddings",
)
@click.option("--passages", "count", default=4, show_default=True, help="How many go to the model.")
@click.option("--max-tokens", default=256, show_default=True, help="Of the answer.")
def main(
    question: str, files: tuple[Path, ...], model_url: str, embeddings_url: str, count: int, max_tokens: int
) -> None:
    # The servers want no key, but the client does.
    embedder = OpenAI(base_url=embeddings_url, api_key="none")
    model = OpenAI(base_url=model_url, api_key="none")
    try:
        library = Library(embedder, [passage for file in files for passage in passages(file)])
        nearest = library.nearest(question, count)
        for number, (similarity, passage) in enumerate(nearest, 1):
            first_line = passage.text.partition("\n")[0]
            click.echo(f"[{number}] {similarity:.2f} {passage.source}: {first_line}", err=True)
        for piece in answer(model, question, [passage for _, passage in nearest], max_tokens):
            click.echo(piece, nl=False)
        click.echo()
    except OpenAIError as error:
        raise click.ClickException(f"{error} Do both servers run? {model_url}, {embeddings_url}") from error


if __name__ == "__main__":
    main()
