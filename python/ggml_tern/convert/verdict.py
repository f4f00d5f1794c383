"""What became of a model in one line: whether its ternary weights are the model's own, and whether it will
still write sense."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ggml_tern.convert.model.architectures import Role
from ggml_tern.convert.quantize.targets import Target
from ggml_tern.convert.quantize.ternarize import Stats
from ggml_tern.tensors.types import F32

#: A model whose matrices lost more of their energy than this writes noise. Gaussian weights lose 0.19 when
#: they are made ternary, and less than 0.01 in 4 bits.
_MOST_LOST = 0.05
#: The share of the matrices' weights that it takes: one odd layer does not spoil a model.
_SHARE = 0.1


class Outcome(enum.Enum):
    """How the file's ternary weights stand to the model's."""

    KEPT = "kept exactly"
    SCALES = "kept, with rounded scales"
    ROUNDED = "rounded"
    NONSENSE = "will not write sense"
    NOT_TERNARY = "not ternary"


@dataclass(frozen=True)
class Judgement:
    """An outcome, and what to say of it: one line."""

    outcome: Outcome
    line: str


def judge(pairs: Iterable[tuple[Target, Stats]]) -> Judgement:
    """The judgement on a file, from its tensors and what quantizing each cost."""
    pairs = list(pairs)
    ternary = [(target, stats) for target, stats in pairs if target.type.is_ternary]
    of = f"of {len(ternary)} ternary tensors"
    if not ternary:
        lost = _sum(stats for target, stats in pairs if target.type != F32)
        loss = f"rounded, with relative error {lost.relative_error:.1e}"
        how = "every weight is the model's" if lost.is_exact else loss
        return Judgement(Outcome.NOT_TERNARY, f"not ternary: no tensor of the file is; {how}")
    made = [(target, stats) for target, stats in ternary if not stats.is_lossless]
    if made:
        error = _sum(stats for _, stats in made).relative_error
        matrices = [(target, stats) for target, stats in pairs if target.spec.role is Role.MATRIX]
        spoilt = [(t, s) for t, s in matrices if t.type.is_ternary and s.relative_error > _MOST_LOST]
        share = sum(stats.n for _, stats in spoilt) / max(1, sum(stats.n for _, stats in matrices))
        outcome = Outcome.NONSENSE if share > _SHARE else Outcome.ROUNDED
        return Judgement(
            outcome, f"{outcome.value}: {len(made)} {of} were made so, with relative error {error:.1e}"
        )
    rounded = [stats for _, stats in ternary if not stats.is_exact]
    if rounded:
        worst = max(stats.max_scale_error for stats in rounded)
        return Judgement(
            Outcome.SCALES,
            f"kept: the ternary values are the model's, and {len(rounded)} {of} have scales rounded to fp16, "
            f"by {worst:.1e} at most",
        )
    return Judgement(Outcome.KEPT, f"kept exactly: {len(ternary)} {of} hold the model's own weights")


def _sum(stats: Iterable[Stats]) -> Stats:
    total = Stats()
    for one in stats:
        total.add(one)
    return total
