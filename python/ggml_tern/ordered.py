"""Work in many pieces on several threads, with the results in order and few of them waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(pool: ThreadPoolExecutor, n_threads: int, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what the calls return, in their order, while `pool`, of `n_threads` threads, works ahead."""
    waiting: deque[Future[T]] = deque()
    for call in calls:
        waiting.append(pool.submit(call))
        # Enough to keep the threads busy while a result is used.
        if len(waiting) > 2 * n_threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
