# SPDX-License-Identifier: Apache-2.0
"""All pods of a multi-pod group start, serve, fail and are deleted together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.pods.group import read_groups

pytestmark = CONTROL_PLANE
ENGINES = "mizzen.dev/component=engine"
SECONDS = 120.0
TWO = {"engine": {"device": "CPU"}, "parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}


class Service:
    """A service with groups of two pods, and queries about it."""

    def __init__(self, api: Any, node: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.node, self.namespace, self.eventually = api, node, namespace, eventually

    def status(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo").get("status", {})

    def pods(self) -> dict[str, dict[str, Any]]:
        return {pod["metadata"]["name"]: pod for pod in self.api.list("Pod", self.namespace, ENGINES)}

    def attempts(self) -> set[tuple[str, str]]:
        """Return the group and attempt of each pod that is not terminating."""
        found = [
            entry["metadata"]
            for entry in self.pods().values()
            if "deletionTimestamp" not in entry["metadata"]
        ]
        return {(m["labels"]["mizzen.dev/group"], m["labels"]["mizzen.dev/incarnation"]) for m in found}

    def ready(self, number: int) -> bool:
        body = self.api.get("InferenceService", self.namespace, "demo")
        status = body.get("status", {})
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        return (
            ready.get("status") == "True"
            and ready["observedGeneration"] == body["metadata"]["generation"]
            and status["availableReplicas"] == status["replicas"] == number
            and len(self.pods()) == 2 * number
        )

    def until(self, check: Callable[[], Any], expectation: str) -> None:
        try:
            self.eventually(check, SECONDS, expectation)
        except AssertionError as error:
            pods = {name: pod.get("status", {}).get("conditions") for name, pod in self.pods().items()}
            raise AssertionError(f"{expectation}: {self.status()} {pods}") from error

    def settle(self, number: int) -> None:
        self.until(lambda: self.ready(number), f"{number} groups of two pods serve")


@pytest.fixture
def service(
    api: Any,
    operators: Any,
    node: Any,
    namespace: str,
    minimal: Callable[..., dict[str, Any]],
    eventually: Callable[..., Any],
) -> Any:
    """Return a function that creates the service; the service is deleted after the test."""
    ranks_service = Service(api, node, namespace, eventually)

    def make(**spec: Any) -> Service:
        body = minimal(**{**TWO, **spec})
        body["metadata"]["namespace"] = namespace
        api.create(body)
        return ranks_service

    yield make
    api.delete("InferenceService", namespace, "demo")


def test_all_pods_of_a_group_start_and_only_the_leader_is_routed_to(
    service: Callable[..., Service],
) -> None:
    demo = service(replicas=1)
    demo.settle(1)
    status, pods = demo.status(), demo.pods()
    leader, worker = sorted(pods)
    assert worker == f"{leader}-1"
    assert status["podsPerGroup"] == 2
    [group] = status["groups"]
    assert group["name"] == leader
    assert [(entry["name"], entry["ready"]) for entry in group["pods"]] == [(leader, True), (worker, True)]
    gates = [pods[name]["spec"].get("readinessGates", []) for name in (leader, worker)]
    assert [len(gate) for gate in gates] == [1, 0]
    ranks_service = demo.api.get("Service", demo.namespace, "demo-ranks")["spec"]
    assert (ranks_service["clusterIP"], ranks_service["publishNotReadyAddresses"]) == ("None", True)
    assert ranks_service["selector"] == {"mizzen.dev/service": "demo", "mizzen.dev/component": "engine"}
    for name, pod in pods.items():
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (name, "demo-ranks")
        assert pod["spec"]["restartPolicy"] == "Never"
    arguments = pods[worker]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--leader-address") + 1] == f"{leader}.demo-ranks.{demo.namespace}.svc"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "how", ["fails", "fails beside a sidecar", "loses its device", "is deleted", "vanishes"]
)
def test_the_loss_of_one_pod_replaces_its_whole_group(
    which: int, how: str, service: Callable[..., Service]
) -> None:
    demo = service(replicas=2)
    if how == "fails beside a sidecar":
        demo.node.behaviour.sidecars.add(demo.namespace)
    demo.settle(2)
    demo.node.reset_lowest(demo.namespace)
    before = demo.pods()
    victim = sorted(
        name for name, pod in before.items() if pod["metadata"]["labels"]["mizzen.dev/group"] == "0"
    )[which]
    if how.startswith("fails"):
        demo.node.behaviour.failed.add(before[victim]["metadata"]["uid"])
    elif how == "loses its device":
        demo.node.behaviour.lost_devices.add(before[victim]["metadata"]["uid"])
    else:
        options = {"gracePeriodSeconds": 0} if how == "vanishes" else {}
        demo.api.delete("Pod", demo.namespace, victim, **options)
    gone = {name for name, pod in before.items() if pod["metadata"]["labels"]["mizzen.dev/group"] == "0"}

    def replaced() -> bool:
        return demo.ready(2) and not gone & set(demo.pods()) and demo.attempts() == {("0", "1"), ("1", "0")}

    demo.until(replaced, "the group is recreated, and no pod of the old one is left")
    assert demo.node.lowest[demo.namespace] >= 1, "the other group served all the time"
    failures = [(entry["group"], entry["name"][-3:]) for entry in demo.status().get("recentFailures", [])]
    assert failures == ([(0, "0-0")] if how.startswith(("fails", "loses")) else [])


def test_a_rollout_replaces_whole_groups_without_an_outage(service: Callable[..., Service]) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    before = set(demo.pods())
    demo.node.reset_lowest(demo.namespace)
    demo.api.patch("InferenceService", demo.namespace, "demo", {"spec": {"engine": {"pageSize": 32}}})
    demo.until(lambda: demo.ready(2) and not before & set(demo.pods()), "two new groups")
    assert demo.node.lowest[demo.namespace] >= 2
    demo.api.patch("InferenceService", demo.namespace, "demo", {"spec": {"accelerator": {"perPod": 2}}})
    demo.until(
        lambda: (
            len(demo.pods()) == demo.status()["availableReplicas"] == 2
            and "podsPerGroup" not in demo.status()
        ),
        "two groups of one pod",
    )


def test_a_group_that_never_starts_counts_one_failure_per_attempt(service: Callable[..., Service]) -> None:
    demo = service(replicas=1, lifecycle={"maxGroupRestarts": 1})
    seen: set[str] = set()

    def fail_all() -> bool:
        for name, pod in demo.pods().items():
            seen.add(name)
            demo.node.behaviour.failed.add(pod["metadata"]["uid"])
        failed = [c for c in demo.status().get("conditions", []) if c["type"] == "Failed"]
        return bool(failed) and failed[0]["reason"] == "RestartBudgetExceeded"

    demo.until(fail_all, "given up")
    assert len({name.split("-")[3] for name in seen}) == 2, "two incarnations of two pods"
    demo.until(lambda: not demo.pods(), "nothing is left of it")


def pod(rank: int, **given: Any) -> dict[str, Any]:
    """Return a ready pod, one of the two pods of group 0; `given` overrides its status and metadata."""
    labels = {"group": "0", "rank": str(rank), "revision": "r", "incarnation": "4", "pods": "2"}
    name = f"demo-r-0-4{f'-{rank}' if rank else ''}"
    conditions = [{"type": "ContainersReady", "status": "True"}]
    if rank == 0:
        conditions.append({"type": "mizzen.dev/routable", "status": "True"})
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {f"mizzen.dev/{key}": value for key, value in labels.items()},
            **given.pop("metadata", {}),
        },
        "spec": {"nodeName": f"node-{rank}", "restartPolicy": "Never"},
        "status": {"phase": "Running", "conditions": conditions, **given},
    }


DELETED = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
ENDED = {"terminated": {"exitCode": 1, "reason": "Error"}}
DEAD = {"phase": "Failed", "containerStatuses": [{"name": "engine", "state": ENDED}]}
RUNNING = {"running": {}}
DEAD_BESIDE_SIDECAR = {
    "containerStatuses": [{"name": "proxy", "state": RUNNING}, {"name": "engine", "state": ENDED}]
}
SIDECAR_ENDED = {
    "containerStatuses": [{"name": "proxy", "state": ENDED}, {"name": "engine", "state": RUNNING}],
    "conditions": [{"type": "ContainersReady", "status": "False"}],
}


@pytest.mark.parametrize(
    ("pods", "live", "ready", "left", "restarts"),
    [
        ([pod(0), pod(1)], True, True, 2, 0),
        ([pod(1), pod(0)], True, True, 2, 0),
        ([pod(0), pod(1, conditions=[])], True, False, 2, 0),
        ([pod(0, conditions=[]), pod(1)], True, False, 2, 0),
        ([pod(0, conditions=[])], True, False, 1, 0),
        ([pod(0)], False, False, 1, 0),
        ([pod(1)], False, False, 1, 0),
        ([pod(0), pod(1, metadata=DELETED)], False, True, 1, 0),
        ([pod(0), pod(1, **DEAD)], False, True, 2, 1),
        ([pod(0, **DEAD), pod(1, **DEAD)], False, True, 2, 1),
        ([pod(0, **DEAD), pod(1, metadata=DELETED, **DEAD)], False, True, 1, 0),
        ([pod(0, **DEAD_BESIDE_SIDECAR), pod(1)], False, True, 2, 1),
        ([pod(0), pod(1, **SIDECAR_ENDED)], False, False, 2, 0),
    ],
)
def test_the_state_of_a_group_follows_from_its_pods(
    pods: list[dict[str, Any]], live: bool, ready: bool, left: int, restarts: int
) -> None:
    [group] = read_groups("demo", pods)
    assert (group.live, group.containers_ready, len(group.remaining_pods), group.restarts) == (
        live,
        ready,
        left,
        restarts,
    )
    assert (group.name, group.index, group.attempt, group.size) == ("demo-r-0-4", 0, 4, 2)
