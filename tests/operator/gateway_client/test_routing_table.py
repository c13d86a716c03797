# SPDX-License-Identifier: Apache-2.0
"""The routing state of a service is merged from the reports of its gateways."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen_operator.gateway_client.routing_table import (
    NO_REPORT,
    GatewayReport,
    RoutingState,
    merge_reports,
    parse_report,
)
from mizzen_operator.pods.observe import ObservedState


def answer(**states: str) -> Any:
    """Return a report with states of engines by uid; `foreign` stands for an engine with another protocol."""
    engines = [
        {"uid": uid, "state": "broken" if state == "foreign" else state, "otherProtocol": state == "foreign"}
        for uid, state in states.items()
    ]
    return parse_report({"engines": engines})


def test_the_worst_report_on_api_keys_applies() -> None:
    def report(body: Any) -> GatewayReport:
        return parse_report({"engines": [], "apiKeys": body})

    good, few = report({"inForce": 2, "problem": ""}), report({"inForce": 0, "problem": ""})
    bad = report({"inForce": 2, "problem": "keys.yaml: this is no YAML"})
    assert report(None).api_keys is None
    assert parse_report({"engines": []}).api_keys is None, "a gateway of an earlier release"
    assert merge_reports([good, few, bad]).api_keys == bad.api_keys
    assert merge_reports([good, few, report(None)]).api_keys == few.api_keys
    assert merge_reports([report(None)]).api_keys is None


def test_quantizations_are_merged_by_the_uid_of_the_pod() -> None:
    def report(**described: str) -> GatewayReport:
        engines = [{"uid": uid, "state": "serving", "quantization": text} for uid, text in described.items()]
        return parse_report({"engines": engines})

    merged = merge_reports([report(a="AWQ", b=""), report(a="AWQ", c="GPTQ"), answer(d="serving")])
    assert merged.quantizations == {"a": "AWQ", "c": "GPTQ"}


def test_tasks_are_merged_by_the_uid_of_the_pod() -> None:
    engines = [{"uid": "a", "state": "serving", "task": "embed"}, {"uid": "b", "state": "serving"}]
    assert merge_reports([parse_report({"engines": engines}), answer(d="serving")]).tasks == {"a": "embed"}


def test_divisions_of_experts_are_merged_by_the_uid_of_the_pod() -> None:
    def report(**groups: int) -> GatewayReport:
        engines = [{"uid": uid, "state": "serving", "expertGroups": count} for uid, count in groups.items()]
        return parse_report({"engines": engines})

    assert merge_reports([report(a=2, b=0), report(a=2, c=1)]).expert_groups == {"a": 2, "c": 1}


def test_engines_that_accept_images_are_merged_by_the_uid_of_the_pod() -> None:
    def report(**accepting: object) -> GatewayReport:
        engines = [{"uid": uid, "state": "serving", "images": value} for uid, value in accepting.items()]
        return parse_report({"engines": engines})

    merged = merge_reports([report(a=True, b=False, c="yes"), report(d=True), answer(e="serving")])
    assert merged.images == {"a": True, "d": True}


def test_an_engine_mismatches_only_if_every_ready_gateway_reports_it() -> None:
    first = answer(a="foreign", b="foreign", c="foreign", d="serving")
    second = answer(a="foreign", b="connecting", c="serving")
    assert merge_reports([first]).protocol_mismatches == {"a", "b", "c"}
    assert (
        merge_reports([first, second]).protocol_mismatches
        == merge_reports([second, first]).protocol_mismatches
        == {"a"}
    )
    no_mismatch: frozenset[str] = frozenset()
    assert merge_reports([first, NO_REPORT]).protocol_mismatches == no_mismatch, "a gateway may route to them"
    assert merge_reports([]) == RoutingState()


def test_an_engine_that_a_gateway_routes_to_does_not_mismatch() -> None:
    engines = [{"uid": "a", "state": "serving", "otherProtocol": True}]
    assert merge_reports([parse_report({"engines": engines})]).protocol_mismatches == frozenset()


def test_a_gateway_of_an_earlier_release_reports_no_protocol_mismatch() -> None:
    old = parse_report({"engines": [{"uid": "a", "state": "broken", "problem": "speaks protocol 1"}]})
    assert merge_reports([answer(a="foreign"), old]).protocol_mismatches == frozenset()


@pytest.mark.parametrize(
    ("status", "complete"),
    [
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, True),
        ({"observedGeneration": 2}, True),
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2}, False),
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}, False),
        ({}, False),
    ],
)
def test_a_gateway_rollout_is_complete_once_no_outdated_pod_is_left(
    status: dict[str, int], complete: bool
) -> None:
    deployment = {"metadata": {"generation": 2}, "status": status}
    assert ObservedState((), frozenset(), (), deployment, None).gateway_rollout_complete is complete
    assert not ObservedState((), frozenset(), (), None, None).gateway_rollout_complete
