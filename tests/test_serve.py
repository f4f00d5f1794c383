"""tern serve: a real llama-server with the tiny model; what it answers, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

import make_synthetic as synthetic
from ggml_tern.cli.tern import cli
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.plan import arithmetic
from ggml_tern.plan.header import read_model
from ggml_tern.serve.spellings import SPELLINGS
from llama_server import ROOT, TERN, TERN_SERVE, TINY, Server, serving
from reference import gguf_files as files

HYBRID = ROOT / "models" / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"
GREEDY = {"prompt": "And the LORD said unto", "n_predict": 48, "temperature": 0}
#: An answer without an end, for servers with --context-shift.
ENDLESS = {"prompt": "And", "n_predict": -1, "ignore_eos": True}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def tern_serve(*words: str) -> Outcome:
    """tern serve --dry-run: it refuses, or shows what it would start."""
    result = CliRunner().invoke(cli, ["serve", "--dry-run", *words])
    if isinstance(result.exception, TernError):
        return Outcome(1, result.stdout, f"tern: {result.exception}\n")
    assert isinstance(result.exception, SystemExit | None), result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def total(model: Path, context: int, kv_type: str = "f16", parallel: int | None = None) -> float:
    """Megabytes, as tern plan counts them."""
    return arithmetic.plan(read_model(model), context, kv_type, parallel).total / 1e6


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(TINY, "--context-shift", "-lv", "4") as started:
        yield started


def test_serves_with_the_plugin(server: Server) -> None:
    log = server.log()
    assert f"llama-server on {server.url}, {TINY.name} (qwen3) on TERN0" in log
    assert re.search(r"memory, MB: weights 0\.5 in tiles .* KV cache 1\.0 for 1,024 tokens in f16", log)
    maps = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    assert "libggml-tern.so" in maps
    assert "CORS allows all origins" not in log
    answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 8}
    )
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] > 0


def test_health_and_metrics(server: Server) -> None:
    assert server.get("/health").json == {"status": "ok"}
    server.post("/completion", GREEDY)
    metrics = server.get("/metrics").text
    match = re.search(r"^llamacpp:tokens_predicted_total (\d+)", metrics, re.MULTILINE)
    assert match is not None
    assert int(match[1]) >= 48


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    def busy() -> int:
        return sum(slot["is_processing"] for slot in server.get("/slots").json)

    with server.stream("/completion", ENDLESS) as events:
        next(events)
        assert busy() == 1
    assert wait_until(lambda: busy() == 0)
    assert server.post("/completion", GREEDY).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_an_answer_ends_cleanly(number: signal.Signals) -> None:
    with serving(TINY, "--context-shift") as server:
        pid = server.pid
        with server.stream("/completion", ENDLESS) as events:
            next(events)
            # llama-server alone would wait for this client.
            assert server.stop(number) == 0
            # The client is not left to wait either: all that comes is what had been sent.
            with contextlib.suppress(http.client.IncompleteRead, ConnectionResetError):
                for _ in events:
                    pass
        assert not Path(f"/proc/{pid}/exe").exists()


def test_a_signal_to_all_of_its_processes_ends_cleanly() -> None:
    """As service managers send it."""
    with serving(TINY) as server:
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(120) == 0


@pytest.mark.parametrize("which", ["llama-server", "tern serve"])
def test_serves_again_after_kill_9(which: str) -> None:
    """Whichever of the two processes is killed, the other ends too."""
    with serving(TINY, "--context-shift") as server:
        pid = server.pid
        assert pid != server.process.pid
        with server.stream("/completion", ENDLESS) as events:
            next(events)
            os.kill(pid if which == "llama-server" else server.process.pid, signal.SIGKILL)
            assert server.process.wait(120) == -signal.SIGKILL
        assert wait_until(lambda: not Path(f"/proc/{pid}/exe").exists())
        port = int(server.url.rpartition(":")[2])
    with serving(TINY, port=port) as server:
        assert server.post("/completion", GREEDY).status == 200


def test_the_key_is_wanted_and_not_shown(tmp_path: Path) -> None:
    config = write(tmp_path / "serve.yaml", f"model: {{path: {TINY}}}\nserver: {{api_key: open-sesame}}\n")
    with serving(None, "--config", str(config), api_key="open-sesame") as server:
        assert server.post("/completion", GREEDY).status == 200
        server.api_key = "open-barley"
        assert server.post("/completion", GREEDY).status == 401
        server.api_key = None
        assert server.post("/completion", GREEDY).status == 401
        for pid in (server.pid, server.process.pid):
            assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert "sesame" not in server.log()


def test_the_file_and_the_command_line(tmp_path: Path) -> None:
    """Where both say something, the command line wins."""
    config = write(
        tmp_path / "serve.yaml",
        f"""
