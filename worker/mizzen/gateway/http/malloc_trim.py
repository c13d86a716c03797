"""Memory that large requests leave goes back to the system: glibc keeps most of it otherwise, for good.

Large bodies and prompts are worked on in threads, each of which allocates in an arena of its own; by itself
glibc returns only what is free at an arena's end.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_BYTES = 64 * 1024
"""Of a body that has ended; its prompt took many times as much."""
TRIM_SECONDS = 10.0
"""Memory goes back this long after, and no more often."""


def trim_heap() -> None:
    """Return to the system what is free. It takes about 10 ms, and 0.1 s for a gigabyte."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # glibc has it
        give_back(0)


class MallocTrimmer:
    """Trims some time after a large body has ended. All on one event loop, but for the trimming."""

    def __init__(self, work: Callable[[], None] = trim_heap) -> None:
        self._trim = work
        self._timer: asyncio.TimerHandle | None = None

    def note_freed(self, size: int) -> None:
        """Note that a body of this size is worked on no more."""
        if size >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def close(self) -> None:
        """Trim no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._trim)
