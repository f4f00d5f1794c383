"""The YAML file of tern serve: what it means to llama-server, and what is said of a file that is wrong."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_tern.errors import TernError
from ggml_tern.serve import options as serve_options
from ggml_tern.serve.config import Config, keys, read
from llama_server import ROOT

WRITE_UP = """
model: {path: 27b.gguf, quant_type: PQ2_0, max_context: 8192, kv_cache_quant: true, kv_cache_bits: 4}
runtime: {device: cuda, max_batch_size: 1, max_seq_len: 8192, prefill_chunk_size: 512,
          decode_algorithm: greedy, draft_model: none}
memory: {weight_offload: true, max_gpu_memory: 6GB}
"""


def read_text(folder: Path, text: str) -> Config:
    path = folder / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return read(path)


def problems(folder: Path, text: str) -> list[str]:
    """The lines of the error that the text gives, without the file's name."""
    with pytest.raises(TernError) as caught:
        read_text(folder, text)
    return [line.removeprefix(f"{folder}/serve.yaml") for line in str(caught.value).splitlines()]


def options(folder: Path, text: str) -> dict[str, str | None]:
    config = read_text(folder, text)
    return serve_options.of_model(config.model, config.runtime, config.sampling)


def test_what_the_write_up_means(tmp_path: Path) -> None:
    assert options(tmp_path, WRITE_UP) == {
        "model": str(tmp_path / "27b.gguf"),
        "ctx-size": "8192",
        "cache-type-k": "q4_0",
        "cache-type-v": "q4_0",
        "parallel": "1",
        "kv-unified-per-slot": "8192",
        "batch-size": "512",
        "ubatch-size": "512",
        "temp": "0",
    }
    assert read_text(tmp_path, WRITE_UP).budget == 6 * 10**9


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("kv_cache_bits: 16", "f16"),
        ("kv_cache_bits: 8", "q8_0"),
        ("kv_cache_bits: 5", "q5_0"),
        ("kv_cache_bits: 4", "q4_0"),
        ("kv_cache_quant: true", "q8_0"),
        ("kv_cache_quant: false", "f16"),
        ("kv_cache_quant: false, kv_cache_bits: 4", "f16"),
        ("kv_cache_quant: int4", "q4_0"),
        ("kv_cache_quant: q5_0", "q5_0"),
        ("kv_cache_quant: fancy", None),
        ("max_context: 512", None),
    ],
)
def test_bits_of_the_kv_cache(tmp_path: Path, model: str, kind: str | None) -> None:
    found = options(tmp_path, f"model: {{path: a.gguf, {model}}}")
    assert found.get("cache-type-k") == found.get("cache-type-v") == kind


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ("decode_algorithm: plain", {}),
        ("decode_algorithm: ngram", {"spec-type": "ngram-simple"}),
        (
            "decode_algorithm: ngram, draft_tokens: 16",
            {"spec-type": "ngram-simple", "spec-ngram-simple-size-m": "16"},
        ),
        (
            "decode_algorithm: ngram-mod, draft_tokens: 16",
            {"spec-type": "ngram-mod", "spec-ngram-mod-n-max": "16", "spec-ngram-mod-n-min": "8"},
        ),
        ("decode_algorithm: ngram_map_k", {"spec-type": "ngram-map-k"}),
        ("decode_algorithm: mtp", {"spec-type": "draft-mtp"}),
        ("draft_model: /d.gguf", {"spec-type": "draft-simple", "spec-draft-model": "/d.gguf"}),
        (
            "decode_algorithm: speculative, draft_model: /d.gguf, draft_tokens: 8",
            {"spec-type": "draft-simple", "spec-draft-model": "/d.gguf", "spec-draft-n-max": "8"},
        ),
        ("decode_algorithm: speculative", {"spec-type": "ngram-simple"}),
        (
            "decode_algorithm: eagle3, draft_model: /d.gguf",
            {"spec-type": "draft-eagle3", "spec-draft-model": "/d.gguf"},
        ),
        ("decode_algorithm: draft", {}),
        ("decode_algorithm: quantum", {}),
    ],
)
def test_speculation(tmp_path: Path, runtime: str, expected: dict[str, str]) -> None:
    found = options(tmp_path, f"runtime: {{{runtime}}}")
    assert {name: value for name, value in found.items() if name.startswith("spec-")} == expected


