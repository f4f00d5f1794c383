"""Files from before PQ2_0 had an id of its own: its blocks of 128 weights stand under the id of Q2_0.

Nothing but the sizes of the tensors tells such a file apart from Q2_0, whose blocks hold 64. It runs as the
PQ2_0 that it is; a file that could be either is refused, since the wrong reading is fluent nonsense.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rotated_files
from ggml_tern import _core
from hosted_models import (
    TOKENS,
    Run,
    assert_agree,
    assert_bits,
    load_in_turns,
    run_llama_bench,
    run_llama_server,
    said_by_plugin,
    with_plugin,
    without_plugin,
)
from reference import formats as ref
from reference import gguf_bytes, gguf_files, in_llama
from reference.one_op import in_new_process
from reference.random_inputs import random_ternary
from rotated_files import RECIPES, RotatedModel

TERN = str(Path(sys.executable).parent / "tern")
METADATA: dict[str, Any] = {"general.architecture": "llama"}
NORM = gguf_files.plain("norm", 0, np.ones(40, np.float32))


def legacy(tensor: gguf_files.Tensor) -> gguf_files.Tensor:
    """The tensor as it was written then."""
    return replace(tensor, type_id=ref.Q2_0.type_id) if tensor.type_id == ref.PQ2_0.type_id else tensor


def pq2_0_model(name: str) -> RotatedModel:
    recipe = replace(RECIPES[name], formats=(ref.PQ2_0,))
    return rotated_files.make(recipe, np.random.default_rng(3))


def make_legacy(model: RotatedModel) -> RotatedModel:
    return replace(model, stored={name: legacy(tensor) for name, tensor in model.stored.items()})


def read(path: Path) -> dict[str, Any]:
    return _core.read_gguf_header(path)


# ---- in hosts ----


@pytest.mark.parametrize("name", ["llama, in part", "qwen3moe"])
def test_legacy_files_run_as_pq2_0(name: str, tmp_path: Path) -> None:
    """Not rotated; matrices and stacks of experts, with tensors of other types between them."""
    model = pq2_0_model(name)
    old, new = (
        make_legacy(model).write_stripped(tmp_path / "old.gguf"),
        model.write_stripped(tmp_path / "new.gguf"),
    )
    assert not {tensor["type"] for tensor in read(old)["tensors"]} & {42}
    runs = [
        Run(path, layers, n_batch) for path in (new, old) for layers, n_batch in ((99, 64), (0, 64), (99, 1))
    ]
    logits = with_plugin(*runs)
    for one, other in zip(logits[:3], logits[3:], strict=True):
        assert_bits(one, other)
    code, stderr = run_llama_bench(old)
    assert (code, said_by_plugin(stderr)) == (0, [])


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_legacy_and_rotated(name: str, tmp_path: Path) -> None:
    model = pq2_0_model(name)
    old, new = make_legacy(model).write(tmp_path / "old.gguf"), model.write(tmp_path / "new.gguf")
    contract = _core.read_hadamard(old)
    assert contract is not None and contract["rotations"].keys() == model.rotations.keys()
    runs = [Run(path, layers) for path in (new, old) for layers in (99, 0)]
    logits = with_plugin(*runs)
    for one, other in zip(logits[:2], logits[2:], strict=True):
        assert_bits(one, other)
    (wanted,) = without_plugin(Run(model.write_twin(tmp_path / "twin.gguf"), 0))
    assert_agree(wanted, logits[2])


def test_a_legacy_file_in_parts(tmp_path: Path) -> None:
    model = pq2_0_model("qwen3")
    new = model.write_stripped(tmp_path / "new.gguf")
    old = make_legacy(model).write_stripped(tmp_path / "old.gguf")
    first = gguf_bytes.split_in_two(old, tmp_path / "parts")
    whole, parts = in_llama.ask("digests", [str(new), str(first)], TOKENS, 99)
    assert whole == parts


def test_q2_0_of_today_is_left_alone(tmp_path: Path) -> None:
    """The same model in blocks of 64: other sizes, the same weights."""
    model = pq2_0_model("qwen3")
    stored = {
        name: gguf_files.ternary(name, ref.Q2_0, trits_of(tensor), np.repeat(scales_of(tensor), 2, axis=1))
        if tensor.type_id == ref.PQ2_0.type_id
        else tensor
        for name, tensor in model.stored.items()
    }
    path = replace(model, stored=stored).write_stripped(tmp_path / "q2_0.gguf")
    assert read(path)["legacy_q2_0"] is False
    # Scales in pairs are groups of 128: the same bits.
    one, other = with_plugin(Run(path), Run(model.write_stripped(tmp_path / "pq2_0.gguf")))
    assert_bits(one, other)


def blocks_of(tensor: gguf_files.Tensor) -> tuple[ref.I8, ref.F32]:
    rows = np.frombuffer(tensor.data, np.uint8).reshape(int(np.prod(tensor.shape[:-1])), -1)
    return ref.unpack(ref.PQ2_0, rows)


def trits_of(tensor: gguf_files.Tensor) -> ref.I8:
    return blocks_of(tensor)[0].reshape(tensor.shape)


def scales_of(tensor: gguf_files.Tensor) -> ref.F32:
    return blocks_of(tensor)[1]


# ---- what the sizes tell ----


def old(rng: np.random.Generator, name: str, n_rows: int, n_blocks: int = 1) -> gguf_files.Tensor:
    """Rows of 128 * n_blocks weights as they were written then."""
    return gguf_files.ternary(name, ref.PQ2_0, *random_ternary(rng, ref.PQ2_0, n_rows, n_blocks), type_id=42)


def new(rng: np.random.Generator, name: str, n_rows: int, n_blocks: int = 1) -> gguf_files.Tensor:
    """The same of today's Q2_0: 128 weights in two blocks."""
    return gguf_files.ternary(name, ref.Q2_0, *random_ternary(rng, ref.Q2_0, n_rows, 2 * n_blocks))


