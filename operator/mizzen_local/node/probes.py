# SPDX-License-Identifier: Apache-2.0
"""Runs the start-up, readiness and liveness probes of a container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mizzen_local.node import handlers
from mizzen_local.node.handlers import Outcome, Target

Report = Callable[[bool, Outcome], None]
EAGER_SECONDS = 0.1
MAX_EAGER_SECONDS = 1.0


class Probe:
    """One probe and its thresholds.

    Until an `eager` probe succeeds for the first time, it also runs in between its periodic runs, so that a
    start is noticed at once. If such an extra run succeeds, it counts like a periodic run; if it fails, it is
    ignored.
    """

    def __init__(self, spec: Mapping[str, Any], target: Target, *, eager: bool, ok: bool) -> None:
        self._spec = spec
        self._target = target
        self._eager = eager
        self._streak = 0
        self._last = ok
        self._failures_needed = spec.get("failureThreshold", 3)
        self._successes_needed = spec.get("successThreshold", 1)
        self._period = float(spec.get("periodSeconds", 10))

    async def run(self, report: Report) -> None:
        """Run the probe periodically until cancelled.

        Args:
            report: called after each run if the number of consecutive successes or failures is at or above
                its threshold; its arguments are whether the run succeeded, and the run's outcome.
        """
        await asyncio.sleep(self._spec.get("initialDelaySeconds", 0))
        loop = asyncio.get_running_loop()
        due, pause = loop.time(), EAGER_SECONDS
        while True:
            outcome = await handlers.run(self._spec, self._target, self._spec.get("timeoutSeconds", 1))
            at_period = loop.time() >= due
            if outcome.ok or at_period:
                self._count(outcome, report)
            if at_period:
                due = max(due + self._period, loop.time())
            wait = due - loop.time()
            if self._eager and not outcome.ok:
                wait, pause = min(wait, pause), min(1.5 * pause, MAX_EAGER_SECONDS)
            elif outcome.ok:
                self._eager = False
            await asyncio.sleep(max(wait, 0.0))

    def _count(self, outcome: Outcome, report: Report) -> None:
        self._streak = self._streak + 1 if outcome.ok == self._last else 1
        self._last = outcome.ok
        needed = self._successes_needed if outcome.ok else self._failures_needed
        if self._streak >= needed:
            report(outcome.ok, outcome)


class Probes:
    """The probes of one run of one container.

    Attributes:
        started: whether the start-up probe has passed; also True if the container has no start-up probe.
    """

    def __init__(
        self,
        container: Mapping[str, Any],
        target: Target,
        *,
        changed: Callable[[], None],
        unhealthy: Callable[[str, str], None],
        kill: Callable[[str, Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Create the probes; `run` starts them.

        Args:
            container: the container's spec.
            target: the container that the handlers are run for.
            changed: called when `started` or `ready` has changed.
            unhealthy: called when a probe has reached its failure threshold, with the kind of the probe and
                the message of its last outcome.
            kill: terminates the container's run, given a reason and the failed probe's spec.
        """
        self._container = container
        self._target = target
        self._changed = changed
        self._unhealthy = unhealthy
        self._kill = kill
        self.started = "startupProbe" not in container
        self._readiness_passes = "readinessProbe" not in container
        self._startup_passed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the container has started and its readiness probe, if it has one, passes."""
        return self.started and self._readiness_passes

    async def run(self) -> None:
        """Run the probes until cancelled, or until a failed probe has terminated the container's run."""
        async with asyncio.TaskGroup() as group:
            if spec := self._container.get("startupProbe"):
                startup_task = group.create_task(self._probe_startup(spec))
                await self._startup_passed.wait()
                startup_task.cancel()
            if spec := self._container.get("readinessProbe"):
                group.create_task(Probe(spec, self._target, eager=True, ok=False).run(self._report_readiness))
            if spec := self._container.get("livenessProbe"):
                group.create_task(self._probe_liveness(spec))

    async def _probe_startup(self, spec: Mapping[str, Any]) -> None:
        failed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def report(ok: bool, outcome: Outcome) -> None:
            if ok and not self.started:
                self.started = True
                self._startup_passed.set()
                self._changed()
            elif not ok and not failed.done():
                failed.set_result(outcome)

        await self._probe_until_failed(Probe(spec, self._target, eager=True, ok=False), report, failed)
        await self._end_container("Startup", spec, failed.result())

    def _report_readiness(self, ok: bool, outcome: Outcome) -> None:
        if not ok:
            self._unhealthy("Readiness", outcome.message)
        if ok != self._readiness_passes:
            self._readiness_passes = ok
            self._changed()

    async def _probe_liveness(self, spec: Mapping[str, Any]) -> None:
        failed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def report(ok: bool, outcome: Outcome) -> None:
            if not ok and not failed.done():
                failed.set_result(outcome)

        await self._probe_until_failed(Probe(spec, self._target, eager=False, ok=True), report, failed)
        await self._end_container("Liveness", spec, failed.result())

    async def _probe_until_failed(
        self, probe: Probe, report: Report, failed: asyncio.Future[Outcome]
    ) -> None:
        probe_task = asyncio.create_task(probe.run(report))
        try:
            await failed
        finally:
            probe_task.cancel()

    async def _end_container(self, kind: str, spec: Mapping[str, Any], outcome: Outcome) -> None:
        self._unhealthy(kind, outcome.message)
        await self._kill(f"failed {kind.lower()} probe", spec)
