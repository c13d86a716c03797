# SPDX-License-Identifier: Apache-2.0
"""A mutex that is granted round-robin across groups, so that one group's burst hardly delays the others.

The body reader uses it; its groups are tenants.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class FairMutex:
    """Mutex whose next holder comes from the group that was served least recently. Not thread-safe.

    A waiter that is alone in its group waits for at most one holder from each other group.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiters by group; the group that is served next comes first."""
        self._locked = False

    async def acquire(self, group: Hashable) -> None:
        """Wait for the mutex; the caller must then call `release` with the same group."""
        if not self._locked:
            self._locked = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # granted at the moment when the wait was cancelled
                self.release(group)
            raise

    def release(self, group: Hashable) -> None:
        """Release the mutex that `group` holds, and grant it to the next waiter."""
        if group in self._waiting:
            self._waiting[group] = self._waiting.pop(group)  # move to the end: other groups come first
        for name, waiters in tuple(self._waiting.items()):
            waiter = pop_waiting(waiters)
            if not waiters:
                del self._waiting[name]
            if waiter is not None:
                waiter.set_result(None)
                return
        self._locked = False


def pop_waiting(waiters: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Remove and return the first waiter that was not cancelled, or return None."""
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            return waiter
    return None
