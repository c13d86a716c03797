"""Turns at something that one at a time may use, between groups: a tenant's flood is its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class FairMutex:
    """One turn at a time. A group that has just had one comes after all others that wait.

    So whoever waits alone in its group waits for one turn of each other group at most. All on one event loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By group, the next one first."""
        self._locked = False

    async def acquire(self, group: Hashable) -> None:
        """Wait for a turn; `give` ends it."""
        if not self._locked:
            self._locked = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same moment
                self.release(group)
            raise

    def release(self, group: Hashable) -> None:
        """End a group's turn, and let the next one have it."""
        if group in self._waiting:
            self._waiting[group] = self._waiting.pop(group)  # behind all others
        for name, turns in tuple(self._waiting.items()):
            turn = pop_waiting(turns)
            if not turns:
                del self._waiting[name]
            if turn is not None:
                turn.set_result(None)
                return
        self._locked = False


def pop_waiting(turns: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Take the first one whose owner still waits; None when there is none."""
    while turns:
        turn = turns.popleft()
        if not turn.done():
            return turn
    return None
