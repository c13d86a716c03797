# SPDX-License-Identifier: Apache-2.0
"""Functions that wait for objects of the cluster: the node, the operator, an InferenceService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from mizzen_local.api import ApiClient, ApiError
from mizzen_local.controlplane import NODE

POLL_SECONDS = 0.05


async def _get_or_empty(api: ApiClient, path: str) -> dict[str, Any]:
    """Return an object; empty if it does not exist."""
    try:
        return await api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return {}


def find_condition(item: dict[str, Any], condition_type: str) -> dict[str, Any]:
    """Return an object's condition of the given type; empty if it has no such condition."""
    conditions = item.get("status", {}).get("conditions", ())
    return next((entry for entry in conditions if entry["type"] == condition_type), {})


async def wait_node_ready(kubeconfig: Path, seconds: float) -> None:
    """Wait until the node is ready and pods can be created in the default namespace.

    Raises:
        TimeoutError: `seconds` have passed.
    """
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    async with asyncio.timeout(seconds), ApiClient(kubeconfig) as api:
        while True:
            node = await _get_or_empty(api, f"/api/v1/nodes/{NODE}")
            if find_condition(node, "Ready").get("status") == "True" and await _get_or_empty(api, account):
                return
            await asyncio.sleep(POLL_SECONDS)


async def wait_operator_leads(kubeconfig: Path, namespace: str, name: str, seconds: float) -> None:
    """Wait until the operator's Deployment is available and its Lease has a holder.

    Args:
        kubeconfig: path of the administrator's kubeconfig.
        namespace: namespace of the operator.
        name: name of both the Deployment and the Lease.
        seconds: maximum duration.

    Raises:
        TimeoutError: `seconds` have passed.
    """
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
    async with asyncio.timeout(seconds), ApiClient(kubeconfig) as api:
        while True:
            available = (await _get_or_empty(api, deployment)).get("status", {}).get("availableReplicas", 0)
            if available and (await _get_or_empty(api, lease)).get("spec", {}).get("holderIdentity"):
                return
            await asyncio.sleep(POLL_SECONDS)


async def watch_service(
    kubeconfig: Path, namespace: str, name: str, seconds: float
) -> AsyncIterator[dict[str, Any]]:
    """Yield an InferenceService as it is now, and again after each change.

    Raises:
        TimeoutError: `seconds` have passed since the start.
    """
    path = f"/apis/mizzen.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    async with ApiClient(kubeconfig) as api:
        changes = api.watch(path, {"fieldSelector": f"metadata.name={name}"})
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            async with asyncio.timeout_at(deadline):
                change, item = await anext(changes)
            if change not in ("DELETED", "SYNCED"):
                yield item
