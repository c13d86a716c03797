# SPDX-License-Identifier: Apache-2.0
"""Builds the Deployment, Service, ServiceAccount and RoleBinding of a gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import Gateway, Images
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.gateway_spec import GatewaySpec
from mizzen_operator.resources.metadata import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    api_token_mount,
    api_token_volume,
    field_env,
    http_probe,
    keys_volume,
    liveness_probe,
    secret_volume,
    tolerations,
    with_applied_hash,
)
from mizzen_operator.resources.tracing import (
    effective_tracing,
    gateway_options,
    gateway_variables,
    headers_mounts,
    headers_volumes,
)

GRACE_MARGIN_SECONDS = 30
NO_KEYS_VOLUME = "mizzen-no-api-keys"
DEREGISTER_SECONDS = 3
"""Seconds for which a terminating gateway pod still accepts requests, while proxies stop using it."""


def gateway_arguments(spec: GatewaySpec) -> list[str]:
    """Return the arguments of `mizzen` for a gateway; options and values are separate items."""
    gateway = spec.gateway
    options = [
        *spec.arguments,
        ("--namespace", spec.namespace),
        ("--host", "$(POD_IP)"),
        ("--port", str(labels.HTTP_PORT)),
        ("--admin-host", "$(POD_IP)"),
        ("--admin-port", str(labels.ADMIN_PORT)),
        ("--admin-token-file", f"{labels.KEYS_FOLDER}/{labels.ADMIN_TOKEN}"),
        ("--keys", labels.KEYS_FOLDER),
        *_empty_keys_option(gateway),
        *(("--api-keys-file", f"{labels.API_KEYS_FOLDER}/{name}") for _, name, _ in spec.api_key_volumes),
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
        *(
            ("--moderation-category", f"{label}={category}")
            for label, category in sorted(gateway.moderation_categories.items())
        ),
        *_image_options(gateway.images),
        ("--processes", str(gateway.processes)),
        *gateway_options(spec.tracing),
        ("--drain-timeout-seconds", str(spec.drain_timeout)),
    ]
    if gateway.grpc:
        options.append(("--grpc-port", str(labels.GRPC_PORT)))
    flags = [*spec.flags, *(["--playground"] if gateway.playground else [])]
    return ["gateway", *(item for option in options for item in option), *flags, *gateway.extra_args]


TOOL_PARSERS = {
    "Auto": "auto",
    "None": "none",
    "Hermes": "hermes",
    "Qwen3Coder": "qwen3-coder",
    "Llama3": "llama3",
    "Mistral": "mistral",
    "Granite": "granite",
    "Phi4Mini": "phi4-mini",
    "Cohere": "cohere",
    "CommandR": "command-r",
    "Hunyuan": "hunyuan",
    "GLM4": "glm4",
    "GLM45": "glm45",
    "SeedOSS": "seed-oss",
    "OLMo3": "olmo3",
    "Pythonic": "pythonic",
    "GptOSS": "gpt-oss",
}
REASONING_PARSERS = {
    "Auto": "auto",
    "None": "none",
    "Qwen3": "qwen3",
    "DeepSeekR1": "deepseek-r1",
    "Magistral": "magistral",
    "Granite": "granite",
    "Granite32": "granite32",
    "Hunyuan": "hunyuan",
    "Cohere": "cohere",
    "SeedOSS": "seed-oss",
    "GptOSS": "gpt-oss",
}
_COPIED_FIELDS = ("affinity", "nodeSelector", "priorityClassName")
"""Fields of `spec.gateway.podTemplate` that are copied into the pod's spec unchanged."""
ACCESS_LOG = {"Enabled": "on", "Disabled": "off", "Prompts": "prompts"}


def _empty_keys_option(gateway: Gateway) -> list[tuple[str, str]]:
    """Return the option with an empty folder of API keys, if the gateway finds its Secrets by label.

    With it, the gateway rejects every request while no Secret has the label, instead of requiring no key.
    """
    return [("--api-keys-file", labels.NO_API_KEYS_FOLDER)] if gateway.keys_from_label else []


def _image_options(images: Images | None) -> list[tuple[str, str]]:
    """Return the options with the limits of images and the hosts from which they are fetched."""
    if images is None:
        return []
    return [
        ("--max-images", str(images.max_images)),
        ("--max-image-bytes", str(images.max_bytes)),
        ("--max-image-pixels", str(images.max_pixels)),
        ("--image-urls", "allowed" if images.hosts else "refused"),
        *(("--image-hosts", host) for host in images.hosts),
    ]


def _tls(gateway: Gateway) -> list[tuple[str, str]]:
    if not gateway.tls_secret:
        return []
    return [("--tls-cert", f"{labels.TLS_FOLDER}/tls.crt"), ("--tls-key", f"{labels.TLS_FOLDER}/tls.key")]


