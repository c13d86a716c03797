"""The node of a local cluster: pods of every kind, seen through the API as any user sees them."""

from __future__ import annotations

import json
import os
import signal
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

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


def eventually(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `check()` is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.1)
    return value


class Space:
    """A namespace of one test."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        cluster.kubectl("create", "namespace", self.name)
        cluster.kubectl("wait", "--for=create", "serviceaccount/default", "-n", self.name, "--timeout=60s")

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, stdin=stdin)

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def pod(self, name: str) -> dict[str, Any]:
        return self.get("pod", name)

    def create(self, kind: str, name: str, api: str = "v1", **fields: Any) -> None:
        body = {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **fields}
        self.kubectl("create", "-f", "-", stdin=json.dumps(body))

    def run(self, name: str, code: str, container: dict[str, Any] | None = None, **spec: Any) -> None:
        self.create("Pod", name, spec=pod_spec(code, container, **spec))

    def wait(self, what: str, condition: str, seconds: int = 60) -> None:
        self.kubectl("wait", f"--for={condition}", what, f"--timeout={seconds}s")

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [item for item in self.get("events")["items"] if item["reason"] == reason]


def pod_spec(code: str, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "any", "command": [sys.executable, "-c", code], **(container or {})}
    return {"containers": [main], "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, **spec}


def condition(pod: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((item for item in pod["status"].get("conditions", ()) if item["type"] == kind), {})


def container(pod: dict[str, Any]) -> dict[str, Any]:
    """The status of the first container; that of one which the node has not looked at before it has."""
    unseen = {"state": {}, "lastState": {}, "restartCount": 0}
    return pod["status"].get("containerStatuses", [unseen])[0]


@pytest.fixture
def space(cluster: Any) -> Iterator[Space]:
    made = Space(cluster)
    yield made
    cluster.kubectl("delete", "namespace", made.name, "--wait=false")


def processes(mark: str) -> list[int]:
    """Pids of live processes whose command line holds a text."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if mark.encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


# ---- what a container gets ----


