# SPDX-License-Identifier: Apache-2.0
"""Services come to rest although admission plugins rewrite the Deployments of their gateways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE

POLICIES = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings"
CONTAINER = "/spec/template/spec/containers/0"
RESOURCES = (
    f'JSONPatch{{op: "add", path: "{CONTAINER}/resources", '
    'value: {"requests": {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "1Gi"}}}'
)
STAMP = (
    'JSONPatch{op: "add", path: "/metadata/annotations/example.com~1last-change", value: '
    '(has(object.metadata.resourceVersion) ? object.metadata.resourceVersion : "0")}'
)
ARGUMENT = (
    f'JSONPatch{{op: "add", path: "{CONTAINER}/args/-", value: "--access-log=" + '
    '(has(object.metadata.resourceVersion) ? object.metadata.resourceVersion : "0")}'
)


@contextmanager
def admission_policy(api: Any, namespace: str, *patches: str) -> Iterator[None]:
    """During the block, let the API server change all Deployments of a namespace by JSON patches (CEL)."""
    name = f"{namespace}.example.com"
    spec = {
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [
                {
                    "apiGroups": ["apps"],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["deployments"],
                }
            ],
        },
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{', '.join(patches)}]"}}],
    }
    kinds = {POLICIES: ("MutatingAdmissionPolicy", spec), BINDINGS: ("MutatingAdmissionPolicyBinding", {})}
    for path, (kind, body) in kinds.items():
        body = body or {"policyName": name}
        version = "admissionregistration.k8s.io/v1"
        api.request(
            "POST", path, {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": body}
        )
    yield
    for path in kinds:
        api.request("DELETE", f"{path}/{name}")


def wait_for_policy(api: Any, namespace: str, wait: Callable[..., Any]) -> None:
    """Wait until the API server changes a Deployment of a namespace."""
    container = {"name": "x", "image": "x", "args": ["x"]}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x", "namespace": namespace, "annotations": {"a": "b"}},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template},
    }
    wait(lambda: api.create(body, dryRun="All")["spec"]["template"]["spec"]["containers"][0].get("resources"))


@pytest.mark.parametrize("patches", [[RESOURCES, STAMP], [RESOURCES, STAMP, ARGUMENT]])
def test_a_service_whose_gateway_admission_plugins_change_comes_to_rest(
    live_service: Callable[..., Service], api: Any, namespace: str, eventually: Any, patches: list[str]
) -> None:
    with admission_policy(api, namespace, *patches):
        wait_for_policy(api, namespace, eventually)
        demo = live_service()
        demo.settle(1)

        def version() -> str:
            return api.get("Deployment", namespace, "demo-gateway")["metadata"]["resourceVersion"]

        def rests() -> bool:
            before = version()
            time.sleep(3.5)  # the operator compares the children several times, every second
            return version() == before

        eventually(rests, 15)
        before = version()
        time.sleep(3.5)
        assert version() == before
        api.patch("Deployment", namespace, "demo-gateway", {"spec": {"replicas": 5}})
        eventually(lambda: api.get("Deployment", namespace, "demo-gateway")["spec"]["replicas"] == 1)
        template = api.get("Deployment", namespace, "demo-gateway")["spec"]["template"]
        assert template["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "1Gi"
        demo.settle(1)
