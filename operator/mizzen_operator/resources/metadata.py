# SPDX-License-Identifier: Apache-2.0
"""Builds parts that many manifests share: metadata, owner references, security contexts, probes, volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import CommonMetadata, InferenceService
from mizzen_operator.kube.objects import digest

NODE_LOST_SECONDS = 30
"""Seconds for which a pod stays on an unreachable or unready node before it is replaced."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "mizzen"}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def owner_reference(service: InferenceService) -> dict[str, Any]:
    """Return the owner reference that makes the garbage collector delete a child with its service."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata(
    service: InferenceService,
    name: str,
    component: str,
    *,
    more_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the metadata of a child of a service."""
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": {
            **service.common.labels,
            **(more_labels or {}),
            **MANAGED_BY,
            labels.SERVICE: service.name,
            labels.COMPONENT: component,
        },
        **annotations_member(service.common, annotations or {}),
        "ownerReferences": [owner_reference(service)],
    }


def annotations_member(common: CommonMetadata, own: Mapping[str, str]) -> dict[str, Any]:
    """Return the member `annotations` of an object's metadata; empty if there are no annotations."""
    merged = {**common.annotations, **own}
    return {"annotations": merged} if merged else {}


def tolerations(user_tolerations: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return a pod's tolerations: the user's, and tolerations that limit its time on a lost node.

    Without the latter, Kubernetes would replace the pod only after five minutes. A user's toleration of the
    same taint takes precedence.
    """
    defaults = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(_tolerates(toleration, key) for toleration in user_tolerations)
    ]
    return [*(dict(toleration) for toleration in user_tolerations), *defaults]


def _tolerates(toleration: Mapping[str, Any], key: str) -> bool:
    effect = toleration.get("effect", "") in ("", "NoExecute")
    return effect and toleration.get("key", "") in ("", key)


def with_applied_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with its hash in an annotation; `kube/apply.py` compares it with the live hash."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), labels.APPLIED_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def http_probe(path: str, port: str, period: int, failures: int, timeout: int = 5) -> dict[str, Any]:
    """Return an HTTP probe.

    Args:
        path: path of the request.
        port: name of the port.
        period: seconds between two requests.
        failures: number of consecutive failures after which the probe fails.
        timeout: seconds after which a request fails.
    """
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


HUNG_GRACE_SECONDS = 10
"""Grace period in seconds after a failed liveness probe; short, because a hung process cannot drain."""


def liveness_probe(port: str) -> dict[str, Any]:
    """Return the liveness probe, which restarts a hung container after 35 to 45 s."""
    return {**http_probe("/healthz", port, 10, 3), "terminationGracePeriodSeconds": HUNG_GRACE_SECONDS}


def field_env(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable whose value is a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def keys_volume(secret: str) -> dict[str, Any]:
    """Return the volume with the CURVE keys in a Secret."""
    return secret_volume("mizzen-keys", secret)


def secret_volume(name: str, secret: str, *, optional: bool = False) -> dict[str, Any]:
    """Return a volume that contains a Secret; the pod's user can read its files.

    Args:
        name: name of the volume.
        secret: name of the Secret.
        optional: the pod starts even if the Secret does not exist.
    """
    source = {"secretName": secret, "defaultMode": 0o444, **({"optional": True} if optional else {})}
    return {"name": name, "secret": source}


API_TOKEN_VOLUME = "mizzen-api-token"
API_TOKEN_SECONDS = 3607
"""Lifetime of a pod's API token in seconds, as Kubernetes' own volumes have it; the kubelet renews it."""


def api_token_volume() -> dict[str, Any]:
    """Return the volume with the token, CA certificate and namespace with which a pod reaches the API server.

    Kubernetes mounts such a volume by itself, but not if the ServiceAccount turns that off. Some clusters
    turn it off for all ServiceAccounts.
    """
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": API_TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [
                    {
                        "path": "namespace",
                        "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
                    }
                ]
            }
        },
    ]
    return {"name": API_TOKEN_VOLUME, "projected": {"sources": sources, "defaultMode": 0o444}}


def api_token_mount() -> dict[str, Any]:
    """Return the mount of `api_token_volume` at the path where Kubernetes clients look for it."""
    return {
        "name": API_TOKEN_VOLUME,
        "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
        "readOnly": True,
    }
