# SPDX-License-Identifier: Apache-2.0
"""Engine pods, gateways and keys, rendered from a spec with the API server's defaults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen.gateway.services import parse_services
from mizzen_operator.api.gateway_sharing import resolve_sharing
from mizzen_operator.api.parse import InvalidServiceError, parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.drift import covers, drift_patch
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.fetch_job import model_path
from mizzen_operator.resources.gateway_deployment import gateway_manifests
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.key_secrets import (
    EngineKeys,
    mounted_secret_patch,
    mounted_secrets,
    read_value,
    restored_root_secret,
    root_secret,
)
from mizzen_operator.resources.revision_hash import revision
from mizzen_operator.resources.shared_gateway import services_config_map, shared_gateway_spec

pytestmark = CONTROL_PLANE

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
Make = Callable[..., InferenceService]


def render(service: InferenceService) -> dict[str, Any]:
    [pod] = engine_pods(service, CONFIG, revision="abcd1234", group=3, attempt=7)
    return pod


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_an_engine_pod_has_the_documented_labels_ports_and_arguments(service: Make, api: Any) -> None:
    pod = render(service(lifecycle={"startupTimeoutSeconds": 60, "drainTimeoutSeconds": 7}))
    api.request("POST", "/api/v1/namespaces/default/pods", pod, params={"dryRun": "All"})
    labels = pod["metadata"]["labels"]
    assert pod["metadata"]["name"] == "demo-abcd1234-3-7"
    assert labels["mizzen.dev/service"] == "demo"
    assert labels["mizzen.dev/component"] == "engine"
    assert (labels["mizzen.dev/group"], labels["mizzen.dev/rank"]) == ("3", "0")
    assert labels["mizzen.dev/revision"] == "abcd1234"
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert container["name"] == "engine"
    assert container["args"][0] == "engine"
    assert option(container["args"], "--model") == "/opt/mizzen/models/demo"
    assert option(container["args"], "--wire-bind") == "tcp://$(POD_IP):5557"
    assert option(container["args"], "--keys") == "/var/run/mizzen/keys"
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "wire": 5557,
        "wire-odd": 5558,
        "http": 8081,
    }
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 90
    assert spec["terminationGracePeriodSeconds"] == 37
    assert spec["readinessGates"] == [{"conditionType": "mizzen.dev/routable"}]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_the_pod_template_is_merged_into_the_pod(service: Make, api: Any) -> None:
    pod = render(
        service(
            model={"source": "pvc://weights/qwen3/8b/"},
            parallelism={"tensor": 4},
            accelerator={"nodeSelector": {"gpu": "h200"}},
            engine={"env": [{"name": "HOME", "value": "/data"}], "extraArgs": ["--eviction", "lfu"]},
            podTemplate={
                "labels": {"team": "a"},
                "annotations": {"note": "b"},
                "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "priorityClassName": "high",
                "schedulerName": "kai",
                "runtimeClassName": "nvidia",
                "serviceAccountName": "reader",
                "affinity": {"nodeAffinity": {}},
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
                ],
                "imagePullSecrets": [{"name": "pull"}],
                "sharedMemorySizeLimit": "1Gi",
                "volumes": [{"name": "data", "emptyDir": {}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            },
        )
    )
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert option(container["args"], "--model") == "/mnt/mizzen/model/qwen3/8b"
    assert container["args"][-2:] == ["--eviction", "lfu"]
    assert [v["name"] for v in container["env"]].count("HOME") == 1
    assert container["resources"] == {
        "requests": {"cpu": "4", "nvidia.com/gpu": "4"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "4"},
    }
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    claim = {"claimName": "weights", "readOnly": True}
    assert {"name": "mizzen-model", "persistentVolumeClaim": claim} in spec["volumes"]
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["priorityClassName"] == "high"
    assert (spec["schedulerName"], spec["runtimeClassName"]) == ("kai", "nvidia")
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("reader", False)
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert [demo["topologyKey"] for demo in spec["topologySpreadConstraints"]] == ["rack"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    shm = {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "mizzen-shm", "emptyDir": shm} in spec["volumes"]
    assert spec["tolerations"][0]["key"] == "gpu"
    assert (pod["metadata"]["labels"]["team"], pod["metadata"]["annotations"]["note"]) == ("a", "b")


def test_a_cpu_engine_requests_no_gpu(service: Make) -> None:
    container = render(service(engine={"device": "CPU"}))["spec"]["containers"][0]
    assert container["resources"] == {}
    assert option(container["args"], "--device") == "cpu"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("pvc://claim", "/mnt/mizzen/model"),
        ("pvc://claim/", "/mnt/mizzen/model"),
        ("pvc://claim/a/b/", "/mnt/mizzen/model/a/b"),
    ],
)
def test_model_path(service: Make, source: str, path: str) -> None:
    assert model_path(service(model={"source": source})) == path


def test_the_revision_depends_on_every_field_that_reaches_the_engine(service: Make) -> None:
    base = revision(service(), CONFIG)
    same: list[dict[str, Any]] = [
        {"replicas": 7},
        {"suspend": True},
        {"model": {"aliases": ["x"]}},
        {"gateway": {"replicas": 5, "service": {"port": 80}}},
        {"engine": {"image": "engine:1"}},
        {"model": {"servedName": "demo"}},
        {"accelerator": {"perPod": 1}},
    ]
    other: list[dict[str, Any]] = [
        {"model": {"source": "file:///other"}},
        {"model": {"servedName": "x"}},
        {"engine": {"image": "engine:2"}},
        {"engine": {"pageSize": 32}},
        {"engine": {"env": [{"name": "A", "value": "1"}]}},
        {"engine": {"extraArgs": ["--eviction", "lfu"]}},
        {"podTemplate": {"labels": {"a": "b"}}},
        {"lifecycle": {"drainTimeoutSeconds": 5}},
        {"parallelism": {"tensor": 2}},
    ]
    assert {revision(service(**spec), CONFIG) for spec in same} == {base}
    changed = [revision(service(**spec), CONFIG) for spec in other]
    assert base not in changed
    assert len(set(changed)) == len(other)
    assert revision(service(), OperatorConfig(engine_image="engine:2")) != base


def test_a_gateway_has_its_placement(service: Make, api: Any) -> None:
    placement = {
        "annotations": {"note": "b"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
    }
    made = service(gateway={"podTemplate": placement})
    spec = dedicated_gateway_spec(made)
    template = gateway_manifests(spec, CONFIG)[-1]["spec"]["template"]
    assert template["metadata"]["annotations"]["note"] == "b"
    pod = template["spec"]
    assert {name: pod[name] for name in placement if name in pod and name != "tolerations"} == {
        name: placement[name] for name in ("affinity", "nodeSelector", "priorityClassName")
    }
    assert pod["tolerations"][0] == placement["tolerations"][0]
    plain = gateway_manifests(dedicated_gateway_spec(service()), CONFIG)[-1]["spec"]["template"]["spec"]
    assert not {"affinity", "nodeSelector", "priorityClassName"} & set(plain)


def test_a_gateway_has_the_documented_ports_probes_and_arguments(service: Make) -> None:
    manifests = gateway_manifests(
        dedicated_gateway_spec(service(model={"aliases": ["x", "y"]}, suspend=True)), CONFIG
    )
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    assert set(by_kind) == {"ServiceAccount", "RoleBinding", "Service", "Deployment"}
    assert {manifest["metadata"]["name"] for manifest in manifests} == {"demo-gateway"}
    assert by_kind["RoleBinding"]["roleRef"]["name"] == "role"
    spec = by_kind["Deployment"]["spec"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    [container] = spec["template"]["spec"]["containers"]
    arguments = container["args"]
    assert (container["name"], container["image"], arguments[0]) == ("gateway", "gateway:1", "gateway")
    assert [arguments[n + 1] for n, a in enumerate(arguments) if a == "--alias"] == ["x", "y"]
    assert option(arguments, "--service") == "demo"
    assert option(arguments, "--admin-token-file") == "/var/run/mizzen/keys/admin.token"
    assert "--suspended" in arguments
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"http": 8000, "admin": 8001}
    assert "8000" in str(by_kind["Service"]["spec"]["ports"])


def test_a_gateway_has_an_api_token_whatever_its_service_account_says(service: Make) -> None:
    deployment = gateway_manifests(dedicated_gateway_spec(service()), CONFIG)[-1]
    pod = deployment["spec"]["template"]["spec"]
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == folder]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    kinds = {kind: source[kind] for source in volume["projected"]["sources"] for kind in source}
    assert kinds["serviceAccountToken"]["path"] == "token"
    assert kinds["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert kinds["downwardAPI"]["items"][0]["path"] == "namespace"
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("secret", ["", "cert"])
def test_the_port_of_a_gateway_service_says_whether_it_uses_tls(service: Make, api: Any, secret: str) -> None:
    demo = service(gateway={"tls": {"secretName": secret}} if secret else {})
    manifests = gateway_manifests(dedicated_gateway_spec(demo), CONFIG)
    endpoint = next(manifest for manifest in manifests if manifest["kind"] == "Service")
    stored = api.create(endpoint, dryRun="All")
    [port] = stored["spec"]["ports"]
    assert (port["name"], port.get("appProtocol")) == (("https", "https") if secret else ("http", None))
    assert port["targetPort"] == "http"
    assert covers(stored, endpoint)
    assert drift_patch(stored, endpoint) is None


def test_a_gateway_mounts_exactly_the_secrets_of_its_spec(service: Make, api: Any) -> None:
    demo = service(
        gateway={
            "apiKeys": {"secretNames": ["team-a", "team-b"]},
            "tls": {"secretName": "cert"},
            "cors": {"allowOrigins": ["https://a.example", "https://b.example"]},
            "admission": {"maxTokensInFlight": 5000},
        }
    )
    deployment = gateway_manifests(dedicated_gateway_spec(demo), CONFIG)[-1]
    api.request("POST", "/apis/apps/v1/namespaces/default/deployments", deployment, params={"dryRun": "All"})
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    arguments = container["args"]

    def given(name: str) -> list[str]:
        return [arguments[n + 1] for n, a in enumerate(arguments) if a == name]

    mounts = {
        mount["name"]: mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")
    }
    secrets = {v["secret"]["secretName"]: mounts[v["name"]] for v in spec["volumes"] if "secret" in v}
    assert given("--api-keys-file") == [secrets["team-a"], secrets["team-b"]]
    assert given("--tls-cert") == [f"{secrets['cert']}/tls.crt"]
    assert given("--tls-key") == [f"{secrets['cert']}/tls.key"]
    assert given("--cors-origin") == ["https://a.example", "https://b.example"]
    assert given("--max-tokens-in-flight") == ["5000"]
    assert set(secrets) == {"team-a", "team-b", "cert", "demo-gateway-keys"}


@pytest.mark.parametrize("labelled", [(), ("keys", "team-a", "team-c")])
def test_a_gateway_with_keys_from_labels_always_requires_a_key(
    service: Make, api: Any, labelled: tuple[str, ...]
) -> None:
    demo = service(gateway={"apiKeys": {"secretNames": ["team-a"], "fromLabel": True}})
    gateway_spec = replace(dedicated_gateway_spec(demo), labelled_secrets=labelled)
    deployment = gateway_manifests(gateway_spec, CONFIG)[-1]
    api.request("POST", "/apis/apps/v1/namespaces/default/deployments", deployment, params={"dryRun": "All"})
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    arguments = container["args"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    at = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    folders = [arguments[n + 1] for n, a in enumerate(arguments) if a == "--api-keys-file"]
    assert at[folders[0]]["emptyDir"] == {}  # requires a key even if no Secret is mounted
    secrets = {at[folder]["secret"]["secretName"]: at[folder]["secret"] for folder in folders[1:]}
    assert len(secrets) == len(folders) - 1
    # A labelled Secret that the spec also names is mounted once, and must exist.
    assert {name: secret.get("optional", False) for name, secret in secrets.items()} == {
        "team-a": False,
        **{name: True for name in labelled if name != "team-a"},
    }


def test_the_gateway_accepts_its_rendered_arguments(service: Make, tmp_path: Path) -> None:
    """The gateway accepts the arguments, and only then fails, because no keys are mounted."""
    demo = service(
        gateway={"mode": "Shared", "tls": {"secretName": "c"}, "cors": {"allowOrigins": ["*"]}}, suspend=True
    )
    sharing = resolve_sharing([demo])
    assert sharing is not None
    for gateway_spec in (shared_gateway_spec(sharing), dedicated_gateway_spec(demo)):
        [container] = gateway_manifests(gateway_spec, CONFIG)[-1]["spec"]["template"]["spec"]["containers"]
        command = [sys.executable, "-m", "mizzen.cli", *container["args"]]
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        assert run.returncode == 1, run.stderr  # status 2 would mean an invalid option
        assert "/var/run/mizzen/keys" in run.stderr + run.stdout


def test_the_config_map_of_a_shared_gateway_lists_its_services(service: Make, api: Any) -> None:
    demo = replace(service(gateway={"mode": "Shared"}, model={"aliases": ["x"]}), created="2026-01-01")
    other = replace(demo, name="other", uid="2", model=replace(demo.model, served_name="x"), suspend=True)
    sharing = resolve_sharing([other, replace(demo, uid="1")])
    assert sharing is not None
    gateway_spec = shared_gateway_spec(sharing)
    listed = services_config_map(sharing, gateway_spec, {"demo": EngineKeys(("k" * 40, "n" * 40), 3)})
    api.request("POST", "/api/v1/namespaces/default/configmaps", listed, params={"dryRun": "All"})
    content = listed["data"]["services.json"]
    assert json.loads(content) == {
        "services": [
            {
                "name": "demo",
                "models": ["demo", "x"],
                "suspended": False,
                "enginePublicKey": "k" * 40,
                "nextEnginePublicKey": "n" * 40,
                "keysGeneration": 3,
            },
            {"name": "other", "models": [], "suspended": True},
        ]
    }
    [first, second] = parse_services(content.encode(), "the list")
    assert (first.name, first.models, second.suspended) == ("demo", ("demo", "x"), True)
    for manifest in gateway_manifests(gateway_spec, CONFIG):
        meta = manifest["metadata"]
        assert meta["name"] == "mizzen-shared"
        assert "mizzen.dev/service" not in meta["labels"]
        assert [owner["uid"] for owner in meta["ownerReferences"]] == ["1", "2"]
    assert render(demo)["metadata"]["labels"]["mizzen.dev/gateway"] == "shared"


def test_the_mounted_secrets_match_and_are_derived_from_one_secret(service: Make) -> None:
    demo = service()
    root = root_secret(demo)
    engine, gateway = mounted_secrets(demo, root)
    assert [engine, gateway] == mounted_secrets(demo, root)
    assert set(engine["data"]) == {"engine.public", "engine.secret", "gateway.public"}
    assert set(gateway["data"]) == {"gateway.public", "gateway.secret", "engine.public", "admin.token"}
    assert read_value(engine, "gateway.public") == read_value(gateway, "gateway.public")
    assert read_value(gateway, "engine.public") == read_value(engine, "engine.public")
    assert len(read_value(engine, "engine.secret")) == 40
    assert root_secret(demo)["data"] != root["data"]
    with pytest.raises(ValueError, match=r"Secret demo-keys has no usable engine\.secret: delete it"):
        mounted_secrets(demo, {**root, "data": {}})


def test_the_root_secret_can_be_restored_from_both_mounted_secrets(service: Make) -> None:
    demo = service()
    root = root_secret(demo)
    engine, gateway = mounted_secrets(demo, root)
    assert restored_root_secret(demo, engine, gateway) == root
    with pytest.raises(ValueError, match=r"Secret demo-gateway-keys has no usable admin\.token"):
        restored_root_secret(
            demo, engine, {**gateway, "data": {"gateway.secret": gateway["data"]["gateway.secret"]}}
        )
    assert mounted_secret_patch(engine, mounted_secrets(demo, root)[0], root) is None
    with pytest.raises(ValueError, match="Secret demo-engine-keys does not match Secret demo-keys: delete"):
        mounted_secret_patch(engine, mounted_secrets(demo, root_secret(demo))[0], root)


def test_the_error_for_a_missing_field_names_the_crd_of_another_release() -> None:
    meta = {"name": "a", "namespace": "b", "uid": "c", "generation": 1}
    with pytest.raises(
        InvalidServiceError, match=r"spec\.engine is missing; the CRD of the cluster is older or newer"
    ):
        parse_service({"metadata": meta, "spec": {"model": {"source": "x"}}})


def test_covers_ignores_defaults_and_detects_drift() -> None:
    live = {"a": 1, "b": {"c": 2, "default": 3}, "list": [{"name": "x", "default": 1}, {"name": "y"}]}
    assert covers(live, {"a": 1, "b": {"c": 2}, "list": [{"name": "x"}]})
    assert not covers(live, {"b": {"c": 3}})
    assert not covers(live, {"list": [{"name": "z"}]})
    assert not covers(live, {"d": 1})
