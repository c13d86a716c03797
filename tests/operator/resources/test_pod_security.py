# SPDX-License-Identifier: Apache-2.0
"""Every pod of the product meets Pod Security `restricted`, as checked by the API server's admission.

The namespaces of all other operator tests enforce this level too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from chart_manifests import IMAGES
from marks import CONTROL_PLANE
from mizzen_operator.api.gateway_sharing import resolve_sharing
from mizzen_operator.api.types import InferenceService
from mizzen_operator.chart import operator_manifests
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.fetch_job import fetch_job
from mizzen_operator.resources.gateway_deployment import gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.shared_gateway import shared_gateway_spec

pytestmark = CONTROL_PLANE

ROOT = Path(__file__).parents[3]
CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
FETCHED = {
    "source": "hf://Qwen/Qwen3-0.6B",
    "credentialsSecretRef": {"name": "hub", "key": "token"},
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "1Gi"},
}
ON_NODE = {**FETCHED, "cache": {"mode": "HostPath", "path": "/srv/models"}}
FULL_GATEWAY = {
    "mode": "Shared",
    "apiKeys": {"secretNames": ["team-a"], "fromLabel": True},
    "tls": {"secretName": "cert"},
}
GOLDEN = {"verification": {"prompts": [{"prompt": "2+2=", "expected": "4"}]}}
BROKEN = [
    ("securityContext", "runAsNonRoot", False),
    ("securityContext", "runAsUser", 0),
    ("securityContext", "seccompProfile", None),
    ("container", "allowPrivilegeEscalation", None),
    ("container", "capabilities", None),
]
"""Changes that violate the level: part of the pod, field, and value; None removes the field."""
ONLY_THE_VOLUME = (
    'violates PodSecurity "restricted:latest": restricted volume types '
    '(volume "mizzen-model" uses restricted volume type "hostPath")'
)

Make = Callable[..., InferenceService]
Pod = dict[str, Any]


def engines(service: InferenceService) -> list[Pod]:
    return engine_pods(service, CONFIG, revision="abcd1234", group=0, attempt=0)


def of_template(template: Mapping[str, Any]) -> Pod:
    """Return the pod that a controller creates from a template."""
    metadata = {**template["metadata"], "name": "one", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def of_workload(manifests: list[dict[str, Any]]) -> Pod:
    [workload] = [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "Job")]
    return of_template(workload["spec"]["template"])


def pods(make: Make) -> Iterator[tuple[str, Pod]]:
    """Yield a name and an example of each kind of pod in the product, except pods with a hostPath volume."""
    for number, pod in enumerate(engines(make(rollout=GOLDEN, podTemplate={"sharedMemorySizeLimit": "1Gi"}))):
        yield f"engine {number}", pod
    several = make(parallelism={"tensor": 4}, accelerator={"perPod": 2}, networkPolicy="Enabled")
    for number, pod in enumerate(engines(several)):
        yield f"rank {number} of a group", pod
    for number, pod in enumerate(engines(make(model=FETCHED))):
        yield f"engine {number} of a model in a claim", pod
    dedicated = make(gateway={**FULL_GATEWAY, "mode": "Dedicated"})
    yield "gateway", of_workload(gateway_manifests(dedicated_gateway_spec(dedicated), CONFIG))
    sharing = resolve_sharing([make(gateway=FULL_GATEWAY)])
    assert sharing is not None
    yield "shared gateway", of_workload(gateway_manifests(shared_gateway_spec(sharing), CONFIG))
    yield "fetch", of_workload([fetch_job(make(model=FETCHED), CONFIG)])
    yield "operator", of_workload(operator_manifests(ROOT / "charts/mizzen", IMAGES, "default"))


def refusal(api: Any, pod: Pod, namespace: str = "default") -> str:
    """Return the error of Pod Security for a pod; empty if the pod is admitted."""
    body = {**pod, "metadata": {**pod["metadata"], "namespace": namespace}}
    body["spec"] = {name: value for name, value in pod["spec"].items() if name != "serviceAccountName"}
    try:
        api.create(body, dryRun="All")
    except Exception as error:
        if "PodSecurity" not in str(error):
            raise
        return str(error)
    return ""


def without(pod: Pod, place: str, name: str, value: Any) -> Pod:
    """Return a copy of a pod with one field of a security context changed to `value`; None removes the field.

    The security context is that of the first container if `place` is `container`, else that of the pod.
    """
    changed = copy.deepcopy(pod)
    spec = changed["spec"]
    holder = spec["containers"][0] if place == "container" else spec
    context = dict(holder["securityContext"])
    context.pop(name, None)
    holder["securityContext"] = context if value is None else {**context, name: value}
    return changed


def test_every_pod_is_restricted(service: Make, api: Any) -> None:
    refusals = {name: refusal(api, pod) for name, pod in pods(service)}
    assert len(refusals) == 8
    assert {name: error for name, error in refusals.items() if error} == {}


@pytest.mark.parametrize(("place", "name", "value"), BROKEN)
def test_an_unrestricted_pod_is_rejected(service: Make, api: Any, place: str, name: str, value: Any) -> None:
    """This shows that Pod Security admission is enabled, and that the pods need each of these fields."""
    for kind, pod in pods(service):
        assert "restricted" in refusal(api, without(pod, place, name, value)), kind


def test_pods_with_a_cache_on_the_node_violate_the_level_only_by_their_volume(
    service: Make, api: Any, lax_namespace: str
) -> None:
    cached = service(model=ON_NODE)
    for pod in (*engines(cached), of_workload([fetch_job(cached, CONFIG)])):
        assert pod["spec"]["volumes"]
        words = refusal(api, pod)
        assert words.endswith(ONLY_THE_VOLUME), words
        assert refusal(api, pod, lax_namespace) == ""
