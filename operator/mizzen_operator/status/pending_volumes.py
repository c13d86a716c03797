# SPDX-License-Identifier: Apache-2.0
"""Explains why a pod waits for its volumes, with the fields of the spec that name them. Pure.

The scheduler, the kubelet and the volume controllers report causes only in Events, which the operator has no
permission to read. The state of a claim often shows the cause, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mizzen_operator.api.types import InferenceService, ModelCache
from mizzen_operator.pods.group import Group
from mizzen_operator.status.missing_refs import CLAIM, RequiredRef, engine_refs

SINGLE_NODE_MODES = frozenset({"ReadWriteOnce", "ReadWriteOncePod"})
"""Access modes of claims that the pods of only one node can mount."""
_RECREATE = "delete the claim, and it is created again"


def claim_refs(service: InferenceService) -> list[RequiredRef]:
    """Return the claims that engine pods mount, including a claim that the operator creates for the cache."""
    refs = [ref for ref in engine_refs(service) if ref.kind == CLAIM]
    cache = service.access.cache
    if cache.claim and cache.size:
        refs.append(RequiredRef(CLAIM, cache.claim, "spec.model.cache.claimName"))
    return refs


def explain_claim(
    service: InferenceService, ref: RequiredRef, claim: Mapping[str, Any], *, mounting: bool
) -> str:
    """Return why pods may be unable to mount a claim, with the way out; empty if its state shows no reason.

    Args:
        service: the service.
        ref: the claim's name and field.
        claim: the PersistentVolumeClaim.
        mounting: a pod with a node waits for its volumes.
    """
    name = f"{CLAIM} {ref.name} ({ref.field})"
    phase, modes = claim.get("status", {}).get("phase"), claim["spec"].get("accessModes", [])
    cache = service.access.cache
    created = bool(cache.size) and ref.name == cache.claim
    if "deletionTimestamp" in claim["metadata"]:
        return f"{name} is being deleted"
    if phase == "Pending":
        where = f"{ref.name} -n {claim['metadata']['namespace']}"
        message = f"{name} is not bound to a volume yet: kubectl describe pvc {where} shows why"
        return f"{message}; {_describe_created_claim(cache)}" if created else message
    if phase == "Lost":
        return f"{name} has lost its volume"
    if mounting and set(modes) <= SINGLE_NODE_MODES:
        message = f"{name} is {' and '.join(modes)}, so only the pods of one node can mount it at a time"
        if created:
            return f"{message}: change spec.model.cache.accessMode to ReadWriteMany, {_RECREATE}"
        return f"{message}: use a claim with the access mode ReadWriteMany"
    return ""


def _describe_created_claim(cache: ModelCache) -> str:
    """Return the fields of a claim that the operator has created, and how to change them."""
    storage_class = cache.storage_class or "the cluster's default"
    scarce = ", which few storage classes offer" if cache.access_mode == "ReadWriteMany" else ""
    fields = (
        f"accessMode ({cache.access_mode}{scarce}), size ({cache.size}) or storageClassName ({storage_class})"
    )
    return f"if the cause is its {fields}, correct spec.model.cache, {_RECREATE}"


def describe_volume_wait(service: InferenceService, groups: Sequence[Group], causes: Sequence[str]) -> str:
    """Return a message about the first group that waits for its volumes; empty if none does.

    Args:
        service: the service.
        groups: the groups whose pods have not created any container for some time.
        causes: what the claims' states show, as `explain_claim` returns it.
    """
    if causes and any(not group.node for group in groups):
        return "; ".join(causes)
    mounting = [group for group in groups if group.mounting_volumes]
    names = "; ".join(causes) or ", ".join(_volume_fields(service))
    if not (mounting and names):
        return ""
    first = min(mounting, key=lambda group: group.name)
    return (
        f"{first.name} waits on node {first.node} for its volumes: {names}; "
        f"kubectl describe pod {first.name} -n {service.namespace} shows the events"
    )


def _volume_fields(service: InferenceService) -> list[str]:
    """Return the fields of the spec that add volumes to engine pods."""
    fields = [ref.field for ref in claim_refs(service) if not ref.field.startswith("spec.podTemplate")]
    if service.access.cache.mode == "HostPath":
        fields.append("spec.model.cache.path")
    return fields + [
        f"spec.podTemplate.volumes[{index}] ({volume.get('name', '')})"
        for index, volume in enumerate(service.pod_template.get("volumes", ()))
    ]