model:
  path: {os.path.relpath(TINY, tmp_path)}
  name: tiny
  max_context: 768
  kv_cache_bits: 5
runtime: {{threads: 1, max_batch_size: 3, max_seq_len: 512, prefill_chunk_size: 64}}
sampling: {{temperature: 0.25, top_k: 7, top_p: 0.5, min_p: 0.125, repeat_penalty: 1.5, seed: 42}}
""",
    )
    with serving(None, "--config", str(config), "--top-k", "9", "-lv", "4") as server:
        properties = server.get("/props").json
        settings = properties["default_generation_settings"]
        assert properties["total_slots"] == 3
        assert settings["n_ctx"] == 512
        expected = {"temperature": 0.25, "top_k": 9, "top_p": 0.5, "min_p": 0.125, "repeat_penalty": 1.5}
        got = {key: settings["params"][key] for key in (*expected, "seed")}
        assert got == pytest.approx(expected | {"seed": 42})
        assert server.get("/v1/models").json["data"][0]["id"] == "tiny"
        log = server.log()
        assert re.search(r"K \(q5_0\).*V \(q5_0\)", log)
        assert re.search(r"n_ubatch\s*= 64", log)
        assert "DEPRECATED" not in log
        assert server.post("/completion", GREEDY).status == 200


def test_the_file_of_the_write_up(tmp_path: Path) -> None:
    """Taken as it is; every key that means nothing here gets a note."""
    config = write(
        tmp_path / "6gb.yaml",
        f"""
model:
  path: {TINY}
  quant_type: ternary
  max_context: 1024
  kv_cache_quant: true
  kv_cache_bits: 4
runtime:
  device: auto
  max_batch_size: 1
  max_seq_len: 1024
  prefill_chunk_size: 256
  decode_algorithm: speculative
  draft_model: null
memory:
  weight_offload: false
  max_gpu_memory: 6GB
""",
    )
    with serving(None, "--config", str(config), "-lv", "4") as server:
        log = server.log()
        keys = ["model.quant_type", "runtime.decode_algorithm"]
        keys += ["memory.weight_offload", "memory.max_gpu_memory"]
        assert re.findall(r"note: ([\w.]+):", log) == keys
        assert "of 6,000.0" in log
        assert re.search(r"K \(q4_0\).*V \(q4_0\)", log)
        assert server.get("/props").json["total_slots"] == 1
        assert server.post("/completion", GREEDY).status == 200


@pytest.mark.parametrize(
    "runtime",
    ["decode_algorithm: ngram", f"{{draft_model: {TINY}, draft_tokens: 5}}"],
    ids=["n-gram", "draft"],
)
def test_speculation_changes_no_word(runtime: str, server: Server, tmp_path: Path) -> None:
    # A text that repeats itself, for n-grams to find.
    verse = "And God said, Let there be light: and there was light. "
    question = GREEDY | {"prompt": verse * 8 + verse[:17], "n_predict": 128, "cache_prompt": False}
    runtime = runtime if runtime.startswith("{") else f"{{{runtime}}}"
    config = write(tmp_path / "serve.yaml", f"model: {{path: {TINY}}}\nruntime: {runtime}\n")
    with serving(None, "--config", str(config)) as speculating:
        answer = speculating.post("/completion", question).json
    assert answer["content"] == server.post("/completion", question).json["content"]
    assert answer["timings"]["draft_n_accepted"] > 0


def adapter(path: Path, rng: np.random.Generator) -> Path:
    """A LoRA adapter of the tiny model that does something."""
    n_out, n_in = GGUFSource(TINY).tensors["blk.0.ffn_up.weight"].shape
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for part, shape in (("a", (4, n_in)), ("b", (n_out, 4))):
        writer.add_tensor(f"blk.0.ffn_up.weight.lora_{part}", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_lora(server: Server, tmp_path: Path, rng: np.random.Generator) -> None:
    adapter(tmp_path / "odd.gguf", rng)
    config = write(
        tmp_path / "serve.yaml", f"model: {{path: {TINY}, lora: [{{path: odd.gguf, scale: 0.5}}]}}\n"
    )
    with serving(None, "--config", str(config)) as adapted:
        loaded = adapted.get("/lora-adapters").json
        assert [(Path(entry["path"]).name, entry["scale"]) for entry in loaded] == [("odd.gguf", 0.5)]
        answer = adapted.post("/completion", GREEDY).json["content"]
        assert answer != server.post("/completion", GREEDY).json["content"]
        # Without the adapter, the same server says what the model itself says.
        off = GREEDY | {"lora": [{"id": 0, "scale": 0.0}]}
        assert (
            adapted.post("/completion", off).json["content"]
            == server.post("/completion", GREEDY).json["content"]
        )


def children(pid: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in found.stdout.split()]


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    text = f"""
models:
  plain: {{path: {TINY}, max_context: 512, kv_cache_bits: 8}}
  hybrid: {{path: {HYBRID}, sampling: {{temperature: 0.125}}}}
