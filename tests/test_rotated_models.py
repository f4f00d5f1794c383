"""Rotated models in stock llama.cpp with the plug-in compute what their plain twins compute without it.

The truth is a twin of each model whose float weights are what the rotated ones stand for, evaluated by stock
llama.cpp alone. And without its rotation the same file talks nonsense, which these tests would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import compare_logits
import rotated_files
from ggml_tern import _core
from ggml_tern.host import stock as host
from hosted_models import (
    TOKENS,
    Run,
    assert_agree,
    assert_bits,
    evaluate,
    evaluate_in_turns,
    load,
    load_in_turns,
    said_by_plugin,
    with_plugin,
    without_plugin,
)
from llama_server import serving
from reference import formats as ref
from reference import in_llama
from reference.one_op import in_new_process
from reference.random_inputs import assert_matches, random_activations, random_blocks
from rotated_files import N_VOCABULARY, RECIPES, RotatedModel, Rotation

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]

#: All layers on the plug-in's device, none, the head alone, and half of the layers.
LAYERS = (99, 0, 1, 2)


# ---- the models ----


@dataclass(frozen=True)
class Files:
    """A model in its forms. logits: of the twin, in stock llama.cpp without the plug-in."""

    model: RotatedModel
    rotated: Path
    twin: Path
    stripped: Path
    logits: F32


def write_all(model: RotatedModel, folder: Path, name: str) -> Files:
    rotated = model.write(folder / f"{name}.gguf")
    twin = model.write_twin(folder / f"{name}-twin.gguf")
    stripped = model.write_stripped(folder / f"{name}-stripped.gguf")
    (logits,) = without_plugin(Run(twin, n_gpu_layers=0))
    return Files(model, rotated, twin, stripped, logits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    """The files of each recipe by name, made when they are first asked for."""
    folder, made = tmp_path_factory.mktemp("rotated"), dict[str, Files]()

    def files_of(name: str) -> Files:
        if name not in made:
            # The same in every run: what int8 activations may do to a random model is close to the limit.
            model = rotated_files.make(RECIPES[name], np.random.default_rng(1))
            made[name] = write_all(model, folder, name)
        return made[name]

    return files_of


@pytest.mark.parametrize("name", RECIPES)
def test_rotated_models_are_their_twins(name: str, models: Callable[[str], Files]) -> None:
    """On the device and on the CPU list, whole prompts and token by token; without its rotation, nonsense."""
    files = models(name)
    ways = [(layers, 1) for layers in LAYERS] + [(99, 3)]
    runs = [
        Run(files.rotated, layers, n_batch, n_threads) for n_batch in (64, 1) for layers, n_threads in ways
    ]
    *served, stripped = with_plugin(*runs, Run(files.stripped))
    for logits in served:
        assert_agree(files.logits, logits)
    # n_gpu_layers moves tensors between our two devices, and threads share the work: nothing else.
    for batch in (served[: len(ways)], served[len(ways) :]):
        for other in batch[1:]:
            assert_bits(batch[0], other)
    # The model is worth comparing.
    assert 0.3 < compare_logits.entropy(files.logits) < 5.5
    nonsense = compare_logits.compare(files.logits, stripped)
    print("without the rotation", nonsense)
    assert nonsense.mean_kl > 0.5


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen35", "qwen3moe", "qwen3next"])
def test_every_rotation_counts(name: str, models: Callable[[str], Files], tmp_path: Path) -> None:
    """If a single kind of weight were not rotated, or ssm_out not permuted, the tests here would see it."""
    files = models(name)
    kinds = sorted({weight.split(".")[-2] for weight in files.model.rotations})
    runs = []
    for kind in kinds:
        plain = dict(files.model.plain)
        for weight, rotation in files.model.rotations.items():
            if f"{kind}.weight" in weight:
                # ssm_out keeps its rotation and loses its permutation.
                unpermuted = replace(rotation, v_heads=None)
                stored = rotation.rotate(plain[weight])
                plain[weight] = unpermuted.unrotate(stored) if rotation.v_heads else stored
        runs.append(Run(replace(files.model, plain=plain).write_twin(tmp_path / f"{kind}.gguf"), 0))
    for kind, logits in zip(kinds, without_plugin(*runs), strict=True):
        wrong = compare_logits.compare(files.logits, logits)
        print(kind, wrong)
        assert wrong.mean_kl > 5e-3, kind


def test_without_mmap(models: Callable[[str], Files]) -> None:
    ways = [(models(name).rotated, layers) for name in ("qwen3, tied", "qwen35") for layers in (0, 99)]
    mapped = [Run(path, layers) for path, layers in ways]
    logits = with_plugin(*mapped, *(replace(run, use_mmap=False) for run in mapped))
    for one, other in zip(logits[: len(ways)], logits[len(ways) :], strict=True):
        assert_bits(one, other)


# ---- several models ----


@pytest.fixture(scope="module")
def crowd(models: Callable[[str], Files], tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """Models of one shape: two with different signs, one with larger blocks, and a plain ternary one."""
    folder, found = tmp_path_factory.mktemp("crowd"), [models("qwen3")]
    for seed, block in ((2, 128), (3, 256)):
        recipe = replace(RECIPES["qwen3"], block=block)
        found.append(write_all(rotated_files.make(recipe, np.random.default_rng(seed)), folder, str(seed)))
    return found


def test_models_in_one_process_do_not_mix(crowd: list[Files]) -> None:
    """Rotated ones, one of them loaded twice, and the plain file with the same weights, all in turns."""
    paths = [crowd[0].rotated, crowd[1].rotated, crowd[0].stripped, crowd[2].rotated]
    alone = [in_new_process(evaluate_in_turns, [[Run(path, 99)], [Run(path, 0)]]) for path in paths]
    for files, logits in ((crowd[0], alone[0]), (crowd[1], alone[1]), (crowd[2], alone[3])):
        assert_agree(files.logits, logits[0])
        assert_agree(files.logits, logits[1])
    order = [3, 0, 2, 1, 0]
    groups = [[Run(paths[i], layers) for i in order] for layers in (99, 0)]
    together = in_new_process(evaluate_in_turns, groups)
    wanted = [alone[i][group] for group in (0, 1) for i in order]
    for one, other in zip(wanted, together, strict=True):
        assert_bits(one, other)


def test_models_loaded_at_the_same_moment(crowd: list[Files]) -> None:
    """By threads of one process; each gets its own rotation."""
    paths = [str(path) for files in crowd for path in (files.rotated, files.stripped)] * 2
    together = in_llama.ask("digests_by_threads", paths, TOKENS)
    assert together == in_llama.ask("digests", paths, TOKENS, 99)
    assert len(set(together)) == 6


def test_headers_read_in_between(crowd: list[Files], tmp_path: Path) -> None:
    """A file that is opened for its vocabulary alone, or that fails to load, leaves nothing behind."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(crowd[1].rotated.read_bytes())
    model = replace(crowd[1].model, stored=dict(crowd[1].model.stored))
    del model.stored["blk.1.ffn_norm.weight"]
    model.write(broken)
    wanted, nonsense = with_plugin(Run(crowd[0].rotated), Run(crowd[0].stripped))
    found = in_new_process(
        evaluate_after, [crowd[1].rotated], [broken], [Run(crowd[0].rotated), Run(crowd[0].stripped)]
    )
    assert_bits(wanted, found[0])
    assert_bits(nonsense, found[1])


