"""Well-known clients against tern serve: the first examples of their own documentation, unchanged."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from llama_server import TINY, Server, serving

KEY = "sesame"

Run = Callable[[str], str]

# Asks as the documentation of langchain-openai does, and tells what came.
CHECK_LANGCHAIN = """
import json
answer = model.invoke(messages)
chunks = list(model.stream(messages))
print()
print(json.dumps([answer.text, answer.usage_metadata["output_tokens"], [chunk.text for chunk in chunks]]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Takes the likeliest token unless asked otherwise, so that there is one right answer."""
    options = (
        "--api-key",
        KEY,
        "--temp",
        "0",
        "-t",
        "1",
        "-n",
        "40",
        "-c",
        "512",
        "--chat-template",
        "chatml",
    )
    with serving(TINY, *options, api_key=KEY) as server:
        yield server


def readme_examples(containing: str) -> list[str]:
    """Python code in the README of the openai client that is installed."""
    readme = importlib.metadata.distribution("openai").read_text("METADATA") or ""
    found = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return [code for code in found if containing in code]


def langchain_example() -> str:
    """Instantiate, Invoke and Stream of the documentation of langchain-openai's ChatOpenAI."""
    import langchain_openai

    doc = inspect.cleandoc(langchain_openai.ChatOpenAI.__doc__ or "")
    code = ""
    for title in ("Instantiate", "Invoke", "Stream"):
        section = doc[doc.index(f'??? info "{title}"') :]
        found = re.search(r" *```python\n(.*?)```", section, re.DOTALL)
        assert found is not None
        code += textwrap.dedent(found[1])
    return code


@pytest.fixture
def run(server: Server, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What code prints that finds the server through the variables that both clients know."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def run(code: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "<example>", "exec"), {"__name__": "__main__"})
        return printed.getvalue()

    return run


def expected(server: Server, messages: Sequence[tuple[str, str]]) -> str:
    """The answer that the server gives to a plain request."""
    request: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in messages]}
    reply = server.post("/v1/chat/completions", request)
    assert reply.status == 200, reply
    answer: str = reply.json["choices"][0]["message"]["content"]
    assert len(answer) > 20
    return answer


def test_first_example_of_openai(run: Run, server: Server) -> None:
    code = readme_examples("client.responses.create")[0]
    question = re.search(r'instructions="(.+?)",\s+input="(.+?)"', code)
    assert question is not None, code
    assert run(code).strip() == expected(server, [("system", question[1]), ("user", question[2])]).strip()


def test_chat_example_of_openai(run: Run, server: Server) -> None:
    code = readme_examples("client.chat.completions.create")[0]
    question = re.findall(r'"role": "(\w+)",\s+"content": "(.+?)"', code)
    assert [role for role, _ in question] == ["developer", "user"], code
    assert run(code).strip() == expected(server, question).strip()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_streaming_example_of_openai(run: Run, server: Server, asynchronous: bool) -> None:
    [code] = [c for c in readme_examples("stream=True") if ("AsyncOpenAI" in c) == asynchronous]
    question = re.search(r'input="(.+?)"', code)
    assert question is not None, code
    printed = run(code)
    pieces = re.findall(r"ResponseTextDeltaEvent\(.*?delta=('.*?'|\".*?\"), ", printed)
    assert len(pieces) > 10
    assert printed.count("ResponseCompletedEvent(") == 1
    text = "".join(json.loads(f'"{piece[1:-1]}"') if "\\" in piece else piece[1:-1] for piece in pieces)
    assert text.strip() == expected(server, [("user", question[1])]).strip()


def test_streamed_chat_of_openai(run: Run, server: Server) -> None:
    code = """
from openai import OpenAI
client = OpenAI()
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Who was the king?"}], stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="|")
"""
    pieces = run(code).split("|")
    assert len(pieces) > 10
    assert "".join(pieces).strip() == expected(server, [("user", "Who was the king?")]).strip()


def test_first_example_of_langchain(run: Run, server: Server) -> None:
    code = langchain_example()
    question = re.findall(r'\(\s*"(system|human)",\s+"(.+?)",?\s*\)', code)
    assert len(question) == 2, code
    answer = expected(server, [("system", question[0][1]), ("user", question[1][1])])
    *streamed, report = run(code + CHECK_LANGCHAIN).splitlines()
    invoked, n_tokens, chunks = json.loads(report)
    assert "\n".join(streamed).strip() == answer.strip()  # by the example itself
    assert invoked == "".join(chunks) == answer
    assert n_tokens > 10 and len(chunks) > 10


def test_wrong_key_is_said_by_the_client(run: Run) -> None:
    code = "import openai\ntry:\n    openai.OpenAI(api_key='wrong').models.list()\n"
    code += "    openai.OpenAI(api_key='wrong').chat.completions.create(model='m', messages=[])\n"
    code += "except openai.AuthenticationError as error:\n    print(error.status_code)"
    assert run(code).strip() == "401"
