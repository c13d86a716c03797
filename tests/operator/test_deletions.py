# SPDX-License-Identifier: Apache-2.0
"""Pods that another client, such as a kubelet or the garbage collector, deletes concurrently."""

from __future__ import annotations

import asyncio
from typing import Any

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from marks import CONTROL_PLANE
from mizzen_local.controlplane import ControlPlane
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore
from mizzen_operator.metrics import Metrics

pytestmark = CONTROL_PLANE

RACES = 200
"""Number of concurrent deletions; about half of the responses have no resourceVersion."""
CONTAINER = {
    "name": "engine",
    "image": "none",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


async def test_a_concurrently_deleted_pod_is_gone_for_all_clients(
    control_plane: ControlPlane, api: Any, namespace: str
) -> None:
    """The response to such a deletion may be the pod in its former state, without a resourceVersion."""
    configuration = Configuration()
    await load_kube_config(str(control_plane.kubeconfig), client_configuration=configuration)
    cache = ObjectStore("Pod", lambda kind, name, labels: None)
    cache.apply_list({}, 0)
    ours = KubeClient(configuration, Metrics(), stores=lambda kind: cache)
    others = [KubeClient(configuration, Metrics()) for _ in range(2)]
    for race in range(RACES):
        ref = ObjectRef("Pod", namespace, f"pod-{race}")
        spec = {"containers": [CONTAINER], "securityContext": SECURITY}
        meta = {"name": ref.name, "namespace": namespace}
        pod = api.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        cache.put_event(pod)
        deleting = [client.delete(ref, pod["metadata"]["uid"]) for client in (ours, *others)]
        assert any(await asyncio.gather(*deleting))
        assert await ours.get(ref, live=True) is None
        held = cache.get(ObjectName(namespace, ref.name))
        assert held is None or "deletionTimestamp" in held["metadata"]
    for client in (ours, *others):
        await client.close()
