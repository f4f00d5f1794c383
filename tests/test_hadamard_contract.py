"""The contract of rotated files: each rule broken in turn is refused, with its key, by reader and hosts.

Ignoring a rule would crash nothing: the model would talk fluent nonsense. The hosts are llama-cpp-python,
which tries all broken files in one process, llama-server and llama-bench.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from ggml_tern import _core
from hosted_models import load_in_turns, run_llama_bench, run_llama_server, said_by_plugin
from reference import formats as ref
from reference import gguf_bytes, gguf_files
from reference.one_op import in_new_process
from rotated_files import (
    F32,
    PREFIX,
    TRANSFORM,
    Key,
    Recipe,
    RotatedModel,
    array,
    boolean,
    f32,
    make,
    text,
    texts,
    u32,
)

Change = Callable[[RotatedModel], object]

# As small as models get: one block, widths of 128 and 256.
SMALLEST = Recipe("llama", width=128, ffn=256, layers=1, heads=2, kv_heads=1)
TIED = replace(SMALLEST, arch="qwen3", tied=True)
IDENTITY = replace(SMALLEST, explicit_signs=False)
# A Gated DeltaNet, six value heads of 64 to two key heads, and attention.
HYBRID = replace(SMALLEST, arch="qwen35", state=64, layers=2)


# ---- ways to break a file ----


def put(name: str, *keys: Key) -> list[Change]:
    """One change for each key: the value of prism.hadamard.NAME."""
    return [lambda model, key=key: model.keys.update({PREFIX + name: key}) for key in keys]  # type: ignore[misc]


def put_foreign(name: str, *keys: Key) -> list[Change]:
    """The same for a key that is not of the rotation."""
    return [lambda model, key=key: model.keys.update({name: key}) for key in keys]  # type: ignore[misc]


def drop(name: str) -> Change:
    return lambda model: model.keys.pop(PREFIX + name)


def drop_tensor(name: str) -> Change:
    return lambda model: model.stored.pop(name)


def edit(name: str, function: Callable[[list[Any]], object], element: Kind | None = None) -> Change:
    """An array that is changed in place; element: another type for its values."""

    def change(model: RotatedModel) -> None:
        key = model.keys[PREFIX + name]
        function(key.value)
        model.keys[PREFIX + name] = key._replace(element=element or key.element)

    return change


def append(name: str, *values: Any, element: Kind | None = None) -> list[Change]:
    """One change for each value that goes to the end of an array."""
    return [edit(name, lambda array, value=value: array.append(value), element) for value in values]  # type: ignore[misc]


def all_of(*changes: Change) -> Change:
    def change(model: RotatedModel) -> None:
        for one in changes:
            one(model)

    return change


def rename(old: str, new: str) -> Change:
    """Another name for a folded weight, in the file and in weight_names."""

    def change(model: RotatedModel) -> None:
        model.stored[new] = replace(model.stored.pop(old), name=new)
        names = model.keys[PREFIX + "weight_names"].value
        names[names.index(old)] = new

    return change


def make_vector(name: str) -> Change:
    """A folded weight of one dimension."""
    row = gguf_files.ternary(name, ref.PQ2_0, np.ones((1, 128), np.int8), np.ones((1, 1), np.float32))
    return lambda model: model.stored.update({name: replace(row, shape=(128,))})


def add_head(model: RotatedModel) -> None:
    model.stored["output.weight"] = replace(model.stored["token_embd.weight"], name="output.weight")


@dataclass(frozen=True)
class Rule:
    """A rule about a key, and ways to break it in a file of a recipe. Every way is tried with the reader and
    in llama-cpp-python, the first one in the programs too."""

    key: str
    says: str
    ways: list[Change]
    recipe: Recipe = SMALLEST

    @property
    def full_key(self) -> str:
        return self.key if "." in self.key else PREFIX + self.key


NO_KINDS = [
    "token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ssm_alpha.weight",
    "blk.0.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight", "blk.0.weight", "blk.0.attn_q.bias",
    "blk.0.attn_q", "blk.0.attn_q.weight.", "blk..attn_q.weight", "blk.-1.attn_q.weight",
    "blk.0x.attn_q.weight", "Blk.0.attn_q.weight", "a.blk.0.attn_q.weight", "output.weight\n", "",
    "\x1b[2J\n" + 300 * "x",
]  # fmt: skip

RULES = [
    Rule("version", "is there", [drop("version")]),
    Rule("version", "is 1 or 2", put("version", u32(0), u32(3), u32(2**32 - 1))),
    Rule("version", "is a u32", put("version", text("1"), f32(1.0), boolean(True), array(Kind.UINT32, [1]))),
    Rule(
        "version",
        "is 2 where a rotated table is the head",
        [
            all_of(
                drop_tensor("output.weight"),
                edit("weight_names", lambda names: names.remove("output.weight")),
            )
        ],
    ),
    Rule("tied_output", "is false in version 1", put("tied_output", boolean(True))),
    Rule(
        "tied_output",
        "is true in version 2",
        [drop("tied_output"), *put("tied_output", boolean(False))],
        TIED,
    ),
    Rule("tied_output", "is a bool", put("tied_output", u32(1), text("true")), TIED),
    Rule("tied_output", "goes without a head", [add_head], TIED),
    Rule(
        "inverse_weight_names",
        "has the table of version 2",
        [drop("inverse_weight_names"), *put("inverse_weight_names", texts([]))],
        TIED,
    ),
    Rule("block_size", "is there", [drop("block_size")]),
    Rule(
        "block_size",
        "is a power of two",
        put("block_size", *map(u32, (96, 0, 3, 129, 2**31 + 1, 2**32 - 1))),
    ),
    Rule("block_size", "divides every width", put("block_size", *map(u32, (256, 2**16, 2**31)))),
    Rule("block_size", "is a u32", put("block_size", text("128"), f32(128.0), array(Kind.UINT32, [128]))),
    Rule("transform", "is there", [drop("transform")]),
    Rule(
        "transform",
        "is the one there is",
        put(
            "transform",
            *map(text, ("hadamard", TRANSFORM + "\0", TRANSFORM[:-1], "normalized-signed-" + TRANSFORM[11:])),
        ),
    ),
    Rule("transform", "is a string", put("transform", u32(1), texts([TRANSFORM]))),
    Rule("axis", "is there", [drop("axis")]),
    Rule("axis", "is that of the inputs", put("axis", text("output-first-dimension"), text(""), u32(0))),
    Rule("sign_mode", "is there", [drop("sign_mode")]),
    Rule("sign_mode", "is identity or explicit", put("sign_mode", text("random"), text(""), u32(1))),
    Rule("sign_widths", "is there", [drop("sign_widths"), *put("sign_widths", array(Kind.INT32, []))]),
    Rule("sign_widths", "is empty with identity", put("sign_widths", array(Kind.INT32, [128])), IDENTITY),
    Rule("sign_values", "is empty with identity", put("sign_values", array(Kind.INT8, [1])), IDENTITY),
    Rule(
        "sign_widths",
        "has every folded width",
        [
            all_of(
                edit("sign_widths", lambda widths: widths.remove(256)),
                edit("sign_values", lambda values: values.__delitem__(slice(-256, None))),
            )
        ],
    ),
    Rule(
        "sign_widths",
        "has each width once",
        [
            all_of(*append("sign_widths", 128), edit("sign_values", lambda values: values.extend([1] * 128))),
            all_of(
                *put("sign_widths", array(Kind.INT32, [1] * 5_000)),
                *put("sign_values", array(Kind.INT8, [1] * 5_000)),
            ),
        ],
    ),
    Rule(
        "sign_widths",
        "are widths",
        [
            *append("sign_widths", 0, -128, -(2**31), 2**31 - 1),
            *append("sign_widths", 128.5, element=Kind.FLOAT32),
            *append("sign_widths", float("nan"), float("inf"), 1e300, element=Kind.FLOAT64),
            *append("sign_widths", 2**64 - 1, 2**63, element=Kind.UINT64),
            *put("sign_widths", u32(128), texts(["128"]), array(Kind.BOOL, [True])),
        ],
    ),
    Rule("sign_widths", "match the values", [edit("sign_values", lambda v: v.pop()), drop("sign_values")]),
    Rule("sign_values", "match the widths", append("sign_values", 1)),
    Rule(
        "sign_values",
        "are +1 or -1",
        [
            *(edit("sign_values", lambda v, n=n: v.__setitem__(-1, n)) for n in (0, 2, -2, 127, -128)),  # type: ignore[misc]
            *(
                edit("sign_values", lambda v, n=n: v.__setitem__(0, n), Kind.FLOAT32)  # type: ignore[misc]
                for n in (0.5, float("nan"), 1 + 2**-20)
            ),
            *put("sign_values", u32(1), texts(["+"]), array(Kind.BOOL, [True])),
        ],
    ),
    Rule("weight_names", "is there", [drop("weight_names"), *put("weight_names", texts([]))]),
    Rule("weight_names", "has each name once", append("weight_names", "blk.0.attn_q.weight")),
    Rule(
        "weight_names",
        "are names of the file",
        [
            *append("weight_names", "blk.1.attn_q.weight"),
            *put("weight_names", texts([f"blk.{i}.attn_q.weight" for i in range(5_000)])),
        ],
    ),
    Rule(
        "weight_names",
        "are of the kinds that can be folded",
        [rename("blk.0.attn_q.weight", "blk.0.attn_x.weight"), *append("weight_names", *NO_KINDS)],
    ),
    Rule("weight_names", "are matrices", [make_vector("blk.0.attn_q.weight")]),
    Rule("weight_names", "are strings", put("weight_names", text("output.weight"), array(Kind.UINT32, [1]))),
    Rule(
        "inverse_weight_names",
        "is the embedding at most",
        put(
            "inverse_weight_names",
            texts(["output.weight"]),
            texts(["token_embd.weight"] * 2),
            texts(["token_embd.weight", "output.weight"]),
            texts([""]),
        ),
    ),
    Rule("inverse_weight_names", "is in the file", [drop_tensor("token_embd.weight")]),
    Rule("inverse_weight_names", "are strings", put("inverse_weight_names", text("token_embd.weight"))),
    Rule("gdn_v_grouped", "is a bool", put("gdn_v_grouped", u32(1), text("true")), HYBRID),
    Rule(
        "gdn_v_grouped",
        "has heads to group",
        [
            lambda model: model.keys.pop("qwen35.ssm.time_step_rank"),
            lambda model: model.keys.pop("qwen35.ssm.group_count"),
            *put_foreign("qwen35.ssm.time_step_rank", text("6"), u32(0), u32(2**32 - 1)),
            *put_foreign("qwen35.ssm.group_count", text("2"), u32(0), u32(2**32 - 1)),
        ],
        HYBRID,
    ),
    Rule(
        "gdn_v_grouped",
        "fits the widths",
        [
            *put_foreign("qwen35.ssm.group_count", u32(4), u32(5)),
            *put_foreign("qwen35.ssm.time_step_rank", u32(10), u32(7)),
        ],
        HYBRID,
    ),
    Rule(
        "general.architecture",
        "is one that has rotations",
        put_foreign("general.architecture", *map(text, ("gemma3", "qwen2", "bitnet", "qwen35 "))),
    ),
    Rule("future", "is known", put("future", boolean(False))),
]


@dataclass(frozen=True)
class Broken:
    """A broken file and the key that the refusal must name."""

    name: str
    key: str
    path: Path


def write_broken(folder: Path) -> Iterator[tuple[Rule, list[Broken]]]:
    rng = np.random.default_rng(7)
    models = {recipe: make(recipe, rng) for recipe in {rule.recipe for rule in RULES}}
    for number, rule in enumerate(RULES):
        files = []
        for way, change in enumerate(rule.ways):
            model = copy.deepcopy(models[rule.recipe])
            change(model)
            path = model.write(folder / f"{number}-{way}.gguf")
            files.append(Broken(f"{rule.key} {rule.says}, {way}", rule.full_key, path))
        yield rule, files


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Rule, list[Broken]]]:
    return list(write_broken(tmp_path_factory.mktemp("broken")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What the broken files were made from."""
    folder, rng = tmp_path_factory.mktemp("whole"), np.random.default_rng(7)
    recipes = (SMALLEST, TIED, IDENTITY, HYBRID)
    return [make(recipe, rng).write(folder / f"{i}.gguf") for i, recipe in enumerate(recipes)]


