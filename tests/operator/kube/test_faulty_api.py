# SPDX-License-Identifier: Apache-2.0
"""The operator behind a proxy that injects refusals, lost responses, latency and cut watches."""

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
from mizzen_local.addresses import find_free_port
from mizzen_local.controlplane import ControlPlane

PROXY = Path(__file__).parents[2] / "cluster/noloss/api_faults.py"
ENGINES = "mizzen.dev/component=engine"
SHARE = 0.1

pytestmark = CONTROL_PLANE


class Faults:
    """A running fault proxy (tests/cluster/noloss/api_faults.py), and a client of its control API."""

    def __init__(self, plane: ControlPlane) -> None:
        pki, port = plane.folder / "pki", find_free_port(plane.addresses.host)
        self._tls = ssl.create_default_context(cafile=str(plane.authority))
        self.server = f"https://{plane.addresses.host}:{port}"
        options = {"upstream": plane.server, "ca": plane.authority, "host": plane.addresses.host}
        options |= {"cert": pki / "apiserver.crt", "key": pki / "apiserver.key", "port": port}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen([sys.executable, str(PROXY), *words], stdout=subprocess.DEVNULL)

    def share(self, share: float, seed: int = 0) -> dict[str, Any]:
        return self.configure(share=share, seed=seed)

    def refuse(self, method: str, path: str, code: int | str = 409) -> None:
        self.configure(refuse=[{"method": method, "path": path, "code": code}])

    def refused(self) -> bool:
        return not self.configure()["refuse"]

    def configure(self, **settings: Any) -> dict[str, Any]:
        body = json.dumps(settings).encode()
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
    """Run the operator behind the proxy; after the tests, let one without the proxy lead again."""
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


def wait(check: Callable[[], Any], expectation: str) -> None:
    deadline = time.monotonic() + 120
    while not check():
        assert time.monotonic() < deadline, expectation
        time.sleep(0.05)


def settled(api: Any, namespace: str, name: str) -> bool:
    """Return whether a service is Ready with its current spec and has exactly the groups of that spec."""
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
def test_every_rollout_completes(
    api: Any,
    node: Any,
    operators: Any,
    faults: Faults,
    namespace: str,
    minimal: Callable[..., Any],
    eventually: Any,
    seed: int,
) -> None:
    """During rollouts, no pod is created twice, no service loses its last group, and the leader stays."""
    faults.share(SHARE, seed)
    leader, before = operators.leader(), operators.log()
    names = ("first", "second", "third")
    for name in names:
        body = minimal(name, engine={"device": "CPU"}, gateway={"replicas": 1}, replicas=2)
        body["metadata"]["namespace"] = namespace
        api.create(body)

    def all_settled() -> bool:
        return all(settled(api, namespace, name) for name in names)

    eventually(all_settled, 120, "all services have settled")
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
        if number == 1:  # the next change comes during this rollout
            continue
        eventually(all_settled, 120, f"change {number} is in force")
    done = faults.share(0.0)
    assert len({"409", "410", "429", "500", "500_after", "closed", "latency"} & done.keys()) >= 4, done
    assert node.lowest[namespace] >= len(names)
    created = [name for name in node.names if name.startswith(f"{namespace}/")]
    assert len(created) == len(set(created))
    assert operators.leader() == leader
    assert not re.search(r"Traceback|unexpected error", operators.log().removeprefix(before))
    for name in names:
        api.delete("InferenceService", namespace, name)


@pytest.fixture
def demo(
    api: Any, node: Any, faults: Faults, namespace: str, minimal: Callable[..., Any]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Create a service; the yielded function changes its spec and waits until the service has settled."""
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
        # The only write of this change: if it were lost, the next reconcile would come after ten minutes.
        ("PATCH", "/inferenceservices/demo/status", {"rollout": {"progressDeadlineSeconds": 601}}),
        ("DELETE", "/pods/demo-", {"replicas": 1}),
        ("POST", "/pods", {"replicas": 3}),
        ("PATCH", "/pods/demo-", {"replicas": 3}),
        ("PATCH", "/deployments/demo-gateway", {"gateway": {"replicas": 2}}),
    ],
    ids=["status", "deletion", "creation", "gate", "deployment"],
)
def test_a_write_that_met_a_conflict_is_repeated(
    demo: Callable[..., None], faults: Faults, method: str, path: str, spec: dict[str, Any]
) -> None:
    faults.refuse(method, path)
    demo(spec)
    assert faults.refused()


def test_a_revision_is_adopted_if_the_response_to_its_creation_was_lost(
    demo: Callable[..., None], faults: Faults, api: Any, namespace: str
) -> None:
    """The operator repeats the request, and finds the object that the first request created."""
    faults.refuse("POST", "/controllerrevisions", "500_after")
    demo({"engine": {"maxRunningRequests": 9}})
    assert faults.refused()
    assert not [event for event in api.list("Event", namespace) if event["reason"] == "NameTaken"]


def test_a_failure_is_counted_even_if_the_reconcile_that_found_it_is_interrupted(
    demo: Callable[..., None], api: Any, node: Any, faults: Faults, namespace: str
) -> None:
    """The interrupted reconcile has deleted the failed pods, so the next one cannot see the failure."""
    spec = {"parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}}
    api.patch("InferenceService", namespace, "demo", {"spec": spec})

    def status() -> dict[str, Any]:
        return api.get("InferenceService", namespace, "demo")["status"]

    def pairs() -> bool:
        names = {pod["metadata"]["name"] for pod in api.list("Pod", namespace, ENGINES)}
        current = status()
        serving = {group["name"] for group in current["groups"] if len(group.get("pods", ())) == 2}
        return current["availableReplicas"] == 2 == len(serving & names) and len(names) == 4

    wait(pairs, "two groups of two pods serve")
    lost = next(pod for pod in api.list("Pod", namespace, ENGINES) if pod["spec"].get("readinessGates"))
    faults.refuse("POST", "/pods")  # a pod of the replacement, after the deletion of the group
    node.behaviour.failed.add(lost["metadata"]["uid"])
    wait(faults.refused, "a pod of the new group was refused")
    wait(lambda: pairs() and lost["metadata"]["name"] not in str(status()["groups"]), "the group is replaced")
    failures = status().get("recentFailures", [])
    assert [failure["name"] for failure in failures] == [lost["metadata"]["name"]]


def test_a_leader_stays_leader_after_a_conflict_on_its_lease(
    api: Any, operators: Any, faults: Faults
) -> None:
    leader = operators.leader()
    faults.refuse("PUT", "/leases/")
    wait(faults.refused, "a renewal of the Lease is refused")
    renewed = api.get("Lease", "mizzen-system", "mizzen-operator")["spec"]["renewTime"]

    def again() -> bool:
        return api.get("Lease", "mizzen-system", "mizzen-operator")["spec"]["renewTime"] != renewed

    wait(again, "the Lease is renewed")
    assert operators.leader() == leader
    assert operators.leads()
