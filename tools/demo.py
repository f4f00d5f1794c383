#!/usr/bin/env python3
"""The whole way: convert checkpoints, and run the results in two unmodified llama.cpp hosts.

    make demo

First a tiny model of models/, which was trained ternary in a rotated basis, at 1.75 bits a weight (PTQ1_0):
it writes sense. Then Gemma 3 270M, which was not, with ternary weights (PQ2_0), for its speed. Each file is
served by the stock llama-server with the plug-in, and run in this Python by llama-cpp-python with
``ggml_tern.enable()``. Both must give the same greedy tokens; the demo exits with 1 if they do not, or if
anything else goes wrong. At the end, SmolLM2 135M Instruct goes through the same pipeline with Q8_0, and
answers a question in ``tern chat``: a model to chat with.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent
CACHE = Path(os.environ.get("TERN_CACHE_DIR") or "~/.cache/ggml-tern").expanduser().absolute()
TINY = REPOSITORY / "models" / "tiny-qwen35"
TINY_PROMPT = "David went up from there, and"
INSTRUCT, QUESTION = "smollm2-135m", "Why is the sky blue?"
GEMMA = "gemma3-270m"
GEMMA_PROMPT = (
    "Photosynthesis is the process by which green plants, algae and some bacteria turn the energy of light "
    "into chemical energy. It takes place in the leaves, where the green pigment chlorophyll"
)
N_TOKENS = 32
N_CONTEXT = 1024
N_THREADS = len(os.sched_getaffinity(0))
SECONDS_TO_START = 120.0

PYTHON_HOST = """
import json, sys, time
import ggml_tern
ggml_tern.enable()
import llama_cpp

model, n_threads, n_context, n_tokens = sys.argv[1], *map(int, sys.argv[2:5])
prompt = json.loads(sys.argv[5])
llm = llama_cpp.Llama(
    model, n_gpu_layers=-1, n_ctx=n_context, n_threads=n_threads, n_threads_batch=n_threads, verbose=False
)
end = llama_cpp.llama_vocab_is_eog
vocab = llama_cpp.llama_model_get_vocab(llm.model)
tokens, start = [], time.perf_counter()
for token in llm.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
    if not tokens:
        first = time.perf_counter()
    if end(vocab, token):
        break
    tokens.append(token)
    if len(tokens) == n_tokens:
        break
