# SPDX-License-Identifier: Apache-2.0
"""Pods of groups that avoid nodes: the API server accepts them, and they keep the affinity of the spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.node_avoidance import read_avoided_nodes

pytestmark = CONTROL_PLANE

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
EXCLUDED = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n1", "n2")]
ZONE = [{"key": "zone", "operator": "In", "values": ["a"]}]
OWN_FIELD = [{"key": "metadata.name", "operator": "NotIn", "values": ["own"]}]
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SOFT = {PREFERRED: [{"weight": 1, "preference": {"matchExpressions": ZONE}}]}


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        ({}, [{"matchFields": EXCLUDED}]),
        ({"nodeAffinity": SOFT}, [{"matchFields": EXCLUDED}]),
        (
            required({"matchExpressions": ZONE}, {"matchFields": OWN_FIELD}),
            [{"matchExpressions": ZONE, "matchFields": EXCLUDED}, {"matchFields": [*OWN_FIELD, *EXCLUDED]}],
        ),
        (required({}), [{}]),
    ],
    ids=["none", "preferred", "required", "empty term"],
)
@pytest.mark.parametrize("pods", [1, 2])
def test_every_term_of_the_affinity_excludes_the_nodes(
    affinity: dict[str, Any],
    terms: list[dict[str, Any]],
    pods: int,
    service: Callable[..., InferenceService],
    api: Any,
) -> None:
    demo = service(
        podTemplate={"affinity": affinity}, parallelism={"tensor": pods}, accelerator={"perPod": 1}
    )
    for pod in engine_pods(demo, CONFIG, revision="r", group=0, attempt=1, avoided_nodes=("n1", "n2")):
        params = {"dryRun": "All", "fieldValidation": "Strict"}
        stored = api.request("POST", "/api/v1/namespaces/default/pods", pod, params=params)
        assert read_avoided_nodes(stored) == ("n1", "n2")
        placed = stored["spec"]["affinity"]
        kept = {key: value for key, value in affinity.get("nodeAffinity", {}).items() if key != REQUIRED}
        assert placed["nodeAffinity"] == {**kept, REQUIRED: {"nodeSelectorTerms": terms}}
        assert ("podAffinity" in placed) == (pods > 1)


def test_a_pod_that_avoids_no_node_has_no_affinity(service: Callable[..., InferenceService]) -> None:
    [pod] = engine_pods(service(), CONFIG, revision="r", group=0, attempt=0)
    assert "affinity" not in pod["spec"] and read_avoided_nodes(pod) == ()
