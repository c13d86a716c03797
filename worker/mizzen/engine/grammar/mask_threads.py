"""Spreads filling a step's masks over threads, if that saves more than waking them costs.

`GrammarMasks` calls it once per step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

MIN_HELPER_SECONDS = 0.0001
"""Minimum work for which a thread is woken: handing it over and waiting for its end takes half of this."""
BATCH_SECONDS = 0.00005
"""Work that a thread takes at once: taking it costs microseconds with the interpreter lock held."""
FIRST_BATCH = 4
"""Rows per batch while their time is unknown."""

T = TypeVar("T")


class MaskThreads(Generic[T]):
    """The calling thread and helpers that take rows from the same queue. Used from one thread.

    Most masks take microseconds and some take milliseconds, unpredictably. So the caller starts alone, and
    gets help once its rows turn out to be slow, or if the previous step's were.
    """

    def __init__(self, threads: int) -> None:
        """Use `threads` threads, including the caller's."""
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._row_seconds = 0.0
        """Mean seconds per row in the previous step."""

    def fill_rows(self, rows: list[T], fill: Callable[[list[T]], None]) -> None:
        """Call `fill` with all rows, in batches; it releases the interpreter lock while it is slow."""
        size = max(1, int(BATCH_SECONDS / self._row_seconds)) if self._row_seconds else FIRST_BATCH
        waiting = deque(rows[start : start + size] for start in range(0, len(rows), size))
        helpers = self._start_helpers(waiting, fill, size * self._row_seconds)
        start_time, filled = time.perf_counter(), 0
        while waiting:
            try:
                batch = waiting.popleft()
            except IndexError:  # a helper was faster
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
        """Stop the threads."""
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