# ---- the reader ----


def test_what_the_reader_tells(tmp_path: Path, rng: np.random.Generator) -> None:
    for recipe in (
        SMALLEST,
        TIED,
        IDENTITY,
        HYBRID,
        replace(HYBRID, grouped=False),
        replace(SMALLEST, inverse=False),
    ):
        model = make(recipe, rng)
        found = _core.read_hadamard(model.write(tmp_path / "m.gguf"))
        assert found is not None
        assert (found["version"], found["tied_output"]) == (2 if recipe.tied else 1, recipe.tied)
        assert found["block_size"] == 128
        assert found["sign_mode"] == ("explicit" if recipe.explicit_signs else "identity")
        assert found["weight_names"] == model.keys[PREFIX + "weight_names"].value
        assert found["inverse_weight_names"] == (["token_embd.weight"] if recipe.inverse else [])
        assert found["gdn_v_grouped"] == (recipe.arch == "qwen35" and recipe.grouped)
        assert found["rotations"].keys() == model.rotations.keys()
        widths = {rotation.n_in for rotation in model.rotations.values()}
        assert found["signs"].keys() == (widths if recipe.explicit_signs else set())
        for name, rotation in model.rotations.items():
            compiled = found["rotations"][name]
            assert (compiled.n_in, compiled.block) == (rotation.n_in, rotation.block)
            assert compiled.v_heads == rotation.v_heads
            if rotation.signs is None:
                assert compiled.signs is None
            else:
                assert compiled.signs.tolist() == rotation.signs.tolist()
                assert found["signs"][rotation.n_in].tolist() == rotation.signs.tolist()


