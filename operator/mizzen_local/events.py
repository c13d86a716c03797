# SPDX-License-Identifier: Apache-2.0
"""Writes Kubernetes Events, so that `kubectl describe` shows what the node did."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from typing import Any, Literal

import aiohttp

from mizzen_local.api import ApiClient, ApiError

log = logging.getLogger(__name__)
REPEAT_SECONDS = 60.0
MAX_REMEMBERED = 1000
MAX_PENDING_WRITES = 100


def timestamp() -> str:
    """Return the current time in the format of the Kubernetes API, in whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Recorder:
    """Writes Events in the background; of identical Events, at most one is written per minute."""

    def __init__(self, api: ApiClient, component: str, host: str) -> None:
        self._api = api
        self._component = component
        self._host = host
        self._last_written: dict[tuple[str, str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record(
        self,
        involved: dict[str, Any],
        reason: str,
        message: str,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> None:
        """Write an Event about an object, without waiting for the API server.

        Args:
            involved: the object; it must contain kind and apiVersion.
            reason: the Event's reason, in CamelCase.
            message: the Event's message, for people.
            kind: the Event's type.
        """
        metadata = involved["metadata"]
        key, now = (metadata["uid"], reason, message), time.monotonic()
        if now - self._last_written.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(self._tasks) >= MAX_PENDING_WRITES:
            log.warning("event dropped, too many writes are pending: %s %s", reason, message)
            return
        if len(self._last_written) >= MAX_REMEMBERED:
            self._last_written.clear()
        self._last_written[key] = now
        written_time = timestamp()
        event = {
            "metadata": {
                "name": f"{metadata['name']}.{time.time_ns():x}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": involved["apiVersion"],
                "kind": involved["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "reason": reason,
            "message": message[:1000],
            "type": kind,
            "count": 1,
            "firstTimestamp": written_time,
            "lastTimestamp": written_time,
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
        }
        task = asyncio.create_task(self._write(metadata["namespace"], event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, namespace: str, event: dict[str, Any]) -> None:
        try:
            await self._api.create(f"/api/v1/namespaces/{namespace}/events", event)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.info("event %s was not written: %s", event["reason"], error)
