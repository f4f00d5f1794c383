"""ggml_tern.api: what the commands do, from Python, and the examples of docs/python.md."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import ggml_tern
from ggml_tern import TernError, api
from ggml_tern.cli.repack import command as repack_command
from ggml_tern.cli.tern import cli
from ggml_tern.cli.ternconv import main as ternconv
from model_headers import decoder_header
from reference import ROOT

TINY = ROOT / "models" / "tiny-qwen35"
TERN, TERNCONV = (str(Path(sys.executable).parent / name) for name in ("tern", "ternconv"))

NAMES = ("Llama", "convert", "enable", "inspect", "plan", "repack", "verify")


def examples() -> list[str]:
    """The Python of the section on what the commands do."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    _, _, section = page.partition("\n## What the commands do\n")
    return re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)


def test_examples_of_the_docs(tmp_path: Path) -> None:
    """As they stand there, one after the other, in a folder with a model."""
    (tmp_path / "Ternary-Model").symlink_to(TINY)
    blocks = examples()
    assert len(blocks) == 5
    code = "\n".join(blocks)
    assert all(f"api.{name}(" in code for name in NAMES if name != "enable")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "kept exactly: 27 of 27 ternary tensors hold the model's own weights"
    assert lines[1].startswith("qwen35 1.9") and lines[1].endswith(" True")
    assert lines[2].startswith("True ") and lines[2].endswith(" 1024")
    assert lines[3] == "model.gguf: already exists; pass --force to replace it"
    assert "".join(lines[4:]).strip()


def test_all_names_are_there() -> None:
    assert {*NAMES} <= {*dir(api)} and ggml_tern.api is api
    assert api.enable is ggml_tern.enable
    assert all(inspect.getdoc(getattr(api, name)) for name in api.__all__)
    with pytest.raises(AttributeError, match=r"ggml_tern\.api.* has no attribute 'nothing'"):
        api.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"'ggml_tern' has no attribute 'nothing'"):
        ggml_tern.nothing  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+", ggml_tern.__version__)


def test_importing_it_imports_nothing_large() -> None:
    code = "import sys, ggml_tern.api; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "ggml_tern.api" in modules
    large = {"numpy", "gguf", "click", "rich", "yaml", "pydantic", "llama_cpp"}
    assert modules & large == set()
    assert not any(name.startswith(("ggml_tern.convert", "ggml_tern.gguf")) for name in modules)


# ---- the same as the commands ----


#: Options of the commands by what the functions call them, where they differ; and what functions do not need.
CALLED = {"matrix": "type", "type_name": "type", "kv_type": "kv", "loras": "lora", "file": "source"}
NOT_IN_PYTHON = {"json_output", "png", "sensitive_layers", "sensitive_bits", "unrotate", "version", "help"}


@pytest.mark.parametrize(
    ("function", "command"),
    [
        (api.convert, ternconv),
        (api.verify, cli.commands["verify"]),
        (api.repack, repack_command),
        (api.inspect, cli.commands["inspect"]),
        (api.plan, cli.commands["plan"]),
    ],
)
def test_every_option_of_a_command_is_a_parameter(function: Any, command: click.Command) -> None:
    options = {
        CALLED.get(str(parameter.name), str(parameter.name))
        for parameter in command.params
        if parameter.name not in NOT_IN_PYTHON and isinstance(parameter, click.Option)
    }
    parameters = {*inspect.signature(function).parameters}
    assert options - {"model"} <= parameters
    # What only functions have: paths, a wish for fewer threads, and progress.
    rest = parameters - options
    assert rest <= {"source", "file", "output", "threads", "start", "advance"}


def test_options_mean_the_same(tmp_path: Path) -> None:
    options = ["--type", "q2_0", "--keep", "attn_q=q4_0", "--keep", "ffn_*=tq2_0", "--embed", "q8_0"]
    by_command, by_function = tmp_path / "a.gguf", tmp_path / "b.gguf"
    # Its manifest says that it is rotated, and then types are few.
    model = tmp_path / "model"
    model.mkdir()
    for path in TINY.iterdir():
        if path.name != "hadamard_packing.json":
            (model / path.name).symlink_to(path)
    subprocess.run([TERNCONV, *options, str(model), str(by_command)], check=True, capture_output=True)
    seen: list[int] = []
    report = api.convert(
        model,
        by_function,
        type="q2_0",
        keep={"attn_q": "q4_0", "ffn_*": "tq2_0"},
        embed="q8_0",
        advance=seen.append,
        threads=1,
    )
    assert by_function.read_bytes() == by_command.read_bytes()
    assert sum(seen) == sum(target.nbytes for target in report.targets)
    assert report.size == by_function.stat().st_size


@pytest.mark.parametrize(
    "options", [{}, {"memory": 10**9}, {"memory": 10**6}, {"context": 1024, "parallel": 2}]
)
def test_plan_is_that_of_the_command(tmp_path: Path, options: dict[str, int]) -> None:
    path = decoder_header("llama").write(tmp_path / "m.gguf")
    sizes = {"memory": f"{options.get('memory', 0) // 10**6}MB"}
    arguments = [f"--{key}={sizes.get(key, value)}" for key, value in options.items()]
    done = subprocess.run([TERN, "plan", str(path), "--json", *arguments], capture_output=True, text=True)
    assert api.plan(path, **options) == json.loads(done.stdout)  # type: ignore[arg-type]


def test_inspect_and_unrotate(tmp_path: Path) -> None:
    api.convert(TINY, tmp_path / "m.gguf")
    done = subprocess.run(
        [TERN, "inspect", "--json", str(tmp_path / "m.gguf")], capture_output=True, text=True, check=True
    )
    assert api.inspect(str(tmp_path / "m.gguf")) == json.loads(done.stdout)
    report = api.repack(tmp_path / "m.gguf", tmp_path / "plain.gguf", "f16")
    assert report.size == (tmp_path / "plain.gguf").stat().st_size
    assert api.inspect(tmp_path / "plain.gguf")["rotation"] is None
    assert {found.verdict.value for found in api.verify(TINY, tmp_path / "m.gguf")} == {"exact"}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: api.convert("a", "b", type="q3"), "type='q3': expected one of ptq1_0, pq2_0"),
        (lambda: api.convert("a", "b", keep={"x": "q3"}), "keep='q3': expected one of "),
        (lambda: api.convert("a", "b", group_size=100), "group_size=100: expected one of 64, 128, 256"),
        (
            lambda: api.convert("a", "b", rotate=True, rotation_block=3),
            "rotation_block=3: expected one of 128",
        ),
        (lambda: api.convert("a", "b", signs=3), "rotation_block and signs go with rotate=True"),
        (lambda: api.convert("a", "b", lora=["nowhere"]), "nowhere: "),
        (lambda: api.repack("a", "b", "q8_0"), "type='q8_0': expected one of pq2_0"),
        (lambda: api.repack("nowhere.gguf", "b", "pq2_0"), "nowhere.gguf: no such file"),
        (lambda: api.plan("a", kv="q8"), "kv='q8': expected one of f16, q8_0"),
        (lambda: api.plan("a", layout="thin"), "layout='thin': expected one of auto, fast, dense"),
        (lambda: api.inspect("nowhere"), "nowhere: no such file"),
    ],
)
def test_errors_are_one_line(call: Any, expected: str) -> None:
    with pytest.raises(TernError) as caught:
        call()
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
