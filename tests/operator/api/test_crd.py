# SPDX-License-Identifier: Apache-2.0
"""The CRD on a real API server: defaults, validation, columns and `kubectl explain`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from crd_cases import WRONG
from crd_valid_cases import RIGHT
from marks import CONTROL_PLANE
from mizzen.gateway.auth.api_keys import parse_key_files
from mizzen_operator.api.parse import parse_service
from mizzen_operator.api.types import Prompt

ROOT = Path(__file__).parents[3]
CRD = ROOT / "crds/inferenceservices.yaml"
pytestmark = CONTROL_PLANE


@pytest.mark.parametrize(("spec", "field", "mend"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_an_invalid_manifest_is_rejected_with_the_field_and_the_remedy(
    api: Any, minimal: Callable[..., dict[str, Any]], spec: dict[str, Any], field: str, mend: str
) -> None:
    body = minimal(**spec)
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception) as refusal:
        api.create(body, dryRun="All", fieldValidation="Strict")
    assert refusal.value.code == 422
    assert field in str(refusal.value)
    assert mend in str(refusal.value)


@pytest.mark.parametrize("name", ["a" * 41, "1demo", "my..demo", "my.-demo"])
def test_a_service_name_that_is_invalid_for_children_is_rejected(
    api: Any, minimal: Callable[..., dict[str, Any]], name: str
) -> None:
    body = minimal(name)
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception, match=r"metadata\.name must have at most 40 characters.*choose a shorter"):
        api.create(body, dryRun="All")


def test_an_unknown_field_is_rejected_by_its_name(api: Any, minimal: Callable[..., dict[str, Any]]) -> None:
    body = minimal(engine={"maxRunningRequest": 3})
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception, match=r'unknown field "spec.engine.maxRunningRequest"'):
        api.create(body, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize("spec", RIGHT)
def test_a_valid_manifest_is_accepted(
    api: Any, minimal: Callable[..., dict[str, Any]], spec: dict[str, Any]
) -> None:
    body = minimal("a" + "b" * 39, **spec)
    body["metadata"]["namespace"] = "default"
    api.create(body, dryRun="All", fieldValidation="Strict")


def test_every_default_is_in_the_schema(api: Any, minimal: Callable[..., dict[str, Any]]) -> None:
    body = minimal()
    body["metadata"]["namespace"] = "default"
    spec = api.create(body, dryRun="All")["spec"]
    assert spec["replicas"] == 1
    assert spec["parallelism"] == {"tensor": 1}
    assert spec["accelerator"] == {"resourceName": "nvidia.com/gpu", "nodeSelector": {}}
    assert spec["engine"]["memoryFraction"] == "0.90"
    assert spec["engine"]["attention"] == {"prefill": "Auto", "decode": "Auto"}
    assert spec["gateway"] == {
        "podTemplate": {"annotations": {}, "nodeSelector": {}, "tolerations": []},
        "mode": "Dedicated",
        "replicas": 2,
        "service": {"type": "ClusterIP", "port": 8000, "annotations": {}},
        "apiKeys": {"secretNames": [], "fromLabel": False},
        "cors": {"allowOrigins": []},
        "admission": {
            "maxInFlight": 2000,
            "maxTokensInFlight": 0,
            "queueSize": 1000,
            "queueTimeoutSeconds": 60,
        },
        "processes": 1,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "routing": {"loadFactorPercent": 150, "warmupTokens": 16384, "warmupTimeoutSeconds": 10},
        "retries": {
            "maxAttempts": 3,
            "streamResume": "Enabled",
            "maxResumes": 3,
            "resumeTimeoutSeconds": 60,
            "resumeWaitSeconds": 1,
        },
        "toolParser": "Auto",
        "reasoningParser": "Auto",
        "accessLog": "Enabled",
        "playground": "Disabled",
        "grpc": "Disabled",
        "images": {
            "urls": "Refused",
            "allowHosts": [],
            "maxPerRequest": 8,
            "maxBytes": 10485760,
            "maxPixels": 64000000,
        },
        "extraArgs": [],
    }
    assert spec["lifecycle"] == {
        "startupTimeoutSeconds": 1800,
        "drainTimeoutSeconds": 120,
        "maxGroupRestarts": 10,
    }
    assert spec["rollout"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
        "partition": 0,
        "paused": False,
        "progressDeadlineSeconds": 3600,
    }
    assert spec["availability"] == {
        "podDisruptionBudget": "Auto",
        "spreadTopologyKey": "kubernetes.io/hostname",
    }
    assert spec["suspend"] is False


def test_the_shared_gateway_example_is_accepted_and_its_api_keys_are_valid(api: Any) -> None:
    secret, *services = yaml.safe_load_all((ROOT / "examples/shared-gateway.yaml").read_text())
    for body in services:
        body["metadata"]["namespace"] = "default"
        created = api.create(body, dryRun="All", fieldValidation="Strict")
        assert created["spec"]["gateway"]["apiKeys"]["secretNames"] == [secret["metadata"]["name"]]
    grants = parse_key_files({Path("keys.yaml"): secret["stringData"]["keys.yaml"].encode()})
    assert [grant.name for grant in grants] == ["team-a", "batch"]


def test_the_example_needs_neither_namespace_nor_served_name(api: Any, example: dict[str, Any]) -> None:
    assert example["metadata"] == {"name": "demo"}
    assert "servedName" not in example["spec"]["model"]
    assert len(list(yaml.safe_load_all((ROOT / "examples/inferenceservice.yaml").read_text()))) == 1
    example["metadata"]["namespace"] = "default"
    created = api.create(example, dryRun="All", fieldValidation="Strict")
    assert created["spec"]["engine"]["device"] == "CPU"


def test_the_scale_subresource_reads_and_writes_replicas(
    api: Any, namespace: str, minimal: Callable[..., dict[str, Any]]
) -> None:
    body = minimal(replicas=2)
    body["metadata"]["namespace"] = namespace
    api.create(body)
    status = {"status": {"replicas": 5, "selector": "mizzen.dev/service=demo"}}
    api.patch("InferenceService", namespace, "demo", status, "status")
    scale = api.patch("InferenceService", namespace, "demo", {"spec": {"replicas": 3}}, "scale")
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 5, "selector": "mizzen.dev/service=demo"}
    assert api.get("InferenceService", namespace, "demo")["spec"]["replicas"] == 3


def test_the_crd_is_small_and_kubectl_prints_its_columns(api: Any, control_plane: Any) -> None:
    assert len(CRD.read_bytes()) <= 64_000
    assert len(json.dumps(yaml.safe_load(CRD.read_text()), separators=(",", ":"))) <= 64_000

    def kubectl(*arguments: str) -> str:
        command = [str(control_plane.assets / "kubectl"), "--kubeconfig", str(control_plane.kubeconfig)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout

    assert "A folder with config.json" in kubectl("explain", "infsvc.spec.model.source")
    columns = kubectl("get", "inferenceservices", "--all-namespaces", "-o", "wide")
    assert not columns or columns.split()[0] == "NAMESPACE"
    kubectl(
        "apply", "--dry-run=server", "-f", str(CRD)
    )  # the last-applied annotation of client-side apply must not exceed the size limit


def _list_items(path: str, schema: Any, within: bool = False) -> list[str]:
    """Return the paths of all defaults within items of lists of a schema."""
    if not isinstance(schema, dict):
        return []
    found = [path] if within and "default" in schema else []
    for name, below in schema.get("properties", {}).items():
        found += _list_items(f"{path}.{name}", below, within)
    found += _list_items(f"{path}[]", schema.get("items"), True)
    return found + _list_items(f"{path}.*", schema.get("additionalProperties"), within)


def test_list_items_have_no_defaults() -> None:
    """Tools that compare lists as a whole would find a difference in each list that omits a field."""
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert _list_items("spec", schema) == []


def test_a_service_with_golden_prompts_is_unchanged_when_it_is_applied_again(
    api: Any, control_plane: Any, namespace: str, minimal: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    body = minimal(rollout={"verification": {"prompts": [{"prompt": "One two"}]}})
    manifest = tmp_path / "service.json"
    manifest.write_text(json.dumps(body))

    def apply(*options: str) -> str:
        program = [str(control_plane.assets / "kubectl"), "--kubeconfig", str(control_plane.kubeconfig)]
        command = [*program, "apply", "--namespace", namespace, "-f", str(manifest), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert apply().split()[-1] == "created"
    assert apply().split()[-1] == "unchanged"
    for manager in ("one", "two"):
        assert apply("--server-side", "--field-manager", manager).split()[-1] == "serverside-applied"
    parsed = parse_service(api.get("InferenceService", namespace, "demo"))
    assert parsed.rollout.verification is not None
    assert parsed.rollout.verification.prompts == (Prompt("One two", "", 16),)


def _undescribed(path: str, schema: dict[str, Any]) -> list[str]:
    """Return the paths of all fields of a schema that have no description."""
    undescribed: list[str] = []
    for name, field in schema.get("properties", {}).items():
        undescribed += [] if "description" in field else [f"{path}.{name}"]
        undescribed += _undescribed(f"{path}.{name}", field)
    return undescribed + (_undescribed(f"{path}[]", schema["items"]) if "items" in schema else [])


def _nulls(path: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [null for key, item in value.items() for null in _nulls(f"{path}.{key}", item)]
    if isinstance(value, list):
        return [null for item in value for null in _nulls(f"{path}[]", item)]
    return [path] if value is None else []


def test_the_crd_has_no_null_values() -> None:
    """In a `{...}` mapping, text after a comma in an unquoted description is a YAML key with value null."""
    assert _nulls("crd", yaml.safe_load(CRD.read_text())) == []


@pytest.mark.parametrize("part", ["spec", "status"])
def test_kubectl_explains_every_field(part: str) -> None:
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert _undescribed(part, schema["properties"][part]) == []
