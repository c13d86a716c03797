# SPDX-License-Identifier: Apache-2.0
"""Writes the status of services, and reports its changes as Events and metrics.

No other module writes a status. A status is applied only if it differs from the stored one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.service_ref import ServiceRef
from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.rollout.state import RolloutState, load_state
from mizzen_operator.status.builder import build_status, cleanup_patch, is_same_status
from mizzen_operator.status.degraded_status import DegradedSnapshot, degraded_status
from mizzen_operator.status.events import (
    EventRecorder,
    avoided_node_events,
    condition_events,
    moved_group_events,
)
from mizzen_operator.status.inputs import StatusInputs
from mizzen_operator.status.lifecycle_events import lifecycle_events
from mizzen_operator.status.service_metrics import ServiceMetrics


class StatusWriter:
    """Writes the statuses of all services."""

    def __init__(self, kube: KubeClient, metrics: Metrics, service_metrics: ServiceMetrics) -> None:
        self._kube, self._metrics, self._service_metrics = kube, metrics, service_metrics
        self._recorder = EventRecorder(kube)
        self._true_conditions: dict[ServiceKey, frozenset[str]] = {}

    def forget(self, key: ServiceKey) -> None:
        """Drop the metrics of a deleted service."""
        self._count_conditions(key, frozenset())
        self._true_conditions.pop(key, None)
        self._service_metrics.forget(key)

    async def write_failures(self, service: InferenceService, state: RolloutState) -> InferenceService:
        """Write new failures of groups to the status, before the failed pods are deleted.

        If the reconcile failed after the deletion, the next one could no longer observe these failures.

        Returns:
            The service with the status that is stored now.

        Raises:
            KubeError: the API server failed.
        """
        if not set(state.failures) - set(load_state(service.status).failures):
            return service
        status = {**service.status, "recentFailures": state.as_status()["recentFailures"]}
        return replace(service, status=status) if await self._apply(service, status) else service

    async def write(self, key: ServiceKey, inputs: StatusInputs, *, restarts_counted: bool) -> None:
        """Build a status, and write it if it has changed; also update the metrics and write Events.

        Args:
            key: the service's key.
            inputs: inputs of the status.
            restarts_counted: `inputs.rollout` includes the restarts of `inputs.groups`. Otherwise the old
                `status.groups` is kept, because restarts recorded there are treated as already counted.

        Raises:
            KubeError: the API server failed.
        """
        service = inputs.service
        status = build_status(inputs, datetime.now(UTC))
        if not restarts_counted:
            status["groups"] = service.status.get("groups", [])
        self._service_metrics.update(
            key,
            wanted=service.groups,
            groups=inputs.groups,
            status=status,
            deadline=service.rollout.progress_deadline,
        )
        await self._write(key, service, status)

    async def write_degraded(self, key: ServiceKey, snapshot: DegradedSnapshot) -> None:
        """Build the status of a service in degraded mode, and write it if it has changed.

        Also update the metrics and write Events.

        Raises:
            KubeError: the API server failed.
        """
        service = snapshot.service
        status = degraded_status(snapshot, datetime.now(UTC))
        self._service_metrics.update(key, wanted=service.wanted_groups, groups=snapshot.groups, status=status)
        await self._write(key, service, status)

    async def _write(self, key: ServiceKey, service: ServiceRef, status: Mapping[str, Any]) -> None:
        conditions: Sequence[Mapping[str, Any]] = status["conditions"]
        self._count_conditions(
            key, frozenset(entry["type"] for entry in conditions if entry["status"] == "True")
        )
        if is_same_status(service.status, status) or not await self._apply(service, status):
            return
        previous = service.status
        events = condition_events(previous.get("conditions", []), conditions)
        events += moved_group_events(previous.get("groups", []), status["groups"])
        events += avoided_node_events(previous.get("avoidedNodes", []), status.get("avoidedNodes", []))
        events += lifecycle_events(previous, status)
        await self._recorder.record(service, events)

    async def _apply(self, service: ServiceRef, status: Mapping[str, Any]) -> bool:
        """Apply a complete status and remove foreign fields; return False if the service no longer exists."""
        meta = {"name": service.name, "namespace": service.namespace, "uid": service.uid}
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": meta,
            "status": status,
        }
        try:
            answer = await self._kube.apply(manifest, "status")
            patch = cleanup_patch(answer.get("status", {}), status)
            if patch is not None:
                ref = ObjectRef(labels.KIND, service.namespace, service.name, "status")
                await self._kube.patch(ref, {"metadata": {"uid": service.uid}, "status": patch})
        except KubeError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _count_conditions(self, key: ServiceKey, true: frozenset[str]) -> None:
        """Update the metric that counts, for each type of condition, the services in which it is True.

        Args:
            key: key of the service whose conditions may have changed.
            true: types of its conditions that are True.
        """
        previous = self._true_conditions.get(key, frozenset())
        for name in true - previous:
            self._metrics.services.labels(name).inc()
        for name in previous - true:
            self._metrics.services.labels(name).dec()
        self._true_conditions[key] = true
