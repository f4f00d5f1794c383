"""The command ``tern`` as a user meets it: a process with arguments, output, signals and an exit code."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_tern.errors import TernError
from ggml_tern.host import stock as host
from ggml_tern.host.run import bundled_programs, find_program
from tern_command import TERN, clean_environment, tern

# Prints its arguments and the variables of the plug-in, as JSON.
DUMP = """
import json, os, sys
names = ["GGML_BACKEND_PATH", "LLAMA_ARG_DEVICE"]
print(json.dumps({"arguments": sys.argv[1:]} | {name: os.environ.get(name) for name in names}))
"""


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """The path, with a space in it, of a program that prints what it was started with."""
    (tmp_path / "dump.py").write_text(DUMP)
    script = tmp_path / "dump it"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/dump.py" "$@"\n')
    script.chmod(0o755)
    return str(script)


# ------------------------------------------------------------------------------------------------------------
# tern env
# ------------------------------------------------------------------------------------------------------------


def test_env_is_shell_code_that_sets_what_the_plugin_needs() -> None:
    script = f'eval "$("{TERN}" env)"; printf "%s|%s" "$GGML_BACKEND_PATH" "$LLAMA_ARG_DEVICE"'
    result = subprocess.run(
        ["sh", "-c", script], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{host.plugin_path()}|TERN0"


def test_env_quotes_for_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "it's a $HOME `folder`"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / host.PLUGIN_NAME).touch()
    monkeypatch.setattr(host, "install_dir", lambda: folder)

    from click.testing import CliRunner

    from ggml_tern.cli.tern import cli

    printed = CliRunner().invoke(cli, ["env"]).stdout
    script = printed + 'printf "%s" "$GGML_BACKEND_PATH"'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == str(folder / "lib" / host.PLUGIN_NAME)


def test_env_path_puts_our_tools_first() -> None:
    script = f'eval "$("{TERN}" env --path)"; command -v llama-bench'
    result = subprocess.run(
        ["sh", "-c", script], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(host.llama_cpp_dir() / "llama-bench")


def test_env_keeps_a_device_list_that_names_ours() -> None:
    assert "export LLAMA_ARG_DEVICE=TERN0,CUDA0\n" in tern("env", LLAMA_ARG_DEVICE="TERN0,CUDA0").stdout
    assert "export LLAMA_ARG_DEVICE=CUDA0\n" in tern("env", LLAMA_ARG_DEVICE="CUDA0").stdout


# ------------------------------------------------------------------------------------------------------------
# tern run
# ------------------------------------------------------------------------------------------------------------


def test_run_passes_arguments_and_sets_the_plugin(dump: str) -> None:
    arguments = ["--stock", "-m", "a b.gguf", "--help", "--", "*", "", 'quo"te']
    result = tern("run", dump, *arguments)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "arguments": arguments,
        "GGML_BACKEND_PATH": str(host.plugin_path()),
        "LLAMA_ARG_DEVICE": "TERN0",
    }


def test_stock_takes_the_plugin_out_of_the_environment(dump: str) -> None:
    result = tern(
        "run", "--stock", dump, GGML_BACKEND_PATH=str(host.plugin_path()), LLAMA_ARG_DEVICE="CUDA0,TERN0"
    )
    assert json.loads(result.stdout) == {
        "arguments": [],
        "GGML_BACKEND_PATH": None,
        "LLAMA_ARG_DEVICE": None,
    }


def test_stock_leaves_what_is_not_ours(dump: str) -> None:
    result = tern("run", "--stock", dump, GGML_BACKEND_PATH="/opt/libggml-other.so", LLAMA_ARG_DEVICE="CUDA0")
    assert json.loads(result.stdout) == {
        "arguments": [],
        "GGML_BACKEND_PATH": "/opt/libggml-other.so",
        "LLAMA_ARG_DEVICE": "CUDA0",
    }


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_run_passes_the_exit_code_on(code: int) -> None:
    assert tern("run", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_program_as_if_started_directly(number: signal.Signals) -> None:
    assert tern("run", "sh", "-c", f"kill -{number.value} $$; sleep 5").returncode == -number


def test_run_becomes_the_program() -> None:
    """Its process id is the one that the caller knows, so a signal to that reaches the program."""
    process = subprocess.Popen(
        [TERN, "run", "sh", "-c", "echo $$; exec sleep 100"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert int(process.stdout.readline()) == process.pid
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_run_of_an_unknown_program_lists_what_there_is() -> None:
    result = tern("run", "llama-serfer")
    assert result.returncode == 1
    assert result.stdout == ""
    line = result.stderr.strip()
    assert "\n" not in line
    assert line.startswith("tern: llama-serfer: no such program")
    for name in bundled_programs():
        assert name in line


def test_run_says_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program\n")
    for path, complaint in [(tmp_path / "no", "no such file"), (tmp_path, "not a"), (text, "not executable")]:
        with pytest.raises(TernError, match=complaint):
            find_program(str(path))
    text.chmod(0o755)
    result = tern("run", str(text))
    assert result.returncode == 1
    assert "cannot be started" in result.stderr


def test_one_of_ours_goes_before_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama-bench", "my-tool"):
        shutil.copy("/bin/true", tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("llama-bench") == host.llama_cpp_dir() / "llama-bench"
    assert find_program("my-tool") == tmp_path / "my-tool"


@pytest.mark.parametrize(
    "program", ["llama-server", "llama-cli", "llama-completion", "llama-perplexity", "llama-bench"]
)
def test_stock_programs_have_the_device_with_the_plugin_only(program: str) -> None:
    with_plugin = tern("run", program, "--list-devices")
    without = tern("run", "--stock", program, "--list-devices")
    assert with_plugin.returncode == without.returncode == 0
    assert "TERN0: " in with_plugin.stdout
    assert "TERN0" not in without.stdout + without.stderr
