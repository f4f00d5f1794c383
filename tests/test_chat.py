"""tern chat as a user meets it: at a real terminal, in a pipe, and with a server that dies."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pexpect
import pytest

from ggml_tern.chat.conversation import Conversation
from ggml_tern.chat.prompt import question_of
from ggml_tern.chat.server import local_server
from ggml_tern.chat.session import server_options
from ggml_tern.chat.view import AnswerWriter
from ggml_tern.client.endpoint import endpoint_of, unix_endpoint
from ggml_tern.client.llama import Chunk, ContextFullError, LlamaClient
from ggml_tern.errors import TernError
from ggml_tern.host.devices import Choice
from ggml_tern.host.run import find_program
from llama_server import LLAMA_SERVER, ROOT, TERN, TINY, Server, serving
from reference import gguf_files as files

HYBRID = ROOT / "models" / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"
CHATML = ("--chat-template", "chatml")
# A context that the tiny model was not trained for, and no end of text: answers that go on for minutes.
ENDLESS = ("--ignore-eos", "--override-kv", "qwen3.context_length=int:200000")
#: The tiny model. More threads would only wait for each other where other work goes on.
ALONE = (str(TINY), "--threads", "1")
ROUTER = (TERN, "run", "llama-server")
# prompt_toolkit switches it on for each prompt.
PROMPT = re.escape("\x1b[?2004h")
STATS = r"prefill (\d+) tokens?.* decode (\d+) tokens?.* context (\d+) of (\d+)"

# Thinks from the start unless it is told not to.
THINKING_TEMPLATE = """
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{%- endif -%}
"""


def children(pid: int) -> list[int]:
    """The processes that a process started and that run."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ends(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within that time. One that nobody has waited for has ended too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


class Chat:
    """tern chat at a terminal of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        # What it asks a terminal, how large it is and where the cursor, nobody would answer.
        environment = {"PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(home), "TMPDIR": str(home)}
        # Wide enough for any line; a process of pytest-xdist has a width of its own in its environment.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process: Any = pexpect.spawn(
            TERN,
            ["chat", *arguments],
            env={**inherited, **environment},
            encoding="utf-8",
            timeout=120,
            dimensions=(40, 200),
        )
        self.process.expect(PROMPT)
        [self.server] = children(self.process.pid)

    def say(self, text: str) -> str:
        """Type a line; what is shown until the next prompt."""
        self.process.send(text + "\r")
        return self.until(PROMPT)

    def until(self, pattern: str) -> str:
        """What is shown until then, and that itself, without escape sequences."""
        self.process.expect(pattern)
        shown = self.process.before + self.process.after
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)

    def end(self) -> int:
        """Wait for the end: the exit code, negative for a signal. Its server must be gone too."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert ends(self.server, 0.5), "llama-server is still there"
        status = self.process.exitstatus
        return -int(self.process.signalstatus) if status is None else int(status)


@contextlib.contextmanager
def chatting(home: Path, *arguments: str) -> Iterator[Chat]:
    chat = Chat(home, *ALONE, *arguments)
    try:
        yield chat
    finally:
        chat.process.close(force=True)


def answer_of(shown: str) -> str:
    """The answer in what say() returned: after the progress of the prompt, before the notes."""
    text = re.split(r"reading \d+ of \d+ tokens\n", shown)[-1]
    return re.split(r"\n(?:the answer was cut|prefill \d)", text)[0].strip()


def piped(question: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TERN, "chat", *arguments], input=question, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(TINY, *CHATML, "--parallel", "1", "-c", "512", "-t", "1", command=LLAMA_SERVER) as server:
        yield server


@pytest.fixture
def client(server: Server) -> LlamaClient:
    return LlamaClient(endpoint_of(server.url))


# ------------------------------------------------------------------------------------------------------------
# At a terminal
# ------------------------------------------------------------------------------------------------------------


