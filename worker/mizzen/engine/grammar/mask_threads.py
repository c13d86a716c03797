"""Spreads the masks of a step over threads, where that is worth their waking."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

WORTH_SECONDS = 0.0001
"""A thread is woken for as much work: to hand it over and to wait for its end takes half of it."""
BATCH_SECONDS = 0.00005
"""Of work that a thread takes at a time: to take it costs microseconds with the interpreter's lock held."""
FIRST_BATCH = 4
"""Rows, while nothing is known of their time."""

T = TypeVar("T")


class Fillers(Generic[T]):
    """The caller's thread, and others that take rows from the same queue. Used from one thread.

    Most masks take microseconds and some take milliseconds, and which is not known before. So the caller
    begins alone, and takes help once its rows turn out to be slow, or were in the step before.
    """

    def __init__(self, threads: int) -> None:
        """Take the number of threads, the caller's among them."""
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._row_seconds = 0.0
        """Of the step before, in the mean."""

    def run(self, rows: list[T], fill: Callable[[list[T]], None]) -> None:
        """Call `fill` with all rows, some at a time; it lets the interpreter's lock go while it is slow."""
        size = max(1, int(BATCH_SECONDS / self._row_seconds)) if self._row_seconds else FIRST_BATCH
        waiting = deque(rows[start : start + size] for start in range(0, len(rows), size))
        helpers = self._call(waiting, fill, size * self._row_seconds)
        began, done = time.perf_counter(), 0
        while waiting:
            try:
                batch = waiting.popleft()
            except IndexError:  # a helper was faster
                break
            fill(batch)
            done += len(batch)
            if not helpers and waiting:
                took = time.perf_counter() - began
                if took > WORTH_SECONDS:
                    helpers = self._call(waiting, fill, took / done * size)
        if done:
            self._row_seconds = (time.perf_counter() - began) / done
        for helper in helpers:
            helper.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _call(
        self, waiting: deque[list[T]], fill: Callable[[list[T]], None], batch_seconds: float
    ) -> list[Future[None]]:
        wanted = min(self._helpers, len(waiting) - 1, int(len(waiting) * batch_seconds / WORTH_SECONDS))
        if wanted <= 0:
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, "mizzen-masks")
        return [self._pool.submit(self._help, waiting, fill) for _ in range(wanted)]

    @staticmethod
    def _help(waiting: deque[list[T]], fill: Callable[[list[T]], None]) -> None:
        while True:
            try:
                batch = waiting.popleft()
            except IndexError:
                return
            fill(batch)
