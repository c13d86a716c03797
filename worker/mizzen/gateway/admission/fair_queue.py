"""Start-time fair queueing (Goyal, Vin and Cheng, 1996): flows share service by weight.

Each item has a cost. Items of a flow stay in order; among the heads of all flows, the one with the smallest
start tag is next. A start tag is the flow's virtual time: the service it has received, divided by its weight.
A flow that was idle starts at the queue's virtual time, so it can neither save up nor pay for earlier
service.

While two flows are backlogged, their services divided by weight differ by at most the largest item cost of
each, divided by its flow's weight. No flow is starved, however much another one sends.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _QueuedItem(Generic[T]):
    item: T
    cost: float


@dataclass(slots=True)
class _Flow(Generic[T]):
    group: Hashable
    weight: float
    items: deque[_QueuedItem[T]] = field(default_factory=deque)
    start: float = 0.0
    """Start tag of the head, if there is one."""
    finish: float = 0.0
    """Earliest start tag of the next head."""
    queued: float | None = None
    """Start tag with which the flow is in the heap of heads."""
    debt: float = 0.0
    """Virtual time owed because items cost more than announced."""


class FairQueue(Generic[T]):
    """Queue of distinct items, in flows named by group (a tenant) and class (a priority).

    An item that was popped and put back goes to the front, before all flows.
    """

    def __init__(self) -> None:
        self._flows: dict[tuple[Hashable, Hashable], _Flow[T]] = {}
        self._heads: list[tuple[float, int, tuple[Hashable, Hashable]]] = []
        self._front: deque[T] = deque()
        self._flow_of_item: dict[T, tuple[Hashable, Hashable]] = {}
        self._groups: Counter[Hashable] = Counter()
        self._time = 0.0
        self._pushes = 0
        self._size = 0

    def __len__(self) -> int:
        return len(self._front) + self._size

    def __iter__(self) -> Iterator[T]:
        yield from tuple(self._front)
        for flow in tuple(self._flows.values()):
            for entry in tuple(flow.items):
                yield entry.item

    def push(self, item: T, group: Hashable, flow_class: Hashable, cost: float, weight: float) -> None:
        """Append an item to its flow; the flow takes the weight of its last item."""
        name = (group, flow_class)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(group, weight)
        flow.weight = weight
        flow.items.append(_QueuedItem(item, cost))
        self._flow_of_item[item] = name
        self._groups[group] += 1
        self._size += 1
        if len(flow.items) == 1:
            self._schedule_head(name, flow)

    def push_front(self, item: T) -> None:
        """Put a popped item back, before all others."""
        self._front.appendleft(item)

    def peek(self) -> T | None:
        """Return the next item, or None if the queue is empty."""
        if self._front:
            return self._front[0]
        flow = self._next_flow()
        return flow.items[0].item if flow is not None else None

    def pop(self) -> T:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        if self._front:
            return self._front.popleft()
        flow = self._next_flow()
        if flow is None:
            raise IndexError("the queue is empty")
        name = heapq.heappop(self._heads)[2]
        flow.queued = None
        self._time = flow.start
        entry = flow.items[0]
        flow.finish = flow.start + max(0.0, entry.cost / flow.weight + flow.debt)
        flow.debt = 0.0
        self._drop_head(name, flow)
        return entry.item

    def remove(self, item: T) -> bool:
        """Remove an item from anywhere, at no cost for its flow; return whether it was there."""
        name = self._flow_of_item.get(item)
        if name is None:
            try:
                self._front.remove(item)
            except ValueError:
                return False
            return True
        flow = self._flows[name]
        if flow.items[0].item == item:
            self._drop_head(name, flow)
            return True
        entry = next(entry for entry in flow.items if entry.item == item)
        flow.items.remove(entry)
        self._forget(item, flow.group)
        return True

    def charge(self, group: Hashable, flow_class: Hashable, cost: float) -> None:
        """Charge a flow the cost that an item had beyond the announced one; a negative cost is a refund."""
        flow = self._flows.get((group, flow_class))
        if flow is not None:
            flow.debt += cost / flow.weight

    def newest_of_longest_group(
        self, group: Hashable, may: Callable[[T], bool] = lambda item: True
    ) -> T | None:
        """Return the newest item that `may` be removed from the group with the most items.

        None if `group` would have as many items itself with one more, or if no item may be removed.
        """
        if not self._groups:
            return None
        longest, count = self._groups.most_common(1)[0]
        if longest == group or count <= self._groups[group] + 1:
            return None
        flows = [flow for flow in self._flows.values() if flow.group == longest and flow.items]
        flows.sort(key=lambda flow: flow.weight)
        newest = (entry.item for flow in flows for entry in reversed(flow.items))
        return next((item for item in newest if may(item)), None)

    def clear(self) -> None:
        """Remove all items."""
        self.__init__()

    def _next_flow(self) -> _Flow[T] | None:
        """Return the flow whose head is next; its entry is then the first of the heap."""
        while self._heads:
            start, _, name = self._heads[0]
            flow = self._flows.get(name)
            if flow is not None and flow.items and flow.start == start:
                return flow
            heapq.heappop(self._heads)  # the entry of a removed head
            if flow is not None and flow.queued == start:
                flow.queued = None
        return None

    def _schedule_head(self, name: tuple[Hashable, Hashable], flow: _Flow[T]) -> None:
        flow.start = max(self._time, flow.finish)
        if flow.queued == flow.start:  # the entry of a removed head stands for this one
            return
        flow.queued = flow.start
        self._pushes += 1
        heapq.heappush(self._heads, (flow.start, self._pushes, name))

    def _drop_head(self, name: tuple[Hashable, Hashable], flow: _Flow[T]) -> None:
        entry = flow.items.popleft()
        self._forget(entry.item, flow.group)
        if flow.items:
            self._schedule_head(name, flow)
        if not self._size:  # no flow is backlogged, so no flow is owed anything
            self._flows.clear()
            self._heads.clear()
            self._time = 0.0

    def _forget(self, item: T, group: Hashable) -> None:
        del self._flow_of_item[item]
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]
        self._size -= 1