@pytest.mark.parametrize("widths", [Kind.INT32, Kind.UINT32, Kind.UINT64, Kind.INT64, Kind.UINT16])
@pytest.mark.parametrize("values", [Kind.INT8, Kind.INT32, Kind.FLOAT32])
def test_signs_of_other_types(tmp_path: Path, rng: np.random.Generator, widths: Kind, values: Kind) -> None:
    model = make(SMALLEST, rng)
    want = _core.read_hadamard(model.write(tmp_path / "m.gguf"))
    all_of(edit("sign_widths", len, widths), edit("sign_values", len, values))(model)
    found = _core.read_hadamard(model.write(tmp_path / "m.gguf"))
    assert want is not None and found is not None
    assert found["rotations"] == want["rotations"]


def test_what_is_optional(tmp_path: Path, rng: np.random.Generator) -> None:
    """Left out or empty where the contract lets it; a sign vector that no weight needs."""
    model = make(replace(SMALLEST, inverse=False), rng)
    path = tmp_path / "m.gguf"
    found = [_core.read_hadamard(model.write(path))]
    for changes in (
        put("inverse_weight_names", texts([])),
        put("tied_output", boolean(False)),
        put("gdn_v_grouped", boolean(False)),
        [*append("sign_widths", 100), edit("sign_values", lambda values: values.extend([1] * 100))],
    ):
        all_of(*changes)(model)
        found.append(_core.read_hadamard(model.write(path)))
    for contract in found:
        assert contract is not None and found[0] is not None
        assert contract["rotations"] == found[0]["rotations"]


