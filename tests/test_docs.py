"""README and docs/ say what is so: links, commands and their options, files, quoted messages, presets."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from markdown.extensions.toc import slugify

import build_llama_cpp
from doc_pages import DOCS, PAGES, commands, inline_code, shell_lines, tokens_of
from ggml_tern.cli import tern as cli
from ggml_tern.cli import ternconv
from ggml_tern.host import stock as host
from ggml_tern.host.run import bundled_programs
from ggml_tern.serve import config as server_config
from reference import ROOT

PAGE_PARAMETERS = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]

#: The source of the pinned llama.cpp.
LLAMA_CPP = build_llama_cpp.Layout.from_environment().source
#: Whose paths are looked for when a page names them.
FOLDERS = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in ".b")
#: In a path, what a reader is to fill in.
PLACEHOLDER = re.compile(r"DATE|NEW|_new\b|\.\.\.|…|<")


# ---- the site ----


class Loaded(HTMLParser):
    """What a browser fetches for a page without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "link" and values.get("rel") in ("canonical", "prev", "next"):
            return
        if tag in ("script", "link", "img", "iframe", "source"):
            self.addresses += [values.get("src") or "", values.get("href") or ""]


def test_site_is_built_without_a_warning_and_loads_nothing_from_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = list(tmp_path.rglob("*.html"))
    assert len(built) >= len(list(DOCS.rglob("*.md")))
    for page in built:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert [address for address in loaded.addresses if re.match(r"(https?:)?//", address)] == [], page
    assert not [path for path in tmp_path.rglob("*.css") if "fonts.googleapis" in path.read_text()]


def anchors_of(page: Path) -> set[str]:
    tokens = tokens_of(page)
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {slugify(re.sub(r"[`*]", "", title), "-") for title in titles}


@pytest.mark.parametrize("page", PAGE_PARAMETERS)
def test_links_lead_somewhere(page: Path) -> None:
    """Those of README.md and of the models too, which are not part of the site."""
    targets = [str(token.attrGet("href") or "") for token in tokens_of(page) if token.type == "link_open"]
    targets += [str(token.attrGet("src") or "") for token in tokens_of(page) if token.type == "image"]
    for target in targets:
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors_of(file), f"{page}: {target}"


# ---- commands ----


@functools.cache
def options_of(program: str) -> frozenset[str]:
    """Of a stock llama.cpp program, from its --help."""
    path = host.llama_cpp_dir() / program
    done = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", done.stdout + done.stderr))


def unknown_options(program: str, words: list[str]) -> str:
    if program not in bundled_programs():
        return f"no {program} comes along" if "/" not in program else ""
    given = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    return ", ".join(f"{program} has no {word}" for word in given if word not in options_of(program))


def command_of(script: Path) -> click.Command | None:
    """None where a script parses its arguments by other means, or wants a package that is not there."""
    if script.stem == "tern_lm" or "@click.command" not in script.read_text(encoding="utf-8"):
        return None
    command = importlib.import_module(script.stem).main
    assert isinstance(command, click.Command)
    return command


def usage_fault(command: click.Command, name: str, rest: list[str]) -> str:
    """What is wrong with the arguments of a command; empty where nothing is."""
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        values, _, _ = command.make_parser(context).parse_args(list(rest))
    except click.BadOptionUsage:  # an option is spoken of, and its value does not matter
        return ""
    except click.UsageError as error:
        return error.format_message()
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice) and (value := values.get(parameter.name or "")):
            for one in value if isinstance(value, list | tuple) else [value]:
                if one not in list(parameter.type.choices):
                    return f"{one} is none of {', '.join(map(str, parameter.type.choices))}"
    if context.ignore_unknown_options:
        # What remains is for a program of llama.cpp.
        program, passed_on = values.get("program", "llama-server"), values["arguments"]
        return unknown_options(program, list(passed_on)) if isinstance(passed_on, tuple) else ""
    return ""


def fault(words: list[str]) -> str:
    """What is wrong with a command line; empty where nothing is."""
    name, *rest = words
    if name.endswith(("python", "python3")):
        if not rest or not rest[0].startswith(("benchmarks/", "examples/", "tools/", "training/")):
            return ""
        script = command_of(ROOT / rest[0])
        if script is not None:
            return usage_fault(script, rest[0], rest[1:])
        text = (ROOT / rest[0]).read_text(encoding="utf-8")
        given = [word.partition("=")[0] for word in rest[1:] if word.startswith("--")]
        return ", ".join(f"{rest[0]} has no {w}" for w in given if f'"{w}"' not in text and w != "--help")
    command: click.Command = cli.cli if name == "tern" else ternconv.main
    if not rest:
        return ""
    if isinstance(command, click.Group):
        if rest[0].startswith("-"):
            return "" if rest[0] in ("--help", "--version", "-h") else f"tern has no {rest[0]}"
        subcommand = command.get_command(click.Context(command), rest[0])
        if subcommand is None:
            return f"tern has no command {rest[0]}"
        command, rest = subcommand, rest[1:]
    return usage_fault(command, name, rest)


