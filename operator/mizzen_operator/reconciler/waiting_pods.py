# SPDX-License-Identifier: Apache-2.0
"""Finds out what pods without containers wait for: missing objects, or volumes that cannot be mounted.

A kubelet reports both only in Events, which the operator has no permission to read.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.pods.group import Group
from mizzen_operator.reconciler.context import ReconcileContext
from mizzen_operator.status.missing_refs import (
    CLAIM,
    CONFIG_MAP,
    RequiredRef,
    engine_refs,
    fetch_refs,
    gateway_refs,
)
from mizzen_operator.status.pending_volumes import claim_refs, describe_volume_wait, explain_claim

WAITING_SECONDS = 5.0
"""Time for which a pod may lack containers before the operator looks for the cause."""


async def explain_waiting_pods(kube: KubeClient, context: ReconcileContext) -> None:
    """Set the fields of `context` that say what waiting pods wait for.

    An object that cannot be read is ignored, because only messages depend on it.
    """
    context.missing_refs = await _find_missing_refs(kube, context)
    context.volume_wait = await _explain_volume_wait(kube, context)


async def _find_missing_refs(kube: KubeClient, context: ReconcileContext) -> tuple[RequiredRef, ...]:
    """Return the missing objects that waiting pods need."""
    service, shared = context.service, context.gateway.shared if context.gateway is not None else None
    gateway = shared.sharing.oldest.gateway if shared is not None else service.gateway
    refs: list[RequiredRef] = []
    if any(pod.creating_containers and pod.age >= WAITING_SECONDS for pod in context.observed.gateways):
        refs += gateway_refs(gateway)
    if any(group.creating_containers for group in _waiting_groups(context)):
        refs += engine_refs(service)
    if _waits_for_fetch_pod(context):
        refs += fetch_refs(service)
    # the operator may read only its own ConfigMaps
    checked = [ref for ref in refs if ref.kind != CONFIG_MAP]
    exist = await asyncio.gather(
        *(kube.exists(ObjectRef(ref.kind, service.namespace, ref.name)) for ref in checked),
        return_exceptions=True,
    )
    return tuple(ref for ref, exists in zip(checked, exist, strict=True) if exists is False)


async def _explain_volume_wait(kube: KubeClient, context: ReconcileContext) -> str:
    """Return why pods wait for their volumes; empty if none does. Also extend the download's message."""
    service, waiting, download = context.service, _waiting_groups(context), context.download
    fetching = _waits_for_fetch_pod(context)
    if not (waiting or fetching):
        return ""
    refs, namespace = claim_refs(service), service.namespace
    claims = await asyncio.gather(
        *(kube.get(ObjectRef(CLAIM, namespace, ref.name)) for ref in refs), return_exceptions=True
    )
    mounting = any(group.mounting_volumes for group in waiting)
    causes = {
        ref: cause
        for ref, claim in zip(refs, claims, strict=True)
        if isinstance(claim, dict) and (cause := explain_claim(service, ref, claim, mounting=mounting))
    }
    cached = [cause for ref, cause in causes.items() if ref.name == service.access.cache.claim]
    if fetching and cached and download is not None:
        context.download = replace(download, waiting_for=f"{download.waiting_for}; {cached[0]}")
    return describe_volume_wait(service, waiting, list(causes.values()))


def _waiting_groups(context: ReconcileContext) -> list[Group]:
    """Return the live groups of the spec's revision whose pods have lacked containers for some time."""
    return [
        group
        for group in context.groups
        if group.live
        and group.revision == context.revision
        and (group.creating_containers or not group.node)
        and group.age >= WAITING_SECONDS
    ]


def _waits_for_fetch_pod(context: ReconcileContext) -> bool:
    """Return whether the download has not begun, perhaps because the pod that fetches the model waits."""
    download = context.download
    return download is not None and bool(download.waiting_for) and not download.total_bytes
