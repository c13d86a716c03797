"""The CRD on a real API server: defaults, and wrong manifests whose refusals name the field and the mend."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from marks import CONTROL_PLANE
from mizzen.gateway.tenants.keys import parse_files

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds/inferenceservices.yaml"

pytestmark = CONTROL_PLANE

HUB: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-8B@main",
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights"},
}
MOUNT = {"name": "data", "mountPath": "/data"}

# name of the case, what is laid over a minimal spec, the field that the refusal names, words of the mend
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("scheme", {"model": {"source": "gs://models/qwen"}}, "spec.model.source", "must begin with file://"),
    ("no scheme", {"model": {"source": "/models/demo"}}, "spec.model.source", "must begin with file://"),
    ("relative file", {"model": {"source": "file://models/demo"}}, "spec.model.source", "three slashes"),
    ("file with spaces", {"model": {"source": "file:///my models"}}, "spec.model.source", "letters, digits"),
    ("claim", {"model": {"source": "pvc://Weights/demo"}}, "spec.model.source", "pvc://weights/"),
    (
        "parent folder",
        {"model": {"source": "pvc://weights/../secret"}},
        "spec.model.source",
        "must not contain",
    ),
    ("empty source", {"model": {"source": ""}}, "spec.model.source", "at least 1"),
    (
        "served name",
        {"model": {"servedName": "my model"}},
        "spec.model.servedName",
        "remove other characters",
    ),
    ("nine aliases", {"model": {"aliases": [f"a{n}" for n in range(9)]}}, "spec.model.aliases", "at most 8"),
    ("alias twice", {"model": {"aliases": ["a", "a"]}}, "spec.model.aliases", "Duplicate"),
    (
        "alias is the name",
        {"model": {"aliases": ["demo"]}},
        "spec.model.aliases",
        "remove it from the aliases",
    ),
    (
        "alias is the served name",
        {"model": {"servedName": "a", "aliases": ["a"]}},
        "spec.model.aliases",
        "remove it from the aliases",
    ),
    ("bad alias", {"model": {"aliases": ["a b"]}}, "spec.model.aliases", "remove other characters"),
    ("dtype", {"model": {"dtype": "fp8"}}, "spec.model.dtype", '"BFloat16"'),
    ("context", {"model": {"contextLength": 0}}, "spec.model.contextLength", "greater than or equal to 1"),
    ("replicas", {"replicas": -1}, "spec.replicas", "greater than or equal to 0"),
    ("replicas as text", {"replicas": "2"}, "spec.replicas", "must be of type integer"),
    ("tensor", {"parallelism": {"tensor": 3}}, "spec.parallelism.tensor", "must be 1, 2, 4 or 8"),
    (
        "tensor no multiple",
        {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 4}},
        "spec.parallelism.tensor",
        "leave perPod out",
    ),
    (
        "pods of too many GPUs",
        {"parallelism": {"tensor": 4}, "accelerator": {"perPod": 3}},
        "spec.parallelism.tensor",
        "leave perPod out",
    ),
    ("resource", {"accelerator": {"resourceName": "gpu"}}, "spec.accelerator.resourceName", "nvidia.com/gpu"),
    (
        "GPUs twice",
        {"podTemplate": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "spec.podTemplate.resources",
        "spec.accelerator.perPod",
    ),
    (
        "quantity",
        {"podTemplate": {"resources": {"requests": {"memory": "4 GB"}}}},
        "spec.podTemplate.resources.requests.memory",
        "should match",
    ),
    ("device", {"engine": {"device": "TPU"}}, "spec.engine.device", '"CUDA", "CPU"'),
    ("fraction", {"engine": {"memoryFraction": "90%"}}, "spec.engine.memoryFraction", 'as in "0.90"'),
    ("big fraction", {"engine": {"memoryFraction": "1.5"}}, "spec.engine.memoryFraction", '"0.99"'),
    ("unquoted fraction", {"engine": {"memoryFraction": 0.9}}, "spec.engine.memoryFraction", "type string"),
    ("requests", {"engine": {"maxRunningRequests": 0}}, "spec.engine.maxRunningRequests", "equal to 1"),
    ("page", {"engine": {"pageSize": 512}}, "spec.engine.pageSize", "less than or equal to 256"),
    ("cache", {"engine": {"prefixCache": "Tree"}}, "spec.engine.prefixCache", '"Radix", "None"'),
    (
        "attention",
        {"engine": {"attention": {"prefill": "Triton"}}},
        "spec.engine.attention.prefill",
        '"Auto", "CPU", "FA3", "FlashInfer"',
    ),
    (
        "attention of prompts",
        {"engine": {"attention": {"prefill": "Split"}}},
        "spec.engine.attention.prefill",
        '"FlashInferFA3", "Reference"',
    ),
    (
        "CPU's attention on CUDA",
        {"engine": {"attention": {"decode": "CPU"}}},
        "spec.engine.attention",
        "choose Auto",
    ),
    (
        "CUDA's attention on CPU",
        {"engine": {"device": "CPU", "attention": {"decode": "FlashInfer"}}},
        "spec.engine.attention",
        "choose Auto",
    ),
    (
        "FP8 on CPU",
        {"engine": {"device": "CPU", "kvCacheDtype": "FP8"}},
        "spec.engine.kvCacheDtype",
        "choose Auto",
    ),
    (
        "claim template on CPU",
        {"engine": {"device": "CPU"}, "accelerator": {"resourceClaimTemplateName": "gpu"}},
        "spec.accelerator.resourceClaimTemplateName",
        "set the device to CUDA",
    ),
    ("remote code", {"model": {"trustRemoteCode": "Enabled"}}, "spec.model.trustRemoteCode", "never run"),
    (
        "gateway's own option",
        {"gateway": {"extraArgs": ["--port=1"]}},
        "spec.gateway.extraArgs",
        "use the field",
    ),
    ("tool parser", {"gateway": {"toolParser": "GPT"}}, "spec.gateway.toolParser", '"Hermes"'),
    ("reasoning", {"gateway": {"reasoningParser": "R1"}}, "spec.gateway.reasoningParser", '"DeepSeekR1"'),
    ("access log", {"gateway": {"accessLog": "on"}}, "spec.gateway.accessLog", '"Enabled"'),
    ("processes", {"gateway": {"processes": 65}}, "spec.gateway.processes", "equal to 64"),
    (
        "no time to warm up",
        {"gateway": {"routing": {"warmupTimeoutSeconds": 0}}},
        "spec.gateway.routing.warmupTimeoutSeconds",
        "equal to 1",
    ),
    (
        "warm-up as an option",
        {"gateway": {"extraArgs": ["--warm-tokens=1"]}},
        "spec.gateway.extraArgs",
        "use the field",
    ),
    (
        "load factor",
        {"gateway": {"routing": {"loadFactorPercent": 99}}},
        "spec.gateway.routing.loadFactorPercent",
        "equal to 100",
    ),
    (
        "attempts",
        {"gateway": {"retries": {"maxAttempts": 0}}},
        "spec.gateway.retries.maxAttempts",
        "equal to 1",
    ),
    (
        "no surge",
        {"rollout": {"maxSurge": 0}},
        "spec.rollout.maxSurge",
        "set maxSurge to 1, or maxUnavailable to 1",
    ),
    (
        "no surge in percent",
        {"rollout": {"maxSurge": "0%", "maxUnavailable": "0%"}},
        "spec.rollout.maxSurge",
        "must not both be 0",
    ),
    ("negative surge", {"rollout": {"maxSurge": -1}}, "spec.rollout.maxSurge", 'write it as in 1 or "25%"'),
    ("surge as text", {"rollout": {"maxSurge": "one"}}, "spec.rollout.maxSurge", 'write it as in 1 or "25%"'),
    (
        "more than all",
        {"rollout": {"maxUnavailable": "101%"}},
        "spec.rollout.maxUnavailable",
        "a share up to 100%",
    ),
    ("partition", {"rollout": {"partition": -1}}, "spec.rollout.partition", "equal to 0"),
    (
        "no time",
        {"rollout": {"progressDeadlineSeconds": 1}},
        "spec.rollout.progressDeadlineSeconds",
        "equal to 10",
    ),
    (
        "a golden prompt without a text",
        {"rollout": {"verification": {"prompts": [{"prompt": ""}]}}},
        "spec.rollout.verification.prompts[0].prompt",
        "at least 1 chars",
    ),
    (
        "what a failed verification does",
        {"rollout": {"verification": {"prompts": [{"prompt": "a"}], "onFailure": "Ignore"}}},
        "spec.rollout.verification.onFailure",
        '"Rollback", "Pause"',
    ),
    (
        "verification of nothing",
        {"rollout": {"verification": {"prompts": []}}},
        "spec.rollout.verification.prompts",
        "at least 1 items",
    ),
    ("restarts", {"lifecycle": {"maxGroupRestarts": -1}}, "spec.lifecycle.maxGroupRestarts", "equal to 0"),
    (
        "budget",
        {"availability": {"podDisruptionBudget": "Never"}},
        "spec.availability.podDisruptionBudget",
        '"Auto", "Disabled"',
    ),
    (
        "collector",
        {"observability": {"tracing": {"otlpEndpoint": "otel:4318"}}},
        "spec.observability.tracing.otlpEndpoint",
        "http://otel-collector:4318",
    ),
    (
        "sampling",
        {"observability": {"tracing": {"samplingPercent": 101}}},
        "spec.observability.tracing.samplingPercent",
        "equal to 100",
    ),
    ("history", {"revisionHistoryLimit": -1}, "spec.revisionHistoryLimit", "equal to 0"),
    (
        "min above max",
        {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}},
        "spec.autoscaling.minReplicas",
        "lower the one",
    ),
    (
        "idle above zero",
        {"autoscaling": {"minReplicas": 1, "maxReplicas": 3, "idleSecondsToZero": 60}},
        "spec.autoscaling.idleSecondsToZero",
        "needs minReplicas 0",
    ),
    (
        "zero without idle",
        {"autoscaling": {"minReplicas": 0, "maxReplicas": 3}},
        "spec.autoscaling.minReplicas",
        "say how long",
    ),
    (
        "value of saturation",
        {"autoscaling": {"maxReplicas": 3, "metric": {"targetValue": 5}}},
        "spec.autoscaling.metric.targetValue",
        "goes with QueueTokens and ActiveRequests",
    ),
    (
        "no value",
        {"autoscaling": {"maxReplicas": 3, "metric": {"type": "QueueTokens"}}},
        "spec.autoscaling.metric.targetValue",
        "is needed there",
    ),
    ("hub without a cache", {"model": {"source": "hf://a/b"}}, "spec.model.cache", "is needed there"),
    (
        "cache of a file",
        {"model": {"cache": {"mode": "HostPath", "path": "/models"}}},
        "spec.model.cache",
        "leave it out",
    ),
    (
        "credentials of a file",
        {"model": {"credentialsSecretRef": {"name": "hf", "key": "token"}}},
        "spec.model",
        "remove them",
    ),
    ("endpoint of a file", {"model": {"endpoint": "http://hub:8080"}}, "spec.model", "remove them"),
    (
        "endpoint with a password",
        {"model": {"endpoint": "http://a:b@hub"}},
        "spec.model.endpoint",
        "should match",
    ),
    (
        "size of a folder",
        {"model": {**HUB, "cache": {"mode": "HostPath", "path": "/models", "size": "9Gi"}}},
        "spec.model.cache.size",
        "go with claimName",
    ),
    (
        "repository",
        {"model": {**HUB, "source": "hf://a/b/c"}},
        "spec.model.source",
        "hf://Qwen/Qwen3-8B@main",
    ),
    ("bucket", {"model": {**HUB, "source": "s3://Bucket/x"}}, "spec.model.source", "s3://models/qwen3-8b"),
    ("registry", {"model": {**HUB, "source": "oci://ghcr.io"}}, "spec.model.source", "oci://ghcr.io/org"),
    (
        "cache without a claim",
        {"model": {"cache": {"mode": "PersistentVolumeClaim"}}},
        "spec.model.cache.claimName",
        "set both",
    ),
    ("claim without a cache", {"model": {"cache": {"claimName": "w"}}}, "spec.model.cache.claimName", "both"),
    ("cache without a path", {"model": {"cache": {"mode": "HostPath"}}}, "spec.model.cache.path", "set both"),
    ("cache in a relative path", {"model": {"cache": {"path": "models"}}}, "cache.path", "should match"),
    ("own option", {"engine": {"extraArgs": ["--model", "/x"]}}, "spec.engine.extraArgs", "use the field"),
    (
        "own option, joined",
        {"engine": {"extraArgs": ["--tensor=2"]}},
        "spec.engine.extraArgs",
        "use the field",
    ),
    ("own variable", {"engine": {"env": [{"name": "POD_IP"}]}}, "spec.engine.env", "choose another name"),
    (
        "value twice",
        {"engine": {"env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}},
        "spec.engine.env",
        "remove one of them",
    ),
    (
        "label",
        {"podTemplate": {"labels": {"mizzen.dev/rank": "1"}}},
        "spec.podTemplate.labels",
        "of your own",
    ),
    (
        "annotation",
        {"podTemplate": {"annotations": {"mizzen.dev/x": "1"}}},
        "spec.podTemplate.annotations",
        "of your own",
    ),
    (
        "mount without volume",
        {"podTemplate": {"volumeMounts": [MOUNT]}},
        "spec.podTemplate.volumeMounts",
        "add the volume",
    ),
    (
        "relative mount",
        {"podTemplate": {"volumes": [{"name": "data"}], "volumeMounts": [{**MOUNT, "mountPath": "data"}]}},
        "spec.podTemplate.volumeMounts",
        "begin it with /",
    ),
    (
        "mount over keys",
        {
            "podTemplate": {
                "volumes": [{"name": "data"}],
                "volumeMounts": [{**MOUNT, "mountPath": "/var/run/mizzen/keys"}],
            }
        },
        "spec.podTemplate.volumeMounts",
        "choose another path",
    ),
    (
        "volume",
        {"podTemplate": {"volumes": [{"name": "mizzen-keys"}]}},
        "spec.podTemplate.volumes",
        "another name",
    ),
    ("shm", {"podTemplate": {"sharedMemorySizeLimit": "big"}}, "sharedMemorySizeLimit", "should match"),
    ("no gateway", {"gateway": {"replicas": 0}}, "spec.gateway.replicas", "greater than or equal to 1"),
    ("port", {"gateway": {"service": {"port": 70000}}}, "spec.gateway.service.port", "equal to 65535"),
    ("service type", {"gateway": {"service": {"type": "None"}}}, "spec.gateway.service.type", '"ClusterIP"'),
    ("mode", {"gateway": {"mode": "None"}}, "spec.gateway.mode", '"Dedicated", "Shared"'),
    ("key name", {"gateway": {"apiKeys": {"secretNames": ["A b"]}}}, "secretNames[0]", "should match"),
    ("no certificate", {"gateway": {"tls": {}}}, "spec.gateway.tls.secretName", "Required value"),
    (
        "origin with a path",
        {"gateway": {"cors": {"allowOrigins": ["https://a.example/chat"]}}},
        "spec.gateway.cors.allowOrigins[0]",
        "write scheme and host without a path",
    ),
    (
        "all origins and one",
        {"gateway": {"cors": {"allowOrigins": ["*", "https://a.example"]}}},
        "spec.gateway.cors.allowOrigins",
        "leave '*' alone, or remove it",
    ),
    ("admission", {"gateway": {"admission": {"maxInFlight": 0}}}, "maxInFlight", "equal to 1"),
    ("startup", {"lifecycle": {"startupTimeoutSeconds": 1}}, "startupTimeoutSeconds", "equal to 10"),
    ("drain", {"lifecycle": {"drainTimeoutSeconds": -5}}, "drainTimeoutSeconds", "equal to 0"),
    ("suspend", {"suspend": "yes"}, "spec.suspend", "must be of type boolean"),
]


@pytest.mark.parametrize(("spec", "field", "mend"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_a_wrong_manifest_is_refused_with_field_and_mend(
    api: Any, minimal: Callable[..., dict[str, Any]], spec: dict[str, Any], field: str, mend: str
) -> None:
    body = minimal(**spec)
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception) as refusal:
        api.create(body, dryRun="All", fieldValidation="Strict")
    assert refusal.value.code == 422
    assert field in str(refusal.value)
    assert mend in str(refusal.value)


@pytest.mark.parametrize("name", ["a" * 41, "1demo", "my.demo"])
def test_a_name_that_children_cannot_take_is_refused(
    api: Any, minimal: Callable[..., dict[str, Any]], name: str
) -> None:
    body = minimal(name)
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception, match=r"metadata\.name must have at most 40 characters.*choose a shorter"):
        api.create(body, dryRun="All")


def test_an_unknown_field_is_refused_by_name(api: Any, minimal: Callable[..., dict[str, Any]]) -> None:
    body = minimal(engine={"maxRunningRequest": 3})
    body["metadata"]["namespace"] = "default"
    with pytest.raises(Exception, match=r'unknown field "spec.engine.maxRunningRequest"'):
        api.create(body, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": {"source": "pvc://weights"}},
        {"model": {"source": "pvc://weights/qwen3/8b/", "aliases": ["a", "Qwen/Qwen3-8B"]}},
        {"replicas": 0},
        {
            "gateway": {
                "mode": "Shared",
                "apiKeys": {"secretNames": ["team-a", "team.b"], "fromLabel": True},
                "tls": {"secretName": "cert"},
                "cors": {"allowOrigins": ["https://chat.example.com", "http://localhost:3000"]},
                "admission": {"maxTokensInFlight": 1000000},
            }
        },
        {"parallelism": {"tensor": 8}, "accelerator": {"perPod": 8, "nodeSelector": {"gpu": "h200"}}},
        {"parallelism": {"tensor": 8, "topologyKey": "example.com/rack"}, "accelerator": {"perPod": 2}},
        {"engine": {"device": "CPU"}, "parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}},
        {"engine": {"extraArgs": ["--model-x", "--eviction", "lfu"], "memoryFraction": "0.05"}},
        {
            "engine": {
                "attention": {"prefill": "FA3", "decode": "Split"},
                "kvCacheDtype": "FP8",
                "cudaGraph": {"mode": "Disabled", "maxBatchSize": 8},
                "overlapScheduling": "Disabled",
            },
            "accelerator": {"resourceClaimTemplateName": "gpu"},
        },
        {"engine": {"device": "CPU", "attention": {"prefill": "CPU", "decode": "CPU"}}},
        {
            "gateway": {
                "processes": 2,
                "resources": {"requests": {"cpu": 2}},
                "routing": {"loadFactorPercent": 100, "warmupTokens": 0, "warmupTimeoutSeconds": 600},
                "retries": {"streamResume": "Disabled", "resumeWaitSeconds": 0},
                "toolParser": "Mistral",
                "reasoningParser": "None",
                "accessLog": "Disabled",
                "extraArgs": ["--max-body-bytes", "4096", "--breaker-failures=9"],
            },
            "observability": {"tracing": {"otlpEndpoint": "http://otel:4318/x", "samplingPercent": 0}},
        },
        {"model": HUB},
        {"model": {**HUB, "source": "hf://gpt2@refs/pr/1", "endpoint": "https://hub.example.com:8443/hf"}},
        {"model": {**HUB, "source": f"oci://h:5000/a/b:v1@sha256:{'0' * 64}"}},
        {
            "model": {
                "source": "s3://models/llm/qwen3/",
                "credentialsSecretRef": {"name": "s3", "key": "credentials"},
                "cache": {
                    "mode": "PersistentVolumeClaim",
                    "claimName": "weights",
                    "size": "200Gi",
                    "storageClassName": "fast",
                    "accessMode": "ReadWriteOnce",
                    "whenDeleted": "Delete",
                },
            }
        },
        {"model": {"source": "oci://ghcr.io/a/b", "cache": {"mode": "HostPath", "path": "/models"}}},
        {"rollout": {"maxSurge": 0, "maxUnavailable": 1, "partition": 2, "paused": True}},
        {"rollout": {"maxSurge": "100%", "maxUnavailable": "25%", "progressDeadlineSeconds": 10}},
        {"rollout": {"maxSurge": "0%", "maxUnavailable": 1}},
        {
            "availability": {"podDisruptionBudget": "Disabled", "spreadTopologyKey": ""},
            "lifecycle": {"maxGroupRestarts": 0},
            "revisionHistoryLimit": 0,
            "networkPolicy": "Disabled",
        },
        {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
        {
            "podTemplate": {
                "affinity": {"nodeAffinity": {}},
                "resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"memory": "2e9"}},
                "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
                "volumeMounts": [{**MOUNT, "readOnly": True}],
            }
        },
    ],
)
def test_a_right_manifest_is_taken(
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


def test_the_shared_example_is_taken_and_its_keys_are_read(api: Any) -> None:
    secret, *services = yaml.safe_load_all((ROOT / "examples/shared-gateway.yaml").read_text())
    for body in services:
        body["metadata"]["namespace"] = "default"
        made = api.create(body, dryRun="All", fieldValidation="Strict")
        assert made["spec"]["gateway"]["apiKeys"]["secretNames"] == [secret["metadata"]["name"]]
    grants = parse_files({Path("keys.yaml"): secret["stringData"]["keys.yaml"].encode()})
    assert [grant.name for grant in grants] == ["team-a", "batch"]


def test_the_example_needs_neither_namespace_nor_served_name(api: Any, example: dict[str, Any]) -> None:
    assert example["metadata"] == {"name": "demo"}
    assert "servedName" not in example["spec"]["model"]
    assert len(list(yaml.safe_load_all((ROOT / "examples/inferenceservice.yaml").read_text()))) == 1
    example["metadata"]["namespace"] = "default"
    taken = api.create(example, dryRun="All", fieldValidation="Strict")
    assert taken["spec"]["engine"]["device"] == "CPU"


def test_scale_reads_and_writes_replicas(
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


def test_the_file_is_small_and_kubectl_shows_it_well(api: Any, control_plane: Any) -> None:
    assert len(CRD.read_bytes()) <= 64_000
    assert len(json.dumps(yaml.safe_load(CRD.read_text()), separators=(",", ":"))) <= 64_000

    def kubectl(*arguments: str) -> str:
        command = [str(control_plane.assets / "kubectl"), "--kubeconfig", str(control_plane.kubeconfig)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout

    assert "A folder with config.json" in kubectl("explain", "infsvc.spec.model.source")
    columns = kubectl("get", "inferenceservices", "--all-namespaces", "-o", "wide")
    assert not columns or columns.split()[0] == "NAMESPACE"
    kubectl("apply", "--dry-run=server", "-f", str(CRD))  # client-side apply fits its annotation
