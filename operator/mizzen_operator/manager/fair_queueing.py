# SPDX-License-Identifier: Apache-2.0
"""Concurrency limits of reconciles, and how namespaces share them. `workqueue.py` uses it.

A reconcile that waits for a response costs almost nothing, but may take long: half a minute for an admission
webhook that hangs. So slow reconciles have slots of their own, and each namespace has its own share: neither
slow reconciles nor the load of one namespace keeps other namespaces from reconciling.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

SLOW_SECONDS = 1.0
"""Duration above which a reconcile counts as slow."""
FAST_FACTOR, SLOW_FACTOR, TOTAL_FACTOR = 2, 4, 8
"""Limits on fast, slow and all reconciles of all namespaces, as multiples of the slots of one flow.

FAST_FACTOR is two, so that a namespace that uses all its slots leaves the same number to others. TOTAL_FACTOR
also bounds reconciles that start in a fast flow and turn out to be slow.
"""

ServiceKey = tuple[str, str]
"""Namespace and name of a service."""


class Flow(NamedTuple):
    """Reconciles that share slots: either the slow or the fast ones of a namespace.

    A reconcile belongs to the slow flow if the previous one of its service was slow.
    """

    namespace: str
    slow: bool


class ConcurrencyLimiter:
    """Limits the reconciles in progress, per flow and in total. Times are seconds of one monotonic clock."""

    def __init__(self, slots_per_flow: int) -> None:
        """Create a limiter whose flows have `slots_per_flow` slots each."""
        self._slots_per_flow = slots_per_flow
        self._slow: set[ServiceKey] = set()
        """Services whose last reconcile was slow."""
        self._running: dict[ServiceKey, tuple[Flow, float]] = {}
        self._in_use: Counter[Flow] = Counter()
        self._all_slow = 0

    def flow(self, key: ServiceKey) -> Flow:
        """Return the flow of a service's next reconcile; only the end of a reconcile changes it."""
        return Flow(key[0], key in self._slow)

    def seconds_until_slot(self, now: float) -> float:
        """Return the seconds until another reconcile may start; infinity if a running one must end first."""
        if len(self._running) >= TOTAL_FACTOR * self._slots_per_flow:
            return float("inf")
        fast = [
            began for flow, began in self._running.values() if not flow.slow and began > now - SLOW_SECONDS
        ]
        excess = len(fast) - FAST_FACTOR * self._slots_per_flow
        return 0.0 if excess < 0 else sorted(fast)[excess] + SLOW_SECONDS - now

    def has_slot(self, flow: Flow) -> bool:
        """Return whether a flow has a free slot."""
        if flow.slow and self._all_slow >= SLOW_FACTOR * self._slots_per_flow:
            return False
        return self._in_use[flow] < self._slots_per_flow

    def acquire(self, key: ServiceKey, now: float) -> None:
        """Take a slot of the service's flow for a reconcile that starts `now`."""
        flow = self.flow(key)
        self._running[key] = (flow, now)
        self._in_use[flow] += 1
        self._all_slow += flow.slow

    def release(self, key: ServiceKey, now: float) -> Flow:
        """Release the slot of a service's reconcile, which has ended; return the flow of the slot."""
        flow, began = self._running.pop(key)
        self._in_use[flow] -= 1
        if not self._in_use[flow]:
            del self._in_use[flow]
        self._all_slow -= flow.slow
        if now - began > SLOW_SECONDS:
            self._slow.add(key)
        else:
            self._slow.discard(key)
        return flow
