"""The one check before a model is loaded: which context it gets, and what is refused, in serve and chat."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ggml_tern.cli.tern import cli
from ggml_tern.errors import TernError
from ggml_tern.plan import arithmetic, fit
from ggml_tern.plan.fit import Demand
from ggml_tern.plan.header import read_model
from llama_server import ROOT, TERN, TINY
from model_headers import Q8_0, decoder_header
from reference import gguf_bytes
from reference import gguf_files as files

HYBRID = ROOT / "models" / "tiny-qwen35" / "tiny-qwen35-ptq1_0.gguf"
#: 2 TB of KV cache, for conversations that could use it.
ENDLESS = ("-c", "2000000000", "--override-kv", "qwen3.context_length=int:2000000000")


def serve(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["serve", "--dry-run", *map(str, words)])


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A machine with so much memory left."""
    monkeypatch.setattr(fit, "available", lambda: nbytes)


# ------------------------------------------------------------------------------------------------------------
# Beyond training
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "context"),
    [
        (("-c", "200000"), 4 * 1024),
        (("--ctx-size", "200000", "-np", "1"), 1024),
        (("-c", "200000", "-np", "3"), 3 * 1024),
        (("-c", "200000", "-np", "2", "-kvu"), 2 * 1024),
        (("--kv-unified-per-slot", "9000", "-np", "2"), 2 * 1024),
    ],
)
def test_what_no_conversation_could_use_is_not_allocated(words: tuple[str, ...], context: int) -> None:
    result = serve(TINY, *words)
    assert result.exit_code == 0
    assert re.findall(r"(?:-c|--ctx-size) (\d+)", result.stdout) == [str(context)]
    (note,) = (line for line in result.stderr.splitlines() if "trained for" in line)
    assert f"{TINY.name} was trained for 1,024 tokens" in note and note.endswith(f"is cut to {context:,}")
    assert f"for {context:,} tokens" in result.stderr


def test_wherever_the_context_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "one.yaml"
    config.write_text(f"model: {{path: {TINY}, max_context: 200000}}\n")
    assert "--ctx-size 4096" in serve("--config", config).stdout
    several = tmp_path / "several.yaml"
    several.write_text(f"models: {{a: {{path: {TINY}, max_context: 9999}}, b: {{path: {HYBRID}}}}}\n")
    assert re.findall(r"ctx-size = (\d+)", serve("--config", several).stdout) == ["4096"]
    # One on the command line is for all of them, each as far as it can.
    result = serve("--config", several, "-c", "6000")
    trained = read_model(HYBRID).context
    assert "-c 6000" not in result.stdout
    assert re.findall(r"ctx-size = (\d+)", result.stdout) == ["4096", str(min(6000, 4 * trained))]
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "200000")
    assert "--ctx-size 4096" in serve(TINY).stdout


def test_positions_that_are_scaled_are_left_alone() -> None:
    for option in (("--rope-scale", "8"), ("--rope-scaling", "yarn"), ("--rope-freq-base", "1e6")):
        result = serve(TINY, "-c", "8192", *option)
        assert "-c 8192" in result.stdout and "--ctx-size" not in result.stdout
        assert "--override-kv qwen3.context_length=int:8192" in result.stderr
    result = serve(TINY, "-c", "8192", "--override-kv", "qwen3.context_length=int:8192")
    assert "-c 8192" in result.stdout and "cut to" not in result.stderr


