# SPDX-License-Identifier: Apache-2.0
"""Reads the objects of one service, from the store or the API server, into plain values.

This is the first step of every reconcile. It writes nothing, and the values contain no reference to a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.service_ref import ServiceRef
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.first_seen import FirstSeen
from mizzen_operator.kube.objects import is_condition_true, is_owned_by
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.pods.container_state import (
    is_crash_looping,
    is_creating_containers,
    read_problem,
    unschedulable_message,
)
from mizzen_operator.pods.group import NO_AGES, Group, read_groups
from mizzen_operator.resources.engine_args import rank_from_arguments
from mizzen_operator.resources.option_fields import translate_gateway_options

MAX_GROUP_PODS = 8
"""Maximum number of pods per group. The CRD caps `spec.parallelism.tensor` at 8."""


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """State of one gateway pod.

    Attributes:
        ready: its condition Ready is True, and it is not terminating.
        responsive: False if it hangs, even if its condition Ready is still True.
        reason: Kubernetes' reason why it does not run; empty if it runs or is terminating.
        message: message that belongs to `reason`, from the container, the kubelet or the scheduler.
        restarts: number of restarts of its containers.
        failing: it cannot run, or it crashes repeatedly.
        creating_containers: it has a node, but none of its containers has been created.
        template_hash: hash of the Deployment's pod template that it was created from.
        created: creation time, as Kubernetes writes it.
        age: seconds since this process first saw the pod.
    """

    name: str
    address: str
    ready: bool
    responsive: bool = True
    reason: str = ""
    message: str = ""
    restarts: int = 0
    failing: bool = False
    creating_containers: bool = False
    template_hash: str = ""
    created: str = ""
    age: float = 0.0

    @property
    def description(self) -> str:
        """Name of the pod with its problem, for a condition's message."""
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        restarted = f", restarted {times}" if self.restarts else ""
        return f"{self.name}: {self.reason}{restarted}: {self.message}"


@dataclass(frozen=True, slots=True)
class ObservedState:
    """The objects that belong to one service, including those of a gateway that it shares.

    Attributes:
        groups: groups of the service's engine pods, without pods of a deleted service of the same name.
        taken_names: names of all pods with the service's label, including pods with other owners.
        gateways: pods of the service's gateway.
        deployment: the gateway's Deployment; None if it does not exist.
        gateway_service: the gateway's Service; None if it does not exist.
        mislabelled_pods: names and uids of engine pods whose labels of revision, group or rank were removed
            or changed. They belong to no group, but gateways would route to them forever.
    """

    groups: tuple[Group, ...]
    taken_names: frozenset[str]
    gateways: tuple[GatewayPod, ...]
    deployment: Mapping[str, Any] | None
    gateway_service: Mapping[str, Any] | None
    mislabelled_pods: tuple[tuple[str, str], ...] = ()

    @property
    def gateway_rollout_complete(self) -> bool:
        """Whether all gateway pods, ready or not, have the current template.

        A pod with an older template that is not ready could become ready again.
        """
        deployment = self.deployment or {"metadata": {}}
        status, generation = deployment.get("status", {}), deployment["metadata"].get("generation", 0)
        observed = status.get("observedGeneration", -1) >= generation
        return observed and status.get("updatedReplicas", 0) == status.get("replicas", 0)

    @property
    def settled(self) -> bool:
        """Whether the gateway and every existing group run as they should."""
        deployment = self.deployment or {}
        serving = all(group.routable and group.containers_ready for group in self.groups if group.live)
        return bool(deployment) and self._ready_gateways >= deployment["spec"].get("replicas", 1) and serving

    @property
    def progress_marker(self) -> tuple[object, ...]:
        """Value that changes whenever the gateway or a group makes progress."""
        groups = ((group.name, group.node, group.containers_ready, group.routable) for group in self.groups)
        return (self._ready_gateways, *groups)

    @property
    def _ready_gateways(self) -> int:
        return (self.deployment or {}).get("status", {}).get("readyReplicas", 0)


