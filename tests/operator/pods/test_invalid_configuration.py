# SPDX-License-Identifier: Apache-2.0
"""Engines whose configuration cannot work: the reason, the fields in the message, and no restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.group import Group, read_groups
from mizzen_operator.pods.observe import read_gateway_pod
from mizzen_operator.resources.option_fields import translate_engine_options, translate_gateway_options
from mizzen_operator.rollout.actions import DeleteGroup
from mizzen_operator.rollout.planner import plan
from mizzen_operator.rollout.progress import build_target, seconds_to_retry, update_state
from mizzen_operator.rollout.state import load_state
from mizzen_operator.status.conditions import build_conditions
from service_kit import GOOD, rolling

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
NO_GPU = (
    "wrong configuration: rank 0 failed: ValueError: --device cuda finds no GPU here (no driver): "
    "use --device cpu, or a machine with a GPU"
)
TRANSLATED = NO_GPU.replace("--device cuda", "spec.engine.device CUDA").replace(
    "--device cpu", "spec.engine.device CPU"
)


def exited(
    code: int = 2, message: str = NO_GPU, incarnation: int = 0, state: str = "state"
) -> dict[str, Any]:
    """Return an engine pod whose container has exited; `lastState` means that it has been restarted."""
    labels = {
        "mizzen.dev/group": "0",
        "mizzen.dev/revision": "a",
        "mizzen.dev/incarnation": str(incarnation),
    }
    container = {"name": "engine", "ready": False, "restartCount": int(state == "lastState")}
    container[state] = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return {
        "metadata": {
            "name": f"demo-a-0-{incarnation}",
            "uid": f"u{incarnation}",
            "labels": labels,
            "creationTimestamp": NOW.isoformat(),
        },
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


def read(pod: dict[str, Any]) -> list[Group]:
    return list(read_groups("demo", [pod]))


def reconcile(demo: InferenceService, groups: list[Group], minutes: float = 0) -> InferenceService:
    state = update_state(demo, "a", groups, frozenset(), NOW + timedelta(minutes=minutes))
    entries = [{"name": group.name, "restarts": group.restarts} for group in groups]
    return replace(demo, status=json.loads(json.dumps({**state.as_status(), "groups": entries})))


def planned(demo: InferenceService, groups: list[Group]) -> list[Any]:
    target = build_target(demo, "a", load_state(demo.status), restorable=False)
    return list(plan(target, groups, frozenset()))


@pytest.mark.parametrize("state", ["state", "lastState"])
def test_exit_code_2_is_an_invalid_configuration_with_the_fields_of_the_manifest(state: str) -> None:
    (group,) = read(exited(state=state))
    assert (group.reason, group.failing) == ("InvalidConfiguration", True)
    assert group.message == TRANSLATED


def test_other_exit_codes_are_no_invalid_configuration() -> None:
    (group,) = read(exited(1, "rank_failed: too little memory"))
    assert group.reason == "Error"
    pod = exited(state="lastState")
    pod["status"]["containerStatuses"][0]["ready"] = True
    assert read(pod)[0].reason == ""


def test_a_misconfigured_group_is_deleted_and_started_again_after_ten_minutes() -> None:
    groups = read(exited())
    demo = reconcile(rolling(), groups)
    state = load_state(demo.status)
    failed = {c.type: c for c in build_conditions(replace(GOOD, service=demo, rollout=state))}["Failed"]
    assert (failed.status, failed.reason) == (True, "InvalidConfiguration")
    assert TRANSLATED in failed.message
    (delete,) = planned(demo, groups)
    assert isinstance(delete, DeleteGroup)
    demo = reconcile(demo, [], 1)
    assert planned(demo, []) == []
    assert seconds_to_retry(load_state(demo.status), NOW + timedelta(minutes=1)) == 9 * 60
    demo = reconcile(demo, [], 10)
    assert load_state(demo.status).abandoned is None
    assert len(planned(demo, [])) == 1
    demo = reconcile(demo, read({**exited(incarnation=1)}), 11)
    assert seconds_to_retry(load_state(demo.status), NOW + timedelta(minutes=11)) == 10 * 60


def test_a_change_of_the_spec_starts_the_group_at_once() -> None:
    demo = reconcile(rolling(), read(exited()))
    changed = replace(demo, spec={**demo.spec, "suspend": True})
    assert load_state(reconcile(changed, [], 1).status).abandoned is None


def test_a_revision_that_has_served_keeps_its_restart_budget() -> None:
    """One node without a working GPU must not stop the replacement of a group elsewhere."""
    demo = rolling()
    serving = update_state(
        demo, "a", [replace(read(exited())[0], reason="", containers_ready=True)], frozenset({"u0"}), NOW
    )
    demo = replace(demo, status=serving.as_status())
    assert load_state(demo.status).stable_revision == "a"
    assert load_state(reconcile(demo, read(exited(incarnation=1)), 1).status).abandoned is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--tensor 3 must divide the 16 heads", "spec.parallelism.tensor 3 must divide the 16 heads"),
        ("--model /m is not a folder", "spec.model.source /m is not a folder"),
        (
            "--kv-cache-dtype fp8 needs --dtype bfloat16",
            "spec.engine.kvCacheDtype FP8 needs spec.model.dtype BFloat16",
        ),
        ("--context-length 9 exceeds", "spec.model.contextLength 9 exceeds"),
        ("--policy must be one of fcfs", "--policy must be one of fcfs"),
        ("--credentials /c cannot be read", "spec.model.credentialsSecretRef /c cannot be read"),
        (
            "Usage: mizzen engine [OPTIONS]\nTry 'mizzen engine -h' for help.\n\nError: No such option: "
            "--gpu-memory-utilization. In Mizzen: --memory-fraction X\n",
            "wrong configuration: No such option: --gpu-memory-utilization. In Mizzen: "
            "spec.engine.memoryFraction X; options come from spec.engine.extraArgs, or from an operator of "
            "another release than the image",
        ),
        (
            "No such option: --tool-call-parser. In Mizzen: --tool-parser NAME",
            "No such option: --tool-call-parser. In Mizzen: spec.gateway.toolParser NAME",
        ),
        (
            "Usage: mizzen engine [OPTIONS]\n\nError: Invalid value for '--threads': 0 is not in the range",
            "wrong configuration: Invalid value for '--threads': 0 is not in the range",
        ),
        ("a--device b", "a--device b"),
    ],
)
def test_options_of_engines_become_fields(message: str, expected: str) -> None:
    assert translate_engine_options(message) == expected


def test_options_of_gateways_become_fields() -> None:
    text = "--tool-parser none and --tls-cert /x.pem"
    assert (
        translate_gateway_options(text)
        == "spec.gateway.toolParser None and spec.gateway.tls.secretName /x.pem"
    )
    status = {
        "containerStatuses": [{"name": "gateway", "state": {"terminated": {"message": "--queue-size 0"}}}]
    }
    pod = read_gateway_pod({"metadata": {"name": "g"}, "status": status})
    assert pod.message == "spec.gateway.admission.queueSize 0"
