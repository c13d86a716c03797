# SPDX-License-Identifier: Apache-2.0
"""Feeds watch events of kopf into the stores of `kube/store.py`.

`main.py` registers the informers with kopf. kopf serves only to watch: it patches and persists nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import kopf

from mizzen_operator.api import labels
from mizzen_operator.informers.relist import CONNECT_SECONDS, KopfSessionInterceptor
from mizzen_operator.informers.watch_health import INACTIVITY_SECONDS, SERVER_SECONDS, WatchHealth
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.paged_list import ObjectList
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore, OnChange
from mizzen_operator.kube.transport import REQUEST_SECONDS, load_configuration

logger = logging.getLogger(__name__)

LABEL_SELECTORS: Mapping[str, str] = {
    "InferenceService": "",
    "Pod": labels.COMPONENT,
    "Deployment": labels.COMPONENT,
    "Service": labels.COMPONENT,
}
"""Label selector with which each kind is watched; empty if all objects of the kind are watched."""
RESOURCES: Mapping[str, tuple[str, str, str]] = {
    "InferenceService": (labels.GROUP, labels.VERSION, labels.PLURAL),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
    "Service": ("", "v1", "services"),
}
"""Group, version and plural of each watched kind."""
PAGE = 250
LOGIN_RETRY_SECONDS = 5.0
WORKER_IDLE_SECONDS = 2.0
"""kopf drops an object's queue when the object has had no event for this time."""
CATCH_UP_SECONDS = 3.0
"""Time for which `catch_up` waits for events before it restarts the watch."""
STOP_SECONDS = 18
"""Time after which kopf kills a replica that has not stopped; slightly less than the kubelet's 20 s."""


class Informers:
    """The stores of all watched kinds, and the watches that feed them."""

    def __init__(self, namespace: str, health: WatchHealth, on_change: OnChange) -> None:
        """Create empty stores; `register` makes kopf feed them.

        Args:
            namespace: namespace to watch; all namespaces if it is empty.
            health: records events and failures of the watches.
            on_change: called for each change after the initial list.
        """
        self._namespace = namespace
        self._health = health
        self._on_change = on_change
        self._synced_kinds: set[str] = set()
        """Kinds whose initial list has arrived completely."""
        self._stores = {kind: ObjectStore(kind, self._notify) for kind in LABEL_SELECTORS}
        listed = {RESOURCES[kind][2]: partial(_apply_list, store) for kind, store in self._stores.items()}
        self._interceptor = KopfSessionInterceptor(health, listed)

    def get(self, kind: str) -> ObjectStore | None:
        """Return the store of a kind; None if the kind is not watched."""
        return self._stores.get(kind)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """Register handlers that make kopf use our session, and that feed kopf's events into the stores."""
        kopf.on.login(registry=registry, backoff=LOGIN_RETRY_SECONDS)(self._open_session)
        for kind, resource in RESOURCES.items():
            kopf.on.event(*resource, id=f"{kind} changed", registry=registry, param=kind)(self._on_event)

    async def close(self) -> None:
        """Close the connections of kopf's watches."""
        await self._interceptor.close()

    async def catch_up(self, kube: KubeClient) -> None:
        """Wait until the stores contain everything that the API server holds now.

        A replica that becomes the leader must not act on a state older than its predecessor's last writes. A
        watch with late events is restarted.

        Args:
            kube: client that reads from the API server itself.

        Raises:
            KubeError: the API server failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for store in self._stores.values():
                    group.create_task(self._catch_up(store, kube))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _notify(self, kind: str, name: ObjectName, object_labels: Mapping[str, str]) -> None:
        """Call `on_change`, but not for the initial list: a new leader reconciles every service anyway."""
        if kind not in self._synced_kinds:
            if not self._stores[kind].synced:
                return
            self._synced_kinds.add(kind)
        self._on_change(kind, name, object_labels)

    async def _open_session(self, **_: Any) -> kopf.AiohttpSession:
        configuration = await load_configuration()
        session = await self._interceptor.create_session(configuration)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def _on_event(self, event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        store = self._stores[param]
        self._health.record_event(RESOURCES[param][2])
        if event["type"] == "DELETED":
            store.remove_deleted(event["object"])
        else:
            store.put_event(event["object"])

    async def _catch_up(self, store: ObjectStore, kube: KubeClient) -> None:
        await store.wait_until(lambda: store.synced)
        while True:
            # List again each time: no event reports objects that are deleted before the watch is restarted.
            listed = await kube.list_versions(
                ObjectRef(store.kind, self._namespace), LABEL_SELECTORS[store.kind]
            )
            try:
                async with asyncio.timeout(CATCH_UP_SECONDS):
                    await store.wait_until(partial(store.is_up_to_date, listed.objects, listed.version))
                return
            except TimeoutError:
                logger.info("events of %s are late: restarting the watch", store.kind)
                self._interceptor.restart_watch(RESOURCES[store.kind][2])


def _apply_list(store: ObjectStore, object_list: ObjectList) -> None:
    store.apply_list(object_list.objects, object_list.version)


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: no peering, Events, finalizers or annotations, and no cluster-wide reads."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NullDiffBase()
    settings.persistence.progress_storage = _NullProgress()
    settings.execution.max_workers = 1  # no handler needs a thread
    settings.queueing.idle_timeout = WORKER_IDLE_SECONDS
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.connect_timeout = CONNECT_SECONDS
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.error_backoffs = (0.2, 0.5, 1, 2, 5)
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = STOP_SECONDS
    for kind, selector in LABEL_SELECTORS.items():
        if selector:
            settings.watching.label_selectors[RESOURCES[kind]] = selector
    return settings


class _NullDiffBase(kopf.DiffBaseStorage):
    """Storage for kopf that keeps no last-handled state of objects, because no handler uses diffs.

    Copying an object's state would take most of the time in which an event is handled.
    """

    def build(self, *, body: kopf.Body, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


class _NullProgress(kopf.ProgressStorage):
    """Storage for kopf that keeps no progress of handlers, so that no object gets annotations."""

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
