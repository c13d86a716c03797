# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of a local cluster's node: a namespace, pod specs, and waits."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any


def eventually(check: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until `check()` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.1)
    return value


class Space:
    """A namespace of one test, with helpers to create and read its objects."""

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

    def wait(self, resource: str, condition: str, seconds: int = 60) -> None:
        self.kubectl("wait", f"--for={condition}", resource, f"--timeout={seconds}s")

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [item for item in self.get("events")["items"] if item["reason"] == reason]


def pod_spec(code: str, container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "image": "any", "command": [sys.executable, "-c", code], **(container or {})}
    return {"containers": [main], "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, **spec}


def condition(obj: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of an object; empty before the object has it."""
    return next((item for item in obj.get("status", {}).get("conditions", ()) if item["type"] == kind), {})


def pod_url(pod: dict[str, Any]) -> str:
    """Return the URL of the port `http` of a pod's first container."""
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    return f"http://{pod['status']['podIP']}:{ports['http']}"


def container(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a pod's first container; an empty status before the node has written one."""
    empty = {"state": {}, "lastState": {}, "restartCount": 0}
    return pod["status"].get("containerStatuses", [empty])[0]
