"""What every child has: name, labels, owner, and the hash of its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.objects import digest

NODE_LOST_SECONDS = 30
"""How long a pod may stay on a node that is not ready or not reached, before another takes its place."""
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


def owner(service: InferenceService) -> dict[str, Any]:
    """The owner reference that makes the garbage collector remove a child with its service."""
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
    """Metadata of a child of `service`."""
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": {
            **(more_labels or {}),
            **MANAGED_BY,
            labels.SERVICE: service.name,
            labels.COMPONENT: component,
        },
        **({"annotations": dict(annotations)} if annotations else {}),
        "ownerReferences": [owner(service)],
    }


def tolerations(given: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The tolerations of a pod: those that are given, and how long it stays on a node that cannot be reached.

    Kubernetes would wait for five minutes; where a given one matches the taint, its own time holds.
    """
    own = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_LOST_SECONDS}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(_tolerates(one, key) for one in given)
    ]
    return [*(dict(one) for one in given), *own]


def _tolerates(toleration: Mapping[str, Any], key: str) -> bool:
    effect = toleration.get("effect", "") in ("", "NoExecute")
    return effect and toleration.get("key", "") in ("", key)


def stamped(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own hash as an annotation, which tells whether it was applied as it is."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), labels.APPLIED_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def probe(path: str, port: str, period: int, failures: int, timeout: int = 5) -> dict[str, Any]:
    """An HTTP probe; times are in seconds."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


HUNG_GRACE_SECONDS = 10
"""What does not answer its liveness probes has nothing to drain, nor hears that it should."""


def liveness_probe(port: str) -> dict[str, Any]:
    """Has what hangs killed and started again, after 35 to 45 s."""
    return {**probe("/healthz", port, 10, 3), "terminationGracePeriodSeconds": HUNG_GRACE_SECONDS}


def field_env(name: str, path: str) -> dict[str, Any]:
    """An environment variable that holds a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def keys_volume(secret: str) -> dict[str, Any]:
    """The volume with CURVE keys."""
    return secret_volume("mizzen-keys", secret)


def secret_volume(name: str, secret: str, *, optional: bool = False) -> dict[str, Any]:
    """A Secret's volume; the pod's own user has to read it, and nobody else is in the pod.

    An optional one is empty where the Secret is not there, or no longer.
    """
    source = {"secretName": secret, "defaultMode": 0o444, **({"optional": True} if optional else {})}
    return {"name": name, "secret": source}
