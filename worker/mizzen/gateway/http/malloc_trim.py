"""Returns the memory of large requests to the operating system (malloc_trim); glibc would keep most of it.

Large bodies and prompts are processed in threads, and each thread allocates in an arena of its own. On its
own, glibc returns only the free memory at the end of an arena.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_BYTES = 64 * 1024
"""Smallest body whose end triggers a trim; its prompt took many times as much memory."""
TRIM_SECONDS = 10.0
"""Delay from the end of a body to the trim, and the shortest time between two trims."""


def trim_heap() -> None:
    """Return free heap memory to the operating system. Takes about 10 ms, and 0.1 s for a gigabyte."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:  # only glibc has it
        malloc_trim(0)


class MallocTrimmer:
    """Trims the heap some time after a large body has ended.

    Runs on the event loop; only the trim itself runs in a thread.
    """

    def __init__(self, work: Callable[[], None] = trim_heap) -> None:
        self._trim = work
        self._timer: asyncio.TimerHandle | None = None

    def note_freed(self, size: int) -> None:
        """Schedule a trim if a body of `size` bytes, whose processing has ended, was large."""
        if size >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def close(self) -> None:
        """Cancel a scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._trim)
