# SPDX-License-Identifier: Apache-2.0
"""A node on which a service has lost its GPU twice is avoided; API server, scheduler and operator are real.

The nodes with GPUs are only objects: the test plays the kubelet of their pods.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_node_kit import Space, condition, eventually, pod_url
from prometheus_client.parser import text_string_to_metric_families

from mizzen_local.kubectl import KubectlError
from mizzen_operator.api.labels import DEVICE_LOST_CODE

ROOT = Path(__file__).parents[2]
POOL = {"mizzen.dev/test-pool": "avoided"}
SELECTOR = "mizzen.dev/component=engine"
RENEW_SECONDS = 10.0

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def gpu_node(cluster: Any, name: str) -> Iterator[None]:
    """Create a node with one GPU, and keep it ready; remove it and its pods afterwards."""
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
    resources = {"cpu": "8", "memory": "64Gi", "pods": "10", "nvidia.com/gpu": "1"}
    stop = threading.Event()

    def renew() -> None:
        while True:
            condition = {**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}
            status = {"capacity": resources, "allocatable": resources, "conditions": [condition]}
            with suppress(KubectlError):
                patch = ["--type=merge", "-p", json.dumps({"status": status})]
                cluster.kubectl("patch", "node", name, "--subresource=status", *patch)
            if stop.wait(RENEW_SECONDS):
                return

    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": POOL}})
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        cluster.kubectl("delete", "node", name)


def newest_pod(space: Space, seen: set[str]) -> dict[str, Any] | None:
    """Return an engine pod that is not in `seen`."""
    pods = space.get("pods", "-l", SELECTOR)["items"]
    return next((pod for pod in pods if pod["metadata"]["name"] not in seen), None)


def lose_gpu(space: Space, name: str) -> None:
    """Report that an engine has ended because its GPU is lost; remove the pod once it is deleted."""
    message = "device_lost: rank 0 failed: CUDA error: unspecified launch failure"
    ended = {"exitCode": DEVICE_LOST_CODE, "reason": "Error", "message": message}
    container = {"name": "engine", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
    status = {
        "phase": "Running",
        "containerStatuses": [{**container, "state": {"terminated": {**ended, "startedAt": now()}}}],
    }
    patch = ["--type=merge", "-p", json.dumps({"status": status})]
    space.kubectl("patch", "pod", name, "--subresource=status", *patch)
    eventually(lambda: "deletionTimestamp" in space.pod(name)["metadata"])
    space.kubectl("delete", "pod", name, "--grace-period=0", "--force")


def avoided_nodes(cluster: Any, namespace: str) -> float:
    """Return the operator's metric for the services of a namespace."""
    selector = "app.kubernetes.io/component=operator"
    [pod] = cluster.get("pods", "-n", "mizzen-system", "-l", selector)["items"]
    with urllib.request.urlopen(f"{pod_url(pod)}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = next(family for family in families if family.name == "mizzen_operator_avoided_nodes")
    return sum(sample.value for sample in found.samples if sample.labels["namespace"] == namespace)


def scheduled(space: Space) -> dict[str, Any]:
    return condition(space.get("infsvc", "demo"), "Scheduled")


def test_a_node_that_lost_two_gpus_gets_no_third_group(cluster: Any, space: Space) -> None:
    body = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    body["spec"]["engine"]["device"] = "CUDA"
    body["spec"]["accelerator"] = {"nodeSelector": POOL}
    seen: set[str] = set()
    with gpu_node(cluster, "broken"):
        space.kubectl("apply", "-f", "-", stdin=json.dumps(body))
        for _ in range(2):
            pod = eventually(lambda: newest_pod(space, seen))
            name = pod["metadata"]["name"]
            eventually(lambda name=name: space.pod(name)["spec"].get("nodeName") == "broken")
            lose_gpu(space, name)
            seen.add(name)
        third = eventually(lambda: newest_pod(space, seen))
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        [term] = third["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
        assert {"key": "metadata.name", "operator": "NotIn", "values": ["broken"]} in term["matchFields"]
        eventually(lambda: scheduled(space).get("reason") == "Unschedulable")
        assert "new groups are not placed on broken" in scheduled(space)["message"]
        assert space.get("infsvc", "demo")["status"]["avoidedNodes"] == ["broken"]
        [event] = eventually(lambda: space.events("NodeAvoided"))
        assert "engines lost their GPU on node broken 2 times" in event["message"]
        eventually(lambda: avoided_nodes(cluster, space.name) == 1)
        with gpu_node(cluster, "sound"):
            eventually(lambda: space.pod(third["metadata"]["name"])["spec"].get("nodeName") == "sound")
            space.kubectl("delete", "infsvc", "demo", "--wait=false")
            space.kubectl("delete", "pods", "-l", SELECTOR, "--grace-period=0", "--force")
