# SPDX-License-Identifier: Apache-2.0
"""Tracing in pods: the collector's endpoint and headers, from the service or from the operator's options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mizzen.common.otlp import check_endpoint
from mizzen_operator.api.parse import parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig, parse_config
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.gateway_deployment import gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.revision_hash import revision
from service_kit import META, SPEC

ROOT = Path(__file__).parents[3]
OWN = {
    "otlpEndpoint": "http://collector:4318",
    "samplingPercent": 20,
    "headersSecretRef": {"name": "otlp", "key": "token"},
}
NONE = {"otlpEndpoint": "", "samplingPercent": 5}
LISTS = ("imagePullSecrets", "tolerations", "topologySpreadConstraints", "volumes", "volumeMounts")
POD_TEMPLATE: dict[str, Any] = {
    **{name: {} for name in ("annotations", "labels", "resources")},
    **{name: [] for name in LISTS},
    "sharedMemorySizeLimit": "1Gi",
}
PLAIN = OperatorConfig()
DEFAULT = OperatorConfig(otlp_endpoint="https://otel.example:4318", otlp_headers_secret="all", workers=2)


def service(tracing: dict[str, Any], **spec: Any) -> InferenceService:
    given = {"podTemplate": POD_TEMPLATE, "observability": {"tracing": tracing}, **spec}
    return parse_service({"metadata": META, "spec": {**SPEC, **given}})


def engine_spec(tracing: dict[str, Any], config: OperatorConfig, **spec: Any) -> list[dict[str, Any]]:
    pods = engine_pods(service(tracing, **spec), config, revision="abc", group=2, attempt=0)
    return [pod["spec"] for pod in pods]


def gateway_spec(tracing: dict[str, Any], config: OperatorConfig) -> dict[str, Any]:
    manifests = gateway_manifests(dedicated_gateway_spec(service(tracing)), config)
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    return deployment["spec"]["template"]["spec"]


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"] if "value" in entry}


def headers_secret(pod: dict[str, Any]) -> tuple[str, str] | None:
    """Return name and key of the mounted Secret with headers."""
    (volume,) = [each for each in pod["volumes"] if each["name"] == "mizzen-otlp"] or [None]
    mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "mizzen-otlp"]
    assert len(mounts) == (volume is not None)
    if volume is None:
        return None
    assert mounts == [{"name": "mizzen-otlp", "mountPath": "/var/run/mizzen/otlp", "readOnly": True}]
    secret = volume["secret"]
    assert secret["optional"], "a missing Secret must not keep a pod from starting"
    (item,) = secret["items"]
    assert item["path"] == "headers"
    return secret["secretName"], item["key"]


@pytest.mark.parametrize(
    ("tracing", "config", "endpoint", "secret"),
    [
        (NONE, PLAIN, None, None),
        (OWN, PLAIN, "http://collector:4318", ("otlp", "token")),
        (OWN, DEFAULT, "http://collector:4318", ("otlp", "token")),
        (NONE, DEFAULT, "https://otel.example:4318", ("all", "headers")),
        ({**OWN, "headersSecretRef": None}, DEFAULT, "http://collector:4318", None),
        ({**OWN, "otlpEndpoint": ""}, DEFAULT, "https://otel.example:4318", ("otlp", "token")),
        ({**OWN, "otlpEndpoint": ""}, PLAIN, None, None),
    ],
)
def test_endpoint_and_headers_reach_gateways_and_engines(
    tracing: dict[str, Any], config: OperatorConfig, endpoint: str | None, secret: tuple[str, str] | None
) -> None:
    (engine,), gateway = engine_spec(tracing, config), gateway_spec(tracing, config)
    arguments = gateway["containers"][0]["args"]
    options = dict(zip(arguments[1::2], arguments[2::2], strict=False))
    assert options.get("--otlp-endpoint") == variables(engine).get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint
    file = "/var/run/mizzen/otlp/headers" if secret else None
    assert options.get("--otlp-headers-file") == variables(engine).get("MIZZEN_OTLP_HEADERS_FILE") == file
    assert headers_secret(engine) == headers_secret(gateway) == secret
    assert not any("otlp" in argument for argument in engine["containers"][0]["args"])
    if endpoint is None:
        assert not any(name.startswith("OTEL_") for name in {**variables(engine), **variables(gateway)})
        return
    attributes = variables(engine)["OTEL_RESOURCE_ATTRIBUTES"]
    assert attributes.endswith(f",mizzen.service={META['name']},mizzen.group=2")
    assert "k8s.pod.name=$(POD_NAME)" in attributes
    names = [entry["name"] for entry in engine["containers"][0]["env"]]
    assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
    sampled = variables(gateway)["OTEL_TRACES_SAMPLER_ARG"]
    assert sampled == f"{tracing['samplingPercent'] / 100:g}"


def test_only_the_leading_pod_of_a_group_traces() -> None:
    parallel = {
        "parallelism": {"tensor": 2},
        "accelerator": {"resourceName": "nvidia.com/gpu", "nodeSelector": {}, "perPod": 1},
    }
    leader, follower = engine_spec(OWN, PLAIN, **parallel)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in variables(leader)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in variables(follower)
    assert headers_secret(follower) is None


def test_variables_of_the_spec_take_precedence() -> None:
    env = [{"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "team=a"}]
    (engine,) = engine_spec(OWN, PLAIN, engine={**SPEC["engine"], "env": env})
    names = [entry["name"] for entry in engine["containers"][0]["env"]]
    assert names.count("OTEL_RESOURCE_ATTRIBUTES") == 1
    assert variables(engine)["OTEL_RESOURCE_ATTRIBUTES"] == "team=a"


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_another_collector_gets_no_headers(name: str) -> None:
    env = [{"name": name, "value": "https://elsewhere.example:4318"}]
    for tracing, config in ((OWN, PLAIN), (NONE, DEFAULT)):
        (engine,) = engine_spec(tracing, config, engine={**SPEC["engine"], "env": env})
        assert "MIZZEN_OTLP_HEADERS_FILE" not in variables(engine)
        assert headers_secret(engine) is None


def test_tracing_replaces_no_groups() -> None:
    revisions = {revision(service(tracing), config) for tracing in (NONE, OWN) for config in (PLAIN, DEFAULT)}
    assert len(revisions) == 1


@pytest.mark.parametrize(
    ("url", "valid"),
    [
        ("http://otel:4318/x", True),
        ("https://otel.example.com", True),
        ("http://[fd00::1]:4318", True),
        ("http://10.0.0.1:65535/", True),
        ("otel:4318", False),
        ("http://:4318", False),
        ("http:///x", False),
        ("http://otel:65536", False),
        ("http://otel:99999", False),
        ("http://otel:x", False),
        ("http://otel:4318?key=secret", False),
        ("http://otel:4318/#x", False),
        ("http://otel :4318", False),
        ("http://user:secret@otel:4318", False),
        ("user:secret@otel:4318", False),
        ("http:/user:secret@otel:4318", False),
        ("http:///user:secret@otel:4318", False),
        ("http://otel:4318/#secret", False),
        ("http://otel:4318/@x", True),
    ],
)
def test_service_chart_operator_and_gateway_accept_the_same_urls(url: str, valid: bool) -> None:
    """Otherwise an accepted object would have gateways that do not start."""
    crd = (ROOT / "crds/inferenceservices.yaml").read_text()
    rule = re.search(r"otlpEndpoint: .*?self\.matches\('(.*?)'\)", crd)
    schema = json.loads((ROOT / "charts/mizzen/values.schema.json").read_text())
    chart = schema["properties"]["tracing"]["properties"]["otlpEndpoint"]["pattern"]
    assert rule
    for pattern in (rule[1].replace("[[]", r"\["), chart):  # Python warns of "[["
        assert bool(re.search(pattern, url)) == valid, pattern
    for check in (
        lambda: parse_config(["--otlp-endpoint", url], {}),
        lambda: check_endpoint(url),
    ):
        if valid:
            check()
            continue
        with pytest.raises(ValueError, match="--otlp-endpoint must ") as refused:
            check()
        assert "secret" not in str(refused.value)
