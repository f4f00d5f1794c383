"""The values of a tensor, by rows."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: Which rows: a slice, or their numbers.
Chosen = slice | NDArray[np.intp]


class Rows(Protocol):
    """A matrix that is read by rows. A numpy array is one; others decode what they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Chosen, /) -> NDArray[Any]:
        """Some of the rows: float32, float16, or uint16 holding bfloat16 bits."""


def as_float32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """The values of rows as `Rows` gives them."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)
