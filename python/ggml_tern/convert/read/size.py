"""Numbers of a configuration that remember which keys they come from, so that errors can name them."""

from __future__ import annotations

from typing import Self


class Size(int):
    """An integer with the keys that gave it, which products, quotients and sums hand on.

    Attributes:
        origins: one text for each key, such as "hidden_size" or "head_dim (not given, so 128)".
    """

    origins: tuple[str, ...]

    def __new__(cls, value: int, *origins: str) -> Self:
        size = super().__new__(cls, value)
        size.origins = tuple(dict.fromkeys(origins))
        return size

    # With anything else than an integer, a list or a float for one, it is a plain integer.

    def __mul__(self, other: int) -> Size:
        if not isinstance(other, int):
            return NotImplemented
        return Size(int(self) * int(other), *self.origins, *origins_of(other))

    __rmul__ = __mul__

    def __add__(self, other: int) -> Size:
        if not isinstance(other, int):
            return NotImplemented
        return Size(int(self) + int(other), *self.origins, *origins_of(other))

    __radd__ = __add__

    def __floordiv__(self, other: int) -> Size:
        if not isinstance(other, int):
            return NotImplemented
        return Size(int(self) // int(other), *self.origins, *origins_of(other))


def origins_of(value: int) -> tuple[str, ...]:
    """The keys that a number comes from; none where nobody knows."""
    return value.origins if isinstance(value, Size) else ()