def test_every_kind_that_can_be_folded(tmp_path: Path, rng: np.random.Generator) -> None:
    model = make(SMALLEST, rng)
    kinds = "attn_q attn_k attn_v attn_qkv attn_gate attn_output ffn_gate ffn_up ffn_down ssm_out"
    kinds += (
        " ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp ffn_gate_up_exps"
    )
    names = [f"blk.{number}.{kind}.weight" for kind in kinds.split() for number in (0, 1, 12)]
    for name in names:
        model.stored[name] = replace(model.stored["blk.0.attn_q.weight"], name=name)
    put("weight_names", texts(names))[0](model)
    found = _core.read_hadamard(model.write(tmp_path / "m.gguf"))
    assert found is not None
    assert found["rotations"].keys() == {*names, "token_embd.weight"}


def test_files_without_a_rotation(tmp_path: Path, rng: np.random.Generator) -> None:
    model = make(SMALLEST, rng)
    assert _core.read_hadamard(model.write_twin(tmp_path / "m.gguf")) is None
    assert _core.read_hadamard(model.write_stripped(tmp_path / "m.gguf")) is None
    model.keys = {name: key for name, key in model.keys.items() if not name.startswith(PREFIX)}
    model.keys["prism.hadamar.version"] = model.keys["prism.hadamard"] = text("no key of the rotation")
    assert _core.read_hadamard(model.write(tmp_path / "m.gguf")) is None
    with pytest.raises(FileNotFoundError):
        _core.read_hadamard(tmp_path / "none.gguf")


