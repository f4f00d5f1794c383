"""The verdict at the end: whether the file holds the model's own weights, and what to do with it next."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from convert_models import Array, llama_config, llama_dir, random_tensors, write_weights
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.verdict import Outcome, judge
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import TARGETS, repack
from ggml_tern.tensors.types import PTQ1_0, Q8_0

TERNCONV = str(Path(sys.executable).parent / "ternconv")
TERN = str(Path(sys.executable).parent / "tern")

Change = Callable[[str, Array], Array]


def ternary(scale: float) -> Change:
    return lambda name, values: (np.sign(values) * (np.abs(values) > 0.05) * np.float32(scale)).astype("f4")


def one_odd(name: str, values: Array) -> Array:
    return values if name.startswith("model.layers.1.self_attn.k_proj") else ternary(0.5)(name, values)


def empty(name: str, values: Array) -> Array:
    return np.zeros_like(values)


def as_is(name: str, values: Array) -> Array:
    return values


def model(directory: Path, change: Change, *, template: bool = False) -> Path:
    """A Llama whose matrices in the blocks are changed."""
    llama_dir(directory)
    tensors = {
        name: change(name, values) if "_proj" in name else values
        for name, values in random_tensors(llama_config()).items()
    }
    write_weights(directory, tensors)
    if template:
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}), encoding="utf-8")
    return directory


def run(*arguments: object) -> list[str]:
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("change", "options", "verdict"),
    [
        (ternary(0.5), [], "kept exactly: 14 of 14 ternary tensors hold the model's own weights"),
        (
            ternary(0.0123456789),
            [],
            "kept: the ternary values are the model's, and 14 of 14 ternary tensors have scales rounded "
            "to fp16, by ",
        ),
        (one_odd, [], "rounded: 1 of 14 ternary tensors were made so, with relative error "),
        (ternary(0.5), ["--embed", "ptq1_0"], "rounded: 1 of 15 ternary tensors were made so"),
        (as_is, ["--type", "auto"], "not ternary: no tensor of the file is; rounded, with relative error "),
        (
            as_is,
            ["--type", "q8_0", "--keep", "*=f32"],
            "not ternary: no tensor of the file is; every weight is the model's",
        ),
    ],
    ids=["kept", "scales", "one odd", "embedding", "auto", "f32"],
)
def test_verdicts_of_models_that_work(
    tmp_path: Path, change: Change, options: list[str], verdict: str
) -> None:
    source, output = model(tmp_path / "hf", change), tmp_path / "out put.gguf"
    lines = run(TERNCONV, *options, source, output)
    assert lines[-2].startswith(f"verdict: {verdict}"), lines
    assert lines[-1].startswith("next: tern run llama-completion ")
    assert str(output) in shlex.split(lines[-1])
    assert not any("not trained ternary" in line for line in lines)
    # tern verify finds the same, from the two files.
    assert run(TERN, "verify", source, output)[-1] == lines[-2]


def test_a_model_that_was_not_trained_ternary(tmp_path: Path) -> None:
    source, output = model(tmp_path / "hf", as_is), tmp_path / "out.gguf"
    lines = run(TERNCONV, source, output)
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert "not trained ternary" in warning and "--type auto" in warning and "--type q8_0" in warning
    # Gaussian weights lose a fifth of their energy, in the table as in the verdict.
    found = lines[-2].removeprefix("verdict: will not write sense: 14 of 14 ternary tensors were made so, ")
    assert 0.15 < float(found.removeprefix("with relative error ")) < 0.25
    assert lines[-1] == "next: the same again with --type auto or --type q8_0"
    assert run(TERN, "verify", source, output)[-1] == lines[-2]
    # Both ways out lead to a model that works.
    for kind in ("auto", "q8_0"):
        assert run(TERNCONV, "--type", kind, "--force", source, output)[-1].startswith("next: tern run")


def test_next_is_a_chat_where_there_is_a_template(tmp_path: Path) -> None:
    source = model(tmp_path / "hf", ternary(0.5), template=True)
    assert run(TERNCONV, source, tmp_path / "m.gguf")[-1] == f"next: tern chat {tmp_path / 'm.gguf'}"
    again = run(TERNCONV, "--type", "q2_0", tmp_path / "m.gguf", tmp_path / "again.gguf")
    assert again[-1] == f"next: tern chat {tmp_path / 'again.gguf'}"


def test_nothing_is_recommended_for_a_broken_model(tmp_path: Path) -> None:
    lines = run(TERNCONV, model(tmp_path / "hf", empty), tmp_path / "m.gguf")
    assert any(line.startswith("warning: nothing but zeros in ") for line in lines)
    assert lines[-1].startswith("verdict: ")


def test_one_matrix_in_ten_does_not_spoil_a_model(tmp_path: Path) -> None:
    report = convert(model(tmp_path / "hf", one_odd), tmp_path / "m.gguf", TypeChoice(PTQ1_0))
    pairs = list(zip(report.targets, report.stats, strict=True))
    assert judge(pairs).outcome is Outcome.ROUNDED
    few = [
        pair for pair in pairs if "blk.1.attn_k" in pair[0].spec.name or "blk.1.attn_v" in pair[0].spec.name
    ]
    assert len(few) == 2 and judge(few).outcome is Outcome.NONSENSE


def test_repack_recommends_nothing_that_destroys_a_model(tmp_path: Path) -> None:
    convert(model(tmp_path / "hf", as_is), tmp_path / "m.gguf", TypeChoice(Q8_0))
    with pytest.raises(
        TernError, match="nothing to repack; if the model was trained ternary, `ternconv --type auto`"
    ):
        repack(GGUFSource(tmp_path / "m.gguf"), tmp_path / "r.gguf", TARGETS["pq2_0"])
    lines = run(TERNCONV, "--type", "auto", tmp_path / "m.gguf", tmp_path / "r.gguf")
    assert lines[-2].startswith("verdict: not ternary")
