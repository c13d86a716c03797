# SPDX-License-Identifier: Apache-2.0
"""Builds the conditions that depend only on pods and the gateway: Available, Scheduled, GatewayReady.

`status/conditions.py` refines them according to the spec; `status/degraded_status.py` uses them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen_operator.api import reasons
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a status.

    Attributes:
        type: type of the condition, such as `Ready`.
        status: True or False.
        reason: reason in CamelCase.
        message: message for people.
    """

    type: str
    status: bool
    reason: str
    message: str


def format_count(count: int, total: int, predicate: str) -> str:
    """Return a count of groups for a message, such as `1 of 2 groups serve`."""
    return f"{count} of {total} groups {predicate}"


def available_condition(
    gateways: Sequence[GatewayPod], groups: Sequence[Group], *, scaled_to_zero: bool
) -> Condition:
    """Return the condition Available: whether a request would succeed now.

    Args:
        gateways: pods of the service's gateway.
        groups: the service's groups.
        scaled_to_zero: the spec asks for zero groups.
    """
    if not any(pod.ready for pod in gateways):
        message = "no gateway accepts requests"
        return Condition(reasons.AVAILABLE, False, reasons.NO_GATEWAY_READY, message)
    if not any(pod.ready and pod.responsive for pod in gateways):
        message = "all ready gateways hang"
        return Condition(reasons.AVAILABLE, False, reasons.NO_GATEWAY_ANSWERS, message)
    if not any(group.routed for group in groups):
        reason = reasons.SCALED_TO_ZERO if scaled_to_zero else reasons.NO_GROUP_SERVES
        return Condition(reasons.AVAILABLE, False, reason, "the gateways route to no group")
    return Condition(reasons.AVAILABLE, True, reasons.SERVING, "requests are answered")


def scheduled_condition(groups: Sequence[Group], wanted: int = 0) -> Condition:
    """Return the condition Scheduled: whether every wanted and every live group has a node.

    Args:
        groups: the service's groups.
        wanted: number of groups wanted.
    """
    live = [group for group in groups if group.live]
    for group in live:
        if group.unschedulable:
            message = f"{group.name}: {group.unschedulable}"
            return Condition(reasons.SCHEDULED, False, reasons.UNSCHEDULABLE, message)
    placed, total = sum(bool(group.node) for group in live), max(wanted, len(live))
    if not total:
        message = "there is no group, and none is wanted"
        return Condition(reasons.SCHEDULED, True, reasons.NO_GROUPS_WANTED, message)
    counts = format_count(placed, total, "have a node")
    if placed < len(live):
        return Condition(reasons.SCHEDULED, False, reasons.PENDING, counts)
    if placed < total:
        message = f"{counts}; the others have no pod yet"
        return Condition(reasons.SCHEDULED, False, reasons.NOT_MADE, message)
    return Condition(reasons.SCHEDULED, True, reasons.ALL_GROUPS_HAVE_NODES, counts)


def gateway_ready_condition(
    deployment: Mapping[str, Any], pods: Sequence[GatewayPod], wanted: int, secrets: Sequence[str] = ()
) -> Condition:
    """Return the condition GatewayReady: whether all gateway pods are ready and up to date.

    Args:
        deployment: the gateway's Deployment; empty if it does not exist.
        pods: the gateway's pods.
        wanted: number of gateway pods wanted.
        secrets: names of the user's Secrets that gateway pods mount, and without which they do not start.
    """

    def not_ready(reason: str, message: str) -> Condition:
        return Condition(reasons.GATEWAY_READY, False, reason, message)

    if not deployment:
        return not_ready(reasons.GATEWAY_MISSING, "the gateway's Deployment does not exist")
    meta, status = deployment["metadata"], deployment.get("status", {})
    updated, ready = status.get("updatedReplicas", 0), status.get("readyReplicas", 0)
    if status.get("observedGeneration", 0) < meta.get("generation", 0):
        return not_ready(reasons.GATEWAY_ROLLING_OUT, "the gateway's Deployment has changed")
    if updated < wanted or ready < wanted or status.get("replicas", 0) > wanted:
        rejection = _replica_failure(status)
        if rejection:
            return not_ready(reasons.GATEWAY_REJECTED, rejection)
        with_problem = [pod for pod in pods if pod.reason and not pod.ready]
        if with_problem:
            return not_ready(reasons.GATEWAY_FAILING, max(with_problem, key=_creation_order).description)
        counts = f"{ready} of {wanted} gateway pods are ready, {updated} are up to date"
        if secrets:  # if one is missing, the pods do not report a reason
            counts += f"; they need the Secrets {', '.join(secrets)} of spec.gateway"
        return not_ready(
            reasons.GATEWAY_ROLLING_OUT if updated < wanted else reasons.GATEWAY_NOT_READY, counts
        )
    hanging = next((pod.name for pod in pods if pod.ready and not pod.responsive), "")
    if hanging:
        message = f"{hanging} does not answer, although Kubernetes still reports it as ready"
        return not_ready(reasons.GATEWAY_HANGS, message)
    message = f"{ready} of {wanted} gateway pods are ready"
    return Condition(reasons.GATEWAY_READY, True, reasons.ALL_REPLICAS_READY, message)


def find_failing_gateway(pods: Sequence[GatewayPod]) -> GatewayPod | None:
    """Return a failing gateway pod of the current template; None if no such pod fails.

    Pods of older templates do not count, because the current template may fix their problem.
    """
    latest = max((pod.created for pod in pods), default="")
    # Creation times have a resolution of a second, so pods of two templates may be the newest.
    newest = {pod.template_hash for pod in pods if pod.created == latest}
    failing = (pod for pod in pods if pod.failing and pod.template_hash in newest)
    return max(failing, key=_creation_order, default=None)


def _creation_order(pod: GatewayPod) -> tuple[str, str]:
    return pod.created, pod.name


def _replica_failure(status: Mapping[str, Any]) -> str:
    """Return why the API server rejects pods of a Deployment; empty if it rejects none."""
    entries = status.get("conditions", [])
    return next(
        (
            entry["message"]
            for entry in entries
            if (entry["type"], entry["status"]) == ("ReplicaFailure", "True")
        ),
        "",
    )
