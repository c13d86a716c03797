"""The free KV pages, as a stack."""

from __future__ import annotations

import numpy as np

from mizzen.core.request import Int32


class PagePool:
    """Allocates page numbers 0..total-1. Keeps no record of their owners."""

    __slots__ = ("_stack", "free_count", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free_count = total
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)

    def allocate(self, count: int) -> Int32:
        """Return `count` pages, int32 [count].

        Raises:
            RuntimeError: fewer are free.
        """
        if count > self.free_count:
            raise RuntimeError(f"{count} pages requested, {self.free_count} are free")
        self.free_count -= count
        return self._stack[self.free_count : self.free_count + count].copy()

    def free(self, pages: Int32) -> None:
        """Return pages, int32 [n], to the pool.

        Raises:
            RuntimeError: more pages are freed than exist, so a page was freed twice.
        """
        end = self.free_count + len(pages)
        if end > self.total:
            raise RuntimeError(f"{end} of {self.total} pages would be free: a page was freed twice")
        self._stack[self.free_count : end] = pages
        self.free_count = end

    def free_pages(self) -> Int32:
        """Return a copy of the free page numbers."""
        return self._stack[: self.free_count].copy()
