# SPDX-License-Identifier: Apache-2.0
"""The node of a local cluster: probes, hooks, Services, disruption budgets, GPUs and restarts."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from local_node_kit import Space, condition, container, eventually, pod_spec

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("cluster-node"),
]


SERVE = """
import http.server, os, signal, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/slow":
            time.sleep(1.5)
        body = os.environ["HOSTNAME"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler)
server.daemon_threads = False
def stop():
    time.sleep(1.0)  # for connections that were on their way before the pod was known to terminate
    server.shutdown()
def end(*_):
    threading.Thread(target=stop).start()
signal.signal(signal.SIGTERM, end)
server.serve_forever()
server.server_close()
"""


POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def processes(mark: str) -> list[int]:
    """Return the pids of running processes whose command line contains `mark`."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if mark.encode() in words and int(entry.name) != os.getpid():
            pids.append(int(entry.name))
    return pids


def test_a_failed_liveness_probe_restarts_the_container(space: Space) -> None:
    probe = {"exec": {"command": ["sh", "-c", "exit 1"]}, "periodSeconds": 1, "failureThreshold": 2}
    space.run("unwell", "import time; time.sleep(60)", {"livenessProbe": probe}, restartPolicy="Always")
    eventually(lambda: container(space.pod("unwell"))["restartCount"] >= 1)
    assert container(space.pod("unwell"))["lastState"]["terminated"]["exitCode"] == 143
    assert any("Liveness probe failed" in item["message"] for item in space.events("Unhealthy"))


def test_a_pod_that_ignores_sigterm_is_killed_with_all_its_children(space: Space) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "{mark}"], start_new_session=True)
print("started", flush=True)
time.sleep(100)
"""
    space.run("stubborn", code, terminationGracePeriodSeconds=1)
    eventually(lambda: "started" in space.cluster.logs("stubborn"))
    assert len(processes(mark)) == 2
    began = time.monotonic()
    space.kubectl("delete", "pod", "stubborn", "--timeout=60s")
    assert 1.0 <= time.monotonic() - began < 90, "the process would end by itself after 100 s"
    assert processes(mark) == []


def test_hooks_run_after_the_start_and_before_the_end_of_a_container(space: Space, tmp_path: Path) -> None:
    note = tmp_path / "notes"
    code = f"""
import signal, sys, time
def say(text):
    with open({str(note)!r}, "a") as file:
        file.write(text + "\\n")
