"""Writes the status of a service and the events of what has changed in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.key import Key
from mizzen_operator.api.service_ref import Subject
from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.client import Kube, KubeError, Ref
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.reconciler.degraded import Seen, unread_status
from mizzen_operator.rollout.state import Memory, recall
from mizzen_operator.status import builder
from mizzen_operator.status.events import Recorder, moves, news
from mizzen_operator.status.inputs import Facts


class StatusWriter:
    """The one writer of statuses."""

    def __init__(self, kube: Kube, metrics: Metrics) -> None:
        self._kube, self._metrics = kube, metrics
        self._recorder = Recorder(kube)
        self._true: dict[Key, frozenset[str]] = {}

    def forget(self, key: Key) -> None:
        """A service is gone."""
        self._count(key, frozenset())
        self._true.pop(key, None)
        self._metrics.fleet.forget(key)

    async def remember(self, service: InferenceService, memory: Memory) -> InferenceService:
        """Write failures that are new; to be done before the pods go that show them.

        A look may end in its middle, and the next one would find nothing to count.

        Returns:
            The service with the status that it has now.

        Raises:
            KubeError: the API server failed.
        """
        if not set(memory.failures) - set(recall(service.status).failures):
            return service
        known = {**service.status, "recentFailures": memory.as_status()["recentFailures"]}
        return replace(service, status=known) if await self._apply(service, known) else service

    async def write(self, key: Key, facts: Facts, *, counted: bool) -> None:
        """Write the status that follows from the facts, if it is another one, and tell of it.

        Args:
            key: the service's.
            facts: what it says.
            counted: the facts' memory counts the restarts of their groups; else `status.groups` stays as it
                was, for restarts in it are taken for counted.

        Raises:
            KubeError: the API server failed.
        """
        service = facts.service
        new = builder.build(facts, datetime.now(UTC))
        if not counted:
            new["groups"] = service.status.get("groups", [])
        deadline = service.rollout.progress_deadline
        await self._tell(key, service, new, service.groups, facts.groups, deadline)

    async def unread(self, key: Key, seen: Seen) -> None:
        """Write the status of a service whose spec is not acted on, as `write` does.

        Raises:
            KubeError: the API server failed.
        """
        new = unread_status(seen, datetime.now(UTC))
        await self._tell(key, seen.service, new, seen.service.wanted, seen.groups)

    async def _tell(
        self,
        key: Key,
        service: Subject,
        new: Mapping[str, Any],
        wanted: int,
        groups: Sequence[Group],
        deadline: int | None = None,
    ) -> None:
        self._count(key, frozenset(c["type"] for c in new["conditions"] if c["status"] == "True"))
        self._metrics.fleet.seen(key, wanted, groups, new, deadline)
        if builder.is_same(service.status, new) or not await self._apply(service, new):
            return
        old = service.status
        told = news(old.get("conditions", []), new["conditions"])
        await self._recorder.tell(service, told + moves(old.get("groups", []), new["groups"]))

    async def _apply(self, service: Subject, new: Mapping[str, Any]) -> bool:
        """Write a whole status, and take away what others have added; False when the service is gone."""
        meta = {"name": service.name, "namespace": service.namespace, "uid": service.uid}
        manifest = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": meta, "status": new}
        try:
            answer = await self._kube.apply(manifest, "status")
            patch = builder.without_others(answer.get("status", {}), new)
            if patch is not None:
                ref = Ref(labels.KIND, service.namespace, service.name, "status")
                await self._kube.patch(ref, {"metadata": {"uid": service.uid}, "status": patch})
        except KubeError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _count(self, key: Key, true: frozenset[str]) -> None:
        before = self._true.get(key, frozenset())
        for name in true - before:
            self._metrics.services.labels(name).inc()
        for name in before - true:
            self._metrics.services.labels(name).dec()
        self._true[key] = true
