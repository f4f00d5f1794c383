"""tern repack: the same values in another type, all else byte for byte, and nothing that would lose."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import check_roundtrips
from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import TARGETS, Report, repack
from ggml_tern.tensors.types import FILE_TYPES
from reference import formats as ref
from reference import gguf_files as files
from reference.random_inputs import random_ternary
from reference.small_disk import in_small_tmpfs

TERN = str(Path(sys.executable).parent / "tern")
TYPES = [pytest.param(f, id=f.name) for f in ref.FORMATS.values()]
# Every kind of value, and file_type in the middle, so that a byte too many or too few shows.
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 7,
    "general.name": "a name",
    "some.numbers": [1, 2, 3],
    "some.strings": ["a", "", "süß"],
    "some.bool": True,
    "some.float": 0.25,
}


def tern(*arguments: Path | str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TERN, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def a_model(path: Path, fmt: ref.Format, rng: np.random.Generator, **changes: Any) -> Path:
    """Ternary matrices with one scale for 256 weights, which fit every type, among tensors that are none."""
    tensors = [files.plain("norm", 0, rng.standard_normal(33).astype(np.float32))]
    for name, shape in (("a", (37, 512)), ("experts", (3, 5, 256)), ("row", (1, 1024))):
        trits, scales = random_ternary(rng, ref.TQ2_0, int(np.prod(shape[:-1])), shape[-1] // 256)
        scales = np.repeat(scales, 256 // fmt.block, axis=1)
        tensors.append(files.ternary(name, fmt, trits.reshape(shape), scales))
    tensors.append(files.plain("embedding", 1, rng.standard_normal((7, 100)).astype(np.float16)))
    return files.write(path, METADATA | changes, tensors)


def values(path: Path) -> dict[str, Any]:
    """Decoded rows of the ternary tensors, and the bytes of the others."""
    return {
        name: np.asarray(tensor.rows[0 : tensor.n_rows]).tobytes()
        if tensor.is_ternary
        else (tensor.type, tensor.data.tobytes())
        for name, tensor in GGUFSource(path).tensors.items()
    }


def run(source: Path, output: Path, target: str, **options: Any) -> Report:
    return repack(GGUFSource(source), output, TARGETS[target], **options)


# ---- what comes out ----


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("fmt", TYPES)
def test_every_type_to_every_type_and_back(
    fmt: ref.Format, target: ref.Format, tmp_path: Path, rng: np.random.Generator
) -> None:
    original = a_model(tmp_path / "in.gguf", fmt, rng, **{"general.file_type": FILE_TYPES[fmt.type_id]})
    told: list[int] = []
    report = run(original, tmp_path / "out.gguf", target.name.lower(), start=told.append, advance=told.append)
    assert values(tmp_path / "out.gguf") == values(original)
    made = GGUFSource(tmp_path / "out.gguf")
    assert {t.type_name for t in made.tensors.values() if t.is_ternary} == {target.name}
    assert list(made.tensors) == ["norm", "a", "experts", "row", "embedding"]
    expected = METADATA | {"general.file_type": FILE_TYPES[target.type_id]}
    found = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in made.metadata.items()}
    assert found == expected and list(found) == list(expected)
    assert told[0] == sum(told[1:]) and report.size == (tmp_path / "out.gguf").stat().st_size
    assert report.notes == []

    run(tmp_path / "out.gguf", tmp_path / "back.gguf", fmt.name.lower())
    assert (tmp_path / "back.gguf").read_bytes() == original.read_bytes()


def test_large_tensors_go_through_in_pieces(tmp_path: Path, rng: np.random.Generator) -> None:
    """More weights than are worked on at once, in rows that do not divide them, by several threads."""
    trits, scales = random_ternary(rng, ref.PTQ1_0, 1501, 27)
    big = rng.integers(0, 256, 5_000_001, np.uint8)
    path = files.write(
        tmp_path / "in.gguf",
        METADATA,
        [files.ternary("w", ref.PTQ1_0, trits, scales), files.plain("big", 24, big)],
    )
    run(path, tmp_path / "out.gguf", "pq2_0", n_threads=3)
    made = GGUFSource(tmp_path / "out.gguf").tensors
    assert made["w"].data.tobytes() == ref.pack(ref.PQ2_0, trits, scales).tobytes()
    assert made["big"].data.tobytes() == big.tobytes()


def test_zero_groups_take_any_scale(tmp_path: Path, rng: np.random.Generator) -> None:
    """Halves of a 256-block with different scales, one of them all zero: by its codes or by its scale."""
    trits, scales = random_ternary(rng, ref.PQ2_0, 9, 4)
    trits[:, ::128] = 1
    trits[:, 128:256] = 0
    scales[:, 2] = 0
    path = files.write(tmp_path / "in.gguf", METADATA, [files.ternary("w", ref.PQ2_0, trits, scales)])
    want = trits * np.repeat(scales, 128, axis=1)
    for target in ("tq2_0", "tq1_0"):
        run(path, tmp_path / f"{target}.gguf", target)
        tensor = GGUFSource(tmp_path / f"{target}.gguf").tensors["w"]
        assert np.array_equal(tensor.rows[0:9], want)


def test_a_zero_group_whose_scale_is_no_number_is_no_zero(tmp_path: Path) -> None:
    """Zero times infinity is not zero, so such a scale is kept or refused."""
    packed = ref.pack(
        ref.PQ2_0, np.repeat(np.array([[0, 1]], np.int8), 128, axis=1), np.ones((1, 2), np.float32)
    )
    packed[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    path = files.write(tmp_path / "in.gguf", METADATA, [files.Tensor("w", 142, (1, 256), packed.tobytes())])
    with pytest.raises(TernError, match="unequal scales"):
        run(path, tmp_path / "out.gguf", "tq2_0")
    run(path, tmp_path / "out.gguf", "ptq1_0")
    with np.errstate(invalid="ignore"):
        assert values(tmp_path / "out.gguf") == values(path)


def test_rows_that_the_blocks_do_not_divide_go_to_q2_0(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.PQ2_0, 5, 3)
    odd = files.ternary("odd", ref.PQ2_0, trits, scales)
    even = files.ternary("even", ref.TQ2_0, *random_ternary(rng, ref.TQ2_0, 64, 2))
    path = files.write(tmp_path / "in.gguf", METADATA, [odd, even])
    report = run(path, tmp_path / "out.gguf", "tq1_0")
    assert values(tmp_path / "out.gguf") == values(path)
    made = GGUFSource(tmp_path / "out.gguf")
    assert [tensor.type_name for tensor in made.tensors.values()] == ["Q2_0", "TQ1_0"]
    assert made.metadata["general.file_type"] == FILE_TYPES[_core.TYPE_TQ1_0]
    assert report.notes == ["n_in 384 is not a multiple of 256, so Q2_0 instead of TQ1_0 in 1 tensor"]


def test_file_type_stays_where_most_weights_are_not_ternary(tmp_path: Path, rng: np.random.Generator) -> None:
    small = files.ternary("w", ref.PQ2_0, *random_ternary(rng, ref.PQ2_0, 2, 1))
    large = files.plain("large", 1, np.zeros((64, 64), np.float16))
    path = files.write(tmp_path / "in.gguf", METADATA, [small, large])
    run(path, tmp_path / "out.gguf", "ptq1_0")
    assert GGUFSource(tmp_path / "out.gguf").metadata["general.file_type"] == 7


def test_a_legacy_file_becomes_a_proper_one(tmp_path: Path, rng: np.random.Generator) -> None:
    trits, scales = random_ternary(rng, ref.PQ2_0, 33, 8)
    legacy = files.ternary("w", ref.PQ2_0, trits, scales, type_id=ref.Q2_0.type_id)
    path = files.write(tmp_path / "in.gguf", METADATA, [legacy, files.plain("n", 0, np.ones(3, np.float32))])
    for target in TARGETS:
        if target.startswith("t"):
            continue
        report = run(path, tmp_path / f"{target}.gguf", target)
        made = GGUFSource(tmp_path / f"{target}.gguf")
        assert not made.is_legacy and made.tensors["w"].type == TARGETS[target]
        assert values(tmp_path / f"{target}.gguf") == values(path)
        assert report.notes == [
            "read as PQ2_0 what stands in the file, in blocks of 128, under the id of Q2_0"
        ]


@pytest.mark.parametrize("target", TARGETS)
def test_i2_s_with_a_scale_that_fp16_holds(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = [files.i2_s("w", rng.integers(-1, 2, (3, 5, 256), np.int8), 1.21875)]
    if target.startswith(("p", "q")):  # an odd number of its blocks
        tensors.append(files.i2_s("odd", rng.integers(-1, 2, (3, 128), np.int8), 0.5))
    path = files.write(tmp_path / "in.gguf", METADATA, tensors)
    run(path, tmp_path / "out.gguf", target)
    assert values(tmp_path / "out.gguf") == values(path)


def test_the_parts_of_a_split_model_become_one_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = [
        files.ternary(f"t{i}", ref.PTQ1_0, *random_ternary(rng, ref.PTQ1_0, 3 + i, 5)) for i in range(5)
    ]
    whole = files.write(tmp_path / "whole.gguf", METADATA, tensors)
    for number, members in enumerate((tensors[:2], tensors[2:3], tensors[3:])):
        keys = {"split.no": number, "split.count": 3, "split.tensors.count": 5}
        metadata = METADATA | keys if number == 0 else keys
        files.write(tmp_path / f"m-{number + 1:05}-of-00003.gguf", metadata, members)
    report = run(tmp_path / "m-00002-of-00003.gguf", tmp_path / "joined.gguf", "pq2_0")
    run(whole, tmp_path / "from_whole.gguf", "pq2_0")
    assert (tmp_path / "joined.gguf").read_bytes() == (tmp_path / "from_whole.gguf").read_bytes()
    assert report.notes == ["joined the 3 parts of the model"]


# ---- what is refused ----


def refused(tmp_path: Path, tensors: list[files.Tensor], target: str, *said: str) -> None:
    path = files.write(tmp_path / "in.gguf", METADATA, tensors)
    with pytest.raises(TernError) as raised:
        run(path, tmp_path / "out.gguf", target)
    message = str(raised.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    for part in said:
        assert part in message
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize("target", ["tq2_0", "tq1_0"])
def test_unequal_scales_are_refused(target: str, tmp_path: Path, rng: np.random.Generator) -> None:
    good = files.ternary("good", ref.TQ2_0, *random_ternary(rng, ref.TQ2_0, 3000, 4))
    trits, scales = random_ternary(rng, ref.PQ2_0, 3000, 4)
    trits[:, ::128] = 1
    scales[:, 1::2] = scales[:, ::2]
    scales[2999, 3] *= 2
    bad = files.ternary("bad", ref.PQ2_0, trits, scales)
    refused(tmp_path, [good, bad], target, "tensor bad", "unequal scales", "--type q2_0")


@pytest.mark.parametrize("target", ["ptq1_0", "tq1_0"])
def test_the_reserved_code_is_refused(target: str, tmp_path: Path) -> None:
    trits = np.ones((2, 256), np.int8)
    trits[1, 77] = 2
    bad = files.ternary("bad", ref.TQ2_0, trits, np.ones((2, 1), np.float32))
    refused(tmp_path, [bad], target, "tensor bad: TQ2_0 to", "reserved code 3")


@pytest.mark.parametrize("scale", [0.1, 70000.0, float("nan"), 1e-9])
def test_an_i2_s_scale_beyond_fp16_is_refused(scale: float, tmp_path: Path) -> None:
    bad = files.i2_s("bad", np.ones((1, 256), np.int8), scale)
    refused(tmp_path, [bad], "q2_0", "tensor bad: its scale", "not exact in fp16", "ternconv")


def test_a_file_without_ternary_tensors_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, [files.plain("w", 0, np.ones((2, 2), np.float32))], "q2_0", "no ternary tensor")


def test_names_in_messages_stay_on_their_line(tmp_path: Path) -> None:
    trits = np.ones((1, 256), np.int8)
    bad = files.ternary("w\n\x1b[31m", ref.PQ2_0, trits, np.array([[1, 2]], np.float32))
    refused(tmp_path, [bad], "tq2_0", r"tensor w\n\x1b[31m: ")


# ---- the command ----


def test_command(tmp_path: Path, rng: np.random.Generator) -> None:
    original = a_model(tmp_path / "in.gguf", ref.PTQ1_0, rng)
    out = tmp_path / "out.gguf"
    result = tern("repack", original, out, "--type", "pq2_0")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == f"{out}: {out.stat().st_size / 1e6:.1f} MB\n"
    assert values(out) == values(original)

    before = out.read_bytes()
    result = tern("repack", original, out, "--type", "q2_0")
    assert (
        result.returncode == 1
        and result.stderr == f"tern: {out}: already exists; pass --force to replace it\n"
    )
    assert out.read_bytes() == before
    assert tern("repack", original, out, "--type", "q2_0", "--force").returncode == 0
    assert values(out) == values(original)


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_output_on_top_of_the_input(force: list[str], tmp_path: Path, rng: np.random.Generator) -> None:
    original = a_model(tmp_path / "in.gguf", ref.PTQ1_0, rng)
    before = original.read_bytes()
    (tmp_path / "link.gguf").hardlink_to(original)
    for output in (original, tmp_path / "link.gguf"):
        result = tern("repack", original, output, "--type", "pq2_0", *force)
        assert result.returncode == 1 and result.stderr.count("\n") == 1 and str(output) in result.stderr
    assert original.read_bytes() == before


def test_failed_write_is_one_line_and_leaves_nothing_behind(tmp_path: Path, rng: np.random.Generator) -> None:
    original = a_model(tmp_path / "in.gguf", ref.PTQ1_0, rng)
    out = tmp_path / "out"
    out.mkdir()
    result = tern(
        "repack",
        *(original, out / "m.gguf", "--type", "pq2_0"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and os.strerror(errno.EFBIG) in result.stderr
    assert list(out.iterdir()) == []


def test_full_disk(tmp_path: Path) -> None:
    trits = np.ones((512, 1024), np.int8)
    tensor = files.ternary("w", ref.PQ2_0, trits, np.ones((512, 8), np.float32))
    original = files.write(tmp_path / "in.gguf", METADATA, [tensor])
    mount = tmp_path / "disk"
    mount.mkdir()
    command = [TERN, "repack", str(original), str(mount / "m.gguf"), "--type", "q2_0"]
    result = in_small_tmpfs(mount, "64k", command)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "no space left on device: the file needs 0.1 MB, 0.1 MB are free in" in result.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Holes, which read as zeros: 4 GB of weights that take no room.
    original = tmp_path / "in.gguf"
    n_rows = 1 << 20
    tensors = [files.Tensor("first", 142, (16, 1 << 15), bytes(16 * 34 * 256))]
    tensors.append(files.Tensor("w", 142, (n_rows, 1 << 14), b""))
    files.write(original, METADATA, tensors)
    os.truncate(original, original.stat().st_size + n_rows * 34 * 128)
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(
        [TERN, "repack", original, out / "m.gguf", "--type", "ptq1_0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size > 1 << 20 for path in out.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert list(out.iterdir()) == []
    assert "Traceback" not in stderr and stdout == ""


def test_a_file_that_would_be_taken_for_an_old_one(tmp_path: Path) -> None:
    """Of so few blocks of Q2_0, the sizes do not tell of how many weights they are."""
    tensor = files.ternary("w", ref.PQ2_0, np.ones((4, 256), np.int8), np.ones((4, 2), np.float32))
    path = files.write(tmp_path / "in.gguf", METADATA, [tensor])
    with pytest.raises(TernError, match=r"out\.gguf: would not be read as it is meant: .* use another"):
        run(path, tmp_path / "out.gguf", "q2_0")
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


# ---- round trips ----


def test_round_trips_of_random_blocks(rng: np.random.Generator) -> None:
    """What tools/check_roundtrips.py does with ten million blocks."""
    check_roundtrips.check(check_roundtrips.random_blocks(rng, 20_001))


def test_round_trips_of_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    chunks = list(check_roundtrips.tensor_blocks(a_model(tmp_path / "in.gguf", ref.TQ1_0, rng)))
    assert sum(map(len, chunks)) == (37 * 512 + 15 * 256 + 1024) // 128
    for chunk in chunks:
        check_roundtrips.check(chunk)


def test_the_check_of_round_trips_can_fail(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    blocks = check_roundtrips.random_blocks(rng, 100)
    transcode = _core.transcode

    def damaged(*arguments: Any) -> Any:
        data = transcode(*arguments)
        data[0, 5] ^= 1
        return data

    monkeypatch.setattr(_core, "transcode", damaged)
    with pytest.raises(AssertionError, match="decoding PTQ1_0"):
        check_roundtrips.check(blocks)
