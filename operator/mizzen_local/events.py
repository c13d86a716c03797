"""Kubernetes Events, so that `kubectl describe` tells what the node did."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from typing import Any, Literal

import aiohttp

from mizzen_local.api import Api, ApiError

log = logging.getLogger(__name__)
REPEAT_SECONDS = 60.0
MOST_REMEMBERED = 1000
MOST_IN_FLIGHT = 100


def now() -> str:
    """The time as the API writes it, whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Recorder:
    """Writes events without being waited for; the same event is written once a minute at most."""

    def __init__(self, api: Api, component: str, host: str) -> None:
        self._api = api
        self._component = component
        self._host = host
        self._written: dict[tuple[str, str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record(
        self, about: dict[str, Any], reason: str, message: str, kind: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        """Write an event about an object.

        Args:
            about: the object; its kind and apiVersion must be there.
            reason: one CamelCase word.
            message: a sentence.
            kind: the event's type.
        """
        metadata = about["metadata"]
        key, moment = (metadata["uid"], reason, message), time.monotonic()
        if moment - self._written.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        if len(self._tasks) >= MOST_IN_FLIGHT:
            log.warning("event left out, too many are on their way: %s %s", reason, message)
            return
        if len(self._written) >= MOST_REMEMBERED:
            self._written.clear()
        self._written[key] = moment
        stamp = now()
        event = {
            "metadata": {
                "name": f"{metadata['name']}.{time.time_ns():x}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "reason": reason,
            "message": message[:1000],
            "type": kind,
            "count": 1,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
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