@pytest.mark.parametrize("page", PAGE_PARAMETERS)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    wrong = {shlex.join(words): fault(words) for words in commands(page)}
    assert {line: reason for line, reason in wrong.items() if reason} == {}


def test_a_wrong_command_is_noticed() -> None:
    assert len(list(commands(ROOT / "README.md"))) > 10
    assert "--memry" in fault(["tern", "plan", "model.gguf", "--memry", "8GB"])
    assert "none of" in fault(["ternconv", "--type", "q3_0", "in", "out.gguf"])
    assert "no command" in fault(["tern", "sing"])
    assert "llama-server has no --sing" in fault(["tern", "serve", "model.gguf", "--sing"])
    assert "llama-bench has no --sing" in fault(["tern", "run", "llama-bench", "--sing"])
    assert "--sing" in fault(["python", "benchmarks/check_27b.py", "--sing"])
    assert "has no --sing" in fault(["python", "tools/build_llama_cpp.py", "build", "--sing"])
    assert "none of" in fault(["python", "tools/make_synthetic.py", "--type", "q3_0"])


# ---- files of the repository ----


@pytest.mark.parametrize("page", PAGE_PARAMETERS)
def test_files_that_are_named_exist(page: Path) -> None:
    words = [word for code in inline_code(page) for word in code.split()]
    words += [word.partition("#")[0] for line in shell_lines(page) for word in line.split()]
    paths = {
        word.strip(",;:").removeprefix("../")
        for word in words
        if word.removeprefix("../").startswith(FOLDERS)
    }
    paths = {path.rstrip("/") for path in paths if not PLACEHOLDER.search(path)}
    # llama.cpp has a folder tools/ too, and is spoken of.
    assert [path for path in paths if not list(ROOT.glob(path)) and not (LLAMA_CPP / path).exists()] == []


# ---- messages ----


#: Of llama.cpp, the files whose messages are explained.
STOCK_SOURCES = (
    "ggml/src/gguf.cpp",
    "ggml/src/ggml-backend-reg.cpp",
    "src/llama-model.cpp",
    "common/arg.cpp",
)


@functools.cache
def sources(*roots: Path) -> str:
    """Source files, with string literals that are written in several pieces joined to one."""
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.*")))]
    files = [file for file in files if file.suffix in (".cpp", ".h", ".py")]
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", text).replace('\\"', '"')


def quoted_messages() -> list[tuple[str, bool]]:
    """The messages of troubleshooting.md, and whether they are llama.cpp's."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    found = re.findall(r"^### `(.+)`\n\n(\S+ ?\S*)", text, re.MULTILINE)
    return [(message, beginning.startswith("Said by")) for message, beginning in found]


@pytest.mark.parametrize(("message", "stock"), quoted_messages())
def test_messages_are_those_of_the_sources(message: str, stock: bool) -> None:
    if stock:
        text = sources(*(LLAMA_CPP / file for file in STOCK_SOURCES))
    else:
        text = sources(ROOT / "csrc", ROOT / "python")
    for part in message.split("…"):
        # Numbers and names that are printed into llama.cpp's messages.
        pattern = re.escape(part.strip())
        if stock:
            pattern = re.sub(r"\b\d+\b", lambda number: f"(%d|{number[0]})", pattern)
        assert re.search(pattern, text), part


def test_there_are_messages() -> None:
    kinds = [stock for _, stock in quoted_messages()]
    assert kinds.count(True) >= 4
    assert kinds.count(False) >= 15


# ---- presets ----


def test_presets_of_the_sampler_are_as_described() -> None:
    text = (DOCS / "sampling.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "models" / "sampling").glob("*.yaml"))
    assert len(files) >= 4
    for file in files:
        sampling = server_config.read(file).sampling
        row = next(line for line in text.splitlines() if line.startswith(f"| `models/sampling/{file.name}`"))
        cells = [cell.strip() for cell in row.split("|")[3:-1]]
        assert [float(cell) if cell != "all" else 0 for cell in cells if cell] == [
            value
            for key in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
            if (value := getattr(sampling, key)) is not None
        ], file


def test_contexts_of_the_27b_are_those_of_its_presets() -> None:
    text = (DOCS / "run-the-27b.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "models" / "presets").glob("*.yaml"))
    assert files
    for file in files:
        model = server_config.read(file).model
        row = next(line for line in text.splitlines() if f"`models/presets/{file.name}`" in line)
        assert f"| {model.max_context:,} | {model.kv_cache_bits} bits |" in row, row
