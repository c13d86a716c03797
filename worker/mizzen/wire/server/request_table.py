# SPDX-License-Identifier: Apache-2.0
"""Table of an engine's live requests, as columns that are indexed by request id.

Request ids are small and dense, so that the owners and handles of all rows of a step are found with two array
lookups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int64

NO_OWNER = 0
"""Owner of requests whose peer is gone or has received their result; indices of peers start at 1."""


class RequestTable:
    """Live requests: allocates their ids, and maps each id to its owner (index of a peer) and handle."""

    def __init__(self, capacity: int = 1024) -> None:
        self.owner: NDArray[np.int16] = np.zeros(capacity, dtype=np.int16)
        self.handle: NDArray[np.uint32] = np.zeros(capacity, dtype=np.uint32)
        self.arrival: NDArray[np.float64] = np.zeros(capacity)
        self.wait: NDArray[np.float64] = np.zeros(capacity)
        """For each request id, the seconds from arrival to the first token; 0 before the first token."""
        self.started: NDArray[np.bool_] = np.zeros(capacity, dtype=bool)
        self.generation: Int64 = np.zeros(capacity, dtype=np.int64)
        self._free = list(range(capacity - 1, -1, -1))
        self.owners: dict[int, int] = {}
        """Number of live requests by owner; has no entries for owners without requests."""
        self.unstarted = 0
        """Number of live requests without a first token."""

    def __len__(self) -> int:
        return len(self.owner) - len(self._free)

    def add(self, owner: int, handle: int, now: float) -> int:
        """Add a request that arrived at `now`, with the gateway's handle; return its id."""
        if not self._free:
            self._grow()
        rid = self._free.pop()
        self.owner[rid] = owner
        self.handle[rid] = handle
        self.arrival[rid] = now
        self.wait[rid] = 0.0
        self.started[rid] = False
        self.owners[owner] = self.owners.get(owner, 0) + 1
        self.unstarted += 1
        return rid

    def release(self, rid: int) -> None:
        """Free the id of a finished request."""
        self._leave(int(self.owner[rid]))
        if not self.started[rid]:
            self.unstarted -= 1
            self.started[rid] = True
        self.owner[rid] = NO_OWNER
        self.generation[rid] += 1
        self._free.append(rid)

    def disown(self, rid: int) -> None:
        """Set a request's owner to `NO_OWNER`; its id stays in use until the engine has finished it."""
        self._leave(int(self.owner[rid]))
        self.owner[rid] = NO_OWNER
        self.owners[NO_OWNER] = self.owners.get(NO_OWNER, 0) + 1

    def start(self, rids: Int64) -> None:
        """Record that requests (int64 [n]) got their first token; none of them had a token before."""
        self.started[rids] = True
        self.unstarted -= len(rids)

    def oldest_wait(self, now: float) -> float:
        """Return the longest time in seconds that a live request has been waiting for its first token; 0 if
        none is waiting."""
        if not self.unstarted:
            return 0.0
        arrivals = self.arrival[(self.owner != NO_OWNER) & ~self.started]
        return float(now - arrivals.min()) if len(arrivals) else 0.0

    def _leave(self, owner: int) -> None:
        self.owners[owner] -= 1
        if not self.owners[owner]:
            del self.owners[owner]

    def _grow(self) -> None:
        old = len(self.owner)
        for name in ("owner", "handle", "arrival", "wait", "started", "generation"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free = list(range(2 * old - 1, old - 1, -1))