def test_notes_name_what_is_taken_otherwise(tmp_path: Path) -> None:
    def noted(text: str) -> list[str]:
        return [note.split(":")[0] for note in read_text(tmp_path, text).notes(on_gpus=False)]

    assert noted(WRITE_UP) == [
        "model.quant_type",
        "memory.weight_offload",
        "memory.max_gpu_memory",
    ]
    assert noted("runtime: {device: TERN0, decode_algorithm: quantum}") == ["runtime.decode_algorithm"]
    assert noted("runtime: {device: cpu, decode_algorithm: draft}") == ["runtime.decode_algorithm"]
    assert noted("runtime: {draft_model: d.gguf, decode_algorithm: ngram}") == ["runtime.draft_model"]
    assert noted("model: {kv_cache_quant: fancy}") == ["model.kv_cache_quant"]
    # Which devices there are is another matter: test_devices.py.
    assert noted("models: {a: {path: a.gguf, quant_type: x, runtime: {device: gpu}}}") == [
        "models.a.quant_type"
    ]
    assert (
        noted("model: {path: a.gguf, kv_cache_bits: 8}\nruntime: {threads: 2}\nmemory: {budget: 6GB}") == []
    )


def test_files_are_beside_the_file(tmp_path: Path) -> None:
    text = "model: {path: sub/a.gguf, lora: [b.gguf, {path: /c.gguf, scale: 2}]}"
    text += "\nruntime: {draft_model: ~/d.gguf}"
    found = options(tmp_path, text)
    assert found["model"] == str(tmp_path / "sub" / "a.gguf")
    assert found["lora-scaled"] == f"{tmp_path / 'b.gguf'}:1,/c.gguf:2"
    assert found["spec-draft-model"] == str(Path.home() / "d.gguf")
    config = read_text(tmp_path, "models: {m: {path: a.gguf}}")
    assert config.models["m"].path == str(tmp_path / "a.gguf")


