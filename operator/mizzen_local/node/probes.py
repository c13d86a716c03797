"""Start-up, readiness and liveness probes of a running container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mizzen_local.node import handlers
from mizzen_local.node.handlers import Outcome, Target

Report = Callable[[bool, Outcome], None]
EAGER_SECONDS = 0.1
MOST_EAGER_SECONDS = 1.0


class Probe:
    """One probe and its thresholds.

    While an `eager` probe has never succeeded, it is tried more often than its period, so that a start is
    seen at once; such a try counts when it succeeds, and failures only count at the end of a period.
    """

    def __init__(self, spec: Mapping[str, Any], target: Target, *, eager: bool, ok: bool) -> None:
        self._spec = spec
        self._target = target
        self._eager = eager
        self._in_a_row = 0
        self._last = ok
        self._failures_needed = spec.get("failureThreshold", 3)
        self._successes_needed = spec.get("successThreshold", 1)
        self._period = float(spec.get("periodSeconds", 10))

    async def run(self, report: Report) -> None:
        """Probe without end.

        Args:
            report: hears of each verdict: whether the threshold of successes (True) or failures (False) is
                reached, and the last outcome.
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
                wait, pause = min(wait, pause), min(1.5 * pause, MOST_EAGER_SECONDS)
            elif outcome.ok:
                self._eager = False
            await asyncio.sleep(max(wait, 0.0))

    def _count(self, outcome: Outcome, report: Report) -> None:
        self._in_a_row = self._in_a_row + 1 if outcome.ok == self._last else 1
        self._last = outcome.ok
        needed = self._successes_needed if outcome.ok else self._failures_needed
        if self._in_a_row >= needed:
            report(outcome.ok, outcome)


class Probes:
    """The probes of one run of one container.

    Attributes:
        started: the start-up probe has passed, or there is none.
        ready: started, and the readiness probe, if there is one, passes.
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
        """Prepare, without probing yet.

        Args:
            container: the container's spec.
            target: where to probe.
            changed: called when started or ready changed.
            unhealthy: hears the probe's kind and the message of a failure that reached its threshold.
            kill: ends the container: gets the reason and the probe's spec.
        """
        self._container = container
        self._target = target
        self._changed = changed
        self._unhealthy = unhealthy
        self._kill = kill
        self.started = "startupProbe" not in container
        self._passes = "readinessProbe" not in container
        self._begun = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether the container is ready."""
        return self.started and self._passes

    async def run(self) -> None:
        """Probe until cancelled, or until a probe has ended the container."""
        async with asyncio.TaskGroup() as group:
            if spec := self._container.get("startupProbe"):
                starting = group.create_task(self._start(spec))
                await self._begun.wait()
                starting.cancel()
            if spec := self._container.get("readinessProbe"):
                group.create_task(Probe(spec, self._target, eager=True, ok=False).run(self._readiness))
            if spec := self._container.get("livenessProbe"):
                group.create_task(self._live(spec))

    async def _start(self, spec: Mapping[str, Any]) -> None:
        failed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def report(ok: bool, outcome: Outcome) -> None:
            if ok and not self.started:
                self.started = True
                self._begun.set()
                self._changed()
            elif not ok and not failed.done():
                failed.set_result(outcome)

        await self._until_failed(Probe(spec, self._target, eager=True, ok=False), report, failed)
        await self._end("Startup", spec, failed.result())

    def _readiness(self, ok: bool, outcome: Outcome) -> None:
        if not ok:
            self._unhealthy("Readiness", outcome.message)
        if ok != self._passes:
            self._passes = ok
            self._changed()

    async def _live(self, spec: Mapping[str, Any]) -> None:
        failed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def report(ok: bool, outcome: Outcome) -> None:
            if not ok and not failed.done():
                failed.set_result(outcome)

        await self._until_failed(Probe(spec, self._target, eager=False, ok=True), report, failed)
        await self._end("Liveness", spec, failed.result())

    async def _until_failed(self, probe: Probe, report: Report, failed: asyncio.Future[Outcome]) -> None:
        probing = asyncio.create_task(probe.run(report))
        try:
            await failed
        finally:
            probing.cancel()

    async def _end(self, kind: str, spec: Mapping[str, Any], outcome: Outcome) -> None:
        self._unhealthy(kind, outcome.message)
        await self._kill(f"failed {kind.lower()} probe", spec)
