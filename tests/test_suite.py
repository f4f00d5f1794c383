"""What the suite promises of itself: no skip in CI, and the same random inputs in every run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reference import ROOT

TESTS = {
    "test_skip.py": "import pytest\ndef test_one():\n    pytest.skip('no such thing')\n",
    "test_good.py": "def test_two(): pass\n",
    "test_marked.py": "import pytest\n@pytest.mark.skipif(True, reason='never')\ndef test_three(): pass\n",
    "test_whole_file.py": "import pytest\npytest.importorskip('no_such_module')\n",
    "test_expected.py": "import pytest\n@pytest.mark.xfail\ndef test_four(): assert False\n",
}


def run_pytest(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": "", **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={folder}", *arguments]
    return subprocess.run([*command, str(folder)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_a_skip_is_a_failure_in_ci_alone(tmp_path: Path, ci: str, code: int) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    done = run_pytest(tmp_path, "-p", "no_skips", "--continue-on-collection-errors", CI=ci)
    assert done.returncode == code, done.stdout
    if ci:
        assert (
            "1 failed, 1 passed, 1 xfailed, 2 errors" in done.stdout
        )  # an error: before the test or its file
        assert all(reason in done.stdout for reason in ("no such thing", "never", "no_such_module"))
    else:
        assert "1 passed, 3 skipped, 1 xfailed" in done.stdout


def test_random_inputs_are_those_of_the_seed() -> None:
    code = "import seeds; print(seeds.rng_of('a').integers(1 << 60), seeds.rng_of('b').integers(1 << 60))"

    def drawn(**variables: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), **variables}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    fixed, again, other = drawn(TERN_TEST_SEED=""), drawn(TERN_TEST_SEED="0"), drawn(TERN_TEST_SEED="7")
    assert fixed == again
    assert len({*fixed, *other}) == 4
