"""What is really there: cluster objects as plain dataclasses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.service_ref import Subject
from mizzen_operator.kube.client import Kube, Ref
from mizzen_operator.kube.objects import holds, owned
from mizzen_operator.pods.container_state import UNSCHEDULABLE, loops, trouble, unschedulable, waits_to_begin
from mizzen_operator.pods.group import Group, groups
from mizzen_operator.resources.engine_args import node_of

MOST_PODS = 8
"""Of a group: `spec.parallelism.tensor` is no more."""


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """A gateway's pod.

    Attributes:
        answers: False while it hangs, though Kubernetes may still call it ready.
        reason: why it does not run, in Kubernetes' word; empty when it does, or goes.
        message: its own last words about that, the node's or the scheduler's.
        restarts: how often its containers were started again.
        failing: it cannot run, or ends again and again.
        waits: it has a node, and none of its containers was made yet.
        template: names the Deployment's template that it was made of.
    """

    name: str
    address: str
    ready: bool
    answers: bool = True
    reason: str = ""
    message: str = ""
    restarts: int = 0
    failing: bool = False
    waits: bool = False
    template: str = ""
    created: str = ""

    @property
    def words(self) -> str:
        """Which pod it is, and what is wrong with it."""
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        again = f", restarted {times}" if self.restarts else ""
        return f"{self.name}: {self.reason}{again}: {self.message}"


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that belongs to one service, and the gateway that it may share with others.

    Attributes:
        groups: its engine pods; those of a service of the same name that was deleted are left out.
        taken: names of all pods that carry the service's label, whoever owns them.
        strays: names and uids of its engine pods whose other labels somebody has removed or changed: nothing
            tells what they run, and gateways would route to them for ever.
        deployment: the gateway's Deployment, None when there is none.
        endpoint: the gateway's Service, None when there is none.
    """

    groups: tuple[Group, ...]
    taken: frozenset[str]
    gateways: tuple[GatewayPod, ...]
    deployment: Mapping[str, Any] | None
    endpoint: Mapping[str, Any] | None
    strays: tuple[tuple[str, str], ...] = ()

    @property
    def gateways_alike(self) -> bool:
        """No gateway is left of a former template, which might be ready again and serve as it did."""
        gateway = self.deployment or {"metadata": {}}
        status, generation = gateway.get("status", {}), gateway["metadata"].get("generation", 0)
        seen = status.get("observedGeneration", -1) >= generation
        return seen and status.get("updatedReplicas", 0) == status.get("replicas", 0)

    @property
    def settled(self) -> bool:
        """The gateway and every group that is there run as they should."""
        gateway = self.deployment or {}
        groups = all(group.routable and group.containers_ready for group in self.groups if group.live)
        return bool(gateway) and self._ready_gateways >= gateway["spec"].get("replicas", 1) and groups

    @property
    def progress(self) -> tuple[object, ...]:
        """How far the gateway and each group have come: another one once something has moved."""
        groups = ((one.name, one.node, one.containers_ready, one.routable) for one in self.groups)
        return (self._ready_gateways, *groups)

    @property
    def _ready_gateways(self) -> int:
        return (self.deployment or {}).get("status", {}).get("readyReplicas", 0)


async def observe(kube: Kube, service: Subject) -> Observed:
    """Read what belongs to a service, from the API server itself and not from a cache."""
    name = labels.SHARED_NAME if service.shared else labels.gateway_name(service.name)
    pods, fronts, deployment, endpoint = await asyncio.gather(
        kube.list(Ref("Pod", service.namespace), f"{labels.SERVICE}={service.name}"),
        _shared_pods(kube, service),
        kube.get(Ref("Deployment", service.namespace, name)),
        kube.get(Ref("Service", service.namespace, name)),
    )
    if not service.shared:
        fronts = [pod for pod in pods if _component(pod) == labels.GATEWAY]
    engines = [pod for pod in pods if _component(pod) == labels.ENGINE and owned(pod, service.uid)]
    strays = [pod["metadata"] for pod in engines if not _has_names(pod)]
    return Observed(
        groups=groups(service.name, [pod for pod in engines if _has_names(pod)]),
        taken=frozenset(pod["metadata"]["name"] for pod in pods),
        gateways=tuple(map(gateway_pod, fronts)),
        deployment=deployment,
        endpoint=endpoint,
        strays=tuple((one["name"], one["uid"]) for one in strays if "deletionTimestamp" not in one),
    )


async def _shared_pods(kube: Kube, service: Subject) -> list[dict[str, Any]]:
    """Pods of the gateway that a service shares with others."""
    if not service.shared:
        return []
    selector = f"{labels.GATEWAY_LABEL}={labels.SHARED},{labels.COMPONENT}={labels.GATEWAY}"
    return await kube.list(Ref("Pod", service.namespace), selector)


def gateway_pod(pod: Mapping[str, Any]) -> GatewayPod:
    """Read a gateway's pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    containers, leaves = status.get("containerStatuses", []), "deletionTimestamp" in meta
    reason, message = trouble(status, containers) if not leaves else ("", "")
    nowhere = unschedulable({one["type"]: one for one in status.get("conditions", [])})
    if nowhere and not leaves:
        reason, message = UNSCHEDULABLE, nowhere
    return GatewayPod(
        name=meta["name"],
        address=status.get("podIP", ""),
        ready=holds(status, "Ready") and not leaves,
        reason=reason,
        message=message,
        restarts=sum(entry.get("restartCount", 0) for entry in containers),
        failing=not leaves and loops(containers),
        waits=not leaves and waits_to_begin(containers),
        template=meta.get("labels", {}).get("pod-template-hash", ""),
        created=meta.get("creationTimestamp", ""),
    )


def _component(pod: Mapping[str, Any]) -> str:
    return pod["metadata"].get("labels", {}).get(labels.COMPONENT, "")


def _has_names(pod: Mapping[str, Any]) -> bool:
    """Whether an engine pod's labels tell what it runs, and no other thing than the arguments we gave it."""
    given = pod["metadata"]["labels"]
    place = (given.get(labels.RANK, "0"), given.get(labels.PODS, "1"))
    numbers = (given.get(labels.GROUP_INDEX, ""), given.get(labels.INCARNATION, ""), *place)
    if labels.REVISION not in given or not all(map(labels.is_number, numbers)):
        return False
    rank, pods = map(int, place)
    whole = labels.RANK in given or labels.PODS not in given
    return whole and rank < pods <= MOST_PODS and node_of(pod) in (None, (rank, pods))
