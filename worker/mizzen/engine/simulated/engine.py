"""A runner without a model: real device state, scripted tokens and scripted speed.

Each KV cell holds the id of the token that a model would have computed it from, and the next token is chosen
from the whole sequence as it is found through the page table. So a page that is lost, reused too early or
shared wrongly changes the output, or is caught at once. Steps run in a worker thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mizzen.core.step_plan import StepPlan, StepTokens
from mizzen.engine.simulated.device import FenceGuard, PlanViolation, SimulatedDevice
from mizzen.engine.simulated.scripts import Context, Script, echo, ends_after, fixed, hashed

__all__ = [
    "Context", "FenceGuard", "PlanViolation", "Script", "SimulatedDevice", "SimulatedRunner", "Speed", "echo",
    "ends_after", "fixed", "hashed", "simulated_runner",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long a step takes, in seconds."""

    step: float = 0.0
    prefill_token: float = 0.0
    decode: float = 0.0
    """For each decoding request."""

    def seconds(self, plan: StepPlan) -> float:
        """Return a plan's time."""
        tokens = sum(len(chunk.tokens) for chunk in plan.prefill)
        return self.step + self.prefill_token * tokens + self.decode * len(plan.decode)


class SimulatedRunner:
    """A `Runner` that executes plans on a `SimulatedDevice` in a worker thread, at a given speed."""

    def __init__(
        self,
        device: SimulatedDevice,
        speed: Speed | None = None,
        delay: Callable[[StepPlan], float] | None = None,
        guard: FenceGuard | None = None,
    ) -> None:
        """Start the worker.

        Args:
            device: fresh device state.
            speed: how long a step takes; no time by default.
            delay: seconds to add to a step, decided when it runs; may raise, to let the step fail.
            guard: checks the fences at each launch.
        """
        self._device = device
        self._speed = speed or Speed()
        self._delay = delay
        self._guard = guard
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: deque[StepTokens | BaseException] = deque()
        self._landed = threading.Condition()
        self._in_flight = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="simulated-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        if self._guard is not None:
            self._guard.launch(plan)
        self._in_flight += 1
        self._plans.put(plan)

    def ready(self) -> bool:
        """Tell whether the oldest step has ended."""
        return bool(self._results)

    def collect(self) -> StepTokens:
        """Wait for the oldest step and return its tokens; raise what it raised."""
        if not self._in_flight:
            raise RuntimeError("no step is in flight")
        with self._landed:
            while not self._results:
                self._landed.wait(timeout=1.0)
            result = self._results.popleft()
        self._in_flight -= 1
        if self._guard is not None:
            self._guard.land()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Let the steps in flight end, then the worker."""
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
                seconds = self._speed.seconds(plan) + (self._delay(plan) if self._delay else 0.0)
                if seconds > 0:
                    time.sleep(seconds)
                result = self._device.execute(plan)
            except Exception as error:
                result, failure = error, failure or error
            with self._landed:
                self._results.append(result)
                self._landed.notify()


def simulated_runner(
    *,
    slots: int,
    pages: int,
    page_size: int,
    context_length: int,
    script: Script,
    vocab_size: int = 1 << 17,
    speed: Speed | None = None,
    delay: Callable[[StepPlan], float] | None = None,
) -> SimulatedRunner:
    """Return a runner with a device of the given sizes, and a guard of its fences."""
    device = SimulatedDevice(
        slots=slots,
        pages=pages,
        page_size=page_size,
        context_length=context_length,
        script=script,
        vocab_size=vocab_size,
    )
    guard = FenceGuard(slots=slots, page_size=page_size, context_length=context_length)
    return SimulatedRunner(device, speed, delay, guard)
