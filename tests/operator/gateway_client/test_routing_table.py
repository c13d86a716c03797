"""What gateways say of a service's groups, put together."""

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
    """Of a gateway: `serving`, `connecting`, or `foreign` for another protocol, by uid."""
    engines = [
        {"uid": uid, "state": "broken" if state == "foreign" else state, "otherProtocol": state == "foreign"}
        for uid, state in states.items()
    ]
    return parse_report({"engines": engines})


def test_the_worst_that_a_gateway_says_of_its_api_keys_counts() -> None:
    def told(body: Any) -> GatewayReport:
        return parse_report({"engines": [], "apiKeys": body})

    good, few = told({"inForce": 2, "problem": ""}), told({"inForce": 0, "problem": ""})
    bad = told({"inForce": 2, "problem": "keys.yaml: this is no YAML"})
    assert told(None).api_keys is None
    assert parse_report({"engines": []}).api_keys is None, "a gateway of a release before"
    assert merge_reports([good, few, bad]).api_keys == bad.api_keys
    assert merge_reports([good, few, told(None)]).api_keys == few.api_keys
    assert merge_reports([told(None)]).api_keys is None


def test_a_stranger_is_one_to_every_ready_gateway() -> None:
    one = answer(a="foreign", b="foreign", c="foreign", d="serving")
    other = answer(a="foreign", b="connecting", c="serving")
    assert merge_reports([one]).protocol_mismatches == {"a", "b", "c"}
    assert (
        merge_reports([one, other]).protocol_mismatches
        == merge_reports([other, one]).protocol_mismatches
        == {"a"}
    )
    assert merge_reports([one, NO_REPORT]).protocol_mismatches == frozenset(), "it may route to them"
    assert merge_reports([]) == RoutingState()


def test_what_a_gateway_routes_to_is_none_to_any() -> None:
    engines = [{"uid": "a", "state": "serving", "otherProtocol": True}]
    assert merge_reports([parse_report({"engines": engines})]).protocol_mismatches == frozenset()


def test_a_gateway_of_an_earlier_release_says_nothing_of_protocols() -> None:
    old = parse_report({"engines": [{"uid": "a", "state": "broken", "problem": "speaks protocol 1"}]})
    assert merge_reports([answer(a="foreign"), old]).protocol_mismatches == frozenset()


@pytest.mark.parametrize(
    ("status", "alike"),
    [
        ({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2}, True),
        ({"observedGeneration": 2}, True),
        ({"observedGeneration": 2, "replicas": 3, "updatedReplicas": 2}, False),
        ({"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2}, False),
        ({}, False),
    ],
)
def test_gateways_are_alike_once_none_of_a_former_template_is_left(
    status: dict[str, int], alike: bool
) -> None:
    deployment = {"metadata": {"generation": 2}, "status": status}
    assert ObservedState((), frozenset(), (), deployment, None).gateway_rollout_complete is alike
    assert not ObservedState((), frozenset(), (), None, None).gateway_rollout_complete
