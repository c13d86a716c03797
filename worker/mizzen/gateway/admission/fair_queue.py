# SPDX-License-Identifier: Apache-2.0
"""Start-time fair queueing (Goyal, Vin and Cheng, 1996): flows share service in proportion to their weights.

Each item has a cost. Items of a flow stay in order; among the heads of all flows, the head with the smallest
start tag is next. The start tag is the flow's virtual time: the total cost of its items that were served,
divided by its weight. A flow that was idle starts no earlier than the queue's virtual time, so it gains
nothing by having been idle.

Normalized by weight, the services that two backlogged flows receive differ by at most the sum of their
largest normalized item costs. No flow starves, however many items other flows have.
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
    """Start tag of the flow's head; meaningless while the flow has no items."""
    finish: float = 0.0
    """Earliest start tag of the flow's next head."""
    heap_start: float | None = None
    """Start tag of the flow's entry in the heap of heads; None if it has no entry."""
    debt: float = 0.0
    """Virtual time that the flow owes because items cost more than announced; negative if they cost less."""


class FairQueue(Generic[T]):
    """Queue of distinct items, in flows identified by a group (the tenant) and a class (the priority).

    Items that were popped and put back by `push_front` come before the items of all flows.
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
        """Append an item to the flow of a group and class, and set the weight of that flow."""
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
        """Return a popped item to the queue, in front of all other items."""
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
        flow.heap_start = None
        self._time = flow.start
        entry = flow.items[0]
        flow.finish = flow.start + max(0.0, entry.cost / flow.weight + flow.debt)
        flow.debt = 0.0
        self._drop_head(name, flow)
        return entry.item

    def remove(self, item: T) -> bool:
        """Remove an item without charging its flow; return whether the item was in the queue."""
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
        """Charge a flow the difference between the actual and the announced cost of an item.

        This difference is `cost`; if it is negative, the flow gets a refund.
        """
        flow = self._flows.get((group, flow_class))
        if flow is not None:
            flow.debt += cost / flow.weight

    def choose_victim(self, group: Hashable, removable: Callable[[T], bool] = lambda item: True) -> T | None:
        """Return the item to evict from the group that has the most items.

        It is the newest item in the group's flow with the smallest weight.

        Args:
            group: group that wants to add an item.
            removable: returns whether an item may be evicted; other items are skipped.

        Returns:
            The item. None if no other group has more items than `group` would have with one more item, or if
            no item may be evicted.
        """
        if not self._groups:
            return None
        longest, count = self._groups.most_common(1)[0]
        if longest == group or count <= self._groups[group] + 1:
            return None
        flows = [flow for flow in self._flows.values() if flow.group == longest and flow.items]
        flows.sort(key=lambda flow: flow.weight)
        newest = (entry.item for flow in flows for entry in reversed(flow.items))
        return next((item for item in newest if removable(item)), None)

    def clear(self) -> None:
        """Remove all items."""
        self.__init__()

    def _next_flow(self) -> _Flow[T] | None:
        """Return the flow whose head is next, or None if no flow has items.

        Afterwards, this flow's entry is the first in the heap.
        """
        while self._heads:
            start, _, name = self._heads[0]
            flow = self._flows.get(name)
            if flow is not None and flow.items and flow.start == start:
                return flow
            heapq.heappop(self._heads)  # a stale entry, whose item was removed
            if flow is not None and flow.heap_start == start:
                flow.heap_start = None
        return None

    def _schedule_head(self, name: tuple[Hashable, Hashable], flow: _Flow[T]) -> None:
        flow.start = max(self._time, flow.finish)
        if flow.heap_start == flow.start:  # the entry of a removed head has the right start tag
            return
        flow.heap_start = flow.start
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
