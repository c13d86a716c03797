# SPDX-License-Identifier: Apache-2.0
"""Fair queueing: slow reconciles of one namespace do not delay the reconciles of other namespaces."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.manager.fair_queueing import SLOW_SECONDS, ConcurrencyLimiter, Flow
from mizzen_operator.manager.workqueue import WorkQueue

EACH = 2
NAMES = st.integers(0, 6).map(str)
DELAYS = st.sampled_from([0.0, 0.0, 0.0, 0.5, 20.0])


class Machine(RuleBasedStateMachine):
    """A work queue compared with its model, while reconciles of any duration run in several namespaces."""

    namespaces = "abcdefgh"

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.queue = WorkQueue(ConcurrencyLimiter(EACH))
        self.due: dict[ServiceKey, float] = {}
        self.running: dict[ServiceKey, tuple[Flow, float]] = {}
        self.slow: set[ServiceKey] = set()

    def poll(self) -> ServiceKey | None:
        with mock.patch("mizzen_operator.manager.workqueue.time.monotonic", lambda: self.now):
            return self.queue.poll()[0]

    def flow(self, key: ServiceKey) -> Flow:
        return Flow(key.namespace, key in self.slow)

    def lane_open(self, flow: Flow) -> bool:
        lanes = Counter(flow for flow, _ in self.running.values())
        all_slow = sum(flow.slow for flow, _ in self.running.values())
        return lanes[flow] < EACH and not (flow.slow and all_slow >= 4 * EACH)

    def any_may_begin(self) -> bool:
        quick = [
            1 for flow, began in self.running.values() if not flow.slow and self.now - began < SLOW_SECONDS
        ]
        return len(self.running) < 8 * EACH and len(quick) < 2 * EACH

    @rule(data=st.data(), names=st.lists(NAMES, min_size=1), delay=DELAYS, low_priority=st.booleans())
    def add(self, data: st.DataObject, names: list[str], delay: float, low_priority: bool) -> None:
        namespace = data.draw(st.sampled_from(self.namespaces))
        for name in names:
            key = ServiceKey(namespace, name)
            with mock.patch("mizzen_operator.manager.workqueue.time.monotonic", lambda: self.now):
                self.queue.add(key, delay, low_priority=low_priority)
            self.due[key] = min(self.due.get(key, float("inf")), self.now + delay)

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.done(data.draw(st.sampled_from(sorted(self.running))))

    def done(self, key: ServiceKey) -> None:
        with mock.patch("mizzen_operator.manager.workqueue.time.monotonic", lambda: self.now):
            self.queue.done(key)
        _, began = self.running.pop(key)
        (self.slow.add if self.now - began > SLOW_SECONDS else self.slow.discard)(key)

    @rule()
    def take_all(self) -> None:
        while (key := self.poll()) is not None:
            assert self.due.pop(key) <= self.now and key not in self.running
            assert self.lane_open(self.flow(key)) and self.any_may_begin()
            self.running[key] = (self.flow(key), self.now)
        assert not self.left(), "no due service waits although it may be reconciled"

    def left(self) -> list[ServiceKey]:
        """Return the services that are due and may be reconciled now."""
        return self.have_a_turn() if self.any_may_begin() else []

    def have_a_turn(self) -> list[ServiceKey]:
        return [
            key
            for key, due in self.due.items()
            if due <= self.now and key not in self.running and self.lane_open(self.flow(key))
        ]

    @invariant()
    def bounded(self) -> None:
        assert len(self.running) <= 8 * EACH

    def teardown(self) -> None:
        """Check that every service is reconciled in the end."""
        for _ in range(40):
            self.now += 30.0
            self.take_all()
            for key in list(self.running):
                self.done(key)
        assert not self.due


class TwoNamespaces(Machine):
    """Two namespaces; neither can delay the quick reconciles of the other."""

    namespaces = "ab"

    def left(self) -> list[ServiceKey]:
        return [key for key in self.have_a_turn() if key not in self.slow]


TestTurns = Machine.TestCase
TestTwoNamespaces = TwoNamespaces.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=40)
TestTwoNamespaces.settings = TestTurns.settings