def evaluate_after(vocabularies: list[Path], failures: list[Path], runs: list[Run]) -> list[F32]:
    """The logits of runs, each after the other files were opened in vain."""
    host.enable()
    import llama_cpp

    logits = []
    for run in runs:
        for path in vocabularies:
            llama_cpp.Llama(str(path), vocab_only=True, verbose=False).close()
        for path in failures:
            with pytest.raises(ValueError):
                load(Run(path))
        logits += evaluate([run], True)
    return logits


@dataclass(frozen=True)
class Twins:
    """Two files with the very same weights, byte by byte, that stand for different ones."""

    first: Files
    second: Files


@pytest.fixture(scope="module")
def same_bytes(models: Callable[[str], Files], tmp_path_factory: pytest.TempPathFactory) -> Twins:
    first = models("qwen3")
    rng = np.random.default_rng(11)
    model = RotatedModel(dict(first.model.keys), first.model.stored, dict(first.model.plain))
    flips = {width: rotated_files.random_signs(rng, width) for width in (256, 512)}
    for name, rotation in first.model.rotations.items():
        signs = flips[rotation.n_in]
        model.rotations[name] = replace(rotation, signs=signs)
        model.plain[name] = model.rotations[name].unrotate(rotation.rotate(first.model.plain[name]))
    widths = model.keys[rotated_files.PREFIX + "sign_widths"].value
    values = np.concatenate([flips[width] for width in widths]).tolist()
    key = rotated_files.PREFIX + "sign_values"
    model.keys[key] = model.keys[key]._replace(value=values)
    return Twins(first, write_all(model, tmp_path_factory.mktemp("same"), "same"))


