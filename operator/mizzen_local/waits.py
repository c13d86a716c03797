"""Waiting for what the cluster is to become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mizzen_local.api import Api, ApiError
from mizzen_local.controlplane import NODE

PAUSE_SECONDS = 0.05


async def _read(api: Api, path: str) -> dict[str, Any]:
    """An object; empty when it is not there."""
    try:
        return await api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return {}


def condition(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of an object; empty when it has none of that type."""
    found = item.get("status", {}).get("conditions", ())
    return next((entry for entry in found if entry["type"] == kind), {})


async def node_ready(kubeconfig: Path, seconds: float) -> None:
    """Wait until the node is ready and pods may be created in the default namespace.

    Raises:
        TimeoutError: they were not, within `seconds`.
    """
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    async with asyncio.timeout(seconds), Api(kubeconfig) as api:
        while True:
            node = await _read(api, f"/api/v1/nodes/{NODE}")
            if condition(node, "Ready").get("status") == "True" and await _read(api, account):
                return
            await asyncio.sleep(PAUSE_SECONDS)


async def operator_leads(kubeconfig: Path, namespace: str, name: str, seconds: float) -> None:
    """Wait until the operator's Deployment is available and its Lease has a holder.

    Raises:
        TimeoutError: it was not, within `seconds`.
    """
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
    async with asyncio.timeout(seconds), Api(kubeconfig) as api:
        while True:
            available = (await _read(api, deployment)).get("status", {}).get("availableReplicas", 0)
            if available and (await _read(api, lease)).get("spec", {}).get("holderIdentity"):
                return
            await asyncio.sleep(PAUSE_SECONDS)


async def service_states(
    kubeconfig: Path, namespace: str, name: str, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield an InferenceService whenever it changes.

    Raises:
        TimeoutError: `seconds` are over.
    """
    path = f"/apis/mizzen.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    async with Api(kubeconfig) as api:
        changes = api.watch(path, {"fieldSelector": f"metadata.name={name}"})
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            async with asyncio.timeout_at(deadline):
                change, item = await anext(changes)
            if change not in ("DELETED", "SYNCED"):
                yield item
