# SPDX-License-Identifier: Apache-2.0
"""Start-time fair queueing: fairness bounds, order, priorities and costs."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.gateway.admission.fair_queue import FairQueue

FLOWS = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.lists(st.integers(1, 1000), min_size=1, max_size=12)),
    min_size=1,
    max_size=6,
)


@given(FLOWS)
def test_backlogged_flows_differ_by_at_most_one_item_of_each(
    flows: list[tuple[float, list[int]]],
) -> None:
    """The bound of Goyal, Vin and Cheng for two backlogged flows: |W1/w1 - W2/w2| <= c1/w1 + c2/w2.

    For each flow, W is the total cost of its served items, w its weight, and c the largest cost of an item.
    The bound holds whatever other flows send.
    """
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for flow, (weight, costs) in enumerate(flows):
        for number, cost in enumerate(costs):
            queue.push((flow, number), flow, 0, cost, weight)
    given_to = [0.0] * len(flows)
    waiting = [len(costs) for _, costs in flows]
    largest = [max(costs) / weight for weight, costs in flows]
    while queue:
        flow, number = queue.pop()
        weight, costs = flows[flow]
        given_to[flow] += costs[number] / weight
        waiting[flow] -= 1
        backlogged = [first for first, remaining in enumerate(waiting) if remaining]
        for first in backlogged:
            for second in backlogged:
                assert abs(given_to[first] - given_to[second]) <= largest[first] + largest[second] + 1e-6


@given(st.integers(1, 300), st.integers(1, 1000), st.integers(1, 1000))
def test_burst_of_one_flow_does_not_starve_another(flood: int, large: int, small: int) -> None:
    """An item that arrives after another flow's burst waits for at most one item of that flow."""
    queue: FairQueue[int] = FairQueue()
    for number in range(flood):
        queue.push(number, "a", 0, large, 1.0)
    for _ in range(min(flood - 1, 5)):
        queue.pop()
    queue.push(-1, "b", 0, small, 1.0)
    order = [queue.pop() for _ in range(len(queue))]
    assert order.index(-1) <= 1


@pytest.mark.parametrize("keep", [0, 1])
def test_removed_items_leave_no_memory(keep: int) -> None:
    """Items of flow b are pushed and removed, as by timeouts, but never popped; `keep` of them remain."""
    queue: FairQueue[int] = FairQueue()
    queue.push(-1, "a", 0, 10, 1.0)
    for number in range(keep):
        queue.push(-2 - number, "b", 0, 10, 1.0)
    for number in range(1000):
        queue.push(number, "b", 0, 10, 1.0)
        queue.remove(number - keep if number >= keep else -2)
    assert len(queue._heads) <= 2
    assert queue.pop() == -1
    assert len(queue) == keep


class QueueModel:
    """A fair queue and a simple model of it; `pop` and `remove` compare the queue with the model."""

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.flows: dict[tuple[int, int], deque[int]] = {}
        self.front: deque[int] = deque()
        self.taken: list[int] = []
        self.count = 0

    def push(self, group: int, kind: int, cost: int) -> None:
        self.queue.push(self.count, group, kind, cost, 2.0**kind)
        self.flows.setdefault((group, kind), deque()).append(self.count)
        self.count += 1

    def pop(self) -> None:
        waiting = [flow for flow in self.flows.values() if flow]
        if not waiting and not self.front:
            assert self.queue.peek() is None
            with pytest.raises(IndexError):
                self.queue.pop()
            return
        expected = self.queue.peek()  # work conserving: a queue with items always returns one
        item = self.queue.pop()
        assert item == expected
        if self.front:
            assert item == self.front.popleft()
        else:
            [flow] = [flow for flow in waiting if flow[0] == item]  # the first item of its flow
            flow.popleft()
        self.taken.append(item)

    def remove(self, item: int) -> None:
        flow = next((flow for flow in self.flows.values() if item in flow), None)
        assert self.queue.remove(item) == (flow is not None or item in self.front)
        if flow is not None:
            flow.remove(item)
        elif item in self.front:
            self.front.remove(item)

    def back(self) -> None:
        if self.taken:
            item = self.taken.pop()
            self.queue.push_front(item)
            self.front.appendleft(item)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3), st.integers(-1, 1), st.integers(1, 500)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 60)),
        st.tuples(st.just("back")),
        st.tuples(st.just("correct"), st.integers(0, 3), st.integers(-1, 1), st.integers(-500, 5000)),
    ),
    max_size=80,
)


@given(STEPS)
def test_fair_queue_keeps_flow_order_loses_nothing_and_is_work_conserving(
    steps: list[tuple[Any, ...]],
) -> None:
    model = QueueModel()
    for name, *arguments in steps:
        if name == "correct":
            model.queue.charge(*arguments)
        else:
            getattr(model, name)(*arguments)
        left = sum(map(len, model.flows.values())) + len(model.front)
        assert len(model.queue) == len(list(model.queue)) == left
    while model.queue:
        model.pop()
    assert not any(model.flows.values())


def test_flow_of_twice_the_weight_gets_twice_the_share() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(1000):
        queue.push(("low", number), "a", 0, 10, 1.0)
        queue.push(("high", number), "b", 1, 10, 2.0)
    popped = Counter(queue.pop()[0] for _ in range(900))
    assert abs(popped["high"] - 600) <= 2


def test_flow_is_charged_the_actual_cost_of_its_items() -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(20):
        queue.push(("a", number), "a", 0, 10, 1.0)
        queue.push(("b", number), "b", 0, 10, 1.0)
    assert queue.pop() == ("a", 0)
    queue.charge("a", 0, 50)
    popped = Counter(queue.pop()[0] for _ in range(15))
    assert popped["b"] >= popped["a"] + 4
