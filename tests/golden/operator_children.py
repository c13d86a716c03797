# SPDX-License-Identifier: Apache-2.0
"""Renders the child objects of a few sample services, without their random values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mizzen_operator.api import child_names
from mizzen_operator.api import gateway_sharing as sharing
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources import (
    engine_pod,
    fetch_job,
    gateway_deployment,
    gateway_spec,
    key_secrets,
    network_policy,
    pod_disruption_budget,
    shared_gateway,
)
from mizzen_operator.rollout.revisions import controller_revision

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1")
REVISION = "0123abcd"
HUB = {
    "source": "hf://Qwen/Qwen3-8B@main",
    "cache": {
        "mode": "PersistentVolumeClaim",
        "claimName": "weights",
        "size": "40Gi",
        "whenDeleted": "Delete",
    },
    "credentialsSecretRef": {"name": "hub", "key": "token"},
    "endpoint": "https://mirror.example",
}
VERIFIED = {"verification": {"prompts": [{"prompt": "1+1=", "expected": "2"}]}}
SAMPLES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "cpu": {"engine": {"device": "CPU"}, "suspend": True},
    "several-pods": {
        "replicas": 3,
        "parallelism": {"tensor": 4, "topologyKey": "rack"},
        "accelerator": {"perPod": 2, "nodeSelector": {"gpu": "h200"}},
        "podTemplate": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
        "rollout": VERIFIED,
    },
    "fetched": {"model": HUB, "gateway": {"apiKeys": {"secretNames": ["team"], "fromLabel": True}}},
    "fetched-by-nodes": {
        "model": {"source": "s3://models/demo", "cache": {"mode": "HostPath", "path": "/var/models"}},
        "accelerator": {"resourceClaimTemplateName": "one-gpu"},
    },
    "gateway": {
        "gateway": {
            "service": {"type": "LoadBalancer", "port": 80, "annotations": {"a": "b"}},
            "tls": {"secretName": "cert"},
            "cors": {"allowOrigins": ["https://a.example"]},
            "toolParser": "Hermes",
            "reasoningParser": "DeepSeekR1",
            "accessLog": "Prompts",
            "playground": "Enabled",
            "grpc": "Enabled",
            "images": {"urls": "Allowed", "allowHosts": ["*.example.com"]},
            "extraArgs": ["--max-body-bytes=4096"],
        },
        "observability": {"tracing": {"otlpEndpoint": "http://otel:4318", "samplingPercent": 50}},
        "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "idleSecondsToZero": 300},
    },
}
Make = Callable[[dict[str, Any], dict[str, Any]], Any]


def render_children(make: Make) -> dict[str, Any]:
    """Return the child objects of each sample service, and those of a gateway that two services share.

    Args:
        make: builds a service from its metadata and the fields of its spec that differ from a minimal spec.
    """
    children = {
        name: _render_objects(make(spec, {"name": name, "uid": f"uid-{name}"}))
        for name, spec in SAMPLES.items()
    }
    shared_services = [
        make({"gateway": {"mode": "Shared"}}, {"name": name, "uid": f"uid-{name}"})
        for name in ("first", "second")
    ]
    children["shared"] = [*_render_objects(shared_services[0]), *_render_shared(shared_services)]
    return {
        name: {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in manifests}
        for name, manifests in children.items()
    }


def _render_objects(service: Any) -> list[dict[str, Any]]:
    manifests = engine_pod.engine_pods(service, CONFIG, revision=REVISION, group=2, attempt=1)
    manifests += [engine_pod.ranks_service(service), pod_disruption_budget.engine_disruption_budget(service)]
    manifests += network_policy.service_network_policies(service, CONFIG)
    manifests.append(controller_revision(service, CONFIG, REVISION, 4))
    root = key_secrets.root_secret(service)
    manifests.append(_hide_values(root))
    if not service.shares_gateway:
        own = gateway_spec.dedicated_gateway_spec(service)
        manifests += [
            *gateway_deployment.gateway_manifests(own, CONFIG),
            pod_disruption_budget.gateway_disruption_budget(own),
        ]
        manifests += map(_hide_values, key_secrets.mounted_secrets(service, root))
    if service.access.cached:
        manifests += [
            fetch_job.fetch_job(service, CONFIG),
            network_policy.fetch_network_policy(service, CONFIG),
        ]
        manifests += [claim for claim in [fetch_job.cache_claim(service)] if claim is not None]
    return manifests


def _render_shared(services: list[Any]) -> list[dict[str, Any]]:
    together = sharing.resolve_sharing(services)
    assert together is not None
    own = shared_gateway.shared_gateway_spec(together)
    keys = {
        shared_service.name: key_secrets.EngineKeys(("public-key",), 3) for shared_service in services[:1]
    }
    return [
        *gateway_deployment.gateway_manifests(own, CONFIG),
        pod_disruption_budget.gateway_disruption_budget(own),
        shared_gateway.services_config_map(together, own, keys),
        _hide_values(shared_gateway.shared_keys_secret(own, handled_request="now")),
        {"kind": "Names", "metadata": {"name": child_names.SHARED_GATEWAY}},
    ]


def _hide_values(secret: dict[str, Any]) -> dict[str, Any]:
    return {**secret, "data": sorted(secret["data"])}