memory: {{max_models: 1}}
sampling: {{temperature: 0.5, top_k: 11}}
server: {{api_key: secret}}
"""
    return write(tmp_path / "serve.yaml", text)


def test_models_by_name(two_models: Path) -> None:
    with serving(None, "--config", str(two_models), api_key="secret") as router:
        for name, temperature in (("hybrid", 0.125), ("plain", 0.5), ("hybrid", 0.125)):
            answer = router.post("/v1/completions", {"model": name, "prompt": "And", "max_tokens": 4})
            assert (answer.status, answer.json["model"]) == (200, name)
            settings = router.get(f"/props?model={name}").json["default_generation_settings"]["params"]
            assert (settings["temperature"], settings["top_k"]) == (temperature, 11)
            states = {entry["id"]: entry["status"]["value"] for entry in router.get("/models").json["data"]}
            assert [other for other, state in states.items() if state == "loaded"] == [name]
        assert router.post("/v1/completions", {"model": "other", "prompt": "And"}).status == 400
        router.api_key = None
        assert router.post("/v1/completions", {"model": "plain", "prompt": "And"}).status == 401
        assert router.stop() == 0


def test_models_end_with_a_router_that_was_killed(two_models: Path) -> None:
    with serving(None, "--config", str(two_models), api_key="secret") as router:
        assert (
            router.post("/v1/completions", {"model": "plain", "prompt": "And", "max_tokens": 4}).status == 200
        )
        (instance,) = children(router.pid)
        router.stop(signal.SIGKILL)
        assert wait_until(lambda: not Path(f"/proc/{instance}/exe").exists())


def test_a_budget_that_is_enough() -> None:
    """Four conversations have four states, so that a small budget holds more context for one alone."""
    budget = (total(HYBRID, 768, parallel=1) + total(HYBRID, 1024, parallel=1)) / 2
    assert total(HYBRID, 1024) > budget
    with serving(HYBRID, "--memory-budget", f"{budget}MB") as server:
        assert "for 768 tokens in f16" in server.log()
        properties = server.get("/props").json
        assert properties["default_generation_settings"]["n_ctx"] == 768
        assert properties["total_slots"] == 1
        assert server.post("/completion", GREEDY).status == 200


def test_a_budget_that_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arithmetic.LAYOUT_VARIABLE, "fast")
    budget = f"{(total(TINY, 512) + total(TINY, 768)) / 2:.1f}MB"
    result = tern_serve(str(TINY), "--memory-budget", budget, "-c", "4096")
    assert (result.code, result.stdout) == (1, "")
    said, *offers = result.stderr.splitlines()
    assert re.match(rf"tern: {re.escape(str(TINY))}: takes [\d,.]+ MB with 4,096 tokens of context", said)
    assert f"the budget is {budget.removesuffix('MB')} MB. What fits at most:" in said
    assert offers[0].split() == ["-c", "512", "-ctk", "f16", "-ctv", "f16"]
    for offer in offers:
        assert tern_serve(str(TINY), "--memory-budget", budget, *offer.split()).code == 0

    result = tern_serve(str(TINY), "--memory-budget", "5MB")
    assert result.code == 1
    least = re.search(r"the least budget for this model is ([\d.]+) MB$", result.stderr)
    assert least is not None
    assert float(least[1]) == pytest.approx(total(TINY, 256, "q4_0", 1), abs=0.1)


def test_a_budget_for_the_dense_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit otherwise gets the dense layout, unless TERN_LAYOUT says no."""
    monkeypatch.delenv(arithmetic.LAYOUT_VARIABLE, raising=False)
    path = synthetic.write_synthetic(tmp_path / "model.gguf", "ptq1_0", synthetic.Shape(layers=2))
    model = read_model(path)
    fast, dense = (arithmetic.plan(model, 256, "f16", 1, dense=dense).total for dense in (False, True))
    assert dense < fast
    words = [str(path), "-c", "256", "-np", "1", "--memory-budget"]
    between = f"{(fast + dense) / 2 / 1e6}MB"
    found = tern_serve(*words, between)
    assert "TERN_LAYOUT=dense\n" in found.stdout
    assert "in dense tiles" in found.stderr
    assert "TERN_LAYOUT=fast\n" in tern_serve(*words, f"{fast / 1e6 + 1}MB").stdout
    monkeypatch.setenv(arithmetic.LAYOUT_VARIABLE, "fast")
    assert tern_serve(*words, between).code == 1
    monkeypatch.delenv(arithmetic.LAYOUT_VARIABLE)
    with serving(path, *words[1:], between, "-v") as server:
        assert "TERN_DENSE_TILES model buffer size" in server.log()


