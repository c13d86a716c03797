"""Gateways: Deployment, Service, ServiceAccount and the binding of the role that the chart ships."""

from __future__ import annotations

from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import Gateway, Tracing
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.gateway_spec import Front
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    field_env,
    keys_volume,
    liveness_probe,
    probe,
    secret_volume,
    stamped,
    tolerations,
)

GRACE_MARGIN_SECONDS = 30
NO_KEYS_VOLUME = "mizzen-no-api-keys"
DEREGISTER_SECONDS = 3
"""A gateway pod that ends still takes requests this long: proxies learn of its end meanwhile."""


def arguments(front: Front) -> list[str]:
    """Arguments of `mizzen`, each option and value an item of its own."""
    gateway = front.gateway
    options = [
        *front.arguments,
        ("--namespace", front.namespace),
        ("--host", "$(POD_IP)"),
        ("--port", str(labels.HTTP_PORT)),
        ("--admin-host", "$(POD_IP)"),
        ("--admin-port", str(labels.ADMIN_PORT)),
        ("--admin-token-file", f"{labels.KEYS_FOLDER}/{labels.ADMIN_TOKEN}"),
        ("--keys", labels.KEYS_FOLDER),
        *_no_keys(gateway),
        *(("--api-keys-file", f"{labels.API_KEYS_FOLDER}/{name}") for _, name, _ in front.key_secrets),
        *(("--cors-origin", origin) for origin in gateway.cors_origins),
        *_tls(gateway),
        ("--max-in-flight", str(gateway.admission.max_in_flight)),
        ("--max-tokens-in-flight", str(gateway.admission.max_tokens_in_flight)),
        ("--queue-size", str(gateway.admission.queue_size)),
        ("--queue-timeout-seconds", str(gateway.admission.queue_timeout)),
        ("--max-attempts", str(gateway.retries.max_attempts)),
        ("--max-resumes", str(gateway.retries.max_resumes)),
        ("--resume-timeout-seconds", str(gateway.retries.resume_timeout)),
        ("--resume-wait-seconds", str(gateway.retries.resume_wait)),
        ("--load-factor-percent", str(gateway.load_factor_percent)),
        ("--warm-tokens", str(gateway.warmup_tokens)),
        ("--warm-seconds", str(gateway.warmup_timeout)),
        ("--tool-parser", TOOL_PARSERS[gateway.tool_parser]),
        ("--reasoning-parser", REASONING_PARSERS[gateway.reasoning_parser]),
        ("--access-log", ACCESS_LOG[gateway.access_log]),
        ("--processes", str(gateway.processes)),
        *([("--otlp-endpoint", front.tracing.endpoint)] if front.tracing.endpoint else []),
        ("--drain-timeout-seconds", str(front.drain_timeout)),
    ]
    return ["gateway", *(item for option in options for item in option), *front.flags, *gateway.extra_args]


TOOL_PARSERS = {
    "Auto": "auto",
    "None": "none",
    "Hermes": "hermes",
    "Qwen3Coder": "qwen3-coder",
    "Llama3": "llama3",
    "Mistral": "mistral",
}
REASONING_PARSERS = {
    "Auto": "auto",
    "None": "none",
    "Qwen3": "qwen3",
    "DeepSeekR1": "deepseek-r1",
    "Magistral": "magistral",
}
ACCESS_LOG = {"Enabled": "on", "Disabled": "off", "Prompts": "prompts"}


def _no_keys(gateway: Gateway) -> list[tuple[str, str]]:
    """The empty folder that keeps a gateway closed while no Secret has its label."""
    return [("--api-keys-file", labels.NO_API_KEYS_FOLDER)] if gateway.keys_from_label else []


def _tls(gateway: Gateway) -> list[tuple[str, str]]:
    if not gateway.tls_secret:
        return []
    return [("--tls-cert", f"{labels.TLS_FOLDER}/tls.crt"), ("--tls-key", f"{labels.TLS_FOLDER}/tls.key")]


