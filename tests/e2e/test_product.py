# SPDX-License-Identifier: Apache-2.0
"""One installation and its service, in order, from `helm install` to the deletion of the service."""

from __future__ import annotations

import json

import pytest
from changing import change_under_load
from chat import Chat, streams
from nodes import kill_container
from product import (
    CLIENT,
    NAME,
    PYTHON,
    RELEASE,
    ROOT,
    SYSTEM,
    TENANT,
    Product,
    namespace,
)

from cluster import CommandError, Timeline, apply, evict, kubectl, wait_until

LARGEST_BYTES = {"operator": 300_000_000, "gateway": 330_000_000}
"""Limits on the sizes of images without torch; gRPC is 31 MB of the gateway's."""
COMPONENTS = {
    "operator": ("kubernetes", "cryptography"),
    "gateway": ("fastapi", "tokenizers"),
    "engine": ("safetensors", "pyzmq"),
}
PROGRAMS = {
    "operator": ["mizzen-operator"],
    "gateway": ["mizzen", "mizzen gateway"],
    "engine": ["mizzen", "mizzen engine"],
}


def names(pods: list[dict]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def images(pods: list[dict]) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def test_the_namespaces_admit_restricted_pods_only(before: set[str]) -> None:
    assert before
    for name in (SYSTEM, TENANT):
        kubectl("create", "-f", "-", stdin=json.dumps(namespace(name)))
    security = {"privileged": True}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "open", "namespace": TENANT},
        "spec": {"containers": [{"name": "open", "image": "open", "securityContext": security}]},
    }
    with pytest.raises(CommandError, match="violates PodSecurity"):
        kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def test_helm_installs_two_operators(product: Product, timeline: Timeline) -> None:
    with timeline.measure("helm install to two ready operators"):
        product.helm("install", product.tag)
    assert len(product.operators()) == 2


def test_an_applied_service_becomes_ready(product: Product, timeline: Timeline) -> None:
    apply(*product.volume(), *product.client())
    apply(product.service())
    seconds = wait_until(lambda: product.settled(2), "Ready with two groups")
    timeline.add("kubectl apply to Ready with two groups and two gateways", seconds)
    kubectl("wait", "-n", TENANT, f"pod/{CLIENT}", "--for=condition=Ready", "--timeout=120s")


def test_the_gateway_answers_through_its_kubernetes_service(product: Product) -> None:
    with streams(product, Chat(), concurrency=1):
        pass


@pytest.mark.parametrize("component", ["operator", "gateway", "engine"])
def test_an_image_has_its_programs_and_no_compiler_installer_or_writable_folder(
    product: Product, component: str
) -> None:
    pod = (product.operators() if component == "operator" else product.pods(component))[0]
    target = ["-i", "-n", pod["metadata"]["namespace"], pod["metadata"]["name"]]
    script = (ROOT / "tests/e2e/inspect_image.py").read_text()
    image = json.loads(kubectl("exec", *target, "--", PYTHON, "-", *PROGRAMS[component], stdin=script))
    assert (image["uid"], image["gid"]) == (10001, 10001)
    assert not image["tools"]
    assert not image["raised"]
    assert not image["writable"]
    assert all(status == 0 and length > 100 for status, length in image["help"])
    assert image["formats"] == ["CycloneDX"]
    assert image["described"] == ["mizzen"]
    assert set(COMPONENTS[component]) <= set(image["components"])
    print(f"{component}: {image['size'] / 1e6:.0f} MB, {len(image['components'])} components")
    if component != "engine":
        assert "torch" not in image["components"]
        assert image["size"] <= LARGEST_BYTES[component]


def test_scaling_loses_no_stream(product: Product, timeline: Timeline) -> None:
    with streams(product):
        for groups in (3, 2):
            kubectl("scale", "infsvc", NAME, "-n", TENANT, f"--replicas={groups}")
            seconds = wait_until(lambda groups=groups: product.settled(groups), f"{groups} groups")
            timeline.add(f"kubectl scale to {groups} groups", seconds)


def test_a_rolling_change_loses_no_stream(product: Product, timeline: Timeline) -> None:
    old = names(product.pods("engine"))
    patch = json.dumps({"spec": {"engine": {"maxRunningRequests": 48}}})
    with streams(product):
        kubectl("patch", "infsvc", NAME, "-n", TENANT, "--type=merge", "-p", patch)
        seconds = wait_until(
            lambda: product.settled(2) and not old & names(product.pods("engine")),
            "two groups of the new spec",
        )
    timeline.add("a changed spec to two new groups", seconds)


