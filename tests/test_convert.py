"""ternconv end to end: what is in the file, what the summary says, and that errors leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from convert_models import (
    byte_level_tokenizer,
    gemma3_dir,
    llama_config,
    llama_dir,
    random_tensors,
    smollm_steps,
    write_byte_level,
    write_json,
    write_weights,
)
from ggml_tern import _core
from ggml_tern.convert.model.choice import TypeChoice
from ggml_tern.convert.model.models import open_model
from ggml_tern.convert.pipeline import convert, prepare, write
from ggml_tern.errors import TernError
from ggml_tern.tensors.types import F16, PQ2_0, PTQ1_0, Q4_0, Q8_0, TensorType
from reference import formats, gguf_files
from reference.small_disk import in_small_tmpfs

F32Array = npt.NDArray[np.float32]

TERNCONV = str(Path(sys.executable).parent / "ternconv")
TERN = str(Path(sys.executable).parent / "tern")


def ternconv(*arguments: Path | str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TERNCONV, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


def decoded(path: Path) -> dict[str, tuple[int, F32Array]]:
    """Type id and decoded values of every tensor, read by _core (header) and the plain reference (ternary
    blocks)."""
    header = _core.read_gguf_header(str(path))
    raw = path.read_bytes()
    tensors = {}
    for tensor in header["tensors"]:
        start = header["data_offset"] + tensor["offset"]
        data = np.frombuffer(raw[start : start + tensor["nbytes"]], np.uint8)
        shape = tuple(reversed(tensor["shape"]))
        ternary = {fmt.type_id: fmt for fmt in (formats.PQ2_0, formats.PTQ1_0, formats.Q2_0)}
        if tensor["type"] in ternary:
            values = formats.dequantize(ternary[tensor["type"]], data.reshape(shape[0], -1))
        else:
            qtype = gguf.GGMLQuantizationType(tensor["type"])
            data = data.reshape(*shape[:-1], -1)
            values = gguf.quants.dequantize(
                data.view(np.float32)
                if tensor["type"] == 0
                else data.view(np.float16)
                if tensor["type"] == 1
                else data,
                qtype,
            )
        tensors[tensor["name"]] = tensor["type"], values.reshape(shape).astype(np.float32)
    return tensors


# ---- what is in the file ----


@pytest.mark.parametrize("matrix", [PTQ1_0, PQ2_0, Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("shards", [1, 3])
def test_llama(tmp_path: Path, matrix: TensorType, shards: int) -> None:
    model = llama_dir(tmp_path / "hf", shards=shards, tie_word_embeddings=False, seed=shards)
    output = tmp_path / "out.gguf"
    report = convert(model, output, TypeChoice(matrix, Q4_0, F16), n_threads=2)
    tensors = decoded(output)
    source = random_tensors(llama_config(tie_word_embeddings=False), shards)

    assert report.size == output.stat().st_size
    assert len(tensors) == len(source) == len(report.targets)
    assert tensors["token_embd.weight"][0] == Q4_0.id and tensors["output.weight"][0] == F16.id
    expected = source["lm_head.weight"].astype(np.float16).astype(np.float32)
    assert np.array_equal(tensors["output.weight"][1], expected)
    norm_type, norm = tensors["blk.1.ffn_norm.weight"]
    assert norm_type == 0 and np.array_equal(norm, source["model.layers.1.post_attention_layernorm.weight"])

    # Rows j and j + head_dim/2 of the checkpoint's heads become neighbours in q and k; v keeps its order.
    q = source["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 16, 128)
    reordered = np.stack([q[:, 0], q[:, 1]], axis=2).reshape(128, 128)
    for name, values in (
        ("blk.0.attn_q.weight", reordered),
        ("blk.0.attn_v.weight", source["model.layers.0.self_attn.v_proj.weight"]),
        ("blk.1.ffn_down.weight", source["model.layers.1.mlp.down_proj.weight"]),
    ):
        kind, got = tensors[name]
        assert kind == matrix.id
        if matrix is Q8_0:
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            assert np.array_equal(got, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        else:
            trits, scales = formats.ternarize(formats.PQ2_0, values)
            best = (trits.reshape(*scales.shape, 128) * scales[..., None]).reshape(values.shape)
            # The least error there is; where two choices tie, either may stand.
            assert np.sum((values - got) ** 2) == pytest.approx(np.sum((values - best) ** 2), rel=1e-6)


def test_both_ternary_types_hold_the_same_weights(tmp_path: Path) -> None:
    model = gemma3_dir(tmp_path / "hf")
    contents = []
    for kind in (PTQ1_0, PQ2_0):
        convert(model, tmp_path / "out.gguf", TypeChoice(kind, kind), force=True)
        contents.append(decoded(tmp_path / "out.gguf"))
    first, second = contents
    assert first["token_embd.weight"][0] == 143 and second["token_embd.weight"][0] == 142
    for name, (_, values) in first.items():
        assert np.array_equal(values, second[name][1]), name


def test_gemma3_norms_and_tied_head(tmp_path: Path) -> None:
    model = gemma3_dir(tmp_path / "hf")
    convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, Q8_0))
    tensors = decoded(tmp_path / "out.gguf")
    assert "output.weight" not in tensors
    source = load_file(model / "model.safetensors")
    for name, original in (
        ("output_norm.weight", "model.norm.weight"),
        ("blk.3.attn_q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("blk.6.post_ffw_norm.weight", "model.layers.6.post_feedforward_layernorm.weight"),
    ):
        assert np.array_equal(tensors[name][1], source[original] + np.float32(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_sources_convert_like_their_values(tmp_path: Path, dtype: str) -> None:
    """The same numbers stored in 16 bits and in 32 give the same file, down to the last byte."""
    from safetensors import TensorSpec, serialize_file

    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    if dtype == "float16":
        halves = {name: a.astype(np.float16) for name, a in tensors.items()}
        exact = {name: a.astype(np.float32) for name, a in halves.items()}
        write_weights(model, halves)
    else:
        halves = {name: (a.view(np.uint32) >> 16).astype(np.uint16) for name, a in tensors.items()}
        exact = {name: (a.astype(np.uint32) << 16).view(np.float32) for name, a in halves.items()}
        serialize_file(
            {
                name: TensorSpec(dtype=dtype, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
                for name, a in halves.items()
            },
            str(model / "model.safetensors"),
        )
    convert(model, tmp_path / "half.gguf", TypeChoice(PTQ1_0, Q8_0))
    write_weights(model, exact)
    convert(model, tmp_path / "full.gguf", TypeChoice(PTQ1_0, Q8_0))
    assert (tmp_path / "half.gguf").read_bytes() == (tmp_path / "full.gguf").read_bytes()


def test_threads_do_not_change_the_file(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf", vocab_size=3001, intermediate_size=1152)
    files = []
    for n_threads in (1, 3):
        convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, Q8_0), n_threads=n_threads, force=True)
        files.append((tmp_path / "out.gguf").read_bytes())
    assert files[0] == files[1]


def test_a_model_can_be_converted_again(tmp_path: Path) -> None:
    """Preparing writes nothing, and neither preparing nor writing changes the model."""
    source = llama_dir(tmp_path / "hf", num_hidden_layers=3, tie_word_embeddings=False)
    files = sorted(tmp_path.rglob("*"))
    model = open_model(source)
    before = (list(model.notes), list(model.specs), sorted(model.sources))
    conversion = prepare(model, TypeChoice(PTQ1_0))
    assert sorted(tmp_path.rglob("*")) == files

    mapped: list[int] = []

    def advance(nbytes: int) -> None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        mapped.append(maps.count(str(source / "model.safetensors")))

    reports = [write(conversion, tmp_path / name, advance=advance) for name in ("one", "other")]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert reports[0].notes == reports[1].notes and reports[0].stats == reports[1].stats
    assert (list(model.notes), list(model.specs), sorted(model.sources)) == before
    # However many tensors a model has, few of them are mapped at a time.
    assert len(model.specs) > 20 and 1 <= max(mapped) <= 2
    convert(source, tmp_path / "at once", TypeChoice(PTQ1_0))
    assert (tmp_path / "at once").read_bytes() == (tmp_path / "one").read_bytes()


def test_widths_that_the_type_does_not_divide(tmp_path: Path) -> None:
    """n_in 192 is three groups of 64, 160 five of 32, and 104 no multiple of 32."""
    config: dict[str, Any] = {"hidden_size": 192, "head_dim": 40, "num_attention_heads": 4}
    model = llama_dir(tmp_path / "hf", intermediate_size=104, **config)
    convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, PQ2_0))
    types = {name: kind for name, (kind, _) in decoded(tmp_path / "out.gguf").items()}
    assert types["token_embd.weight"] == 42
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_up.weight"] == 42
    assert types["blk.0.attn_output.weight"] == 8
    assert types["blk.0.ffn_down.weight"] == 1

    result = ternconv(model, tmp_path / "again.gguf")
    assert result.returncode == 0, result.stderr
    assert (
        "n_in 192 is not a multiple of 128, so Q2_0 instead of PTQ1_0 in 10 tensors: attn_q," in result.stdout
    )
    assert (
        "n_in 160 is not a multiple of 128, so Q8_0 instead of PTQ1_0 in 2 tensors: attn_output"
        in result.stdout
    )
    assert (
        "n_in 104 is not a multiple of 128, so F16 instead of PTQ1_0 in 2 tensors: ffn_down" in result.stdout
    )


def test_metadata_reads_with_gguf_py(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "Tiny-Llama-Instruct")
    (model / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\n---\n# Tiny\n")
    write_json(model / "generation_config.json", {"temperature": 0.5, "top_k": 7})
    write_byte_level(model, byte_level_tokenizer(smollm_steps()), chat_template="{{ messages }}")
    output = tmp_path / "out.gguf"
    convert(model, output, TypeChoice(Q8_0, Q8_0))
    reader = gguf.GGUFReader(output)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny Llama Instruct",
        "general.license": "mit",
        "general.languages": ["en"],
        "general.file_type": 7,
        "general.quantization_version": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 7,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.pre": "smollm",
    }.items():
        assert fields[key] == expected, key
    assert len(fields["tokenizer.ggml.tokens"]) == 512
    assert {t.name: list(reversed(t.shape.tolist())) for t in reader.tensors}["token_embd.weight"] == [
        512,
        128,
    ]


@pytest.mark.parametrize(
    ("matrix", "width", "file_type"),
    [(PTQ1_0, 128, 143), (PQ2_0, 128, 141), (PQ2_0, 192, 41), (Q8_0, 128, 7)],
)
def test_file_type_is_that_of_most_weights(
    tmp_path: Path, matrix: TensorType, width: int, file_type: int
) -> None:
    model = llama_dir(tmp_path / "hf", hidden_size=width, head_dim=32)
    convert(model, tmp_path / "out.gguf", TypeChoice(matrix, F16))
    metadata = _core.read_gguf_header(str(tmp_path / "out.gguf"))["metadata"]
    assert metadata["general.file_type"] == file_type


# ---- checkpoints that are refused ----


def refusal(model: Path, output: Path, choice: TypeChoice | None = None, **options: Any) -> str:
    """The message; the output's directory must be as it was."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(TernError) as caught:
        convert(model, output, choice or TypeChoice(PTQ1_0, Q8_0), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert sorted(output.parent.iterdir()) == before
    return message


def test_missing_tensor(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_weights(model, tensors)
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(model, tmp_path / "out.gguf")


def test_wrong_shape(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((256, 64), np.float32)
    write_weights(model, tensors)
    message = refusal(model, tmp_path / "out.gguf")
    assert "model.layers.0.mlp.up_proj.weight has shape [256, 64]; config.json makes it [256, 128]" in message


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    # Rotary frequencies, which old checkpoints store, follow from the configuration and are no error.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
    write_weights(model, tensors)
    convert(model, tmp_path / "good.gguf", TypeChoice(PTQ1_0, Q8_0))
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 128), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((256, 128), np.float32)
    write_weights(model, tensors)
    message = refusal(model, tmp_path / "out.gguf")
    assert "q_proj.lora_A.weight" in message and "model.layers.2.mlp.up_proj.weight" in message


def test_tied_head_that_is_stored_all_the_same(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_weights(model, tensors)
    convert(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, Q8_0))
    assert "output.weight" not in decoded(tmp_path / "out.gguf")
    tensors["lm_head.weight"][-1, -1] += 1
    write_weights(model, tensors)
    assert "tie_word_embeddings" in refusal(model, tmp_path / "other.gguf")


def test_head_type_of_a_tied_model(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    assert "--embed" in refusal(model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, Q8_0, Q8_0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_weights_that_are_not_finite(tmp_path: Path, name: str, dtype: str, value: float) -> None:
    model = llama_dir(tmp_path / "hf", vocab_size=5000)
    tensors = random_tensors(llama_config(vocab_size=5000), dtype=dtype)
    row, column = tensors[name].shape[0] - 3, 77
    if tensors[name].ndim == 2:
        tensors[name][row, column] = value
    else:
        tensors[name][column] = value
    write_weights(model, tensors)
    message = refusal(model, tmp_path / "out.gguf")
    assert f"tensor {name}" in message and f"column {column} is {value}" in message
    assert "model.safetensors" in message


def test_bfloat16_nan_is_found(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = llama_dir(tmp_path / "hf")
    tensors = {name: torch.from_numpy(a).bfloat16() for name, a in random_tensors(llama_config()).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][5, 200] = float("nan")
    save_file(tensors, model / "model.safetensors")
    assert "down_proj.weight: the element at row 5, column 200 is nan" in refusal(
        model, tmp_path / "out.gguf"
    )


def test_values_too_large_for_the_type(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = random_tensors(llama_config())
    tensors["model.embed_tokens.weight"][3, 3] = 1e6
    write_weights(model, tensors)
    assert "cannot be stored as F16: values up to" in refusal(
        model, tmp_path / "out.gguf", TypeChoice(PTQ1_0, F16)
    )


def test_broken_model_card(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    (model / "README.md").write_text("---\nlicense: [\n---\n")
    assert "README.md" in refusal(model, tmp_path / "out.gguf")


# ---- outputs that are refused ----


def test_existing_output(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    output = tmp_path / "out.gguf"
    output.write_text("precious")
    assert "--force" in refusal(model, output)
    assert output.read_text() == "precious"
    convert(model, output, TypeChoice(PTQ1_0, Q8_0), force=True)
    assert output.read_bytes()[:4] == b"GGUF"


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    assert "is a directory" in refusal(model, tmp_path / "hf", force=True)
    with pytest.raises(TernError, match="does not exist; create it"):
        convert(model, tmp_path / "nowhere" / "out.gguf", TypeChoice(PTQ1_0, Q8_0))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "not a regular file" in refusal(model, fifo, force=True)
    # A directory in which even root cannot make a file.
    with pytest.raises(TernError, match=r"/proc/out\.gguf"):
        convert(model, Path("/proc/out.gguf"), TypeChoice(PTQ1_0, Q8_0))


def test_output_on_top_of_an_input(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(weights)
    for output in (weights, model / ".." / "hf" / "config.json", link):
        assert "file of the model that is being converted" in refusal(model, output, force=True)
    assert weights.read_bytes() == original
    # Beside the inputs is fine.
    convert(model, model / "out.gguf", TypeChoice(PTQ1_0, Q8_0))


# ---- interruptions and full disks ----


def big_dir(directory: Path) -> Path:
    """A model of 1.6 GB that takes no room: a header, and a hole in the file, which reads as zeros."""
    llama_dir(directory)
    changes = {"intermediate_size": 1 << 20, "num_hidden_layers": 1}
    write_json(directory / "config.json", llama_config(**changes))
    header: dict[str, Any] = {}
    end = 0
    for name, small in random_tensors(llama_config(num_hidden_layers=1)).items():
        shape = [1 << 20 if size == 256 else size for size in small.shape]
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    model = big_dir(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(
        [TERNCONV, model, out / "model.gguf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    # The temporary file has its full header by then; most of the weights are still to come.
    while not any(path.stat().st_size > 1 << 20 for path in out.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert list(out.iterdir()) == []
    assert "Traceback" not in stderr and stdout == ""


def test_a_model_in_the_cache_of_the_hub_has_its_name(tmp_path: Path) -> None:
    """models--OWNER--NAME/snapshots/COMMIT, whose files are links, given as it is or through a link."""
    snapshots = tmp_path / "models--some-org--Tiny-Llama-0.6B-Instruct" / "snapshots"
    snapshots.mkdir(parents=True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = llama_dir(snapshots / commit)
    write_json(model / "generation_config.json", {"top_k": 7})
    (tmp_path / "link").symlink_to(model)
    for number, path in enumerate((model, tmp_path / "link")):
        convert(path, tmp_path / f"{number}.gguf", TypeChoice(Q8_0, Q8_0))
        keys = _core.read_gguf_header(tmp_path / f"{number}.gguf")["metadata"]
        assert keys["general.name"] == "Tiny Llama 0.6B Instruct"
        assert keys["general.basename"] == "Tiny-Llama" and keys["general.sampling.top_k"] == 7
        assert not any(commit[:10] in str(value) for value in keys.values() if isinstance(value, str))


def escaped(output: str, name: str) -> None:
    """A terminal's control characters do not come through, and what is left can be read."""
    assert "\x1b" not in output and "\x07" not in output and "\x9b" not in output, output
    assert name.encode("unicode_escape").decode() in output, output


EVIL = "\x1b]0;title\x07[bold]\x9b2J"


def test_names_from_checkpoints_do_not_reach_the_terminal(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    tensors = load_file(model / "model.safetensors")
    write_weights(model, tensors | {f"model.{EVIL}": np.zeros(3, np.float32)})
    result = ternconv(model, tmp_path / "m.gguf")
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    escaped(result.stderr, EVIL)
    # A warning of gguf-py, a broken configuration, and what a shard is instead.
    write_weights(model, tensors)
    config = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", config | {"architectures": [EVIL]})
    escaped(ternconv(model, tmp_path / "m.gguf").stderr, EVIL)
    write_json(model / "config.json", config | {"rope_scaling": {"rope_type": EVIL}})
    assert "\x1b" not in ternconv(model, tmp_path / "m.gguf").stderr
    write_json(model / "model.safetensors.index.json", {"weight_map": {EVIL: f"{EVIL}.safetensors"}})
    (model / "model.safetensors").unlink()
    write_json(model / "config.json", config)
    escaped(ternconv(model, tmp_path / "m.gguf").stderr, EVIL)


def test_names_from_gguf_files_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """In the summary, of verify, repack and inspect either."""
    path = tmp_path / "in.gguf"
    trits = np.resize(np.array([-1, 0, 1], np.int8), (8, 128))
    tensor = gguf_files.ternary(f"blk.0.{EVIL}.weight", formats.PQ2_0, trits, np.ones((8, 1), np.float32))
    keys = {"general.architecture": "llama", "general.name": EVIL}
    # Of a width that needs a fallback, and all zero: the notes name both.
    zeros = gguf_files.plain(f"blk.1.{EVIL}.weight", 1, np.zeros((4, 96), np.float16))
    gguf_files.write(path, keys, [tensor, zeros])
    out = tmp_path / "out.gguf"
    result = ternconv(path, out)
    assert result.returncode == 0, result.stderr
    escaped(result.stdout, EVIL)
    commands: list[list[Path | str]] = [
        ["verify", path, out],
        ["inspect", path],
        ["hash", path],
        ["repack", path, tmp_path / "packed.gguf", "--type", "ptq1_0"],
        ["repack", path, tmp_path / "no.gguf", "--type", "tq2_0"],
    ]
    for command in commands:
        done = subprocess.run([TERN, *command], capture_output=True, text=True, timeout=120)
        assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr, command
        assert EVIL.encode("unicode_escape").decode() in done.stdout + done.stderr or command[0] == "repack"


def test_failed_write_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file size limit of 100 kB makes a write in the middle fail, as a full disk or a quota would."""
    model = llama_dir(tmp_path / "hf")
    out = tmp_path / "out"
    out.mkdir()
    result = ternconv(
        model,
        out / "model.gguf",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and os.strerror(errno.EFBIG) in result.stderr
    assert list(out.iterdir()) == []


def test_disk_too_small_is_said_before_the_work(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf")
    mount = tmp_path / "disk"
    mount.mkdir()
    result = in_small_tmpfs(mount, "64k", [TERNCONV, str(model), str(mount / "out.gguf")])
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.search(r"no space left on device: the file needs 0\.\d MB, 0\.\d MB are free in", result.stderr)


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """Room for the tensors but not for the metadata before them."""
    model = llama_dir(tmp_path / "hf")
    mount = tmp_path / "disk"
    mount.mkdir()
    needed = sum(t["nbytes"] for t in _core.read_gguf_header(str(_converted(model, tmp_path)))["tensors"])
    size = str((needed // 4096 + 2) * 4096)
    result = in_small_tmpfs(mount, size, [TERNCONV, str(model), str(mount / "out.gguf")])
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "no space left on device" in result.stderr


def _converted(model: Path, directory: Path) -> Path:
    convert(model, directory / "reference.gguf", TypeChoice(PTQ1_0, Q8_0))
    return directory / "reference.gguf"


# ---- the command ----


def test_summary(tmp_path: Path) -> None:
    model = llama_dir(tmp_path / "hf", tie_word_embeddings=False)
    output = tmp_path / "out.gguf"
    result = ternconv(model, output, "--type", "pq2_0", "--embed", "f16", "--head", "q4_0", "--threads", "1")
    assert result.returncode == 0 and result.stderr == ""
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["token_embd"][1:] == ["F16", "1", "0.07", "M", "16.000", *rows["token_embd"][6:]]
    assert rows["output"][1:3] == ["Q4_0", "1"] and rows["output"][5] == "4.500"
    assert rows["ffn_up"][1:3] == ["PQ2_0", "2"] and rows["ffn_up"][5] == "2.125"
    # Ternarizing Gaussian weights loses about a fifth of their energy and zeroes just under half of them.
    assert 40 < float(rows["ffn_up"][6].rstrip("%")) < 60
    assert 0.15 < float(rows["ffn_up"][7]) < 0.25
    *_, size, verdict, step = result.stdout.splitlines()
    assert size == f"{output}: {output.stat().st_size / 1e6:.1f} MB"
    assert verdict.startswith("verdict: will not write sense: 14 of 14 ternary tensors were made so")
    assert step == "next: the same again with --type auto or --type q8_0"


def test_errors_are_one_line_and_exit_code_1(tmp_path: Path) -> None:
    result = ternconv(tmp_path / "nowhere", tmp_path / "out.gguf")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("ternconv: ") and result.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    for arguments in ([], ["a"], ["a", "b", "--type", "q3"], ["a", "b", "--threads", "-1"]):
        assert ternconv(*arguments).returncode == 2


def test_help_teaches_with_examples() -> None:
    text = ternconv("--help").stdout
    assert text.count("  ternconv ") >= 4 and "Exit codes" in text
    assert all(f"--{option}" in text for option in ("type", "embed", "head", "force", "threads"))
