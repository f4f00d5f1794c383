"""Walking through a text in windows, as llama-perplexity does.

A window is ``context`` tokens of the text; where models want a token that every text begins with, it stands
in the place of the window's first. The first half of a window is there to be read: what is scored is the
prediction of the tokens of its second half. So figures can be compared with those of llama-perplexity for the
same text and context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ggml_tern.errors import TernError
from ggml_tern.evaluate.models import Model
from ggml_tern.evaluate.scoring import I32, Summary, joined, losses, perplexity, score, summarize

#: Of a window; and of tokens at most, unless asked for others.
CONTEXT, TOKENS = 512, 16384


def read_text(path: Path) -> str:
    """Raises TernError for a file that cannot be read or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TernError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise TernError(f"{path}: {error.strerror}") from error


def windows(tokens: I32, context: int, first_token: int | None) -> Iterator[I32]:
    """Windows [context] of tokens [n]; what is left over at the end is not used."""
    for begin in range(0, len(tokens) - context + 1, context):
        window = tokens[begin : begin + context].copy()
        if first_token is not None:
            window[0] = first_token
        yield window


def tokens_of(text: str, path: Path, models: list[Model], context: int, most: int) -> list[I32]:
    """The windows of a text, of ``most`` tokens at most.

    Raises TernError where it is too short, or the models read it in different tokens.
    """
    first, *others = (model.tokens(text) for model in models)
    for model, tokens in zip(models[1:], others, strict=True):
        if not np.array_equal(first, tokens):
            raise TernError(
                f"{model.path} and {models[0].path} have different tokenizers: they read {path} as "
                f"{len(tokens)} and {len(first)} tokens, so what they predict cannot be compared"
            )
    found = list(windows(first[: max(most, context)], context, models[0].first_token))
    if not found:
        raise TernError(
            f"{path}: has {len(first)} tokens, fewer than a window of {context}; use a longer text, or a "
            "smaller --context"
        )
    return found


def evaluate(
    model: Model, reference: Model | None, parts: list[I32], advance: Callable[[], None] = lambda: None
) -> Summary:
    """Scores a model over windows, against a reference if there is one. advance: called after each window.

    Raises TernError for models whose vocabularies have different sizes.
    """
    scores, loss = [], []
    for window in parts:
        half = len(window) // 2
        positions = slice(half, len(window) - 1)
        logits = model.logits(window)[positions]
        if reference is None:
            loss.append(losses(logits, window[half + 1 :]))
        else:
            expected = reference.logits(window)[positions]
            if expected.shape != logits.shape:
                raise TernError(
                    f"{model.path} has a vocabulary of {logits.shape[1]} tokens, {reference.path} one of "
                    f"{expected.shape[1]}"
                )
            scores.append(score(logits, expected, window[half + 1 :]))
        advance()
    if reference is None:
        joined_loss = np.concatenate(loss)
        return Summary(len(joined_loss), perplexity(joined_loss))
    return summarize(joined(scores))
