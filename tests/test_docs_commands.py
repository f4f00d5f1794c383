"""Every command line of README.md and docs/ is run, with tiny models under the names that the pages use.

Options are added to those that would go on for ever, or for minutes. test_docs.py checks the options of those
that are not run; what else they need is told below.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_reference
from doc_pages import PAGES, shell_lines, words_of
from ggml_tern import _core
from ggml_tern.gguf.reader import GGUFSource
from ggml_tern.gguf.repacking import unrotate
from ggml_tern.host import stock as host
from model_headers import PTQ1_0, released_27b
from reference import ROOT

TINY = ROOT / "models" / "tiny-qwen3"
#: Files and folders of the repository that commands name.
LINKS = ("benchmarks", "docs", "examples", "models", "tools")

#: Commands that are not run here, by what they match, and why not.
NOT_RUN = {
    r"make |pip install|cmake |lm_eval |git diff": "installs or builds, or is another project's program",
    r"\.venv/bin/python -m pytest": "would run other tests from within this one",
    r"tern bench --serve|curl |export OPENAI": "wants a server; test_bench.py and test_serve.py have one",
    r"tern run (--stock )?llama-server|llama-server |python -m ggml_tern": "a server; test_serve.py runs it",
    r"tern (run|doctor|env|serve|chat|bench)\b.* ~/": "wants a llama.cpp of the reader's",
    r"tools/gpu_check": "wants a llama.cpp with a GPU; test_gpu_check_tool.py runs what it can",
    r"--lora ": "wants an adapter; test_lora.py makes them",
    r"bench_peers|compare_perplexity|make_embedding|build_llama_cpp|examples/": "takes minutes or downloads",
    r"tern repack model-00001": "wants a model in parts; test_gguf_repack.py makes it",
    r"tern chat Ternary": "wants the weights of the 27B, not its header alone",
    r"--compare tiny-qwen35": "shown with its output; the same is run of another model",
}
#: What is added to a command that matches.
ADDED = {
    r"^(\w+=\S+ )?tern serve": "--dry-run",
    r"^tern bench": "--quick",
    r"^tern run (--stock )?llama-bench": "-p 8 -n 4 -r 1",
    r"^ternconv|^tern repack": "--force",
    r"^python benchmarks/compare_logits": "--positions 16 --no-stock",
}


def lines() -> list[str]:
    """Each once, without what it says in a comment."""
    found = (re.sub(r"\s+#.*", "", line).strip() for page in PAGES for line in shell_lines(page))
    return sorted({line.removesuffix("&").strip() for line in found if line and not line.startswith("#")})


def reason_not_to_run(line: str) -> str:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), "")


def with_additions(line: str) -> str:
    """Put behind the last word of the first command of a pipe that needs it, before what it is led to."""
    parts = re.split(r"(\s[|>]\s?)", line)
    for i, part in enumerate(parts):
        added = [words for pattern, words in ADDED.items() if re.search(pattern, part.strip())]
        parts[i] = " ".join([part, *added])
    return "".join(parts)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is not rotated."""
    folder = tmp_path_factory.mktemp("plain")
    tiny_reference.write_plain(TINY, folder)
    return folder


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is not rotated, of F16."""
    path = tmp_path_factory.mktemp("plain-file") / "f16.gguf"
    unrotate(GGUFSource(TINY / "tiny-qwen3-ptq1_0.gguf"), path, _core.TYPE_F16)
    return path


@pytest.fixture
def folder(tmp_path: Path, plain_model: Path, plain_file: Path) -> Path:
    """With all that command lines name: the same tiny model under every name."""
    for name in LINKS:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "Ternary-Model").symlink_to(TINY)
    for name in ("Llama-3.2-1B", "Qwen3-0.6B", "Some-Model", "MODEL"):
        (tmp_path / name).symlink_to(plain_model)
    file = TINY / "tiny-qwen3-ptq1_0.gguf"
    names = ("model", "my-model", "model-pq2_0", "model-ptq1_0", "smollm2-135m", "tiny-qwen3-ptq1_0")
    for name in names:
        shutil.copy(file, tmp_path / f"{name}.gguf")
    # Of a type that stock llama.cpp runs.
    shutil.copy(plain_file, tmp_path / "other.gguf")
    # What the pages make of it in the line before.
    shutil.copy(ROOT / "models/tiny-qwen35/tiny-qwen35-ptq1_0.gguf", tmp_path / "tiny.gguf")
    (tmp_path / "serve.yaml").write_text("model:\n  path: model.gguf\n")
    for name in ("book.txt", "text.txt"):
        shutil.copy(ROOT / "models" / "held-out.txt", tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("line", [line for line in lines() if not reason_not_to_run(line)])
def test_it_runs(line: str, folder: Path) -> None:
    if "27B.gguf" in line:
        header = released_27b(PTQ1_0)
        header.n_merges = header.n_vocab
        header.write(folder / "Ternary-Bonsai-2-27B.gguf")
    # The programs of this environment, and a llama.cpp that is built.
    path = os.pathsep.join([str(Path(sys.executable).parent), str(host.llama_cpp_dir()), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", with_additions(line)],
        cwd=folder,
        env=os.environ | {"PATH": path},
        input="Who is it?\n",
        capture_output=True,
        text=True,
        timeout=550,
    )
    said = done.stdout + done.stderr
    # Planning for more than there is fails as well, but says so.
    does_not_fit = done.returncode in (1, 2) and "plan" in line and "does not fit" in said
    assert done.returncode == 0 or does_not_fit, f"{with_additions(line)}\n{said[-4000:]}"
    assert "Traceback" not in said


def test_what_is_not_run_is_known() -> None:
    """And no pattern is left over from a page that has changed."""
    reasons = [reason_not_to_run(line) for line in lines()]
    assert {*NOT_RUN.values()} == {reason for reason in reasons if reason}
    assert reasons.count("") > 35


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)}
    named = {word for line in lines() if line.startswith("make ") for word in line.split()[1:]}
    assert named and named <= targets


def test_data_of_curl_is_json() -> None:
    calls = [words_of(line) for line in lines() if line.startswith("curl ")]
    assert calls
    for words in calls:
        json.loads(words[words.index("-d") + 1])
