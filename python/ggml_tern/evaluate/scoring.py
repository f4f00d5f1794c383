"""What is measured at a position of a text: how good a prediction is, and how it compares with a reference's.

Divergences are in nats. Everything is computed in float64 from the logits, position by position, so that it
does not depend on how the text was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


def log_softmax(logits: F32) -> F64:
    """The logarithms of the probabilities that float32 logits [positions, vocabulary] stand for."""
    shifted: F64 = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def losses(logits: F32, next_tokens: I32) -> F64:
    """-log of the probability of the token that follows, [positions]."""
    found: F64 = -log_softmax(logits)[np.arange(len(next_tokens)), next_tokens]
    return found


@dataclass(frozen=True)
class Scores:
    """Of some positions: the losses of the model and of the reference, KL(reference || model), and whether
    both hold the same token for the likeliest. All [positions]."""

    loss: F64
    reference_loss: F64
    divergence: F64
    same_top: npt.NDArray[np.bool_]


def score(logits: F32, reference: F32, next_tokens: I32) -> Scores:
    """Both logits float32 [positions, vocabulary]; next_tokens int32 [positions]."""
    ours, theirs = log_softmax(logits), log_softmax(reference)
    rows = np.arange(len(next_tokens))
    return Scores(
        -ours[rows, next_tokens],
        -theirs[rows, next_tokens],
        (np.exp(theirs) * (theirs - ours)).sum(axis=1),
        logits.argmax(axis=1) == reference.argmax(axis=1),
    )


def joined(parts: Sequence[Scores]) -> Scores:
    return Scores(
        np.concatenate([part.loss for part in parts]),
        np.concatenate([part.reference_loss for part in parts]),
        np.concatenate([part.divergence for part in parts]),
        np.concatenate([part.same_top for part in parts]),
    )


@dataclass(frozen=True)
class Estimate:
    """A mean over positions with its standard error, as if they were independent."""

    value: float
    error: float


def mean(values: npt.NDArray[np.floating] | npt.NDArray[np.bool_]) -> Estimate:
    values = values.astype(np.float64)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), float(error))


def perplexity(loss: F64) -> Estimate:
    of_loss = mean(loss)
    value = math.exp(of_loss.value)
    return Estimate(value, value * of_loss.error)


@dataclass(frozen=True)
class Summary:
    """Of all positions. kl: mean, median, 99th percentile and largest; same_top: a share. None without a
    reference."""

    positions: int
    perplexity: Estimate
    reference_perplexity: Estimate | None = None
    kl: Estimate | None = None
    kl_median: float | None = None
    kl_99: float | None = None
    kl_max: float | None = None
    same_top: Estimate | None = None

    def as_json(self) -> dict[str, object]:
        """Plain numbers and, of estimates, ``{"value", "error"}``; what was not measured is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def summarize(scores: Scores) -> Summary:
    median, p99 = np.percentile(scores.divergence, [50, 99])
    return Summary(
        len(scores.loss),
        perplexity(scores.loss),
        perplexity(scores.reference_loss),
        mean(scores.divergence),
        float(median),
        float(p99),
        float(scores.divergence.max()),
        mean(scores.same_top),
    )
