"""Loading into stock hosts: what must be refused is refused with one error, and nothing leaks or changes.

The hosts are llama-bench and llama-cpp-python, each in a process of its own.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import make_synthetic as synthetic
from ggml_tern import _core
from ggml_tern.convert.quantize.ternarize import Piece, Stats
from ggml_tern.convert.write.writer import OutputFile
from ggml_tern.host import stock as host
from reference import gguf_bytes, in_llama

# Small enough to load in a blink, and with every kind of tensor that the large one has.
TINY = synthetic.Shape(width=256, ffn=768, layers=2, heads=4, kv_heads=2, head_dim=64, vocabulary=1024)
SLOT_IDS = (31, 32, 37, 38)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PQ2_0 model of 400 kB."""
    path: Path = synthetic.write_synthetic(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "pq2_0", TINY)
    return path


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PTQ1_0 model of 2 layers of the 0.6B: 20 MB as 2-bit codes."""
    path: Path = synthetic.write_synthetic(
        tmp_path_factory.mktemp("larger") / "larger.gguf", "ptq1_0", synthetic.Shape(layers=2)
    )
    return path


def llama_bench(model: Path, stock: bool = False, *options: str) -> subprocess.CompletedProcess[str]:
    """A shortest run; returns within two minutes or fails."""
    return subprocess.run(
        [host.llama_cpp_dir() / "llama-bench", "-m", model, "-p", "4", "-n", "1", "-r", "1", *options],
        env=host.host_environment(stock),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


# ---- with and without the plug-in ----


@pytest.mark.parametrize("type_name", ["pq2_0", "ptq1_0"])
def test_stock_tools_refuse_our_types_in_their_own_words(type_name: str, tmp_path: Path) -> None:
    model = synthetic.write_synthetic(tmp_path / "model.gguf", type_name, TINY)
    type_id = {"pq2_0": 142, "ptq1_0": 143}[type_name]
    done = llama_bench(model, True, "-v")
    assert done.returncode == 1
    assert f"invalid ggml type {type_id}" in done.stderr
    # The same command with the plug-in runs, so it was the type that was refused.
    done = llama_bench(model)
    assert done.returncode == 0, done.stderr
    assert "qwen3" in done.stdout


def test_stock_llama_cpp_python_refuses_our_types(tiny: Path) -> None:
    outcome = in_llama.ask("load", [str(tiny)], plugin=False)
    assert "ValueError" in outcome[0]
    assert in_llama.ask("load", [str(tiny)]) == ["loaded"]


@pytest.mark.parametrize("n_gpu_layers", ["0", "1", "99"])
def test_every_split_of_the_layers_runs(tiny: Path, n_gpu_layers: str) -> None:
    done = llama_bench(tiny, False, "-ngl", n_gpu_layers)
    assert done.returncode == 0, done.stderr


# ---- the layout of the weights in memory ----


def test_dense_layout_takes_less_memory(larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, said = {}, {}
    for layout in ("fast", "dense", "auto", "wide"):
        monkeypatch.setenv("TERN_LAYOUT", layout)
        said[layout] = llama_bench(larger, False, "-v").stderr
        # The buffers that llama.cpp reports: name and MiB.
        sizes[layout] = dict(re.findall(r"(TERN\w*) model buffer size = +([0-9.]+) MiB", said[layout]))
    fast, dense = float(sizes["fast"]["TERN_TILES"]), float(sizes["dense"]["TERN_DENSE_TILES"])
    assert dense == pytest.approx(fast * 1.75 / 2.125, rel=1e-3)
    assert sizes["auto"] == sizes["wide"] == sizes["fast"], "there is memory enough"
    assert "TERN_LAYOUT=wide is none of auto, fast and dense" in said["wide"]


def test_a_model_too_large_for_the_fast_layout_goes_dense(tmp_path: Path) -> None:
    """A header that asks for more than any memory, before a sparse file: the choice is made and said."""
    model = synthetic.write_synthetic(tmp_path / "model.gguf", "ptq1_0", TINY)
    n_out = 2**33
    last = [field for field in gguf_bytes.fields(model) if field.kind == "dimension"][-1]
    huge = mutated(model, Mutation("huge", last.at, struct.pack("<Q", n_out)), tmp_path / "huge.gguf")
    with huge.open("r+b") as file:
        file.truncate(model.stat().st_size + n_out * TINY.ffn * 28 // 128)
    done = llama_bench(huge)
    assert done.returncode == 1
    assert re.search(r"huge.gguf: of \d+ MB free memory .* in the dense layout", done.stderr), done.stderr


def sparse(model: Path, n_bytes: int, out: Path) -> Path:
    """The model with its last tensor as large as takes so many bytes in the fast layout, without its data."""
    tensor = _core.read_gguf_header(str(model))["tensors"][-1]
    n_in, bits, stored = {
        _core.TYPE_PTQ1_0: (tensor["shape"][0], 17 / 8, 7 / 4),
        _core.TYPE_F32: (1, 32, 32),
    }[tensor["type"]]
    n_out = int(n_bytes * 8 / bits) // n_in
    last = [field for field in gguf_bytes.fields(model) if field.kind == "dimension"][-1]
    mutated(model, Mutation("large", last.at, struct.pack("<Q", n_out)), out)
    with out.open("r+b") as file:
        file.truncate(model.stat().st_size + int(n_out * n_in * stored) // 8)
    return out


def test_models_that_load_at_the_same_moment_have_layouts_of_their_own(tmp_path: Path) -> None:
    """One too large for the fast layout, whose header is read in the midst of loading a small one."""
    small = synthetic.write_synthetic(tmp_path / "small.gguf", "ptq1_0", TINY)
    huge = sparse(small, 2**43, tmp_path / "huge.gguf")
    buffers = in_llama.ask("buffers_of_one_while_another_opens", str(small), str(huge))
    assert "TERN_TILES" in buffers and "TERN_DENSE_TILES" not in buffers, buffers


def test_split_models_choose_their_layout_by_the_sum_of_their_parts(tmp_path: Path) -> None:
    """Two parts that would each fit in the fast layout, and do not together. The sizes are those of the
    header; the process that loads it could not have so much."""
    free = _core.machine_memory()[1]
    parts = [
        sparse(part, free * 6 // 10, tmp_path / part.name)
        for part in write_split(tmp_path, 2, folder="whole")
    ]
    done = llama_bench(parts[0])
    assert done.returncode == 1
    said = re.findall(r"ggml-tern: (\S+): of (\d+) MB free memory .* fast one of (\d+) MB", done.stderr)
    assert len(said) == 1, done.stderr
    assert said[0][0] == str(parts[0]) and int(said[0][2]) > int(said[0][1]), said


# ---- broken and hostile files ----


@dataclass(frozen=True)
class Mutation:
    """Bytes to put at a place of the file; the file may also be cut there."""

    name: str
    at: int
    bytes: bytes = b""
    cut: bool = False


def hostile_headers(path: Path) -> Iterator[Mutation]:
    """Every kind of number in the header at values that overflow, exhaust or mislead."""
    fields = gguf_bytes.fields(path)

    def number(kind: str, n: int = 0) -> gguf_bytes.Field:
        return [f for f in fields if f.kind == kind][n]

    u32_edges = [0, 2**31 - 1, 2**31, 2**32 - 1]
    u64_edges = [2**31, 10**9, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 31, 2**64 - 1]
    for kind in ("tensor count", "key count", "key length", "string length", "array length", "name length"):
        field = number(kind)
        for value in u64_edges:
            yield Mutation(f"{kind} {value}", field.at, struct.pack("<Q", value))
    for value in (0, *u64_edges):
        yield Mutation(f"dimension {value}", number("dimension").at, struct.pack("<Q", value))
        yield Mutation(f"second dimension {value}", number("dimension", 1).at, struct.pack("<Q", value))
    for value in (1, 32, *u64_edges, 2**64 - 32):
        yield Mutation(f"offset {value}", number("offset", 1).at, struct.pack("<Q", value))
    for value in (5, 6, *u32_edges[1:]):
        yield Mutation(f"dimension count {value}", number("dimension count").at, struct.pack("<I", value))
    # 42 is not among them: these blocks under that id are a legacy file, and it is read as one.
    for value in (31, 32, *range(36, 42), 43, 44, 141, 143, 144, *u32_edges[1:]):
        yield Mutation(f"tensor type {value}", number("tensor type").at, struct.pack("<I", value))
    for value in (13, *u32_edges[1:]):
        yield Mutation(f"key type {value}", number("key type").at, struct.pack("<I", value))
        yield Mutation(f"array type {value}", number("array type").at, struct.pack("<I", value))
    yield Mutation("array of arrays", number("array type").at, struct.pack("<I", 9))
    for value in (0, 1, 4, 2**24 + 3, *u32_edges[1:]):
        yield Mutation(f"version {value}", number("version").at, struct.pack("<I", value))
    yield Mutation("magic", 0, b"GGML")
    yield Mutation("duplicate tensor", number("tensor name", 1).at, _name_at(path, number("tensor name", 1)))


def _name_at(path: Path, field: gguf_bytes.Field) -> bytes:
    """The name of the tensor two further on, which has the same length (blk.0 and blk.1 of one kind)."""
    names = [f for f in gguf_bytes.fields(path) if f.kind == "tensor name"]
    twin = next(f for f in names if f.at > field.at and f.size == field.size)
    return path.read_bytes()[twin.at : twin.at + twin.size]


def truncations(path: Path) -> Iterator[Mutation]:
    size, start = path.stat().st_size, gguf_bytes.data_offset(path)
    fields = gguf_bytes.fields(path)
    places = {0, 1, 3, 4, 7, 8, 15, 16, 23, 24, start - 1, start, start + 1, size - 1, (start + size) // 2}
    places |= {f.at for f in fields if f.kind in ("tensor type", "offset")}
    places |= {f.at + 4 for f in fields if f.kind in ("string length", "array length", "name length")}
    for at in sorted(places):
        yield Mutation(f"cut at {at}", at, cut=True)


def mutated(path: Path, mutation: Mutation, out: Path) -> Path:
    data = path.read_bytes()
    tail = b"" if mutation.cut else data[mutation.at + len(mutation.bytes) :]
    out.write_bytes(data[: mutation.at] + mutation.bytes + tail)
    return out


def test_hostile_and_truncated_files_in_llama_cpp_python(tiny: Path, tmp_path: Path) -> None:
    """One process tries them all: it must refuse each one, and still load the good one at the end."""
    mutations = [*hostile_headers(tiny), *truncations(tiny)]
    paths = [mutated(tiny, m, tmp_path / f"{i}.gguf") for i, m in enumerate(mutations)]
    outcomes = in_llama.ask("load", [str(p) for p in paths] + [str(tiny)])
    accepted = [m.name for m, o in zip(mutations, outcomes, strict=False) if not o.startswith("ValueError")]
    assert accepted == []
    assert outcomes[-1] == "loaded"


def _short_list(path: Path) -> list[Mutation]:
    """One of each kind: llama-bench takes a process for each."""
    seen: dict[str, Mutation] = {}
    for mutation in [*hostile_headers(path), *truncations(path)]:
        kind = re.sub(r"[\d]+$", "", mutation.name)
        if kind == "tensor type " or kind not in seen:
            seen[mutation.name if kind == "tensor type " else kind] = mutation
    return list(seen.values())


def test_hostile_and_truncated_files_in_llama_bench(tiny: Path, tmp_path: Path) -> None:
    """Ends with exit code 1, and says why: in a line of ours that names the file, or in the host's own."""
    reason = re.compile(rf"ggml-tern: {re.escape(str(tmp_path))}/bad\.gguf: \S+|gguf_init_from_\w+: \S+")
    wrong = []
    for mutation in _short_list(tiny):
        done = llama_bench(mutated(tiny, mutation, tmp_path / "bad.gguf"), False, "-v")
        if done.returncode != 1 or not reason.search(done.stderr):
            wrong.append((mutation.name, done.returncode, done.stderr[-500:]))
    assert wrong == []


