# SPDX-License-Identifier: Apache-2.0
"""Collects the inputs of `truth`: probes, observed statuses and faults of services, and machine samples."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from noloss.kube import SERVICES, Kube, condition
from noloss.truth import (
    Fault,
    MachineSample,
    MachineStrain,
    ObservedStatus,
    Probe,
    WrongStatus,
    find_wrong_statuses,
    summary,
)

SAMPLE_SECONDS = 0.1
MAX_PENDING_PROBES = 200


class Watcher:
    """Probes services and watches their condition Available during the block of `running`."""

    def __init__(
        self, kube: Kube, namespace: str, urls: Mapping[str, str], *, every: float, deadline: float
    ) -> None:
        """Watch the services of one namespace.

        Args:
            kube: client that reaches the API server without the fault proxy.
            namespace: namespace of all services.
            urls: base URL of each service, ending in /v1, by the service's name, which its model has, too.
            every: seconds between two probes of a service.
            deadline: seconds after which an unanswered probe counts as failed.
        """
        self._kube = kube
        self._namespace = namespace
        self._urls = urls
        self._every = every
        self._deadline = deadline
        self.probes: dict[str, list[Probe]] = {name: [] for name in urls}
        self.observed: dict[str, list[ObservedStatus]] = {name: [] for name in urls}
        self.faults: dict[str, list[Fault]] = {name: [] for name in urls}
        self.machine_samples: list[MachineSample] = []
        self._latest: dict[str, Probe] = {}

    def record_fault(self, service: str, kind: str) -> None:
        """Record that a fault is injected into a service now."""
        self.faults[service].append(Fault(time.monotonic(), kind))

    def available(self, service: str) -> bool | None:
        """Return the latest observed value of the condition Available."""
        return self.observed[service][-1].available if self.observed[service] else None

    def works(self, service: str) -> bool:
        """Return whether the service's most recently completed probe succeeded."""
        return service in self._latest and self._latest[service].good

    def wrong_statuses(self, service: str) -> list[WrongStatus]:
        """Return the intervals so far in which the status of a service was wrong."""
        return find_wrong_statuses(self.probes[service], self.observed[service], self.faults[service])

    def summary(self) -> dict[str, Any]:
        """Return totals of all services for the report."""
        wrong_statuses = [wrong for service in self._urls for wrong in self.wrong_statuses(service)]
        probes = [probe for all_of_one in self.probes.values() for probe in all_of_one]
        late = sorted(sample.late for sample in self.machine_samples)
        return {
            "probes": len(probes),
            "failed_probes": sum(not probe.good for probe in probes),
            "wrong": summary(wrong_statuses),
            "own_late_ms": {
                "p99": round(1e3 * late[int(0.99 * len(late))], 1),
                "max": round(1e3 * late[-1], 1),
            }
            if late
            else {},
            "idle_share": round(
                sum(sample.idle for sample in self.machine_samples) / max(1, len(self.machine_samples)), 3
            ),
        }

    @property
    def strain(self) -> MachineStrain:
        """The relaxation of limits that follows from the machine samples so far."""
        return MachineStrain(self.machine_samples)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watcher]:
        """Probe the services, watch them and sample the machine during the block."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            tasks = [asyncio.create_task(self._sample_machine()), asyncio.create_task(self._watch())]
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

    async def _sample_machine(self) -> None:
        before = _cpu_times()
        while True:
            due = time.monotonic() + SAMPLE_SECONDS
            await asyncio.sleep(SAMPLE_SECONDS)
            idle, total = _cpu_times()
            share = (idle - before[0]) / max(1e-9, total - before[1])
            before = (idle, total)
            self.machine_samples.append(
                MachineSample(time.monotonic(), max(0.0, time.monotonic() - due), share)
            )

    async def _watch(self) -> None:
        path = SERVICES.format(self._namespace)
        while True:
            async for kind, obj in self._kube.watch(path):
                name = obj["metadata"]["name"]
                if name in self.observed:
                    available = None if kind == "DELETED" else condition(obj, "Available")
                    if not self.observed[name] or self.observed[name][-1].available is not available:
                        self.observed[name].append(ObservedStatus(time.monotonic(), available))

    async def _probe(self, http: aiohttp.ClientSession, name: str, url: str) -> None:
        pending: set[asyncio.Task[None]] = set()
        try:
            while True:
                if len(pending) < MAX_PENDING_PROBES:
                    task = asyncio.create_task(self._send_probe(http, name, url))
                    pending.add(task)
                    task.add_done_callback(pending.discard)
                await asyncio.sleep(self._every)
        finally:
            for task in pending:
                task.cancel()

    async def _send_probe(self, http: aiohttp.ClientSession, name: str, url: str) -> None:
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
    """Return the idle and the total clock ticks of all cores."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
