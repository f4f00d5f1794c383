"""`tern verify`: every tensor of a file recomputed from its source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert_models import gemma3_dir, llama_dir, per_group, per_tensor, ternary_dir
from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import convert
from ggml_tern.convert.verify import Verdict, verify
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.types import F32, PQ2_0, PTQ1_0, Q2_0, Q4_0, Q8_0, TQ2_0

TERN = str(Path(sys.executable).parent / "tern")


def verdicts(source: Path, file: Path) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in verify(source, file)}


@pytest.mark.parametrize(
    "choice",
    [
        TypeChoice(PTQ1_0),
        TypeChoice(Q2_0, group=128),
        TypeChoice(PQ2_0, group=256, embedding=Q4_0),
        TypeChoice(TQ2_0, keep=(Keep("attn_*", Q8_0),)),
    ],
)
def test_what_ternconv_makes_is_recomputed(tmp_path: Path, choice: TypeChoice) -> None:
    model = llama_dir(tmp_path / "model", hidden_size=256)
    convert(model, tmp_path / "out.gguf", choice)
    found = verdicts(model, tmp_path / "out.gguf")
    assert len(found) == 20
    for name, verdict in found.items():
        assert verdict is (Verdict.EXACT if "norm" in name else Verdict.QUANTIZED), name


def test_gemma_norms_and_ternary_weights(tmp_path: Path) -> None:
    gemma = gemma3_dir(tmp_path / "gemma")
    convert(gemma, tmp_path / "gemma.gguf", TypeChoice(Q8_0, keep=(Keep("*", F32),)))
    assert set(verdicts(gemma, tmp_path / "gemma.gguf").values()) == {Verdict.EXACT}
    exact = ternary_dir(tmp_path / "exact", per_group(128))
    convert(exact, tmp_path / "exact.gguf", TypeChoice(PTQ1_0))
    assert verdicts(exact, tmp_path / "exact.gguf")["blk.0.ffn_up.weight"] is Verdict.EXACT
    rounded = ternary_dir(tmp_path / "rounded", per_tensor(0.012345))
    convert(rounded, tmp_path / "rounded.gguf", TypeChoice(PTQ1_0))
    assert verdicts(rounded, tmp_path / "rounded.gguf")["blk.0.ffn_up.weight"] is Verdict.SCALES


def flip(path: Path, name: str, row: int, bit: int) -> None:
    """Change one bit in a row of a tensor."""
    tensor = GGUFSource(path).tensors[name]
    header = tensor.part.header
    entry = next(t for t in header["tensors"] if t["name"] == name)
    at = header["data_offset"] + entry["offset"] + row * tensor.blocks.shape[1]
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight", "blk.0.attn_norm.weight"])
def test_one_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    model = llama_dir(tmp_path / "model")
    out = tmp_path / "out.gguf"
    convert(model, out, TypeChoice(PTQ1_0))
    row = 0 if name.endswith("norm.weight") else 77
    flip(out, name, row, 4)
    different = [f for f in verify(model, out) if f.verdict is Verdict.DIFFERENT]
    assert [(f.name, f.first_difference) for f in different] == [(name, row)]
    done = subprocess.run([TERN, "verify", str(model), str(out)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"different from row {row} on" in done.stdout
    assert done.stderr == f"tern: {out}: 1 of 20 tensors are different\n"


def test_two_gguf_files_of_one_model(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    convert(model, tmp_path / "one.gguf", TypeChoice(PQ2_0))
    convert(model, tmp_path / "other.gguf", TypeChoice(PTQ1_0))
    done = subprocess.run(
        [TERN, "verify", "--json", str(tmp_path / "one.gguf"), str(tmp_path / "other.gguf")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert len(findings) == 20
    assert {finding["verdict"] for finding in findings} == {"exact"}
    assert all(finding["relative_error"] == 0 for finding in findings)


def test_another_model(tmp_path: Path) -> None:
    one = llama_dir(tmp_path / "one")
    deeper = llama_dir(tmp_path / "deeper", num_hidden_layers=3)
    wider = llama_dir(tmp_path / "wider", intermediate_size=384)
    other = llama_dir(tmp_path / "other", seed=5)
    convert(one, tmp_path / "out.gguf", TypeChoice(PQ2_0))
    with pytest.raises(TernError, match=r"lacks blk\.2\."):
        list(verify(deeper, tmp_path / "out.gguf"))
    with pytest.raises(TernError, match=r"blk\.0\.ffn_gate\.weight has shape \[256, 128\]"):
        list(verify(wider, tmp_path / "out.gguf"))
    found = verdicts(other, tmp_path / "out.gguf")
    matrices = [name for name in found if "norm" not in name]
    assert {found[name] for name in matrices} == {Verdict.DIFFERENT}


def test_damaged_file_is_one_line(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "model")
    (tmp_path / "bad.gguf").write_bytes(np.arange(64, dtype=np.uint8).tobytes())
    done = subprocess.run(
        [TERN, "verify", str(model), str(tmp_path / "bad.gguf")], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "bad.gguf" in done.stderr
