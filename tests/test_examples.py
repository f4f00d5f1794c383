"""The examples, run as a reader would: retrieval with a real embedding model and real servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

import retrieval
from llama_server import TERN, TINY, serving
from reference import ROOT

STOCK_EMBEDDER = (TERN, "run", "--stock", "llama-server", "-m")

NOTES = """\
# Notes of the workshop

The kiln is fired on Thursdays, and must have cooled down before anybody opens it.

## Keys

The key to the cellar hangs behind the calendar in the kitchen.

## Glaze

Celadon is mixed from feldspar, silica and a little iron oxide.
"""
GARDEN = "Tomatoes are watered in the morning.\n\nThe compost heap is turned twice a year.\n"


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    (tmp_path / "workshop.md").write_text(NOTES)
    (tmp_path / "garden.txt").write_text(GARDEN)
    return [str(tmp_path / "workshop.md"), str(tmp_path / "garden.txt")]


def embedding_model() -> Path:
    """The file, made at the first use on a machine."""
    command = [sys.executable, str(ROOT / "tools" / "make_embedding_model.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=500, check=True)
    return Path(done.stdout.strip())


def test_retrieval_finds_the_right_passage_and_the_model_answers(texts: list[str]) -> None:
    passages = [passage for text in texts for passage in retrieval.passages(Path(text))]
    command = [
        sys.executable,
        retrieval.__file__,
        "What goes into the green glaze?",
        *texts,
        "--max-tokens",
        "8",
    ]
    with (
        serving(TINY, "-c", "1024") as model,
        serving(embedding_model(), "--embeddings", command=STOCK_EMBEDDER) as embedder,
    ):
        addresses = ["--model", f"{model.url}/v1", "--embeddings", f"{embedder.url}/v1"]
        done = subprocess.run([*command, *addresses], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "workshop.md: Glaze" in done.stderr.splitlines()[0], done.stderr
        assert done.stdout.strip()

        library = retrieval.Library(OpenAI(base_url=f"{embedder.url}/v1", api_key="none"), passages)
        for question, right in (
            ("Where can I find what opens the door downstairs?", "The key to the cellar"),
            ("When should the vegetables get water?", "Tomatoes are watered"),
        ):
            similarity, first = library.nearest(question, 1)[0]
            assert right in first.text, (similarity, first)


def test_passages_are_short_and_keep_their_headings(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("# Long\n\n" + "word " * 2000 + "\n\n# Short\n\nAll of it.\n")
    found = list(retrieval.passages(tmp_path / "long.md"))
    assert all(len(passage.text) <= retrieval.MAX_CHARACTERS + len("Long\n\n") for passage in found)
    assert sum(passage.text.count("word") for passage in found) == 2000
    assert found[-1].text == "Short\n\nAll of it."
    assert all(passage.text.startswith("Long\n\n") for passage in found[:-1])


def test_a_server_that_does_not_run_is_named(texts: list[str]) -> None:
    command = [sys.executable, retrieval.__file__, "Why?", *texts]
    command += ["--embeddings", "http://127.0.0.1:9/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1" in done.stderr