def test_a_conversation(tmp_path: Path) -> None:
    with chatting(tmp_path, "--max-tokens", "24", "--seed", "1", "--", *CHATML, "--ignore-eos") as chat:
        shown = chat.say("Who was the king?")
        first = answer_of(shown)
        assert len(first) > 10
        figures = re.search(STATS, shown)
        assert figures is not None, shown
        n_prefill, n_decode, n_used, n_context = map(int, figures.groups())
        assert n_decode == 24 and n_used == n_prefill + n_decode and n_context == 1024
        assert "cut at --max-tokens" in shown

        # What was read before is not read again, and the same seed gives the same answer.
        shown = chat.say("/retry")
        figures = re.search(STATS, shown)
        assert figures is not None and int(figures[1]) < n_prefill and int(figures[3]) == n_used
        assert answer_of(shown) == first

        # Three lines that are one question.
        figures = re.search(STATS, chat.say("And then?\\\rTell me\\\rmore."))
        assert figures is not None and int(figures[3]) > n_used
        assert "no such command" in chat.say("/bogus")
        assert "no system message" in chat.say("/system")
        chat.say("/system Speak like a king.")
        assert "Speak like a king." in chat.say("/system")

        path = tmp_path / "saved.json"
        assert "saved" in chat.say(f"/save {path}")
        messages = json.loads(path.read_text())
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
        assert messages[1]["content"] == "Who was the king?" and messages[2]["content"].strip() == first
        assert messages[3]["content"] == "And then?\nTell me\nmore."
        other = tmp_path / "other.md"
        other.write_text("mine")
        assert "already exists" in chat.say(f"/save {other}")
        assert other.read_text() == "mine"
        chat.say(f"/save {tmp_path / 'new.md'}")
        assert "Tell me\nmore." in (tmp_path / "new.md").read_text()

        assert re.search(r"answers\s+3\b", chat.say("/stats"))
        chat.say("/reset")
        chat.say("/system -")
        shown = chat.say('"""Who was\rthe king?"""')
        assert answer_of(shown) != "" and int(re.findall(STATS, shown)[0][2]) <= n_used + 1

        chat.process.sendintr()
        assert "again" in chat.until(PROMPT)
        chat.process.sendeof()
        assert chat.end() == 0

    # The next chat has its questions at the arrow key, and only the user can read them.
    history = tmp_path / "ggml-tern" / "chat-history"
    assert history.stat().st_mode & 0o077 == 0
    assert "Who was the king?" in history.read_text()


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with chatting(tmp_path, "--context", "100000", "--", *CHATML, *ENDLESS) as chat:
        for question in ("Tell me a long story.", "And another one."):
            chat.process.send(question + "\r")
            chat.until(r"(?s)reading (\d+) of \1 tokens.*\w+ \w+ \w+")
            chat.process.sendintr()
            # With one slot, the second answer begins only because the first one ended in the server too.
            shown = chat.until(PROMPT)
            assert "stopped" in shown
            assert re.search(STATS, shown), shown
        chat.process.sendintr()
        chat.until(PROMPT)
        chat.process.sendintr()
        assert chat.end() == 0


def test_thoughts_are_shown_and_can_be_left_out(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    options = ("--", "--chat-template-file", str(template), "--ignore-eos")
    with chatting(tmp_path, "--max-tokens", "20", *options) as chat:
        shown = chat.say("Why?")
        assert len(answer_of(shown)) > 10
        # A thought is no answer, and not remembered.
        chat.say(f"/save {tmp_path / 'thought.json'}")
        assert json.loads((tmp_path / "thought.json").read_text()) == []
        assert "/retry" in chat.say("/help")
        chat.process.send("/quit\r")
        assert chat.end() == 0
    thought = piped("Why?", *ALONE, "--max-tokens", "20", *options)
    assert thought.returncode == 0 and thought.stdout.strip() == ""
    answered = piped("Why?", *ALONE, "--max-tokens", "20", "--no-think", *options)
    assert answered.returncode == 0 and len(answered.stdout) > 10


@pytest.mark.parametrize(
    ("number", "answering"), [(signal.SIGTERM, True), (signal.SIGHUP, False), (signal.SIGKILL, True)]
)
def test_killed(tmp_path: Path, number: signal.Signals, answering: bool) -> None:
    with chatting(tmp_path, "--context", "100000", "--", *CHATML, *ENDLESS) as chat:
        if answering:
            chat.process.send("Tell me a long story.\r")
            chat.until(r"(?s)reading (\d+) of \1 tokens.*\w+ \w+ \w+")
        os.kill(chat.process.pid, number)
        assert ends(chat.process.pid)
        assert chat.end() == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("tern-chat-*")) == []


