"""Keeps a runner busy: launches the next step before the tokens of the one before are read."""

from __future__ import annotations

import time
from collections import deque

from mizzen.core.events import Abort, Arrive, Event
from mizzen.core.outputs import CacheEvents, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner


class StepFailed(RuntimeError):
    """The runner could not execute a step. The engine cannot go on: device state is unknown."""


class OverlapLoop:
    """A scheduler and a runner, with up to `depth` steps in flight.

    `submit` and `abort` may be called from any thread; the rest from one.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int | None = None) -> None:
        """Take a fresh scheduler and a fresh runner; `depth` is the scheduler's `steps_in_flight` by default.

        Raises:
            ValueError: `depth` is not between 1 and the scheduler's `steps_in_flight`.
        """
        most = scheduler.config.steps_in_flight
        self._depth = most if depth is None else depth
        if not 1 <= self._depth <= most:
            raise ValueError(f"depth must be between 1 and steps_in_flight ({most}), not {depth}")
        self._scheduler = scheduler
        self._runner = runner
        self._events: deque[Event] = deque()
        self._in_flight = 0
        self._failure: StepFailed | None = None

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._events) or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Let a request join the queue at the next step."""
        self._events.append(Arrive(request))

    def abort(self, rid: int) -> None:
        """End a request at the next step; exactly one `Finished` answers, of a step or of `take_ended`."""
        self._events.append(Abort(rid))

    def step(self, now: float) -> StepOutput | None:
        """Launch what can be launched and wait for the oldest step; None when nothing is in flight.

        Call `take_ended` afterwards in either case.

        Raises:
            StepFailed: the runner raised, now or before; its error is the cause.
        """
        if self._failure is not None:
            raise StepFailed(f"the engine has failed before: {self._failure}") from self._failure
        entered = time.monotonic()
        while self._in_flight < self._depth:
            plan = self._scheduler.next(self._take_events(), now)
            if plan is None:
                break
            try:
                self._runner.launch(plan)
            except Exception as error:
                raise self._failed(f"step {plan.step} could not be launched: {error}") from error
            self._in_flight += 1
        if not self._in_flight:
            return None
        try:
            tokens = self._runner.collect()
        except Exception as error:
            step = self._scheduler.flights.completed + 1
            raise self._failed(f"step {step} failed: {error}") from error
        self._in_flight -= 1
        return self._scheduler.complete(tokens, now + time.monotonic() - entered)

    def take_ended(self) -> tuple[Finished, ...]:
        """Return the requests that ended outside a step since the last call."""
        return self._scheduler.take_ended()

    def take_cache_events(self) -> CacheEvents:
        """Return the blocks that entered or left the prefix cache since the last call."""
        return self._scheduler.take_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks in the prefix cache."""
        return self._scheduler.cache_snapshot()

    def load(self) -> Load:
        """Return how busy the scheduler is; submitted requests count from the next step on."""
        return self._scheduler.load()

    @property
    def integrity_faults(self) -> int:
        """Faults of pages, slots and prefix tree found so far, by the checks of `check_integrity`."""
        return self._scheduler.integrity_faults

    def take_integrity_faults(self) -> tuple[str, ...]:
        """Return what these checks found since the last call, the first of it."""
        return self._scheduler.take_integrity_faults()

    def close(self) -> None:
        """Wait for what is in flight and free the device."""
        self._runner.close()

    def _failed(self, message: str) -> StepFailed:
        self._failure = StepFailed(message)
        return self._failure

    def _take_events(self) -> list[Event]:
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events
