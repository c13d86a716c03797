# SPDX-License-Identifier: Apache-2.0
"""Conditions and status object that follow from the status inputs."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from mizzen_operator.gateway_client.routing_table import ApiKeys
from mizzen_operator.pods.observe import GatewayPod, read_gateway_pod
from mizzen_operator.status import builder
from mizzen_operator.status.conditions import build_conditions as every_condition
from mizzen_operator.status.inputs import BlockingReason, StatusInputs
from service_kit import DEPLOYED, GATEWAY, GOOD, NOW, OLD, SERVING, SPEC, service


def conditions(inputs: StatusInputs) -> dict[str, tuple[bool, str]]:
    return {c.type: (c.status, c.reason) for c in every_condition(inputs)}


def test_conditions_of_a_service_that_serves() -> None:
    assert conditions(GOOD) == {
        "Ready": (True, "AllGroupsServing"),
        "Available": (True, "Serving"),
        "Progressing": (False, "Settled"),
        "Scheduled": (True, "AllGroupsHaveNodes"),
        "GatewayReady": (True, "AllReplicasReady"),
        "Failed": (False, "AsExpected"),
    }


CRASHED = replace(
    SERVING, containers_ready=False, routable=False, reason="CrashLoopBackOff", message="no such file"
)


@pytest.mark.parametrize(
    ("inputs", "name", "expected"),
    [
        (replace(GOOD, groups=[OLD]), "Ready", (False, "ReplacingGroups")),
        (replace(GOOD, groups=[OLD]), "Available", (True, "Serving")),
        (replace(GOOD, groups=[SERVING, OLD]), "Ready", (False, "ReplacingGroups")),
        (replace(GOOD, groups=[]), "Ready", (False, "StartingGroups")),
        (replace(GOOD, groups=[]), "Available", (False, "NoGroupServes")),
        (replace(GOOD, groups=[replace(SERVING, routable=False)]), "Ready", (False, "StartingGroups")),
        (replace(GOOD, groups=[replace(SERVING, routable=False)]), "Available", (False, "NoGroupServes")),
        (replace(GOOD, groups=[replace(SERVING, terminating=True)]), "Available", (False, "NoGroupServes")),
        (replace(GOOD, groups=[CRASHED]), "Failed", (True, "CrashLoopBackOff")),
        (replace(GOOD, groups=[CRASHED]), "Ready", (False, "CrashLoopBackOff")),
        (replace(GOOD, groups=[OLD, CRASHED]), "Available", (True, "Serving")),
        (replace(GOOD, groups=[replace(CRASHED, revision="b"), SERVING]), "Failed", (False, "AsExpected")),
        (replace(GOOD, gateways=[]), "Available", (False, "NoGatewayReady")),
        (replace(GOOD, gateways=[replace(GATEWAY, ready=False)]), "Available", (False, "NoGatewayReady")),
        (replace(GOOD, deployment={}), "Ready", (False, "StartingGateway")),
        (replace(GOOD, deployment={}), "GatewayReady", (False, "GatewayMissing")),
        (
            replace(GOOD, deployment={**DEPLOYED, "metadata": {"generation": 3}}),
            "GatewayReady",
            (False, "GatewayRollingOut"),
        ),
        (
            replace(
                GOOD,
                gateways=[GatewayPod("g", "", False, reason="ImagePullBackOff", message="no such image")],
                deployment={"metadata": {"generation": 1}, "status": {"observedGeneration": 1}},
            ),
            "GatewayReady",
            (False, "GatewayFailing"),
        ),
        (replace(GOOD, failure=BlockingReason("NameTaken", "x")), "Ready", (False, "NameTaken")),
        (replace(GOOD, failure=BlockingReason("NameTaken", "x")), "Available", (True, "Serving")),
        (
            replace(GOOD, groups=[replace(SERVING, node="", unschedulable="0/1 nodes", routable=False)]),
            "Scheduled",
            (False, "Unschedulable"),
        ),
        (replace(GOOD, service=service(suspend=True)), "Ready", (False, "RemovingGroups")),
        (replace(GOOD, service=service(suspend=True), groups=[]), "Ready", (False, "Suspended")),
        (replace(GOOD, service=service(suspend=True)), "Available", (False, "Suspended")),
        (replace(GOOD, service=service(replicas=0), groups=[]), "Ready", (True, "ScaledToZero")),
        (replace(GOOD, service=service(replicas=0), groups=[]), "Available", (False, "ScaledToZero")),
    ],
)
def test_a_condition_follows_from_the_status_inputs(
    inputs: StatusInputs, name: str, expected: tuple[bool, str]
) -> None:
    assert conditions(inputs)[name] == expected


def test_the_message_of_failed_is_the_containers_termination_message() -> None:
    built = builder.build_status(replace(GOOD, groups=[CRASHED]), NOW)
    [failed] = [c for c in built["conditions"] if c["type"] == "Failed"]
    assert failed["message"] == "demo-a-0-0: no such file"
    assert built["groups"][0]["state"] == "Failed"


def test_a_status_is_stable_and_transition_times_change_only_with_the_condition() -> None:
    first = builder.build_status(GOOD, NOW)
    later = datetime(2027, 1, 1, tzinfo=UTC)
    again = builder.build_status(replace(GOOD, service=replace(GOOD.service, status=first)), later)
    assert again == first
    changed = builder.build_status(
        replace(GOOD, service=replace(GOOD.service, status=first), groups=[]), later
    )
    times = {c["type"]: c["lastTransitionTime"] for c in changed["conditions"]}
    assert times["Ready"] == times["Available"] == "2027-01-01T00:00:00Z"
    assert times["Failed"] == "2026-01-02T03:04:05Z"
    assert {c["observedGeneration"] for c in changed["conditions"]} == {3}


def test_the_scale_history_keeps_the_last_changes_across_processes() -> None:
    def scale(number: int) -> dict[str, Any]:
        return {"time": f"2026-01-02T03:04:{number:02}Z", "from": number, "to": number + 1, "reason": "r"}

    before: dict[str, Any] = {}
    for done, recorded in (
        ([], []),
        ([scale(0)], [0]),
        ([scale(0), scale(1)], [0, 1]),
        ([], [0, 1]),  # another process
        ([scale(2)], [0, 1, 2]),
        ([scale(number) for number in range(4, 12)], list(range(4, 12))),
        ([scale(number) for number in range(5, 13)], list(range(5, 13))),
    ):
        inputs = replace(GOOD, service=replace(GOOD.service, status=before), scale_history=done)
        before = builder.build_status(inputs, NOW)
        assert before.get("scaleHistory", []) == [scale(number) for number in recorded]
        assert before.get("lastScale") == (scale(recorded[-1]) if recorded else None)
    former = replace(GOOD.service, status={"lastScale": scale(3)})
    assert builder.build_status(replace(GOOD, service=former), NOW)["scaleHistory"] == [scale(3)]


def test_groups_are_cut_to_64_worst_first() -> None:
    many = [replace(SERVING, name=f"g-{n:03}", uid=str(n)) for n in range(100)]
    built = builder.build_status(replace(GOOD, groups=[*many, replace(CRASHED, name="z")]), NOW)
    assert len(built["groups"]) == 64
    assert built["groups"][0]["name"] == "z"
    assert built["replicas"] == 101


def test_a_long_message_is_cut() -> None:
    built = builder.build_status(replace(GOOD, failure=BlockingReason("PodRejected", "x" * 9999)), NOW)
    assert all(len(c["message"]) <= 1024 for c in built["conditions"])


def gateway(state: dict[str, Any], restarts: int, last: dict[str, Any] | None = None, **meta: str) -> Any:
    status = {"name": "gateway", "restartCount": restarts, "ready": False, "state": state}
    containers = [{**status, "lastState": {"terminated": last} if last else {}}]
    return read_gateway_pod({"metadata": {"name": "g", **meta}, "status": {"containerStatuses": containers}})


def test_a_failing_gateway_pod_of_an_older_template_does_not_fail_the_service() -> None:
    former = GatewayPod(
        "a",
        "",
        False,
        reason="Error",
        message="x",
        failing=True,
        template_hash="1",
        created="2026-01-02T03:04:05Z",
    )
    coming = GatewayPod("b", "", False, template_hash="2", created="2026-01-02T03:05:05Z")
    down = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1}}
    inputs = replace(GOOD, deployment=down)
    assert conditions(replace(inputs, gateways=[former, coming]))["Failed"] == (False, "AsExpected")
    assert conditions(replace(inputs, gateways=[former]))["Failed"] == (True, "GatewayFailing")
    asleep = replace(inputs, gateways=[former], service=service(suspend=True), groups=[])
    assert conditions(asleep)["Failed"] == (False, "AsExpected")


def test_a_gateway_whose_pods_are_rejected_fails_the_service() -> None:
    refused = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: few"}]
    down = {"metadata": {"generation": 1}, "status": {"observedGeneration": 1, "conditions": refused}}
    by_type = {c.type: c for c in every_condition(replace(GOOD, gateways=[], deployment=down))}
    assert (by_type["Failed"].reason, by_type["Failed"].message) == ("GatewayRejected", "exceeded quota: few")
    assert by_type["Ready"].reason == "GatewayRejected"


UNFIT = replace(SERVING, node="", unschedulable="0/1 nodes", containers_ready=False, routable=False)


@pytest.mark.parametrize(
    ("inputs", "scheduled", "ready"),
    [
        (replace(GOOD, groups=[UNFIT]), (False, "Unschedulable"), (False, "Unschedulable")),
        (replace(GOOD, groups=[OLD, UNFIT]), (False, "Unschedulable"), (False, "Unschedulable")),
        (replace(GOOD, groups=[UNFIT], overdue=True), (False, "Unschedulable"), (False, "Unschedulable")),
        (
            replace(GOOD, groups=[replace(UNFIT, unschedulable="")]),
            (False, "Pending"),
            (False, "StartingGroups"),
        ),
        (replace(GOOD, groups=[]), (False, "NotMade"), (False, "StartingGroups")),
        (
            replace(GOOD, service=service(replicas=0), groups=[]),
            (True, "NoGroupsWanted"),
            (True, "ScaledToZero"),
        ),
    ],
)
def test_the_schedulers_message_is_the_reason_of_a_waiting_service(
    inputs: StatusInputs, scheduled: tuple[bool, str], ready: tuple[bool, str]
) -> None:
    by_type = conditions(inputs)
    assert (by_type["Scheduled"], by_type["Ready"]) == (scheduled, ready)


def test_a_gateway_that_is_not_ready_names_its_secrets() -> None:
    keys = {"secretNames": ["teams"], "fromLabel": True}
    gateway = {**SPEC["gateway"], "apiKeys": keys, "tls": {"secretName": "cert"}}
    down = {**DEPLOYED, "status": {**DEPLOYED["status"], "readyReplicas": 0}}
    inputs = replace(GOOD, service=service(gateway=gateway), deployment=down, gateways=[])
    [ready] = [c for c in every_condition(inputs) if c.type == "GatewayReady"]
    assert "they need the Secrets teams, cert of spec.gateway" in ready.message
    assert builder.build_status(inputs, NOW)["url"].startswith("https://")


@pytest.mark.parametrize(
    ("named", "volumes", "closed"),
    [([], ["mizzen-keys"], True), ([], ["mizzen-labelled-api-keys-0"], False), (["teams"], [], False)],
)
def test_a_gateway_without_any_api_key_is_reported(
    named: list[str], volumes: list[str], closed: bool
) -> None:
    gateway = {**SPEC["gateway"], "apiKeys": {"secretNames": named, "fromLabel": True}}
    deployed = {
        **DEPLOYED,
        "metadata": {**DEPLOYED["metadata"], "name": "demo-gateway"},
        "spec": {"template": {"spec": {"volumes": [{"name": name} for name in volumes]}}},
    }
    inputs = replace(GOOD, service=service(gateway=gateway), deployment=deployed)
    [ready] = [c for c in every_condition(inputs) if c.type == "GatewayReady"]
    words = "every request gets 401 because no Secret has the label mizzen.dev/api-keys=demo-gateway"
    assert ready.status
    assert (words in ready.message) is closed


@pytest.mark.parametrize(
    ("report", "condition", "ready"),
    [
        (ApiKeys(3), (True, "KeysRead"), (True, "AllGroupsServing")),
        (ApiKeys(3, "teams/keys.yaml: no YAML"), (False, "ApiKeysUnusable"), (False, "ApiKeysUnusable")),
        (ApiKeys(0), (False, "NoApiKeys"), (True, "AllGroupsServing")),
        (None, None, (True, "AllGroupsServing")),
    ],
)
def test_a_gateways_report_on_api_keys_sets_the_condition(
    report: ApiKeys | None, condition: tuple[bool, str] | None, ready: tuple[bool, str]
) -> None:
    by_type = conditions(replace(GOOD, api_keys=report))
    assert by_type.get("ApiKeysInForce") == condition
    assert by_type["Ready"] == ready