def test_environment_volumes_and_paths(space: Space, tmp_path: Path) -> None:
    space.create("Secret", "password", stringData={"key": "sesame", "other": "x"})
    space.create("ConfigMap", "settings", data={"colour": "red", "file.txt": "hello"})
    (tmp_path / "on-the-host").write_text("host")
    code = """
import json, os, pathlib, sys
read = lambda path: pathlib.Path(path).read_text()
print(json.dumps({
    "env": {key: os.environ.get(key) for key in sys.argv[2].split(",")},
    "argument": sys.argv[1],
    "secret": sorted(os.listdir(os.environ["SECRETS"])),
    "projected": {name: read(f"{os.environ['ALL']}/{name}") for name in ("label", "colour", "ns/name")},
    "from_init": read(os.environ["SHARED"] + "/note"),
    "host": read(os.environ["HOST"]),
}))
pathlib.Path(sys.argv[3].removeprefix("--message=")).write_text("bye")
"""
    names = "NAME,IP,PASSWORD,COLOUR,JOINED,ABSENT,PRE_colour,HOSTNAME,KUBERNETES_SERVICE_HOST,CPU"
    mounts = [
        {"name": "secret", "mountPath": "/etc/secret"},
        {"name": "all", "mountPath": "/etc/all"},
        {"name": "shared", "mountPath": "/shared"},
        {"name": "host", "mountPath": "/host"},
    ]
    key_of = {"name": "password", "key": "key"}
    main = {
        "command": [sys.executable, "-c", code, "--model=/shared/m-$(COLOUR)", names],
        "args": ["--message=/dev/termination-log"],
        "env": [
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": key_of}},
            {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
            {"name": "JOINED", "value": "$(NAME)-$(COLOUR)-$$(NAME)"},
            {
                "name": "ABSENT",
                "valueFrom": {"secretKeyRef": {"name": "none", "key": "k", "optional": True}},
            },
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
            {"name": "SECRETS", "value": "/etc/secret"},
            {"name": "ALL", "value": "/etc/all"},
            {"name": "SHARED", "value": "/shared"},
            {"name": "HOST", "value": "/host/on-the-host"},
        ],
        "envFrom": [{"prefix": "PRE_", "configMapRef": {"name": "settings"}}],
        "resources": {"requests": {"cpu": "250m"}},
        "volumeMounts": mounts,
    }
    label = {"path": "label", "fieldRef": {"fieldPath": "metadata.labels['app']"}}
    namespace = {"path": "ns/name", "fieldRef": {"fieldPath": "metadata.namespace"}}
    projected = [
        {"configMap": {"name": "settings", "items": [{"key": "colour", "path": "colour"}]}},
        {"downwardAPI": {"items": [label, namespace]}},
    ]
    write = "import os, pathlib; pathlib.Path(os.environ['AT'] + '/note').write_text('from init')"
    init = {
        "name": "init",
        "image": "any",
        "command": [sys.executable, "-c", write],
        "env": [{"name": "AT", "value": "/shared"}],
        "volumeMounts": mounts[2:3],
    }
    volumes = [
        {"name": "secret", "secret": {"secretName": "password"}},
        {"name": "all", "projected": {"sources": projected}},
        {"name": "shared", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
    ]
    spec = pod_spec("", main, volumes=volumes, initContainers=[init])
    metadata = {"name": "everything", "labels": {"app": "greeter"}}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    space.kubectl("create", "-f", "-", stdin=json.dumps(body))
    space.wait("pod/everything", "jsonpath={.status.phase}=Succeeded")
    pod = space.pod("everything")
    found = json.loads(space.cluster.logs("everything"))
    assert found["env"] == {
        "NAME": "everything",
        "IP": pod["status"]["podIP"],
        "PASSWORD": "sesame",
        "COLOUR": "red",
        "JOINED": "everything-red-$(NAME)",
        "ABSENT": None,
        "PRE_colour": "red",
        "HOSTNAME": "everything",
        "KUBERNETES_SERVICE_HOST": space.cluster.cluster.state.facts().server.split(":")[1][2:],
        "CPU": "250",
    }
    assert found["argument"].startswith("--model=/") and found["argument"].endswith("/shared/m-red")
    assert found["secret"] == ["key", "other"]
    assert found["projected"] == {"label": "greeter", "colour": "red", "ns/name": space.name}
    assert (found["from_init"], found["host"]) == ("from init", "host")
    assert container(pod)["state"]["terminated"]["message"] == "bye"
    assert container(pod)["state"]["terminated"]["reason"] == "Completed"
    assert condition(pod, "Ready") | {"lastTransitionTime": ""} == {
        "type": "Ready",
        "status": "False",
        "reason": "PodCompleted",
        "lastProbeTime": None,
        "lastTransitionTime": "",
        "observedGeneration": 1,
    }
    assert condition(pod, "Initialized")["status"] == "True"


def test_the_service_account_is_a_kubeconfig(space: Space) -> None:
    kubectl = str(space.cluster.cluster.kubectl().program)
    space.create("ServiceAccount", "worker")
    space.run("who", "", {"command": [kubectl, "auth", "whoami", "-o", "json"]}, serviceAccountName="worker")
    space.wait("pod/who", "jsonpath={.status.phase}=Succeeded")
    user = json.loads(space.cluster.logs("who"))["status"]["userInfo"]
    assert user["username"] == f"system:serviceaccount:{space.name}:worker"
    assert user["extra"]["authentication.kubernetes.io/pod-name"] == ["who"]


def test_a_pod_waits_for_what_it_refers_to(space: Space) -> None:
    variable = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "later", "key": "a"}}}
    space.run("waits", "import os; print(os.environ['A'])", {"env": [variable]})
    waiting = eventually(lambda: container(space.pod("waits"))["state"].get("waiting", {}).get("message"))
    assert 'configmaps "later" not found' in waiting
    assert container(space.pod("waits"))["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    space.create("ConfigMap", "later", data={"a": "now"})
    space.wait("pod/waits", "jsonpath={.status.phase}=Succeeded")
    assert space.cluster.logs("waits") == "now\n"


def test_an_unknown_image_or_volume_is_named(space: Space) -> None:
    space.create("Pod", "strange", spec={"containers": [{"name": "main", "image": "nginx:1"}]})
    space.create(
        "Pod",
        "claims",
        spec=pod_spec("", volumes=[{"name": "v", "nfs": {"server": "s", "path": "/"}}]),
    )
    waiting = eventually(lambda: container(space.pod("strange"))["state"].get("waiting", {}))
    eventually(lambda: "nginx:1" in container(space.pod("strange"))["state"]["waiting"].get("message", ""))
    assert waiting["reason"] in ("ErrImagePull", "ContainerCreating")
    eventually(lambda: any("nfs is not available" in item["message"] for item in space.events("FailedMount")))


# ---- how containers end and start again ----


def test_a_failing_pod_tells_why(space: Space) -> None:
    code = "print('the reason'); raise SystemExit(3)"
    space.run("fails", code, {"terminationMessagePolicy": "FallbackToLogsOnError"})
    space.wait("pod/fails", "jsonpath={.status.phase}=Failed")
    ended = container(space.pod("fails"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "the reason")


def test_a_failing_init_container_ends_the_pod(space: Space) -> None:
    init = {"name": "init", "image": "any", "command": [sys.executable, "-c", "raise SystemExit(1)"]}
    space.run("init-fails", "print('never')", initContainers=[init])
    space.wait("pod/init-fails", "jsonpath={.status.phase}=Failed")
    pod = space.pod("init-fails")
    assert condition(pod, "Initialized")["status"] == "False"
    assert "running" not in container(pod)["state"]


def test_a_crashing_container_is_started_again_with_back_off(space: Space) -> None:
    space.run("crashes", "raise SystemExit(7)", restartPolicy="Always")
    pod = eventually(
        lambda: (found := space.pod("crashes")) and container(found)["restartCount"] >= 2 and found
    )
    eventually(
        lambda: (
            container(space.pod("crashes"))["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
        )
    )
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 7
    assert pod["status"]["phase"] == "Running"
    assert space.events("BackOff")
    logs = space.cluster.run("logs", "crashes", "-n", space.name)
    assert logs.returncode == 0
    space.kubectl("delete", "pod", "crashes", "--timeout=25s")  # sooner than its grace of 30 s


SPEAKS = """
import pathlib, sys, time
print("first", flush=True); print("second", flush=True)
while not pathlib.Path(sys.argv[-1]).exists():
    time.sleep(0.05)
print("last", flush=True)
"""


def test_kubectl_shows_logs_and_follows_them_to_their_end(space: Space, tmp_path: Path) -> None:
    go = tmp_path / "go"
    space.run("speaks", SPEAKS, {"args": [str(go)]})
    space.wait("pod/speaks", "condition=Ready")
    eventually(lambda: space.kubectl("logs", "speaks") == "first\nsecond\n")
    assert space.kubectl("logs", "speaks", "-c", "main", "--tail", "1") == "second\n"
    assert space.kubectl("logs", "speaks", "--limit-bytes", "3") == "fir"
    with pytest.raises(Exception, match="the node of mizzen-local serves logs alone"):
        space.kubectl("exec", "speaks", "--", "true")
    with ThreadPoolExecutor() as pool:
        following = pool.submit(space.kubectl, "logs", "-f", "speaks")
        time.sleep(1)
        assert not following.done()
        go.touch()
        assert following.result(30) == "first\nsecond\nlast\n"
    space.wait("pod/speaks", "jsonpath={.status.phase}=Succeeded")
    assert space.kubectl("logs", "-f", "speaks") == "first\nsecond\nlast\n", "it has ended"
    with pytest.raises(Exception, match='previous terminated container "main" in pod "speaks" not found'):
        space.kubectl("logs", "speaks", "--previous")
    with pytest.raises(Exception, match="--since: the node of mizzen-local does not know"):
        space.kubectl("logs", "speaks", "--since", "1h")


def test_kubectl_shows_the_log_of_the_run_before(space: Space, tmp_path: Path) -> None:
    """Of what waits to be started again that is the last run; of what runs again, the one before."""
    count = tmp_path / "count"
    code = (
        f"import pathlib, time; path = pathlib.Path({str(count)!r})\n"
        "number = len(path.read_text()) if path.exists() else 0\n"
        "path.write_text('x' * (number + 1)); print('run', number, flush=True)\n"
        "time.sleep(600 if number == 2 else 0); raise SystemExit(1)"
    )
    space.run("again", code, restartPolicy="Always")
    eventually(lambda: container(space.pod("again"))["restartCount"] == 2)
    eventually(lambda: space.kubectl("logs", "again") == "run 2\n")
    assert space.kubectl("logs", "again", "--previous") == "run 1\n"


def test_only_the_api_server_reads_logs(space: Space) -> None:
    port = space.cluster.get("nodes")["items"][0]["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    state = space.cluster.cluster.state
    context = ssl.create_default_context(cafile=str(state.folder / "pki/ca.crt"))
    host = space.cluster.get("nodes")["items"][0]["status"]["addresses"][0]["address"]
    url = f"https://{host}:{port}/containerLogs/{space.name}/x/main"
    with pytest.raises(httpx.HTTPError):
        httpx.get(url, verify=context, trust_env=False)
    context.load_cert_chain(state.folder / "pki/admin.crt", state.folder / "pki/admin.key")
    assert httpx.get(url, verify=context, trust_env=False).status_code == 403


def test_a_failed_liveness_probe_restarts(space: Space) -> None:
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
    assert 1.0 <= time.monotonic() - began < 90, "it would have ended by itself after 100 s"
    assert processes(mark) == []


def test_hooks_run_around_a_container(space: Space, tmp_path: Path) -> None:
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


def test_jobs_run_to_their_end(space: Space) -> None:
    template = {"spec": pod_spec("print('done')")}
    space.create("Job", "once", "batch/v1", spec={"template": template, "completions": 2, "parallelism": 2})
    space.wait("job/once", "condition=Complete")
    assert space.get("job", "once")["status"]["succeeded"] == 2


# ---- readiness ----


def test_readiness_follows_its_probe_and_gates(space: Space, tmp_path: Path) -> None:
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


def test_readiness_waits_for_the_start_up_probe(space: Space, tmp_path: Path) -> None:
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
    space.wait("pod/slow-start", "condition=Ready")  # long before the probe's period is over


def test_tcp_probes(space: Space) -> None:
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


# ---- services, Deployments, kubectl ----


@pytest.fixture
def web(space: Space) -> Callable[..., str]:
    """Make a Deployment `web` of HTTP servers with a Service; returns the URL."""

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
        slow = pool.submit(client.get, f"{url}/slow")  # on the same connection, and so to the same pod
        time.sleep(0.3)
        space.kubectl("delete", "pod", victim, "--wait=false")
        assert slow.result().text == victim, "a pod that terminates ends its streams first"
    eventually(lambda: set(answers(url, 10)) == names(space) and victim not in names(space))


def test_a_refused_connection_goes_to_another_pod(space: Space, web: Callable[..., str]) -> None:
    url = web()
    eventually(lambda: set(answers(url, 10)) == names(space))
    pods = space.get("pods", "-l", "app=web")["items"]
    pid = int(container(pods[0])["containerID"].removeprefix("process://"))
    os.kill(pid, signal.SIGKILL)
    assert len(answers(url, 20)) == 20


def test_low_ports_are_refused_clearly(space: Space) -> None:
    space.create("Service", "low", spec={"selector": {"app": "x"}, "ports": [{"port": 80}]})
    refused = eventually(lambda: space.events("PortRefused"))
    assert "port 80 is refused" in refused[0]["message"]
    assert "from 1024 up" in refused[0]["message"]


def test_a_drain_evicts_within_the_budget(space: Space, web: Callable[..., str]) -> None:
    web()
    # Those of other tests are in namespaces that may be on their way out, where nothing can be evicted.
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


def test_deletion_leaves_nothing(space: Space, web: Callable[..., str]) -> None:
    web()
    uids = [item["metadata"]["uid"] for item in space.get("pods", "-l", "app=web")["items"]]
    space.kubectl("delete", "deployment/web", "--cascade=foreground", "--timeout=90s")
    eventually(lambda: not names(space))
    folder = space.cluster.dir / "pods"
    eventually(lambda: not [uid for uid in uids if (folder / uid).exists()])
    assert space.get("replicasets")["items"] == []


def test_the_node_offers_gpus_and_refuses_more(space: Space) -> None:
    nodes = space.cluster.get("nodes")["items"]
    assert [item["status"]["allocatable"]["nvidia.com/gpu"] for item in nodes] == ["8"]
    lease = space.cluster.get("lease", nodes[0]["metadata"]["name"], "-n", "kube-node-lease")
    assert lease["spec"]["holderIdentity"] == nodes[0]["metadata"]["name"]
    space.run("greedy", "", {"resources": {"limits": {"nvidia.com/gpu": "9"}}})
    space.wait("pod/greedy", "condition=PodScheduled=false")
    assert "Insufficient nvidia.com/gpu" in condition(space.pod("greedy"), "PodScheduled")["message"]


def test_the_control_plane_authorizes_by_role(space: Space) -> None:
    server = space.cluster.cluster.state.facts().server
    context = ssl.create_default_context(cafile=str(space.cluster.dir / "pki/ca.crt"))
    anonymous = httpx.get(f"{server}/api/v1/pods", verify=context, trust_env=False)
    assert anonymous.status_code == 403
    may = space.kubectl("auth", "can-i", "--list", f"--as=system:serviceaccount:{space.name}:default")
    assert "selfsubjectreviews" in may
    assert "pods" not in may.split()
    node = json.loads((space.cluster.dir / "node.kubeconfig").read_text())
    assert node["users"][0]["name"] == "system:node:mizzen-local"


# ---- the node itself ----


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
    assert cluster.state.state() == "broken"
    assert set(processes(mark)) == before, "pods outlive the node's process"
    cluster.restart_node()
    space.wait("pod/once", "jsonpath={.status.phase}=Failed")
    eventually(lambda: container(space.pod("stays"))["restartCount"] == 1)
    space.wait("pod/stays", "condition=Ready")
    assert len(processes(mark)) == 1
    assert not before & set(processes(mark))
    assert container(space.pod("stays"))["lastState"]["terminated"]["message"] == "its node was restarted"


def test_a_pod_that_vanishes_from_the_api_ends(space: Space) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    space.run("vanishes", f"import time; time.sleep(100)  # {mark}")
    space.wait("pod/vanishes", "condition=Ready")
    assert processes(mark)
    space.kubectl("delete", "pod", "vanishes", "--force", "--grace-period=0")
    eventually(lambda: not processes(mark))
