# SPDX-License-Identifier: Apache-2.0
"""A group of two pods: its ranks find each other by the cluster's DNS, and it is replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat import answers
from network import Network
from product import CLIENT, TENANT, Product

from cluster import Timeline, apply, kubectl, wait_until

NAME = "pair"
RANKS_PORT = 5560


@pytest.fixture(scope="module", autouse=True)
def pair(product: Product) -> Iterator[None]:
    """Apply a service with one group of two pods, each with one rank of the demo model."""
    spec = product.service()["spec"]
    changed = {
        "replicas": 1,
        "gateway": {"replicas": 1},
        "parallelism": {"tensor": 2},
        "accelerator": {"perPod": 1},
        "engine": {**spec["engine"], "extraArgs": ["--threads", "1"]},
        "networkPolicy": "Enabled",
    }
    apply(product.service(NAME, **changed))
    yield
    kubectl("delete", "infsvc", NAME, "-n", TENANT, "--wait=true", "--timeout=60s")


def ranks(product: Product) -> dict[str, str]:
    """Return the uids of the group's pods by rank."""
    pods = product.pods("engine", NAME)
    return {pod["metadata"]["labels"]["mizzen.dev/rank"]: pod["metadata"]["uid"] for pod in pods}


def test_two_pods_serve_as_one_group(product: Product, timeline: Timeline) -> None:
    seconds = wait_until(lambda: product.settled(1, NAME, pods=2), "a group of two pods serves")
    timeline.add("kubectl apply of a group of two pods to Ready", seconds)
    assert set(ranks(product)) == {"0", "1"}
    assert answers(product, NAME)


def test_only_pods_of_the_group_reach_its_ranks(product: Product) -> None:
    network, [first, second] = Network(product.reader), product.pods("engine", NAME)
    [client] = product.reader.pods(TENANT, f"app={CLIENT}")
    assert network.allows(first, second, RANKS_PORT) and network.allows(second, first, RANKS_PORT)
    assert not network.allows(client, first, RANKS_PORT)
    assert first["status"]["podIP"] != second["status"]["podIP"]


def test_if_one_pod_is_deleted_its_whole_group_is_replaced(product: Product, timeline: Timeline) -> None:
    before = ranks(product)
    [worker] = [pod for pod in product.pods("engine", NAME) if pod["metadata"]["uid"] == before["1"]]

    def replaced() -> bool:
        return product.settled(1, NAME, pods=2) and not set(before.values()) & set(ranks(product).values())

    kubectl("delete", "pod", worker["metadata"]["name"], "-n", TENANT, "--wait=false")
    seconds = wait_until(replaced, "a new group of two pods serves")
    timeline.add("a deleted pod of a group of two to the next group Ready", seconds)
    assert set(ranks(product)) == set(before)
    assert answers(product, NAME)
