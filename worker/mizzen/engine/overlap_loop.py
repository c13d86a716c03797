# SPDX-License-Identifier: Apache-2.0
"""Overlaps scheduling with execution: launches the next step before it reads the tokens of the previous one.

`mizzen.engine.engine.Engine` owns the loop. Steps complete in the order in which they were launched.
"""

from __future__ import annotations

import time
from collections import deque

from mizzen.core.events import AbortRequest, AddRequest, Event, ProvideImage
from mizzen.core.images.counts import ImageUse
from mizzen.core.images.types import MissingImages
from mizzen.core.outputs import CacheEvents, Load, StepOutput
from mizzen.core.request import Finished, Request
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner


class StepFailed(RuntimeError):
    """The runner could not execute a step; the device state is unknown, so the engine cannot continue."""


class OverlapLoop:
    """Connects a scheduler to a runner, and keeps up to `depth` steps in flight.

    `submit` and `abort` may be called from any thread, all other methods from one thread only.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int | None = None) -> None:
        """Create a loop without steps in flight.

        Args:
            scheduler: A scheduler that has not been used.
            runner: A runner that has not been used.
            depth: Maximum number of steps in flight; by default `steps_in_flight` of the scheduler.

        Raises:
            ValueError: `depth` is not between 1 and `steps_in_flight` of the scheduler.
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
        """Whether requests run or wait, or `submit` or `abort` was called since the last step."""
        return bool(self._events) or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Submit a request; the next step passes it to the scheduler."""
        self._events.append(AddRequest(request))

    def abort(self, rid: int) -> None:
        """Abort a request at the next step; `step` or `drain_finished` then returns its `Finished`."""
        self._events.append(AbortRequest(rid))

    def provide_image(self, image: ProvideImage) -> None:
        """Pass the pixels of an image to the scheduler at the next step."""
        self._events.append(image)

    @property
    def waits_for_images(self) -> bool:
        """Whether a request waits for the pixels of an image."""
        return self._scheduler.images.waits

    @property
    def image_use(self) -> ImageUse:
        """Counters of the images of requests."""
        return self._scheduler.images.use

    def drain_missing_images(self) -> tuple[MissingImages, ...]:
        """Return the images whose pixels requests need, found since the last call."""
        return self._scheduler.drain_missing_images()

    def step(self, now: float) -> StepOutput | None:
        """Launch steps until `depth` steps are in flight, then wait for the oldest one.

        Call `drain_finished` afterwards, even if this method returns None.

        Args:
            now: Time in seconds, of a monotonic clock.

        Returns:
            The output of the oldest step, or None if no step is in flight.

        Raises:
            StepFailed: The runner failed in this call or in an earlier one; its error is the cause.
        """
        if self._failure is not None:
            raise StepFailed(f"the engine has already failed: {self._failure}") from self._failure
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
        """Return the requests that were aborted or rejected since the last call."""
        return self._scheduler.drain_finished()

    def drain_cache_events(self) -> CacheEvents:
        """Return the KV blocks that entered or left the prefix cache since the last call."""
        return self._scheduler.drain_cache_events()

    def cache_snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all KV blocks in the prefix cache."""
        return self._scheduler.cache_snapshot()

    def load(self) -> Load:
        """Return the scheduler's load; a submitted request counts from the next step on."""
        return self._scheduler.load()

    @property
    def integrity_faults(self) -> int:
        """Number of page, slot and prefix tree faults that `check_integrity` has found so far."""
        return self._scheduler.integrity.faults

    def drain_integrity_faults(self) -> tuple[str, ...]:
        """Return messages about the first integrity faults (at most 16) found since the last call."""
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
