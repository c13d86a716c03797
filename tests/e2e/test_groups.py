"""A group of two pods: its ranks find one another by the cluster's DNS, and it comes and goes as one."""

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
    """A service of one group of two pods, each with one rank of the demo model."""
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
    """The pods of the group: the uid of each by its rank."""
    pods = product.pods("engine", NAME)
    return {pod["metadata"]["labels"]["mizzen.dev/rank"]: pod["metadata"]["uid"] for pod in pods}


def test_two_pods_serve_as_one_group(product: Product, timeline: Timeline) -> None:
    seconds = wait_until(lambda: product.settled(1, NAME, pods=2), "a group of two pods serves")
    timeline.add("kubectl apply of a group of two pods to Ready", seconds)
    assert set(ranks(product)) == {"0", "1"}
    assert answers(product, NAME)


def test_its_ranks_reach_one_another_and_nobody_else_does(product: Product) -> None:
    network, [one, other] = Network(product.reader), product.pods("engine", NAME)
    [client] = product.reader.pods(TENANT, f"app={CLIENT}")
    assert network.allows(one, other, RANKS_PORT) and network.allows(other, one, RANKS_PORT)
    assert not network.allows(client, one, RANKS_PORT)
    assert one["status"]["podIP"] != other["status"]["podIP"]


def test_a_deleted_pod_has_its_whole_group_replaced(product: Product, timeline: Timeline) -> None:
    before = ranks(product)
    [worker] = [pod for pod in product.pods("engine", NAME) if pod["metadata"]["uid"] == before["1"]]

    def replaced() -> bool:
        return product.settled(1, NAME, pods=2) and not set(before.values()) & set(ranks(product).values())

    kubectl("delete", "pod", worker["metadata"]["name"], "-n", TENANT, "--wait=false")
    seconds = wait_until(replaced, "a new group of two pods serves")
    timeline.add("a deleted pod of a group of two to the next group Ready", seconds)
    assert set(ranks(product)) == set(before)
    assert answers(product, NAME)
