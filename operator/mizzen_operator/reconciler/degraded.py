"""A service whose spec the operator cannot act on: its status tells what runs of it, and nothing is changed.

It was stored under another release's CRD, or the operator itself fails on it, or it is being deleted. Groups
and gateways that are there serve on as they are; they may come and go, and that is all that is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.gateway_client.routing_table import Acknowledgements
from mizzen_operator.gateway_client.watch import GatewayListener
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.errors import Failure
from mizzen_operator.kube.refs import Ref
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod, observe
from mizzen_operator.readiness.gates import ReadinessGates
from mizzen_operator.resources.secret_data import read
from mizzen_operator.status.builder import condition_entry, group_entries
from mizzen_operator.status.pod_conditions import Condition, available_condition, gateway_ready_condition, scheduled_condition


@dataclass(frozen=True, slots=True)
class InvalidService:
    """What is known of a service without its spec.

    Attributes:
        generation: of the spec that is not acted on.
        status: the status that was written last; empty before the first.
        shared: whether it shares its namespace's gateway.
        wanted: groups that its spec seems to ask for; none of one that is being deleted.
        deleting: it is being deleted, which is no failure.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    status: Mapping[str, Any]
    shared: bool
    wanted: int
    deleting: bool


@dataclass(frozen=True, slots=True)
class DegradedSnapshot:
    """A look at such a service.

    Attributes:
        failure: why its spec is not acted on.
        settled: everything that is there runs as it should.
    """

    service: InvalidService
    failure: Failure
    groups: Sequence[Group]
    gateways: Sequence[GatewayPod]
    deployment: Mapping[str, Any]
    settled: bool


def read_invalid_service(body: Mapping[str, Any]) -> InvalidService:
    """Take of a service what every release stores alike."""
    meta, status = body["metadata"], body.get("status") or {}
    deleting = "deletionTimestamp" in meta
    wanted = 0 if deleting else body.get("spec", {}).get("replicas")
    return InvalidService(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta["generation"],
        status=status,
        shared=uses_shared_gateway(body),
        wanted=wanted if isinstance(wanted, int) else status.get("replicas", 0),
        deleting=deleting,
    )


def uses_shared_gateway(body: Mapping[str, Any]) -> bool:
    """Whether a service shares its namespace's gateway, by its spec or by where the status says it is."""
    gateway = body.get("spec", {}).get("gateway")
    if isinstance(gateway, dict) and "mode" in gateway:
        return gateway["mode"] == "Shared"
    return f"//{child_names.SHARED_GATEWAY}." in body.get("status", {}).get("url", "")


class DegradedReconciler:
    """Looks at services without changing anything but what their pods' gates and their status say."""

    def __init__(self, kube: Kube, gateways: GatewayListener, gates: ReadinessGates) -> None:
        self._kube, self._gateways, self._gates = kube, gateways, gates

    async def observe(self, key: ServiceKey, service: InvalidService, failure: Failure) -> DegradedSnapshot:
        """See what there is of a service.

        Raises:
            KubeError: the API server failed.
        """
        observed = await observe(self._kube, service)
        acknowledged = await self._ask(key, service, observed.gateways)
        return DegradedSnapshot(
            service=service,
            failure=failure,
            groups=await self._gates.update_routable(service, observed.groups, acknowledged),
            gateways=[
                replace(pod, answers=pod.address not in acknowledged.silent) for pod in observed.gateways
            ],
            deployment=observed.deployment or {},
            settled=observed.settled,
        )

    async def _ask(self, key: ServiceKey, service: InvalidService, gateways: Sequence[GatewayPod]) -> Acknowledgements:
        name = child_names.SHARED_GATEWAY if service.shared else child_names.root_keys_secret(service.name)
        secret = await self._kube.get(Ref("Secret", service.namespace, name))
        try:
            token = read(secret or {"data": {}, "metadata": {"name": name}}, labels.ADMIN_TOKEN)
        except ValueError:  # as with a service that can be read: without a token nothing is known of routes
            self._gateways.forget(key)
            return Acknowledgements()
        return await self._gateways.ask(gateways, token, key)


def degraded_status(seen: DegradedSnapshot, now: datetime) -> dict[str, Any]:
    """The whole status: what was known before, and what is there now; equal to the last when nothing changed.

    What follows from the spec stays as it was, at the generation that it was observed at.
    """
    service, live = seen.service, [group for group in seen.groups if group.live]
    before = {entry["type"]: entry for entry in service.status.get("conditions", [])}
    new = [condition_entry(one, before.get(one.type, {}), service.generation, now) for one in _conditions(seen)]
    said = {entry["type"] for entry in new}
    known = {key: value for key, value in service.status.items() if key != "updateRevision"}
    return {
        **known,
        "observedGeneration": service.generation,
        "replicas": len(live),
        "readyReplicas": sum(group.containers_ready for group in live),
        "updatedReplicas": 0,  # of what revision this spec would be, nobody knows
        "availableReplicas": sum(group.routed for group in live),
        "groups": group_entries(seen.groups),
        "conditions": [*new, *(entry for kind, entry in before.items() if kind not in said)],
    }


def _conditions(seen: DegradedSnapshot) -> list[Condition]:
    failure, before = seen.failure, seen.service.status.get("conditions", [])
    spec = seen.deployment.get("spec", {})
    return [
        Condition("Ready", False, failure.reason, failure.message),
        _available(seen, {entry["type"]: entry for entry in before}),
        Condition("Progressing", False, failure.reason, failure.message),
        scheduled_condition(seen.groups),
        gateway_ready_condition(seen.deployment, seen.gateways, spec.get("replicas", 1)),
        Condition("Failed", not seen.service.deleting, failure.reason, failure.message),
        *(
            Condition(entry["type"], False, failure.reason, failure.message)
            for entry in before
            if entry["type"] == "ScalingActive"
        ),
    ]


def _available(seen: DegradedSnapshot, before: Mapping[str, Mapping[str, Any]]) -> Condition:
    found = available_condition(seen.gateways, seen.groups, asleep=False)
    old = before.get("Available", {})
    if found.status and old.get("reason") == "NameConflict":  # that stays as it is with the gateway
        return Condition("Available", False, "NameConflict", old["message"])
    return found
