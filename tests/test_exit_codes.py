"""Exit codes of the commands that compare, as cmp and diff have them: 1 is an answer, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from convert_models import llama_dir
from ggml_tern.cli.tern import cli
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.tensors.types import PTQ1_0
from model_headers import decoder_header


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `hf`, the file `m.gguf` made of it, `list`, its hashes; `other.gguf` and `other list` of
    another model, and `no.gguf`, which is none."""
    place = tmp_path_factory.mktemp("place")
    for seed, name in enumerate(("m", "other")):
        model = llama_dir(place / "hf" if name == "m" else place / "other hf", seed=seed)
        convert(model, place / f"{name}.gguf", TypeChoice(PTQ1_0))
    (place / "list").write_text(tern("hash", place / "m.gguf").stdout, encoding="utf-8")
    (place / "other list").write_text(tern("hash", place / "other.gguf").stdout, encoding="utf-8")
    (place / "no.gguf").write_bytes(b"no model")
    decoder_header("llama").write(place / "plan.gguf")
    return place


def tern(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["verify", "hf", "m.gguf"], 0),
        (["verify", "hf", "other.gguf"], 1),
        (["verify", "hf", "no.gguf"], 2),
        (["verify", "nowhere", "m.gguf"], 2),
        (["verify", "hf"], 2),
        (["hash", "m.gguf"], 0),
        (["hash", "m.gguf", "--check", "list"], 0),
        (["hash", "m.gguf", "--check", "other list"], 1),
        (["hash", "m.gguf", "--check", "no.gguf"], 2),
        (["hash", "m.gguf", "--check", "nowhere"], 2),
        (["hash", "no.gguf", "--check", "list"], 2),
        (["plan", "plan.gguf"], 0),
        (["plan", "plan.gguf", "--memory", "1GB"], 0),
        (["plan", "plan.gguf", "--memory", "1MB"], 1),
        (["plan", "no.gguf", "--memory", "1GB"], 2),
        (["plan", "plan.gguf", "--memory", "much"], 2),
        # Commands that do not compare: an error is 1, as ever.
        (["inspect", "no.gguf"], None),
    ],
)
def test_codes(place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int | None) -> None:
    monkeypatch.chdir(place)
    result = tern(*arguments)
    if code is None:
        assert type(result.exception).__name__ == "TernError"  # which main() makes a line and exit code 1
        return
    assert result.exit_code == code, result.output
    trouble = result.stderr.splitlines()
    if code == 2:
        assert result.stdout == "" and trouble[-1].startswith(("tern: ", "Error: "))


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 2), (ValueError("unforeseen"), 2)]
)
@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["verify", "hf", "m.gguf"], "ggml_tern.convert.verify.verify"),
        (["hash", "m.gguf", "--check", "list"], "ggml_tern.gguf.digest.hash_tensors"),
        (["plan", "plan.gguf", "--memory", "1GB"], "ggml_tern.plan.arithmetic.plan"),
    ],
    ids=["verify", "hash", "plan"],
)
def test_nothing_else_ends_with_1(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    where: str,
    raised: BaseException,
    code: int,
) -> None:
    monkeypatch.chdir(place)

    def fail(*_: Any, **__: Any) -> Callable[[], None]:
        raise raised

    monkeypatch.setattr(where, fail)
    assert tern(*arguments).exit_code == code


def test_help_tells_the_codes() -> None:
    for command in ("verify", "hash", "plan"):
        assert "Exit codes" in tern(command, "--help").output
