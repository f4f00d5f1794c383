"""Compare the perplexity of a rotated model in PyTorch with that of its GGUF files in stock llama.cpp.

    python benchmarks/compare_perplexity.py models/tiny-qwen3
    python benchmarks/compare_perplexity.py models/tiny-* --write     # and docs/benchmarks/DATE-perplexity.md

MODEL_DIR is a checkpoint stored in a Hadamard-rotated basis, as models/ holds them. The reference is the
transformers model in float32 with weights brought back to the plain basis (training/tiny_reference.py). The
files come from ternconv, in PQ2_0 and in PTQ1_0, and go through the stock llama-perplexity with the plug-in.
All score the same tokens: windows of 256 that begin with BOS where the model wants one, of which the second
half counts.

The control is the PQ2_0 file without its prism.hadamard.* keys, so that the plug-in takes rotated weights for
plain ones: only if that ruins the perplexity does the agreement of the others prove anything. The exit code
is 1 if a file is further from the reference than 0.5%, or if the control is not ruined (5 times the
perplexity).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from benchmarking import ROOT, markdown, out_option, write_report
from compare_logits import host_tokens
from ggml_tern import _core
from ggml_tern.errors import TernError
from ggml_tern.gguf.reader import HADAMARD
from ggml_tern.host import stock as host

WINDOW = 256
TYPES = ("pq2_0", "ptq1_0")
TOLERANCE = 0.005
RUINED = 5.0
# llama.cpp's logger runs in a thread of its own, and what it has not written when the program ends is lost.
ATTEMPTS = 5


@dataclass(frozen=True)
class Result:
    """Perplexities of one model: of the reference, of its files by type, and of the control."""

    model: str
    n_windows: int
    reference: float
    files: dict[str, float]
    control: float

    def difference(self, perplexity: float) -> float:
        """From the reference, as a share of it."""
        return perplexity / self.reference - 1

    @property
    def passes(self) -> bool:
        agree = all(abs(self.difference(perplexity)) <= TOLERANCE for perplexity in self.files.values())
        return agree and self.control > RUINED * self.reference

    def rows(self) -> list[list[str]]:
        """For the table; the last column says what passes."""
        rows = [[f"{self.model}, torch, float32", f"{self.reference:.4f}", "", ""]]
        for type_name, perplexity in self.files.items():
            share = self.difference(perplexity)
            verdict = "ok" if abs(share) <= TOLERANCE else f"more than {100 * TOLERANCE}%"
            name = f"{self.model}, {type_name.upper()}"
            rows.append([name, f"{perplexity:.4f}", f"{100 * share:+.2f}%", verdict])
        times = self.control / self.reference
        verdict = "ok: ruined" if times > RUINED else f"less than {RUINED:g} times the reference"
        rows.append([f"{self.model}, control", f"{self.control:.1f}", f"{times:.1f}x", verdict])
        return rows


def convert(directory: Path, type_name: str, out: Path) -> None:
    command = [str(Path(sys.executable).parent / "ternconv"), str(directory), str(out), "--type", type_name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TernError(f"{' '.join(command)} failed:\n{done.stderr}")
    if not any(key.startswith(HADAMARD) for key in _core.read_gguf_header(out)["metadata"]):
        raise TernError(f"{directory}: is not rotated: ternconv's file of it has no {HADAMARD}* keys")


def strip_rotation(path: Path, out: Path) -> None:
    """Copies a GGUF file without its prism.hadamard.* keys. Behind them everything moves; offsets in the
    tensor table count from the beginning of the data and stay."""
    header = _core.read_gguf_header(path)
    content = path.read_bytes()
    extents = header["key_extents"]
    kept = [content[slice(*extent)] for key, extent in extents.items() if not key.startswith(HADAMARD)]
    table_start, table_end = header["tensors"][0]["extent"][0], header["tensors"][-1]["extent"][1]
    # Magic, version and number of tensors stay; then comes the number of keys.
    head = content[:16] + len(kept).to_bytes(8, "little") + b"".join(kept) + content[table_start:table_end]
    head += bytes(-len(head) % header["alignment"])
    out.write_bytes(head + content[header["data_offset"] :])


def llama_perplexity(model: Path, text: Path, n_windows: int, threads: int) -> float:
    """What the stock llama-perplexity says with the plug-in."""
    command = [str(host.llama_cpp_dir() / "llama-perplexity"), "-m", str(model), "-f", str(text)]
    # --no-escape: a backslash in the text is a backslash.
    command += f"-c {WINDOW} --chunks {n_windows} -t {threads} --no-escape".split()
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, env=host.host_environment(stock=False), capture_output=True, text=True, errors="replace"
        )
        output = done.stdout + done.stderr
        windows = re.search(r"perplexity over (\d+) chunks", output)
        estimate = re.search(r"Final estimate: PPL = (\S+)", output)
        if done.returncode != 0 or windows is None:
            raise TernError(f"{' '.join(command)} failed:\n{output[-2000:]}")
        if int(windows[1]) != n_windows:
            raise TernError(f"{model}: llama-perplexity took {windows[1]} windows, the reference {n_windows}")
        if estimate is not None:
            return float(estimate[1])
    raise TernError(f"{' '.join(command)}: its last line was lost {ATTEMPTS} times")


def beginning(model: Path) -> int | None:
    """The BOS token that llama.cpp puts at the start of every window; None where the model wants none."""
    keys = _core.read_gguf_header(model)["metadata"]
    wanted = keys.get("tokenizer.ggml.add_bos_token")
    if wanted is None:
        raise TernError(f"{model}: has no tokenizer.ggml.add_bos_token, so what llama.cpp does is a guess")
    return int(keys["tokenizer.ggml.bos_token_id"]) if wanted else None


def compare(directory: Path, text: str, most_windows: int | None, threads: int) -> Result:
    """Everything about one model."""
    sys.path.insert(0, str(ROOT / "training"))
    import tiny_reference

    model, tokenizer = tiny_reference.load(directory)
    with tempfile.TemporaryDirectory() as folder:
        text_file = Path(folder) / "text"
        text_file.write_text(text, encoding="utf-8", newline="")
        files = {name: Path(folder) / f"{name}.gguf" for name in TYPES}
        for name, path in files.items():
            convert(directory, name, path)
        first = files[TYPES[0]]
        bos = beginning(first)
        tokens = host_tokens(first, text)
        expected = ([] if bos is None else [bos]) + tokenizer.encode(text, add_special_tokens=False).ids
        if tokens.tolist() != expected:
            raise TernError(f"{directory}: llama.cpp and its tokenizer.json make other tokens of the text")
        n_windows = len(tokens) // WINDOW
        if n_windows < 2:
            raise TernError(f"the text has {len(tokens)} tokens; llama-perplexity wants {2 * WINDOW}")
        n_windows = min(n_windows, most_windows or n_windows)
        control = Path(folder) / "control.gguf"
        strip_rotation(first, control)
        return Result(
            directory.name,
            n_windows,
            tiny_reference.perplexity(model, tokens[: n_windows * WINDOW].tolist(), WINDOW, bos),
            {name: llama_perplexity(path, text_file, n_windows, threads) for name, path in files.items()},
            llama_perplexity(control, text_file, n_windows, threads),
        )


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python"))
@click.argument(
    "directories",
    metavar="MODEL_DIR...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=ROOT / "models" / "held-out.txt",
    help="What is scored.  [default: models/held-out.txt]",
)
@click.option("--windows", type=click.IntRange(1), help="Only so many from the start.  [default: all]")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--write", is_flag=True, help="Write the table down, dated.")
@out_option
def main(
    directories: tuple[Path, ...], text: Path, windows: int | None, threads: int, write: bool, out: Path
) -> None:
    console = Console()
    # llama-perplexity takes one line end off the file's end.
    content = text.read_bytes().decode("utf-8").removesuffix("\n")
    results = []
    try:
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console) as progress:
            task = progress.add_task("", total=None)
            for directory in directories:
                progress.update(task, description=directory.name)
                results.append(compare(directory, content, windows, threads))
    except TernError as error:
        raise click.ClickException(str(error)) from None
    table = markdown(["", "perplexity", "against torch", ""], [row for r in results for row in r.rows()])
    console.print(table, markup=False, highlight=False)
    if write:
        windows_of = ", ".join(f"{r.n_windows} windows for {r.model}" for r in results)
        path = write_report(
            out,
            "perplexity",
            "Perplexity of rotated models",
            "`benchmarks/compare_perplexity.py`: the trained models of models/, in PyTorch (float32,\n"
            "weights in the plain basis) and as ternconv's files in the stock `llama-perplexity` with the\n"
            "plug-in. The control is the PQ2_0 file without its rotation keys, whose perplexity is ruined.",
            [f"{text.name}: {windows_of}, of {WINDOW} tokens, of which the second half counts"],
            table,
        )
        console.print(f"written to {path}", markup=False, highlight=False)
    sys.exit(0 if all(result.passes for result in results) else 1)


if __name__ == "__main__":
    main()
