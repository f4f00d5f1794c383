"""Train the tiny models of models/: ternary weights in a Hadamard-rotated basis, from the first step on.

    python training/train_tiny.py tiny-qwen3      # or tiny-qwen35

The models are the unmodified ones of transformers. Every weight matrix that is to be folded gets a
parametrization: what is trained is a full-precision matrix in the rotated basis; what the model computes with
is that matrix made ternary in groups of 128 (a straight-through estimator carries the gradient past the
rounding), brought back to the plain basis. So the model is trained with exactly the weights that it is stored
with, and the rotation costs a small multiplication a step, however many tokens there are.

Text and tokenizer: tiny_text.py. Checkpoints and a log go to the cache; training goes on from the last
checkpoint. Written at the end: a Hugging Face directory with the weights in the rotated basis and
hadamard_packing.json, which says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import tiny_reference as reference
import tiny_text
from ggml_tern.errors import TernError
from tiny_checkpoint import write_directory

MODELS = Path(__file__).resolve().parent.parent / "models"
GROUP = 128
N_VOCABULARY = 2048
END = "<|endoftext|>"
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Projections that stay as they are: one row a head, which steers how fast it forgets and learns.
FULL_PRECISION = ("in_proj_a", "in_proj_b")


# ---- the models ----


@dataclass(frozen=True)
class Recipe:
    """A model to train. make: the model with random weights; block: of the rotation; steps: of training."""

    make: Callable[[], Any]
    block: int
    steps: int


def _qwen3() -> Any:
    return Qwen3(
        Qwen3Config(
            vocab_size=N_VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
    )


def _qwen35() -> Any:
    # Twice as many value heads as key heads, and more than two key heads: so that the two orders of the value
    # heads differ, and the way there from the way back.
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=N_VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            max_position_embeddings=1024,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
            },
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
        )
    )


RECIPES = {"tiny-qwen3": Recipe(_qwen3, 256, 1400), "tiny-qwen35": Recipe(_qwen35, 128, 900)}


# ---- ternary weights in a rotated basis ----


def ternary(weight: Tensor) -> Tensor:
    """The nearest {-d, 0, +d} of every group of 128 along the input, [n_out, n_in].

    What is below 0.7 of the mean magnitude becomes zero, and d is the mean magnitude of the rest (Ternary
    Weight Networks, Li et al. 2016), rounded to bfloat16: so that it is the same number in bfloat16, float16
    and float32.
    """
    groups = weight.reshape(-1, GROUP)
    magnitude = groups.abs()
    kept = (magnitude > 0.7 * magnitude.mean(1, keepdim=True)).to(weight.dtype)
    scale = (magnitude * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
    scale = scale.bfloat16().to(weight.dtype)
    return (groups.sign() * kept * scale).reshape(weight.shape)


class RotatedTernary(nn.Module):  # type: ignore[misc]
    """Parametrization of a matrix [n_out, n_in]: trained in the rotated basis, ternary there, used in the
    plain one."""

    def __init__(self, signs: Tensor, block: int) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("hadamard", torch.from_numpy(reference.hadamard(block)), persistent=False)

    def forward(self, latent: Tensor) -> Tensor:
        # The gradient goes past the rounding as if it were not there.
        stored = latent + (self.store(latent) - latent).detach()
        return self._blockwise(stored) * self.signs

    def store(self, latent: Tensor) -> Tensor:
        """The weights as they are stored: ternary, in the rotated basis."""
        return ternary(latent)

    def right_inverse(self, plain: Tensor) -> Tensor:
        return self._blockwise(plain * self.signs)

    def _blockwise(self, rows: Tensor) -> Tensor:
        return (rows.reshape(-1, self.block) @ self.hadamard).reshape(rows.shape)


def random_signs(width: int, seed: int) -> Tensor:
    """+-1, float32 [width]; a vector for every width, the same for all weights of that width."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + width)
    return torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1


class TiedHead(nn.Module):  # type: ignore[misc]
    """The output head of a model whose embedding, parametrized, is the head as well."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = [embedding]  # in a list: the embedding is a part of the model, not of the head

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self._embedding[0].weight)


def make_rotated(recipe: Recipe, seed: int) -> Any:
    """The model with random weights, of which every matrix that is to be folded is a rotated ternary one."""
    torch.manual_seed(seed)
    model = recipe.make()
    if model.config.tie_word_embeddings:
        model.lm_head = TiedHead(model.model.embed_tokens)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear | nn.Embedding) and not name.endswith(FULL_PRECISION):
            signs = random_signs(module.weight.shape[1], seed)
            parametrize.register_parametrization(module, "weight", RotatedTernary(signs, recipe.block))
    return model


# ---- text ----


def make_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE that splits text as Qwen2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[tiny_text.Chapter]) -> Tensor:
    """The chapters' tokens, int64, each chapter followed by the end token."""
    encoded = tokenizer.encode_batch([chapter.text for chapter in chapters])
    return torch.tensor([token for chapter in encoded for token in [*chapter.ids, 0]])


