# SPDX-License-Identifier: Apache-2.0
"""A runner without a model: real device state, scripted tokens and scripted step times.

Each KV cache entry holds the id of its token, and the next token depends on the whole sequence as read
through the page table. So if the scheduler loses a page, reuses it too early or shares it wrongly, the output
changes or an error is raised. Steps run in a worker thread.
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
    """Duration of simulated steps."""

    step_seconds: float = 0.0
    """Fixed seconds per step."""
    seconds_per_prefill_token: float = 0.0
    """Additional seconds per prompt token."""
    seconds_per_decode: float = 0.0
    """Additional seconds per decoding request."""

    def plan_seconds(self, plan: StepPlan) -> float:
        """Return the duration of a plan in seconds."""
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
        """Start the worker thread.

        Args:
            device: A device that has not executed a plan.
            duration: Duration of steps; 0 by default.
            delay: Called when a step runs; returns seconds to add to its duration. If it raises an error, the
                step fails with that error.
            guard: Checks the use of slots and pages at each launch.
        """
        self._device = device
        self._duration = duration or StepDuration()
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
        """Enqueue a step, and return at once.

        Raises:
            RuntimeError: The runner is closed.
            PlanViolation: The guard found that the step reuses a slot or page too early.
        """
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._guard is not None:
            self._guard.check_launch(plan)
        self._inflight_steps += 1
        self._plans.put(plan)

    def ready(self) -> bool:
        """Return whether the oldest step in flight is complete."""
        return bool(self._results)

    def collect(self) -> StepTokens:
        """Wait for the oldest step in flight and return its tokens, or raise its error.

        Raises:
            RuntimeError: No step is in flight.
        """
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
        """Wait for the steps in flight, then stop the worker thread."""
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
                seconds = self._duration.plan_seconds(plan) + (self._delay(plan) if self._delay else 0.0)
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
    labels: int = 0,
    image_capacity: int = 0,
    duration: StepDuration | None = None,
    delay: Callable[[StepPlan], float] | None = None,
) -> SimulatedRunner:
    """Create a runner on a new device, with a guard.

    See `SimulatedDevice` and `SimulatedRunner` for the arguments.
    """
    device = SimulatedDevice(
        slots=slots,
        pages=pages,
        page_size=page_size,
        context_length=context_length,
        script=script,
        vocab_size=vocab_size,
        labels=labels,
        image_capacity=image_capacity,
    )
    guard = InflightUseGuard(slots=slots, page_size=page_size, context_length=context_length)
    return SimulatedRunner(device, duration, delay, guard)
