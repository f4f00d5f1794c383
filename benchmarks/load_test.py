"""What `tern serve` does under load, under abuse, and when it is ended in the midst of it.

    python benchmarks/load_test.py                            # 8 clients for 5 minutes, the tiny model
    python benchmarks/load_test.py -m model.gguf --clients 16 --seconds 60 -- -c 8192 -np 8

Clients send completions and chats, streamed or not, of random lengths, and check every answer; the server's
memory is sampled meanwhile. Then clients hang up amid answers, malformed requests are sent, and the server is
ended during generation, by SIGTERM and by SIGKILL, and started again. The exit code is 1 if anything was not
as it should be. --report writes DATE-load.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx

import malformed_requests
from benchmarking import ROOT, memory_of_tree, out_option, write_report

sys.path.insert(0, str(ROOT / "tests"))
from llama_server import free_port

TINY = ROOT / "models" / "tiny-qwen3" / "tiny-qwen3-ptq1_0.gguf"
WORDS = ("once", "upon", "a", "time", "there", "was", "the", "little", "bird", "king", "who", "said", "blue")

SECONDS_TO_START = 120.0
#: On a machine that has much else to do. What takes longer is lost.
SECONDS_TO_ANSWER = 300.0
#: Within which a slot is free again, the server has ended, a malformed request is answered.
SECONDS_TO_REACT = 60.0

#: Of the server; those of the command line come after them. llama-server keeps old prompts in memory, up to 8
#: GiB of them: with this little, the store is full before the memory is looked at, and a leak cannot hide
#: behind it. Answers go on without an end where the context is shifted.
OPTIONS = ("--metrics", "--context-shift", "--cache-ram", "8", "-c", "4096")

#: Memory is called flat if it grows less than --flat over the time it is looked at, after a warm-up.
FLAT_MIB = 4.0
WARM_UP = 1 / 4

#: A request for an answer without an end, but for that of the context.
ENDLESS = {"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True, "stream": True}


class Finding(NamedTuple):
    """One line of the result. name: of what was tried; found: what happened."""

    name: str
    good: bool
    found: str


# ----------------------------------------------------------------------------------------------------------
# The server
# ----------------------------------------------------------------------------------------------------------


class ServerError(click.ClickException):
    """The server does not start, or does not answer."""


@dataclass
class Server:
    """A `tern serve` that is started, ended and started again, always on the same port."""

    model: Path
    options: list[str]
    log: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> float:
        """Seconds until it answers.

        Raises ServerError."""
        tern = str(Path(sys.executable).parent / "tern")
        words = [tern, "serve", str(self.model), "--port", str(self.port), *OPTIONS, *self.options]
        begin = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        while self.is_alive and time.monotonic() - begin < SECONDS_TO_START:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return time.monotonic() - begin
            time.sleep(0.05)
        raise ServerError(f"{' '.join(words)} does not answer:\n{self.end_of_log()}")

    def signal(self, number: signal.Signals) -> int | None:
        """The exit code, negative for the signal that ended it; None if it has not ended in time."""
        assert self.process is not None
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(SECONDS_TO_REACT)
        return None

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end_of_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/slots", timeout=SECONDS_TO_ANSWER).json()
        return found

    def seconds_until_free(self) -> float | None:
        """How long it takes until no slot is busy; None if that is too long."""
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < SECONDS_TO_REACT:
            if not any(slot["is_processing"] for slot in self.slots()):
                return passed
            # llama-server looks whether a client without a stream is still there when no answer of any kind
            # was made for a second. Asking more often than that keeps it from looking.
            time.sleep(1.2)
        return None

    def tokens_made(self) -> int:
        """How many tokens it says it has made since it was started."""
        text = httpx.get(f"{self.url}/metrics", timeout=SECONDS_TO_ANSWER).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return int(float(values["llamacpp:tokens_predicted_total"]))

    def answers(self) -> bool:
        """Whether it is alive, its slots become free, and a completion works."""
        if not self.is_alive or self.seconds_until_free() is None:
            return False
        body = {"prompt": "Once", "n_predict": 4}
        return httpx.post(f"{self.url}/completion", json=body, timeout=SECONDS_TO_ANSWER).status_code == 200


# ----------------------------------------------------------------------------------------------------------
# Load
# ----------------------------------------------------------------------------------------------------------


#: llama-server closes the connection after a stream, though it announces that it will be kept. A client that
#: takes it at its word can lose its next request; a client that retries, as the openai package does, need not
#: care.
CLOSE = {"Connection": "close"}


class WrongAnswer(Exception):
    """An answer that came, but is not what was asked for."""


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer.

    Raises WrongAnswer if it holds an error."""
    for line in answer.iter_lines():
        if line.startswith("error"):
            raise WrongAnswer(line)
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def complete(client: httpx.Client, prompt: str, n_tokens: int, stream: bool) -> int:
    """One request to /completion. Returns how many tokens it brought."""
    body = {"prompt": prompt, "n_predict": n_tokens, "ignore_eos": True, "stream": stream}
    with client.stream("POST", "/completion", json=body, headers=CLOSE if stream else None) as answer:
        answer.raise_for_status()
        parts = list(events(answer)) if stream else [json.loads(answer.read())]
    last = parts[-1]
    if not last["stop"] or not "".join(part["content"] for part in parts):
        raise WrongAnswer(f"/completion ended with {last}")
    return int(last["tokens_predicted"])


