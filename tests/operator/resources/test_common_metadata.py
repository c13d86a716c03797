# SPDX-License-Identifier: Apache-2.0
"""All objects and pods of a service have the labels and annotations of `spec.commonMetadata`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.api.gateway_sharing import resolve_sharing
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods, ranks_service
from mizzen_operator.resources.fetch_job import cache_claim, fetch_job
from mizzen_operator.resources.gateway_deployment import gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.key_secrets import root_secret
from mizzen_operator.resources.metadata import CONTAINER_SECURITY, POD_SECURITY
from mizzen_operator.resources.network_policy import fetch_network_policy, service_network_policies
from mizzen_operator.resources.pod_disruption_budget import (
    engine_disruption_budget,
    gateway_disruption_budget,
)
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.resources.shared_gateway import shared_gateway_spec, shared_keys_secret

pytestmark = CONTROL_PLANE
CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
COMMON = {"labels": {"owner": "a", "app.kubernetes.io/managed-by": "x"}, "annotations": {"note": "b"}}
VERSION = "admissionregistration.k8s.io/v1"
POLICIES = f"/apis/{VERSION}/validatingadmissionpolicies"
BINDINGS = f"/apis/{VERSION}/validatingadmissionpolicybindings"


def object_metadata(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metadata of an object, and of its pods if it has a pod template."""
    template = manifest.get("spec", {}).get("template")
    return [manifest["metadata"], *([template["metadata"]] if template else [])]


def test_every_manifest_has_the_common_labels_and_annotations(
    service: Callable[..., InferenceService],
) -> None:
    cache = {"mode": "PersistentVolumeClaim", "claimName": "models", "size": "1Gi"}
    demo = service(commonMetadata=COMMON, model={"source": "hf://a/b", "cache": cache})
    sharing = resolve_sharing([service(commonMetadata=COMMON, gateway={"mode": "Shared"})])
    assert sharing is not None
    shared, claim = shared_gateway_spec(sharing), cache_claim(demo)
    assert claim is not None
    manifests = [
        *gateway_manifests(dedicated_gateway_spec(demo), CONFIG),
        gateway_disruption_budget(dedicated_gateway_spec(demo)),
        *gateway_manifests(shared, CONFIG),
        shared_keys_secret(shared),
        fetch_job(demo, CONFIG),
        claim,
        root_secret(demo),
        engine_disruption_budget(demo),
        ranks_service(demo),
        *service_network_policies(demo, CONFIG),
        fetch_network_policy(demo, CONFIG),
        *engine_pods(demo, CONFIG, revision="abcd1234", group=0, attempt=1),
    ]
    for manifest in manifests:
        for meta in object_metadata(manifest):
            assert meta["labels"]["owner"] == "a", manifest
            assert meta["labels"]["app.kubernetes.io/managed-by"] == "mizzen", "the operator's labels win"
            assert meta["annotations"]["note"] == "b", manifest


def test_labels_of_the_pod_template_take_precedence(service: Callable[..., InferenceService]) -> None:
    demo = service(commonMetadata=COMMON, podTemplate={"labels": {"owner": "c"}})
    [pod] = engine_pods(demo, CONFIG, revision="abcd1234", group=0, attempt=1)
    assert pod["metadata"]["labels"]["owner"] == "c"


def test_common_metadata_starts_no_rollout(service: Callable[..., InferenceService]) -> None:
    assert revision(service(), CONFIG) == revision(service(commonMetadata=COMMON), CONFIG)


@contextmanager
def required_label(api: Any, namespace: str) -> Iterator[None]:
    """During the block, let the API server reject pods of a namespace without the label `owner`."""
    name = f"{namespace}.example.com"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    policy = {
        "failurePolicy": "Fail",
        "matchConstraints": {"namespaceSelector": selector, "resourceRules": [rule]},
        "validations": [{"expression": "'owner' in object.metadata.?labels.orValue({})"}],
    }
    bodies = {
        POLICIES: ("ValidatingAdmissionPolicy", policy),
        BINDINGS: ("ValidatingAdmissionPolicyBinding", {"policyName": name, "validationActions": ["Deny"]}),
    }
    for path, (kind, spec) in bodies.items():
        body = {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        api.request("POST", path, body)
    yield
    for path in bodies:
        api.request("DELETE", f"{path}/{name}")


def test_a_service_runs_where_a_policy_requires_a_label(
    live_service: Callable[..., Service], api: Any, namespace: str, eventually: Any
) -> None:
    with required_label(api, namespace):
        container = {"name": "x", "image": "x", "securityContext": CONTAINER_SECURITY}
        pod = {"securityContext": POD_SECURITY, "containers": [container]}
        meta = {"name": "x", "namespace": namespace}

        def denied() -> bool:
            try:
                api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}, dryRun="All")
            except Exception as refusal:
                return "example.com" in str(refusal)
            return False

        eventually(denied)
        demo = live_service(commonMetadata=COMMON)
        demo.settle(1)
        pods = api.list("Pod", namespace)
        assert {pod["metadata"]["labels"]["mizzen.dev/component"] for pod in pods} == {"engine", "gateway"}
        [record] = api.list("ControllerRevision", namespace)
        assert all(item["metadata"]["annotations"]["note"] == "b" for item in [*pods, record])
