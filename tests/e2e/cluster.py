# SPDX-License-Identifier: Apache-2.0
"""The cluster under test: kubectl, a reader of objects, waits, counted restarts, and measured times."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

DEADLINE_SECONDS = 180.0
"""Default timeout of every wait, in seconds; it is generous, because no measurement depends on it."""


class CommandError(AssertionError):
    """A command failed or took too long; the message contains its output."""


def run(*command: str, stdin: str | None = None, timeout: float = DEADLINE_SECONDS) -> str:
    """Run a command and return its standard output.

    Raises:
        CommandError: the exit status is not 0, or the command took longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{' '.join(command)} took over {timeout} s") from error
    if done.returncode != 0:
        raise CommandError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Run kubectl on the cluster of KUBECONFIG and return its standard output."""
    return run("kubectl", *arguments, stdin=stdin)


def apply(*objects: dict[str, Any]) -> None:
    """Apply objects with `kubectl apply`."""
    kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in objects))


class Reader:
    """Reads objects through `kubectl proxy`; polling with a kubectl process per read would occupy a core."""

    def __init__(self) -> None:
        """Start `kubectl proxy` on a free port."""
        self._proxy = subprocess.Popen(
            ["kubectl", "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._proxy.stdout is not None
        line = self._proxy.stdout.readline()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        if address is None:
            raise CommandError(f"kubectl proxy: {line}")
        self._client = httpx.Client(base_url=f"http://{address[0]}", timeout=30, trust_env=False)

    def close(self) -> None:
        """Stop `kubectl proxy`."""
        self._client.close()
        self._proxy.terminate()
        self._proxy.wait(30)

    def get(self, path: str, selector: str = "") -> dict[str, Any]:
        """Return the object or list at a path of the API; an empty object if the path does not exist.

        Raises:
            CommandError: the API server answered with a status other than 200 and 404.
        """
        answer = self._client.get(path, params={"labelSelector": selector} if selector else None)
        return {} if answer.status_code == 404 else _content(answer).json()

    def text(self, path: str) -> str:
        """Return the text at a path of the API, such as that of a pod's proxy.

        Raises:
            CommandError: the API server answered with a status other than 200.
        """
        return _content(self._client.get(path)).text

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the pods of a namespace that match a label selector."""
        return self.get(f"/api/v1/namespaces/{namespace}/pods", selector).get("items", [])


def _content(answer: httpx.Response) -> httpx.Response:
    if answer.status_code != 200:
        raise CommandError(f"GET {answer.url.path}: {answer.status_code} {answer.text}")
    return answer


def wait_until(check: Callable[[], Any], expectation: str, seconds: float = DEADLINE_SECONDS) -> float:
    """Wait until `check()` returns something true; return how many seconds that took."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"after {seconds:.0f} s still not: {expectation}")
        time.sleep(0.2)
    return time.monotonic() - began


def condition(obj: dict[str, Any], kind: str) -> str:
    """Return the status of a condition of an object; empty if the object does not have the condition."""
    conditions = obj.get("status", {}).get("conditions", [])
    return next((c["status"] for c in conditions if c["type"] == kind), "")


@dataclass
class Restarts:
    """Compares the restarts of containers with the restarts that the tests provoked."""

    reader: Reader
    namespaces: tuple[str, ...]
    provoked: dict[tuple[str, str], int] = field(default_factory=dict)

    def provoke(self, pod: dict[str, Any]) -> None:
        """Record that the test is about to cause one restart of a pod's first container."""
        key = (pod["metadata"]["uid"], pod["spec"]["containers"][0]["name"])
        self.provoked[key] = self.provoked.get(key, 0) + 1

    def unprovoked(self) -> list[str]:
        """Return a description of each container that restarted more often than the tests provoked."""
        unprovoked = []
        for namespace in self.namespaces:
            for pod in self.reader.pods(namespace):
                for status in pod.get("status", {}).get("containerStatuses", []):
                    allowed = self.provoked.get((pod["metadata"]["uid"], status["name"]), 0)
                    if status["restartCount"] > allowed:
                        name = f"{namespace}/{pod['metadata']['name']}/{status['name']}"
                        unprovoked.append(f"{name}: {status['restartCount']} restarts, {status['lastState']}")
        return unprovoked


@dataclass
class Timeline:
    """How many seconds the cluster took to converge after each change."""

    entries: list[tuple[str, float]] = field(default_factory=list)

    def add(self, label: str, seconds: float) -> None:
        """Record a duration in seconds."""
        self.entries.append((label, seconds))

    @contextmanager
    def measure(self, label: str) -> Iterator[None]:
        """Record the duration of the block."""
        began = time.monotonic()
        yield
        self.add(label, time.monotonic() - began)

    def lines(self) -> list[str]:
        """Return the durations as lines of a table."""
        return [f"{seconds:7.1f} s  {label}" for label, seconds in self.entries]


def evict(namespace: str, pod: str) -> int:
    """Evict a pod as `kubectl drain` does, and return the HTTP status.

    The status is 201, or 429 if a disruption budget forbids the eviction.

    Raises:
        CommandError: the API server refused the eviction for another reason.
    """
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    command = ["kubectl", "create", "--raw", path, "-f", "-"]
    done = subprocess.run(
        command,
        input=json.dumps(body),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return 201
    if "disruption budget" in done.stderr:
        return 429
    raise CommandError(f"eviction of {pod}: {done.stderr}")
