"""Says which field helps if the claim of the model's cache cannot be bound or mounted. Pure."""

from __future__ import annotations

from mizzen_operator.api.types import InferenceService

_UNBOUND = ("unbound immediate PersistentVolumeClaims", "VolumeBinding")
"""Parts of the scheduler's message if a claim of the pod is not bound to a volume."""


def explain_unbound_claim(service: InferenceService, message: str) -> str:
    """Return the scheduler's message and, if the cache's claim is not bound, the fields that may be wrong.

    Args:
        service: the service.
        message: the scheduler's message about a pod that mounts the claim.
    """
    cache = service.access.cache
    if not cache.claim or not any(part in message for part in _UNBOUND):
        return message
    if not cache.size:
        return f"{message}; spec.model.cache.claimName names claim {cache.claim}, which is not bound"
    storage_class = cache.storage_class or "the cluster's default"
    advice = (
        f"claim {cache.claim} ({cache.access_mode}, {cache.size}, storage class {storage_class}) is not bound"
    )
    fields = "spec.model.cache.storageClassName or size"
    if cache.access_mode == "ReadWriteMany":
        fields = "spec.model.cache.accessMode to ReadWriteOnce, or storageClassName"
    return f"{message}; {advice}: change {fields}, delete the claim, and it is created again"


def describe_single_node_claim(service: InferenceService) -> str:
    """Return a hint for pods that wait for their volumes; empty unless a claim ties them to one node."""
    cache = service.access.cache
    several = service.groups * service.pods > 1
    if not (cache.claim and cache.size and several and cache.access_mode == "ReadWriteOnce"):
        return ""
    return (
        f"; claim {cache.claim} is ReadWriteOnce, so only pods of one node can mount it: use a claim with "
        "spec.model.cache.accessMode ReadWriteMany"
    )
