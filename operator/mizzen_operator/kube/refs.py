# SPDX-License-Identifier: Apache-2.0
"""References to objects, and their paths on the API server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from mizzen_operator.api import labels

_PATHS = {
    "APIGroupList": ("", "apis"),
    "APIResourceList": (f"/apis/{labels.GROUP}", labels.VERSION),
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


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Reference to an object, its subresource (such as `status`), or all objects of a kind.

    An empty namespace means all namespaces.
    """

    kind: str
    namespace: str
    name: str = ""
    subresource: str = ""

    def path(self) -> str:
        """Return the URL path of the object or collection on the API server."""
        prefix, plural = _PATHS[self.kind]
        parts = [prefix]
        if self.namespace:
            parts += ["namespaces", quote(self.namespace)]
        parts.append(plural)
        parts += [quote(part) for part in (self.name, self.subresource) if part]
        return "/".join(parts)
