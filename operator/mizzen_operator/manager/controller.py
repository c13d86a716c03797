# SPDX-License-Identifier: Apache-2.0
"""The controller: object changes enqueue services, and workers reconcile them.

`main.py` runs it while this replica is the leader. A standby only records recent changes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.manager.fair_queueing import ConcurrencyLimiter
from mizzen_operator.manager.workqueue import WorkQueue
from mizzen_operator.metrics import Metrics
from mizzen_operator.reconciler.reconciler import Reconciler

logger = logging.getLogger(__name__)

RECONCILE_TIMEOUT_SECONDS = 60.0
MAX_REQUEUE_BACKOFF_SECONDS = 5.0
"""Maximum requeue delay if a service waits for a change without an event, such as the end of a back-off."""
API_KEYS_POLL_SECONDS = 5.0
"""Interval at which Secrets with API keys are listed while any gateway finds its keys by label."""
RECENT_SECONDS = 60.0
"""Maximum age of a change that a new leader handles first, because the old leader may not have handled it."""


class Controller:
    """Queues and reconciles services. Runs on the leader; a standby only records recent changes."""

    def __init__(
        self,
        kube: KubeClient,
        reconciler: Reconciler,
        config: OperatorConfig,
        metrics: Metrics,
        background_tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Create a controller; it runs the `background_tasks` for as long as it reconciles."""
        self._kube = kube
        self._reconciler = reconciler
        self._config = config
        self._metrics = metrics
        self._queue = WorkQueue(ConcurrencyLimiter(config.workers))
        self._started: dict[ServiceKey, float] = {}
        self._is_leader = False
        self._recently_changed: dict[ServiceKey, float] = {}
        """Services that changed while another replica led, with the time of the last change, oldest first."""
        self._background_tasks = background_tasks
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.queue_depth.set_function(self._queue.depth)
        metrics.queue_age.set_function(self._queue.oldest_wait)

    async def run(self, stop: asyncio.Event) -> None:
        """Reconcile services until `stop` is set, then wait for the reconciles in progress.

        It first queues every service. Services that changed recently, or whose spec is newer than the one in
        their status, come before the others.

        Raises:
            KubeError: the services cannot be listed.
            Exception: because of a bug, no reconciles can be started or a background task has ended.
        """
        self._is_leader = True
        recent, self._recently_changed = self._recently_changed, {}
        since = time.monotonic() - RECENT_SECONDS
        for key, observed in (await self._list_services()).items():
            self._queue.add(key, low_priority=observed and recent.get(key, since) <= since)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._dispatch(), name="dispatch"),
            asyncio.create_task(
                self._run_periodically(self._config.resync_seconds, self._resync), name="resync"
            ),
            asyncio.create_task(
                self._run_periodically(API_KEYS_POLL_SECONDS, self._enqueue_changed_api_keys), name="API keys"
            ),
            *(asyncio.create_task(work()) for work in self._background_tasks),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises if the task has failed: a new process then starts over
            self._is_leader = False
            self._queue.close()  # the next leader queues every service anyway
            await self._idle.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def hung_services(self) -> list[ServiceKey]:
        """Return the services whose reconcile has been running for more than twice its timeout."""
        limit = time.monotonic() - 2 * RECONCILE_TIMEOUT_SECONDS
        return [key for key, began in self._started.items() if began < limit]

    def on_object_changed(self, kind: str, name: ObjectName, object_labels: Mapping[str, str]) -> None:
        """Queue the services that own a changed object.

        Args:
            kind: kind of the object.
            name: name of the object.
            object_labels: labels of the object.
        """
        if kind == labels.KIND:
            self.enqueue(ServiceKey(*name))
        elif service := object_labels.get(labels.SERVICE):
            self.enqueue(ServiceKey(name.namespace, service))
        elif labels.GATEWAY_LABEL in object_labels:
            for key in self._reconciler.services_sharing_gateway(name.namespace):
                self.enqueue(key)

    def enqueue(self, key: ServiceKey) -> None:
        """Queue a service; while another replica leads, only record that the service has changed."""
        if self._is_leader:
            self._queue.add(key)
            return
        now = time.monotonic()
        self._recently_changed.pop(key, None)
        self._recently_changed[key] = now
        while (oldest := next(iter(self._recently_changed))) != key and self._recently_changed[
            oldest
        ] < now - RECENT_SECONDS:
            del self._recently_changed[oldest]

    async def _dispatch(self) -> None:
        """Start each reconcile when it is due and has a slot; if cancelled, cancel all running reconciles."""
        async with asyncio.TaskGroup() as group:
            while True:
                key = await self._queue.get()
                self._started[key] = time.monotonic()
                self._idle.clear()
                group.create_task(self._run_reconcile(key), name="reconcile")

    async def _run_reconcile(self, key: ServiceKey) -> None:
        began, result = self._started[key], "error"
        try:
            async with asyncio.timeout(RECONCILE_TIMEOUT_SECONDS):
                result = await self._reconcile(key)
        except KubeError as error:
            self._requeue_failed(key, error.reason or str(error.code), str(error))
        except TimeoutError:
            self._requeue_failed(key, reasons.TIMEOUT, f"took longer than {RECONCILE_TIMEOUT_SECONDS} s")
        except Exception:
            logger.exception("%s/%s: unexpected error", key.namespace, key.name)
            self._requeue_failed(key, reasons.UNEXPECTED, "see the error logged before")
        finally:
            del self._started[key]
            if not self._started:
                self._idle.set()
            self._queue.done(key)
            self._metrics.reconciles.labels(result).observe(time.monotonic() - began)

    async def _reconcile(self, key: ServiceKey) -> str:
        reconcile_result = await self._reconciler.reconcile(key)
        for other in reconcile_result.also_enqueue:
            self._queue.add(other)
        if reconcile_result.requeue_after is not None:
            self._queue.add(key, reconcile_result.requeue_after)
        if reconcile_result.failure is not None:
            self._requeue_failed(key, reconcile_result.failure.reason, reconcile_result.failure.message)
            return "failure"
        if reconcile_result.requeue_backoff:
            self._queue.requeue_with_backoff(key, MAX_REQUEUE_BACKOFF_SECONDS)
            return "waits"
        self._queue.reset_backoff(key)
        if not reconcile_result.settled:
            self._queue.add(key, self._config.recheck_seconds, low_priority=True)
        return "ok"

    def _requeue_failed(self, key: ServiceKey, reason: str, message: str) -> None:
        self._metrics.errors.labels(reason).inc()
        delay = self._queue.requeue_failed(key)
        logger.warning("%s/%s: %s: %s; retrying in %.1f s", *key, reason, message, delay)

    async def _run_periodically(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Run a function periodically; errors are logged and do not end the loop."""
        while True:
            await asyncio.sleep(seconds * random.uniform(0.9, 1.0))
            try:
                await work()
            except KubeError as error:
                logger.warning("cannot list objects: %s; retrying later", error)
            except Exception:
                logger.exception("unexpected error in a periodic task")

    async def _resync(self) -> None:
        """Queue every service after a random delay of up to `resync_seconds`, to find unreported changes."""
        for key in await self._list_services():
            self._queue.add(key, random.uniform(0, self._config.resync_seconds), low_priority=True)

    async def _list_services(self) -> dict[ServiceKey, bool]:
        """Return, for the key of each service, whether the service's status describes its current spec."""
        bodies = await self._kube.list(ObjectRef(labels.KIND, self._config.namespace))
        return {
            ServiceKey(meta["namespace"], meta["name"]): body.get("status", {}).get("observedGeneration")
            == meta["generation"]
            for body in bodies
            for meta in (body["metadata"],)
        }

    async def _enqueue_changed_api_keys(self) -> None:
        """Queue the services whose gateway mounts an outdated set of Secrets with API keys."""
        for key in await self._reconciler.services_with_changed_api_keys():
            self._queue.add(key)
