"""The status of a pod, as kubelets write it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mizzen_local.events import now
from mizzen_local.node.container import Container

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True, slots=True)
class View:
    """The inputs of a pod's status.

    Attributes:
        pod: the pod as the API last gave it.
        init: its init containers, in order.
        main: its containers.
        initialized: all init containers are through.
        sandbox: it has its address and folders.
        address: its address.
        host: the node's address.
        began: when the node took it on.
    """

    pod: Mapping[str, Any]
    init: Sequence[Container]
    main: Sequence[Container]
    initialized: bool
    sandbox: bool
    address: str
    host: str
    began: str


def phase(view: View) -> Phase:
    """The pod's phase."""
    if any(fatal(item) for item in view.init):
        return "Failed"
    if not view.initialized:
        return "Pending"
    ends = [item.ended for item in view.main]
    if all(end is not None for end in ends):
        return "Failed" if any(end and end["exitCode"] for end in ends) else "Succeeded"
    if all("waiting" in item.state.now and not item.state.last for item in view.main):
        return "Pending"
    return "Running"


def fatal(container: Container) -> bool:
    """Whether an init container has ended for good without success."""
    return container.ended is not None and container.ended["exitCode"] != 0 and not is_sidecar(container)


def is_sidecar(container: Container) -> bool:
    """Whether an init container is a sidecar, which runs alongside the containers."""
    return container.spec.get("restartPolicy") == "Always"


def container_status(container: Container, *, init: bool) -> dict[str, Any]:
    """One entry of containerStatuses or initContainerStatuses."""
    state = container.state
    done = (
        init and state.now.get("terminated", {}).get("exitCode") == 0
    )  # a finished init container counts as ready
    return {
        "name": container.name,
        "image": container.spec["image"],
        "imageID": "",
        "containerID": state.identity,
        "state": {kind: dict(fields) for kind, fields in state.now.items()},
        "lastState": {kind: dict(fields) for kind, fields in state.last.items()},
        "ready": done or container.ready,
        "started": container.started,
        "restartCount": state.restarts,
    }


def conditions(view: View, current: Phase, before: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The kubelet's conditions; a time of transition stays while the status does.

    Args:
        view: the pod.
        current: its phase.
        before: the conditions written last, by type.
    """
    over = current in ("Succeeded", "Failed")
    ended = {"reason": "PodCompleted" if current == "Succeeded" else "PodFailed"}
    unready = [item.name for item in view.main if not item.ready]
    missing = [item.name for item in view.init if not (item.ready if is_sidecar(item) else item.ended)]
    alive = view.sandbox and not over
    initialized = view.initialized or not view.init or current == "Succeeded"
    containers = (not unready, _names("ContainersNotReady", "unready", unready))
    if over:
        containers = (False, ended)
    elif not view.initialized:
        containers = (False, _names("ContainersNotReady", "unready", [item.name for item in view.main]))
    gates = closed_gates(view.pod)
    ready = containers
    if containers[0] and gates:
        ready = (False, {"reason": "ReadinessGatesNotReady", "message": "; ".join(gates)})
    found = {
        "PodReadyToStartContainers": (alive, {}),
        "Initialized": (initialized, _names("ContainersNotInitialized", "incomplete", missing)),
        "ContainersReady": containers,
        "Ready": ready,
        "PodScheduled": (True, {}),
    }
    generation = view.pod["metadata"].get("generation")
    return [
        _condition(kind, value, why, generation, before.get(kind)) for kind, (value, why) in found.items()
    ]


def _names(reason: str, what: str, names: Sequence[str]) -> dict[str, str]:
    return {"reason": reason, "message": f"containers with {what} status: [{' '.join(names)}]"}


def _condition(
    kind: str, value: bool, why: Mapping[str, str], generation: int | None, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    status = "True" if value else "False"
    kept = before is not None and before["status"] == status
    found: dict[str, Any] = {
        "type": kind,
        "status": status,
        "lastProbeTime": None,
        "lastTransitionTime": before["lastTransitionTime"] if kept and before is not None else now(),
        # A strategic merge keeps what is left out, so that nothing must be said as null.
        "reason": None if value else why.get("reason"),
        "message": None if value else why.get("message"),
    }
    return found | ({"observedGeneration": generation} if generation is not None else {})


def closed_gates(pod: Mapping[str, Any]) -> list[str]:
    """Return the reason for each readiness gate that is not True."""
    states = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", ())}
    closed: list[str] = []
    for gate in pod["spec"].get("readinessGates", ()):
        kind = gate["conditionType"]
        if kind not in states:
            closed.append(f'corresponding condition of pod readiness gate "{kind}" does not exist.')
        elif states[kind] != "True":
            closed.append(f'the status of pod readiness gate "{kind}" is not "True", but {states[kind]}')
    return closed


def status(view: View, before: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole status that the node writes.

    Args:
        view: the pod.
        before: the conditions written last, by type.
    """
    current = phase(view)
    found: dict[str, Any] = {
        "phase": current,
        "conditions": conditions(view, current, before),
        "containerStatuses": [container_status(item, init=False) for item in view.main],
        "hostIP": view.host,
        "hostIPs": [{"ip": view.host}],
        "startTime": view.began,
    }
    if view.sandbox:
        found |= {"podIP": view.address, "podIPs": [{"ip": view.address}]}
    if view.init:
        found["initContainerStatuses"] = [container_status(item, init=True) for item in view.init]
    generation = view.pod["metadata"].get("generation")
    return found | ({"observedGeneration": generation} if generation is not None else {})
