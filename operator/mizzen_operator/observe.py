"""What is really there: cluster objects as plain dataclasses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.kube import Kube, Ref

CRASH_LOOP = "CrashLoopBackOff"
FAILING_REASONS = frozenset(
    {
        CRASH_LOOP,
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


@dataclass(frozen=True, slots=True)
class Group:
    """One group's leading pod.

    Attributes:
        ended: it will not run again.
        resting: it has ended before it ever served, and so soon that its replacement waits.
        containers_ready: its engine says that it is ready.
        was_routable: the gateways acknowledged it at some time.
        routable: the readiness gate's value now.
        held: no gateway gives it requests, for it was not verified (yet).
        verified: it had to be verified, and was.
        refused_by: name of the verification that it failed last; empty when it failed none.
        refusal: what was wrong with its answer.
        unschedulable: why no node takes it; empty when one did, or nobody has tried yet.
        reason: why its container waits or ended last, such as `Error`; `CrashLoopBackOff` from the first
            restart until it serves for the first time; empty when it runs well.
        message: what its container said about that, such as the termination message.
    """

    name: str
    uid: str
    group: int
    revision: str
    incarnation: int
    terminating: bool = False
    ended: bool = False
    resting: bool = False
    containers_ready: bool = False
    was_routable: bool = False
    routable: bool = False
    held: bool = False
    verified: bool = False
    refused_by: str = ""
    refusal: str = ""
    node: str = ""
    unschedulable: str = ""
    restarts: int = 0
    created: str = ""
    reason: str = ""
    message: str = ""

    @property
    def live(self) -> bool:
        """It is there to stay."""
        return not (self.terminating or self.ended)

    @property
    def failing(self) -> bool:
        """Its container cannot run as it is."""
        return self.ended or self.reason in FAILING_REASONS


@dataclass(frozen=True, slots=True)
class GatewayPod:
    """A gateway's pod."""

    name: str
    address: str
    ready: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that belongs to one service, and the gateway that it may share with others.

    Attributes:
        groups: its engine pods; those of a service of the same name that was deleted are left out.
        taken: names of all pods that carry the service's label, whoever owns them.
        deployment: the gateway's Deployment, None when there is none.
        endpoint: the gateway's Service, None when there is none.
    """

    groups: tuple[Group, ...]
    taken: frozenset[str]
    gateways: tuple[GatewayPod, ...]
    deployment: Mapping[str, Any] | None
    endpoint: Mapping[str, Any] | None

    @property
    def settled(self) -> bool:
        """The gateway and every group that is there run as they should."""
        gateway = self.deployment or {}
        ready = gateway.get("status", {}).get("readyReplicas", 0)
        groups = all(group.routable and group.containers_ready for group in self.groups if group.live)
        return bool(gateway) and ready >= gateway["spec"].get("replicas", 1) and groups


FIRST_REST_SECONDS, MOST_REST_SECONDS = 2.0, 120.0


def rests(created: str, incarnation: int, now: datetime) -> bool:
    """Whether a pod that ended without ever having served was made too recently to be replaced.

    A node that turns pods away (no device left, an unfit host) does so at once, for ever: the pause doubles
    with each incarnation.
    """
    age = (now - datetime.fromisoformat(created)).total_seconds()
    return age < min(MOST_REST_SECONDS, FIRST_REST_SECONDS * 2 ** min(incarnation, 10))


async def observe(kube: Kube, service: InferenceService) -> Observed:
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
    return Observed(
        groups=tuple(group(pod) for pod in engines if _has_names(pod)),
        taken=frozenset(pod["metadata"]["name"] for pod in pods),
        gateways=tuple(map(gateway_pod, fronts)),
        deployment=deployment,
        endpoint=endpoint,
    )


async def _shared_pods(kube: Kube, service: InferenceService) -> list[dict[str, Any]]:
    """Pods of the gateway that a service shares with others."""
    if not service.shared:
        return []
    selector = f"{labels.GATEWAY_LABEL}={labels.SHARED},{labels.COMPONENT}={labels.GATEWAY}"
    return await kube.list(Ref("Pod", service.namespace), selector)


def owned(body: Mapping[str, Any], uid: str) -> bool:
    """Whether the controller of an object has this uid."""
    references = body["metadata"].get("ownerReferences", [])
    return any(reference.get("controller") and reference["uid"] == uid for reference in references)


def group(pod: Mapping[str, Any]) -> Group:
    """Read an engine's pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    reason, message = _trouble(status, containers)
    restarts = sum(entry.get("restartCount", 0) for entry in containers)
    was_routable = labels.ROUTABLE in conditions
    if reason and reason not in FAILING_REASONS and restarts and not was_routable:
        reason = CRASH_LOOP  # also while its next try runs: it has failed so far
    scheduled = conditions.get("PodScheduled", {})
    ended = status.get("phase") in ("Failed", "Succeeded")
    gates = {gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])}
    verdict = conditions.get(labels.VERIFIED, {})
    verified = verdict.get("status") == "True"
    refused_by, refusal = read_refusal(verdict.get("message", "")) if verdict and not verified else ("", "")
    incarnation, created = int(meta["labels"][labels.INCARNATION]), meta.get("creationTimestamp", "")
    return Group(
        name=meta["name"],
        uid=meta["uid"],
        group=int(meta["labels"][labels.GROUP_INDEX]),
        revision=meta["labels"][labels.REVISION],
        incarnation=incarnation,
        terminating="deletionTimestamp" in meta,
        ended=ended,
        resting=ended and not was_routable and rests(created, incarnation, datetime.now(UTC)),
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        was_routable=was_routable,
        routable=conditions.get(labels.ROUTABLE, {}).get("status") == "True",
        held=labels.VERIFIED in gates and not verified,
        verified=labels.VERIFIED in gates and verified,
        refused_by=refused_by,
        refusal=refusal,
        node=pod["spec"].get("nodeName", ""),
        unschedulable=scheduled.get("message", "") if scheduled.get("status") == "False" else "",
        restarts=restarts,
        created=created,
        reason=reason,
        message=message,
    )


