"""A mutex granted round-robin across groups, so one group's burst delays another by one holder per group.

The body reader uses it between tenants.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class FairMutex:
    """Mutex whose next holder comes from the group that was served least recently. On one event loop.

    The only waiter of its group waits for at most one holder of each other group.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiters by group; the next group first."""
        self._locked = False

    async def acquire(self, group: Hashable) -> None:
        """Wait for the mutex; `release` must follow."""
        if not self._locked:
            self._locked = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was granted at the same moment
                self.release(group)
            raise

    def release(self, group: Hashable) -> None:
        """Release the mutex for a group, and grant it to the next waiter."""
        if group in self._waiting:
            self._waiting[group] = self._waiting.pop(group)  # after all other groups
        for name, waiters in tuple(self._waiting.items()):
            waiter = pop_waiting(waiters)
            if not waiters:
                del self._waiting[name]
            if waiter is not None:
                waiter.set_result(None)
                return
        self._locked = False


def pop_waiting(waiters: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Remove and return the first waiter that still waits; None without one."""
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            return waiter
    return None
