# SPDX-License-Identifier: Apache-2.0
"""A service, a serving group, and the status inputs of a reconcile without problems."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api.parse import parse_service
from mizzen_operator.api.types import InferenceService, Rollout
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod
from mizzen_operator.status.inputs import StatusInputs

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SPEC: dict[str, Any] = {
    "model": {"source": "file:///m", "aliases": [], "dtype": "Auto", "cache": {"mode": "None"}},
    "replicas": 1,
    "parallelism": {"tensor": 1},
    "accelerator": {"resourceName": "nvidia.com/gpu", "nodeSelector": {}},
    "engine": {
        "device": "CUDA",
        "maxRunningRequests": 1,
        "memoryFraction": "0.9",
        "prefillChunkTokens": 1,
        "maxStepMilliseconds": 1,
        "pageSize": 1,
        "prefixCache": "Radix",
        "attention": {"prefill": "Auto", "decode": "Auto"},
        "kvCacheDtype": "Auto",
        "overlapScheduling": "Enabled",
        "cudaGraph": {"mode": "Auto", "maxBatchSize": 512},
        "extraArgs": [],
        "env": [],
    },
    "podTemplate": {},
    "gateway": {
        "mode": "Dedicated",
        "replicas": 1,
        "service": {"type": "ClusterIP", "port": 8000, "annotations": {}},
        "apiKeys": {"secretNames": [], "fromLabel": False},
        "cors": {"allowOrigins": []},
        "admission": {
            "maxInFlight": 1,
            "maxTokensInFlight": 0,
            "queueSize": 1,
            "queueTimeoutSeconds": 1,
        },
        "processes": 1,
        "resources": {},
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
    },
    "lifecycle": {"startupTimeoutSeconds": 10, "drainTimeoutSeconds": 10, "maxGroupRestarts": 10},
    "rollout": {
        "maxSurge": 1,
        "maxUnavailable": 0,
        "partition": 0,
        "paused": False,
        "progressDeadlineSeconds": 600,
    },
    "availability": {"podDisruptionBudget": "Auto", "spreadTopologyKey": ""},
    "observability": {"tracing": {"otlpEndpoint": "", "samplingPercent": 5}},
    "revisionHistoryLimit": 5,
    "networkPolicy": "Disabled",
    "suspend": False,
}
META = {"name": "demo", "namespace": "llm", "uid": "u", "generation": 3}
DEPLOYED = {
    "metadata": {"generation": 2},
    "status": {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1},
}
SERVING = Group(
    "demo-a-0-0", "1", 0, "a", 0, containers_ready=True, was_routable=True, routable=True, node="n"
)
GATEWAY = GatewayPod("demo-gateway-x", "10.0.0.1", True)


def service(**spec: Any) -> InferenceService:
    """Return a service with default values, except for the fields in `spec`."""
    return parse_service({"metadata": META, "spec": {**SPEC, **spec}})


GOOD = StatusInputs(
    service=service(),
    revision="a",
    engine_image="engine:1",
    groups=[SERVING],
    gateways=[GATEWAY],
    deployment=DEPLOYED,
)
OLD = replace(SERVING, revision="b", uid="2", name="demo-b-0-0")


def rolling(rollout: Rollout | None = None, replicas: int = 1, **spec: Any) -> InferenceService:
    """Return a service with rollout settings and a number of groups."""
    base = service(replicas=replicas, podTemplate={"labels": {}}, **spec)
    return replace(base, rollout=rollout or Rollout(progress_deadline=600))


def group(name: str = "a0", restarts: int = 0, message: str = "") -> Group:
    """Return a group that serves; `a0` is group 0 of revision a."""
    return Group(
        f"demo-{name[0]}-{name[1]}-0",
        name,
        int(name[1]),
        name[0],
        0,
        containers_ready=True,
        was_routable=True,
        routable=True,
        restarts=restarts,
        message=message,
    )