def test_a_model_has_its_own_before_the_common(tmp_path: Path) -> None:
    config = read_text(
        tmp_path,
        """
models:
  a: {path: a.gguf}
  b: {path: b.gguf, runtime: {threads: 1}, sampling: {temperature: 0}}
runtime: {threads: 8, max_batch_size: 2}
sampling: {temperature: 1.5, top_k: 3}
""",
    )
    first, second = (serve_options.of_model(*config.routed(name)) for name in "ab")
    assert (first["threads"], first["temp"], first["top-k"]) == ("8", "1.5", "3")
    assert (second["threads"], second["temp"], second["top-k"]) == ("1", "0", "3")
    assert second["parallel"] == "2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  pth: a", [":2: model.pth: unknown key; did you mean path?"]),
        ("model: {path: a}\nmodel.path: b", [":2: model.path: unknown key; did you mean model?"]),
        ("runtim: {}", [":1: runtim: unknown key; did you mean runtime?"]),
        ("model:\n  threads: 2", [":2: model.threads: unknown key; did you mean runtime.threads?"]),
        (
            "memory: {zzz: 2}",
            [
                ":1: memory.zzz: unknown key; "
                "known here are budget, max_gpu_memory, max_models, weight_offload"
            ],
        ),
        (
            "models:\n  a:\n    path: a\n    runtime:\n      thread: 1",
            [":5: models.a.runtime.thread: unknown key; did you mean threads?"],
        ),
        ("model: {lora: [{pat: a, path: b}]}", [":1: model.lora.0.pat: unknown key; did you mean path?"]),
        ("model:\n  kv_cache_bits: 6", [":2: model.kv_cache_bits: is 6; should be 16, 8, 5 or 4"]),
        ("runtime: {threads: two}", [":1: runtime.threads: is 'two'; should be a valid integer"]),
        ("runtime: {threads: 0}", [":1: runtime.threads: is 0; should be greater than or equal to 1"]),
        ("runtime: {threads: yes}", [":1: runtime.threads: is True; should be a valid integer"]),
        ("server: {port: 99999}", [":1: server.port: is 99999; should be less than or equal to 65535"]),
        (
            "server: {api_key: 1234}",
            [":1: server.api_key: is 1234; should be a valid string; put it in quotes"],
        ),
        ("sampling: {top_p: 1.5}", [":1: sampling.top_p: is 1.5; should be less than or equal to 1"]),
        (
            "memory: {budget: lots}",
            [":1: memory.budget: 'lots' is no amount of memory; give one like 6GB, 5.5GiB or 800MB"],
        ),
        (
            "memory: {budget: .inf}",
            [":1: memory.budget: 'inf' is no amount of memory; give one like 6GB, 5.5GiB or 800MB"],
        ),
        (
            "memory: {budget: .nan}",
            [":1: memory.budget: 'nan' is no amount of memory; give one like 6GB, 5.5GiB or 800MB"],
        ),
        (
            f"memory: {{budget: {'9' * 400}GB}}",
            [f":1: memory.budget: '{'9' * 20}' is more memory than any machine has"],
        ),
        ("a: &x [*x]", [":1: is not YAML: an alias that contains itself"]),
        ("model: &m\n  lora:\n    - *m", [":1: is not YAML: an alias that contains itself"]),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi")),
            [": has more than 10,000 values; no configuration has so many"],
        ),
        ("model:\n  path: a\n  path: b", [":3: model.path: given twice"]),
        ("model: {path: a}\nmodels:\n  b: {path: b}", [":2: both model and models; give one of them"]),
        ("models:\n  a: {path: a}\n  b: {max_context: 5}", [":3: models.b: has no path"]),
        ("model: [1]", [":1: model: is [1]; should be a valid dictionary or instance of Model"]),
        ("", [": is empty; expected the sections model, models, runtime, memory, sampling, server"]),
        ("hello", [": is a str; expected the sections model, models, runtime, memory, sampling, server"]),
        (
            "model:\n  pat: a\n  kv_cache_bits: 6",
            [
                ":3: model.kv_cache_bits: is 6; should be 16, 8, 5 or 4",
                ":2: model.pat: unknown key; did you mean path?",
            ],
        ),
    ],
)
def test_what_is_wrong_and_where(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert problems(tmp_path, text) == expected


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tx: 1", "a: *b", "{" * 1500])
def test_what_is_not_yaml(tmp_path: Path, text: str) -> None:
    (line,) = problems(tmp_path, text)
    assert re.match(r"(:\d+)?: is not YAML: ", line)


def test_what_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(TernError, match=r"serve\.yaml: is not UTF-8 text"):
        read(path)


def test_names_that_llama_server_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(TernError, match=r"a,b\.gguf: llama-server takes no LoRA adapter with , in its name"):
        options(tmp_path, "model: {path: m.gguf, lora: ['a,b.gguf']}")
    with pytest.raises(
        TernError, match=r"models\.m: .*#1\.gguf: llama-server's router takes no '#' in a value"
    ):
        serve_options.preset_section("m", options(tmp_path, "model: {path: 'model #1.gguf'}"))
    for name in ("a]b", "a\nb", "", " a", "*", "default"):
        with pytest.raises(TernError, match="llama-server's router takes no name") as error:
            serve_options.preset_section(name, {"model": "m.gguf"})
        assert "\n" not in str(error.value)


def test_aliases_that_are_sound(tmp_path: Path) -> None:
    text = "models: {a: {path: a.gguf, runtime: &r {threads: 2}}, b: {path: b.gguf, runtime: *r}}"
    assert read_text(tmp_path, text).models["b"].runtime.threads == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("a.gguf"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [*Config.model_fields, *(key.split(".")[-1] for key in keys()), "scale", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
@settings(deadline=None, max_examples=200)
def test_anything_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    """No file makes anything but a configuration or a TernError that names it."""
    folder = tmp_path_factory.getbasetemp()
    try:
        config = read_text(folder, yaml.safe_dump(value))
    except TernError as error:
        assert all(line.startswith(f"{folder}/serve.yaml") for line in str(error).splitlines())
    else:
        config.notes(on_gpus=False)


def test_the_documentation_lists_every_key() -> None:
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+\.[\w.]+)` \| (.+) \|$", text, re.MULTILINE))
    assert listed == {name: what for name, what in keys().items() if not name.startswith("models.")} | {
        name: what for name, what in keys().items() if name in ("models.NAME.runtime", "models.NAME.sampling")
    }


def test_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        read_text(tmp_path, example)
