"""What kopf watches for us goes into a cache each; it handles, patches and remembers nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import kopf

from mizzen_operator.api import labels
from mizzen_operator.informers.relist import CONNECT_SECONDS, Traffic
from mizzen_operator.informers.watch_health import INACTIVITY_SECONDS, SERVER_SECONDS, Watches
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.paged_list import ObjectList
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore, OnChange
from mizzen_operator.kube.transport import REQUEST_SECONDS, load_configuration

logger = logging.getLogger(__name__)

CACHED: Mapping[str, str] = {
    "InferenceService": "",
    "Pod": labels.COMPONENT,
    "Deployment": labels.COMPONENT,
    "Service": labels.COMPONENT,
}
"""Kinds that are followed, and the labels that their objects must have."""
RESOURCES: Mapping[str, tuple[str, str, str]] = {
    "InferenceService": (labels.GROUP, labels.VERSION, labels.PLURAL),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
    "Service": ("", "v1", "services"),
}
"""Their groups, versions and plurals."""
PAGE = 250
LOGIN_AGAIN_SECONDS = 5.0
WORKER_SECONDS = 2.0
"""How long kopf keeps the queue of an object of which nothing more comes."""
CATCH_UP_SECONDS = 3.0
"""How long events may be late before a watch is cut and taken up anew."""
STOP_SECONDS = 18
"""An operator that has not ended by then is killed: a little before the kubelet would (20 s)."""


class Caches:
    """The caches of all kinds that are followed, and what feeds them."""

    def __init__(self, namespace: str, watches: Watches, on_change: OnChange) -> None:
        """Follow the kinds in a namespace, or in all when it is empty."""
        self._namespace = namespace
        self._watches = watches
        self._on_change = on_change
        self._known: set[str] = set()
        """Kinds of which all that was there at first is held."""
        self._caches = {kind: ObjectStore(kind, self._tell) for kind in CACHED}
        listed = {RESOURCES[kind][2]: partial(_listed, cache) for kind, cache in self._caches.items()}
        self._traffic = Traffic(watches, listed)

    def get(self, kind: str) -> ObjectStore | None:
        """The cache of a kind; None for one that is not followed."""
        return self._caches.get(kind)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """Have kopf log in and watch by our session, and put what it hears of into the caches."""
        kopf.on.login(registry=registry, backoff=LOGIN_AGAIN_SECONDS)(self._log_in)
        for kind, resource in RESOURCES.items():
            kopf.on.event(*resource, id=f"{kind} changed", registry=registry, param=kind)(self._changed)

    async def close(self) -> None:
        """Break the connections that kopf watched by."""
        await self._traffic.close()

    async def catch_up(self, kube: KubeClient) -> None:
        """Wait until everything is held that the API server has now.

        A replica that takes over must not act on a state from before its predecessor's last writes. A watch
        whose events are late is begun anew.

        Args:
            kube: reads from the API server itself.

        Raises:
            KubeError: the API server failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for cache in self._caches.values():
                    group.create_task(self._catch_up(cache, kube))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _tell(self, kind: str, name: ObjectName, given: Mapping[str, str]) -> None:
        """Tell of a change; what a watch begins with has not changed, and is looked at by whoever leads."""
        if kind not in self._known:
            if not self._caches[kind].synced:
                return
            self._known.add(kind)
        self._on_change(kind, name, given)

    async def _log_in(self, **_: Any) -> kopf.AiohttpSession:
        configuration = await load_configuration()
        session = await self._traffic.session(configuration)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def _changed(self, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        cache = self._caches[param]
        self._watches.event(RESOURCES[param][2])
        if event["type"] == "DELETED":
            cache.remove_deleted(event["object"])
        else:
            cache.put_event(event["object"])

    async def _catch_up(self, cache: ObjectStore, kube: KubeClient) -> None:
        await cache.wait_until(lambda: cache.synced)
        while True:
            # Asked anew each time: what is gone by the time that the watch is back is told by no event.
            there = await kube.list_versions(ObjectRef(cache.kind, self._namespace), CACHED[cache.kind])
            try:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await cache.wait_until(partial(cache.is_up_to_date, there.objects, there.version))
                return
            except TimeoutError:
                logger.info("events of %s are late: the watch begins anew", cache.kind)
                self._traffic.watch_anew(RESOURCES[cache.kind][2])


def _listed(cache: ObjectStore, listing: ObjectList) -> None:
    cache.apply_list(listing.objects, listing.version)


def settings() -> kopf.OperatorSettings:
    """kopf's settings: alone, without peers, events, finalizers or annotations; nothing cluster-wide read."""
    chosen = kopf.OperatorSettings()
    chosen.posting.enabled = False
    chosen.peering.standalone = True
    chosen.scanning.disabled = True
    chosen.persistence.diffbase_storage = _NoEssence()
    chosen.persistence.progress_storage = _NoProgress()
    chosen.execution.max_workers = 1  # no handler runs in a thread
    chosen.queueing.idle_timeout = WORKER_SECONDS
    chosen.watching.server_timeout = SERVER_SECONDS
    chosen.watching.connect_timeout = CONNECT_SECONDS
    chosen.watching.inactivity_timeout = INACTIVITY_SECONDS
    chosen.watching.chunk_size = PAGE
    chosen.networking.request_timeout = REQUEST_SECONDS
    chosen.networking.error_backoffs = (0.2, 0.5, 1, 2, 5)
    chosen.networking.enforce_retry_after = True
    chosen.process.ultimate_exiting_timeout = STOP_SECONDS
    for kind, selector in CACHED.items():
        if selector:
            chosen.watching.label_selectors[RESOURCES[kind]] = selector
    return chosen


class _NoEssence(kopf.DiffBaseStorage):
    """Compares no object with what it was: nobody asks, and the copies are most of an event's cost."""

    def build(self, *, body: kopf.Body, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _NoProgress(kopf.ProgressStorage):
    """Writes nothing of kopf's own into an object."""

    def fetch(self, *, key: kopf.HandlerId, body: kopf.Body) -> kopf.ProgressRecord | None:
        return None

    def store(
        self, *, key: kopf.HandlerId, record: kopf.ProgressRecord, body: kopf.Body, patch: kopf.Patch
    ) -> None:
        pass

    def purge(self, *, key: kopf.HandlerId, body: kopf.Body, patch: kopf.Patch) -> None:
        pass

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        pass

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