def gateway_manifests(spec: GatewaySpec, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return all manifests of a gateway except its keys, in the order in which to apply them."""
    spec = replace(spec, tracing=effective_tracing(spec.tracing, config))
    account = {"kind": "ServiceAccount", "name": spec.name, "namespace": spec.namespace}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": spec.metadata(),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": config.gateway_role_kind,
            "name": config.gateway_role,
        },
        "subjects": [account],
    }
    manifests = [binding, _service(spec), _deployment(spec, config)]
    return [gateway_account(spec), *(with_applied_hash(manifest) for manifest in manifests)]


def gateway_account(spec: GatewaySpec) -> dict[str, Any]:
    """Return the ServiceAccount of a gateway."""
    return with_applied_hash({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": spec.metadata()})


def _service(spec: GatewaySpec) -> dict[str, Any]:
    """Return the Service; names and appProtocols of its ports tell meshes and Ingresses what they carry."""
    gateway = spec.gateway
    tls = {"name": "https", "appProtocol": "https"} if gateway.tls_secret else {"name": "http"}
    ports = [{**tls, "port": gateway.port, "targetPort": "http", "protocol": "TCP"}]
    if gateway.grpc:
        protocol = "https" if gateway.tls_secret else "kubernetes.io/h2c"
        port = {"port": labels.GRPC_PORT, "targetPort": "grpc", "protocol": "TCP"}
        ports.append({"name": "grpc", "appProtocol": protocol, **port})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": spec.metadata(gateway.annotations),
        "spec": {
            "type": gateway.service_type,
            "selector": dict(spec.selector),
            "ports": ports,
        },
    }


def _deployment(spec: GatewaySpec, config: OperatorConfig) -> dict[str, Any]:
    annotations = dict(spec.gateway.pod_template.get("annotations", {}))
    if spec.service_account_uid:
        annotations[labels.SERVICE_ACCOUNT_UID] = spec.service_account_uid
    meta = spec.metadata(annotations)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": spec.metadata(),
        "spec": {
            "replicas": spec.gateway.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": dict(spec.selector)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": {
                "metadata": {name: meta[name] for name in ("labels", "annotations") if name in meta},
                "spec": _pod_spec(spec, config),
            },
        },
    }


def _pod_spec(spec: GatewaySpec, config: OperatorConfig) -> dict[str, Any]:
    secrets = [dict(secret) for secret in spec.image_pull_secrets]
    overlay = spec.gateway.pod_template
    return {
        **{field: overlay[field] for field in _COPIED_FIELDS if overlay.get(field)},
        "serviceAccountName": spec.name,
        "automountServiceAccountToken": False,  # the volumes contain the token
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.drain_timeout + GRACE_MARGIN_SECONDS,
        **({"imagePullSecrets": secrets} if secrets else {}),
        "securityContext": POD_SECURITY,
        "tolerations": tolerations(overlay.get("tolerations", ())),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(spec.selector)},
            }
        ],
        "containers": [_container(spec, config)],
        "volumes": [
            keys_volume(spec.keys_secret),
            {"name": "mizzen-tmp", "emptyDir": {}},
            api_token_volume(),
            *(volume for volume, _ in _user_secret_volumes(spec)),
            *headers_volumes(spec.tracing),
        ],
    }


def _user_secret_volumes(spec: GatewaySpec) -> list[tuple[dict[str, Any], str]]:
    """Return the volumes with the user's Secrets (API keys, TLS), each with its mount path."""
    volumes = [
        (secret_volume(volume, name, optional=optional), f"{labels.API_KEYS_FOLDER}/{name}")
        for volume, name, optional in spec.api_key_volumes
    ]
    if spec.gateway.keys_from_label:
        volumes.append(({"name": NO_KEYS_VOLUME, "emptyDir": {}}, labels.NO_API_KEYS_FOLDER))
    if spec.gateway.tls_secret:
        volumes.append((secret_volume("mizzen-tls", spec.gateway.tls_secret), labels.TLS_FOLDER))
    return volumes


def _container(spec: GatewaySpec, config: OperatorConfig) -> dict[str, Any]:
    grpc = spec.gateway.grpc
    return {
        "name": "gateway",
        "image": config.gateway_image,
        "imagePullPolicy": config.image_pull_policy,
        "args": gateway_arguments(spec),
        "env": [
            field_env("POD_IP", "status.podIP"),
            field_env("POD_NAME", "metadata.name"),
            field_env("POD_NAMESPACE", "metadata.namespace"),
            {"name": "HOME", "value": "/tmp"},
            *gateway_variables(spec.tracing),
        ],
        "ports": [
            {"name": "http", "containerPort": labels.HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": labels.ADMIN_PORT, "protocol": "TCP"},
            *([{"name": "grpc", "containerPort": labels.GRPC_PORT, "protocol": "TCP"}] if grpc else []),
        ],
        "startupProbe": http_probe("/healthz", "admin", 1, 120),
        # If there are other pods, one that hangs gets no requests after 3 s. A single slow pod is kept.
        "readinessProbe": http_probe("/readyz", "admin", 1, 2, 1)
        if spec.gateway.replicas > 1
        else http_probe("/readyz", "admin", 1, 3),
        "livenessProbe": liveness_probe("admin"),
        "lifecycle": {"preStop": {"sleep": {"seconds": DEREGISTER_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {kind: dict(values) for kind, values in spec.gateway.resources.items() if values},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "mizzen-keys", "mountPath": labels.KEYS_FOLDER, "readOnly": True},
            {"name": "mizzen-tmp", "mountPath": "/tmp"},
            api_token_mount(),
            *(
                {"name": volume["name"], "mountPath": path, "readOnly": True}
                for volume, path in _user_secret_volumes(spec)
            ),
            *headers_mounts(spec.tracing),
        ],
    }
