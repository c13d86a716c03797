"""The operator behind an API server that refuses, forgets to answer, is slow, and cuts watches."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_local.addresses import free_port
from mizzen_local.controlplane import ControlPlane

PROXY = Path(__file__).parents[2] / "cluster/noloss/api_faults.py"
ENGINES = "mizzen.dev/component=engine"
SHARE = 0.1

pytestmark = CONTROL_PLANE


class Faults:
    """The fault proxy."""

    def __init__(self, plane: ControlPlane) -> None:
        pki, port = plane.folder / "pki", free_port(plane.addresses.host)
        self._tls = ssl.create_default_context(cafile=str(plane.authority))
        self.server = f"https://{plane.addresses.host}:{port}"
        options = {"upstream": plane.server, "ca": plane.authority, "host": plane.addresses.host}
        options |= {"cert": pki / "apiserver.crt", "key": pki / "apiserver.key", "port": port}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen([sys.executable, str(PROXY), *words], stdout=subprocess.DEVNULL)

    def share(self, share: float, seed: int = 0) -> dict[str, Any]:
        return self.told(share=share, seed=seed)

    def refuse(self, method: str, path: str, code: int | str = 409) -> None:
        self.told(refuse=[{"method": method, "path": path, "code": code}])

    def refused(self) -> bool:
        return not self.told()["refuse"]

    def told(self, **given: Any) -> dict[str, Any]:
        body = json.dumps(given).encode()
        request = urllib.request.Request(f"{self.server}/-/faults", body, method="PUT")
        with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
            return json.loads(answer.read())

    def up(self) -> bool:
        try:
            self.share(0.0)
        except OSError:
            assert self.process.poll() is None
            return False
        return True


@pytest.fixture(scope="module")
def faults(control_plane: ControlPlane, operators: Any) -> Iterator[Faults]:
    """The one operator reaches the API server through the proxy; afterwards another one leads."""
    proxy = Faults(control_plane)
    wait(proxy.up, "the proxy answers")
    wait(operators.leads, "an operator leads")
    operators.kill(operators.leader(), signal.SIGTERM)
    behind = operators.start(server=proxy.server)
    wait(operators.leads, "the operator behind the proxy leads")
    yield proxy
    proxy.share(0.0)
    operators.kill(behind, signal.SIGTERM)
    operators.start()
    wait(operators.leads, "an operator leads again")
    proxy.process.terminate()
    proxy.process.wait(60)


def wait(check: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def settled(api: Any, namespace: str, name: str) -> bool:
    """Whether a service is Ready as its spec is now, with no group too many."""
    body = api.get("InferenceService", namespace, name)
    status, groups = body.get("status", {}), body["spec"]["replicas"]
    pods = [
        pod
        for pod in api.list("Pod", namespace, ENGINES)
        if pod["metadata"]["labels"]["mizzen.dev/service"] == name
    ]
    ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
    return (
        ready.get("status") == "True"
        and status["observedGeneration"] == body["metadata"]["generation"]
        and status["availableReplicas"] == groups
        and [pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in pods]
        == [status["updateRevision"]] * groups
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_every_rollout_comes_to_its_end(
    api: Any,
    node: Any,
    operators: Any,
    faults: Faults,
    namespace: str,
    minimal: Callable[..., Any],
    eventually: Any,
    seed: int,
) -> None:
    """And on its way: no pod is made twice, the last group is never taken away, nobody else leads."""
    faults.share(SHARE, seed)
    leader, before = operators.leader(), operators.log()
    names = ("first", "second", "third")
    for name in names:
        body = minimal(name, engine={"device": "CPU"}, gateway={"replicas": 1}, replicas=2)
        body["metadata"]["namespace"] = namespace
        api.create(body)

    def all_settled() -> bool:
        return all(settled(api, namespace, name) for name in names)

    eventually(all_settled, 120, "all are up")
    node.reset_lowest(namespace)
    for number, changes in enumerate(
        (
            {"engine": {"maxRunningRequests": 7}},
            {"engine": {"maxRunningRequests": 8}, "replicas": 3},
            {"engine": {"maxRunningRequests": 7}, "replicas": 1},
        )
    ):
        for name in names:
            api.patch("InferenceService", namespace, name, {"spec": changes})
        if number == 1:  # changed again, in the middle
            continue
        eventually(all_settled, 120, f"change {number} is in force")
    done = faults.share(0.0)
    assert len({"409", "410", "429", "500", "500_after", "closed", "latency"} & done.keys()) >= 4, done
    assert node.lowest[namespace] >= len(names)
    made = [name for name in node.names if name.startswith(f"{namespace}/")]
    assert len(made) == len(set(made))
    assert operators.leader() == leader
    assert not re.search(r"Traceback|unexpected error", operators.log().removeprefix(before))
    for name in names:
        api.delete("InferenceService", namespace, name)


@pytest.fixture
def demo(
    api: Any, node: Any, faults: Faults, namespace: str, minimal: Callable[..., Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A service; called with changes of its spec, it makes them and waits until they are in force."""
    body = minimal("demo", engine={"device": "CPU"}, gateway={"replicas": 1}, replicas=2)
    body["metadata"]["namespace"] = namespace
    api.create(body)

    def change(spec: dict[str, Any]) -> None:
        if spec:
            api.patch("InferenceService", namespace, "demo", {"spec": spec})
        wait(lambda: settled(api, namespace, "demo"), f"{spec} is in force")

    change({})
    yield change
    api.delete("InferenceService", namespace, "demo")