def end(*_):
    say("SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("started")
time.sleep(60)
"""
    after = f"until grep -q started {note}; do sleep 0.05; done; echo postStart >> {note}"
    hooks = {
        "postStart": {"exec": {"command": ["sh", "-c", after]}},
        "preStop": {"exec": {"command": ["sh", "-c", f"echo preStop >> {note}; sleep 0.5"]}},
    }
    space.run("hooks", code, {"lifecycle": hooks})
    eventually(lambda: note.exists() and "postStart" in note.read_text())
    space.kubectl("delete", "pod", "hooks", "--timeout=60s")
    assert note.read_text().split() == ["started", "postStart", "preStop", "SIGTERM"]


def test_a_sidecar_starts_first_and_ends_last(space: Space, tmp_path: Path) -> None:
    note = tmp_path / "notes"
    say = f"echo %s >> {note}"
    loop = f"trap '{say % 'sidecar-ends'}; exit 0' TERM; {say % 'sidecar'}; while :; do sleep 0.05; done"
    sidecar = {
        "name": "sidecar",
        "image": "any",
        "restartPolicy": "Always",
        "command": ["sh", "-c", loop],
        "startupProbe": {"exec": {"command": ["test", "-e", str(note)]}},
    }
    main = {"command": ["sh", "-c", f"{say % 'main'}; sleep 0.3"]}
    space.run("helped", "", main, initContainers=[sidecar])
    space.wait("pod/helped", "jsonpath={.status.phase}=Succeeded")
    eventually(lambda: note.read_text().split() == ["sidecar", "main", "sidecar-ends"])


def test_jobs_run_to_completion(space: Space) -> None:
    template = {"spec": pod_spec("print('done')")}
    space.create("Job", "once", "batch/v1", spec={"template": template, "completions": 2, "parallelism": 2})
    space.wait("job/once", "condition=Complete")
    assert space.get("job", "once")["status"]["succeeded"] == 2


def test_readiness_follows_the_probe_and_the_readiness_gates(space: Space, tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "periodSeconds": 1, "failureThreshold": 1}
    gate = {"conditionType": "mizzen.dev/routable"}
    space.run("gated", "import time; time.sleep(60)", {"readinessProbe": probe}, readinessGates=[gate])
    eventually(lambda: space.pod("gated")["status"]["phase"] == "Running")
    pod = space.pod("gated")
    assert condition(pod, "ContainersReady")["reason"] == "ContainersNotReady"
    assert "[main]" in condition(pod, "Ready")["message"]
    flag.touch()
    space.wait("pod/gated", "condition=ContainersReady")
    pod = space.pod("gated")
    assert (condition(pod, "Ready")["status"], condition(pod, "Ready")["reason"]) == (
        "False",
        "ReadinessGatesNotReady",
    )
    open_gate = {"status": {"conditions": [{"type": "mizzen.dev/routable", "status": "True"}]}}
    patch = ["patch", "pod", "gated", "--subresource=status", "-p", json.dumps(open_gate)]
    space.kubectl(*patch)
    space.wait("pod/gated", "condition=Ready")
    assert condition(space.pod("gated"), "mizzen.dev/routable")["status"] == "True"
    flag.unlink()
    space.wait("pod/gated", "condition=Ready=false")


def test_readiness_waits_for_the_startup_probe(space: Space, tmp_path: Path) -> None:
    begun, ok = tmp_path / "begun", {"exec": {"command": ["true"]}}
    probes = {
        "startupProbe": {"exec": {"command": ["test", "-e", str(begun)]}, "periodSeconds": 600},
        "readinessProbe": ok,
        "livenessProbe": {"exec": {"command": ["test", "-e", str(begun)]}, "failureThreshold": 1},
    }
    space.run("slow-start", "import time; time.sleep(60)", probes)
    eventually(lambda: space.pod("slow-start")["status"]["phase"] == "Running")
    time.sleep(0.5)
    status = container(space.pod("slow-start"))
    assert (status["started"], status["ready"], status["restartCount"]) == (False, False, 0)
    begun.touch()
    space.wait("pod/slow-start", "condition=Ready")  # long before the end of the probe's period


def test_a_pod_is_ready_once_its_tcp_probe_connects(space: Space) -> None:
    code = """
import os, socket, time
time.sleep(0.5)
server = socket.create_server((os.environ["POD_IP"], 7000))
while True:
    server.accept()[0].close()
"""
    port = {"ports": [{"name": "raw", "containerPort": 7000}], "env": [POD_IP]}
    space.run("tcp", code, {**port, "readinessProbe": {"tcpSocket": {"port": "raw"}, "periodSeconds": 1}})
    space.wait("pod/tcp", "condition=Ready")


@pytest.fixture
def web(space: Space) -> Callable[..., str]:
    """Return a function that creates a Deployment `web` of HTTP servers and returns its Service's URL."""

    def make(replicas: int = 2) -> str:
        main = {
            "env": [POD_IP],
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        }
        template = {
            "metadata": {"labels": {"app": "web"}},
            "spec": pod_spec(SERVE, main, restartPolicy="Always"),
        }
        selector = {"matchLabels": {"app": "web"}}
        space.create(
            "Deployment",
            "web",
            "apps/v1",
            spec={"replicas": replicas, "selector": selector, "template": template},
        )
        ports = [{"port": 8080, "targetPort": "http"}]
        space.create("Service", "web", spec={"selector": {"app": "web"}, "ports": ports})
        space.kubectl("rollout", "status", "deployment/web", "--timeout=90s")
        return space.cluster.url("web", space.name)

    return make


def names(space: Space) -> set[str]:
    items = space.get("pods", "-l", "app=web")["items"]
    return {item["metadata"]["name"] for item in items if not item["metadata"].get("deletionTimestamp")}


def answers(url: str, count: int) -> list[str]:
    return [httpx.get(url, timeout=10, trust_env=False).text for _ in range(count)]


def test_a_service_spreads_over_ready_pods_and_follows_scaling(space: Space, web: Callable[..., str]) -> None:
    url = web()
    eventually(lambda: set(answers(url, 10)) == names(space))
    space.kubectl("scale", "deployment/web", "--replicas=3")
    space.kubectl("rollout", "status", "deployment/web", "--timeout=90s")
    eventually(lambda: set(answers(url, 12)) == names(space) and len(names(space)) == 3)
    described = space.kubectl("describe", "deployment/web")
    assert "3 desired | 3 updated | 3 total | 3 available" in described
    space.kubectl("scale", "deployment/web", "--replicas=0")
    space.kubectl("wait", "--for=delete", "pod", "-l", "app=web", "--timeout=60s")
    with pytest.raises(httpx.ConnectError):
        answers(url, 1)


def test_a_rolling_restart_fails_no_request(space: Space, web: Callable[..., str]) -> None:
    url = web()
    before = names(space)
    space.kubectl("rollout", "restart", "deployment/web")
    under_way = True
    while under_way:
        assert len(answers(url, 20)) == 20
        under_way = bool(names(space) & before) or len(names(space)) != 2
    with httpx.Client(trust_env=False, timeout=10) as client, ThreadPoolExecutor() as pool:
        victim = client.get(url).text
        slow = pool.submit(client.get, f"{url}/slow")  # on the same connection, so from the same pod
        time.sleep(0.3)
        space.kubectl("delete", "pod", victim, "--wait=false")
        assert slow.result().text == victim, "a pod that terminates ends its streams first"
    eventually(lambda: set(answers(url, 10)) == names(space) and victim not in names(space))


def test_a_service_retries_a_refused_connection_with_another_pod(
    space: Space, web: Callable[..., str]
) -> None:
    url = web()
    eventually(lambda: set(answers(url, 10)) == names(space))
    pods = space.get("pods", "-l", "app=web")["items"]
    pid = int(container(pods[0])["containerID"].removeprefix("process://"))
    os.kill(pid, signal.SIGKILL)
    assert len(answers(url, 20)) == 20


def test_an_event_reports_a_service_port_below_1024(space: Space) -> None:
    space.create("Service", "low", spec={"selector": {"app": "x"}, "ports": [{"port": 80}]})
    refused = eventually(lambda: space.events("PortRefused"))
    assert "port 80 is refused" in refused[0]["message"]
    assert "from 1024 up" in refused[0]["message"]


def test_a_drain_evicts_within_the_budget(space: Space, web: Callable[..., str]) -> None:
    web()
    # Drain only pods of this test: in namespaces that terminate after other tests, evictions fail.
    for name in names(space):
        space.kubectl("label", "pod", name, "drained=here")
    node = space.get("pods", "-l", "app=web")["items"][0]["spec"]["nodeName"]
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}
    space.create("PodDisruptionBudget", "web", "policy/v1", spec=budget)
    eventually(lambda: space.get("pdb", "web")["status"].get("disruptionsAllowed") == 1)
    before = names(space)
    try:
        with pytest.raises(Exception, match=r"(?s)disruption budget|timed out"):
            space.cluster.kubectl(
                "drain", node, "--pod-selector=drained=here", "--ignore-daemonsets", "--timeout=2s"
            )
    finally:
        space.cluster.kubectl("uncordon", node)
    space.kubectl("rollout", "status", "deployment/web", "--timeout=90s")
    assert len(before & names(space)) == 1