def test_a_budget_for_several_models(tmp_path: Path) -> None:
    """As many as fit are kept; each must."""
    sizes = [total(TINY, 512), total(HYBRID, 1024)]
    models = f"models: {{a: {{path: {TINY}, max_context: 512}}, b: {{path: {HYBRID}, max_context: 1024}}}}\n"
    config = write(tmp_path / "serve.yaml", models)
    for budget, loaded in ((max(sizes) + 1, 1), (sum(sizes) + 1, 2)):
        result = tern_serve("--config", str(config), "--memory-budget", f"{budget}MB")
        assert f"at most {loaded} at a time: a, b" in result.stderr
        assert f"--models-max {loaded}" in result.stdout
    result = tern_serve("--config", str(config), "--memory-budget", f"{max(sizes) - 1}MB")
    assert result.code == 1
    write(config, f"{models}memory: {{budget: {max(sizes) + 1}MB, max_models: 2}}\n")
    result = tern_serve("--config", str(config))
    assert result.code == 1
    assert "2 models at a time take up to" in result.stderr
    result = tern_serve("--config", str(config), "--models-max", "1")
    assert result.code == 0
    assert "at most 1 at a time" in result.stderr


def test_a_draft_model_and_adapters_count(tmp_path: Path, rng: np.random.Generator) -> None:
    lora = adapter(tmp_path / "lora.gguf", rng)

    def said(*options: str) -> float:
        result = tern_serve(str(TINY), *options)
        match = re.search(r": ([\d.]+) of", result.stderr)
        assert match is not None
        return float(match[1])

    alone = said()
    assert said("-md", str(TINY)) > alone + 1.0
    assert said("--lora", str(lora)) == pytest.approx(alone + lora.stat().st_size / 1e6, abs=0.1)
    assert said("-ub", "1024") > alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.gguf"], "tern: nowhere.gguf: no such file"),
        ([str(ROOT / "README.md")], "README.md: is text"),
        (["--config", "nowhere.yaml"], "tern: nowhere.yaml: No such file or directory"),
        ([], "Give MODEL.gguf before any option"),
        (["-c", "512", str(TINY)], "Give MODEL.gguf before any option"),
        ([str(TINY), "-md", "nowhere.gguf", "--memory-budget", "1GB"], "tern: nowhere.gguf: no such file"),
        ([str(TINY), "--memory-budget", "much"], "'much' is no amount of memory"),
        ([str(TINY), "-c", "many"], "--ctx-size many: is no whole number"),
    ],
)
def test_what_cannot_be_served(words: list[str], message: str) -> None:
    result = tern_serve(*words)
    assert result.code in (1, 2)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "::"), True),
        (("--host", "127.0.0.1,192.168.1.7"), True),
        (("--host", "my-machine"), True),
        (("--host", "127.0.0.1"), False),
        (("--host", "127.8.8.8,localhost,::1"), False),
        (("--host", "/tmp/llama.sock"), False),
        ((), False),
        (("--host", "0.0.0.0", "--api-key", "sesame"), False),
        (("--host", "0.0.0.0", "--api-key-file", "keys"), False),
    ],
)
def test_one_warning_where_anybody_may_ask(options: tuple[str, ...], warned: bool) -> None:
    result = tern_serve(str(TINY), *options)
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert len(warnings) == warned
    assert not warned or "wants no API key" in warnings[0]