def chat(client: httpx.Client, prompt: str, n_tokens: int, stream: bool) -> int:
    """The same for /v1/chat/completions."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=CLOSE if stream else None
    ) as answer:
        answer.raise_for_status()
        parts = list(events(answer)) if stream else [json.loads(answer.read())]
    choices = [choice for part in parts for choice in part["choices"]]
    said = "".join(choice["delta" if stream else "message"].get("content") or "" for choice in choices)
    if not said or choices[-1]["finish_reason"] != "length":
        raise WrongAnswer(f"/v1/chat/completions ended with {parts[-1]}")
    return int(parts[-1]["usage"]["completion_tokens"])


@dataclass
class Tally:
    """What one client, or all of them, met."""

    answers: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def keep_asking(server: Server, until: float, seed: int) -> Tally:
    """One client: request after request, each checked, until that time or until the server is gone."""
    rng, tally = random.Random(seed), Tally()
    with httpx.Client(base_url=server.url, timeout=SECONDS_TO_ANSWER) as client:
        while time.monotonic() < until:
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 120)))
            n_tokens, ask = rng.randint(8, 96), rng.choice([complete, chat])
            begin = time.monotonic()
            try:
                n_made = ask(client, prompt, n_tokens, stream=rng.random() < 0.5)
                if n_made != n_tokens:
                    raise WrongAnswer(f"{n_made} tokens for {n_tokens}")
            except (httpx.HTTPError, WrongAnswer, LookupError, ValueError) as error:
                tally.errors[f"{type(error).__name__}: {error}"] += 1
                if not server.is_alive:
                    break
                time.sleep(0.1)
            else:
                tally.answers += 1
                tally.tokens += n_made
                tally.seconds.append(time.monotonic() - begin)
    return tally


@dataclass
class MemorySamples:
    """The resident memory of a server. samples: (seconds since the start, MiB); flat: MiB it may grow."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    flat: float = FLAT_MIB

    def collect(self, pid: int, stop: threading.Event) -> None:
        begin = time.monotonic()
        while not stop.wait(0.25):
            if size := memory_of_tree(pid)[1] / 2**20:
                self.samples.append((time.monotonic() - begin, size))

    @property
    def slope(self) -> float:
        """MiB a second, by least squares, after the warm-up."""
        times, sizes = zip(*self._settled(), strict=True)
        return statistics.linear_regression(times, sizes).slope

    @property
    def growth(self) -> float:
        """MiB over all of the time after the warm-up, by the slope."""
        settled = self._settled()
        return self.slope * (settled[-1][0] - settled[0][0])

    def finding(self) -> Finding:
        if len(self._settled()) < 4:
            return Finding("memory", False, "the server was gone too soon to tell")
        first, last = self.samples[0][1], self.samples[-1][1]
        text = (
            f"{first:.0f} MiB at the start, {last:.0f} at the end; after the warm-up "
            f"{self.slope * 60:+.2f} MiB a minute, {self.growth:+.1f} in all"
        )
        return Finding("memory", self.growth < self.flat, text)

    def _settled(self) -> list[tuple[float, float]]:
        return self.samples[int(len(self.samples) * WARM_UP) :]


