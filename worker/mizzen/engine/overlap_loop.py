"""Overlaps scheduling with execution: launches the next step before the previous step's tokens are read.

`mizzen.engine.engine.Engine` owns one. At most `depth` steps are in flight, completed in launch order.
"""

from __future__ import annotations

import time
from collections import deque

from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.outputs import CacheEvents, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner


class StepFailed(RuntimeError):
    """The runner could not execute a step. Device state is unknown, so the engine cannot continue."""


class OverlapLoop:
    """A scheduler and a runner with up to `depth` steps in flight.

    `submit` and `abort` may be called from any thread, everything else from one thread.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int | None = None) -> None:
        """Connect a fresh scheduler to a fresh runner.

        Args:
            scheduler: The scheduler.
            runner: The runner.
            depth: Maximum number of steps in flight; the scheduler's `steps_in_flight` by default.

        Raises:
            ValueError: `depth` is not between 1 and the scheduler's `steps_in_flight`.
        """
        max_depth = scheduler.config.steps_in_flight
        self._depth = max_depth if depth is None else depth
        if not 1 <= self._depth <= max_depth:
            raise ValueError(f"depth must be between 1 and steps_in_flight ({max_depth}), not {depth}")
        self._scheduler = scheduler
        self._runner = runner
        self._events: deque[Event] = deque()
        self._inflight_steps = 0
        self._failure: StepFailed | None = None

    @property
    def busy(self) -> bool:
        """Return whether `step` has anything to do."""
        return bool(self._events) or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request from the next step on."""
        self._events.append(Arrive(request))

    def abort(self, rid: int) -> None:
        """Abort a request at the next step; a step or `drain_finished` returns its one `Finished`."""
        self._events.append(Abort(rid))

    def step(self, now: float) -> StepOutput | None:
        """Launch all steps that can be launched and wait for the oldest one.

        Call `drain_finished` afterwards in either case.

        Returns:
            The oldest step's output, or None if no step is in flight.

        Raises:
            StepFailed: The runner raised, in this call or an earlier one; its error is the cause.
        """
        if self._failure is not None:
            raise StepFailed(f"the engine has failed before: {self._failure}") from self._failure
        start_time = time.monotonic()
        while self._inflight_steps < self._depth:
            plan = self._scheduler.schedule(self._drain_events(), now)
            if plan is None:
                break
            try:
                self._runner.launch(plan)
            except Exception as error:
                raise self._record_failure(f"step {plan.step} could not be launched: {error}") from error
            self._inflight_steps += 1
        if not self._inflight_steps:
            return None
        try:
            tokens = self._runner.collect()
        except Exception as error:
            step = self._scheduler.inflight.completed + 1
            raise self._record_failure(f"step {step} failed: {error}") from error
        self._inflight_steps -= 1
        return self._scheduler.complete(tokens, now + time.monotonic() - start_time)

    def drain_finished(self) -> tuple[Finished, ...]:
        """Return the requests that finished outside a step since the last call."""
        return self._scheduler.drain_finished()

    def drain_cache_events(self) -> CacheEvents:
        """Return the KV blocks that entered or left the prefix cache since the last call."""
        return self._scheduler.drain_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all KV blocks in the prefix cache."""
        return self._scheduler.cache_snapshot()

    def load(self) -> Load:
        """Return the scheduler's load; submitted requests count from the next step on."""
        return self._scheduler.load()

    @property
    def integrity_faults(self) -> int:
        """Number of page, slot and prefix tree faults that `check_integrity` has found so far."""
        return self._scheduler.integrity.faults

    def drain_integrity_faults(self) -> tuple[str, ...]:
        """Return descriptions of the first integrity faults found since the last call."""
        return self._scheduler.integrity.drain()

    def close(self) -> None:
        """Wait for the steps in flight and free the device."""
        self._runner.close()

    def _record_failure(self, message: str) -> StepFailed:
        self._failure = StepFailed(message)
        return self._failure

    def _drain_events(self) -> list[Event]:
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events
