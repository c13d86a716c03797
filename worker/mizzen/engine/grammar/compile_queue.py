"""Whose grammar is compiled next: that of the tenant whose grammars have taken the least time so far.

A tenant that begins to wait is put level with the one whose turn it was last, so that it can neither save up
time nor be made to wait for what others have used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Tenant(Generic[T]):
    used: float
    """Seconds, from the level that it began at."""
    items: deque[T] = field(default_factory=deque)


class Turns(Generic[T]):
    """Items that wait, each for one tenant or several; a tenant's own go in order."""

    def __init__(self) -> None:
        self._tenants: dict[int, _Tenant[T]] = {}
        self._level = 0.0

    def add(self, tenant: int, item: T) -> None:
        """Let an item wait for a tenant too; a second time changes nothing."""
        if len(self._tenants) > 4096:
            self._forget_idle()
        known = self._tenants.setdefault(tenant, _Tenant(self._level))
        if not known.items:
            known.used = max(known.used, self._level)
        if item not in known.items:
            known.items.append(item)

    def take(self) -> tuple[int, T] | None:
        """Take the next item out, with the tenant whose turn it is; None when none waits."""
        waiting = [(one.used, name) for name, one in self._tenants.items() if one.items]
        if not waiting:
            return None
        self._level, name = min(waiting)
        item = self._tenants[name].items[0]
        self.remove(item)
        return name, item

    def remove(self, item: T) -> None:
        """Take an item out, wherever it waits."""
        for tenant in self._tenants.values():
            if item in tenant.items:
                tenant.items.remove(item)

    def charge(self, tenant: int, seconds: float) -> None:
        """Count what a tenant's item has taken."""
        if tenant in self._tenants:
            self._tenants[tenant].used += seconds

    def surplus(self, tenant: int) -> T | None:
        """Return the newest item of whoever has most, if that is more than this tenant would have."""
        name = max(self._tenants, key=lambda one: len(self._tenants[one].items), default=tenant)
        own = len(self._tenants[tenant].items) if tenant in self._tenants else 0
        if name == tenant or len(self._tenants[name].items) <= own + 1:
            return None
        return self._tenants[name].items[-1]

    def _forget_idle(self) -> None:
        """Forget tenants that would begin at the present level anyway."""
        idle = [name for name, one in self._tenants.items() if not one.items and one.used <= self._level]
        for name in idle:
            del self._tenants[name]
