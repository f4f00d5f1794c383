"""Models in a host, in a process of its own: logits, greedy text, into how many pieces graphs were split.

    evaluate(host, Load(path, n_gpu_layers=1))[0].logits

driver.cpp does it, which is compiled once and fits every host of hosts.py. The software Vulkan driver (Mesa
22.3) crashes in some sequences of graphs, with stock types too; llama-server often gets there. Take
a process for a few models, not for all.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import build_llama_cpp
from gpu.hosts import Host
from isa import tools

F32 = npt.NDArray[np.float32]

#: ggml's ids of KV cache types.
F16, Q8_0, Q4_0 = 1, 8, 2
#: Limit for a machine that has much else to do, and shaders to compile.
SECONDS = 540
#: Of a host that may crash.
TRIES = 4

_folder = tempfile.TemporaryDirectory(prefix="gpu-driver-")


@functools.cache
def driver() -> Path:
    source = build_llama_cpp.Layout.from_environment().source
    include = [f"-isystem{source / folder}" for folder in ("include", "ggml/include")]
    program = Path(_folder.name) / "driver"
    return tools.build(
        program,
        tools.compiler(),
        {Path(__file__).parent / "driver.cpp": include},
        ["-O1", "-Wall", "-Wextra", "-Werror"],
        ["-rdynamic", "-ldl"],
    )


@dataclass(frozen=True)
class Outcome:
    """lines: of stdout; said: stderr."""

    code: int
    lines: list[str]
    said: str

    def after(self, word: str) -> list[list[str]]:
        """The rest of the lines that begin with a word."""
        return [line.split()[1:] for line in self.lines if line.split()[:1] == [word]]

    def numbers(self, word: str) -> list[list[int]]:
        return [[int(number) for number in line] for line in self.after(word)]

    @property
    def of_plugin(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("ggml-tern: ")]


def first_commands(host: Host) -> list[str]:
    """Those that load its backends, and the plug-in where the environment names it."""
    # Where all are linked in, llama.cpp still looks for the plug-in when it is told a folder: one with none.
    return [f"backends {host.backends or _folder.name}"]


def run(
    host: Host,
    commands: Sequence[str],
    plugin: bool = True,
    variables: Mapping[str, str] | None = None,
    must_end_well: bool = True,
) -> Outcome:
    """What becomes of commands of driver.cpp. variables: besides those of the host.

    A host whose driver spoils its heap in some runs gets another try when a signal ends it: what is wrong
    every time still fails."""
    for _ in range(TRIES if host.may_crash else 1):
        done = subprocess.run(
            [driver(), host.libllama],
            input="".join(f"{command}\n" for command in commands),
            env=host.environment(plugin) | dict(variables or {}),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        if done.returncode >= 0:
            break
    assert done.returncode == 0 or not must_end_well, f"exit code {done.returncode}:\n{done.stderr[-6000:]}"
    return Outcome(done.returncode, done.stdout.splitlines(), done.stderr)


@dataclass(frozen=True)
class Load:
    """A model, and how llama.cpp is to run it.

    devices: names, separated by commas; all where empty. on_cpu: a pattern of names of tensors that stay
    there; on_gpu: of those that are sent to the GPU's usual buffer."""

    path: Path
    n_gpu_layers: int = 99
    flash_attn: int = -1
    type_k: int = F16
    type_v: int = F16
    devices: str = ""
    on_cpu: str = ""
    on_gpu: str = ""
    lora: Path | None = None

    def commands(self, name: str) -> list[str]:
        """Of loading it, as `name`, with a context of that name in capitals."""
        model = f"model {name} {self.path} n_gpu_layers={self.n_gpu_layers}"
        wanted = {"devices": self.devices, "on_cpu": self.on_cpu, "on_gpu": self.on_gpu}
        context = f"context {name.upper()} {name} n_ctx=256 n_batch=64 flash_attn={self.flash_attn}"
        context += f" type_k={self.type_k} type_v={self.type_v}"
        return [
            " ".join([model, *(f"{key}={value}" for key, value in wanted.items() if value)]),
            context + (f" lora={self.lora}" if self.lora else ""),
        ]


@dataclass(frozen=True)
class Evaluation:
    """logits: float32 [n_tokens, n_vocabulary]; splits: of each graph, prompt and then token by token."""

    logits: F32
    splits: list[int]


def evaluate(
    host: Host,
    *loads: Load,
    tokens: Sequence[int],
    n_prompt: int,
    plugin: bool = True,
    variables: Mapping[str, str] | None = None,
) -> list[Evaluation]:
    """One model after the other, in one process: n_prompt tokens in one batch, the others one by one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = first_commands(host)
        for i, load in enumerate(loads):
            commands += load.commands(f"m{i}") + evaluation_commands(f"M{i}", folder, tokens, n_prompt)
            commands += [f"free M{i}", f"free m{i}"]
        outcome = run(host, commands, plugin, variables)
        return read_evaluations(outcome, [f"M{i}" for i in range(len(loads))], folder, len(tokens), n_prompt)


def evaluation_commands(context: str, folder: Path, tokens: Sequence[int], n_prompt: int) -> list[str]:
    parts = [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]
    return [
        f"logits {context} {folder / f'{context}-{i}'} {' '.join(map(str, part))}"
        for i, part in enumerate(parts)
    ]


def read_evaluations(
    outcome: Outcome, contexts: Sequence[str], folder: Path, n_tokens: int, n_prompt: int
) -> list[Evaluation]:
    n_parts = n_tokens - n_prompt + 1
    splits = [number for numbers in outcome.numbers("splits") for number in numbers]
    evaluations = []
    for i, context in enumerate(contexts):
        parts = [np.fromfile(folder / f"{context}-{part}", np.float32) for part in range(n_parts)]
        logits = np.concatenate(parts).reshape(n_tokens, -1)
        evaluations.append(Evaluation(logits, splits[i * n_parts : (i + 1) * n_parts]))
    return evaluations
