"""Changes enqueue keys, looks reconcile them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName
from mizzen_operator.manager.fair_queueing import Turns
from mizzen_operator.manager.workqueue import WorkQueue
from mizzen_operator.metrics import Metrics
from mizzen_operator.reconciler.reconciler import Reconciler

logger = logging.getLogger(__name__)

RECONCILE_SECONDS = 60.0
WAIT_LIMIT_SECONDS = 5.0
"""How rarely a service is looked at of which a group rests."""
API_KEYS_SECONDS = 5.0
"""How often Secrets with API keys are listed while a gateway finds them by their label."""
RECENT_SECONDS = 60.0
"""What has changed so shortly before this replica leads may have been nobody's any more: it goes first."""


class Loop:
    """The leading replica's work; while another leads, what changes is remembered for a while alone."""

    def __init__(
        self,
        kube: KubeClient,
        reconciler: Reconciler,
        config: OperatorConfig,
        metrics: Metrics,
        besides: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Work by a configuration; `besides` is what runs as long as this does."""
        self._kube = kube
        self._reconciler = reconciler
        self._config = config
        self._metrics = metrics
        self._queue = WorkQueue(Turns(config.workers))
        self._began: dict[ServiceKey, float] = {}
        self._leads = False
        self._recent: dict[ServiceKey, float] = {}
        """Services that have changed while another replica led, the latest last."""
        self._besides = besides
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.queue_depth.set_function(self._queue.depth)
        metrics.queue_age.set_function(self._queue.age)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; looks under way end first.

        It begins with a look at every service, of what has changed of late and what is not observed first.

        Raises:
            KubeError: the services cannot be listed.
            Exception: looks can no longer be begun, or what runs besides has ended, by a fault of our own.
        """
        self._leads = True
        recent, self._recent = self._recent, {}
        since = time.monotonic() - RECENT_SECONDS
        for key, observed in (await self._services()).items():
            self._queue.add(key, aside=observed and recent.get(key, since) <= since)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._work(), name="looks"),
            asyncio.create_task(self._every(self._config.resync_seconds, self._resync), name="resync"),
            asyncio.create_task(self._every(API_KEYS_SECONDS, self._api_keys), name="API keys"),
            *(asyncio.create_task(work()) for work in self._besides),
            asyncio.create_task(stop.wait(), name="stop"),
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # of what failed, a fresh process does what this one would leave undone
            self._leads = False
            self._queue.close()  # what looks under way ask for is the next leader's
            await self._idle.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def hung(self) -> list[ServiceKey]:
        """Services whose look takes far longer than its deadline."""
        limit = time.monotonic() - 2 * RECONCILE_SECONDS
        return [key for key, began in self._began.items() if began < limit]

    def changed(self, kind: str, name: ObjectName, given: Mapping[str, str]) -> None:
        """Enqueue the services that an object belongs to, which has changed.

        Args:
            kind: its kind.
            name: its name.
            given: its labels.
        """
        if kind == labels.KIND:
            self.enqueue(ServiceKey(*name))
        elif service := given.get(labels.SERVICE):
            self.enqueue(ServiceKey(name.namespace, service))
        elif labels.GATEWAY_LABEL in given:
            for key in self._reconciler.services_sharing_gateway(name.namespace):
                self.enqueue(key)

    def enqueue(self, key: ServiceKey) -> None:
        """Have a service looked at soon."""
        if self._leads:
            self._queue.add(key)
            return
        now = time.monotonic()
        self._recent.pop(key, None)
        self._recent[key] = now
        while (oldest := next(iter(self._recent))) != key and self._recent[oldest] < now - RECENT_SECONDS:
            del self._recent[oldest]

    async def _work(self) -> None:
        """Begin looks as they are due and have their turn; ends them when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                key = await self._queue.get()
                self._began[key] = time.monotonic()
                self._idle.clear()
                group.create_task(self._one(key), name="look")

    async def _one(self, key: ServiceKey) -> None:
        began, result = self._began[key], "error"
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                result = await self._look(key)
        except KubeError as error:
            self._failed(key, error.reason or str(error.code), str(error))
        except TimeoutError:
            self._failed(key, "Timeout", f"it took longer than {RECONCILE_SECONDS} s")
        except Exception:
            logger.exception("%s/%s: unexpected error", key.namespace, key.name)
            self._failed(key, "Unexpected", "see above")
        finally:
            del self._began[key]
            if not self._began:
                self._idle.set()
            self._queue.done(key)
            self._metrics.reconciles.labels(result).observe(time.monotonic() - began)

    async def _look(self, key: ServiceKey) -> str:
        outcome = await self._reconciler.reconcile(key)
        for other in outcome.also_enqueue:
            self._queue.add(other)
        if outcome.requeue_after is not None:
            self._queue.add(key, outcome.requeue_after)
        if outcome.failure is not None:
            self._failed(key, outcome.failure.reason, outcome.failure.message)
            return "failure"
        if outcome.requeue_backoff:
            self._queue.retry(key, WAIT_LIMIT_SECONDS)
            return "waits"
        self._queue.forget(key)
        if not outcome.settled:
            self._queue.add(key, self._config.recheck_seconds, aside=True)
        return "ok"

    def _failed(self, key: ServiceKey, reason: str, message: str) -> None:
        self._metrics.errors.labels(reason).inc()
        delay = self._queue.fail(key)
        logger.warning("%s/%s: %s: %s; again in %.1f s", *key, reason, message, delay)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again; what goes wrong is logged, and does not end it."""
        while True:
            await asyncio.sleep(seconds * random.uniform(0.9, 1.0))
            try:
                await work()
            except KubeError as error:
                logger.warning("cannot list what is there: %s", error)
            except Exception:
                logger.exception("unexpected error")

    async def _resync(self) -> None:
        """Look at every service once in a while, spread over that time: for what no watch tells of."""
        for key in await self._services():
            self._queue.add(key, random.uniform(0, self._config.resync_seconds), aside=True)

    async def _services(self) -> dict[ServiceKey, bool]:
        """All services, and whether their status is of their spec as it is."""
        found = await self._kube.list(ObjectRef(labels.KIND, self._config.namespace))
        return {
            ServiceKey(meta["namespace"], meta["name"]): body.get("status", {}).get("observedGeneration")
            == meta["generation"]
            for body in found
            for meta in (body["metadata"],)
        }

    async def _api_keys(self) -> None:
        """Look at the services whose gateway lacks a Secret with API keys, or has one too many."""
        for key in await self._reconciler.services_with_changed_api_keys():
            self._queue.add(key)