def test_the_slots_that_the_plugin_uses_are_no_types_of_files(tiny: Path, tmp_path: Path) -> None:
    """A file that says 31 or 37 in earnest is no file of ours, though inside the process these ids work."""
    data = bytearray(tiny.read_bytes())
    for slot in SLOT_IDS:
        for field in gguf_bytes.fields(tiny):
            if field.kind == "tensor type" and struct.unpack_from("<I", data, field.at)[0] in (
                142,
                *SLOT_IDS,
            ):
                struct.pack_into("<I", data, field.at, slot)
        bad = tmp_path / f"{slot}.gguf"
        bad.write_bytes(data)
        assert in_llama.ask("load", [str(bad)])[0].startswith("ValueError")


def test_flipped_bits_never_crash(tiny: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Any single flipped bit of the header: refused, or loaded (a reserved bit, a letter of a name).

    The model's own numbers are left out: whether 131074 layers make sense is the host's to judge, and stock
    llama.cpp ends with an assertion there, without the plug-in and for its own types too.
    """
    data = tiny.read_bytes()
    fields = gguf_bytes.fields(tiny)
    # Most bytes of a header are the letters of tokens; the numbers between them are what matters.
    left_out = ("string", "array", "value")
    numbers = [f.at + i for f in fields if f.kind not in left_out for i in range(f.size)]
    paths = []
    for i, at in enumerate(rng.choice(np.array(numbers), 150, replace=False)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        path = tmp_path / f"flip{i}-at-{at}.gguf"
        path.write_bytes(flipped)
        paths.append(path)
    outcomes = in_llama.ask("load", [str(p) for p in paths])
    odd = [(p.name, o) for p, o in zip(paths, outcomes, strict=True) if not re.match("loaded|ValueError", o)]
    assert odd == []


# ---- what loading leaves behind ----


def test_the_file_is_not_changed(tiny: Path) -> None:
    before = (hashlib.sha256(tiny.read_bytes()).hexdigest(), tiny.stat().st_mtime_ns)
    tiny.chmod(0o444)
    assert in_llama.ask("load", [str(tiny)]) == ["loaded"]
    tiny.chmod(0o644)
    assert (hashlib.sha256(tiny.read_bytes()).hexdigest(), tiny.stat().st_mtime_ns) == before
    assert [p.name for p in tiny.parent.iterdir()] == [tiny.name]


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_load_free_load_again_keeps_memory_flat(larger: Path, n_gpu_layers: int) -> None:
    kib = in_llama.ask("load_repeatedly", str(larger), 10, n_gpu_layers)
    print("anonymous KiB after each free:", kib)
    assert len(kib) == 10
    # 20 MB of weights a time: a leak of them would show as 140 MB, one of the token table as 30.
    assert max(kib[3:]) - min(kib[3:]) < 6 * 1024


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_open_files_are_closed_again(tiny: Path, n_gpu_layers: int) -> None:
    """The translated header lives in a memory file: none of them stays."""
    after = in_llama.ask("descriptors_after_loads", str(tiny), 5, n_gpu_layers)
    assert after[0] == after[-1], after


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_peak_memory_of_loading(larger: Path, n_gpu_layers: int) -> None:
    """Anonymous memory while loading: the packed size plus at most 300 MB; here the model as floats would
    be 330 MB, and the margin for the host's own tables is held to what they need."""
    packed = larger.stat().st_size
    peak_kib = in_llama.ask("peak_of_loading", str(larger), n_gpu_layers)
    print(f"packed {packed / 1e6:.0f} MB, peak of anonymous memory while loading {peak_kib / 1e3:.0f} MB")
    assert peak_kib * 1024 <= packed + 100e6


# ---- saving what was loaded ----


@pytest.mark.parametrize("type_name", ["pq2_0", "ptq1_0", "q2_0", "tq2_0"])
def test_a_model_that_is_saved_again_has_the_types_of_files(type_name: str, tmp_path: Path) -> None:
    """libllama writes the ids that types have inside the process, which no program may read from a file."""
    model = synthetic.write_synthetic(tmp_path / "model.gguf", type_name, TINY)
    saved = tmp_path / "saved.gguf"
    in_llama.ask("save", str(model), str(saved))
    tensors = [
        sorted((t["name"], t["type"], t["shape"]) for t in _core.read_gguf_header(str(path))["tensors"])
        for path in (model, saved)
    ]
    assert tensors[0] == tensors[1]
    first, second = in_llama.ask("digests", [str(model), str(saved)], list(range(100, 120)), 99)
    assert first == second


# ---- several files, several models ----


def write_split(path: Path, n_shards: int, folder: str = ".") -> list[Path]:
    """The tiny model in shards as llama-gguf-split names and marks them; all keys are in the first."""
    path = path / folder
    path.mkdir(exist_ok=True)
    plan = [(t, synthetic.encode(t, s, 0), s) for t, s in synthetic.plan(TINY, "ptq1_0", "pq2_0")]
    names = [path / f"tiny-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
    for i, name in enumerate(names):
        part = plan[i * len(plan) // n_shards : (i + 1) * len(plan) // n_shards]
        with OutputFile(name, "qwen3") as out:
            if i == 0:
                synthetic.add_metadata(out.metadata, TINY, "split")
                synthetic.add_tokenizer(out.metadata, TINY.vocabulary)
            out.metadata.add_uint16("split.no", i)
            out.metadata.add_uint16("split.count", n_shards)
            out.metadata.add_int32("split.tensors.count", len(plan))
            targets = [synthetic.target_of(tensor, stored) for tensor, _, stored in part]
            out.write_header(targets)
            for target, (_, data, _) in zip(targets, part, strict=True):
                out.write_tensor(target, iter([Piece(data, Stats())]), lambda n_bytes: None)
            out.commit()
    return names


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_split_files_load_as_one(tmp_path: Path, n_gpu_layers: int) -> None:
    shards = write_split(tmp_path, 3)
    whole = synthetic.write_synthetic(tmp_path / "whole.gguf", "ptq1_0", TINY, embed="pq2_0")
    tokens = list(range(300, 340))
    split_digest, whole_digest = in_llama.ask("digests", [str(shards[0]), str(whole)], tokens, n_gpu_layers)
    assert split_digest == whole_digest
    shards[2].unlink()
    assert in_llama.ask("load", [str(shards[0])])[0].startswith("ValueError")


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_models_in_one_process_do_not_mix(tmp_path: Path, n_gpu_layers: int) -> None:
    """Five types at once, evaluated in turns, give the logits that each gives alone."""
    paths = [
        str(synthetic.write_synthetic(tmp_path / f"{name}.gguf", name, TINY, seed=i))
        for i, name in enumerate(synthetic.TERNARY)
    ]
    tokens = list(range(100, 150))
    alone = [in_llama.ask("digests", [path], tokens, n_gpu_layers)[0] for path in paths]
    assert len(set(alone)) == len(paths)
    assert in_llama.ask("digests_in_turns", paths, tokens, n_gpu_layers) == alone


def test_models_loaded_at_the_same_moment(tmp_path: Path) -> None:
    """Eight threads load different files at once; each gets its own."""
    paths = [
        str(synthetic.write_synthetic(tmp_path / f"{i}.gguf", ("pq2_0", "ptq1_0")[i % 2], TINY, seed=i))
        for i in range(8)
    ]
    tokens = list(range(100, 120))
    assert in_llama.ask("digests_by_threads", paths, tokens) == in_llama.ask("digests", paths, tokens, 99)


def test_in_llama_reports_a_crash(tiny: Path) -> None:
    """The tests above would notice: a child that dies is an error here, not a pass."""
    with pytest.raises(subprocess.CalledProcessError):
        in_llama.ask("crash")
