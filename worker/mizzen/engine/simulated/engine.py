"""A runner without a model: real device state, scripted tokens and scripted step times.

Each KV cell holds the id of the token that a model would have computed it from, and the next token depends
on the whole sequence as read through the page table. A page that is lost, reused too early or shared wrongly
therefore changes the output or raises at once. Steps run in a worker thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mizzen.core.step_plan import StepPlan, StepTokens
from mizzen.engine.simulated.device import InflightUseGuard, PlanViolation, SimulatedDevice
from mizzen.engine.simulated.scripts import Script, ScriptContext, echo, ends_after, fixed, hashed

__all__ = [
    "InflightUseGuard",
    "PlanViolation",
    "Script",
    "ScriptContext",
    "SimulatedDevice",
    "SimulatedRunner",
    "StepDuration",
    "echo",
    "ends_after",
    "fixed",
    "hashed",
    "make_simulated_runner",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDuration:
    """How long a step takes."""

    step_seconds: float = 0.0
    """Fixed seconds per step."""
    seconds_per_prefill_token: float = 0.0
    """Seconds per prefill token."""
    seconds_per_decode: float = 0.0
    """Seconds per decoding request."""

    def plan_seconds(self, plan: StepPlan) -> float:
        """Return the seconds that a plan takes."""
        tokens = sum(len(chunk.tokens) for chunk in plan.prefill)
        return (
            self.step_seconds
            + self.seconds_per_prefill_token * tokens
            + self.seconds_per_decode * len(plan.decode)
        )


class SimulatedRunner:
    """A `Runner` that executes plans on a `SimulatedDevice` in a worker thread, with scripted step times."""

    def __init__(
        self,
        device: SimulatedDevice,
        duration: StepDuration | None = None,
        delay: Callable[[StepPlan], float] | None = None,
        guard: InflightUseGuard | None = None,
    ) -> None:
        """Start the worker.

        Args:
            device: Fresh device state.
            duration: How long a step takes; no time by default.
            delay: Seconds to add to a step, decided when it runs; may raise to make the step fail.
            guard: Checks uses of slots and pages at each launch.
        """
        self._device = device
        self._speed = duration or StepDuration()
        self._delay = delay
        self._guard = guard
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: deque[StepTokens | BaseException] = deque()
        self._completed = threading.Condition()
        self._inflight_steps = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="simulated-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._guard is not None:
            self._guard.check_launch(plan)
        self._inflight_steps += 1
        self._plans.put(plan)

    def ready(self) -> bool:
        """Return whether the oldest step has ended."""
        return bool(self._results)

    def collect(self) -> StepTokens:
        """Wait for the oldest step and return its tokens, or raise its error."""
        if not self._inflight_steps:
            raise RuntimeError("no step is in flight")
        with self._completed:
            while not self._results:
                self._completed.wait(timeout=1.0)
            result = self._results.popleft()
        self._inflight_steps -= 1
        if self._guard is not None:
            self._guard.complete_step()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Let the steps in flight end, then stop the worker."""
        if not self._closed:
            self._closed = True
            self._plans.put(None)
            self._thread.join()

    def _work(self) -> None:
        failure: Exception | None = None
        while (plan := self._plans.get()) is not None:
            result: StepTokens | BaseException
            try:
                if failure is not None:
                    raise RuntimeError(f"an earlier step failed: {failure}")
                seconds = self._speed.plan_seconds(plan) + (self._delay(plan) if self._delay else 0.0)
                if seconds > 0:
                    time.sleep(seconds)
                result = self._device.execute(plan)
            except Exception as error:
                result, failure = error, failure or error
            with self._completed:
                self._results.append(result)
                self._completed.notify()


def make_simulated_runner(
    *,
    slots: int,
    pages: int,
    page_size: int,
    context_length: int,
    script: Script,
    vocab_size: int = 1 << 17,
    duration: StepDuration | None = None,
    delay: Callable[[StepPlan], float] | None = None,
) -> SimulatedRunner:
    """Return a runner with a device of the given sizes and a guard of its slots and pages."""
    device = SimulatedDevice(
        slots=slots,
        pages=pages,
        page_size=page_size,
        context_length=context_length,
        script=script,
        vocab_size=vocab_size,
    )
    guard = InflightUseGuard(slots=slots, page_size=page_size, context_length=context_length)
    return SimulatedRunner(device, duration, delay, guard)
