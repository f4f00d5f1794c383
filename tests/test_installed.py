"""The wheel that `pip install .` makes, in environments that have nothing else: every command works.

One environment has the lowest versions of the dependencies that pyproject.toml allows, one the newest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from reference import ROOT

TINY = ROOT / "models" / "tiny-qwen3"
DEPENDENCIES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


class Environment:
    """A virtual environment with the wheel, and a home folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)

    def run(self, program: str, *words: str | Path, given: str = "") -> str:
        """What a program of the environment prints, from a folder that has nothing to do with the sources."""
        variables = {"PATH": f"{self.folder / 'venv' / 'bin'}:{os.defpath}", "HOME": str(self.folder)}
        variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        command = [self.folder / "venv" / "bin" / program, *words]
        done = subprocess.run(
            command, cwd=self.folder, env=variables, input=given, capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, f"{program} {words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of what `make build` has compiled, as long as the sources are those."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    # The environment's cmake and ninja need not be on the PATH of whoever runs the tests.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    built = subprocess.run(
        [*command, "-C", "build-dir=build/dev", "--wheel-dir", str(folder), str(ROOT)],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    (found,) = folder.glob("ggml_tern-*.whl")
    return found


@pytest.fixture(scope="module", params=["lowest", "newest"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    environment = Environment(tmp_path_factory.mktemp(request.param))
    constraints = environment.folder / "constraints.txt"
    lowest = [line.replace(">=", "==") for line in DEPENDENCIES] if request.param == "lowest" else []
    constraints.write_text("\n".join(lowest))
    environment.run("python", "-m", "pip", "install", "--disable-pip-version-check", "-c", constraints, wheel)
    return environment


def test_every_dependency_has_a_lowest_version() -> None:
    assert [line for line in DEPENDENCIES if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []


def test_every_command_starts(installed: Environment) -> None:
    assert installed.run("tern", "--version").startswith("tern, version ")
    text = installed.run("tern", "--help")
    commands = re.findall(r"^  (\w+) ", text[text.index("Commands") :], re.MULTILINE)
    assert {"bench", "chat", "doctor", "plan", "repack", "run", "serve", "verify"} <= {*commands}
    for command in commands:
        assert "Usage: tern " in installed.run("tern", command, "--help")
    assert "Usage: ternconv " in installed.run("ternconv", "--help")


def test_a_model_is_converted_looked_at_and_run(installed: Environment) -> None:
    file, fast = installed.folder / "tiny.gguf", installed.folder / "fast.gguf"
    installed.run("ternconv", "--force", "--lossless", TINY, file)
    assert "exact" in installed.run("tern", "verify", TINY, file)
    installed.run("tern", "repack", "--force", file, fast, "--type", "pq2_0")
    assert "qwen3" in installed.run("tern", "inspect", file)
    assert json.loads(installed.run("tern", "plan", "--json", file))
    assert installed.run("tern", "hash", file) == installed.run("tern", "hash", fast)
    assert "llama-server" in installed.run("tern", "serve", fast, "--dry-run")
    (test,) = json.loads(
        installed.run("tern", "run", "llama-bench", "-m", fast, "-p", "0", "-n", "4", "-r", "1", "-o", "json")
    )
    assert test["n_gen"] == 4 and "TERN" in test["backends"]
    assert installed.run("tern", "chat", file, given="Who is it?").strip()


def test_doctor_is_content(installed: Environment) -> None:
    found = json.loads(installed.run("tern", "doctor", "--json"))
    assert found["ok"], found
    good = {check["name"] for check in found["checks"] if check["status"] == "ok"}
    assert good >= {"package", "ggml_tern._core", "plug-in", "stock tools", "plug-in in llama-server"}