def test_the_reader_names_the_key(broken: list[tuple[Rule, list[Broken]]]) -> None:
    wrong = []
    for item in (item for _, files in broken for item in files):
        try:
            _core.read_hadamard(item.path)
            wrong.append((item.name, "accepted"))
        except _core.FormatError as error:
            said = str(error)
            if not said.startswith(f"key '{item.key}' ") or not said.isprintable():
                wrong.append((item.name, said))
    assert wrong == []


def test_one_flipped_bit_of_the_signs_is_noticed(tmp_path: Path, rng: np.random.Generator) -> None:
    """It is refused, or (where 1 became -1, that is 0xff: never by one bit) read as another sign."""
    path = make(SMALLEST, rng).write(tmp_path / "m.gguf")
    data = path.read_bytes()
    begin, end = _core.read_gguf_header(path)["key_extents"][PREFIX + "sign_values"]
    for at in rng.integers(end - 384, end, 50):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(_core.FormatError, match=r"prism\.hadamard\.sign_values"):
            _core.read_hadamard(path)
    assert end - begin > 384


# ---- what only the plug-in refuses ----


def stored_as(tensor: gguf_files.Tensor, values: F32, type_name: str) -> gguf_files.Tensor:
    """The tensor in another type."""
    for type_id in _core.TERNARY_TYPES:
        if _core.type_name(type_id) == type_name:
            return replace(tensor, type_id=type_id, data=_core.ternarize(type_id, values)[0].tobytes())
    kind = gguf.GGMLQuantizationType[type_name]
    return replace(tensor, type_id=int(kind), data=gguf.quantize(values, kind).tobytes())


FOREIGN_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "TQ2_0", "TQ1_0"]


def write_foreign(folder: Path) -> list[Broken]:
    """Rotated weights of types that are never multiplied together with a rotation."""
    rng, found = np.random.default_rng(8), []
    for type_name in FOREIGN_TYPES:
        for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
            if type_name.startswith("TQ") and name == "token_embd.weight":
                continue  # rows of 128 do not fit
            model = make(SMALLEST, rng)
            model.stored[name] = stored_as(model.stored[name], model.plain[name], type_name)
            path = model.write(folder / f"{type_name}-{name}.gguf")
            key = "inverse_weight_names" if name == "token_embd.weight" else "weight_names"
            found.append(Broken(f"{name} of type {type_name}", PREFIX + key, path))
    return found


def write_split(folder: Path) -> Path:
    """A rotated model in two parts, as llama-gguf-split makes them: only the first has the keys."""
    path = make(SMALLEST, np.random.default_rng(9)).write(folder / "whole.gguf")
    return gguf_bytes.split_in_two(path, folder / "parts")


# ---- the hosts ----


