"""Fair queue of grammars to compile: the tenant whose grammars have taken the least time is next.

A tenant that starts to wait is raised to the level of the tenant served last, so it can neither save up time
nor pay for time that others have used. Each `CompileLane` has one queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _TenantQueue(Generic[T]):
    used: float
    """Seconds used so far, from the level at which the tenant started."""
    items: deque[T] = field(default_factory=deque)


class CompileQueue(Generic[T]):
    """Waiting items, each for one tenant or several; the items of a tenant keep their order."""

    def __init__(self) -> None:
        self._tenants: dict[int, _TenantQueue[T]] = {}
        self._level = 0.0

    def add_waiter(self, tenant: int, item: T) -> None:
        """Let an item also wait for a tenant; adding it twice has no effect."""
        if len(self._tenants) > 4096:
            self._forget_idle()
        queue = self._tenants.setdefault(tenant, _TenantQueue(self._level))
        if not queue.items:
            queue.used = max(queue.used, self._level)
        if item not in queue.items:
            queue.items.append(item)

    def pop_next(self) -> tuple[int, T] | None:
        """Remove the next item; return it with the tenant that is charged, or None if none waits."""
        waiting = [(queue.used, tenant) for tenant, queue in self._tenants.items() if queue.items]
        if not waiting:
            return None
        self._level, tenant = min(waiting)
        item = self._tenants[tenant].items[0]
        self.remove(item)
        return tenant, item

    def remove(self, item: T) -> None:
        """Remove an item for all tenants it waits for."""
        for tenant in self._tenants.values():
            if item in tenant.items:
                tenant.items.remove(item)

    def charge(self, tenant: int, seconds: float) -> None:
        """Add the time that a tenant's item has taken."""
        if tenant in self._tenants:
            self._tenants[tenant].used += seconds

    def newest_of_largest(self, tenant: int) -> T | None:
        """Return the newest item of the tenant with the most, if that is more than this tenant would have."""
        largest = max(self._tenants, key=lambda name: len(self._tenants[name].items), default=tenant)
        own_count = len(self._tenants[tenant].items) if tenant in self._tenants else 0
        if largest == tenant or len(self._tenants[largest].items) <= own_count + 1:
            return None
        return self._tenants[largest].items[-1]

    def _forget_idle(self) -> None:
        """Drop tenants that would start at the current level anyway."""
        idle = [
            name for name, queue in self._tenants.items() if not queue.items and queue.used <= self._level
        ]
        for name in idle:
            del self._tenants[name]
