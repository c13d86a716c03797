# SPDX-License-Identifier: Apache-2.0
"""Reason and message of pods that do not run, derived from the states of their containers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mizzen_operator.pods.group import read_single_pod_group
from mizzen_operator.pods.observe import GatewayPod, read_gateway_pod
from mizzen_operator.status.conditions import build_conditions as every_condition
from mizzen_operator.status.inputs import StatusInputs
from service_kit import GOOD


def conditions(inputs: StatusInputs) -> dict[str, tuple[bool, str]]:
    return {c.type: (c.status, c.reason) for c in every_condition(inputs)}


def container(**state: Any) -> dict[str, Any]:
    return {"name": "engine", "restartCount": 2, "ready": False, **state}


def pod(containers: list[dict[str, Any]], conditions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    labels = {"mizzen.dev/group": "0", "mizzen.dev/revision": "a", "mizzen.dev/incarnation": "0"}
    return {
        "metadata": {"name": "p", "uid": "u", "labels": labels},
        "spec": {},
        "status": {
            "phase": "Running",
            "containerStatuses": containers,
            "conditions": conditions or [],
        },
    }


ENDED = {"exitCode": 9, "reason": "Error", "message": "out of memory"}


@pytest.mark.parametrize(
    ("containers", "reason", "message", "failing"),
    [
        (
            [
                container(
                    state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
                    lastState={"terminated": ENDED},
                )
            ],
            "CrashLoopBackOff",
            "out of memory",
            True,
        ),
        (
            [container(state={"waiting": {"reason": "ErrImagePull", "message": "not found"}})],
            "ErrImagePull",
            "not found",
            True,
        ),
        ([container(state={"waiting": {"reason": "ContainerCreating"}})], "", "", False),
        (
            [container(state={"running": {}}, lastState={"terminated": ENDED})],
            "CrashLoopBackOff",
            "out of memory",
            True,
        ),
        (
            [container(state={"running": {}}, lastState={"terminated": {"exitCode": 137}})],
            "CrashLoopBackOff",
            "exit code 137",
            True,
        ),
        ([container(state={"terminated": ENDED}, restartCount=0)], "Error", "out of memory", False),
        ([container(state={"running": {}}, lastState={"terminated": ENDED}, ready=True)], "", "", False),
        ([], "", "", False),
    ],
)
def test_reason_and_message_of_a_pod_that_does_not_run(
    containers: list[dict[str, Any]], reason: str, message: str, failing: bool
) -> None:
    seen = read_single_pod_group(pod(containers))
    assert (seen.reason, seen.message, seen.failing) == (reason, message, failing)


def gateway(state: dict[str, Any], restarts: int, last: dict[str, Any] | None = None, **meta: str) -> Any:
    container_status = {"name": "gateway", "restartCount": restarts, "ready": False, "state": state}
    containers = [{**container_status, "lastState": {"terminated": last} if last else {}}]
    return read_gateway_pod({"metadata": {"name": "g", **meta}, "status": {"containerStatuses": containers}})


KILLED = {"exitCode": 137, "reason": "OOMKilled", "message": "in work: 7"}
LONG = {"startedAt": "2026-01-02T03:04:05Z", "finishedAt": "2026-01-02T04:04:05Z"}
SHORT = {"startedAt": "2026-01-02T03:04:05Z", "finishedAt": "2026-01-02T03:04:09Z"}


@pytest.mark.parametrize(
    ("pod", "failing", "words"),
    [
        (
            gateway({"waiting": {"reason": "CrashLoopBackOff"}}, 5, KILLED),
            True,
            "g: CrashLoopBackOff, restarted 5 times: OOMKilled (exit code 137): in work: 7",
        ),
        (
            gateway({"waiting": {"reason": "ErrImagePull", "message": "not found"}}, 0),
            True,
            "g: ErrImagePull: not found",
        ),
        (
            gateway({"running": {}}, 3, {**ENDED, **SHORT}),
            True,
            "g: Error, restarted 3 times: out of memory",
        ),
        (
            gateway({"running": {}}, 1, {**ENDED, **SHORT}),
            False,
            "g: Error, restarted once: out of memory",
        ),
        (gateway({"running": {}}, 3, {**ENDED, **LONG}), False, None),
        (gateway({"waiting": {"reason": "ContainerCreating"}}, 0), False, None),
        (
            gateway({"waiting": {"reason": "CrashLoopBackOff"}}, 5, KILLED, deletionTimestamp="2026"),
            False,
            None,
        ),
    ],
)
def test_a_failing_gateway_pod_is_described_with_its_restarts(
    pod: GatewayPod, failing: bool, words: str | None
) -> None:
    assert pod.failing is failing
    if words is not None:
        assert pod.description == words
    down = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1}}
    found = {c.type: c for c in every_condition(replace(GOOD, gateways=[pod], deployment=down))}
    assert found["Failed"].status is failing
    assert found["Ready"].message == (words if failing else found["GatewayReady"].message)


def test_an_unschedulable_gateway_pod_is_described_but_not_failing() -> None:
    unfit = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    pod = read_gateway_pod({"metadata": {"name": "g"}, "status": {"conditions": [unfit]}})
    assert (pod.description, pod.failing) == ("g: Unschedulable: 0/1 nodes", False)


def test_a_pod_with_a_scheduling_gate_is_not_unschedulable() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
    assert read_single_pod_group(pod([], [gated])).unschedulable == ""
    assert read_single_pod_group(pod([], [{**gated, "reason": "Unschedulable"}])).unschedulable == "gates"


def test_a_group_that_has_served_is_not_failing_after_a_restart() -> None:
    again = [container(state={"running": {}}, lastState={"terminated": ENDED})]
    seen = read_single_pod_group(pod(again, [{"type": "mizzen.dev/routable", "status": "False"}]))
    assert (seen.reason, seen.message, seen.failing) == ("Error", "out of memory", False)


@pytest.mark.parametrize("created", ["2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"])
def test_the_back_off_does_not_depend_on_the_clock_of_the_api_server(created: str) -> None:
    body = pod([container(state={"terminated": ENDED})])
    body["metadata"]["creationTimestamp"], body["status"]["phase"] = created, "Failed"
    assert [read_single_pod_group(body, {"u": age}).backing_off for age in (0.0, 1.9, 2.1)] == [
        True,
        True,
        False,
    ]


KILLED = {"terminated": {"exitCode": 143, "reason": "Error", "message": "proxy stopped"}}


@pytest.mark.parametrize(
    ("containers", "init", "message"),
    [
        ([container(state={"terminated": ENDED})], [container(name="proxy", state=KILLED)], "out of memory"),
        (
            [container(name="proxy", state=KILLED), container(state={"terminated": ENDED})],
            [],
            "out of memory",
        ),
        (
            [container(state={"waiting": {"reason": "PodInitializing"}}, lastState={"terminated": ENDED})],
            [container(name="fetch", state=KILLED)],
            "proxy stopped",
        ),
    ],
    ids=["native sidecar", "ordinary sidecar", "init container"],
)
def test_the_message_of_an_engine_takes_precedence_over_that_of_a_sidecar(
    containers: list[dict[str, Any]], init: list[dict[str, Any]], message: str
) -> None:
    body = pod(containers)
    body["status"]["initContainerStatuses"] = init
    assert read_single_pod_group(body).message == message


def test_restarts_of_a_sidecar_are_not_failures_of_the_engine() -> None:
    containers = [container(state={"running": {}}), {**container(name="proxy"), "restartCount": 11}]
    assert read_single_pod_group(pod(containers)).restarts == container()["restartCount"]


LOST = {"exitCode": 3, "reason": "Error", "message": "device_lost: rank 0 failed: ECC error\n"}


@pytest.mark.parametrize(
    ("containers", "lost", "restarts"),
    [
        ([container(state={"terminated": LOST})], True, 3),
        ([container(state={"running": {}}, lastState={"terminated": LOST})], True, 2),
        (
            [container(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": LOST})],
            True,
            2,
        ),
        ([container(state={"running": {}}, lastState={"terminated": LOST}, ready=True)], False, 2),
        ([container(state={"terminated": ENDED}, lastState={"terminated": LOST})], False, 2),
        ([container(state={"running": {}}), container(name="proxy", state={"terminated": LOST})], False, 2),
    ],
)
def test_a_group_ends_when_its_engine_has_lost_its_device(
    containers: list[dict[str, Any]], lost: bool, restarts: int
) -> None:
    seen = read_single_pod_group(pod(containers, [{"type": "mizzen.dev/routable", "status": "True"}]))
    assert (seen.ended, seen.restarts) == (lost, restarts)
    assert (seen.reason == "DeviceLost") is lost
    if lost:
        assert seen.message == "device_lost: rank 0 failed: ECC error"