# ---- training ----


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum with orthogonalized updates for matrices [n_out, n_in] (Jordan et al. 2024).

    The update has the same singular vectors as the momentum, but singular values near 1. A rotation of the
    basis leaves it as it is.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"]
                momentum.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalize(param.grad.lerp(momentum, group["momentum"]))
                n_out, n_in = param.shape
                param.add_(update, alpha=-group["lr"] * math.sqrt(max(1, n_out / n_in)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Singular values towards 1, by five Newton-Schulz steps with the coefficients of the Muon paper."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


@dataclass(frozen=True)
class Settings:
    """What a run depends on. batch: windows in a step; window: tokens in a window; the learning rates are
    those of the matrices, with Muon, and of the rest, with AdamW."""

    steps: int
    batch: int
    window: int
    matrix_lr: float
    other_lr: float
    seed: int

    def lr_factor(self, step: int) -> float:
        """A short warm-up, then constant, and down to zero over the last 40%."""
        return min(1.0, (step + 1) / 20, max(0.0, (self.steps - step) / (0.4 * self.steps)))


def make_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if hidden and not any(part in name for part in FULL_PRECISION) else others).append(
            parameter
        )
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, settings.matrix_lr),
        torch.optim.AdamW(others, settings.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["top_lr"] = group["lr"]
    return optimizers


def batches(tokens: Tensor, settings: Settings, first: int) -> Iterator[Tensor]:
    """Windows for every step from `first` on: [batch, window + 1]. A pass over the text deals out all of it,
    cut at other places than the last one."""
    per_pass = (len(tokens) - settings.window - 1) // settings.window
    for step in range(first, settings.steps):
        starts = []
        for index in range(step * settings.batch, (step + 1) * settings.batch):
            generator = torch.Generator().manual_seed(settings.seed + 7919 * (index // per_pass))
            shift = int(torch.randint(0, settings.window, (1,), generator=generator))
            order = torch.randperm(per_pass, generator=generator)
            starts.append(int(order[index % per_pass]) * settings.window + shift)
        yield torch.stack([tokens[start : start + settings.window + 1] for start in starts])


def save_atomically(content: Any, path: Path) -> None:
    temporary = path.with_suffix(".part")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def train(
    name: str, tokens: Tensor, held_out: Tensor, tokenizer: Tokenizer, settings: Settings, folder: Path
) -> Any:
    """Train, or go on training, and return the model. Checkpoint and log are in `folder`."""
    model = make_rotated(RECIPES[name], settings.seed)
    optimizers = make_optimizers(model, settings)
    checkpoint, first = folder / f"{name}.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = saved["step"]

    def report(step: int, loss: float) -> None:
        model.eval()
        with parametrize.cached():
            perplexity = reference.perplexity(model, held_out.tolist()[:4096])
            sample = reference.complete(model, tokenizer, reference.PROMPTS[1], 50, 0.7)
        model.train()
        line = f"{time.strftime('%H:%M:%S')} step {step} loss {loss:.3f} held-out perplexity {perplexity:.2f}"
        with (folder / f"{name}.log").open("a") as log:
            for file in (log, None):
                print(line, repr(sample), file=file, flush=True)

    def save(step: int) -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        save_atomically({"step": step, "model": model.state_dict(), "optimizers": states}, checkpoint)

    losses: list[float] = []
    for step, batch in enumerate(batches(tokens, settings, first), first):
        with parametrize.cached():
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["top_lr"] * settings.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == settings.steps:
            save(step + 1)
            report(step + 1, sum(losses) / len(losses))
            losses.clear()
    return model.eval()


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(list(RECIPES)))
@click.option("--output", type=click.Path(path_type=Path), help="Directory to write; default models/NAME.")
@click.option("--steps", type=int, help="Default: the recipe's. May change while the rate is still constant.")
@click.option("--batch", default=16, show_default=True, help="Windows in a step.")
@click.option("--window", default=256, show_default=True, help="Tokens in a window.")
@click.option("--matrix-lr", default=0.02, show_default=True, help="Of the matrices, with Muon.")
@click.option(
    "--other-lr", default=0.003, show_default=True, help="Of embedding, head and vectors, with AdamW."
)
@click.option("--seed", default=1, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(
    name: str,
    output: Path | None,
    steps: int | None,
    batch: int,
    window: int,
    matrix_lr: float,
    other_lr: float,
    seed: int,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    # The same sums in shorter chunks: the short windows and narrow heads here need less time that way.
    qwen3_5.torch_chunk_gated_delta_rule = partial(qwen3_5.torch_chunk_gated_delta_rule, chunk_size=16)
    settings = Settings(steps or RECIPES[name].steps, batch, window, matrix_lr, other_lr, seed)
    try:
        training, held_out = tiny_text.split(tiny_text.read_chapters())
    except TernError as error:
        raise click.ClickException(str(error)) from None
    tokenizer = make_tokenizer("\n".join(chapter.text for chapter in training))
    tokens = encode(tokenizer, training)
    held_out_text = "\n".join(chapter.text for chapter in held_out) + "\n"
    held_out_tokens = torch.tensor(tokenizer.encode(held_out_text).ids)
    model = train(name, tokens, held_out_tokens, tokenizer, settings, tiny_text.CACHE)

    reference.HELD_OUT.parent.mkdir(exist_ok=True)
    reference.HELD_OUT.write_text(held_out_text)
    n_tokens = settings.steps * batch * window
    how = (
        f"{settings.steps} steps of {batch} windows of {window} tokens ({n_tokens / 1e6:.1f} M tokens, "
        f"{n_tokens / len(tokens):.1f} times the text)\n  with Muon ({matrix_lr}) and AdamW ({other_lr}), "
        f"seed {seed}."
    )
    write_directory(output or MODELS / name, model, tokenizer, held_out_tokens, how)


if __name__ == "__main__":
    main()
