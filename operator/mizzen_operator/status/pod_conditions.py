"""Conditions that follow from pods and from the gateway's Deployment alone, whatever a spec asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition: whether it holds, and why."""

    type: str
    status: bool
    reason: str
    message: str


def of(some: int, every: int, what: str) -> str:
    """A count of groups in words."""
    return f"{some} of {every} groups {what}"


def available(gateways: Sequence[GatewayPod], groups: Sequence[Group], asleep: bool) -> Condition:
    """Whether a request would succeed now, as far as that depends on who runs.

    Args:
        gateways: pods of the service's gateway.
        groups: its groups.
        asleep: no group is wanted.
    """
    if not any(pod.ready for pod in gateways):
        return Condition("Available", False, "NoGatewayReady", "no gateway takes requests")
    if not any(pod.ready and pod.answers for pod in gateways):
        return Condition("Available", False, "NoGatewayAnswers", "every gateway that is ready hangs")
    if not any(group.routed for group in groups):
        reason = "ScaledToZero" if asleep else "NoGroupServes"
        return Condition("Available", False, reason, "no group takes requests")
    return Condition("Available", True, "Serving", "a request is answered")


def scheduled(groups: Sequence[Group], wanted: int = 0) -> Condition:
    """Whether every group that is wanted, or there to stay, has a node.

    Args:
        groups: the service's.
        wanted: how many there should be at least.
    """
    live = [group for group in groups if group.live]
    for group in live:
        if group.unschedulable:
            return Condition("Scheduled", False, "Unschedulable", f"{group.name}: {group.unschedulable}")
    placed, every = sum(bool(group.node) for group in live), max(wanted, len(live))
    if not every:
        return Condition("Scheduled", True, "NoGroupsWanted", "no group is there, and none is wanted")
    if placed < len(live):
        return Condition("Scheduled", False, "Pending", of(placed, every, "have a node"))
    if placed < every:
        words = f"{of(placed, every, 'have a node')}; no pod is made of the others yet"
        return Condition("Scheduled", False, "NotMade", words)
    return Condition("Scheduled", True, "AllGroupsHaveNodes", of(placed, every, "have a node"))


def gateway_ready(
    deployment: Mapping[str, Any], pods: Sequence[GatewayPod], wanted: int, secrets: Sequence[str] = ()
) -> Condition:
    """Whether the gateway runs with all its pods, all of them up to date.

    Args:
        deployment: the gateway's, empty when there is none.
        pods: the gateway's.
        wanted: how many there should be.
        secrets: names of Secrets without which a pod waits.
    """

    def not_ready(reason: str, message: str) -> Condition:
        return Condition("GatewayReady", False, reason, message)

    if not deployment:
        return not_ready("GatewayMissing", "the gateway's Deployment is not there")
    meta, status = deployment["metadata"], deployment.get("status", {})
    updated, ready = status.get("updatedReplicas", 0), status.get("readyReplicas", 0)
    if status.get("observedGeneration", 0) < meta.get("generation", 0):
        return not_ready("GatewayRollingOut", "the gateway's Deployment has changed")
    if updated < wanted or ready < wanted or status.get("replicas", 0) > wanted:
        refused = _refused(status)
        if refused:
            return not_ready("GatewayRejected", refused)
        trouble = [pod for pod in pods if pod.reason and not pod.ready]
        if trouble:
            return not_ready("GatewayFailing", max(trouble, key=_newest).words)
        counts = f"{ready} of {wanted} gateway pods are ready, {updated} are up to date"
        if secrets:  # a pod says nothing while one is missing
            counts += f"; they need the Secrets {', '.join(secrets)} of spec.gateway"
        return not_ready("GatewayRollingOut" if updated < wanted else "GatewayNotReady", counts)
    hangs = next((pod.name for pod in pods if pod.ready and not pod.answers), "")
    if hangs:
        return not_ready("GatewayHangs", f"{hangs} does not answer, though Kubernetes still calls it ready")
    words = f"{ready} of {wanted} gateway pods are ready"
    return Condition("GatewayReady", True, "AllReplicasReady", words)


def failing_gateway(pods: Sequence[GatewayPod]) -> GatewayPod | None:
    """A gateway's pod that cannot run as the spec is now; None where there is none.

    One of a former template does not count: its successor may be what mends it.
    """
    last = max((pod.created for pod in pods), default="")
    newest = {pod.template for pod in pods if pod.created == last}  # two, where both came in one second
    return max((pod for pod in pods if pod.failing and pod.template in newest), key=_newest, default=None)


def _newest(pod: GatewayPod) -> tuple[str, str]:
    return pod.created, pod.name


def _refused(status: Mapping[str, Any]) -> str:
    """Why the API server takes no further pod of a Deployment, in its own words; empty where it does."""
    entries = status.get("conditions", [])
    return next((e["message"] for e in entries if (e["type"], e["status"]) == ("ReplicaFailure", "True")), "")
