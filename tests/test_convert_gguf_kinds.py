"""GGUF files as sources: only what is known to be a matrix of a product becomes ternary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggml_tern.convert.model.choice import Keep, TypeChoice
from ggml_tern.convert.pipeline import Report, convert
from ggml_tern.convert.verify import Verdict, verify
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.tensors.types import F16, F32, PTQ1_0, Q8_0, TensorType
from reference import gguf_files as files

F16Array = npt.NDArray[np.float16]


def half(rng: np.random.Generator, *shape: int) -> F16Array:
    return rng.standard_normal(shape).astype(np.float16)


#: By architecture, tensors with rows that are none of a matrix in a product, as llama.cpp names them.
TABLES = {
    "gpt2": ["position_embd.weight"],
    "bert": ["position_embd.weight", "token_types.weight", "cls.weight", "cls.output.weight"],
    "mamba": ["blk.0.ssm_x.weight", "blk.0.ssm_dt.weight", "blk.0.ssm_a"],
    "rwkv6": [
        "blk.0.time_mix_lerp_w.weight",
        "blk.0.time_mix_decay_w1.weight",
        "blk.0.time_mix_first.weight",
        "blk.0.channel_mix_key.weight",
    ],
    "t5": ["enc.blk.0.attn_rel_b.weight", "dec.blk.0.cross_attn_rel_b.weight"],
    "gemma3n": ["per_layer_token_embd.weight", "blk.0.laurel_l.weight", "blk.0.altup_router.weight"],
    "deepseek2": ["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"],
    "of-tomorrow": ["blk.0.some_table.weight", "everything.weight"],
}
#: Those that are, in the same architectures.
MATRICES = {
    "gpt2": ["blk.0.attn_qkv.weight", "blk.0.ffn_down.weight"],
    "bert": ["blk.0.attn_output.weight"],
    "mamba": ["blk.0.ssm_in.weight", "blk.0.ssm_out.weight"],
    "rwkv6": [],
    "t5": ["enc.blk.0.attn_q.weight", "dec.blk.0.cross_attn_v.weight", "dec.blk.0.ffn_up.weight"],
    "gemma3n": ["blk.0.ffn_gate.weight"],
    "deepseek2": ["blk.0.attn_q_a.weight", "blk.0.attn_kv_b.weight", "blk.0.ffn_up_shexp.weight"],
    "of-tomorrow": ["blk.0.attn_q.weight", "blk.11.ffn_down_exps.weight"],
}


@pytest.mark.parametrize("architecture", TABLES)
def test_only_matrices_become_ternary(tmp_path: Path, rng: np.random.Generator, architecture: str) -> None:
    tensors = [files.plain(name, 1, half(rng, 4, 256)) for name in TABLES[architecture]]
    tensors += [
        files.plain(name, 1, half(rng, *((2,) if "exps" in name else ()), 4, 256))
        for name in MATRICES[architecture]
    ]
    # A norm and a router stay in full precision, as ever.
    tensors += [files.plain("blk.0.attn_norm.weight", 0, np.ones(256, np.float32))]
    tensors += [files.plain("blk.0.ffn_gate_inp.weight", 1, half(rng, 4, 256))]
    path = files.write(tmp_path / "in.gguf", {"general.architecture": architecture}, tensors)
    report = convert(path, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    types = types_of(report)
    assert {types.pop(name) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight")} == {F32}
    assert types == dict.fromkeys(TABLES[architecture], F16) | dict.fromkeys(MATRICES[architecture], PTQ1_0)
    source, found = GGUFSource(path), GGUFSource(tmp_path / "out.gguf")
    for name in TABLES[architecture]:
        assert np.array_equal(found.tensors[name].data, source.tensors[name].data)
    (note,) = (note for note in report.notes if note.startswith("kept as they are stored"))
    assert f"({len(TABLES[architecture])} tensors)" in note
    verdicts = {finding.name: finding.verdict for finding in verify(path, tmp_path / "out.gguf")}
    assert {verdicts[name] for name in TABLES[architecture]} == {Verdict.EXACT}
    # --keep is somebody's word for it.
    asked = TypeChoice(PTQ1_0, keep=(Keep(TABLES[architecture][0], Q8_0),))
    assert types_of(convert(path, tmp_path / "asked.gguf", asked))[TABLES[architecture][0]] == Q8_0


def types_of(report: Report) -> dict[str, TensorType]:
    return {target.spec.name: target.type for target in report.targets}


def test_what_nothing_here_decodes_is_kept(tmp_path: Path) -> None:
    """Integers, and the blocks of a type without a decoder."""
    table = files.plain("position_ids", 26, np.arange(512, dtype=np.int32).reshape(2, 256))
    matrix = files.plain("blk.0.ffn_up.weight", 1, np.ones((2, 256), np.float16))
    path = files.write(tmp_path / "in.gguf", {"general.architecture": "gpt2"}, [table, matrix])
    convert(path, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    found = GGUFSource(tmp_path / "out.gguf").tensors["position_ids"]
    assert found.type == 26 and np.array_equal(found.data.view(np.int32), np.arange(512))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"general.architecture": "clip"}, "a projector"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "an adapter"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "a projector"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.architecture": "llama", "general.type": "poem"}, "general.type 'poem'"),
    ],
)
def test_what_is_no_model_is_not_converted(tmp_path: Path, keys: dict[str, object], says: str) -> None:
    tensor = files.plain("v.blk.0.ffn_up.weight", 1, np.ones((2, 256), np.float16))
    path = files.write(tmp_path / "in.gguf", keys, [tensor])
    with pytest.raises(TernError, match=rf"in\.gguf: is .*{says}"):
        convert(path, tmp_path / "out.gguf", TypeChoice(PTQ1_0))
    assert not (tmp_path / "out.gguf").exists()