def evaluate_or_refuse(runs: list[Run]) -> list[F32 | None]:
    """The logits of each run with all of them loaded; None where loading failed."""
    host.enable()
    models: list[Any] = []
    for run in runs:
        try:
            models.append(load(run))
        except ValueError:
            models.append(None)
    logits: list[F32 | None] = []
    for llm in models:
        if llm is not None:
            llm.eval(TOKENS)
        logits.append(None if llm is None else np.array(llm.scores[: len(TOKENS)], np.float32))
    return logits


@pytest.mark.parametrize("n_gpu_layers", [0, 99])
def test_the_same_bytes_with_other_signs(n_gpu_layers: int, same_bytes: Twins) -> None:
    """Nothing tells their tensors apart: the second is refused. The first goes on, and loads again."""
    files = [same_bytes.first, same_bytes.second, same_bytes.first]
    assert compare_logits.compare(files[0].logits, files[1].logits).mean_kl > 0.5
    outcomes = in_new_process(evaluate_or_refuse, [Run(file.rotated, n_gpu_layers) for file in files])
    assert outcomes[1] is None
    for logits in (outcomes[0], outcomes[2]):
        assert logits is not None
        assert_agree(files[0].logits, logits)


def test_what_is_said_of_the_same_bytes(same_bytes: Twins) -> None:
    first, second = same_bytes.first.rotated, same_bytes.second.rotated
    outcomes = in_new_process(load_in_turns, [first, second, first])
    assert [outcome for outcome, _ in outcomes[::2]] == ["loaded", "loaded"]
    assert outcomes[1][0].startswith("ValueError")
    (line,) = said_by_plugin(outcomes[1][1])
    assert line.startswith(f"ggml-tern: {second}: ") and "rotates it otherwise" in line


def test_the_host_does_not_see_that_a_model_is_rotated(models: Callable[[str], Files]) -> None:
    """Newer ones read the keys of the contract too, and would rotate a second time."""
    for name in ("qwen3, tied", "qwen35"):
        keys = in_llama.ask("metadata_keys", str(models(name).rotated))
        assert "general.architecture" in keys
        assert [key for key in keys if key.startswith("prism.")] == []


