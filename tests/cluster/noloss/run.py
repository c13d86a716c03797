# SPDX-License-Identifier: Apache-2.0
"""Runs of changes and faults under load: a short one for `make test` and a long one for `make soak`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noloss.changes import Changes, until
from noloss.driver import Driver
from noloss.kube import Kube
from noloss.local import Site
from noloss.services import STORY, hashed_questions, lane, real_service, simulated_service, trained_questions
from noloss.truth import WrongStatus
from noloss.watcher import Watcher

NAMESPACE = "default"
SLOW, DEMO, LONE = "slow", "demo", "lone"
"""Names of the three services of a run.

The engines of the first are simulated, those of the second real; the third has one simulated engine, and gets
only probes.
"""
STEP_MS = 40.0
Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Size:
    """Size of a run.

    Attributes:
        requests: minimum number of requests.
        rollouts: minimum number of rollouts of both loaded services together.
        cycles: minimum number of scaling cycles 4 → 1 → 4.
        stream_seconds: duration of the longest stream.
        share: share of the API requests that get a fault while the API server is faulty.
        probe_seconds: seconds between two probes of a service.
        probe_deadline: seconds after which a probe has failed.
        seed: seed of the random order of changes and faults.
        max_seconds: seconds after which the run ends even if it has not reached its size.
        pause: average seconds that a worker waits between two short requests.
    """

    requests: int
    rollouts: int
    cycles: int
    stream_seconds: float
    share: float = 0.15
    probe_seconds: float = 0.1
    probe_deadline: float = 1.0
    seed: int = 1
    max_seconds: float = 1000.0
    pause: float = 0.0


class Run:
    """One run on a cluster that has been started."""

    def __init__(self, site: Site, size: Size) -> None:
        self._site = site
        self._size = size
        self._random = random.Random(size.seed)
        self._faults: dict[str, Any] = {}
        self._faulty = False
        self._began = time.monotonic()
        self._cpu: dict[str, float] = {}
        self.counts: dict[str, Any] = {}

    def _log(self, words: str) -> None:
        started = self.driver.started if hasattr(self, "driver") else 0
        print(f"{time.strftime('%H:%M:%S')} {started:7} requests  {words}", file=sys.stderr, flush=True)

    async def run_short(self) -> None:
        """Do 3 rollouts and 10 kills of the loaded services, and break the service that gets only probes."""
        async with Kube(self._site.kubectl, self._site.kubeconfig) as kube:
            await self._start(kube, {SLOW: (3, 2), DEMO: (2, 1), LONE: (1, 1)})
            async with self.watcher.running():
                try:
                    await self._run_concurrently(self._short_well(), self._short_lone(), self._short_demo())
                    await self._api_faults(self._size.share)
                    await self._run_concurrently(self._short_faulty(), self._short_faulty_demo())
                    await self._api_faults(0.0)
                    await self._finish()
                finally:
                    await self.driver.kill()

    async def _short_well(self) -> None:
        do = self.changes
        await self._run_in_order(
            ("a pod is deleted", lambda: do.delete(SLOW)),
            ("a rank is killed", lambda: do.kill(SLOW, "rank")),
            ("a rank hangs, and is resumed", lambda: do.hang(SLOW, "rank", "resume")),
            ("an engine is killed", lambda: do.kill(SLOW, "container")),
            ("an engine hangs, and is killed", lambda: do.hang(SLOW, "all", "kill")),
        )

    async def _short_lone(self) -> None:
        do = self.changes
        await self._run_in_order(
            ("the only rank is killed", lambda: do.kill(LONE, "rank")),
            ("the only rank hangs, and is resumed", lambda: do.hang(LONE, "rank", "resume")),
            ("the only gateway is killed", lambda: do.kill(LONE, "container", "gateway")),
            ("the only pod is deleted", lambda: do.delete(LONE)),
        )

    async def _short_demo(self) -> None:
        await self._run_in_order(("a real rank is killed", lambda: self.changes.kill(DEMO, "rank")))

    async def _short_faulty(self) -> None:
        do = self.changes
        await self._run_in_order(
            ("a rollout", lambda: do.roll_out(SLOW)),
            ("a pod is deleted", lambda: do.delete(SLOW)),
            ("a rollout that is reverted halfway", lambda: do.roll_out_and_revert(SLOW)),
            ("a rank is killed", lambda: do.kill(SLOW, "rank")),
            ("a pod is deleted", lambda: do.delete(SLOW)),
        )

    async def _short_faulty_demo(self) -> None:
        do = self.changes
        await self._run_in_order(
            ("a rollout of real engines", lambda: do.roll_out(DEMO)),
            ("a pod of real engines is deleted", lambda: do.delete(DEMO)),
        )

    async def run_long(self) -> None:
        """Alternate rollouts, scaling cycles 4 → 1 → 4 and faults until the size of the run is reached."""
        async with Kube(self._site.kubectl, self._site.kubeconfig) as kube:
            await self._start(kube, {SLOW: (4, 2), DEMO: (2, 1), LONE: (1, 1)})
            async with self.watcher.running():
                try:
                    await self._rounds()
                    await self._api_faults(0.0)
                    await self._finish()
                finally:
                    await self.driver.kill()

    async def _rounds(self) -> None:
        """Run rounds of a rollout, a scaling cycle and faults until the size of the run is reached.

        In every other round, the API server is faulty. A change does not wait until draining pods are gone.
        """
        size, do = self._size, self.changes
        number, self.changes.await_termination = 0, False
        while time.monotonic() - self._began < size.max_seconds and (
            do.done["rollouts"] < size.rollouts
            or do.done["cycles"] < size.cycles
            or self.driver.started < size.requests
        ):
            number += 1
            share = size.share if number % 2 == 0 else 0.0
            await self._api_faults(share)
            await self._run_concurrently(
                self._round_slow(number), self._round_lone(number), self._round_demo(number)
            )
            self._log(f"round {number}: {json.dumps(do.done)}")

    async def _round_slow(self, number: int) -> None:
        do = self.changes
        steps: list[tuple[str, Step]] = []
        rollout = do.roll_out_and_revert if number % 4 == 0 else do.roll_out
        steps += [
            ("4 to 1 to 4", lambda: do.scale_down_and_up(SLOW, 4, 1)),
            ("a rollout", lambda: rollout(SLOW)),
        ]
        steps.append(self._random.choice(self._kills(SLOW)))
        self._random.shuffle(steps)
        await self._run_in_order(*steps)

    async def _round_lone(self, number: int) -> None:
        do = self.changes
        gateway: list[tuple[str, Step]] = [
            ("the only gateway is killed", lambda: do.kill(LONE, "container", "gateway")),
            ("the only gateway hangs", lambda: do.hang_gateway(LONE)),
        ]
        await self._run_in_order(*self._random.sample([*self._kills(LONE), *gateway], 3))

    async def _round_demo(self, number: int) -> None:
        do = self.changes
        steps = [self._random.choice(self._kills(DEMO))]
        if number % 4 == 0:
            steps.append(("a rollout of real engines", lambda: do.roll_out(DEMO)))
        await self._run_in_order(*steps)

    def _kills(self, name: str) -> list[tuple[str, Step]]:
        do = self.changes
        return [
            (f"{name}: a pod is deleted", lambda: do.delete(name)),
            (f"{name}: a rank is killed", lambda: do.kill(name, "rank")),
            (f"{name}: an engine is killed", lambda: do.kill(name, "container")),
            (f"{name}: a rank hangs, and is resumed", lambda: do.hang(name, "rank", "resume")),
            (f"{name}: an engine hangs, and is killed", lambda: do.hang(name, "all", "kill")),
        ]

    # ---- shared by the short and the long run ----

    async def _start(self, kube: Kube, sizes: dict[str, tuple[int, int]]) -> None:
        self.changes = Changes(kube, NAMESPACE, self._site, lambda *fault: self.watcher.record_fault(*fault))
        drain = int(self._size.stream_seconds) + 30
        for name, (groups, gateways) in sizes.items():
            if name == DEMO:
                await self.changes.apply(real_service(name, groups, gateways, drain_seconds=drain))
            else:
                await self.changes.apply(
                    simulated_service(name, groups, gateways, step_ms=STEP_MS, drain_seconds=drain)
                )
        await asyncio.gather(*(self.changes.wait_until_settled(name) for name in sizes))
        urls = {name: await self._url(kube, name) for name in sizes}
        self.watcher = Watcher(
            kube, NAMESPACE, urls, every=self._size.probe_seconds, deadline=self._size.probe_deadline
        )
        self.driver = Driver(self._plan(urls))
        await self.driver.start()
        self._log("the load runs")

    async def _url(self, kube: Kube, name: str) -> str:
        service = await kube.call("GET", f"/api/v1/namespaces/{NAMESPACE}/services/{name}-gateway")
        spec = service["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}/v1"

    def _plan(self, urls: dict[str, str]) -> dict[str, Any]:
        pause = self._size.pause
        longest = int(self._size.stream_seconds * 1000 / STEP_MS)
        streams = tuple(max(2, longest * part // 8) for part in (1, 2, 4, 8))
        lanes = [
            lane(8, hashed_questions(SLOW, (2, 3, 4, 6), stream=False), pause),
            lane(4, hashed_questions(SLOW, (4, 6, 8, 10), stream=True), pause),
            lane(4, hashed_questions(SLOW, streams, stream=True)),
        ]
        trained_lanes = [
            lane(2, trained_questions(DEMO, stream=False), 4 * pause),
            lane(1, trained_questions(DEMO, stream=True), 4 * pause),
            lane(1, trained_questions(DEMO, stream=True, questions=(STORY,)), 2.0),
        ]
        targets = [{"url": urls[SLOW], "lanes": lanes}, {"url": urls[DEMO], "lanes": trained_lanes}]
        timeout = 4 * self._size.stream_seconds + 180
        return {"seed": self._size.seed, "timeout": timeout, "targets": targets}

    async def _api_faults(self, share: float) -> None:
        if bool(share) is not self._faulty:
            self._faulty = bool(share)
            for name in self.watcher.faults:
                self.watcher.record_fault(name, "api_faults" if share else "api_well")
        self._faults = await self._site.api_faults(share, self._size.seed)
        self._log(f"{share:.0%} of the API requests get a fault")

    async def _run_in_order(self, *steps: tuple[str, Step]) -> None:
        for words, step in steps:
            began = time.monotonic()
            await step()
            self._log(f"{time.monotonic() - began:5.1f} s  {words}")

    async def _run_concurrently(self, *tracks: Awaitable[None]) -> None:
        async with asyncio.TaskGroup() as group:
            for track in tracks:
                group.create_task(_awaited(track))

    async def _finish(self) -> None:
        """Wait for the minimum number of requests and for all services to settle, then end the load."""

        async def enough() -> bool:
            late = time.monotonic() - self._began > self._size.max_seconds
            return late or self.driver.started >= self._size.requests

        self.changes.await_termination = True
        await until(enough, f"{self._size.requests} requests", 2 * self._size.max_seconds)
        for name in self.watcher.faults:
            await self.changes.wait_until_settled(name)
        self.counts = await self.driver.end()
        self._faults = await self._site.api_faults(0.0, self._size.seed)
        used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        own = sum(usage.ru_utime + usage.ru_stime for usage in used)
        self._cpu = {"cluster": round(self._site.cpu_seconds(), 1), "load_and_checks": round(own, 1)}

    def violations(self, *, strict: bool = False) -> list[tuple[str, WrongStatus]]:
        """Return service and interval for each status that was wrong for longer than allowed on this machine.

        With `strict`, the limits of a machine with a free core apply.
        """
        return [
            (name, wrong)
            for name in self.watcher.faults
            for wrong in self.watcher.wrong_statuses(name)
            if wrong.seconds > (wrong.allowed if strict else self.watcher.strain.allowed(wrong))
        ]

    def report(self) -> dict[str, Any]:
        """Return all counts and measurements of the run."""
        done = dict(self.changes.done)
        done["loaded_kills"] = sum(self.changes.kills[name] for name in (SLOW, DEMO))
        return {
            "load": self.counts,
            "changes": done,
            "api": self._faults,
            "truth": self.watcher.summary(),
            "seconds": round(time.monotonic() - self._began, 1),
            "cpu_seconds": self._cpu,
            "machine_load": os.getloadavg(),
        }


async def _awaited(track: Awaitable[None]) -> None:
    await track


def format_report(report: dict[str, Any]) -> Sequence[str]:
    """Return the lines of a readable summary of a report."""
    load = report["load"]
    lines = [
        f"{load['started']} requests, {load['streams']} of them streams; {load['failed']} failed",
        f"changes: {report['changes']}",
        f"API server: {report['api']}",
    ]
    lines += [f"status {kind}: {numbers}" for kind, numbers in report["truth"]["wrong"].items()]
    return lines