last = time.perf_counter()
print(json.dumps({
    "tokens": tokens,
    "text": llm.detokenize(tokens).decode("utf-8", "replace"),
    "prompt_per_second": len(prompt) / (first - start),
    "decode_per_second": (len(tokens) - 1) / (last - first) if len(tokens) > 1 else 0.0,
}))
"""

console = Console(highlight=False)


class DemoError(Exception):
    """What went wrong, in one line or with the end of a log."""


@dataclass(frozen=True)
class Completion:
    """What a host made of the prompt."""

    host: str
    tokens: list[int]
    text: str
    prompt_per_second: float
    decode_per_second: float


def run(*command: str | Path) -> None:
    shown = shlex.join([Path(command[0]).name, *map(str, command[1:])])
    console.print(Text(f"$ {shown}", "dim"))
    code = subprocess.run(command).returncode
    if code != 0:
        raise DemoError(f"{Path(command[0]).name} ended with exit code {code}")


def make_checkpoint(name: str) -> Path:
    """The Hugging Face directory of a model that tools/make_hf_dir.py knows."""
    command = [sys.executable, str(REPOSITORY / "tools" / "make_hf_dir.py"), name]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise DemoError("the checkpoint could not be made")
    path = Path(result.stdout.strip().splitlines()[-1])
    console.print(f"{name} as a Hugging Face directory: {path}")
    return path


def convert(checkpoint: Path, kind: str) -> Path:
    output = CACHE / "demo" / f"{checkpoint.name}-{kind}.gguf"
    output.parent.mkdir(parents=True, exist_ok=True)
    run(SCRIPTS / "ternconv", "--type", kind, "--force", checkpoint, output)
    return output


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that the server answers; with ``body`` to a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while True:
        if server.poll() is not None:
            raise DemoError(f"llama-server ended with exit code {server.returncode}")
        try:
            ask(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if time.monotonic() > deadline:
                raise DemoError(f"llama-server did not answer in {SECONDS_TO_START:.0f} seconds") from None
            time.sleep(0.2)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of the stock llama-server with the plug-in, serving ``model`` until the end of the block."""
    port = free_port()
    # Flash attention is off in llama-cpp-python by default, and both hosts must compute the same.
    options = f"--host 127.0.0.1 --port {port} -ngl 99 -c {N_CONTEXT} -t {N_THREADS} -np 1 -fa off".split()
    command = [str(SCRIPTS / "tern"), "run", "llama-server", "-m", str(model), *options]
    console.print(Text(f"$ tern run llama-server -m {model} {' '.join(options)}", "dim"))
    with tempfile.TemporaryFile("w+b") as log:
        # A session of its own: Ctrl-C is ours to handle, and reaches the server as the SIGTERM below.
        server = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_until_healthy(server, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        except (DemoError, urllib.error.URLError, ConnectionError) as error:
            log.seek(0)
            tail = log.read().decode("utf-8", "replace").splitlines()[-15:]
            raise DemoError("\n".join([f"{error}; the end of its log:", *tail])) from error
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def complete_with_server(url: str, prompt: list[int]) -> Completion:
    answer = ask(
        f"{url}/completion",
        {"prompt": prompt, "n_predict": N_TOKENS, "temperature": 0, "top_k": 1, "return_tokens": True},
    )
    timings = answer["timings"]
    return Completion(
        "llama-server",
        answer["tokens"],
        answer["content"],
        timings["prompt_per_second"],
        timings["predicted_per_second"],
    )


def complete_with_python(model: Path, prompt: list[int]) -> Completion:
    numbers = [str(number) for number in (N_THREADS, N_CONTEXT, N_TOKENS)]
    command = [sys.executable, "-c", PYTHON_HOST, str(model), *numbers, json.dumps(prompt)]
    console.print(
        Text(f"$ python: ggml_tern.enable(); llama_cpp.Llama({str(model)!r}, n_gpu_layers=-1)", "dim")
    )
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise DemoError(f"llama-cpp-python failed:\n{result.stderr.strip()[-2000:]}")
    return Completion("llama_cpp.Llama", **json.loads(result.stdout.splitlines()[-1]))


def show(title: str, prompt: str, completions: list[Completion]) -> None:
    text = Text(prompt, "dim") + Text(completions[0].text, "bold")
    console.print(Panel(text, title=title, title_align="left"))
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("host")
    table.add_column("prompt t/s", justify="right")
    table.add_column("decode t/s", justify="right")
    for completion in completions:
        speeds = (completion.prompt_per_second, completion.decode_per_second)
        table.add_row(completion.host, *(f"{speed:.1f}" for speed in speeds))
    console.print(table)


def demonstrate(checkpoint: Path, kind: str, title: str, text: str) -> Path:
    """Convert, run in both hosts on `text`, compare. Returns the converted file."""
    console.print(Rule(title, align="left"))
    model = convert(checkpoint, kind)
    with served(model) as url:
        prompt = ask(f"{url}/tokenize", {"content": text, "add_special": True})["tokens"]
        by_server = complete_with_server(url, prompt)
    by_python = complete_with_python(model, prompt)
    show(f"{model.name}, greedy", text, [by_server, by_python])
    if not by_server.tokens or by_server.tokens != by_python.tokens:
        raise DemoError(f"the hosts disagree:\n  {by_server.tokens}\n  {by_python.tokens}")
    console.print(f"Both hosts gave the same {len(by_server.tokens)} tokens.", style="green")
    return model


def main() -> int:
    # A kill must stop the server too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        tiny = demonstrate(
            TINY,
            "ptq1_0",
            "Trained ternary: 1.75 bits a weight (PTQ1_0), in stock llama.cpp",
            TINY_PROMPT,
        )
        console.print(Rule("A larger checkpoint", align="left"))
        gemma = make_checkpoint(GEMMA)
        demonstrate(gemma, "pq2_0", "Gemma 3 270M with ternary weights (PQ2_0)", GEMMA_PROMPT)
        console.print(
            "Nonsense is right here: this model was not trained ternary, and rounding 270M weights to three "
            "values afterwards destroys it. Models trained ternary, such as the first, keep their sense.",
            style="yellow",
        )
        console.print(
            Rule("SmolLM2 135M Instruct by the same way, 8 bits a weight: to chat with", align="left")
        )
        talking = convert(make_checkpoint(INSTRUCT), "q8_0")
        run(SCRIPTS / "tern", "chat", talking, QUESTION, "--temp", "0", "--max-tokens", "120")
    except DemoError as error:
        console.print(f"demo: {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted", style="bold red")
        return 130
    for action, command, model in (
        ("Let the first write on", "chat", tiny),
        ("Chat with the last", "chat", talking),
        ("The same in the browser, on http://127.0.0.1:8080", "serve", talking),
    ):
        console.print(f"{action}: .venv/bin/tern {command} {model}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