def load(server: Server, n_clients: int, seconds: float, flat: float = FLAT_MIB) -> list[Finding]:
    """All clients for some time."""
    memory, stop = MemorySamples(flat=flat), threading.Event()
    made_before = server.tokens_made()
    sampler = threading.Thread(target=memory.collect, args=(server.pid, stop))
    sampler.start()
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(n_clients) as pool:
            jobs = [pool.submit(keep_asking, server, begin + seconds, seed) for seed in range(n_clients)]
            tallies = [job.result() for job in jobs]
    finally:
        stop.set()
        sampler.join()
    passed = time.monotonic() - begin
    errors = sum((tally.errors for tally in tallies), Counter[str]())
    times = sorted(value for tally in tallies for value in tally.seconds)
    n_tokens = sum(tally.tokens for tally in tallies)
    asked = len(times) + errors.total()
    answers = f"{len(times)} of {asked} requests answered in full by {n_clients} clients in {passed:.0f} s"
    for error, count in errors.most_common(3):
        answers += f"; {count} x {error}"
    findings = [Finding("requests", not errors and len(times) > 0, answers)]
    if times:
        p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
        speed = f"{len(times) / passed:.1f} requests, {n_tokens / passed:.0f} tokens a second"
        latency = f"an answer in {statistics.median(times):.2f} s, 99% within {p99:.2f} s"
        findings.append(Finding("speed", True, f"{speed}; {latency}"))
    made = server.tokens_made() - made_before if server.is_alive else 0
    lost = f"{made} tokens made, {n_tokens} received"
    return [*findings, Finding("tokens", made == n_tokens, lost), memory.finding()]


# ----------------------------------------------------------------------------------------------------------
# Abuse
# ----------------------------------------------------------------------------------------------------------


def hang_up(url: str, stream: bool) -> None:
    """Ask for an answer without an end, and leave: in the midst of it, or before it begins."""
    timeout = httpx.Timeout(SECONDS_TO_ANSWER, read=SECONDS_TO_ANSWER if stream else 0.3)
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{url}/completion", json=ENDLESS | {"stream": stream}, timeout=timeout
        ) as answer,
    ):
        for _ in zip(range(5), events(answer), strict=False):
            pass


def disconnect(server: Server, n_clients: int) -> Finding:
    """Twice as many clients as there were before hang up, half of them amid a streamed answer."""
    with ThreadPoolExecutor(n_clients) as pool:
        for job in [pool.submit(hang_up, server.url, i % 2 == 0) for i in range(2 * n_clients)]:
            job.result()
    passed = server.seconds_until_free()
    if passed is None:
        return Finding("clients hang up", False, "slots are still busy, for no one")
    good = server.answers()
    return Finding(
        "clients hang up", good, f"{2 * n_clients} did; all slots free {passed:.2f} s after the last"
    )


