"""tern eval: its figures against plain ones, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import compare_logits
import rotated_files
from ggml_tern import _core
from ggml_tern.evaluate import scoring, text
from reference import ROOT
from rotated_files import RECIPES
from tern_command import tern

MODELS = ROOT / "models"
TEXT = MODELS / "held-out.txt"
QWEN3, QWEN35 = (MODELS / name / f"{name}-ptq1_0.gguf" for name in ("tiny-qwen3", "tiny-qwen35"))


def figures(*arguments: str | Path) -> dict[str, object]:
    done = tern("eval", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_scores_are_what_they_are_called(rng: np.random.Generator) -> None:
    """Against sums over plain probabilities."""
    ours, theirs = (rng.normal(scale=3, size=(7, 11)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, 11, 7).astype(np.int32)
    found = scoring.score(ours, theirs, tokens)
    for i in range(7):
        p, q = (
            np.exp(x[i].astype(np.float64)) / np.exp(x[i].astype(np.float64)).sum() for x in (theirs, ours)
        )
        assert math.isclose(found.divergence[i], sum(p * np.log(p / q)), rel_tol=1e-9)
        assert math.isclose(found.loss[i], -math.log(q[tokens[i]]), rel_tol=1e-9)
        assert math.isclose(found.reference_loss[i], -math.log(p[tokens[i]]), rel_tol=1e-9)
        assert found.same_top[i] == (p.argmax() == q.argmax())
    summary = scoring.summarize(scoring.joined([found, found]))
    assert summary.positions == 14
    assert math.isclose(summary.perplexity.value, math.exp(found.loss.mean()))
    assert summary.kl is not None and math.isclose(summary.kl.value, found.divergence.mean())
    assert summary.kl_max == found.divergence.max()
    assert summary.as_json()["kl_median"] == np.median(found.divergence)


def test_logits_of_any_size_stay_finite() -> None:
    logits = np.array([[3e38, -3e38, 0], [-3e38, -3e38, -3e38]], np.float32)
    found = scoring.score(logits, logits, np.array([0, 1], np.int32))
    assert found.divergence.tolist() == [0, 0]
    assert np.allclose(found.loss, [0, math.log(3)])


@pytest.mark.parametrize(("n", "context", "expected"), [(10, 4, 2), (8, 4, 2), (3, 4, 0)])
def test_windows(n: int, context: int, expected: int) -> None:
    tokens = np.arange(100, 100 + n, dtype=np.int32)
    plain = list(text.windows(tokens, context, None))
    assert [w.tolist() for w in plain] == [tokens[i * 4 : i * 4 + 4].tolist() for i in range(expected)]
    assert [w.tolist() for w in text.windows(tokens, context, 7)] == [[7, *w[1:]] for w in plain]
    assert tokens[0] == 100  # they are copies


def test_figures_of_two_models() -> None:
    """Against the logits of the first window, from a process that knows nothing of tern eval."""
    context = 64
    found = figures(QWEN35, "--against", QWEN3, "--text", TEXT, "--context", str(context), "--tokens", "64")
    tokens = compare_logits.host_tokens(QWEN3, TEXT.read_text(encoding="utf-8")[:4000])[:context]
    serving = compare_logits.Serving(kv_type=_core.TYPE_F16, flash_attention=True)
    ours, theirs = (compare_logits.host_logits(path, tokens, serving)[32:-1] for path in (QWEN35, QWEN3))
    expected = compare_logits.compare(theirs, ours)
    kl, same_top = found["kl"], found["same_top"]
    assert isinstance(kl, dict) and isinstance(same_top, dict)
    assert found["positions"] == 31
    assert kl["value"] == pytest.approx(expected.mean_kl, rel=1e-3)
    assert found["kl_max"] == pytest.approx(expected.max_kl, rel=1e-3)
    assert same_top["value"] == pytest.approx(expected.top1)
    assert kl["value"] > 0.1  # worth comparing


@pytest.mark.parametrize("reference", [QWEN3, MODELS / "tiny-qwen3"], ids=["itself", "its checkpoint"])
def test_nothing_is_lost(reference: Path) -> None:
    found = figures(QWEN3, "--against", reference, "--text", TEXT, "-c", "128", "--tokens", "256")
    assert found["kl_max"] == pytest.approx(0, abs=1e-6)
    assert found["same_top"] == {"value": 1.0, "error": 0.0}
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"])
    assert [path.name for path in QWEN3.parent.glob(".tern-eval-*")] == []


def test_without_a_reference() -> None:
    done = tern("eval", QWEN3, "--text", TEXT, "-c", "128", "--tokens", "256")
    assert done.returncode == 0
    assert "perplexity" in done.stdout and "KL" not in done.stdout
    assert set(figures(QWEN3, "--text", TEXT, "-c", "128", "--tokens", "256")) == {
        *("windows", "context", "positions", "perplexity")
    }


def test_refusals(tmp_path: Path) -> None:
    short, binary, broken = tmp_path / "short.txt", tmp_path / "binary.txt", tmp_path / "broken.gguf"
    short.write_text("A few words.")
    binary.write_bytes(b"\xff\xfe\x00")
    broken.write_bytes(QWEN3.read_bytes()[:5000])
    other = rotated_files.make(RECIPES["qwen3"], np.random.default_rng(1)).write(tmp_path / "other.gguf")
    cases = [
        ((QWEN3, "--text", short), "fewer than a window of 512"),
        ((QWEN3, "--text", binary), "is not UTF-8 text"),
        ((QWEN3, "--text", tmp_path / "none.txt"), "No such file"),
        ((QWEN3, "--text", tmp_path), "Is a directory"),
        ((tmp_path / "none.gguf", "--text", TEXT), "no such file"),
        ((short, "--text", TEXT), "is text that begins with"),
        ((broken, "--text", TEXT), "llama.cpp does not load it"),
        ((QWEN3, "--against", other, "--text", TEXT), "have different tokenizers"),
    ]
    for arguments, expected in cases:
        done = tern("eval", *arguments)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and last.startswith("tern: ") and expected in last, (
            arguments,
            done.stderr,
        )