def test_a_rotated_model_is_not_saved_without_its_keys(
    models: Callable[[str], Files], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """libllama would write the rotated weights, and not that they are."""
    saved = tmp_path / "saved.gguf"
    in_llama.ask("save", str(models("qwen3, tied").rotated), str(saved))
    assert not saved.exists()
    (line,) = said_by_plugin(capfd.readouterr().err)
    assert line.startswith(f"ggml-tern: {saved}: not written: tensor ") and "is rotated" in line


# ---- what is added to rotated weights at run time ----


@pytest.mark.parametrize("name", ["llama", "qwen3, tied", "qwen35", "qwen3moe"])
def test_lora_at_run_time(name: str, models: Callable[[str], Files], tmp_path: Path) -> None:
    """Adapters know nothing of rotations: what they add is the same for a model and its twin."""
    files = models(name)
    lora = rotated_files.write_lora(tmp_path / "lora.gguf", files.model, np.random.default_rng(5))
    (wanted,) = without_plugin(Run(files.twin, 0, lora=lora))
    effect = compare_logits.compare(files.logits, wanted)
    print("effect", effect)
    assert effect.mean_kl > 0.05
    for logits in with_plugin(*(Run(files.rotated, layers, lora=lora) for layers in LAYERS)):
        assert_agree(wanted, logits)


# ---- llama-server ----


def server_command(model: Path, *options: str) -> list[str]:
    command = [str(host.llama_cpp_dir() / "llama-server"), "-m", str(model), "-c", "256", "-np", "1"]
    return [*command, "-t", "1", "--no-warmup", "-ctk", "f32", "-ctv", "f32", "-fa", "off", *options]


def served_distribution(command: list[str]) -> F32:
    """The natural logarithms of the probabilities of all tokens after TOKENS, float32 [N_VOCABULARY].

    Raises RuntimeError when the server refuses the model.
    """
    # A token is only told with its text, so it must be one that has one: the last pair of letters. The
    # probabilities are those of before the bias.
    bias = [[N_VOCABULARY - 4, 1000]]
    request = {"prompt": TOKENS, "n_predict": 1, "n_probs": N_VOCABULARY, "logit_bias": bias}
    with serving(None, command=command, variables=host.host_environment(stock=False)) as server:
        answer = server.post("/completion", request).json
    (first,) = answer["completion_probabilities"]
    logits = np.full(N_VOCABULARY, -np.inf, np.float32)
    for entry in first["top_logprobs"]:
        logits[entry["id"]] = entry["logprob"]
    assert np.isfinite(logits).all()
    return logits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3, tied", ""),
        ("qwen3, tied", "--fit off -ot .*=CPU"),
        ("qwen3, tied", "--fit off -ngl 0 -ot token_embd.*=CPU"),
        ("qwen3, tied", "--fit off -lm none --no-host --no-repack"),
        ("qwen3moe", "--fit off -ngl 0"),
        ("qwen3moe", "--fit off -ngl 0 -ot .*=CPU"),
        ("qwen3moe", "--fit off --cpu-moe"),
        ("qwen3moe", "-ncmoe 1"),
        ("qwen35", "--fit off -ngl 1 -ot ssm_out.*=CPU,attn_(q|k)\\.weight=CPU"),
    ],
)
def test_wherever_weights_are_put(name: str, options: str, models: Callable[[str], Files]) -> None:
    """Tensors that are put elsewhere by hand compute the same, or the server ends and says why."""
    files = models(name)
    try:
        found = served_distribution(server_command(files.rotated, *options.split()))
    except RuntimeError as error:
        assert "=CPU" in options or "moe" in options
        assert "ended with exit code 1" in str(error)
        assert said_by_plugin(str(error)), error
        return
    agreement = compare_logits.compare(files.logits[-1:], found[None])
    print(agreement)
    assert agreement.mean_kl <= 3e-3


def generate(command: list[str]) -> Any:
    """What llama-server makes of a prompt: greedy tokens, and how many of them were drafted and accepted."""
    request = {
        "prompt": TOKENS[:16], "n_predict": 40, "temperature": 0, "ignore_eos": True, "return_tokens": True,
    }  # fmt: skip
    with serving(None, command=command, variables=host.host_environment(stock=False)) as server:
        return server.post("/completion", request).json


@pytest.mark.parametrize("draft", ["rotated", "stripped", "other"])
def test_draft_models(draft: str, crowd: list[Files]) -> None:
    """A draft model beside its target: the tokens are those of the target alone. The target itself as draft
    knows them all; the same weights without a rotation, or another model, do not."""
    target = crowd[0].rotated
    path = {"rotated": target, "stripped": crowd[0].stripped, "other": crowd[1].rotated}[draft]
    alone = generate(server_command(target, "--fit", "off"))
    options = ["--fit", "off", "--spec-type", "draft-simple", "--spec-draft-p-min", "0", "-md", str(path)]
    both = generate(server_command(target, *options))
    assert both["tokens"] == alone["tokens"]
    drafted, accepted = both["timings"]["draft_n"], both["timings"]["draft_n_accepted"]
    print(f"{accepted} of {drafted} accepted")
    assert drafted >= 10
    assert accepted >= 0.9 * drafted if draft == "rotated" else accepted <= 0.3 * drafted


