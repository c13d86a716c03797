"""The free pages of a KV pool, as a stack."""

from __future__ import annotations

import numpy as np

from mizzen.core.request import Int32


class PagePool:
    """Hands out page numbers 0..total-1. Holds no record of who has them."""

    __slots__ = ("_stack", "free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)

    def take(self, count: int) -> Int32:
        """Return `count` pages, int32 [count].

        Raises:
            RuntimeError: fewer are free.
        """
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        self.free -= count
        return self._stack[self.free : self.free + count].copy()

    def give(self, pages: Int32) -> None:
        """Take pages back.

        Raises:
            RuntimeError: more than there are; some page came back twice.
        """
        end = self.free + len(pages)
        if end > self.total:
            raise RuntimeError(f"{end} of {self.total} pages would be free: a page came back twice")
        self._stack[self.free : end] = pages
        self.free = end

    def free_pages(self) -> Int32:
        """Return a copy of the free page numbers."""
        return self._stack[: self.free].copy()
