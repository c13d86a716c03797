# SPDX-License-Identifier: Apache-2.0
"""Builds the status of a pod, as a kubelet writes it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mizzen_local.events import timestamp
from mizzen_local.node.container import PodContainer

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class PodStatusInputs:
    """Inputs of a pod's status.

    Attributes:
        pod: the latest version of the pod from the API server.
        init: init containers of the pod, in order.
        main: containers of the pod.
        initialized: whether all init containers have succeeded.
        sandbox: whether the pod's address and volumes are ready.
        address: IP address of the pod.
        host: IP address of the node.
        began: time at which the node first saw the pod, in the format of the Kubernetes API.
    """

    pod: Mapping[str, Any]
    init: Sequence[PodContainer]
    main: Sequence[PodContainer]
    initialized: bool
    sandbox: bool
    address: str
    host: str
    began: str


def pod_phase(inputs: PodStatusInputs) -> Phase:
    """Return the pod's phase."""
    if any(has_failed(item) for item in inputs.init):
        return "Failed"
    if not inputs.initialized:
        return "Pending"
    terminations = [item.ended for item in inputs.main]
    if all(end is not None for end in terminations):
        return "Failed" if any(end and end["exitCode"] for end in terminations) else "Succeeded"
    if all("waiting" in item.state.current and not item.state.last for item in inputs.main):
        return "Pending"
    return "Running"


def has_failed(container: PodContainer) -> bool:
    """Return whether an init container has failed and will not be restarted."""
    return container.ended is not None and container.ended["exitCode"] != 0 and not is_sidecar(container)


def is_sidecar(container: PodContainer) -> bool:
    """Return whether an init container is a sidecar, which keeps running alongside the main containers."""
    return container.spec.get("restartPolicy") == "Always"


def container_status(container: PodContainer, *, init: bool) -> dict[str, Any]:
    """Return a container's entry of `containerStatuses` or `initContainerStatuses`."""
    state = container.state
    completed_init = (
        init and state.current.get("terminated", {}).get("exitCode") == 0
    )  # a finished init container counts as ready
    return {
        "name": container.name,
        "image": container.spec["image"],
        "imageID": "",
        "containerID": state.identity,
        "state": {kind: dict(fields) for kind, fields in state.current.items()},
        "lastState": {kind: dict(fields) for kind, fields in state.last.items()},
        "ready": completed_init or container.ready,
        "started": container.started,
        "restartCount": state.restarts,
    }


def pod_conditions(
    inputs: PodStatusInputs, current: Phase, before: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the conditions that a kubelet writes.

    Args:
        inputs: inputs of the status.
        current: phase of the pod.
        before: the conditions that were written last, by type; a condition whose status has not changed
            keeps its transition time.
    """
    has_ended = current in ("Succeeded", "Failed")
    ended = {"reason": "PodCompleted" if current == "Succeeded" else "PodFailed"}
    unready = [item.name for item in inputs.main if not item.ready]
    missing = [item.name for item in inputs.init if not (item.ready if is_sidecar(item) else item.ended)]
    alive = inputs.sandbox and not has_ended
    initialized = inputs.initialized or not inputs.init or current == "Succeeded"
    containers = (not unready, _containers_detail("ContainersNotReady", "unready", unready))
    if has_ended:
        containers = (False, ended)
    elif not inputs.initialized:
        containers = (
            False,
            _containers_detail("ContainersNotReady", "unready", [item.name for item in inputs.main]),
        )
    gates = closed_gates(inputs.pod)
    ready = containers
    if containers[0] and gates:
        ready = (False, {"reason": "ReadinessGatesNotReady", "message": "; ".join(gates)})
    entries = {
        "PodReadyToStartContainers": (alive, {}),
        "Initialized": (initialized, _containers_detail("ContainersNotInitialized", "incomplete", missing)),
        "ContainersReady": containers,
        "Ready": ready,
        "PodScheduled": (True, {}),
    }
    generation = inputs.pod["metadata"].get("generation")
    return [
        _condition(kind, value, detail, generation, before.get(kind))
        for kind, (value, detail) in entries.items()
    ]


def _containers_detail(reason: str, adjective: str, names: Sequence[str]) -> dict[str, str]:
    return {"reason": reason, "message": f"containers with {adjective} status: [{' '.join(names)}]"}


def _condition(
    kind: str,
    value: bool,
    detail: Mapping[str, str],
    generation: int | None,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    status = "True" if value else "False"
    unchanged = before is not None and before["status"] == status
    entry: dict[str, Any] = {
        "type": kind,
        "status": status,
        "lastProbeTime": None,
        "lastTransitionTime": before["lastTransitionTime"]
        if unchanged and before is not None
        else timestamp(),
        # null removes an old value; a strategic merge patch would keep a field that is left out.
        "reason": None if value else detail.get("reason"),
        "message": None if value else detail.get("message"),
    }
    return entry | ({"observedGeneration": generation} if generation is not None else {})


def closed_gates(pod: Mapping[str, Any]) -> list[str]:
    """Return one message for each of a pod's readiness gates whose condition is missing or not True."""
    states = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", ())}
    messages: list[str] = []
    for gate in pod["spec"].get("readinessGates", ()):
        kind = gate["conditionType"]
        if kind not in states:
            messages.append(f'corresponding condition of pod readiness gate "{kind}" does not exist.')
        elif states[kind] != "True":
            messages.append(f'the status of pod readiness gate "{kind}" is not "True", but {states[kind]}')
    return messages


def pod_status(inputs: PodStatusInputs, before: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the complete status that the node writes.

    Args:
        inputs: inputs of the status.
        before: the conditions that were written last, by type.
    """
    current = pod_phase(inputs)
    fields: dict[str, Any] = {
        "phase": current,
        "conditions": pod_conditions(inputs, current, before),
        "containerStatuses": [container_status(item, init=False) for item in inputs.main],
        "hostIP": inputs.host,
        "hostIPs": [{"ip": inputs.host}],
        "startTime": inputs.began,
    }
    if inputs.sandbox:
        fields |= {"podIP": inputs.address, "podIPs": [{"ip": inputs.address}]}
    if inputs.init:
        fields["initContainerStatuses"] = [container_status(item, init=True) for item in inputs.init]
    generation = inputs.pod["metadata"].get("generation")
    return fields | ({"observedGeneration": generation} if generation is not None else {})