# ---- the rotation itself, and products with it ----

ISAS = _core.available_isas()
BLOCKS = [128, 256, 512, 1024, 2048]


def compiled(rotation: Rotation) -> _core.Rotation:
    return _core.Rotation(rotation.n_in, rotation.block, rotation.signs, rotation.v_heads)


def random_rotations(rng: np.random.Generator, block: int) -> Iterator[Rotation]:
    """Without signs, with signs, and with signs and heads, which may be smaller than blocks and larger."""

    def signs(n_in: int) -> I8:
        return rotated_files.random_signs(rng, n_in)

    # Whole groups of 128, and blocks of any size.
    unit = max(block, 128)
    yield Rotation(3 * unit, block)
    n_in = unit * int(rng.integers(1, 6))
    yield Rotation(n_in, block, signs(n_in))
    n_k, repeat = (int(n) for n in rng.integers(2, 4, 2))
    n_in = n_k * repeat * unit
    yield Rotation(n_in, block, signs(n_in), (n_k, n_k * repeat))
    yield Rotation(n_in, block, None, (n_k, n_k * repeat * 2))


def assert_near(found: F32, wanted: F32) -> None:
    """To fp32 rounding, measured against the size of a row."""
    size = np.sqrt(np.mean(np.square(wanted, dtype=np.float64), axis=-1, keepdims=True))
    assert (np.abs(found - wanted) <= 1e-6 * np.maximum(size, np.abs(wanted))).all()


@pytest.mark.parametrize("block", [1, 2, 32, 64, *BLOCKS, 4096])
def test_rotate_and_unrotate(block: int, rng: np.random.Generator) -> None:
    for rotation in random_rotations(rng, block):
        x = rng.standard_normal((int(rng.integers(1, 8)), rotation.n_in)).astype(np.float32)
        ours = compiled(rotation)
        assert_near(ours.rotate(x), rotation.rotate(x))
        assert_near(ours.unrotate(x), rotation.unrotate(x))
        # One undoes the other, both ways.
        assert_near(ours.unrotate(ours.rotate(x)), x)
        assert_near(ours.rotate(ours.unrotate(x)), x)
        assert ours.rotate(x, n_threads=1).tobytes() == ours.rotate(x, n_threads=3).tobytes()


def test_a_rotation_keeps_products(rng: np.random.Generator) -> None:
    """w . x = rotate(w) . rotate(x): the contract's formula is that of the plain weights."""
    for block in BLOCKS:
        for rotation in random_rotations(rng, block):
            w, x = (rng.standard_normal((3, rotation.n_in)).astype(np.float32) for _ in range(2))
            ours = compiled(rotation)
            wanted = w.astype(np.float64) @ x.T
            found = ours.rotate(w).astype(np.float64) @ ours.rotate(x).T
            np.testing.assert_allclose(found, wanted, atol=1e-5 * np.sqrt(rotation.n_in))


def test_permutation_by_hand() -> None:
    """Two key heads, three value heads to each, heads of one element: tiled 0..5 to grouped."""
    x = np.arange(6, dtype=np.float32)[None]
    assert _core.Rotation(6, 1, v_heads=(2, 6)).rotate(x).tolist() == [[0, 2, 4, 1, 3, 5]]
    assert _core.Rotation(6, 1, v_heads=(2, 6)).unrotate(x).tolist() == [[0, 3, 1, 4, 2, 5]]
    assert _core.Rotation(2, 2).rotate(np.array([[1, 0]], np.float32)).tolist() == [
        [np.float32(0.5**0.5)] * 2
    ]


