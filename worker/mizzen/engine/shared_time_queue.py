# SPDX-License-Identifier: Apache-2.0
"""Queue of grammars to compile or images to decode: the tenant that has used the least time is next.

When a tenant that had no waiting item adds one, its used time is raised to at least the used time of the
tenant served last. So a tenant cannot save up time while it is idle. Each `CompileLane` has one queue, and
`ImageDecoder` has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    """Waiting items of one tenant."""

    used: float
    """Time charged to the tenant, in seconds; raised after idle time, so that no credit builds up."""
    items: deque[T] = field(default_factory=deque)


class SharedTimeQueue(Generic[T]):
    """Waiting items, in a queue per tenant; several tenants may wait for the same item."""

    def __init__(self) -> None:
        self._tenants: dict[int, _TenantQueue[T]] = {}
        self._level = 0.0
        """Value of `used`, in seconds, of the tenant served last."""

    def add_waiter(self, tenant: int, item: T) -> None:
        """Add an item to the queue of a tenant, unless it is already there."""
        if len(self._tenants) > 4096:
            self._forget_idle()
        queue = self._tenants.setdefault(tenant, _TenantQueue(self._level))
        if not queue.items:
            queue.used = max(queue.used, self._level)
        if item not in queue.items:
            queue.items.append(item)

    def pop_next(self) -> tuple[int, T] | None:
        """Remove the next item; return the tenant to charge and the item, or None if the queue is empty."""
        waiting = [(queue.used, tenant) for tenant, queue in self._tenants.items() if queue.items]
        if not waiting:
            return None
        self._level, tenant = min(waiting)
        item = self._tenants[tenant].items[0]
        self.remove(item)
        return tenant, item

    def items(self) -> list[T]:
        """Return all waiting items; those of a tenant are in order, and an item may be repeated."""
        return [item for tenant in self._tenants.values() for item in tenant.items]

    def remove(self, item: T) -> None:
        """Remove an item from the queues of all tenants."""
        for tenant in self._tenants.values():
            if item in tenant.items:
                tenant.items.remove(item)

    def charge(self, tenant: int, seconds: float) -> None:
        """Charge time spent on an item, in seconds, to a tenant."""
        if tenant in self._tenants:
            self._tenants[tenant].used += seconds

    def newest_of_largest(self, tenant: int) -> T | None:
        """Return the item to remove if the queue is full and `tenant` adds one.

        It is the newest item of the tenant with the most items. Returns None if `tenant`, with one more item,
        would have at least as many as that tenant.
        """
        largest = max(self._tenants, key=lambda name: len(self._tenants[name].items), default=tenant)
        own_count = len(self._tenants[tenant].items) if tenant in self._tenants else 0
        if largest == tenant or len(self._tenants[largest].items) <= own_count + 1:
            return None
        return self._tenants[largest].items[-1]

    def _forget_idle(self) -> None:
        """Drop tenants without items whose used time does not exceed that of the tenant served last."""
        idle = [
            name for name, queue in self._tenants.items() if not queue.items and queue.used <= self._level
        ]
        for name in idle:
            del self._tenants[name]
