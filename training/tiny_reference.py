"""The models of models/ in plain PyTorch: what a rotated checkpoint means, computed without the plug-in.

    python training/tiny_reference.py models/tiny-qwen3

Loads a checkpoint whose weights are stored in a Hadamard-rotated basis into the unmodified transformers
model, in float32: every weight that hadamard_packing.json names is first brought back to the plain basis.
Prints the perplexity on the held-out text, and how the model goes on from a few beginnings; or writes a
checkpoint in the plain basis, which transformers loads as it is.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]

MANIFEST = "hadamard_packing.json"
HELD_OUT = Path(__file__).resolve().parent.parent / "models" / "held-out.txt"
PROMPTS = (
    "In the beginning",
    "The king said to his servants,",
    "Don't be afraid, for",
)


# ---- the rotation ----


def hadamard(block: int) -> F32:
    """The normalized Sylvester-Walsh-Hadamard matrix, [block, block], symmetric and its own inverse.

    H[r, c] = (-1)^popcount(r & c) / sqrt(block); block is a power of two.
    """
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(block))


def rotate(plain: F32, signs: I8, block: int) -> F32:
    """Stored rows of plain ones, [n_rows, n_in]: H (s * w), block by block along the input."""
    return _blockwise(plain * signs, block)


def unrotate(stored: F32, signs: I8, block: int) -> F32:
    """Plain rows of stored ones, [n_rows, n_in]: s * (H w)."""
    return _blockwise(stored, block) * signs


def _blockwise(rows: F32, block: int) -> F32:
    return (rows.reshape(-1, block) @ hadamard(block)).reshape(rows.shape)


@dataclass(frozen=True)
class Manifest:
    """hadamard_packing.json. names: the rotated tensors; signs: +-1, int8 [n_in], by n_in."""

    block: int
    signs: dict[int, I8]
    names: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        content = json.loads((directory / MANIFEST).read_text())
        return cls(
            content["transform"]["block_size"],
            {int(width): np.array(signs, np.int8) for width, signs in content["signs"].items()},
            tuple(tensor["name"] for tensor in content["tensors"]),
        )


# ---- the model ----


def load(directory: Path, unrotated: bool = True) -> tuple[Any, Tokenizer]:
    """The transformers model in float32 and evaluation mode, and its tokenizer.

    A directory without a manifest holds plain weights. unrotated=False takes rotated weights for plain ones:
    wrong on purpose, to show that the rotation matters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    tensors = {name: value.float() for name, value in load_file(directory / "model.safetensors").items()}
    if unrotated and (directory / MANIFEST).exists():
        manifest = Manifest.read(directory)
        for name in manifest.names:
            stored = tensors[name].numpy()
            plain = unrotate(stored, manifest.signs[stored.shape[1]], manifest.block)
            tensors[name] = torch.from_numpy(plain)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if set(missing) != tied or unexpected:
        raise ValueError(f"{directory}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def write_plain(directory: Path, output: Path) -> None:
    """Write the model in the plain basis, in float16: ternary only in the rotated one, but for rounding."""
    model, _ = load(directory)
    model.half().save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, output)


@torch.no_grad()  # type: ignore[untyped-decorator]
def perplexity(model: Any, tokens: list[int], window: int = 256, bos: int | None = None) -> float:
    """exp of the mean loss in nats a token over consecutive windows.

    As llama-perplexity counts: windows do not overlap, what does not fill one is left out, and only the
    second half of a window counts, so that every counted token has at least window / 2 tokens before it. In
    windows of 256 tokens these are 129 to 255; token 128 is only predicted from. bos, where the model wants
    one, takes the place of a window's first token.
    """
    n_windows, half = len(tokens) // window, window // 2
    windows = torch.tensor(tokens[: n_windows * window]).reshape(n_windows, window)
    if bos is not None:
        windows[:, 0] = bos
    losses = []
    for batch in windows.split(16):
        logits = model(batch, use_cache=False).logits[:, half:-1].flatten(0, 1).double()
        losses.append(
            torch.nn.functional.cross_entropy(logits, batch[:, half + 1 :].flatten(), reduction="none")
        )
    return math.exp(torch.cat(losses).mean().item())


@torch.no_grad()  # type: ignore[untyped-decorator]
def complete(model: Any, tokenizer: Tokenizer, prompt: str, n_tokens: int, temperature: float = 0.0) -> str:
    """The prompt and what follows; greedy at temperature 0, from torch's random numbers otherwise."""
    tokens = tokenizer.encode(prompt).ids
    for _ in range(n_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if temperature:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1))
        else:
            token = int(logits.argmax())
        if token == model.config.eos_token_id:
            break
        tokens.append(token)
    text: str = tokenizer.decode(tokens)
    return text


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--text", type=click.Path(exists=True, path_type=Path), default=HELD_OUT, help="For perplexity."
)
@click.option("--window", default=256, show_default=True, help="Tokens in a window of the perplexity.")
@click.option("--tokens", "n_tokens", default=60, show_default=True, help="Tokens to write after a prompt.")
@click.option("--temperature", default=0.0, show_default=True, help="Of the samples; 0 is greedy.")
@click.option("--prompt", "prompts", multiple=True, default=PROMPTS, help="May be given more than once.")
@click.option(
    "--not-unrotated", is_flag=True, help="Take the rotated weights for plain ones: gives nonsense."
)
@click.option("--save-plain", type=click.Path(path_type=Path), help="Only write a plain checkpoint there.")
def main(
    directory: Path,
    text: Path,
    window: int,
    n_tokens: int,
    temperature: float,
    prompts: tuple[str, ...],
    not_unrotated: bool,
    save_plain: Path | None,
) -> None:
    torch.manual_seed(0)
    # More have nothing to do in products this small.
    torch.set_num_threads(1)
    if save_plain is not None:
        return write_plain(directory, save_plain)
    model, tokenizer = load(directory, unrotated=not not_unrotated)
    tokens = tokenizer.encode(text.read_text()).ids
    click.echo(f"perplexity {perplexity(model, tokens, window):.4f} ({len(tokens)} tokens, window {window})")
    for prompt in prompts:
        click.echo(f"\n{complete(model, tokenizer, prompt, n_tokens, temperature)}")


if __name__ == "__main__":
    sys.exit(main())