def test_the_terminal_is_as_it_was(tmp_path: Path) -> None:
    """A shell that a killed chat leaves behind echoes what is typed and obeys Ctrl-C."""
    script = f'stty -g; "{TERN}" chat "{TINY}" --threads 1; echo "code $?"; stty -g; echo END'
    environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path)}
    shell: Any = pexpect.spawn("sh", ["-c", script], env=environment, encoding="utf-8", timeout=60)
    try:
        shell.expect(PROMPT)
        [chat] = children(shell.pid)
        os.kill(chat, signal.SIGTERM)
        shell.expect("code 143.*END")
        modes = re.findall(r"[0-9a-f]+(?::[0-9a-f]+){10,}", shell.before + shell.after)
        before = re.findall(r"[0-9a-f]+(?::[0-9a-f]+){10,}", shell.before)
        assert len(set(modes)) == 1, (before, modes)
    finally:
        shell.close(force=True)


def test_a_server_that_dies(tmp_path: Path) -> None:
    with chatting(tmp_path, "--", *CHATML) as chat:
        os.kill(chat.server, signal.SIGKILL)
        chat.process.send("Are you there?\r")
        chat.process.expect(r"tern: .*killed.*memory")
        assert chat.end() == 1


# ------------------------------------------------------------------------------------------------------------
# In a pipe
# ------------------------------------------------------------------------------------------------------------


def test_piped_question_and_running_server(server: Server) -> None:
    request = {"messages": [{"role": "user", "content": "Who was the king?"}], "temperature": 0}
    reply = server.post("/v1/chat/completions", request | {"max_tokens": 30}).json
    expected = reply["choices"][0]["message"]["content"].strip()
    greedy = ("--temp", "0", "--max-tokens", "30")
    alone = piped("Who was the king?\n", *ALONE, *greedy, "--", *CHATML)
    attached = piped("Who was the king?", "--url", server.url, *greedy)
    assert alone.returncode == attached.returncode == 0
    assert alone.stdout.strip() == attached.stdout.strip() == expected != ""


def test_a_model_without_template_continues_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "for another server")
    done = piped("In the beginning", *ALONE, "--temp", "0", "--max-tokens", "12", "--stats")
    assert done.returncode == 0
    assert len(done.stdout.split()) > 5
    notes = done.stderr.splitlines()
    assert all(line.startswith("note: ") for line in notes), notes
    assert "no chat template" in notes[0] and re.search(STATS, notes[-1])


def test_names_of_files_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil, safe = tmp_path / "a\x1b]0;b\x07.gguf", r"a\x1b]0;b\x07.gguf"
    evil.symlink_to(TINY)
    done = piped("In the beginning", str(evil), "--threads", "1", "--max-tokens", "1")
    assert done.returncode == 0
    assert f"note: {safe} has no chat template" in done.stderr and "\x1b" not in done.stderr
    chat = Chat(tmp_path, str(evil), "--threads", "1")
    try:
        # What a terminal was sent before the first prompt, escapes of colours included.
        assert f"{safe} · context of " in chat.process.before
        assert "\x1b]0;b\x07" not in chat.process.before
    finally:
        chat.process.close(force=True)