@pytest.mark.parametrize("type_id", [_core.TYPE_PQ2_0, _core.TYPE_PTQ1_0], ids=["PQ2_0", "PTQ1_0"])
@pytest.mark.parametrize("block", [32, 64, *BLOCKS])
def test_rotated_products(block: int, type_id: int, rng: np.random.Generator) -> None:
    fmt = ref.FORMATS[type_id]
    for rotation in random_rotations(rng, block):
        packed = random_blocks(rng, fmt, int(rng.integers(1, 20)), rotation.n_in)
        weights = ref.dequantize(fmt, packed)
        x = random_activations(rng, 9, rotation.n_in)
        # The product with the plain weights, but for int8.
        wanted = x.astype(np.float64) @ rotation.unrotate(weights).T.astype(np.float64)
        size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
        rotated = compiled(rotation).rotate(x)
        for isa in ISAS:
            y = _core.matmul(type_id, packed, x, isa=isa, rotation=compiled(rotation))
            assert_matches(fmt, packed, rotated, y)
            assert (np.abs(y - wanted) <= 0.01 * size).all()
            n_cols = int(rng.integers(1, 9))
            few = _core.matmul(type_id, packed, x[:n_cols], isa=isa, rotation=compiled(rotation))
            assert few.tobytes() == y[:n_cols].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_bits_of_rotated_products(isa: str, rng: np.random.Generator) -> None:
    """They depend neither on the batch nor on the threads, and are those of rotating first."""
    for block in (128, 1024):
        rotation = Rotation(2048, block, rotated_files.random_signs(rng, 2048), (2, 4))
        weights = random_blocks(rng, ref.PTQ1_0, 67, 2048)
        x = random_activations(rng, 33, 2048)
        ours = compiled(rotation)
        whole = _core.matmul(_core.TYPE_PTQ1_0, weights, x, isa=isa, n_threads=1, rotation=ours)
        for n_threads, batch in ((1, 1), (2, 7), (3, 33)):
            parts = [
                _core.matmul(
                    _core.TYPE_PTQ1_0, weights, x[i : i + batch], isa=isa, n_threads=n_threads, rotation=ours
                )
                for i in range(0, len(x), batch)
            ]
            assert np.concatenate(parts).tobytes() == whole.tobytes()
        first = _core.matmul(_core.TYPE_PTQ1_0, weights, ours.rotate(x), isa=isa)
        assert first.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"block": 0}, "block 0"),
        ({"block": 96}, "block 96"),
        ({"block": -128}, "block -128"),
        ({"block": 512}, "block 512"),
        ({"n_in": 0}, "0 inputs"),
        ({"n_in": -256}, "-256 inputs"),
        ({"signs": np.ones(128, np.int8)}, r"shape \[256\]"),
        ({"signs": np.ones((2, 128), np.int8)}, r"shape \[256\]"),
        ({"signs": np.zeros(256, np.int8)}, "-1 or 1"),
        ({"signs": np.full(256, 2, np.int8)}, "-1 or 1"),
        ({"signs": np.ones(256, np.float32)}, "int8"),
        ({"v_heads": (0, 4)}, "positive"),
        ({"v_heads": (2, 0)}, "positive"),
        ({"v_heads": (2, 3)}, "3 value heads"),
        ({"v_heads": (-2, 4)}, "value heads"),
        ({"v_heads": (1, 3)}, "3 value heads"),
    ],
)
def test_rotations_that_do_not_fit(arguments: dict[str, Any], error: str) -> None:
    good: dict[str, Any] = {"n_in": 256, "block": 128}
    with pytest.raises((ValueError, TypeError), match=error):
        _core.Rotation(**{**good, **arguments})


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (np.zeros((1, 128), np.float32), "256"),
        (np.zeros(256, np.float32), "2 dimensions"),
        (np.zeros((1, 256)), "float32"),
    ],
)
def test_rows_that_do_not_fit(x: npt.NDArray[Any], error: str) -> None:
    rotation = _core.Rotation(256, 128)
    for function in (rotation.rotate, rotation.unrotate):
        with pytest.raises((ValueError, TypeError), match=error):
            function(x)
    with pytest.raises(ValueError, match="n_in = 128"):
        weights = np.zeros((1, 34), np.uint8)
        _core.matmul(_core.TYPE_PQ2_0, weights, np.zeros((1, 128), np.float32), rotation=rotation)
