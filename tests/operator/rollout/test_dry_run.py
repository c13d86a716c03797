# SPDX-License-Identifier: Apache-2.0
"""An invalid podTemplate is reported before any group is deleted; the message names the service's fields."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service, api_requests
from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.field_origin import translate_message

pytestmark = CONTROL_PLANE
TERM = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}}
AFFINITY = {"nodeAfinity": REQUIRED}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"affinity": AFFINITY}, "a pod has no such field: spec.podTemplate.affinity.nodeAfinity;"),
    (
        {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {"sizeLimt": "1Gi"}}]},
        "a pod has no such field: spec.podTemplate.volumes[1].emptyDir.sizeLimt;",
    ),
    (
        {"topologySpreadConstraints": [{**SPREAD, "labelSelector": {"matchLabel": {"a": "b"}}}]},
        "a pod has no such field: spec.podTemplate.topologySpreadConstraints[0].labelSelector.matchLabel;",
    ),
    (
        {"affinity": {"nodeAffinity": 7}},
        "spec.podTemplate.affinity.nodeAffinity",
    ),
    (
        {"tolerations": [{"key": "a gpu", "operator": "Exists"}]},
        "spec.podTemplate.tolerations[0].key: Invalid value",
    ),
    (
        {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}},
        "spec.podTemplate.resources.requests: Invalid value",
    ),
    ({"labels": {"a key": "b"}}, "spec.podTemplate.labels: Invalid value"),
    ({"annotations": {"a key": "b"}}, "spec.podTemplate.annotations: Invalid value"),
    (
        {"volumes": [{"name": "a", "hostPath": {"path": "../x"}}]},
        "spec.podTemplate.volumes[0].hostPath.path: Invalid value",
    ),
]
"""Invalid podTemplates, each with a part of the message that the service's condition must contain."""


@pytest.mark.parametrize(
    ("template", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_invalid_pod_field_is_reported_by_its_field_in_the_service(
    live_service: Callable[..., Service], template: dict[str, Any], words: str
) -> None:
    demo = live_service(podTemplate=template)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    assert words in demo.condition("Failed")["message"]
    assert not demo.pods()
    demo.patch(podTemplate=dict.fromkeys(template))
    demo.settle(1)
    assert demo.condition("Failed")["status"] == "False"


@pytest.mark.parametrize(
    ("message", "translated"),
    [
        ("spec.containers[0].env[3].name: Invalid value", "spec.containers[0].env[3].name: Invalid value"),
        ("spec.containers[0].env[4].name: Invalid value", "spec.engine.env[0].name: Invalid value"),
        ("spec.containers[0].image: Required value", "spec.engine.image: Required value"),
        ("[spec.volumes[1].emptyDir.sizeLimit: X, b]", "[spec.podTemplate.sharedMemorySizeLimit: X, b]"),
        ("spec.volumes[0].name: Invalid value", "spec.volumes[0].name: Invalid value"),
        ("spec.volumes[3].csi.driver: X", "spec.podTemplate.volumes[0].csi.driver: X"),
        (
            "spec.containers[0].volumeMounts[3].name: Not found",
            "spec.podTemplate.volumeMounts[0].name: Not found",
        ),
        ("spec.nodeSelector: Invalid value", "spec.accelerator.nodeSelector: Invalid value"),
        (
            "metadata.labels: Invalid value: a.metadata.labels",
            "spec.podTemplate.labels: Invalid value: a.metadata.labels",
        ),
        (
            "json: cannot unmarshal number into Go struct field PodSpec.spec.affinity of type v1.Affinity",
            "json: cannot unmarshal number into field spec.podTemplate.affinity of type v1.Affinity",
        ),
        ('Pod "demo-1-0-0" is invalid: spec.hostname: Invalid value', "spec.hostname: Invalid value"),
    ],
)
def test_a_field_path_of_a_pod_is_translated_to_the_service(
    service: Callable[..., InferenceService], message: str, translated: str
) -> None:
    one = service(
        engine={"device": "CPU", "env": [{"name": "A", "value": "b"}]},
        podTemplate={
            "volumes": [{"name": "a", "emptyDir": {}}],
            "volumeMounts": [{"name": "a", "mountPath": "/a"}],
        },
    )
    [pod] = engine_pods(one, OperatorConfig(), revision="r", group=0, attempt=0)
    assert translate_message(one, pod, message) == translated


def test_serving_groups_stay_while_the_next_revision_is_rejected(
    live_service: Callable[..., Service],
) -> None:
    """Without surge and dry run, an outdated group would be deleted before its replacement is rejected."""
    demo = live_service(replicas=2, rollout={"maxSurge": 0, "maxUnavailable": 1})
    demo.settle(2)
    before = demo.live()
    demo.patch(podTemplate={"affinity": AFFINITY})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    time.sleep(3)
    assert demo.live() == before
    assert demo.condition("Available")["status"] == "True"
    demo.api.delete("Pod", demo.namespace, before[0], gracePeriodSeconds=0)
    demo.eventually(lambda: demo.status()["availableReplicas"] == 2, expectation="a lost group is recreated")
    [old] = {pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in demo.pods()}
    assert old == demo.status()["currentRevision"] != demo.status()["updateRevision"]


def test_there_is_one_dry_run_per_revision(live_service: Callable[..., Service], operators: Any) -> None:
    def posts() -> float:
        found = api_requests(operators.http(operators.leader(), "/metrics"))
        return sum(times for (verb, kind, _), times in found.items() if (verb, kind) == ("POST", "Pod"))

    first = posts()
    demo = live_service(podTemplate={"annotations": {"team": "a"}}, replicas=2)
    demo.settle(2)
    assert posts() - first == 3, "a dry run, and two pods"
    first = posts()
    demo.api.delete("Pod", demo.namespace, demo.live()[0], gracePeriodSeconds=0)
    demo.eventually(lambda: posts() > first)
    demo.settle(2)
    assert posts() - first == 1
