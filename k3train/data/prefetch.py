"""Load ahead in one background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor


class Prefetch[T](Iterator[T]):
    """``load(step)`` for every step of a range, in order, up to ``ahead`` of them before they are asked for.

    What ``load`` raises is raised by ``next`` at that step. ``close`` ends the thread.
    """

    def __init__(self, load: Callable[[int], T], steps: range, *, ahead: int) -> None:
        self._load, self._left = load, iter(steps)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._coming: deque[Future[T]] = deque()
        for _ in range(max(ahead, 1)):
            self._submit()

    def _submit(self) -> None:
        step = next(self._left, None)
        if step is not None:
            self._coming.append(self._pool.submit(self._load, step))

    def __next__(self) -> T:
        if not self._coming:
            self.close()
            raise StopIteration
        value = self._coming.popleft().result()
        self._submit()
        return value

    def close(self) -> None:
        """Drop what was not asked for and end the thread."""
        self._coming.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
