# SPDX-License-Identifier: Apache-2.0
"""The routing table as the admin API returns it, and long polls that wait until the table changes."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the parent of several processes imports no services
    from mizzen.gateway.auth.authentication import TenantRegistry
    from mizzen.gateway.engines.engine_client import EngineClient
    from mizzen.gateway.services import Service

MAX_WAITERS = 64
"""Maximum number of admin requests that wait for a change; further requests are answered at once."""
LONGEST_WAIT_SECONDS = 600.0
DISCONNECT_CHECK_SECONDS = 15.0
"""Interval at which a waiting request checks that its client is still connected."""
COMPARE_PAUSE_SECONDS = 0.1
"""Minimum time between two comparisons of the table with the one that a waiting request's client knows."""


class TableWatch:
    """Wakes waiting requests when the routing table may have changed."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Event] = set()
        self._closed = False

    def notify(self) -> None:
        """Wake all waiting requests, because the table may have changed; cheap if no request waits."""
        for event in self._waiting:
            event.set()

    def close(self) -> None:
        """End all waits; later calls of `wait` return at once."""
        self._closed = True
        self.notify()

    async def wait(
        self, seconds: float, changed: Callable[[], bool], disconnected: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Wait until `changed` returns True; return whether it did.

        The wait also ends when `seconds` have passed, the client disconnects, or the gateway closes. If too
        many requests wait already, this returns at once.

        Args:
            seconds: longest time to wait; capped at `LONGEST_WAIT_SECONDS`.
            changed: returns whether the table differs from the one that the client knows.
            disconnected: returns whether the client has disconnected.
        """
        if len(self._waiting) >= MAX_WAITERS or self._closed:
            return changed()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(seconds, LONGEST_WAIT_SECONDS)
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            while not changed():
                left = deadline - loop.time()
                if self._closed or left <= 0 or await disconnected():
                    return False
                if await _wait_event(event, min(left, DISCONNECT_CHECK_SECONDS)) and not changed():
                    event.clear()
                    await asyncio.sleep(COMPARE_PAUSE_SECONDS)
            return True
        finally:
            self._waiting.discard(event)


async def _wait_event(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def table_version(services: Iterable[Service], synced: bool, tenants: TenantRegistry) -> str:
    """Return the version of a routing table: tables with equal versions are equal, except for the load."""
    parts = [str(synced), str(_api_keys(tenants))]
    for service in services:
        parts.append(f"{service.name} {service.waiting_requests > 0} {service.table.key_names}")
        parts += sorted(
            f"{engine.discovered.uid} {engine.name} {engine.state} {engine.revision} {engine.key_names}"
            f" {engine.problem} {_quantization(engine)} {_task(engine)} {engine.accepts_images}"
            for engine in service.table
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def routing_table(services: Iterable[Service], synced: bool, tenants: TenantRegistry) -> dict[str, Any]:
    """Return the routing table of some services as a JSON object, with the status of the API keys.

    `synced` is true once services and engines are known.
    """
    chosen = list(services)
    return {
        "synced": synced,
        "version": table_version(chosen, synced, tenants),
        "apiKeys": _api_keys(tenants),
        "keys": sorted({name for service in chosen for name in service.table.key_names}),
        "waiting": sum(service.waiting_requests for service in chosen),
        "queued": sum(len(service.admission) for service in chosen),
        "inFlight": sum(service.admission.in_flight for service in chosen),
        "idleSeconds": round(min((service.admission.idle_seconds for service in chosen), default=0.0), 1),
        "engines": [
            {
                "service": service.name,
                "name": engine.name,
                "uid": engine.discovered.uid,
                "state": engine.state,
                "revision": engine.revision,
                "quantization": _quantization(engine),
                "task": _task(engine),
                "expertGroups": _expert_groups(engine),
                "images": engine.accepts_images,
                "requests": engine.requests,
                "problem": engine.problem,
                "protocol": engine.link.protocol,
                "otherProtocol": engine.other_protocol,
                "keys": engine.key_names,
                "stats": _stats(engine),
            }
            for service in chosen
            for engine in service.table
        ],
    }


def _api_keys(tenants: TenantRegistry) -> dict[str, Any] | None:
    """Return the number of valid API keys and any problem with the key files; None if no key is needed."""
    return None if tenants.keyless else {"inForce": tenants.key_count, "problem": tenants.problem}


def _quantization(engine: EngineClient) -> str:
    """Return the description of an engine's quantized weights; empty for others, and if it is unknown."""
    return engine.link.welcome.quantization if engine.link.welcome else ""


def _expert_groups(engine: EngineClient) -> int:
    """Return the number of an engine's groups of ranks with different experts; 0 if it is unknown."""
    return engine.link.welcome.expert_groups if engine.link.welcome else 0


def _stats(engine: EngineClient) -> dict[str, int] | None:
    """Return the load in an engine's latest report; None before its first report."""
    stats = engine.link.stats
    if stats is None:
        return None
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "waitingTokens": stats.waiting_tokens,
        "pagesTotal": stats.pages_total,
        "pagesUsed": stats.pages_used,
    }


def parse_wait(text: str | None) -> float:
    """Return the seconds in the query parameter `wait`; 0 if it is missing or not a number."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_WAIT_SECONDS) if math.isfinite(seconds) else 0.0


def _task(engine: EngineClient) -> str:
    """Return the task of an engine's model: generate, embed or classify; empty if it is unknown."""
    return engine.properties.task if engine.text_model is not None else ""
