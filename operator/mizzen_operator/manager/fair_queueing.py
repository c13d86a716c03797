"""Concurrency limits of reconciles, and how namespaces share them. `workqueue.py` uses it.

A reconcile that waits for a response costs almost nothing, but may take long: half a minute for an admission
webhook that hangs. So slow reconciles are counted apart. Neither they nor the reconciles of one namespace
keep other namespaces from their slots.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

SLOW_SECONDS = 1.0
FAST_FACTOR, SLOW_FACTOR, TOTAL_FACTOR = 2, 4, 8
"""Limits as multiples of a flow's slots: for fast reconciles of all namespaces, for slow ones, and in total.

The first is two, so that one namespace leaves as many slots to others as it has. The last also bounds
reconciles that start as fast ones and turn out slow.
"""

ServiceKey = tuple[str, str]
"""Namespace and name of a service."""


class Flow(NamedTuple):
    """Reconciles that share slots: of a namespace's services whose last one was slow, or of its others."""

    namespace: str
    slow: bool


class ConcurrencyLimiter:
    """The reconciles in progress. Times are in seconds of one clock."""

    def __init__(self, slots_per_flow: int) -> None:
        """Give each flow this many slots."""
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
        """Return the seconds until another reconcile may start; infinity if one has to end first."""
        if len(self._running) >= TOTAL_FACTOR * self._slots_per_flow:
            return float("inf")
        fast = [
            began for flow, began in self._running.values() if not flow.slow and began > now - SLOW_SECONDS
        ]
        more = len(fast) - FAST_FACTOR * self._slots_per_flow
        return 0.0 if more < 0 else sorted(fast)[more] + SLOW_SECONDS - now

    def has_slot(self, flow: Flow) -> bool:
        """Return whether a flow has a free slot."""
        if flow.slow and self._all_slow >= SLOW_FACTOR * self._slots_per_flow:
            return False
        return self._in_use[flow] < self._slots_per_flow

    def acquire(self, key: ServiceKey, now: float) -> None:
        """Take a slot for a reconcile of a service."""
        flow = self.flow(key)
        self._running[key] = (flow, now)
        self._in_use[flow] += 1
        self._all_slow += flow.slow

    def release(self, key: ServiceKey, now: float) -> Flow:
        """Release the slot of a service's reconcile; return its flow."""
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