@pytest.mark.parametrize("alignment", [32, 64, 4096])
@pytest.mark.parametrize("pad_end", [True, False])
@pytest.mark.parametrize("order", ["norm first", "norm last"])
def test_sizes_tell(
    alignment: int, pad_end: bool, order: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Alone or among others, large or, beside a large one, small."""
    metadata = METADATA | {"general.alignment": alignment}
    large = alignment  # rows: two bytes a row more or less, and the alignment no longer hides it
    for make, is_legacy, type_id in ((old, True, 142), (new, False, 42)):
        tensors = [make(rng, "small", 1), make(rng, "large", large), make(rng, "small too", 2)]
        tensors = [NORM, *tensors] if order == "norm first" else [*tensors, NORM]
        path = gguf_files.write(tmp_path / "m.gguf", metadata, tensors, alignment, pad_end)
        header = read(path)
        assert header["legacy_q2_0"] is is_legacy
        for tensor in header["tensors"]:
            if tensor["name"] != "norm":
                n_groups = tensor["shape"][1]
                assert tensor["type"] == type_id
                assert tensor["nbytes"] == (34 if is_legacy else 36) * n_groups


def ambiguous_tensors(rng: np.random.Generator) -> dict[str, list[gguf_files.Tensor]]:
    """Tensors of which both readings take the same space, of either kind."""
    return {
        "one group": [old(rng, "w", 1)],
        "one group of today": [new(rng, "w", 1)],
        "eight groups": [old(rng, "w", 2, 4), NORM],
        "several": [old(rng, "v", 3), NORM, old(rng, "w", 7)],
    }


@pytest.mark.parametrize("case", ambiguous_tensors(np.random.default_rng(0)))
def test_what_could_be_either_is_refused(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", METADATA, ambiguous_tensors(rng)[case])
    with pytest.raises(_core.FormatError, match=r"'[vw]'.*Q2_0.*64.*128") as raised:
        read(path)
    assert "\n" not in str(raised.value)
    for arguments in (["inspect"], ["inspect", "--json"], ["hash"]):
        done = subprocess.run([TERN, *arguments, path], capture_output=True, text=True, timeout=60)
        assert done.returncode == (2 if arguments == ["hash"] else 1) and done.stdout == ""
        assert done.stderr.startswith(f"tern: {path}: ") and done.stderr.count("\n") == 1
        assert "Q2_0" in done.stderr and "64" in done.stderr and "128" in done.stderr


def test_the_last_bytes_of_a_file_tell(tmp_path: Path, rng: np.random.Generator) -> None:
    """Where a file ends with its data, without padding, even one group is clear."""
    for make, type_id in ((old, 142), (new, 42)):
        path = gguf_files.write(tmp_path / "m.gguf", METADATA, [make(rng, "w", 1)], pad_end=False)
        assert read(path)["tensors"][0]["type"] == type_id


@pytest.mark.parametrize("slack", [4096, 100_000])
@pytest.mark.parametrize("make", [old, new])
def test_slack_behind_the_last_tensor(
    make: Callable[..., gguf_files.Tensor], slack: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Bytes of nothing at the end of a file, so that blocks of either size fit and none fits exactly."""
    path = gguf_files.write(tmp_path / "m.gguf", METADATA, [NORM, make(rng, "w", 16)])
    with open(path, "ab") as file:
        file.write(bytes(slack))
    with pytest.raises(_core.FormatError, match=r"'w'.*Q2_0.*64.*128"):
        read(path)
    # Another tensor can tell.
    path = gguf_files.write(tmp_path / "m.gguf", METADATA, [make(rng, "v", 16), NORM, make(rng, "w", 16)])
    with open(path, "ab") as file:
        file.write(bytes(slack))
    kind = 42 if make is new else 142
    assert [tensor["type"] for tensor in read(path)["tensors"]] == [kind, 0, kind]


def test_an_ambiguous_model_is_refused_by_hosts(tmp_path: Path, rng: np.random.Generator) -> None:
    """A model whose only Q2_0 tensor is that small. Stock llama.cpp alone takes it for one of today."""
    # One key head of four elements, for as many query heads as fill a group.
    recipe = replace(RECIPES["llama"], width=128, ffn=256, layers=1, heads=32, kv_heads=1, head_dim=4)
    model = rotated_files.make(replace(recipe, formats=(ref.PQ2_0,)), rng)
    keys = {name: key for name, key in model.keys.items() if not name.startswith(rotated_files.PREFIX)}
    small = "blk.0.attn_v.weight"
    tensors = [gguf_files.plain(name, 0, values) for name, values in model.plain.items() if name != small]
    path = rotated_files.write(tmp_path / "m.gguf", keys, [*tensors, legacy(model.stored[small])])
    said = re.compile(rf"ggml-tern: {re.escape(str(path))}: tensor '{small}' has type Q2_0.*64.*128.*")
    ((outcome, stderr),) = in_new_process(load_in_turns, [path])
    assert outcome.startswith("ValueError")
    (line,) = said_by_plugin(stderr)
    assert said.fullmatch(line)
    for run in (run_llama_bench, run_llama_server):
        code, stderr = run(path)
        lines = said_by_plugin(stderr)
        assert code == 1 and lines and all(said.fullmatch(line) for line in lines)
    assert in_llama.ask("load", [str(path)], plugin=False) == ["loaded"]
