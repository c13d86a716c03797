# SPDX-License-Identifier: Apache-2.0
"""Builds the status of a service in degraded mode, in which the spec is not applied.

Degraded mode applies if the spec cannot be parsed, if the operator fails on it, or if the service is being
deleted. Only the existing groups and gateway are reported; status fields that depend on the spec keep their
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mizzen_operator.api import child_names, reasons
from mizzen_operator.kube.errors import BlockingReason
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod
from mizzen_operator.status.builder import condition_entry, group_entries
from mizzen_operator.status.pod_conditions import (
    Condition,
    available_condition,
    gateway_ready_condition,
    scheduled_condition,
)


@dataclass(frozen=True, slots=True)
class InvalidService:
    """A service whose spec is not parsed: only the fields that all releases store in the same way.

    Attributes:
        name: name of the service.
        namespace: namespace of the service.
        uid: uid of the service.
        generation: generation of the spec.
        status: the status that was written last; empty if no status was written.
        shares_gateway: the service shares its namespace's gateway.
        wanted_groups: number of groups wanted: `spec.replicas`, or else the number in the status; 0 if the
            service is being deleted.
        deleting: the service is being deleted, so the condition Failed stays False.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    status: Mapping[str, Any]
    shares_gateway: bool
    wanted_groups: int
    deleting: bool


@dataclass(frozen=True, slots=True)
class DegradedSnapshot:
    """Observed state of a service in degraded mode.

    Attributes:
        service: the service.
        failure: reason why its spec is not applied.
        groups: its groups, with the current values of their readiness gates.
        gateways: pods of its gateway.
        deployment: the gateway's Deployment; empty if it does not exist.
        settled: the gateway and every existing group run as they should.
    """

    service: InvalidService
    failure: BlockingReason
    groups: Sequence[Group]
    gateways: Sequence[GatewayPod]
    deployment: Mapping[str, Any]
    settled: bool


def read_invalid_service(body: Mapping[str, Any]) -> InvalidService:
    """Read an InferenceService without parsing its spec."""
    meta, status = body["metadata"], body.get("status") or {}
    deleting = "deletionTimestamp" in meta
    replicas = 0 if deleting else body.get("spec", {}).get("replicas")
    return InvalidService(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta["generation"],
        status=status,
        shares_gateway=uses_shared_gateway(body),
        wanted_groups=replicas if isinstance(replicas, int) else status.get("replicas", 0),
        deleting=deleting,
    )


def uses_shared_gateway(body: Mapping[str, Any]) -> bool:
    """Return whether a service shares its namespace's gateway; the status decides if the spec is silent."""
    gateway = body.get("spec", {}).get("gateway")
    if isinstance(gateway, dict) and "mode" in gateway:
        return gateway["mode"] == "Shared"
    return f"//{child_names.SHARED_GATEWAY}." in body.get("status", {}).get("url", "")


def degraded_status(snapshot: DegradedSnapshot, now: datetime) -> dict[str, Any]:
    """Return the complete status; it equals the previous one if nothing has changed.

    Fields and conditions that depend on the spec keep their values and their observed generation.

    Args:
        snapshot: the observed state.
        now: current time in UTC; it becomes the transition time of conditions whose status changes.
    """
    service, live = snapshot.service, [group for group in snapshot.groups if group.live]
    previous = {entry["type"]: entry for entry in service.status.get("conditions", [])}
    entries = [
        condition_entry(condition, previous.get(condition.type, {}), service.generation, now)
        for condition in _conditions(snapshot)
    ]
    written = {entry["type"] for entry in entries}
    kept = {key: value for key, value in service.status.items() if key != "updateRevision"}
    return {
        **kept,
        "observedGeneration": service.generation,
        "replicas": len(live),
        "readyReplicas": sum(group.containers_ready for group in live),
        "updatedReplicas": 0,  # the spec's revision cannot be computed
        "availableReplicas": sum(group.routed for group in live),
        "groups": group_entries(snapshot.groups),
        "conditions": [*entries, *(entry for kind, entry in previous.items() if kind not in written)],
    }


def _conditions(snapshot: DegradedSnapshot) -> list[Condition]:
    failure, previous = snapshot.failure, snapshot.service.status.get("conditions", [])
    spec = snapshot.deployment.get("spec", {})
    return [
        Condition(reasons.READY, False, failure.reason, failure.message),
        _available(snapshot, {entry["type"]: entry for entry in previous}),
        Condition(reasons.PROGRESSING, False, failure.reason, failure.message),
        scheduled_condition(snapshot.groups),
        gateway_ready_condition(snapshot.deployment, snapshot.gateways, spec.get("replicas", 1)),
        Condition(reasons.FAILED, not snapshot.service.deleting, failure.reason, failure.message),
        *(
            Condition(entry["type"], False, failure.reason, failure.message)
            for entry in previous
            if entry["type"] == reasons.SCALING_ACTIVE
        ),
    ]


def _available(snapshot: DegradedSnapshot, previous: Mapping[str, Mapping[str, Any]]) -> Condition:
    condition = available_condition(snapshot.gateways, snapshot.groups, scaled_to_zero=False)
    entry = previous.get(reasons.AVAILABLE, {})
    # A name conflict persists, because the gateway is not updated in degraded mode.
    if condition.status and entry.get("reason") == reasons.NAME_CONFLICT:
        return Condition(reasons.AVAILABLE, False, reasons.NAME_CONFLICT, entry["message"])
    return condition