def test_deleting_a_deployment_leaves_no_pod_folder_or_replica_set(
    space: Space, web: Callable[..., str]
) -> None:
    web()
    uids = [item["metadata"]["uid"] for item in space.get("pods", "-l", "app=web")["items"]]
    space.kubectl("delete", "deployment/web", "--cascade=foreground", "--timeout=90s")
    eventually(lambda: not names(space))
    folder = space.cluster.dir / "pods"
    eventually(lambda: not [uid for uid in uids if (folder / uid).exists()])
    assert space.get("replicasets")["items"] == []


def test_a_pod_that_requests_more_gpus_than_the_node_has_is_unschedulable(space: Space) -> None:
    nodes = space.cluster.get("nodes")["items"]
    assert [item["status"]["allocatable"]["nvidia.com/gpu"] for item in nodes] == ["8"]
    lease = space.cluster.get("lease", nodes[0]["metadata"]["name"], "-n", "kube-node-lease")
    assert lease["spec"]["holderIdentity"] == nodes[0]["metadata"]["name"]
    space.run("greedy", "", {"resources": {"limits": {"nvidia.com/gpu": "9"}}})
    space.wait("pod/greedy", "condition=PodScheduled=false")
    assert "Insufficient nvidia.com/gpu" in condition(space.pod("greedy"), "PodScheduled")["message"]


def test_the_control_plane_authorizes_by_role(space: Space) -> None:
    server = space.cluster.cluster.state.read_settings().server
    context = ssl.create_default_context(cafile=str(space.cluster.dir / "pki/ca.crt"))
    anonymous = httpx.get(f"{server}/api/v1/pods", verify=context, trust_env=False)
    assert anonymous.status_code == 403
    may = space.kubectl("auth", "can-i", "--list", f"--as=system:serviceaccount:{space.name}:default")
    assert "selfsubjectreviews" in may
    assert "pods" not in may.split()
    node = json.loads((space.cluster.dir / "node.kubeconfig").read_text())
    assert node["users"][0]["name"] == "system:node:mizzen-local"


def test_a_restarted_node_starts_its_pods_again(space: Space) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    code = f"import time; time.sleep(100)  # {mark}"
    space.run("stays", code, restartPolicy="Always")
    space.run("once", code, restartPolicy="Never")
    space.wait("pod/stays", "condition=Ready")
    space.wait("pod/once", "condition=Ready")
    before = set(processes(mark))
    assert len(before) == 2
    cluster = space.cluster.cluster
    node = next(item for item in cluster.state.processes() if item.name == "node")
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: not node.alive())
    assert cluster.state.status() == "broken"
    assert set(processes(mark)) == before, "pods outlive the node's process"
    cluster.restart_node()
    space.wait("pod/once", "jsonpath={.status.phase}=Failed")
    eventually(lambda: container(space.pod("stays"))["restartCount"] == 1)
    space.wait("pod/stays", "condition=Ready")
    assert len(processes(mark)) == 1
    assert not before & set(processes(mark))
    assert container(space.pod("stays"))["lastState"]["terminated"]["message"] == "the node was restarted"


def test_a_pod_that_vanishes_from_the_api_ends(space: Space) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    space.run("vanishes", f"import time; time.sleep(100)  # {mark}")
    space.wait("pod/vanishes", "condition=Ready")
    assert processes(mark)
    space.kubectl("delete", "pod", "vanishes", "--force", "--grace-period=0")
    eventually(lambda: not processes(mark))
