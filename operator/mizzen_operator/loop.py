"""Watches enqueue keys, workers reconcile them. kopf watches; it handles, patches and remembers nothing."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import kopf

from mizzen_operator import labels
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube import Kube, KubeError, Ref, load_configuration
from mizzen_operator.metrics import Metrics
from mizzen_operator.queue import Key, WorkQueue
from mizzen_operator.reconcile import Reconciler
from mizzen_operator.watches import INACTIVITY_SECONDS, SERVER_SECONDS, Watches

logger = logging.getLogger(__name__)

RECONCILE_SECONDS = 60.0
WAIT_LIMIT_SECONDS = 5.0
"""How rarely a gateway is asked for an acknowledgement that does not come."""
LISTEN_SECONDS = 5.0
"""How often gateways are asked whether they still route as they did; no watch would tell."""
LISTEN_AT_ONCE = 32
API_KEYS_SECONDS = 5.0
"""How often Secrets with API keys are listed while a gateway finds them by their label."""
LOGIN_SECONDS = 1800
CHILDREN = ("pods", "services", "deployments.apps")


class Loop:
    """The leading replica's work."""

    def __init__(
        self,
        kube: Kube,
        reconciler: Reconciler,
        config: OperatorConfig,
        metrics: Metrics,
        watches: Watches,
    ) -> None:
        self._kube = kube
        self._reconciler = reconciler
        self._config = config
        self._metrics = metrics
        self._watches = watches
        self._queue = WorkQueue()
        self._began: dict[Key, float] = {}
        metrics.queue_depth.set_function(self._queue.depth)
        metrics.queue_age.set_function(self._queue.age)

    async def run(self, stop: asyncio.Event, started: asyncio.Event) -> None:
        """Work until `stop` is set; `started` is set once the watches begin."""
        workers = [
            asyncio.create_task(self._work(), name=f"worker {number}")
            for number in range(self._config.workers)
        ]
        regular = [
            asyncio.create_task(self._every(self._config.resync_seconds, self._resync), name="resync"),
            asyncio.create_task(self._every(LISTEN_SECONDS, self._listen), name="listen"),
            asyncio.create_task(self._every(API_KEYS_SECONDS, self._api_keys), name="API keys"),
        ]
        namespaces = [self._config.namespace] if self._config.namespace else []
        self._watches.begin()
        try:
            await kopf.operator(
                registry=self._registry(started),
                settings=settings(),
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
            )
        finally:
            for task in (*workers, *regular):
                task.cancel()
            await asyncio.gather(*workers, *regular, return_exceptions=True)

    def hung(self) -> list[Key]:
        """Services whose look takes far longer than its deadline."""
        limit = time.monotonic() - 2 * RECONCILE_SECONDS
        return [key for key, began in self._began.items() if began < limit]

    def _registry(self, started: asyncio.Event) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            configuration = await load_configuration()
            return kopf.AiohttpSession(
                server=configuration.host,
                aiohttp_session=await self._watches.session(configuration),
                expiration=datetime.now(UTC) + timedelta(seconds=LOGIN_SECONDS),
            )

        @kopf.on.startup(registry=registry)
        async def startup(**_: Any) -> None:
            started.set()

        @kopf.on.event(labels.GROUP, labels.VERSION, labels.PLURAL, registry=registry)
        async def service_changed(namespace: str | None, name: str | None, **_: Any) -> None:
            self._watches.event(labels.PLURAL)
            self._enqueue(namespace, name)

        async def child_changed(
            namespace: str | None, meta: Mapping[str, Any], resource: kopf.Resource, **_: Any
        ) -> None:
            self._watches.event(resource.plural)
            given = meta.get("labels", {})
            self._enqueue(namespace, given.get(labels.SERVICE))
            if namespace and labels.SERVICE not in given and labels.GATEWAY_LABEL in given:
                for key in self._reconciler.sharing(namespace):
                    self._queue.add(key)

        for child in CHILDREN:
            kopf.on.event(child, labels={labels.COMPONENT: kopf.PRESENT}, registry=registry)(child_changed)
        return registry

    def _enqueue(self, namespace: str | None, name: str | None) -> None:
        if namespace and name:
            self._queue.add(Key(namespace, name))

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            began = self._began[key] = time.monotonic()
            result = "error"
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
                self._queue.done(key)
                self._metrics.reconciles.labels(result).observe(time.monotonic() - began)

    async def _look(self, key: Key) -> str:
        outcome = await self._reconciler.reconcile(key)
        for other in outcome.others:
            self._queue.add(other)
        if outcome.failure is not None:
            self._failed(key, outcome.failure.reason, outcome.failure.message)
            return "failure"
        if outcome.waits:
            self._queue.retry(key, WAIT_LIMIT_SECONDS)
            return "waits"
        self._queue.forget(key)
        if not outcome.settled:
            self._queue.add(key, self._config.recheck_seconds)
        return "ok"

    def _failed(self, key: Key, reason: str, message: str) -> None:
        self._metrics.errors.labels(reason).inc()
        delay = self._queue.retry(key)
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
        """Look at every service once in a while: a lost event must not stay lost."""
        for body in await self._kube.list(Ref("InferenceService", self._config.namespace)):
            key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
            self._queue.add(key, random.uniform(0, self._config.resync_seconds * 0.1))

    async def _api_keys(self) -> None:
        """Look at the services whose gateway lacks a Secret with API keys, or has one too many."""
        for key in await self._reconciler.other_api_keys():
            self._queue.add(key)

    async def _listen(self) -> None:
        """Ask the gateways whether they route as they did; a service is looked at when they do not."""
        turns = asyncio.Semaphore(LISTEN_AT_ONCE)

        async def listen(key: Key) -> None:
            async with turns:
                if await self._reconciler.hears_news(key):
                    self._queue.add(key)

        await asyncio.gather(*map(listen, self._reconciler.heard()))


def settings() -> kopf.OperatorSettings:
    """kopf's settings: alone, without peers, events, finalizers or annotations."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.scanning.disabled = True
    chosen.watching.server_timeout = SERVER_SECONDS
    chosen.watching.connect_timeout = 10
    chosen.watching.inactivity_timeout = INACTIVITY_SECONDS
    chosen.networking.request_timeout = 30
    chosen.networking.error_backoffs = (0.2, 0.5, 1, 2, 5)
    chosen.networking.enforce_retry_after = True
    chosen.queueing.worker_limit = None
    chosen.process.ultimate_exiting_timeout = None
    for child in CHILDREN:
        chosen.watching.label_selectors[child] = labels.COMPONENT
    return chosen
