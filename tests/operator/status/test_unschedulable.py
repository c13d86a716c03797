# SPDX-License-Identifier: Apache-2.0
"""Scheduler messages name the fields of the manifest, and Failed does not contradict them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mizzen_operator.status.conditions import build_conditions
from mizzen_operator.status.unschedulable import explain_unschedulable
from service_kit import GOOD, SERVING, SPEC, service


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: not helpful",
            "a pod requests 2 of spec.accelerator.resourceName (nvidia.com/gpu): free or add such devices, "
            "or correct spec.accelerator.resourceName, perPod or spec.parallelism.tensor",
        ),
        (
            "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector",
            "spec.accelerator.nodeSelector (gpu=h100) must match the labels of a node",
        ),
        (
            "0/3 nodes are available: 1 Insufficient memory, 2 node(s) had untolerated taint {gpu: }",
            "spec.podTemplate.resources requests 9Ti of memory: lower it, or free or add a node with as "
            "much; spec.podTemplate.tolerations can tolerate the taint",
        ),
        (
            "0/3 nodes are available: 3 Insufficient cpu.",
            "spec.podTemplate.resources requests cpu: lower it, or free or add a node with as much",
        ),
    ],
)
def test_an_unschedulable_pod_names_the_fields(message: str, expected: str) -> None:
    accelerator = {"resourceName": "nvidia.com/gpu", "nodeSelector": {"gpu": "h100"}}
    template = {**SPEC["podTemplate"], "resources": {"requests": {"memory": "9Ti"}}}
    demo = service(parallelism={"tensor": 2}, accelerator=accelerator, podTemplate=template)
    waiting = replace(SERVING, node="", unschedulable=message, routable=False, containers_ready=False)
    found = {c.type: c for c in build_conditions(replace(GOOD, service=demo, groups=[waiting]))}
    assert found["Scheduled"].reason == found["Ready"].reason == "Unschedulable"
    assert found["Scheduled"].message == f"{waiting.name}: {message}; {expected}"
    assert (found["Failed"].status, found["Failed"].reason) == (False, "AsExpected")
    assert found["Failed"].message == (
        "the spec is accepted, but no node fits a pod: see the condition Scheduled"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "3 Insufficient nvidia.com/gpu.",
            "a pod requests 1 of spec.accelerator.resourceName or the accelerator profile large "
            "(nvidia.com/gpu): free or add such devices, or correct spec.accelerator.resourceName, perPod or "
            "spec.parallelism.tensor",
        ),
        (
            "3 node(s) didn't match Pod's node affinity/selector",
            "spec.accelerator.nodeSelector or the accelerator profile large (gpu=h100) must match the labels "
            "of a node",
        ),
        (
            "1 node(s) had untolerated taint {gpu: }",
            "spec.podTemplate.tolerations or the accelerator profile large can tolerate the taint",
        ),
    ],
)
def test_an_unschedulable_pod_names_the_accelerator_profile(message: str, expected: str) -> None:
    accelerator = {"resourceName": "nvidia.com/gpu", "nodeSelector": {"gpu": "h100"}, "profile": "large"}
    assert explain_unschedulable(service(accelerator=accelerator), message) == f"{message}; {expected}"