def gateway_manifests(front: Front, config: OperatorConfig) -> list[dict[str, Any]]:
    """Everything of a gateway but its keys, in the order in which it is applied."""
    subject = {"kind": "ServiceAccount", "name": front.name, "namespace": front.namespace}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": front.metadata(),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": config.gateway_role_kind,
            "name": config.gateway_role,
        },
        "subjects": [subject],
    }
    manifests = [binding, _service(front), _deployment(front, config)]
    return [gateway_account(front), *(stamped(manifest) for manifest in manifests)]


def gateway_account(front: Front) -> dict[str, Any]:
    """The ServiceAccount of a gateway."""
    return stamped({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": front.metadata()})


def _service(front: Front) -> dict[str, Any]:
    gateway = front.gateway
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": front.metadata(gateway.annotations),
        "spec": {
            "type": gateway.service_type,
            "selector": dict(front.selector),
            "ports": [{"name": "http", "port": gateway.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _deployment(front: Front, config: OperatorConfig) -> dict[str, Any]:
    bound = {"annotations": {labels.SERVICE_ACCOUNT_UID: front.account}} if front.account else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": front.metadata(),
        "spec": {
            "replicas": front.gateway.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": dict(front.selector)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": {
                "metadata": {"labels": front.metadata()["labels"], **bound},
                "spec": _pod_spec(front, config),
            },
        },
    }


def _pod_spec(front: Front, config: OperatorConfig) -> dict[str, Any]:
    secrets = [dict(secret) for secret in front.image_pull_secrets]
    return {
        "serviceAccountName": front.name,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": front.drain_timeout + GRACE_MARGIN_SECONDS,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "securityContext": POD_SECURITY,
        "tolerations": tolerations(),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(front.selector)},
            }
        ],
        "containers": [_container(front, config)],
        "volumes": [
            keys_volume(front.keys),
            {"name": "mizzen-tmp", "emptyDir": {}},
            *(volume for volume, _ in _users_volumes(front)),
        ],
    }


def _users_volumes(front: Front) -> list[tuple[dict[str, Any], str]]:
    """Volumes with what the user gives a gateway, and where they are mounted."""
    found = [
        (secret_volume(volume, name, optional=optional), f"{labels.API_KEYS_FOLDER}/{name}")
        for volume, name, optional in front.key_secrets
    ]
    if front.gateway.keys_from_label:
        found.append(({"name": NO_KEYS_VOLUME, "emptyDir": {}}, labels.NO_API_KEYS_FOLDER))
    if front.gateway.tls_secret:
        found.append((secret_volume("mizzen-tls", front.gateway.tls_secret), labels.TLS_FOLDER))
    return found


def _sampling(tracing: Tracing) -> list[dict[str, Any]]:
    """OpenTelemetry's own variables: the share of traces that begin here, and no other's decision undone."""
    if not tracing.endpoint:
        return []
    return [
        {"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_traceidratio"},
        {"name": "OTEL_TRACES_SAMPLER_ARG", "value": f"{tracing.sampling_percent / 100:g}"},
    ]


def _container(front: Front, config: OperatorConfig) -> dict[str, Any]:
    return {
        "name": "gateway",
        "image": config.gateway_image,
        "imagePullPolicy": config.image_pull_policy,
        "args": arguments(front),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            {"name": "HOME", "value": "/tmp"},
            *_sampling(front.tracing),
        ],
        "ports": [
            {"name": "http", "containerPort": labels.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": labels.ADMIN_PORT, "protocol": "TCP"},
        ],
        "startupProbe": probe("/healthz", "admin", 1, 120),
        # One that hangs is left within 3 s where others serve; a lone one that is late is better than none.
        "readinessProbe": probe("/readyz", "admin", 1, 2, 1)
        if front.gateway.replicas > 1
        else probe("/readyz", "admin", 1, 3),
        "livenessProbe": liveness_probe("admin"),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {kind: dict(given) for kind, given in front.gateway.resources.items() if given},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "mizzen-keys", "mountPath": labels.KEYS_FOLDER, "readOnly": True},
            {"name": "mizzen-tmp", "mountPath": "/tmp"},
            *(
                {"name": volume["name"], "mountPath": path, "readOnly": True}
                for volume, path in _users_volumes(front)
            ),
        ],
    }