@pytest.mark.parametrize(
    ("method", "path", "spec"),
    [
        # The only write that this change makes: were it lost, nothing would tell of it for ten minutes.
        ("PATCH", "/inferenceservices/demo/status", {"rollout": {"progressDeadlineSeconds": 601}}),
        ("DELETE", "/pods/demo-", {"replicas": 1}),
        ("POST", "/pods", {"replicas": 3}),
        ("PATCH", "/pods/demo-", {"replicas": 3}),
        ("PATCH", "/deployments/demo-gateway", {"gateway": {"replicas": 2}}),
    ],
    ids=["status", "deletion", "creation", "gate", "deployment"],
)
def test_what_met_a_conflict_is_done_again(
    demo: Callable[..., None], faults: Faults, method: str, path: str, spec: dict[str, Any]
) -> None:
    faults.refuse(method, path)
    demo(spec)
    assert faults.refused()


def test_a_revision_whose_answer_was_lost_is_the_services_own(
    demo: Callable[..., None], faults: Faults, api: Any, namespace: str
) -> None:
    """The request is sent again, and meets what it has made."""
    faults.refuse("POST", "/controllerrevisions", "500_after")
    demo({"engine": {"maxRunningRequests": 9}})
    assert faults.refused()
    assert not [one for one in api.list("Event", namespace) if one["reason"] == "NameTaken"]


def test_a_failure_is_counted_also_where_the_look_ends_in_its_middle(
    demo: Callable[..., None], api: Any, node: Any, faults: Faults, namespace: str
) -> None:
    """The pods that show it are deleted in that look, and the next one sees but their end."""
    spec = {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}
    api.patch("InferenceService", namespace, "demo", {"spec": spec})

    def status() -> dict[str, Any]:
        return api.get("InferenceService", namespace, "demo")["status"]

    def pairs() -> bool:
        names = {pod["metadata"]["name"] for pod in api.list("Pod", namespace, ENGINES)}
        there = status()
        serving = {group["name"] for group in there["groups"] if len(group.get("pods", ())) == 2}
        return there["availableReplicas"] == 2 == len(serving & names) and len(names) == 4

    wait(pairs, "two groups of two pods serve")
    lost = next(pod for pod in api.list("Pod", namespace, ENGINES) if pod["spec"].get("readinessGates"))
    faults.refuse("POST", "/pods")  # of the group's replacement, once the group was deleted
    node.behaviour.failed.add(lost["metadata"]["uid"])
    wait(faults.refused, "a pod of the new group was refused")
    wait(lambda: pairs() and lost["metadata"]["name"] not in str(status()["groups"]), "the group is replaced")
    assert [one["name"] for one in status().get("recentFailures", [])] == [lost["metadata"]["name"]]


def test_a_conflict_on_its_lease_costs_no_leadership(api: Any, operators: Any, faults: Faults) -> None:
    leader = operators.leader()
    faults.refuse("PUT", "/leases/")
    wait(faults.refused, "the Lease was to be renewed")
    renewed = api.get("Lease", "mizzen-system", "mizzen-operator")["spec"]["renewTime"]

    def again() -> bool:
        return api.get("Lease", "mizzen-system", "mizzen-operator")["spec"]["renewTime"] != renewed

    wait(again, "the Lease is renewed")
    assert operators.leader() == leader
    assert operators.leads()
