"""What is there → the status that says so. Written only when it differs from the one that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import MAX_SCALES, Gateway, InferenceService
from mizzen_operator.kube.objects import stamp
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout.progress import MAX_MESSAGE, VERIFICATION
from mizzen_operator.status.conditions import TYPES, conditions
from mizzen_operator.status.inputs import Facts
from mizzen_operator.status.pod_conditions import Condition

MAX_GROUPS = 64


def build(facts: Facts, now: datetime) -> dict[str, Any]:
    """The whole status; equal to the one that is there when nothing changed."""
    service = facts.service
    before = {entry["type"]: entry for entry in service.status.get("conditions", [])}
    cold_start = facts.cold_start or service.status.get("coldStart")
    return {
        "observedGeneration": service.generation,
        "replicas": len(facts.live),
        "readyReplicas": sum(group.containers_ready for group in facts.live),
        "updatedReplicas": len(facts.current),
        "availableReplicas": len(facts.routable),
        "selector": f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.ENGINE},{labels.RANK}=0",
        "url": url(service, facts.gateway),
        **facts.memory.as_status(),
        **({"model": facts.download.as_status()} if facts.download is not None else {}),
        **_scales(service.status, facts.scales),
        **({"coldStart": dict(cold_start)} if cold_start else {}),
        "updateRevision": facts.revision,
        "servedName": service.model.served_name,
        "perPod": service.accelerator.per_pod,
        **({"podsPerGroup": service.pods} if service.pods > 1 else {}),
        "engineImage": facts.engine_image,
        "groups": group_entries(facts.groups),
        "conditions": [
            entry_of(condition, before.get(condition.type, {}), service.generation, now)
            for condition in conditions(facts)
        ],
    }


def is_same(there: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a status says what it should; conditions of types that are not ours are their writers'."""
    return _ours(there) == _ours(new)


def without_others(there: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any] | None:
    """The merge patch that leaves of a status what it should say; None where nothing is there besides.

    Server-side apply leaves alone what others have added, as whoever edits a status by hand does.

    Args:
        there: the status after `new` was applied.
        new: what it should say.
    """
    if is_same(there, new):
        return None
    wanted = dict(new)
    if "conditions" in new:
        others = [one for one in there.get("conditions", []) if one["type"] not in TYPES]
        wanted["conditions"] = [*_ours(new)["conditions"], *others]
    return _replacing(there, wanted)


def _replacing(there: Any, wanted: Any) -> Any:
    if not (isinstance(there, Mapping) and isinstance(wanted, Mapping)):
        return wanted
    extra = dict.fromkeys(set(there) - set(wanted))
    return {**{key: _replacing(there.get(key), value) for key, value in wanted.items()}, **extra}


def _ours(status: Mapping[str, Any]) -> Mapping[str, Any]:
    if "conditions" not in status:
        return status
    return {**status, "conditions": [one for one in status["conditions"] if one["type"] in TYPES]}


def _scales(before: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the autoscaler did: what the status knows of it already, and what has come since."""
    known = [dict(one) for one in before.get("scaleHistory") or filter(None, [before.get("lastScale")])]
    history = [*known, *(dict(one) for one in done if one not in known)][-MAX_SCALES:]
    return {"lastScale": history[-1], "scaleHistory": history} if history else {}


def url(service: InferenceService, gateway: Gateway) -> str:
    """Base URL of the service inside the cluster."""
    name = labels.SHARED_NAME if service.shared else labels.gateway_name(service.name)
    scheme = "https" if gateway.tls_secret else "http"
    return f"{scheme}://{name}.{service.namespace}.svc:{gateway.port}/v1"


def entry_of(
    condition: Condition, before: Mapping[str, Any], generation: int, now: datetime
) -> dict[str, Any]:
    """A condition as a status holds it; `before` is the one of its type that is there, empty without."""
    status = "True" if condition.status else "False"
    same = before.get("status") == status
    return {
        "type": condition.type,
        "status": status,
        "reason": condition.reason,
        "message": condition.message[:MAX_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if same else stamp(now),
    }


_WORST_FIRST = ("Failed", "Pending", "Starting", "Connecting", "Verifying", "Draining", "Serving")


def _state(group: Group) -> str:
    if group.terminating or group.lost:
        return "Draining"
    if group.failing:
        return "Failed"
    if group.held and group.refused_by:
        return "Failed"
    if group.containers_ready:
        return "Serving" if group.routable else "Verifying" if group.held else "Connecting"
    return "Starting" if group.node else "Pending"


def group_entries(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """`status.groups`, the worst first."""
    entries: list[dict[str, Any]] = []
    for group in groups:
        state = _state(group)
        problem = group.problem if state == "Connecting" else ""
        entry: dict[str, Any] = {
            "name": group.name,
            "group": group.group,
            "revision": group.revision,
            "state": state,
            "restarts": group.restarts,
            "since": group.created,
            "node": group.node,
            "reason": group.reason or (VERIFICATION if group.refused_by else ""),
            "message": (group.message or group.refusal or group.unschedulable or problem)[:MAX_MESSAGE],
        }
        if group.size > 1:
            entry["pods"] = [
                {"name": one.name, "ready": one.ready, **({"node": one.node} if one.node else {})}
                for one in group.members
            ]
        entries.append({key: value for key, value in entry.items() if value != ""})
    entries.sort(key=lambda entry: (_WORST_FIRST.index(entry["state"]), entry["name"]))
    return entries[:MAX_GROUPS]