def write_refusal(verification: str, refusal: str) -> str:
    """The message of a pod's condition that a verification has failed."""
    return f"{verification}: {refusal}"


def read_refusal(message: str) -> tuple[str, str]:
    """The verification's name, and what was wrong."""
    verification, _, refusal = message.partition(": ")
    return verification, refusal


def gateway_pod(pod: Mapping[str, Any]) -> GatewayPod:
    """Read a gateway's pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    ready = any(
        entry["type"] == "Ready" and entry["status"] == "True" for entry in status.get("conditions", [])
    )
    reason, message = _trouble(status, status.get("containerStatuses", []))
    return GatewayPod(
        name=meta["name"],
        address=status.get("podIP", ""),
        ready=ready and "deletionTimestamp" not in meta,
        reason=reason,
        message=message,
    )


def _component(pod: Mapping[str, Any]) -> str:
    return pod["metadata"].get("labels", {}).get(labels.COMPONENT, "")


def _has_names(pod: Mapping[str, Any]) -> bool:
    given = pod["metadata"]["labels"]
    numbers = (given.get(labels.GROUP_INDEX, ""), given.get(labels.INCARNATION, ""))
    return all(number.isdecimal() for number in numbers) and labels.REVISION in given


def _trouble(status: Mapping[str, Any], containers: list[Any]) -> tuple[str, str]:
    """Why a pod does not run: the container's own words where there are some, else the node's."""
    for entry in containers:
        state, last = entry.get("state", {}), entry.get("lastState", {})
        ended = state.get("terminated") or last.get("terminated") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in FAILING_REASONS:
            return waiting["reason"], ended.get("message") or _exit(ended) or waiting.get("message", "")
        if state.get("terminated") or (ended and not entry.get("ready")):
            return ended.get("reason", "Error"), ended.get("message") or _exit(ended)
    if status.get("phase") == "Failed":
        return status.get("reason", "Failed"), status.get("message", "")
    return "", ""


def _exit(ended: Mapping[str, Any]) -> str:
    return f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