def test_keys_of_the_file_and_the_environment_are_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"model: {{path: {TINY}}}\nserver: {{host: 0.0.0.0}}\n"
    assert "warning" in tern_serve("--config", str(write(tmp_path / "open.yaml", text))).stderr
    keyed = write(tmp_path / "keyed.yaml", text.replace("0.0.0.0", "0.0.0.0, api_key: sesame"))
    assert "warning" not in tern_serve("--config", str(keyed)).stderr
    monkeypatch.setenv("LLAMA_API_KEY", "sesame")
    assert "warning" not in tern_serve(str(TINY), "--host", "0.0.0.0").stderr


def test_a_model_is_called_by_the_name_of_its_file(server: Server) -> None:
    assert server.get("/v1/models").json["data"][0]["id"] == TINY.name
    assert "--alias" not in tern_serve(str(TINY), "-a", "mine").stdout.replace("-a mine", "")


def test_no_chat_template_is_said_once(tmp_path: Path) -> None:
    note = f"{TINY.name} has no chat template"
    assert tern_serve(str(TINY)).stderr.count(note) == 1
    for options in (("--chat-template", "chatml"), ("--chat-template-file", "a.jinja"), ("--embedding",)):
        assert note not in tern_serve(str(TINY), *options).stderr
    metadata = {"general.architecture": "made-up", "tokenizer.chat_template": "{{ messages }}"}
    weights = [files.plain("a.weight", 0, np.zeros((2, 32), np.float32))]
    assert (
        "no chat template" not in tern_serve(str(files.write(tmp_path / "m.gguf", metadata, weights))).stderr
    )


def test_downloads_are_refused_before_they_fail() -> None:
    for options in (("-hf", "user/model"), ("--docker-repo", "a/b"), ("--model-url", "https://host/m.gguf")):
        result = tern_serve(*options)
        assert (result.code, result.stdout) == (1, "")
        assert "built without HTTPS" in result.stderr and result.stderr.count("\n") == 1
    # What needs no HTTPS is llama-server's to find.
    assert tern_serve("-hf", "user/model", "--offline").code == 0
    assert tern_serve("--model-url", "http://host/m.gguf").code == 0


def test_an_error_of_llama_server_is_its_own() -> None:
    command = [*TERN_SERVE, str(TINY), "--no-such-option"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "invalid argument: --no-such-option" in result.stderr


def test_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_FLASH_ATTN", "off")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "256")
    result = tern_serve(str(TINY))
    assert "flash-attn" not in result.stdout
    assert "256 tokens" in result.stderr


def test_options_are_spelled_as_llama_server_does() -> None:
    """Every alias, and the variable, of all options that tern serve sets or looks at."""
    command = [TERN, "run", "llama-server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    entries: dict[str, tuple[set[str], str | None]] = {}
    for entry in re.split(r"\n(?=-)", text):
        # Names are padded to columns; the description starts at the 40th, or on the next line.
        line = entry.splitlines()[0]
        head = line if "  " not in line[30:] else line[:40]
        names = set(re.findall(r"(?:(?<=^)|(?<=[ ,]))--?[A-Za-z][\w-]*", head))
        variables = re.findall(r"\(env: (\w+)\)", entry)
        entries |= dict.fromkeys(names, (names, variables[0] if variables else None))
    for name, spelling in SPELLINGS.items():
        names, variable = entries[f"--{name}"]
        assert {f"--{name}", *spelling.aliases} == names, name
        assert spelling.variable == variable, name


def test_dry_run_shows_the_command_and_no_key(two_models: Path) -> None:
    result = tern_serve("--config", str(two_models), "--port", "9000")
    assert result.code == 0
    assert "llama-server --gpu-layers all" in result.stdout
    assert "[hybrid]" in result.stdout
    assert "secret" not in result.stdout + result.stderr
    assert "http://127.0.0.1:9000" in result.stderr
