# SPDX-License-Identifier: Apache-2.0
"""The command line of mizzen-local: clusters start, run side by side, and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mizzen_local import process
from snippets import snippets_to_run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.xdist_group("cluster-life"),
]
REPOSITORY = Path(__file__).parents[2]


def test_all_commands_work_from_up_to_down(new_cluster: Callable[[], Any], tmp_path: Path) -> None:
    local = new_cluster()
    assert local.run("down").stdout == "there is no cluster\n"
    missing = local.run("kubeconfig")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "mizzen-local up starts one" in missing.stderr

    began = time.monotonic()
    [block] = snippets_to_run("local")
    up = local.run_script(block.text, tmp_path)  # would hang if a child process kept standard output open
    assert up.returncode == 0, up.stderr
    print(f"up in {time.monotonic() - began:.1f} s")
    lease = local.get("lease", "mizzen-operator", "-n", "mizzen-system")
    assert lease["spec"]["holderIdentity"].startswith("mizzen-operator-")
    crd = local.get("crd", "inferenceservices.mizzen.dev")
    assert {"type": "Established", "status": "True"}.items() <= {
        key: value
        for item in crd["status"]["conditions"]
        if item["type"] == "Established"
        for key, value in item.items()
    }.items()
    [node] = local.get("nodes")["items"]
    assert node["status"]["capacity"]["nvidia.com/gpu"] == "3"
    [profile] = yaml.safe_load((tmp_path / "values.yaml").read_text())["acceleratorProfiles"].items()
    assert profile[1]["nodeSelector"].items() <= node["metadata"]["labels"].items()
    operator = local.get("deployment", "mizzen-operator", "-n", "mizzen-system")
    arguments = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    profiles = arguments[arguments.index("--accelerator-profiles") + 1]
    assert json.loads(profiles) == dict([profile])

    again = local.run("up")
    assert again.returncode == 1
    assert "is up already" in again.stderr
    assert local.run("kubeconfig").stdout == f"{local.dir}/kubeconfig\n"
    assert local.dir.stat().st_mode & 0o077 == 0
    shown = local.run("status")
    assert shown.returncode == 0, shown.stderr
    assert "kube-apiserver" in shown.stdout and "mizzen-operator-" in shown.stdout
    assert "is the leader" in local.run("logs", "operator").stdout
    assert local.run("logs", "nothing").returncode == 1
    logs = local.run("logs").stdout.splitlines()
    assert set(logs) >= {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "node"}
    through = local.run("kubectl", "get", "nodes", "-o", "name")
    assert through.stdout == "node/mizzen-local\n"
    unknown = local.run("url", "nothing")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no InferenceService and no Service default/nothing" in unknown.stderr

    parts = process.find_marked(f"{local.dir}/")
    assert len(parts) >= 6  # four parts of the control plane, the node, the operator
    for part in parts:
        assert os.getsid(part.pid) != os.getsid(0)
        assert os.readlink(f"/proc/{part.pid}/fd/0") == "/dev/null"
        for stream in (1, 2):
            assert os.readlink(f"/proc/{part.pid}/fd/{stream}").startswith(str(local.dir / "logs"))

    down = local.run("down")
    assert down.returncode == 0, down.stderr
    assert process.find_marked(f"{local.dir}/") == []
    assert not local.dir.exists()


def test_two_clusters_run_side_by_side(new_cluster: Callable[[], Any]) -> None:
    first, second = new_cluster().up(operator=False), new_cluster().up(operator=False)
    code = ["python", "-m", "http.server", "8000", "--bind", "$(POD_IP)"]
    for local in (first, second):
        address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        main = {"name": "main", "image": "any", "command": [sys.executable, *code[1:]], "env": [address]}
        main["readinessProbe"] = {"tcpSocket": {"port": 8000}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "labels": {"app": "web"}}}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
        ports = [{"port": 8000}]
        local.apply(
            {**pod, "spec": {"containers": [main], "terminationGracePeriodSeconds": 1}},
            {**service, "spec": {"selector": {"app": "web"}, "ports": ports}},
        )
    urls = {}
    for local in (first, second):
        local.kubectl("wait", "--for=condition=Ready", "pod/web", "--timeout=60s")
        urls[local.dir] = local.url("web")
        assert "pki" not in httpx.get(urls[local.dir], trust_env=False).text
    assert len(set(urls.values())) == 2
    first.down()
    assert process.find_marked(f"{first.dir}/") == []
    assert httpx.get(urls[second.dir], trust_env=False).status_code == 200
    assert second.get("pods")["items"][0]["metadata"]["name"] == "web"


def test_a_broken_cluster_is_reported_and_can_be_started_again(new_cluster: Callable[[], Any]) -> None:
    local = new_cluster().up(operator=False)
    apiserver = next(item for item in local.cluster.state.processes() if item.name == "kube-apiserver")
    apiserver.signal(signal.SIGKILL)
    process.wait_ended([apiserver], 60)
    shown = local.run("status")
    assert shown.returncode == 1
    assert "broken" in shown.stdout and "has ended" in shown.stdout
    refused = local.run("url", "web")
    assert refused.returncode == 1
    assert "have ended (kube-apiserver)" in refused.stderr
    local.up(operator=False)
    assert local.get("nodes")["items"]


def test_a_failed_start_leaves_its_logs_and_no_process(
    new_cluster: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("etcd", "kube-controller-manager", "kube-scheduler", "kubectl"):
        (programs / name).symlink_to("/bin/sleep")
    (programs / "kube-apiserver").write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    (programs / "kube-apiserver").chmod(0o755)
    (programs / "etcd").unlink()
    (programs / "etcd").write_text("#!/bin/sh\nexec sleep 60\n")
    (programs / "etcd").chmod(0o755)
    monkeypatch.setenv("KUBE_ASSETS_DIR", str(programs))
    local = new_cluster()
    up = local.run("up")
    assert up.returncode == 1
    assert "kube-apiserver ended while starting" in up.stderr
    assert "no such flag" in up.stderr
    assert process.find_marked(f"{local.dir}/") == []
    assert (local.dir / "logs/kube-apiserver.log").exists()
    assert local.run("down").returncode == 0
    assert not local.dir.exists()


def test_an_interrupted_start_is_cleaned_up(new_cluster: Callable[[], Any]) -> None:
    local = new_cluster()
    environment = {**os.environ, "MIZZEN_LOCAL_DIR": str(local.dir)}
    command = [sys.executable, "-m", "mizzen_local.cli", "up"]
    listen = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as starting:
        signal.signal(signal.SIGINT, listen)
        while not (local.dir / "processes.json").exists():
            assert starting.poll() is None
            time.sleep(0.02)
        starting.send_signal(signal.SIGINT)
        starting.communicate(timeout=90)
    assert starting.returncode == 130
    assert process.find_marked(f"{local.dir}/") == []


def test_a_command_fails_while_another_one_uses_the_cluster(new_cluster: Callable[[], Any]) -> None:
    local = new_cluster()
    with local.cluster.state.lock():
        busy = local.run("down")
    assert busy.returncode == 1
    assert "another mizzen-local is using" in busy.stderr
