# SPDX-License-Identifier: Apache-2.0
"""The pool of free KV pages."""

from __future__ import annotations

import numpy as np

from mizzen.core.request import Int32


class PagePool:
    """Stack of free page numbers out of 0..total-1; it does not record who owns allocated pages."""

    __slots__ = ("_stack", "free_count", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free_count = total
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)

    def allocate(self, count: int) -> Int32:
        """Remove `count` pages from the pool and return them, int32 [count].

        Raises:
            RuntimeError: fewer than `count` pages are free.
        """
        if count > self.free_count:
            raise RuntimeError(f"{count} pages requested, {self.free_count} are free")
        self.free_count -= count
        return self._stack[self.free_count : self.free_count + count].copy()

    def free(self, pages: Int32) -> None:
        """Give pages, int32 [n], back to the pool.

        Raises:
            RuntimeError: more pages are freed than exist, so a page was freed twice.
        """
        end = self.free_count + len(pages)
        if end > self.total:
            raise RuntimeError(f"{end} of {self.total} pages would be free: a page was freed twice")
        self._stack[self.free_count : end] = pages
        self.free_count = end

    def free_pages(self) -> Int32:
        """Return a copy of the free page numbers, int32 [free_count]."""
        return self._stack[: self.free_count].copy()
