"""The gateway: Deployment, Service, ServiceAccount and the binding of the role that the chart ships."""

from __future__ import annotations

from typing import Any

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.render.meta import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    field_env,
    keys_volume,
    metadata,
    probe,
    stamped,
)

GRACE_MARGIN_SECONDS = 30
DEREGISTER_SECONDS = 3
"""A gateway pod that ends still takes requests this long: proxies learn of its end meanwhile."""


def pod_labels(service: InferenceService) -> dict[str, str]:
    """Labels that select the gateway's pods."""
    return {labels.SERVICE: service.name, labels.COMPONENT: labels.GATEWAY}


def arguments(service: InferenceService) -> list[str]:
    """Arguments of `mizzen`, each option and value an item of its own."""
    options = [
        ("--served-name", service.model.served_name),
        *(("--alias", alias) for alias in service.model.aliases),
        ("--service", service.name),
        ("--namespace", service.namespace),
        ("--host", "$(POD_IP)"),
        ("--port", str(labels.HTTP_PORT)),
        ("--admin-host", "$(POD_IP)"),
        ("--admin-port", str(labels.ADMIN_PORT)),
        ("--admin-token-file", f"{labels.KEYS_FOLDER}/{labels.ADMIN_TOKEN}"),
        ("--keys", labels.KEYS_FOLDER),
        ("--drain-timeout-seconds", str(service.lifecycle.drain_timeout)),
    ]
    flat = [item for option in options for item in option]
    return ["gateway", *flat, *(["--suspended"] if service.suspend else [])]


def gateway_manifests(service: InferenceService, config: OperatorConfig) -> list[dict[str, Any]]:
    """Everything of the gateway but its keys, in the order in which it is applied."""
    name = labels.gateway_name(service.name)
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, name, labels.GATEWAY),
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(service, name, labels.GATEWAY),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": config.gateway_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": service.namespace}],
    }
    manifests = [account, binding, _service(service, name), _deployment(service, config, name)]
    return [stamped(manifest) for manifest in manifests]


def _service(service: InferenceService, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, name, labels.GATEWAY, annotations=service.gateway.annotations),
        "spec": {
            "type": service.gateway.service_type,
            "selector": pod_labels(service),
            "ports": [
                {"name": "http", "port": service.gateway.port, "targetPort": "http", "protocol": "TCP"}
            ],
        },
    }


def _deployment(service: InferenceService, config: OperatorConfig, name: str) -> dict[str, Any]:
    pod_meta = metadata(service, name, labels.GATEWAY)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, name, labels.GATEWAY),
        "spec": {
            "replicas": service.gateway.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": pod_labels(service)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": {
                "metadata": {"labels": pod_meta["labels"]},
                "spec": _pod_spec(service, config, name),
            },
        },
    }


def _pod_spec(service: InferenceService, config: OperatorConfig, name: str) -> dict[str, Any]:
    secrets = [dict(secret) for secret in service.pod_template["imagePullSecrets"]]
    return {
        "serviceAccountName": name,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": service.lifecycle.drain_timeout + GRACE_MARGIN_SECONDS,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "securityContext": POD_SECURITY,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": pod_labels(service)},
            }
        ],
        "containers": [_container(service, config)],
        "volumes": [
            keys_volume(labels.gateway_keys(service.name)),
            {"name": "mizzen-tmp", "emptyDir": {}},
        ],
    }


def _container(service: InferenceService, config: OperatorConfig) -> dict[str, Any]:
    return {
        "name": "gateway",
        "image": config.gateway_image,
        "imagePullPolicy": config.image_pull_policy,
        "args": arguments(service),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [
            {"name": "http", "containerPort": labels.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": labels.ADMIN_PORT, "protocol": "TCP"},
        ],
        "startupProbe": probe("/healthz", "admin", 1, 120),
        "readinessProbe": probe("/readyz", "admin", 1, 3),
        "livenessProbe": probe("/healthz", "admin", 10, 3),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "mizzen-keys", "mountPath": labels.KEYS_FOLDER, "readOnly": True},
            {"name": "mizzen-tmp", "mountPath": "/tmp"},
        ],
    }
