# SPDX-License-Identifier: Apache-2.0
"""The node of a local cluster runs pods as a kubelet does: environment, volumes, failures and logs."""

from __future__ import annotations

import json
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from local_node_kit import Space, condition, container, eventually, pod_spec

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("cluster-node"),
]


def test_a_pod_gets_its_environment_volumes_and_rewritten_paths(space: Space, tmp_path: Path) -> None:
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
    output = json.loads(space.cluster.logs("everything"))
    assert output["env"] == {
        "NAME": "everything",
        "IP": pod["status"]["podIP"],
        "PASSWORD": "sesame",
        "COLOUR": "red",
        "JOINED": "everything-red-$(NAME)",
        "ABSENT": None,
        "PRE_colour": "red",
        "HOSTNAME": "everything",
        "KUBERNETES_SERVICE_HOST": space.cluster.cluster.state.read_settings().server.split(":")[1][2:],
        "CPU": "250",
    }
    assert output["argument"].startswith("--model=/") and output["argument"].endswith("/shared/m-red")
    assert output["secret"] == ["key", "other"]
    assert output["projected"] == {"label": "greeter", "colour": "red", "ns/name": space.name}
    assert (output["from_init"], output["host"]) == ("from init", "host")
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


def test_a_pod_reaches_the_api_server_with_its_service_account(space: Space) -> None:
    kubectl = str(space.cluster.cluster.kubectl().program)
    space.create("ServiceAccount", "worker")
    space.run("who", "", {"command": [kubectl, "auth", "whoami", "-o", "json"]}, serviceAccountName="worker")
    space.wait("pod/who", "jsonpath={.status.phase}=Succeeded")
    user = json.loads(space.cluster.logs("who"))["status"]["userInfo"]
    assert user["username"] == f"system:serviceaccount:{space.name}:worker"
    assert user["extra"]["authentication.kubernetes.io/pod-name"] == ["who"]


def test_a_pod_waits_for_a_missing_config_map(space: Space) -> None:
    variable = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "later", "key": "a"}}}
    space.run("waits", "import os; print(os.environ['A'])", {"env": [variable]})
    waiting = eventually(lambda: container(space.pod("waits"))["state"].get("waiting", {}).get("message"))
    assert 'configmaps "later" not found' in waiting
    assert container(space.pod("waits"))["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    space.create("ConfigMap", "later", data={"a": "now"})
    space.wait("pod/waits", "jsonpath={.status.phase}=Succeeded")
    assert space.cluster.logs("waits") == "now\n"


def test_the_status_names_an_unknown_image_and_an_event_an_unsupported_volume(space: Space) -> None:
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


def test_the_termination_message_of_a_failed_pod_is_the_end_of_its_log(space: Space) -> None:
    code = "print('the reason'); raise SystemExit(3)"
    space.run("fails", code, {"terminationMessagePolicy": "FallbackToLogsOnError"})
    space.wait("pod/fails", "jsonpath={.status.phase}=Failed")
    ended = container(space.pod("fails"))["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "the reason")


def test_a_failed_init_container_fails_the_pod(space: Space) -> None:
    init = {"name": "init", "image": "any", "command": [sys.executable, "-c", "raise SystemExit(1)"]}
    space.run("init-fails", "print('never')", initContainers=[init])
    space.wait("pod/init-fails", "jsonpath={.status.phase}=Failed")
    pod = space.pod("init-fails")
    assert condition(pod, "Initialized")["status"] == "False"
    assert "running" not in container(pod)["state"]


def test_a_crashing_container_is_started_again_with_back_off(space: Space) -> None:
    space.run("crashes", "raise SystemExit(7)", restartPolicy="Always")
    pod = eventually(lambda: (pod := space.pod("crashes")) and container(pod)["restartCount"] >= 2 and pod)
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
    space.kubectl("delete", "pod", "crashes", "--timeout=25s")  # below the grace period of 30 s


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
    with pytest.raises(Exception, match="the node of mizzen-local serves only logs"):
        space.kubectl("exec", "speaks", "--", "true")
    with ThreadPoolExecutor() as pool:
        following = pool.submit(space.kubectl, "logs", "-f", "speaks")
        time.sleep(1)
        assert not following.done()
        go.touch()
        assert following.result(30) == "first\nsecond\nlast\n"
    space.wait("pod/speaks", "jsonpath={.status.phase}=Succeeded")
    assert space.kubectl("logs", "-f", "speaks") == "first\nsecond\nlast\n", "the pod has ended"
    with pytest.raises(Exception, match='previous terminated container "main" in pod "speaks" not found'):
        space.kubectl("logs", "speaks", "--previous")
    with pytest.raises(Exception, match="--since: the node of mizzen-local does not record"):
        space.kubectl("logs", "speaks", "--since", "1h")


def test_kubectl_shows_the_log_of_the_previous_run(space: Space, tmp_path: Path) -> None:
    """`--previous` shows the log of the run before the current one; between two runs, of the last one."""
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


def test_only_the_api_server_may_read_logs_from_the_node(space: Space) -> None:
    port = space.cluster.get("nodes")["items"][0]["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    state = space.cluster.cluster.state
    context = ssl.create_default_context(cafile=str(state.folder / "pki/ca.crt"))
    host = space.cluster.get("nodes")["items"][0]["status"]["addresses"][0]["address"]
    url = f"https://{host}:{port}/containerLogs/{space.name}/x/main"
    with pytest.raises(httpx.HTTPError):
        httpx.get(url, verify=context, trust_env=False)
    context.load_cert_chain(state.folder / "pki/admin.crt", state.folder / "pki/admin.key")
    assert httpx.get(url, verify=context, trust_env=False).status_code == 403