@pytest.mark.parametrize("component", ["engine", "gateway"])
def test_evictions_wait_for_the_budget_and_lose_no_stream(
    product: Product, timeline: Timeline, component: str
) -> None:
    first, second = sorted(names(product.pods(component)))
    with streams(product):
        assert evict(TENANT, first) == 201
        assert evict(TENANT, second) == 429
        seconds = wait_until(
            lambda: product.settled(2) and first not in names(product.pods(component)), "the evicted replaced"
        )
        timeline.add(f"an evicted {component} to Ready again", seconds)
        wait_until(lambda: evict(TENANT, second) == 201, "the budget allows the second eviction")
        wait_until(
            lambda: product.settled(2) and second not in names(product.pods(component)), "the other replaced"
        )


def test_one_operator_at_a_time_may_be_evicted(product: Product, timeline: Timeline) -> None:
    old = names(product.operators())
    first, second = sorted(old)
    assert evict(SYSTEM, first) == 201
    assert evict(SYSTEM, second) == 429
    kubectl("rollout", "status", "-n", SYSTEM, f"deployment/{RELEASE}-operator", "--timeout=120s")
    wait_until(lambda: first not in names(product.operators()), "the evicted operator is gone")


def test_a_killed_engine_loses_no_stream_and_is_restarted(product: Product, timeline: Timeline) -> None:
    victim = product.pods("engine")[0]
    with streams(product):
        product.restarts.provoke(victim)
        kill_container(victim)
        wait_until(lambda: not product.settled(2), "the loss is seen")
        seconds = wait_until(lambda: product.settled(2), "two groups again")
    timeline.add("a killed engine container to Ready again", seconds)
    again = [pod for pod in product.pods("engine") if pod["metadata"]["uid"] == victim["metadata"]["uid"]]
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in again] == [1]


def test_if_the_leader_is_killed_the_other_operator_takes_over(product: Product, timeline: Timeline) -> None:
    leader = product.leader()
    victim = next(pod for pod in product.operators() if pod["metadata"]["name"] == leader)
    with streams(product, concurrency=1):
        # Delete the pod too, as if its node were lost: a restarted container of the same pod would keep
        # leading.
        product.restarts.provoke(victim)
        kill_container(victim)
        kubectl("delete", "pod", leader, "-n", SYSTEM, "--grace-period=0", "--force")
        seconds = wait_until(lambda: product.leader() not in ("", leader), "another leader")
        timeline.add("a killed leader to the next one", seconds)
        kubectl("scale", "infsvc", NAME, "-n", TENANT, "--replicas=1")
        seconds = wait_until(lambda: product.settled(1), "one group, by the new leader")
        timeline.add("kubectl scale to 1 group, by the new leader", seconds)
    kubectl("rollout", "status", "-n", SYSTEM, f"deployment/{RELEASE}-operator", "--timeout=120s")


def test_no_request_of_two_thousand_is_lost_whatever_changes(product: Product, timeline: Timeline) -> None:
    with timeline.measure("2,000 requests under rollouts, scaling, evictions, deletions, kills and a hang"):
        counts, done = change_under_load(product, requests=2000)
    print(f"requests: {json.dumps(counts)}; changes: {json.dumps(done)}")
    assert counts["failed"] == 0, counts
    assert counts["started"] == counts["ok"] >= 2000
    assert product.settled(1)


def test_helm_upgrade_replaces_every_image_and_loses_no_stream(product: Product, timeline: Timeline) -> None:
    def upgraded() -> bool:
        children = images(product.pods("engine")) | images(product.pods("gateway"))
        return product.settled(1) and all(image.endswith(f":{product.next_tag}") for image in children)

    with streams(product):
        with timeline.measure("helm upgrade to two new operators"):
            product.helm("upgrade", product.next_tag)
        seconds = wait_until(upgraded, "every pod runs the new images")
    timeline.add("helm upgrade's end to gateways and engines of the new images", seconds)
    assert images(product.operators()) == {product.image("operator", product.next_tag)}


def test_deleting_the_service_leaves_none_of_its_objects(product: Product, timeline: Timeline) -> None:
    kubectl("delete", "infsvc", NAME, "-n", TENANT, "--wait=true", "--timeout=60s")
    kinds = "pods,deployments,replicasets,services,secrets,configmaps,serviceaccounts,rolebindings,pdb"
    selector = f"mizzen.dev/service={NAME}"
    seconds = wait_until(
        lambda: not kubectl("get", kinds, "-n", TENANT, "-l", selector, "-o", "name"), "no child is left"
    )
    timeline.add("kubectl delete to nothing left", seconds)
