"""llama-server's web page, as it comes along, in a real browser: open, send, watch the answer grow, stop."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from chromium import browsing
from llama_server import TINY, Server, serving

API_KEY = "a key for the tests"
#: Answers do not end by themselves.
ENDLESS = ("-c", "4096", "--context-shift", "--ignore-eos")
#: Milliseconds, on a machine that has much else to do.
PATIENCE = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh profile. Errors of its scripts fail the test, and so does a request to any other machine."""
    errors: list[str] = []
    hosts: set[str] = set()
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or "none"))
    yield page
    page.context.close()
    assert not errors
    assert hosts <= {"127.0.0.1", "none"}


def open_page(page: Page, server: Server) -> None:
    found = page.goto(server.url)
    assert found is not None
    if found.status == 404:
        pytest.skip("built without the page; 'python tools/build_llama_cpp.py build --web-page' builds it")
    assert found.status == 200


def send(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Type a message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def limit_network(page: Page, bytes_per_second: int) -> None:
    """The tiny model writes thousands of words a second, faster than a page can show them. -1: no limit."""
    conditions = {
        "offline": False,
        "latency": 0,
        "downloadThroughput": bytes_per_second,
        "uploadThroughput": -1,
    }
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", conditions)


def answer_of(page: Page) -> str:
    """The text of the last answer, without what is counted below it."""
    answer = page.get_by_label("Assistant message with actions").last
    return answer.inner_text().partition(TINY.stem)[0].strip()


def settled_answer_of(page: Page) -> str:
    """The same, once the page has caught up with what it was sent."""
    deadline = time.monotonic() + PATIENCE / 1000
    while time.monotonic() < deadline:
        before = answer_of(page)
        page.wait_for_timeout(500)
        if answer_of(page) == before:
            return before
    raise AssertionError("the answer still grows")


def wait_for(page: Page, pattern: str) -> str:
    deadline = time.monotonic() + PATIENCE / 1000
    while not re.search(pattern, text := answer_of(page), re.DOTALL):
        assert time.monotonic() < deadline, text
        page.wait_for_timeout(50)
    return text


def is_idle(server: Server) -> bool:
    return not any(slot["is_processing"] for slot in server.get("/slots").json)


def test_open_send_stream_stop(page: Page) -> None:
    with serving(TINY, *ENDLESS) as server:
        open_page(page, server)
        expect(page.get_by_role("textbox", name="Type a message")).to_be_visible()
        limit_network(page, 10_000)
        send(page, "Once upon a time")
        stop = page.get_by_role("button", name="Stop", exact=True)
        expect(stop).to_be_visible()
        # It grows while we watch: that is streaming. What stands there before the first word is shorter.
        first = wait_for(page, ".{30}")
        longer = wait_for(page, f".{{{len(first) + 10}}}")
        assert longer.startswith(first[: len(first) // 2])
        assert not is_idle(server)

        stop.click()
        expect(stop).to_be_hidden()
        deadline = time.monotonic() + PATIENCE / 1000
        while not is_idle(server):
            assert time.monotonic() < deadline, "stopped in the page, and still generating in the server"
            time.sleep(0.1)
        assert len(settled_answer_of(page)) >= len(first)
        limit_network(page, -1)

        # The conversation is still there when the page is opened again.
        page.reload()
        expect(page.get_by_label("User message with actions")).to_contain_text("Once upon a time")


def test_a_server_with_a_key_asks_for_it(page: Page) -> None:
    variables = {"LLAMA_API_KEY": API_KEY}
    with serving(TINY, variables=variables, api_key=API_KEY) as server:
        open_page(page, server)
        page.get_by_role("button", name="Enter API Key").click()
        page.get_by_role("textbox").fill("a wrong one")
        page.get_by_role("button", name="Save & Retry").click()
        expect(page.get_by_text("Invalid API key")).to_be_visible()
        page.get_by_role("textbox").fill(API_KEY)
        page.get_by_role("button", name="Save & Retry").click()
        send(page, "Once upon a time")
        wait_for(page, r"\w")