def send(port: int, data: bytes) -> str:
    """The status that raw bytes are answered with, "closed" if the connection is closed without one, or
    "hangs"."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_TO_REACT) as connection:
            # It may answer and close before it has read everything.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
    except TimeoutError:
        return "hangs"
    except OSError:
        pass
    words = answer.split(maxsplit=2)
    return words[1].decode(errors="replace") if len(words) > 1 else "closed"


def abuse(server: Server, count: int, seed: int) -> Finding:
    """Malformed requests, four at a time."""
    wanted = malformed_requests.requests(count, seed)
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda request: send(server.port, request.data), wanted))
    bad = [
        f"{request.name[:80]}: {status}"
        for request, status in zip(wanted, statuses, strict=True)
        if status[0] not in "45" and status != "closed"
    ]
    alive = server.answers()
    counted = ", ".join(f"{status} {n} times" for status, n in sorted(Counter(statuses).items()))
    found = [
        f"{count} (seed {seed}): {counted}",
        "it goes on serving" if alive else "it no longer serves",
        *bad[:5],
    ]
    return Finding("malformed requests", alive and not bad, "; ".join(found))


# ----------------------------------------------------------------------------------------------------------
# Ends
# ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def generating(server: Server, n_clients: int) -> Iterator[list[threading.Thread]]:
    """Clients that are in the midst of streamed answers. When the block is left, they must have ended."""
    begun = threading.Barrier(n_clients + 1, timeout=SECONDS_TO_ANSWER)

    def read() -> None:
        with (
            contextlib.suppress(httpx.TransportError, threading.BrokenBarrierError),
            httpx.stream(
                "POST", f"{server.url}/completion", json=ENDLESS, timeout=SECONDS_TO_ANSWER
            ) as answer,
        ):
            stream = events(answer)
            if next(stream, None) is None:
                begun.abort()
            begun.wait()
            for _ in stream:
                pass

    threads = [threading.Thread(target=read, daemon=True) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    try:
        begun.wait()
    except threading.BrokenBarrierError as error:
        raise ServerError(f"answers do not begin:\n{server.end_of_log()}") from error
    yield threads
    for thread in threads:
        thread.join(SECONDS_TO_REACT)


def end(server: Server, number: signal.Signals, n_clients: int) -> Finding:
    """Send a signal to `tern serve` during generation, and start it again.

    No more clients than the server has slots: the others would wait for their turn."""
    name = f"{number.name} during generation"
    with generating(server, min(n_clients, len(server.slots()))) as clients:
        begin = time.monotonic()
        code = server.signal(number)
        passed = time.monotonic() - begin
    hanging = sum(client.is_alive() for client in clients)
    if code is None:
        server.stop()
        return Finding(name, False, f"it does not end within {SECONDS_TO_REACT:.0f} s")
    restart = server.start()
    good = code == (0 if number == signal.SIGTERM else -number) and not hanging and server.answers()
    ended = (
        f"exit code {code} after {passed:.2f} s, {len(clients)} streams closed"
        if not hanging
        else (f"exit code {code}, but {hanging} streams hang")
    )
    return Finding(name, good, f"{ended}; serves again {restart:.1f} s after a new start on the same port")


# ----------------------------------------------------------------------------------------------------------


def measure(
    server: Server, n_clients: int, seconds: float, flat: float, malformed: int, seed: int
) -> Iterator[Finding]:
    """Everything in turn, on a server that runs."""
    yield from load(server, n_clients, seconds, flat)
    yield disconnect(server, n_clients)
    yield abuse(server, malformed, seed)
    yield end(server, signal.SIGTERM, n_clients)
    yield end(server, signal.SIGKILL, n_clients)


EPILOG = """
\b
Examples
  python benchmarks/load_test.py
      Five minutes, with the tiny model.
  python benchmarks/load_test.py -m model.gguf --clients 16 --seconds 60 -- -c 8192 -np 8
      What follows the -- goes to the server.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.argument("options", metavar="[-- SERVER-OPTIONS]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-m",
    "--model",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=TINY,
    help="[default: the tiny Qwen3]",
)
@click.option("--clients", type=click.IntRange(1, 256), default=8, show_default=True, help="At a time.")
@click.option("--seconds", type=click.FloatRange(1), default=300.0, show_default=True, help="Of load.")
@click.option(
    "--malformed", type=click.IntRange(0), default=200, show_default=True, help="How many requests."
)
@click.option(
    "--flat",
    type=click.FloatRange(0),
    default=FLAT_MIB,
    show_default=True,
    help="MiB that the memory may grow after the first quarter of the time; a load of seconds, in which the "
    "server still warms up, needs more.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the malformed requests.")
@click.option("--report", is_flag=True, help="Write DATE-load.md.")
@out_option
def main(
    options: tuple[str, ...],
    model: Path,
    clients: int,
    seconds: float,
    malformed: int,
    flat: float,
    seed: int,
    report: bool,
    out: Path,
) -> None:
    """Put `tern serve` under load and abuse, and end it in the midst of it.

    Clients send completions and chats, streamed or not, and check every answer; the server's memory is
    sampled meanwhile. Then clients hang up, malformed requests are sent, and the server is ended by SIGTERM
    and by SIGKILL and started again. The exit code is 1 if anything was not as it should be.
    """
    # A kill cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    busy = os.getloadavg()[0]
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="load-test-") as folder:
        server = Server(model, list(options), Path(folder) / "log", free_port())
        try:
            server.start()
            for finding in measure(server, clients, seconds, flat, malformed, seed):
                findings.append(finding)
                click.echo(f"{'good' if finding.good else 'BAD':4}  {finding.name}: {finding.found}")
        except httpx.TransportError as error:
            raise ServerError(f"the server is gone ({error}):\n{server.end_of_log()}") from error
        finally:
            server.stop()
    if report:
        text = (
            f"`tern serve` with {model.name}: {clients} clients for {seconds:.0f} s, then abuse and sudden "
            "ends. Written by `benchmarks/load_test.py --report`."
        )
        words = shlex.join([*OPTIONS, *options])
        facts = [
            f"{os.cpu_count()} processors, which the clients share; load average at the start {busy:.2f}",
            f"options of the server: `{words}`",
            f"flat is less than {flat:.0f} MiB of growth after the first {WARM_UP:.0%} of the time",
        ]
        rows = [(finding.name, "yes" if finding.good else "**no**", finding.found) for finding in findings]
        table = "\n".join(
            ["|  | good | found |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        )
        click.echo(f"written: {write_report(out, 'load', 'A server under load', text, facts, table)}")
    sys.exit(0 if all(finding.good for finding in findings) else 1)


if __name__ == "__main__":
    main()
