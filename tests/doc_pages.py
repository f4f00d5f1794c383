"""What README.md, docs/ and models/ show their readers: code, commands, tokens of Markdown."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from reference import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "models").rglob("README.md")])


@functools.cache
def tokens_of(page: Path) -> list[Token]:
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [found for token in tokens for found in (token, *(token.children or []))]


def inline_code(page: Path) -> Iterator[str]:
    yield from (token.content for token in tokens_of(page) if token.type == "code_inline")


def shell_lines(page: Path) -> Iterator[str]:
    """What a page lets one type: lines of shell blocks, and what follows a $ in blocks that show output."""
    for token in tokens_of(page):
        if token.type not in ("fence", "code_block"):
            continue
        lines = token.content.replace("\\\n", " ").splitlines()
        if token.info in ("sh", "bash"):
            yield from lines
        elif not token.info:
            begin = ("$ ", "tern ", "ternconv ") if token.type == "code_block" else "$ "
            yield from (line.removeprefix("$ ") for line in lines if line.startswith(begin))


def words_of(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    return list(lexer)


def commands(page: Path) -> Iterator[list[str]]:
    """All calls of tern, ternconv and Python scripts that a page shows, as words."""
    inline = (code for code in inline_code(page) if re.match(r"(tern|ternconv|python3?) ", code))
    for line in (*shell_lines(page), *inline):
        # What stands in $(...) is a command too.
        for part in re.split(r"\$\(|\)\"?", line):
            try:
                words = words_of(part)
            except ValueError:  # a quotation mark that was opened before the split
                words = words_of(part.replace('"', ""))
            call: list[str] = []
            for word in (*words, ";"):
                if not re.fullmatch(r"[();<>|&]+", word):
                    call.append(word)
                    continue
                while call and re.fullmatch(r"[A-Z_]+=.*", call[0]):
                    call.pop(0)
                if call and re.fullmatch(r"tern|ternconv|(\.venv/bin/)?python3?", call[0]):
                    yield call
                call = []
