# SPDX-License-Identifier: Apache-2.0
"""Rendered pods of multi-pod groups: how they find each other, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.network_policy import service_network_policies
from mizzen_operator.resources.pod_disruption_budget import engine_disruption_budget
from mizzen_operator.resources.revision_hash import revision

pytestmark = CONTROL_PLANE

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
Make = Callable[..., InferenceService]


def option_of(pod: dict[str, Any], name: str) -> str:
    arguments = pod["spec"]["containers"][0]["args"]
    return arguments[arguments.index(name) + 1]


def test_the_pods_of_a_group_find_each_other(service: Make, api: Any) -> None:
    demo = service(parallelism={"tensor": 8}, accelerator={"perPod": 2}, networkPolicy="Enabled")
    pods = engine_pods(demo, CONFIG, revision="abcd1234", group=3, attempt=7)
    for pod in pods:
        api.request("POST", "/api/v1/namespaces/default/pods", pod, params={"dryRun": "All"})
    leader = "demo-abcd1234-3-7"
    assert [pod["metadata"]["name"] for pod in pods] == [leader, *(f"{leader}-{rank}" for rank in (1, 2, 3))]
    for rank, pod in enumerate(pods):
        labels, [container] = pod["metadata"]["labels"], pod["spec"]["containers"]
        assert (labels["mizzen.dev/rank"], labels["mizzen.dev/pods"]) == (str(rank), "4")
        assert (option_of(pod, "--nodes"), option_of(pod, "--node-rank")) == ("4", str(rank))
        assert option_of(pod, "--ranks-address") == "$(POD_IP)"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert ("wire" in [port["name"] for port in container["ports"]]) == (rank == 0)
    assert "--leader-address" not in pods[0]["spec"]["containers"][0]["args"]
    assert option_of(pods[1], "--leader-address") == f"{leader}.demo-ranks.default.svc"
    engines, *_ = service_network_policies(demo, CONFIG)
    [among] = [rule for rule in engines["spec"]["ingress"] if "ports" not in rule]
    assert among["from"] == [{"podSelector": engines["spec"]["podSelector"]}]


def test_host_names_are_valid_for_the_longest_name_of_a_service(service: Make) -> None:
    demo = replace(service(parallelism={"tensor": 8}, accelerator={"perPod": 1}), name="x" * 40)
    pods = engine_pods(demo, CONFIG, revision="abcd1234", group=999, attempt=99999)
    assert max(len(pod["spec"]["hostname"]) for pod in pods) <= 63


def test_the_pods_of_a_group_prefer_the_same_topology_domain(service: Make) -> None:
    several = {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}
    pod, other = engine_pods(service(**several), CONFIG, revision="r", group=3, attempt=7)
    [near] = pod["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    own = {"service": "demo", "group": "3", "revision": "r", "incarnation": "7"}
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"] == {
        f"mizzen.dev/{name}": value for name, value in own.items()
    }
    assert near["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    [spread] = pod["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["mizzen.dev/rank"] == "0", (
        "groups are spread, not their pods"
    )
    assert "topologySpreadConstraints" not in other["spec"]
    mine = {"topologyKey": "a", "labelSelector": {}}
    hard = "requiredDuringSchedulingIgnoredDuringExecution"
    several["parallelism"]["topologyKey"] = "example.com/rack"
    with_affinity = service(**several, podTemplate={"affinity": {"podAffinity": {hard: [mine]}}})
    pod, _ = engine_pods(with_affinity, CONFIG, revision="r", group=3, attempt=7)
    terms = pod["spec"]["affinity"]["podAffinity"][hard]
    assert [term["topologyKey"] for term in terms] == ["a", "example.com/rack"]


def test_pods_of_a_group_have_the_pod_group_labels_of_kueue(service: Make) -> None:
    queue = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    several = {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}
    for pod in engine_pods(service(**several, podTemplate=queue), CONFIG, revision="r", group=3, attempt=7):
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "demo-r-3-7"
        assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    [alone] = engine_pods(service(podTemplate=queue), CONFIG, revision="r", group=3, attempt=7)
    assert "kueue.x-k8s.io/pod-group-name" not in alone["metadata"]["labels"]


def test_the_revision_depends_on_pods_per_group_and_topology(service: Make) -> None:
    two = {"engine": {"device": "CPU"}, "parallelism": {"tensor": 2}}
    near = {**two, "parallelism": {"tensor": 2, "topologyKey": "example.com/rack"}}
    whole = {**two, "parallelism": {"tensor": 2, "expert": 2}}
    services = [service(**two), service(**two, accelerator={"perPod": 1}), service(**near), service(**whole)]
    assert len({revision(variant, CONFIG) for variant in services}) == 4


@pytest.mark.parametrize(
    ("groups", "unavailable", "least"), [(3, 0, 5), (3, 1, 5), (3, 2, 3), (1, 0, 2), (1, 1, 1), (0, 0, 0)]
)
def test_evictions_leave_the_minimum_of_complete_groups(
    groups: int, unavailable: int, least: int, service: Make
) -> None:
    """Each group has two pods; at most `maxUnavailable` groups may lack a pod."""
    spec = {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}, "replicas": groups}
    demo = service(**spec, rollout={"maxUnavailable": unavailable})
    budget = engine_disruption_budget(demo)["spec"]
    assert budget["minAvailable"] == least
    assert "mizzen.dev/rank" not in budget["selector"]["matchLabels"]