async def observe(kube: KubeClient, service: ServiceRef, first_seen: FirstSeen) -> ObservedState:
    """Read the objects that belong to a service.

    Args:
        kube: client of the API server; it reads watched kinds from its store if it has one.
        service: the service; its spec may be invalid.
        first_seen: times at which this process first saw the service's pods; it is updated.

    Raises:
        KubeError: the API server failed.
    """
    name = child_names.SHARED_GATEWAY if service.shares_gateway else child_names.gateway_name(service.name)
    pods, gateway_pods, deployment, gateway_service = await asyncio.gather(
        kube.list(ObjectRef("Pod", service.namespace), f"{labels.SERVICE}={service.name}"),
        _list_shared_gateway_pods(kube, service),
        kube.get(ObjectRef("Deployment", service.namespace, name)),
        kube.get(ObjectRef("Service", service.namespace, name)),
    )
    if not service.shares_gateway:
        gateway_pods = [pod for pod in pods if _component(pod) == labels.GATEWAY]
    engines = [pod for pod in pods if _component(pod) == labels.ENGINE and is_owned_by(pod, service.uid)]
    uids = [pod["metadata"]["uid"] for pod in (*pods, *gateway_pods)]
    ages = first_seen.ages(ServiceKey(service.namespace, service.name), uids)
    mislabelled = [pod["metadata"] for pod in engines if not _has_valid_labels(pod)]
    return ObservedState(
        groups=read_groups(service.name, [pod for pod in engines if _has_valid_labels(pod)], ages),
        taken_names=frozenset(pod["metadata"]["name"] for pod in pods),
        gateways=tuple(read_gateway_pod(pod, ages) for pod in gateway_pods),
        deployment=deployment,
        gateway_service=gateway_service,
        mislabelled_pods=tuple(
            (meta["name"], meta["uid"]) for meta in mislabelled if "deletionTimestamp" not in meta
        ),
    )


async def _list_shared_gateway_pods(kube: KubeClient, service: ServiceRef) -> list[dict[str, Any]]:
    """Return the pods of a service's shared gateway; an empty list if its gateway is dedicated."""
    if not service.shares_gateway:
        return []
    selector = f"{labels.GATEWAY_LABEL}={labels.SHARED},{labels.COMPONENT}={labels.GATEWAY}"
    return await kube.list(ObjectRef("Pod", service.namespace), selector)


def read_gateway_pod(pod: Mapping[str, Any], ages: Mapping[str, float] = NO_AGES) -> GatewayPod:
    """Read a gateway pod; `ages` are the seconds since this process first saw each pod, by uid."""
    meta, status = pod["metadata"], pod.get("status", {})
    containers, terminating = status.get("containerStatuses", []), "deletionTimestamp" in meta
    reason, message = read_problem(status, containers) if not terminating else ("", "")
    unschedulable = unschedulable_message({entry["type"]: entry for entry in status.get("conditions", [])})
    if unschedulable and not terminating:
        reason, message = reasons.UNSCHEDULABLE, unschedulable
    return GatewayPod(
        name=meta["name"],
        address=status.get("podIP", ""),
        ready=is_condition_true(status, "Ready") and not terminating,
        reason=reason,
        message=translate_gateway_options(message),
        restarts=sum(container.get("restartCount", 0) for container in containers),
        failing=not terminating and is_crash_looping(containers),
        creating_containers=not terminating and is_creating_containers(status),
        template_hash=meta.get("labels", {}).get("pod-template-hash", ""),
        created=meta.get("creationTimestamp", ""),
        age=ages.get(meta.get("uid", ""), 0.0),
    )


def _component(pod: Mapping[str, Any]) -> str:
    return pod["metadata"].get("labels", {}).get(labels.COMPONENT, "")


def _has_valid_labels(pod: Mapping[str, Any]) -> bool:
    """Return whether an engine pod's labels are complete and match its container's arguments."""
    pod_labels = pod["metadata"]["labels"]
    rank_and_size = (pod_labels.get(labels.RANK, "0"), pod_labels.get(labels.PODS, "1"))
    numbers = (pod_labels.get(labels.GROUP_INDEX, ""), pod_labels.get(labels.INCARNATION, ""), *rank_and_size)
    if labels.REVISION not in pod_labels or not all(map(labels.is_valid_number, numbers)):
        return False
    rank, size = map(int, rank_and_size)
    has_rank = labels.RANK in pod_labels or labels.PODS not in pod_labels
    return has_rank and rank < size <= MAX_GROUP_PODS and rank_from_arguments(pod) in (None, (rank, size))