def refusal(path: Path, key: str) -> re.Pattern[str]:
    return re.compile(rf"ggml-tern: {re.escape(str(path))}: key '{re.escape(key)}' [ -~]+")


def test_llama_cpp_python_refuses_each_broken_file(
    broken: list[tuple[Rule, list[Broken]]], whole: list[Path]
) -> None:
    """One process tries them all, and loads the whole ones at the end."""
    files = [item for _, items in broken for item in items]
    outcomes = in_new_process(load_in_turns, [item.path for item in files] + whole)
    wrong = []
    for item, (outcome, stderr) in zip(files, outcomes, strict=False):
        lines = said_by_plugin(stderr)
        as_expected = len(lines) == 1 and refusal(item.path, item.key).fullmatch(lines[0])
        if not as_expected or not outcome.startswith("ValueError"):
            wrong.append((item.name, outcome, lines))
    assert wrong == []
    assert [(outcome, said_by_plugin(stderr)) for outcome, stderr in outcomes[len(files) :]] == [
        ("loaded", [])
    ] * len(whole)


@pytest.mark.parametrize("run", [run_llama_bench, run_llama_server], ids=["llama-bench", "llama-server"])
def test_programs_refuse_each_broken_file(
    run: Callable[[Path], tuple[int, str]], broken: list[tuple[Rule, list[Broken]]]
) -> None:
    """With the message, and an exit code that says so. One file for every rule: each takes a start."""
    files = [items[0] for _, items in broken]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run, [item.path for item in files]))
    wrong = []
    for item, (code, stderr) in zip(files, outcomes, strict=True):
        lines = said_by_plugin(stderr)
        if code != 1 or not lines or not all(refusal(item.path, item.key).fullmatch(line) for line in lines):
            wrong.append((item.name, code, lines, stderr[-300:]))
    assert wrong == []


def test_whole_files_run(whole: list[Path]) -> None:
    """So that the refusals above are for what was broken."""
    for path in whole:
        code, stderr = run_llama_bench(path)
        assert (code, said_by_plugin(stderr)) == (0, [])


def test_rotated_weights_of_other_types(tmp_path: Path) -> None:
    """llama.cpp would multiply them without asking us."""
    files = write_foreign(tmp_path)
    outcomes = in_new_process(load_in_turns, [item.path for item in files])
    wrong = []
    for item, (outcome, stderr) in zip(files, outcomes, strict=True):
        lines = said_by_plugin(stderr)
        parts = (str(item.path), item.key, *item.name.split(" of type "))
        if (
            not outcome.startswith("ValueError")
            or len(lines) != 1
            or any(part not in lines[0] for part in parts)
        ):
            wrong.append((item.name, outcome, lines))
    assert wrong == []
    for run in (run_llama_bench, run_llama_server):
        code, stderr = run(files[0].path)
        assert code == 1 and files[0].key in said_by_plugin(stderr)[0]


def test_rotated_models_in_parts(tmp_path: Path) -> None:
    """The parts behind the first do not know that their weights are rotated."""
    first = write_split(tmp_path)
    ((outcome, stderr),) = in_new_process(load_in_turns, [first])
    assert outcome.startswith("ValueError")
    for said in (stderr, run_llama_bench(first)[1], run_llama_server(first)[1]):
        (line, *others) = said_by_plugin(said)
        assert set(others) <= {line}
        assert str(first) in line and "prism.hadamard" in line and "tern repack" in line


def test_plain_files_keep_working(tmp_path: Path, rng: np.random.Generator) -> None:
    """Our types without the keys are a plain model, and so are keys that only look alike."""
    model = make(SMALLEST, rng)
    paths = [model.write_stripped(tmp_path / "stripped.gguf"), model.write_twin(tmp_path / "twin.gguf")]
    model.keys = {name: key for name, key in model.keys.items() if not name.startswith(PREFIX)}
    model.keys["prism.hadamar.version"] = u32(9)
    paths.append(model.write(tmp_path / "alike.gguf"))
    for outcome, stderr in in_new_process(load_in_turns, paths):
        assert (outcome, said_by_plugin(stderr)) == ("loaded", [])
