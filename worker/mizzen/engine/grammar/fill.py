"""Spreads the masks of a step over threads, where that is worth their waking."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from mizzen.engine.machine import cpu_count

MOST_THREADS = 12
WORTH_SECONDS = 0.00015
"""A thread is woken for as much work: to hand it over and to wait for its end takes a third of it."""

T = TypeVar("T")


class Fillers(Generic[T]):
    """The caller's thread, and others that take rows from the same queue. Used from one thread.

    Most masks take microseconds and some take milliseconds, and which is not known before. So the caller
    begins alone, and takes help once its rows turn out to be slow, or were in the step before.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Take the number of threads, the caller's among them; by default half of the processors."""
        self._helpers = (threads or min(MOST_THREADS, max(1, cpu_count() // 2))) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._row_seconds = 0.0
        """Of the step before, in the mean."""

    def run(self, rows: list[tuple[int, T]], fill: Callable[[int, T], None]) -> None:
        """Call `fill` for each row, which lets the interpreter's lock go while it is slow."""
        waiting = deque(rows)
        helpers = self._call(waiting, fill, self._row_seconds)
        began, done = time.perf_counter(), 0
        while waiting:
            try:
                row = waiting.popleft()
            except IndexError:  # a helper was faster
                break
            fill(*row)
            done += 1
            if not helpers and waiting:
                took = time.perf_counter() - began
                if took > WORTH_SECONDS:
                    helpers = self._call(waiting, fill, took / done)
        if done:
            self._row_seconds = (time.perf_counter() - began) / done
        for helper in helpers:
            helper.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _call(
        self, waiting: deque[tuple[int, T]], fill: Callable[[int, T], None], row_seconds: float
    ) -> list[Future[None]]:
        wanted = min(self._helpers, len(waiting) - 1, int(len(waiting) * row_seconds / WORTH_SECONDS))
        if wanted <= 0:
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, "mizzen-masks")
        return [self._pool.submit(self._help, waiting, fill) for _ in range(wanted)]

    @staticmethod
    def _help(waiting: deque[tuple[int, T]], fill: Callable[[int, T], None]) -> None:
        while True:
            try:
                row = waiting.popleft()
            except IndexError:
                return
            fill(*row)
