# SPDX-License-Identifier: Apache-2.0
"""Runs a scheduler with a simulated device in virtual time; a function decides how long each step takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AddRequest
from mizzen.core.request import Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan
from mizzen.engine.simulated.engine import ScriptContext, SimulatedDevice

Seconds = Callable[[StepPlan], float]


def same_token(context: ScriptContext) -> int:
    return 1


class Timeline:
    """A run in virtual time with `steps_in_flight` steps in flight, as in the overlap loop.

    The host takes no time. Times are in seconds from the beginning of the run.
    """

    def __init__(self, config: SchedulerConfig, seconds: Seconds) -> None:
        self.scheduler = Scheduler(config)
        self.now = 0.0
        self.plans: list[tuple[float, StepPlan]] = []
        """Executed plans, each with its duration in seconds."""
        self.tokens_at: dict[int, list[float]] = {}
        """Times at which the tokens of each request arrived."""
        self._depth = config.steps_in_flight
        self._seconds = seconds
        self._device = SimulatedDevice(
            slots=config.max_running_requests,
            pages=config.pages_total,
            page_size=config.page_size,
            context_length=config.capacity_tokens,
            script=same_token,
        )

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> None:
        """Submit requests at the given times (ascending), and run until all have ended."""
        pending = deque(arrivals)
        inflight: deque[tuple[StepPlan, float]] = deque()
        device_free_at = 0.0
        while pending or inflight or self.scheduler.has_work:
            while len(inflight) < self._depth:
                events = []
                while pending and pending[0][0] <= self.now:
                    events.append(AddRequest(pending.popleft()[1]))
                plan = self.scheduler.schedule(events, self.now)
                if plan is None:
                    break
                seconds_taken = self._seconds(plan)
                self.plans.append((seconds_taken, plan))
                device_free_at = max(device_free_at, self.now) + seconds_taken
                inflight.append((plan, device_free_at))
            if not inflight:
                self.now = pending[0][0]
                continue
            plan, end = inflight.popleft()
            self.now = max(self.now, end)
            output = self.scheduler.complete(self._device.execute(plan), self.now)
            for rid in output.rids.tolist():
                self.tokens_at.setdefault(rid, []).append(self.now)

    def longest_gap(self, rid: int) -> float:
        """Return the longest time between two successive tokens of a request, in seconds."""
        times = self.tokens_at[rid]
        return max(later - earlier for earlier, later in pairwise(times))


def prompt_tokens(plan: StepPlan) -> int:
    return sum(len(chunk.tokens) for chunk in plan.prefill)
