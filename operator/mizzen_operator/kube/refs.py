"""What the API server calls things, and what its refusals say."""

from __future__ import annotations

import random
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from mizzen_operator.api import labels

MOST_PAUSE_SECONDS = 5.0
"""However long the API server asks to be left alone; the look's own back-off is longer."""
WEBHOOK_FAILS = "failed calling webhook"
"""What the API server says of an admission webhook that did not answer, or answered what is no answer."""

_PATHS = {
    "InferenceService": (f"/apis/{labels.GROUP}/{labels.VERSION}", labels.PLURAL),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Event": ("/api/v1", "events"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "HorizontalPodAutoscaler": ("/apis/autoscaling/v2", "horizontalpodautoscalers"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Job": ("/apis/batch/v1", "jobs"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
}


class KubeError(Exception):
    """The API server refused or failed a request.

    Attributes:
        code: HTTP status; 0 when no answer came.
        reason: the API's reason, such as `AlreadyExists`.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Ref:
    """Where an object is; `subresource` such as `status`."""

    kind: str
    namespace: str
    name: str = ""
    subresource: str = ""

    def path(self) -> str:
        """Path on the API server."""
        prefix, plural = _PATHS[self.kind]
        parts = [prefix]
        if self.namespace:
            parts += ["namespaces", quote(self.namespace)]
        parts.append(plural)
        parts += [quote(part) for part in (self.name, self.subresource) if part]
        return "/".join(parts)


def pause(least: float, data: bytes) -> float:
    """Seconds until a request is sent again: what a refusal asks for, if that is more."""
    try:
        asked = float(msgspec.json.decode(data)["details"]["retryAfterSeconds"])
    except (ValueError, TypeError, KeyError):
        asked = 0.0
    return min(MOST_PAUSE_SECONDS, max(asked, least * random.uniform(0.8, 1.2)))


def by_webhook(code: int, data: bytes) -> bool:
    """Whether an admission webhook failed that has to agree: somebody's program, not the API server."""
    return code == 500 and WEBHOOK_FAILS.encode() in data


def refusal(code: int, data: bytes, what: str) -> KubeError:
    """What the API server says of a request that it refused or failed; `what` was asked."""
    try:
        status = msgspec.json.decode(data)
        return KubeError(code, status.get("reason", ""), status.get("message", "") or f"{what}: {code}")
    except (ValueError, AttributeError):
        return KubeError(code, "", f"{what}: {code}")
