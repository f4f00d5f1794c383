"""tern run PROGRAM -m FILE: a model that llama.cpp would not load is refused before the program starts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggml_tern.host import stock
from llama_server import TINY
from reference import gguf_files as files
from tern_command import tern

METADATA: dict[str, Any] = {"general.architecture": "llama"}
NORM = files.plain("norm", 0, np.ones(32, np.float32))
#: Prints its arguments, as JSON. Its name says that it is one of llama.cpp's programs.
DUMP = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def program(folder: Path, name: str = "llama-dump") -> str:
    script = folder / name
    script.write_text(DUMP)
    script.chmod(0o755)
    return str(script)


def started_with(*arguments: str | Path, **variables: str) -> list[str]:
    result = tern("run", *arguments, **variables)
    assert result.returncode == 0, result.stderr
    found: list[str] = json.loads(result.stdout)
    return found


def refusal(*arguments: str | Path, **variables: str) -> str:
    """The one line on stderr of a program that was not started."""
    result = tern("run", *arguments, **variables)
    assert result.returncode == 1 and result.stdout == "", result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def bad_files(folder: Path) -> dict[Path, str]:
    """Files that no llama.cpp loads, and what is said of each."""
    whole = TINY.read_bytes()
    contents = {
        "empty.gguf": (b"", "is empty"),
        "page.gguf": (b"<!DOCTYPE html>\n<html>", "is a web page"),
        "cut-header.gguf": (whole[:3000], "more than the file holds"),
        "cut-data.gguf": (whole[:-1000], "truncated"),
        "big-endian.gguf": (b"GGUF\0\0\0\3" + bytes(40), "big endian"),
    }
    found = {folder / "missing.gguf": "no such file", folder: "directory"}
    for name, (data, complaint) in contents.items():
        (folder / name).write_bytes(data)
        found[folder / name] = complaint
    files.write(folder / "adapter.gguf", METADATA | {"general.type": "adapter"}, [NORM])
    found[folder / "adapter.gguf"] = "is an adapter"
    return found


def test_what_is_wrong_with_the_file_is_said_every_time(tmp_path: Path) -> None:
    """By whatever program; stock llama.cpp may end before its log is written."""
    hosts = itertools.cycle(
        [[program(tmp_path)], ["llama-server"], ["llama-bench"], ["--stock", "llama-completion"]]
    )
    for (path, complaint), host in zip(bad_files(tmp_path).items(), hosts, strict=False):
        line = refusal(*host, "-m", path)
        assert line.startswith(f"tern: {path}: ") and complaint in line, line


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "{}"],
        ["--model", "{}"],
        ["--model={}"],
        ["-c", "512", "-m", "{}", "-n", "4"],
        ["-m", str(TINY), "-md", "{}"],
        ["-m", str(TINY), "--model-draft", "{}"],
        ["-m", str(TINY), "--spec_draft_model", "{}"],
    ],
    ids=" ".join,
)
def test_however_it_is_named(words: list[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(TINY.read_bytes()[:3000])
    host = program(tmp_path)
    assert refusal(host, *[word.format(bad) for word in words]).startswith(f"tern: {bad}: ")
    good = [word.format(TINY) for word in words]
    assert started_with(host, *good) == good


def test_all_of_several(tmp_path: Path) -> None:
    """llama-bench takes several, and to no other program is a comma anything but a letter."""
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"")
    bench, other = program(tmp_path, "llama-bench"), program(tmp_path)
    for words in (["-m", f"{TINY},{bad}"], ["-m", str(TINY), "--model", str(bad)]):
        assert refusal(bench, *words).startswith(f"tern: {bad}: ")
    assert started_with(bench, "-m", f"{TINY},{TINY}", "-m", TINY) == [
        "-m",
        f"{TINY},{TINY}",
        "-m",
        str(TINY),
    ]
    named = tmp_path / "a,b.gguf"
    named.symlink_to(TINY)
    assert started_with(other, "-m", named) == ["-m", str(named)]


def test_the_one_of_the_environment(tmp_path: Path) -> None:
    host, bad = program(tmp_path), str(tmp_path / "bad.gguf")
    assert bad in refusal(host, LLAMA_ARG_MODEL=bad)
    # Who names one on the command line gets that.
    assert started_with(host, "-m", TINY, LLAMA_ARG_MODEL=bad) == ["-m", str(TINY)]
    assert started_with(program(tmp_path, "llama-bench"), LLAMA_ARG_MODEL=bad) == []


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["-hf", "a/b"], ["--model-url", "http://localhost/m.gguf"]]
)
def test_what_loads_no_file_or_fetches_it_first(words: list[str], tmp_path: Path) -> None:
    words = ["-m", str(tmp_path / "not-yet.gguf"), *words]
    assert started_with(program(tmp_path), *words) == words


def test_any_part_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(parts):
        keys = {"split.no": i, "split.count": 2, "split.tensors.count": 2}
        files.write(path, METADATA | keys, [files.plain(f"norm{i}", 0, np.ones(32, np.float32))])
    host, first = program(tmp_path), str(parts[0])
    assert started_with(host, "-m", parts[1], "-c", "8") == ["-m", first, "-c", "8"]
    assert started_with(host, f"--model={parts[1]}") == [f"--model={first}"]
    bench = program(tmp_path, "llama-bench")
    assert started_with(bench, "-m", f"{TINY},{parts[1]}") == ["-m", f"{TINY},{first}"]
    parts[0].unlink()
    assert f"{first}: part 1 of 2 is missing" in refusal(host, "-m", parts[1])


def test_a_llama_cpp_of_ones_own_may_know_more_types(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    files.write(path, METADATA, [files.Tensor("w", 99, (1, 256), bytes(64))])
    assert started_with(program(tmp_path), "-m", path) == ["-m", str(path)]
    assert "unknown type 99" in refusal("llama-server", "-m", path)


def test_a_vocabulary_is_enough_for_who_reads_no_more(tmp_path: Path) -> None:
    path = files.write(tmp_path / "vocab.gguf", METADATA | {"general.type": "vocab"}, [])
    assert started_with(program(tmp_path, "llama-tokenize"), "-m", path) == ["-m", str(path)]
    assert "is a vocabulary" in refusal(program(tmp_path), "-m", path)


def test_other_programs_mean_something_else_by_it(tmp_path: Path) -> None:
    """And what llama.cpp is, its libraries say, where its name does not."""
    words = ["-m", "json.tool", "--help"]
    assert tern("run", sys.executable, *words).returncode == 0
    assert started_with(program(tmp_path, "dump"), "-m", "no file") == ["-m", "no file"]
    renamed = tmp_path / "bench"
    renamed.symlink_to(stock.llama_cpp_dir() / "llama-bench")
    assert "no such file" in refusal(renamed, "-m", tmp_path / "none.gguf")


def test_a_good_file_runs() -> None:
    words = ["-m", str(TINY), "-p", "4", "-n", "0", "-r", "1", "-o", "jsonl"]
    result = tern("run", "llama-bench", *words)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model_filename"] == str(TINY)


def test_the_program_is_still_what_runs(tmp_path: Path) -> None:
    """Its process is the caller's own, after the file has been looked at, too."""
    script = tmp_path / "llama-pid"
    script.write_text("#!/bin/sh\necho $$\n")
    script.chmod(0o755)
    command = [str(Path(sys.executable).parent / "tern"), "run", str(script), "-m", str(TINY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=60)
    assert int(out) == process.pid
