# SPDX-License-Identifier: Apache-2.0
"""Builds the status of a service whose spec is valid, and compares it with the stored status.

The writer applies a status only if it differs from the stored one. So a status must not change while nothing
changes in the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.api.reasons import CONDITION_TYPES, MAX_MESSAGE
from mizzen_operator.api.types import MAX_SCALE_HISTORY, Accelerator, Gateway, InferenceService
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.pods.group import Group
from mizzen_operator.status.conditions import build_conditions
from mizzen_operator.status.inputs import StatusInputs
from mizzen_operator.status.pod_conditions import Condition

MAX_GROUPS = 64
"""Maximum number of entries of `status.groups`."""
_STATES_WORST_FIRST = ("Failed", "Pending", "Starting", "Connecting", "Verifying", "Draining", "Serving")
"""States of a group in `status.groups`, the worst first."""


def build_status(inputs: StatusInputs, now: datetime) -> dict[str, Any]:
    """Return the complete status; it equals the previous one if nothing has changed.

    Args:
        inputs: inputs of the status.
        now: current time in UTC; it becomes the transition time of conditions whose status changes.
    """
    service = inputs.service
    previous = {entry["type"]: entry for entry in service.status.get("conditions", [])}
    cold_start = inputs.cold_start or service.status.get("coldStart")
    return {
        "observedGeneration": service.generation,
        "replicas": len(inputs.live),
        "readyReplicas": sum(group.containers_ready for group in inputs.live),
        "updatedReplicas": len(inputs.updated),
        "availableReplicas": len(inputs.routed),
        "selector": f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.ENGINE},{labels.RANK}=0",
        "url": service_url(service, inputs.gateway),
        **inputs.rollout.as_status(),
        **({"avoidedNodes": list(inputs.avoided_nodes)} if inputs.avoided_nodes else {}),
        **_model(inputs),
        **_scale_history(service.status, inputs.scale_history),
        **({"coldStart": dict(cold_start)} if cold_start else {}),
        "updateRevision": inputs.revision,
        "servedName": service.model.served_name,
        "perPod": service.accelerator.per_pod,
        **_resource(service.accelerator),
        **({"podsPerGroup": service.pods} if service.pods > 1 else {}),
        "engineImage": inputs.engine_image,
        "groups": group_entries(inputs.groups),
        "conditions": [
            condition_entry(condition, previous.get(condition.type, {}), service.generation, now)
            for condition in build_conditions(inputs)
        ],
    }


def _model(inputs: StatusInputs) -> dict[str, Any]:
    """Return the entry `model` with the download, quantization, task, experts and images, as far as known."""
    model = inputs.download.as_status() if inputs.download is not None else {}
    if inputs.quantization:
        model["quantization"] = inputs.quantization
    if inputs.task:
        model["task"] = inputs.task
    if inputs.expert_groups:
        model["expert"] = inputs.expert_groups
    if inputs.images:
        model["images"] = True
    return {"model": model} if model else {}


def _resource(accelerator: Accelerator) -> dict[str, str]:
    """Return the entry with the resource that pods request; empty on CPU and with a claim template."""
    requested = accelerator.per_pod and not accelerator.claim_template
    return {"resourceName": accelerator.resource_name} if requested else {}


def is_same_status(current: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two statuses are equal, apart from conditions of types that other programs write."""
    return _without_foreign_conditions(current) == _without_foreign_conditions(new)


def cleanup_patch(current: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the merge patch that removes foreign fields from a status; None if it has no foreign fields.

    Server-side apply keeps fields that others have added, for example a user who edited the status.

    Args:
        current: the stored status, after `new` was applied.
        new: the status as it should be.
    """
    if is_same_status(current, new):
        return None
    target = dict(new)
    if "conditions" in new:
        foreign = [entry for entry in current.get("conditions", []) if entry["type"] not in CONDITION_TYPES]
        target["conditions"] = [*_without_foreign_conditions(new)["conditions"], *foreign]
    return _replace_all(current, target)


def _replace_all(current: Any, target: Any) -> Any:
    """Return the merge patch that makes `current` equal to `target`: extra keys are set to None."""
    if not (isinstance(current, Mapping) and isinstance(target, Mapping)):
        return target
    extra = dict.fromkeys(set(current) - set(target))
    return {**{key: _replace_all(current.get(key), value) for key, value in target.items()}, **extra}


def _without_foreign_conditions(status: Mapping[str, Any]) -> Mapping[str, Any]:
    if "conditions" not in status:
        return status
    own = [entry for entry in status["conditions"] if entry["type"] in CONDITION_TYPES]
    return {**status, "conditions": own}


def _scale_history(status: Mapping[str, Any], scales: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `lastScale` and `scaleHistory` with the autoscaler's changes since the last status."""
    recorded = status.get("scaleHistory") or filter(None, [status.get("lastScale")])
    entries = [dict(entry) for entry in recorded]
    history = [*entries, *(dict(entry) for entry in scales if entry not in entries)][-MAX_SCALE_HISTORY:]
    return {"lastScale": history[-1], "scaleHistory": history} if history else {}


def service_url(service: InferenceService, gateway: Gateway) -> str:
    """Return the base URL of the service's API inside the cluster.

    Args:
        service: the service.
        gateway: the gateway settings in force, which may be those of another service.
    """
    name = child_names.SHARED_GATEWAY if service.shares_gateway else child_names.gateway_name(service.name)
    scheme = "https" if gateway.tls_secret else "http"
    return f"{scheme}://{name}.{service.namespace}.svc:{gateway.port}/v1"


def condition_entry(
    condition: Condition, previous: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """Return the entry of `status.conditions` for a condition.

    Args:
        condition: the condition.
        previous: the condition's entry in the status that was written last; empty if it had none.
        generation: generation of the spec.
        now: current time in UTC; it becomes the transition time if the condition's status has changed.
    """
    status = "True" if condition.status else "False"
    unchanged = previous.get("status") == status
    return {
        "type": condition.type,
        "status": status,
        "reason": condition.reason,
        "message": condition.message[:MAX_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": previous["lastTransitionTime"] if unchanged else timestamp(now),
    }


def _group_state(group: Group) -> str:
    if group.terminating or group.incomplete:
        return "Draining"
    if group.failing:
        return "Failed"
    if group.awaiting_verification and group.failed_verification:
        return "Failed"
    if group.containers_ready:
        return "Serving" if group.routable else "Verifying" if group.awaiting_verification else "Connecting"
    return "Starting" if group.node else "Pending"


def group_entries(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return `status.groups`: at most `MAX_GROUPS` groups, those in the worst state first."""
    entries: list[dict[str, Any]] = []
    for group in groups:
        state = _group_state(group)
        routing_error = group.routing_error if state == "Connecting" else ""
        message = group.message or group.verification_error or group.unschedulable or routing_error
        entry: dict[str, Any] = {
            "name": group.name,
            "group": group.index,
            "revision": group.revision,
            "state": state,
            "restarts": group.restarts,
            "since": group.created,
            "node": group.node,
            "reason": group.reason or (reasons.VERIFICATION_FAILED if group.failed_verification else ""),
            "message": message[:MAX_MESSAGE],
        }
        if group.size > 1:
            entry["pods"] = [
                {"name": pod.name, "ready": pod.ready, **({"node": pod.node} if pod.node else {})}
                for pod in group.members
            ]
        entries.append({key: value for key, value in entry.items() if value != ""})
    entries.sort(key=lambda entry: (_STATES_WORST_FIRST.index(entry["state"]), entry["name"]))
    return entries[:MAX_GROUPS]
