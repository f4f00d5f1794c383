"""tern bench: real llama-bench and real servers with tiny models; what it prints, writes and exits with."""

from __future__ import annotations

import http.server
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from ggml_tern import plots
from ggml_tern.atomic_file import AtomicFile
from ggml_tern.bench import llama_bench as bench
from ggml_tern.bench import server as bench_server
from ggml_tern.bench.report import Grid, Report, as_markdown
from ggml_tern.bench.server import Answer, Level
from ggml_tern.cli.tern import cli
from ggml_tern.errors import TernError
from ggml_tern.plan import arithmetic, fit
from ggml_tern.plan.header import read_model
from llama_server import LLAMA_SERVER, TERN, TINY, Server, free_port, serving
from model_headers import PQ2_0, PTQ1_0, Q2_0, Q8_0, decoder_header, hybrid_header

OTHER = TINY.parents[1] / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"
#: A fraction of a second for each call of llama-bench.
SHORT = ("--prompt", "32", "--generate", "4", "--threads", "1", "--rounds", "1")
PNG = b"\x89PNG\r\n\x1a\n"


def tern_bench(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [TERN, "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------------------


def test_json_of_contexts_and_batches() -> None:
    result = tern_bench(TINY, *SHORT[:-1], "2", "--context", "0,64", "--batch", "16,32", "--json")
    assert result.returncode == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["complete"], found["threads"], found["kv"], found["rounds"]) == (True, 1, "f16", 2)
    assert "ggml-tern CPU kernels" in found["processor"]
    assert len(found["bandwidth"]) == 2 and min(found["bandwidth"]) > 1e8
    points = [(point["context"], point["batch"]) for point in found["points"]]
    assert points == [(0, 16), (0, 32), (64, 16), (64, 32)]
    for point in found["points"]:
        assert len(point["prefill"]) == len(point["decode"]) == 2
        # The first token comes with the end of the prompt.
        for speed, seconds in zip(point["prefill"], point["first_token"], strict=True):
            assert speed * seconds == pytest.approx(32, rel=1e-3)
        # The weights and the program, and no more than a small model needs.
        assert 1e6 < point["peak_anonymous"] < point["peak_resident"] < 300e6
        nbytes = arithmetic.decode_bytes(read_model(TINY), point["context"] + 2)
        share = median(point["decode"]) * nbytes / median(found["bandwidth"])
        assert point["bandwidth_share"] == pytest.approx(share)
    assert found["ratios"] == []


def test_compare_prints_ratios_of_medians(tmp_path: Path) -> None:
    picture = tmp_path / "speed.png"
    result = tern_bench(
        TINY, "--compare", OTHER, *SHORT, "--context", "0,32", "--kv", "q8_0", "--json", "--png", picture
    )
    assert result.returncode == 0 and result.stderr == f"drawn into {picture}\n"
    found = json.loads(result.stdout)
    # In turn at each point.
    files = [(point["context"], Path(point["file"])) for point in found["points"]]
    assert files == [(0, TINY), (0, OTHER), (32, TINY), (32, OTHER)]
    for ratio, ours, theirs in zip(found["ratios"], found["points"][::2], found["points"][1::2], strict=True):
        assert (ratio["file"], ratio["against"]) == (str(TINY), str(OTHER))
        for name in ("prefill", "first_token", "decode"):
            assert ratio[name] == pytest.approx(median(ours[name]) / median(theirs[name]))
        taken = [point["peak_anonymous"] + point["mapped_weights"] for point in (ours, theirs)]
        assert ratio["memory"] == pytest.approx(taken[0] / taken[1])
        assert (ours["mapped_weights"], theirs["mapped_weights"]) == tuple(
            read_model(model).mapped for model in (TINY, OTHER)
        )
    assert picture.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.png"]


def test_weights_that_stay_mapped_are_memory_too(tmp_path: Path) -> None:
    """The same model in Q8_0 takes more than in PTQ1_0, although nearly all of it is mapped from the file."""
    ternary, plain = decoder_header("qwen3", 2), decoder_header("qwen3", 2)
    plain.tensors = {
        name: (Q8_0 if kind == PTQ1_0 else kind, shape) for name, (kind, shape) in plain.tensors.items()
    }
    models = [bench.open_model(h.write(tmp_path / f"{n}.gguf")) for n, h in enumerate((ternary, plain))]
    assert models[0].mapped < models[1].mapped / 100
    results = bench.Results(bench.Settings(contexts=(0,)), models)
    point = bench.Point(0, 512)
    # As much for the program and its buffers; on top of that, one has its weights in tiles.
    of_program = 10_000_000
    tiles = read_model(models[0].path).tiles
    for model, anonymous in zip(models, (of_program + tiles, of_program), strict=True):
        results.samples[model, point] = bench.Samples([1.0], [1.0], [1.0], anonymous, 0)
    found = bench.ratios(results, models[1], point)
    assert found is not None
    assert found["memory"] == (of_program + tiles + models[0].mapped) / (of_program + models[1].mapped) < 1
    # Without an architecture that plans know, too.
    unknown = decoder_header("mamba9", 2)
    unknown.tensors = plain.tensors
    assert bench.open_model(unknown.write(tmp_path / "u.gguf")).mapped == models[1].mapped


def test_contexts_are_those_that_models_were_trained_for() -> None:
    models = [bench.open_model(TINY)]
    settings = bench.Settings(contexts=(0, 512, 2048, 100_000), n_prompt=256)
    settled, notes = bench.settle(models, settings)
    assert settled.contexts == (0, 512, 768)
    assert [note.split(":")[0] for note in notes] == [
        "a context of 2,048 is cut to 768",
        "a context of 100,000 is cut to 768",
    ]
    assert bench.settle(models, bench.Settings(contexts=(0,), n_prompt=5000))[0].contexts == (0,)
    result = tern_bench(TINY, *SHORT, "--context", "200000", "--json")
    assert result.returncode == 0
    assert result.stderr.startswith("note: a context of 200,000 is cut to 992: ")
    assert [point["context"] for point in json.loads(result.stdout)["points"]] == [992]


def test_what_does_not_fit_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = decoder_header("qwen3", 8, context_length=2**30).write(tmp_path / "m.gguf")
    result = tern_bench(path, *SHORT, "--context", "1000000000")
    assert (result.returncode, result.stdout) == (1, "")
    said, *offers = result.stderr.splitlines()
    assert said.startswith(f"tern: {path}: takes ") and said.endswith("MB are free. What fits at most:")
    assert [offer.split()[3] for offer in offers] == ["f16", "q8_0", "q5_0", "q4_0"]
    # Taken at their word: what is offered fits, the prompt included.
    monkeypatch.setattr(fit, "available", lambda: 10**9)
    models = [bench.open_model(path)]
    with pytest.raises(TernError) as error:
        bench.settle(models, bench.Settings(contexts=(2**29,)))
    offered = int(str(error.value).splitlines()[1].split()[1])
    assert bench.settle(models, bench.Settings(contexts=(offered,)))[1] == []
    with pytest.raises(TernError):
        bench.settle(models, bench.Settings(contexts=(offered + 512,)))


def test_a_plot_of_one_point_has_bars(tmp_path: Path) -> None:
    drawn: list[Any] = []
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
        patch.setattr(AtomicFile, "publish", lambda _: None)
        one = plots.Panel("Decode", "tokens of context", "tokens/s", {"a": [(512, 5.0)], "b": [(512, 9.0)]})
        many = plots.Panel(
            "Decode", "tokens of context", "tokens/s", {"a": [(0, 5.0), (512, 4.0)], "b": [(0, 1)]}
        )
        plots.write_plot(tmp_path / "a.png", "title", [one, many])
    bars, lines = drawn[0].axes
    assert [patch.get_height() for patch in bars.patches] == [5.0, 9.0] and not bars.lines
    assert [label.get_text() for label in bars.get_xticklabels()] == ["a", "b"]
    assert bars.get_xlabel() == "tokens of context: 512"
    assert len(lines.lines) == 2 and not lines.patches and lines.get_legend() is not None


def test_table_and_markdown() -> None:
    table = tern_bench(TINY, *SHORT, "--quick", "--compare", OTHER)
    assert table.returncode == 0 and table.stderr == ""
    lines = table.stdout
    for model in (TINY, OTHER):
        assert re.search(rf"^{model.name}\n.+\n +0 +512( +[\d,.]+){{3}} +\d+% +\d+ *$", lines, re.MULTILINE)
    assert f"{TINY.name} against {OTHER.name}, ratios of medians" in table.stdout
    assert "1 thread; KV cache in f16" in table.stdout and "medians of 1 round\n" in table.stdout
    markdown = tern_bench(TINY, *SHORT, "--quick", "--md")
    assert markdown.returncode == 0
    assert "| context | batch | prefill t/s | first token s | decode t/s | bandwidth | memory MB |\n" in (
        markdown.stdout
    )
    assert re.search(r"^\| 0 \| 512 \|( [\d,.]+ \|){3} \d+% \| \d+ \|$", markdown.stdout, re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_keeps_what_was_measured(number: signal.Signals, tmp_path: Path) -> None:
    command = [TERN, "bench", str(TINY), *SHORT[:-1], "100000", "--context", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # Well into the rounds: llama-bench runs.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        seen: set[str] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < deadline:
            seen |= set(children.read_text().split())
            time.sleep(0.02)
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, error
    found = json.loads(out)
    assert found["complete"] is False
    assert len(found["points"][0]["decode"]) >= 2
    # None of those that it started is left.
    assert not [child for child in seen if Path(f"/proc/{child}").exists()]


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    missing = tern_bench(tmp_path / "missing.gguf")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == f"tern: {tmp_path}/missing.gguf: no such file or directory\n"
    # A header that plan knows, and whose weights llama.cpp misses.
    broken = decoder_header("llama")
    del broken.tensors["blk.1.attn_q.weight"]
    path = broken.write(tmp_path / "broken.gguf")
    result = tern_bench(path, *SHORT, "--quick")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(rf"tern: {path}: llama-bench -p 32 .* failed: .+; 'tern doctor' .*\n", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either MODEL.gguf or --serve URL"),
        (["m.gguf", "--serve", "http://localhost"], "give either MODEL.gguf or --serve URL"),
        (["m.gguf", "--json", "--md"], "give either --json or --md"),
        (["m.gguf", "--concurrency", "2"], "--concurrency goes with --serve"),
        (["--serve", "http://localhost", "--kv", "f16"], "--kv goes with MODEL.gguf"),
        (["m.gguf", "--context", "0,-1"], "give numbers from 0 on, with commas"),
        (["m.gguf", "--batch", "0"], "give numbers from 1 on, with commas"),
        (["m.gguf", "--context", "0,,1"], "give numbers from 0 on, with commas"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_plots_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TernError, match="is a directory"):
        plots.check_plot(tmp_path)
    with pytest.raises(TernError, match="nowhere does not exist; create it first"):
        plots.check_plot(tmp_path / "nowhere" / "a.png")
    # What python -S -c sees: no matplotlib. None in its place makes Python find nothing.
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(TernError, match=r"a\.png: .* matplotlib, .* pip install 'ggml-tern\[plots\]'"):
        plots.check_plot(tmp_path / "a.png")


def test_names_of_files_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil, safe = tmp_path / "a\x1b[2J\x07.gguf", r"a\x1b[2J\x07.gguf"
    evil.symlink_to(TINY)
    compared = (evil, "--compare", OTHER)
    for options in ((), ("--md",)):
        result = tern_bench(*compared, *SHORT, "--context", "100000", *options)
        assert result.returncode == 0
        assert result.stderr.startswith("note: a context of 100,000 is cut to ")
        title, *rest = result.stdout.splitlines()
        assert title.endswith(f"tern bench: {safe} and {OTHER.name}")
        assert any(line.endswith(f"{safe} against {OTHER.name}, ratios of medians") for line in rest)
        assert not {"\x1b", "\x07"} & set(result.stdout)


def test_markdown_of_a_report() -> None:
    grid = Grid(["name", "n"], [["a", "1"], ["b", "2"]], "Title")
    text = as_markdown(Report("R", ["one", "two"], [grid], [], {}))
    expected = "# R\n\n- one\n- two\n\n## Title\n\n| name | n |\n| ---: | ---: |\n| a | 1 |\n| b | 2 |\n"
    assert text == expected


# ------------------------------------------------------------------------------------------------------------
# What decode reads
# ------------------------------------------------------------------------------------------------------------


def test_decode_reads_weights_cache_and_state(tmp_path: Path) -> None:
    tied = read_model(decoder_header("qwen3", 3).write(tmp_path / "m.gguf"))
    # A tied embedding is the head: all is read. Of the cache, 3 layers, keys and values of 2 heads of 64.
    assert arithmetic.decode_bytes(tied, 100) == tied.tiles + tied.mapped + 100 * 3 * (128 + 128) * 2
    assert arithmetic.decode_bytes(tied, 100, "q8_0") == tied.tiles + tied.mapped + 100 * 3 * 256 * 34 / 32

    hybrid = read_model(hybrid_header(4, PQ2_0, 256, 512, (4, 2, 64), (2, 6, 64)).write(tmp_path / "h"))
    embedding = 300 * 256
    assert hybrid.embedding.tiles == arithmetic.padded(300, 8) // 8 * (8 * 256 // 4 + 2 * 16 + 32) + 64
    assert hybrid.embedding.tiles > embedding / 4
    read = hybrid.tiles + hybrid.mapped - hybrid.embedding.tiles
    assert arithmetic.decode_bytes(hybrid, 0) == read + 4 * 3 * (3 * (384 + 2 * 2 * 64) + 64 * 384)


def test_decode_reads_experts_in_use_and_a_window(tmp_path: Path) -> None:
    header = decoder_header("qwen3moe", 1, expert_count=4, expert_used_count=2)
    before = read_model(header.write(tmp_path / "m.gguf")).read
    header.add(Q8_0, blk__0__ffn_up_exps=(4, 24, 256))
    header.add(Q2_0, blk__0__ffn_gate_exps=(4, 24, 64))
    after = read_model(header.write(tmp_path / "m.gguf")).read
    assert after - before == (4 * 24 * 256 // 32 * 34 + 4 * (64 + 3 * (8 * 64 // 4 + 16 + 48))) // 2

    gemma = decoder_header("gemma3", 7, **{"attention.sliding_window": 128})
    model = read_model(gemma.write(tmp_path / "g.gguf"))
    a_token = (128 + 128) * 2
    assert arithmetic.decode_bytes(model, 1000) - model.read == (1000 + 6 * 128) * a_token


# ------------------------------------------------------------------------------------------------------------
# Servers
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ("-c", "2048", "-np", "4", "-t", "1", "--api-key", "secret")
    with serving(TINY, *options, command=LLAMA_SERVER, api_key="secret") as running:
        yield running


def test_server(server: Server, tmp_path: Path) -> None:
    picture = tmp_path / "users.png"
    before = server.log().count("stop processing: ")
    result = tern_bench(
        *("--serve", f"{server.url}/v1/", "--concurrency", "1,3", "--requests", "6", "--seconds", "60"),
        *("--prompt", "20", "--generate", "8", "--api-key", "secret", "--json", "--png", picture),
    )
    assert (result.returncode, result.stderr) == (0, f"drawn into {picture}\n")
    found = json.loads(result.stdout)
    assert (found["url"], found["complete"]) == (server.url, True)
    assert [level["users"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        assert (level["requests"], level["cut"], level["errors"]) == (6, 0, [])
        # ignore_eos: every answer has all its tokens.
        assert level["tokens"] == 6 * 8
        assert len(level["first_token"]) == len(level["tokens_per_second_of_users"]) == 6
        assert level["tokens_per_second"] * level["seconds"] == pytest.approx(48)
        assert level["seconds"] < 60
    assert picture.read_bytes().startswith(PNG)
    # What the server itself says: those, and the one for warming up.
    assert server.log().count("stop processing: ") - before == 13


def test_a_level_ends_with_its_seconds(server: Server) -> None:
    result = tern_bench(
        *("--serve", server.url, "--concurrency", "2", "--requests", "100000", "--seconds", "2"),
        *("--prompt", "8", "--generate", "400", "--api-key", "secret", "--json"),
    )
    assert (result.returncode, result.stderr) == (0, "")
    (level,) = json.loads(result.stdout)["levels"]
    assert level["cut"] == 2 and level["errors"] == [] and level["tokens"] > 0
    assert 1.9 < level["seconds"] < 30


def test_interrupted_while_a_server_answers(server: Server) -> None:
    command = [TERN, "bench", "--serve", server.url, "--concurrency", "2", "--seconds", "600", "--md"]
    command += ["--requests", "100000", "--generate", "400", "--prompt", "8", "--api-key", "secret"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            slots = server.get("/slots").json
            if sum(slot["is_processing"] for slot in slots) == 2:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, error
    assert "- ended before all was measured\n" in out and re.search(r"^\| 2 \|", out, re.MULTILINE)


def test_wrong_keys_and_addresses(server: Server) -> None:
    def refused(url: str, api_key: str | None = None, n_prompt: int = 8) -> str:
        with pytest.raises(TernError) as error:
            opened = bench_server.open_server(url, api_key, None)
            bench_server.warm_up(opened, bench_server.Load(n_prompt=n_prompt))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "answered 401: Invalid API Key; pass its --api-key" in refused(server.url)
    assert "pass the right --api-key" in refused(server.url, "wrong")
    gone = f"http://127.0.0.1:{free_port()}"
    assert f"{gone}: no server answers there (Connection refused)" in refused(gone)
    assert "not the address of a server" in refused("ftp://localhost")
    assert "not the address of a server" in refused("http://localhost:port")
    too_long = refused(server.url, "secret", 5000)
    assert "answered 400: " in too_long and "exceeds the available context size" in too_long

    result = tern_bench("--serve", server.url, "--concurrency", "1", "--api-key", "wrong")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (f"tern: {server.url}: answered 401: Invalid API Key; pass the right --api-key\n")


@contextmanager
def answering(handle: Any) -> Iterator[str]:
    """A server that lists a model and leaves completions to `handle`, which gets the handler."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "made\x1bup"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            handle(self)

        def reply(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def stream(handler: Any, *events: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        handler.wfile.write(f"data: {text}\n\n".encode())


A_TOKEN = {"choices": [{"delta": {"content": "a"}}]}


def load_of(url: str, users: int = 2, **load: Any) -> tuple[Level, bool]:
    opened = bench_server.open_server(url, None, None)
    levels: list[Level] = []
    load = {"seconds": 20.0, "requests": 4, "n_prompt": 8} | load
    complete = bench_server.measure(
        opened, bench_server.Load(**load), [users, users], levels, lambda level: None
    )
    return levels[0], complete and len(levels) == 2


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (lambda h: h.reply(503, {"error": {"message": "Loading model"}}), "answered 503: Loading model; try"),
        (lambda h: h.reply(500, ["no\nobject\x1b"]), r'answered 500: \["no\\nobject\\u001b"\]$'),
        (lambda h: stream(h, A_TOKEN), "broke off in the middle of an answer"),
        (lambda h: stream(h, "{"), "streams what is no completion: it is no JSON"),
        (lambda h: stream(h, [1]), "streams what is no completion: it is no JSON object"),
        (lambda h: stream(h, {"error": {"code": 503, "message": "full"}}), "answered 503: full; try again"),
        (lambda h: h.connection.shutdown(socket.SHUT_RDWR), "broke off|no server answers"),
    ],
    ids=["503", "500", "half", "no JSON", "no object", "error in the stream", "gone"],
)
def test_broken_servers(handle: Any, said: str) -> None:
    with answering(handle) as url:
        level, complete = load_of(url)
    # Each of the users met an error and left, and no other level was tried.
    assert not complete and len(level.errors) == len(level.answers) == 2
    for error in level.errors:
        assert error.startswith(f"{url}: ") and "\n" not in error and re.search(said, error)


def test_a_server_that_hangs_is_cut_off() -> None:
    done = threading.Event()

    def hang(handler: Any) -> None:
        stream(handler, A_TOKEN)
        handler.wfile.flush()
        done.wait(30)

    try:
        with answering(hang) as url:
            level, complete = load_of(url, seconds=0.5)
            done.set()
    finally:
        done.set()
    assert complete and level.errors == []
    assert [(answer.cut, answer.n_tokens) for answer in level.answers] == [(True, 1)] * 2
    assert 0.4 < level.seconds < 10


def test_tokens_are_those_that_the_server_counts() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 11}}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    with answering(lambda h: stream(h, role, thought, A_TOKEN, usage, "[DONE]")) as url:
        level, complete = load_of(url, users=1, requests=3)
    assert complete and len(level.answers) == 3
    assert {(len(a.arrivals), a.n_tokens, a.n_prompt) for a in level.answers} == {(2, 7, 11)}


def test_one_failure_among_answers_is_told(tmp_path: Path) -> None:
    counter = iter(range(1000))

    def third_fails(handler: Any) -> None:
        # The first is the one for warming up.
        if next(counter) == 2:
            handler.reply(500, {"error": {"message": "out of\nmemory"}})
        else:
            stream(handler, A_TOKEN, A_TOKEN, "[DONE]")

    with answering(third_fails) as url:
        result = tern_bench("--serve", url, "--concurrency", "2", "--requests", "6", "--md")
    assert result.returncode == 1
    assert result.stderr == f"tern: 1 requests failed; the first: {url}: answered 500: out of memory\n"
    assert re.search(r"^\| 2 \| [\d.]+ \| 5 \| 0 \| 1 \|", result.stdout, re.MULTILINE)
    assert "\x1b" not in result.stdout and r"- made\x1bup: prompts of " in result.stdout


def test_what_a_level_makes_of_its_answers() -> None:
    answers = [
        Answer(0.0, [0.5, 0.6, 0.8], n_tokens=3),
        Answer(1.0, [1.25], n_tokens=1, cut=True),
        Answer(1.0, error="gone"),
    ]
    level = Level(2, 2.0, answers)
    assert level.first_tokens == [0.5, 0.25] and level.errors == ["gone"]
    assert level.gaps == pytest.approx([0.1, 0.2])
    assert level.user_speeds == pytest.approx([3 / 0.8, 4.0]) and level.speed == 2.0


def test_no_two_prompts_begin_alike(rng: np.random.Generator) -> None:
    import random

    words = random.Random(int(rng.integers(2**32)))
    prompts = [bench_server.prompt_of(40, words) for _ in range(200)]
    assert len({prompt.split()[0] for prompt in prompts}) == 200


def test_memory_of_a_process() -> None:
    sizes = bench.memory_of(Path("/proc/self/status").read_text())
    assert sizes["VmHWM"] >= sizes["VmRSS"] >= sizes["RssAnon"] > 1e6
    assert sizes["VmRSS"] == sizes["RssAnon"] + sizes["RssFile"] + sizes["RssShmem"]