@contextlib.contextmanager
def answering_in_a_pipe() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A chat in the middle of a long answer, and the pipe that this comes through."""
    command = [TERN, "chat", *ALONE, "--context", "100000", "--max-tokens", "90000", "--", *ENDLESS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"In the beginning")
        process.stdin.close()
        assert process.stdout.read(20)
        yield process, process.stdout
    finally:
        process.kill()
        process.wait()


def test_answer_streams_and_a_closed_pipe_ends_it() -> None:
    with answering_in_a_pipe() as (process, answer):
        [child] = children(process.pid)
        answer.close()
        assert process.wait(30) != 0
        assert ends(child, 0.5)


def test_interrupted_in_a_pipe() -> None:
    with answering_in_a_pipe() as (process, answer):
        process.send_signal(signal.SIGINT)
        answer.read()
        assert process.wait(30) == 130


def test_what_cannot_work_is_one_line(tmp_path: Path, server: Server) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TINY.read_bytes()[:300_000])
    for arguments, expected in (
        ([str(tmp_path / "missing.gguf")], "no such file"),
        ([str(cut)], "truncated"),
        ([*ALONE, "--system", "Be brief."], "no chat template"),
        ([*ALONE, "--", *CHATML, "--bogus"], "--bogus"),
        ([*ALONE, "--context", "256", "--", *CHATML], "too long"),
        (["--url", "http://127.0.0.1:1"], "no server answers"),
    ):
        done = piped("word " * 300, *arguments)
        lines = done.stderr.splitlines()
        assert done.returncode == 1 and done.stdout == "", (arguments, done)
        assert len(lines) == 1 and lines[0].startswith("tern: ") and expected in lines[0], (arguments, lines)
    for url in ("ftp://somewhere", "http://[", "", "http://localhost:port", "http://a/b c", "http://x:0"):
        with pytest.raises(TernError, match="not the address"):
            endpoint_of(url)
    assert "stdin" in piped(" \n", *ALONE).stderr
    assert piped("hello").returncode == 2
    assert piped("hello", "--url", server.url, "--threads", "2").returncode == 2


def test_a_question_as_an_argument(server: Server) -> None:
    greedy = ("--temp", "0", "--max-tokens", "30", "--threads", "1")
    expected = piped("Who was the king?", *ALONE, *greedy[:4], "--", *CHATML)
    assert expected.returncode == 0 and expected.stdout.strip()
    for words in (("Who was the king?",), ("Who", "was", "the", "king?")):
        # What stdin holds is not read then.
        answered = piped("Say no.", str(TINY), *words, *greedy, "--", *CHATML)
        assert (answered.returncode, answered.stdout) == (0, expected.stdout), answered.stderr
    attached = piped("", "Who was the king?", "--url", server.url, *greedy[:4])
    assert (attached.returncode, attached.stdout) == (0, expected.stdout)


@pytest.mark.parametrize("raw", [b"caf\xe9", b"\xff\xfeW\0h\0y\0", b"\x89PNG\r\n\x1a\n"])
def test_stdin_that_is_not_utf_8(raw: bytes) -> None:
    done = subprocess.run([TERN, "chat", *ALONE], input=raw, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"tern: stdin is not UTF-8 text: byte ") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"general.architecture": "bert"},
        {"general.architecture": "nomic-bert-moe"},
        {"general.architecture": "qwen3", "qwen3.pooling_type": 3},
        {"general.architecture": "llama", "llama.attention.causal": False},
        {"general.architecture": "gemma-embedding"},
    ],
    ids=str,
)
def test_an_embedding_model_writes_no_text(tmp_path: Path, keys: dict[str, Any]) -> None:
    weights = [files.plain("token_embd.weight", 0, np.zeros((2, 32), np.float32))]
    path = files.write(tmp_path / "e.gguf", keys, weights)
    done = piped("Hello", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"tern: {path}: is an embedding model (") and done.stderr.count("\n") == 1
    assert "--embedding" in done.stderr


def test_a_server_that_wants_a_key() -> None:
    with serving(TINY, *CHATML, "--api-key", "sesame", "-t", "1", command=LLAMA_SERVER) as server:
        refused = piped("hello", "--url", server.url)
        assert refused.returncode == 1 and "--api-key" in refused.stderr
        assert piped("hello", "--url", server.url, "--api-key", "sesame", "--max-tokens", "4").returncode == 0


def test_a_server_with_several_models(tmp_path: Path) -> None:
    for model in (TINY, HYBRID):
        (tmp_path / model.name).symlink_to(model)
    with serving(None, "--models-dir", str(tmp_path), "-t", "1", command=ROUTER) as server:
        unnamed = piped("hello", "--url", server.url)
        assert (
            unnamed.returncode == 1 and "several models" in unnamed.stderr and HYBRID.stem in unnamed.stderr
        )
        named = piped("hello", HYBRID.stem, "--url", server.url, "--max-tokens", "8")
        assert named.returncode == 0 and named.stdout.strip(), named.stderr
        unknown = piped("hello", "nobody", "--url", server.url)
        assert unknown.returncode == 1 and "nobody" in unknown.stderr


# ------------------------------------------------------------------------------------------------------------
# The context
# ------------------------------------------------------------------------------------------------------------


def test_oldest_turns_make_room(client: LlamaClient) -> None:
    conversation = Conversation(client, system="Be brief.", sampling={"max_tokens": 60, "seed": 3})
    dropped, questions = 0, []
    for n in range(12):
        questions.append(f"Question {n}: " + "and the king " * 8)
        answer = "".join(chunk.text for chunk in conversation.ask(questions[-1]))
        dropped += conversation.n_dropped
        assert conversation.n_used <= conversation.n_context == 512
        asked = [turn.question for turn in conversation.turns]
        # An answer of nothing at all is not kept.
        assert asked == [q for q in questions[dropped:] if q in asked]
        assert not answer or asked[-1] == questions[-1]
        assert conversation.messages()[0]["role"] == "system"
    assert 0 < dropped < 12


def test_question_that_is_longer_than_the_context(client: LlamaClient) -> None:
    conversation = Conversation(client, sampling={"max_tokens": 8, "ignore_eos": True})
    assert "".join(chunk.text for chunk in conversation.ask("Who was the king?"))
    with pytest.raises(ContextFullError, match="512"):
        list(conversation.ask("and the king " * 400))
    # Nothing is forgotten for its sake.
    assert [turn.question for turn in conversation.turns] == ["Who was the king?"]
    assert conversation.n_dropped == 0
    assert "".join(chunk.text for chunk in conversation.ask("And his son?"))


def test_answer_that_reaches_the_end_of_the_context(client: LlamaClient) -> None:
    conversation = Conversation(client, sampling={"ignore_eos": True})
    list(conversation.ask("Tell me a long story."))
    assert conversation.cut == "context"
    # There is room for the next one again: the long turn is dropped.
    assert any(chunk.text for chunk in conversation.ask("Who was the king?"))
    assert conversation.n_dropped == 1


def test_answer_that_is_left_stays_as_it_is(client: LlamaClient) -> None:
    conversation = Conversation(client, sampling={"ignore_eos": True})
    answer = conversation.ask("Tell me a long story.")
    texts = (chunk.text for chunk in answer if chunk.text)
    begun = next(texts) + next(texts)
    answer.close()
    assert [turn.answer for turn in conversation.turns] == [begun]
    list(conversation.retry())
    assert len(conversation.turns) == 1 and conversation.cut == "context"


def test_retry_reads_little_where_the_state_is_recurrent() -> None:
    options = server_options(context=512, threads=1, kv_type="q8_0")
    with local_server(HYBRID, [*options, *CHATML], find_program("llama-server"), Choice()) as server:
        server.wait_until_ready()
        client = LlamaClient(unix_endpoint(server.socket, "server"))
        conversation = Conversation(client, sampling={"max_tokens": 20, "ignore_eos": True})
        for question in ("What did the king say to the people?", "And what did they say?"):
            asked = [chunk.timings.n_prefill for chunk in conversation.ask(question) if chunk.timings][-1]
        again = [chunk.timings.n_prefill for chunk in conversation.retry() if chunk.timings][-1]
        # The last few tokens of a prompt are always read.
        assert again <= 8 < asked


# ------------------------------------------------------------------------------------------------------------
# Small parts
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ("  plain ", "plain"),
        ('"""two\nlines"""', "two\nlines"),
        ('"""\n  two\nlines\n"""', "two\nlines"),
        ("", ""),
        ('say """this"""', 'say """this"""'),
    ],
)
def test_question_of(typed: str, question: str) -> None:
    assert question_of(typed) == question


def test_a_model_cannot_send_control_characters_to_the_terminal() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    with AnswerWriter(screen) as writer:
        writer.write(Chunk(text="\n\nred: \x1b[31mtext\x07\x9b31m\ttab\r\nline"))
    assert screen.getvalue() == "red: [31mtext31m\ttab\nline\n"
