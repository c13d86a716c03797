"""Runs a scheduler against a device whose steps take scripted, virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import Arrive
from mizzen.core.request import Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import StepPlan
from mizzen.engine.simulated.engine import ScriptContext, SimulatedDevice

Seconds = Callable[[StepPlan], float]


def same_token(context: ScriptContext) -> int:
    return 1


class Timeline:
    """Keeps `steps_in_flight` steps in flight, as the overlap loop does; the host itself takes no time."""

    def __init__(self, config: SchedulerConfig, seconds: Seconds) -> None:
        self.scheduler = Scheduler(config)
        self.now = 0.0
        self.plans: list[tuple[float, StepPlan]] = []
        """With the seconds that each took."""
        self.tokens_at: dict[int, list[float]] = {}
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
        """Let requests arrive at their times (ascending) and run until all have ended."""
        coming = deque(arrivals)
        flying: deque[tuple[StepPlan, float]] = deque()
        free = 0.0
        while coming or flying or self.scheduler.has_work:
            while len(flying) < self._depth:
                events = []
                while coming and coming[0][0] <= self.now:
                    events.append(Arrive(coming.popleft()[1]))
                plan = self.scheduler.schedule(events, self.now)
                if plan is None:
                    break
                lasts = self._seconds(plan)
                self.plans.append((lasts, plan))
                free = max(free, self.now) + lasts
                flying.append((plan, free))
            if not flying:
                self.now = coming[0][0]
                continue
            plan, end = flying.popleft()
            self.now = max(self.now, end)
            output = self.scheduler.complete(self._device.execute(plan), self.now)
            for rid in output.rids.tolist():
                self.tokens_at.setdefault(rid, []).append(self.now)

    def longest_gap(self, rid: int) -> float:
        """Return the most seconds between two tokens of a request."""
        times = self.tokens_at[rid]
        return max(later - earlier for earlier, later in pairwise(times))


def prompt_tokens(plan: StepPlan) -> int:
    return sum(len(chunk.tokens) for chunk in plan.prefill)
