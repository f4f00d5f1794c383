"""ternconv --dry-run says what the conversion makes, with its exit codes, and writes nothing."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert_models import (
    gemma3_dir,
    llama_config,
    llama_dir,
    per_group,
    per_tensor,
    random_tensors,
    ternary_dir,
    write_json,
    write_weights,
)
from ggml_tern import _core, api
from ggml_tern.convert.pipeline import Report
from ggml_tern.convert.quantize.ternarize import Stats
from reference import ROOT
from reference.small_disk import in_small_tmpfs
from rotated_checkpoints import CONFIGS, checkpoint

TERNCONV = str(Path(sys.executable).parent / "ternconv")

TINY = ROOT / "models" / "tiny-qwen35"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TERNCONV, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def as_gguf(folder: Path) -> Path:
    api.convert(llama_dir(folder / "hf"), folder / "source.gguf", type="q8_0")
    return folder / "source.gguf"


def half_ternary(folder: Path) -> Path:
    """Of its two blocks one is ternary."""
    model = llama_dir(folder)
    tensors = random_tensors(llama_config())
    for name, values in tensors.items():
        if "layers.0." in name and values.ndim == 2:
            tensors[name] = (np.sign(values) * np.float32(0.5)).astype(np.float32)
    write_weights(model, tensors)
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama_dir, {}),
        (llama_dir, {"type": "auto"}),
        (llama_dir, {"type": "tq2_0", "keep": {"attn_*": "q4_0"}, "embed": "f16"}),
        (llama_dir, {"rotate": True, "signs": 7}),
        (gemma3_dir, {"type": "pq2_0", "embed": "q8_0"}),
        (lambda folder: ternary_dir(folder, per_tensor(0.5)), {"lossless": True}),
        (lambda folder: ternary_dir(folder, per_group(128)), {"group_size": 256}),
        (half_ternary, {"type": "auto"}),
        (as_gguf, {}),
        (lambda folder: TINY, {"lossless": True}),
    ],
    ids=["llama", "auto", "mixed", "rotate", "gemma3", "lossless", "groups", "half", "gguf", "rotated"],
)
def test_it_foresees_the_conversion(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    model = make(tmp_path / "model") if make is not as_gguf else as_gguf(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    foreseen: Report = api.convert(model, out / "m.gguf", dry_run=True, **options)
    assert list(out.iterdir()) == []
    made: Report = api.convert(model, out / "m.gguf", **options)
    assert (foreseen.dry, made.dry) == (True, False)
    assert foreseen.size == made.size == (out / "m.gguf").stat().st_size
    assert foreseen.notes == made.notes and foreseen.chats == made.chats

    def shapes(report: Report) -> list[tuple[object, ...]]:
        return [(t.spec.name, t.spec.shape, t.type, t.wanted, t.group, t.nbytes) for t in report.targets]

    assert shapes(foreseen) == shapes(made)
    assert foreseen.judgement.outcome is made.judgement.outcome
    for target, expected, found in zip(made.targets, foreseen.stats, made.stats, strict=True):
        assert expected.n == found.n
        # Random weights are alike in all rows.
        assert expected.is_lossless == found.is_lossless, target
        assert math.isclose(expected.relative_error, found.relative_error, rel_tol=0.5, abs_tol=1e-12), target
        assert abs(expected.zeros - found.zeros) <= 0.15 * found.n, target


def test_costs_of_a_larger_tensor() -> None:
    stats = Stats(10, 4, 2.0, 0.5, 0, 3, 2, 1, 0.25)
    assert stats.times(2.5) == Stats(25, 10, 5.0, 1.25, 0, 8, 5, 2, 0.25)
    assert stats.times(1) == stats


def test_what_it_prints(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    dry = run("--dry-run", model, tmp_path / "out.gguf")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert not (tmp_path / "out.gguf").exists()
    made = run(model, tmp_path / "out.gguf")
    lines, real = dry.stdout.splitlines(), made.stdout.splitlines()
    (said,) = [line for line in lines if line.startswith("dry run: ")]
    assert "nothing was written" in said and "16 rows of each tensor" in said
    # The same kinds of tensors in the same types, as many, of the same size.
    for line, real_line in zip(lines, real, strict=False):
        if not line:
            break
        assert line.split()[:5] == real_line.split()[:5] and line.split()[-1] == real_line.split()[-1]
    (size,) = [line for line in real if line.startswith(f"{tmp_path / 'out.gguf'}: ")]
    assert size.replace(": ", ": would be ") in lines
    assert lines[-2].startswith("expected verdict: will not write sense: 14 of 14 ternary tensors")
    assert lines[-1] == "next: the same again with --type auto or --type q8_0"

    ternary = ternary_dir(tmp_path / "ternary", per_tensor(0.5))
    lines = run("--dry-run", ternary, tmp_path / "ternary.gguf").stdout.splitlines()
    assert lines[-1].startswith("expected verdict: kept exactly: ")


def nan_in_the_first_row(folder: Path) -> Path:
    model = llama_dir(folder)
    tensors = random_tensors(llama_config())
    tensors["model.layers.1.mlp.up_proj.weight"][0, 5] = np.nan
    write_weights(model, tensors)
    return model


@pytest.mark.parametrize(
    ("make", "options", "code", "said"),
    [
        (lambda folder: folder, [], 1, "no such file or directory"),
        (nan_in_the_first_row, [], 1, "the element at row 0, column 5 is nan"),
        (llama_dir, ["--lossless"], 1, "do not fit PTQ1_0 without loss"),
        (llama_dir, ["--keep", "nothing=f16"], 1, "nothing"),
        (llama_dir, ["--type", "q9_0"], 2, "q9_0"),
    ],
    ids=["missing", "nan", "lossless", "keep", "usage"],
)
def test_exit_codes_are_those_of_the_conversion(
    tmp_path: Path, make: Callable[[Path], Path], options: list[str], code: int, said: str
) -> None:
    model, output = make(tmp_path / "hf"), tmp_path / "out.gguf"
    dry, made = run("--dry-run", *options, model, output), run(*options, model, output)
    assert dry.returncode == made.returncode == code
    assert said in dry.stderr and said in made.stderr and dry.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == (["hf"] if model.exists() else [])


def test_outputs_that_the_conversion_would_refuse(tmp_path: Path) -> None:
    model, output = llama_dir(tmp_path / "hf"), tmp_path / "out.gguf"
    output.write_text("mine", encoding="ascii")
    dry = run("--dry-run", model, output)
    assert dry.returncode == 1 and "already exists; pass --force" in dry.stderr
    assert run("--dry-run", "--force", model, output).returncode == 0
    assert output.read_text(encoding="ascii") == "mine"
    dry = run("--dry-run", model, tmp_path / "nowhere" / "out.gguf")
    assert dry.returncode == 1 and "does not exist; create it first" in dry.stderr

    mount = tmp_path / "disk"
    mount.mkdir()
    dry = in_small_tmpfs(mount, "64k", [TERNCONV, "--dry-run", str(model), str(mount / "out.gguf")])
    assert dry.returncode == 1 and "no space left on device: the file needs 0." in dry.stderr


def test_of_experts_it_reads_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tensors are made of many."""
    config = CONFIGS["qwen3moe"]
    model = llama_dir(tmp_path / "hf")
    write_json(model / "config.json", config)
    write_weights(model, checkpoint(config, np.random.default_rng(1)))
    sizes: list[int] = []
    real = _core.ternarize

    def counted(type_id: int, rows: Any, **options: Any) -> Any:
        sizes.append(rows.size)
        return real(type_id, rows, **options)

    monkeypatch.setattr(_core, "ternarize", counted)
    report = api.convert(model, tmp_path / "m.gguf", dry_run=True, embed="q8_0", head="q8_0")
    ternary = [target for target in report.targets if target.type.is_ternary]
    assert any("exps" in target.spec.name for target in ternary)
    assert sum(sizes) == sum(16 * target.spec.shape[-1] for target in ternary)
    made = api.convert(model, tmp_path / "m.gguf", embed="q8_0", head="q8_0")
    assert report.size == made.size and report.judgement.outcome is made.judgement.outcome
