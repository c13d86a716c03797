# SPDX-License-Identifier: Apache-2.0
"""The autoscaler in the operator's process, with a real API server and simulated gateways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from live_service import api_requests, no_namespace_terminates
from mizzen_operator.autoscaling.autoscaler import PERIOD_SECONDS, competing_hpa

TO_ZERO = {"minReplicas": 0, "maxReplicas": 3, "idleSecondsToZero": 5, "scaleDownStabilizationSeconds": 0}


class Scaled:
    """One autoscaled service in a namespace of its own."""

    def __init__(self, api: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self._api, self.namespace, self.eventually = api, namespace, eventually

    def body(self) -> dict[str, Any]:
        return self._api.get("InferenceService", self.namespace, "demo")

    def condition(self, name: str) -> tuple[str, str]:
        conditions = self.body().get("status", {}).get("conditions", [])
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == name), ("Absent", ""))

    def serves(self, groups: int) -> bool:
        body = self.body()
        status = body.get("status", {})
        return (
            body["spec"]["replicas"] == groups
            and status.get("availableReplicas") == groups
            and self.condition("Ready")[0] == "True"
        )


@pytest.fixture
def scaled(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Callable[..., Scaled]]:
    def make(**spec: Any) -> Scaled:
        body = minimal(**{"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, **spec})
        body["metadata"]["namespace"] = namespace
        api.create(body)
        return Scaled(api, namespace, eventually)

    yield make
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


def test_an_idle_service_is_scaled_to_zero_and_back_when_a_request_waits(
    scaled: Callable[..., Scaled], node: Any
) -> None:
    demo = scaled(autoscaling=TO_ZERO)
    demo.eventually(lambda: demo.serves(1), 120, "one group serves")
    assert demo.condition("ScalingActive") == ("True", "Autoscaling")
    node.behaviour.loads[demo.namespace] = {"idleSeconds": 6.0}
    demo.eventually(lambda: demo.serves(0), 120, "no group is left")
    last = demo.eventually(lambda: demo.body()["status"].get("lastScale"), 60)
    assert (last["from"], last["to"], last["reason"]) == (1, 0, "Idle")
    node.behaviour.loads[demo.namespace] = {"waiting": 1, "queued": 1}
    demo.eventually(lambda: demo.body()["spec"]["replicas"] == 1, 120, "a request wakes a group")
    node.behaviour.loads[demo.namespace] = {"inFlight": 1}
    demo.eventually(lambda: demo.serves(1), 120, "the group serves")
    demo.eventually(lambda: demo.body()["status"]["lastScale"]["reason"] == "RequestsWait", 60)
    history = [(entry["from"], entry["to"]) for entry in demo.body()["status"]["scaleHistory"]]
    assert history == [(1, 0), (0, 1)]


def test_saturated_engines_cause_a_scale_up(scaled: Callable[..., Scaled], node: Any, api: Any) -> None:
    demo = scaled(autoscaling={"minReplicas": 1, "maxReplicas": 2})
    demo.eventually(lambda: demo.serves(1), 120, "one group serves")
    node.behaviour.loads[demo.namespace] = {"inFlight": 9, "pagesUsed": 95}
    demo.eventually(lambda: demo.serves(2), 120, "two groups serve")
    last = demo.eventually(lambda: demo.body()["status"].get("lastScale"), 60)
    assert (last["from"], last["to"], last["reason"]) == (1, 2, "SaturationAboveTarget")


def other_autoscaler(api: Any, namespace: str) -> None:
    target = {"apiVersion": "mizzen.dev/v1alpha1", "kind": "InferenceService", "name": "demo"}
    api.request(
        "POST",
        f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers",
        {"metadata": {"name": "other"}, "spec": {"scaleTargetRef": target, "maxReplicas": 5}},
    )


def test_a_service_with_an_hpa_is_not_scaled(
    scaled: Callable[..., Scaled], node: Any, api: Any, namespace: str
) -> None:
    other_autoscaler(api, namespace)
    node.behaviour.loads[namespace] = {"inFlight": 9, "pagesUsed": 95}
    demo = scaled(autoscaling={"minReplicas": 1, "maxReplicas": 2})
    demo.eventually(lambda: demo.condition("ScalingActive") == ("False", "AnotherAutoscaler"), 120)
    assert demo.body()["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("target", "competes"),
    [
        ({"apiVersion": "mizzen.dev/v1alpha1"}, True),
        ({"apiVersion": "mizzen.dev/v1"}, True),
        ({"apiVersion": "serving.kserve.io/v1beta1"}, False),
        ({"apiVersion": "v1"}, False),
        ({}, False),
        ({"apiVersion": "mizzen.dev/v1alpha1", "kind": "Deployment"}, False),
        ({"apiVersion": "mizzen.dev/v1alpha1", "name": "another"}, False),
    ],
)
def test_only_an_hpa_for_this_api_competes(target: dict[str, str], competes: bool) -> None:
    body = {"metadata": {"name": "other"}}
    spec = {"scaleTargetRef": {"kind": "InferenceService", "name": "demo", **target}}
    assert competing_hpa([{**body, "spec": spec}], "demo") == ("other" if competes else "")


def test_an_hpa_that_is_created_later_is_noticed_before_the_next_write(
    scaled: Callable[..., Scaled], node: Any, api: Any, namespace: str
) -> None:
    demo = scaled(autoscaling={"minReplicas": 1, "maxReplicas": 4})
    node.behaviour.loads[namespace] = {"inFlight": 9, "pagesUsed": 95}
    demo.eventually(
        lambda: demo.body()["spec"]["replicas"] == 2,
        120,
        "the operator has checked for other autoscalers and scaled",
    )
    other_autoscaler(api, namespace)  # the operator's next regular check would come a minute later
    demo.eventually(lambda: demo.condition("ScalingActive") == ("False", "AnotherAutoscaler"), 120)
    assert demo.body()["spec"]["replicas"] == 2


def test_a_steady_load_causes_no_api_requests(
    scaled: Callable[..., Scaled], node: Any, api: Any, operators: Any
) -> None:
    """The autoscaler reads the load from gateways and engines, so its decisions need no API requests."""
    demo = scaled(autoscaling={"minReplicas": 1, "maxReplicas": 4})
    node.behaviour.loads[demo.namespace] = {"inFlight": 1, "pagesUsed": 70}
    demo.eventually(lambda: demo.serves(1), 120, "one group serves")
    demo.eventually(lambda: demo.condition("ScalingActive") == ("True", "Autoscaling"), 60)

    def requests() -> object:
        return api_requests(operators.http(operators.leader(), "/metrics"))

    def quiet() -> bool:
        before = requests()
        time.sleep(2 * PERIOD_SECONDS)
        return requests() == before

    demo.eventually(lambda: no_namespace_terminates(api), 120, "the namespaces of earlier tests are gone")
    # A regular reconcile, or a check for other autoscalers, may fall into one of the intervals.
    demo.eventually(quiet, 24 * PERIOD_SECONDS, "neither a write nor a read")
    assert demo.body()["spec"]["replicas"] == 1
