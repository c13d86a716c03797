# SPDX-License-Identifier: Apache-2.0
"""Returns the memory of large requests to the operating system (malloc_trim); glibc would keep most of it.

Large bodies and prompts are processed in threads, and every thread allocates from its own arena. Without
malloc_trim, glibc returns free memory only if it lies at the end of an arena.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

TRIM_BYTES = 64 * 1024
"""Size of the smallest request body after which the heap is trimmed.

Processing a body takes many times its size in memory.
"""
TRIM_SECONDS = 10.0
"""Delay between the end of a large request and the trim; also the minimum time between two trims."""


def trim_heap() -> None:
    """Return free heap memory to the operating system.

    This takes about 10 ms, or 0.1 s if a gigabyte is returned.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:  # only glibc has it
        malloc_trim(0)


class MallocTrimmer:
    """Trims the heap some time after a request with a large body has ended.

    Its methods must be called on the event loop; the trim itself runs in a thread.
    """

    def __init__(self, work: Callable[[], None] = trim_heap) -> None:
        self._trim = work
        self._timer: asyncio.TimerHandle | None = None

    def note_freed(self, size: int) -> None:
        """Note that the memory of a body of `size` bytes was freed; schedule a trim if the body was large."""
        if size >= TRIM_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._start_trim)

    def close(self) -> None:
        """Cancel a scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, self._trim)
