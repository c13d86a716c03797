# SPDX-License-Identifier: Apache-2.0
"""Fills the token bitmasks of a step in several threads, if that saves more time than waking them costs.

`GrammarMasks` calls it once per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

MIN_HELPER_SECONDS = 0.0001
"""Minimum work per woken thread, in seconds; to hand work to a thread and await it costs half as much."""
BATCH_SECONDS = 0.00005
"""Intended duration of a batch in seconds.

A thread takes microseconds to fetch a batch from the queue, and holds the interpreter lock meanwhile."""
FIRST_BATCH = 4
"""Number of rows in a batch while the time per row is unknown."""

T = TypeVar("T")


class MaskThreads(Generic[T]):
    """Fills rows in the calling thread and in helper threads, which share a queue of batches.

    A bitmask usually takes microseconds, but sometimes milliseconds, unpredictably. So helpers are woken only
    if rows were slow in the previous step, or turn out to be slow in this one. Used from one thread.
    """

    def __init__(self, threads: int) -> None:
        """Configure `threads` threads, including the calling one; helpers start when first needed."""
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._row_seconds = 0.0
        """Mean seconds per row in the previous step; 0 if unknown."""

    def fill_rows(self, rows: list[T], fill: Callable[[list[T]], None]) -> None:
        """Fill rows in batches, and return when all are filled.

        Args:
            rows: The rows.
            fill: Fills a batch of rows; should release the interpreter lock.
        """
        size = max(1, int(BATCH_SECONDS / self._row_seconds)) if self._row_seconds else FIRST_BATCH
        waiting = deque(rows[start : start + size] for start in range(0, len(rows), size))
        helpers = self._start_helpers(waiting, fill, size * self._row_seconds)
        start_time, filled = time.perf_counter(), 0
        while waiting:
            try:
                batch = waiting.popleft()
            except IndexError:  # a helper has taken the last batch
                break
            fill(batch)
            filled += len(batch)
            if not helpers and waiting:
                elapsed = time.perf_counter() - start_time
                if elapsed > MIN_HELPER_SECONDS:
                    helpers = self._start_helpers(waiting, fill, elapsed / filled * size)
        if filled:
            self._row_seconds = (time.perf_counter() - start_time) / filled
        for helper in helpers:
            helper.result()

    def close(self) -> None:
        """Stop the helper threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _start_helpers(
        self, waiting: deque[list[T]], fill: Callable[[list[T]], None], batch_seconds: float
    ) -> list[Future[None]]:
        helper_count = min(
            self._helpers, len(waiting) - 1, int(len(waiting) * batch_seconds / MIN_HELPER_SECONDS)
        )
        if helper_count <= 0:
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, "mizzen-masks")
        return [self._pool.submit(self._fill_batches, waiting, fill) for _ in range(helper_count)]

    @staticmethod
    def _fill_batches(waiting: deque[list[T]], fill: Callable[[list[T]], None]) -> None:
        while True:
            try:
                batch = waiting.popleft()
            except IndexError:
                return
            fill(batch)