def test_a_chat_is_cut_and_says_so() -> None:
    command = [TERN, "chat", str(TINY), "In the beginning", "--context", "200000", "--threads", "1"]
    done = subprocess.run(
        [*command, "--max-tokens", "4", "--stats"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "trained for 1,024 tokens: a context of 200,000 is cut to 1,024" in done.stderr
    assert " of 1024 (" in done.stderr


# ------------------------------------------------------------------------------------------------------------
# Beyond memory
# ------------------------------------------------------------------------------------------------------------


def test_what_no_machine_holds_is_refused_with_what_fits() -> None:
    result = serve(TINY, *ENDLESS)
    assert isinstance(result.exception, TernError)
    said, *offers = str(result.exception).splitlines()
    assert "MB are free (--memory-budget says otherwise). What fits at most:" in said
    assert [offer.split()[3] for offer in offers[:4]] == ["f16", "q8_0", "q5_0", "q4_0"]
    contexts = [int(offer.split()[1]) for offer in offers[:4]]
    assert contexts == sorted(contexts)
    # Somewhat less than what was free a moment ago.
    assert serve(TINY, "-c", str(contexts[0] // 2), *ENDLESS[2:]).exit_code == 0
    assert serve(TINY, *ENDLESS, "--memory-budget", "100000GB").exit_code == 0


def test_a_chat_that_does_not_fit_is_not_started() -> None:
    command = [TERN, "chat", str(TINY), "Hello", "--context", ENDLESS[1], "--", *ENDLESS[2:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    said, *offers = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert said.startswith(f"tern: {TINY}: takes ") and said.endswith("What fits at most:")
    assert offers[0].split()[0] == "--context" and offers[0].split()[2:] == ["--kv", "f16"]


def test_the_largest_that_fits_where_nobody_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = decoder_header("qwen3", 4).write(tmp_path / "m.gguf")
    model = read_model(path)
    limit = arithmetic.plan(model, 4096).total
    free(monkeypatch, limit)
    found = fit.fit(Demand(path))
    assert found.context == found.usage.planned.context == 4096 if found.usage else False
    assert found.notes == ("a context of 4,096 tokens, the most that fit into the memory that is free",)
    # Up to what is enough, nobody is told of more.
    assert fit.fit(Demand(path, most=2048)).context == 2048
    assert fit.fit(Demand(path, most=2048)).notes == ()
    free(monkeypatch, 10**9)
    assert fit.fit(Demand(path)).context is None
    # Several lines that say what would fit, or that nothing does.
    free(monkeypatch, limit)
    with pytest.raises(
        TernError, match=r"(?s)only .* MB are free\. What fits at most:\n  --context 4096 --kv f16"
    ):
        fit.fit(Demand(path, context=8192))
    free(monkeypatch, 10**6)
    with pytest.raises(TernError, match="No context fits; the least budget for this model is"):
        fit.fit(Demand(path))


def test_mapped_weights_may_be_larger_than_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The system reads them again; that is slow, and no error. A budget is for them, too."""
    header = decoder_header("qwen3", 1)
    header.add(Q8_0, output=(300, 256), blk__0__more=(40_000, 256))
    path = header.write(tmp_path / "m.gguf")
    planned = arithmetic.plan(read_model(path), 256, parallel=1)
    limit = planned.total - planned.mapped // 2
    free(monkeypatch, limit)
    asked = Demand(path, context=256, parallel=1)
    (note,) = fit.fit(asked).notes
    assert "read from the disk again and again" in note
    with pytest.raises(TernError, match="the budget is"):
        fit.fit(asked, limit)


def test_a_model_whose_memory_is_not_known(tmp_path: Path) -> None:
    """It is cut and started all the same; a promise cannot be made."""
    path = decoder_header("mamba9").write(tmp_path / "m.gguf")
    found = fit.fit(Demand(path, context=10**6, parallel=1))
    assert (found.context, found.usage) == (8192, None)
    cut, unknown = found.notes
    assert "cut to 8,192" in cut and "memory not known: " in unknown and "mamba9" in unknown
    assert fit.fit(Demand(path, most=4096)).context == 4096
    with pytest.raises(TernError, match="mamba9"):
        fit.fit(Demand(path), 10**9)


# ------------------------------------------------------------------------------------------------------------
# What is loaded besides
# ------------------------------------------------------------------------------------------------------------


def test_all_that_is_loaded_counts(tmp_path: Path) -> None:
    """Each of several adapters, given in one word or in many, scaled or not; and a projector."""
    paths = []
    for number, size in enumerate((1, 2, 4, 8)):
        paths.append(tmp_path / f"{number}.gguf")
        paths[-1].write_bytes(bytes(size * 10**6))
    one, two, three, four = map(str, paths)

    def besides(*options: str) -> float:
        result = serve(TINY, *options)
        assert result.exit_code == 0, result.exception
        match = re.search(r"projector, larger passes ([\d.]+)", result.stderr)
        return float(match[1]) if match else 0.0

    assert besides() == 0.0
    assert besides("--lora", one, "--lora", two) == 3.0
    assert besides("--lora", f"{one},{two}", "--lora-scaled", f"{three}:0.5") == 7.0
    assert besides("--lora-scaled", f"{one}:1", "--lora-scaled", f"{two}:2,{three}:-1") == 7.0
    assert besides("--mmproj", four) == besides("-mm", four) == 8.0
    assert besides("--lora", one, "--mmproj", four) == 9.0
    budget = arithmetic.plan(read_model(TINY), 1024).total / 1e6 + 9
    assert (
        serve(
            TINY, "-c", "1024", "--memory-budget", f"{budget + 0.1}MB", "--lora", one, "--mmproj", four
        ).exit_code
        == 0
    )
    assert (
        serve(
            TINY, "-c", "1024", "--memory-budget", f"{budget - 0.2}MB", "--lora", one, "--mmproj", four
        ).exit_code
        == 1
    )
    for option, what in (("--lora", "LoRA adapter"), ("--mmproj", "projector")):
        result = serve(TINY, option, tmp_path / "nowhere.gguf")
        assert f"nowhere.gguf: no such {what}" in str(result.exception)


def test_any_part_of_a_split_model(tmp_path: Path) -> None:
    """llama.cpp takes the first part alone, so that is what it gets."""
    plain = files.write(tmp_path / "plain.gguf", {"general.architecture": "made-up"}, [])
    made = decoder_header("qwen3").write(tmp_path / "m.gguf")
    first = gguf_bytes.split_in_two(made, tmp_path / "parts")
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    result = serve(second, "-c", "512")
    assert result.exit_code == 0, result.exception
    assert f"--model {first}" in result.stdout and str(second) not in result.stdout
    assert "vocabulary and no model" in str(serve(plain).exception)
