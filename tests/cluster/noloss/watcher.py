"""Gathers what `truth` compares: probes of services, their condition over a watch, the machine's strain."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from noloss.kube import SERVICES, Kube, condition
from noloss.truth import Beat, Fault, Probe, Shown, Strain, Wrong, summary, wrongs

BEAT_SECONDS = 0.1
MOST_UNDER_WAY = 200


class Watcher:
    """Probes services and watches what their status says, while the block runs."""

    def __init__(
        self, kube: Kube, namespace: str, urls: Mapping[str, str], *, every: float, deadline: float
    ) -> None:
        """Prepare.

        Args:
            kube: the API server, reached by a way without faults.
            namespace: of all services.
            urls: base URL (ending in /v1) of each service, by its name, which is its model's too.
            every: seconds between two probes of a service.
            deadline: seconds that a probe may take.
        """
        self._kube = kube
        self._namespace = namespace
        self._urls = urls
        self._every = every
        self._deadline = deadline
        self.probes: dict[str, list[Probe]] = {name: [] for name in urls}
        self.shown: dict[str, list[Shown]] = {name: [] for name in urls}
        self.faults: dict[str, list[Fault]] = {name: [] for name in urls}
        self.beats: list[Beat] = []
        self._latest: dict[str, Probe] = {}

    def fault(self, service: str, kind: str) -> None:
        """Note that something is done to a service now."""
        self.faults[service].append(Fault(time.monotonic(), kind))

    def available(self, service: str) -> bool | None:
        """What the status says now."""
        return self.shown[service][-1].available if self.shown[service] else None

    def works(self, service: str) -> bool:
        """What the newest probe that has ended says."""
        return service in self._latest and self._latest[service].good

    def wrongs(self, service: str) -> list[Wrong]:
        """When the status of a service was wrong so far."""
        return wrongs(self.probes[service], self.shown[service], self.faults[service])

    def summary(self) -> dict[str, Any]:
        """All services together, for a report."""
        found = [wrong for service in self._urls for wrong in self.wrongs(service)]
        probes = [probe for all_of_one in self.probes.values() for probe in all_of_one]
        late = sorted(beat.late for beat in self.beats)
        return {
            "probes": len(probes),
            "failed_probes": sum(not probe.good for probe in probes),
            "wrong": summary(found),
            "own_late_ms": {
                "p99": round(1e3 * late[int(0.99 * len(late))], 1),
                "max": round(1e3 * late[-1], 1),
            }
            if late
            else {},
            "idle_share": round(sum(beat.idle for beat in self.beats) / max(1, len(self.beats)), 3),
        }

    @property
    def strain(self) -> Strain:
        """What the machine has added to delays."""
        return Strain(self.beats)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watcher]:
        """Probe and watch while the block runs."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
            tasks += [asyncio.create_task(self._probe(http, name, url)) for name, url in self._urls.items()]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    async def _beat(self) -> None:
        before = _cpu_times()
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            idle, total = _cpu_times()
            share = (idle - before[0]) / max(1e-9, total - before[1])
            before = (idle, total)
            self.beats.append(Beat(time.monotonic(), max(0.0, time.monotonic() - due), share))

    async def _watch(self) -> None:
        path = SERVICES.format(self._namespace)
        while True:
            async for kind, thing in self._kube.watch(path):
                name = thing["metadata"]["name"]
                if name in self.shown:
                    said = None if kind == "DELETED" else condition(thing, "Available")
                    if not self.shown[name] or self.shown[name][-1].available is not said:
                        self.shown[name].append(Shown(time.monotonic(), said))

    async def _probe(self, http: aiohttp.ClientSession, name: str, url: str) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                if len(under_way) < MOST_UNDER_WAY:
                    task = asyncio.create_task(self._one(http, name, url))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                await asyncio.sleep(self._every)
        finally:
            for task in under_way:
                task.cancel()

    async def _one(self, http: aiohttp.ClientSession, name: str, url: str) -> None:
        body = {"model": name, "prompt": "probe", "max_tokens": 1, "temperature": 0}
        sent, good = time.monotonic(), False
        try:
            timeout = aiohttp.ClientTimeout(total=self._deadline)
            async with http.post(f"{url}/completions", json=body, timeout=timeout) as answer:
                good = answer.status == 200 and bool((await answer.json())["choices"][0]["finish_reason"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError):
            good = False
        self._latest[name] = Probe(sent, time.monotonic(), good)
        self.probes[name].append(self._latest[name])


def _cpu_times() -> tuple[float, float]:
    """Ticks of all cores: idle ones, and all."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
