"""A cluster as the tests see it: kubectl, waits for conditions, and what its pods went through."""

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
"""For everything that a test waits for; generous, because nothing is measured by it."""


class CommandError(AssertionError):
    """A command failed; the message is its output."""


def run(*command: str, stdin: str | None = None, timeout: float = DEADLINE_SECONDS) -> str:
    """Run a command and return its standard output.

    Raises:
        CommandError: it ended with another status than 0, or not in time.
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
    """Run kubectl against the cluster of KUBECONFIG."""
    return run("kubectl", *arguments, stdin=stdin)


def apply(*objects: dict[str, Any]) -> None:
    """Apply objects as a user does."""
    kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(item) for item in objects))


class Reader:
    """Reads objects through `kubectl proxy`: a wait that starts kubectl at each look would take a core."""

    def __init__(self) -> None:
        """Start the proxy, on a port that is free."""
        self._proxy = subprocess.Popen(
            ["kubectl", "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._proxy.stdout is not None
        line = self._proxy.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line)
        if found is None:
            raise CommandError(f"kubectl proxy: {line}")
        self._client = httpx.Client(base_url=f"http://{found[0]}", timeout=30, trust_env=False)

    def close(self) -> None:
        """End the proxy."""
        self._client.close()
        self._proxy.terminate()
        self._proxy.wait(30)

    def get(self, path: str, selector: str = "") -> dict[str, Any]:
        """Return what the API server has at a path; nothing when it has nothing there.

        Raises:
            CommandError: it answered otherwise.
        """
        answer = self._client.get(path, params={"labelSelector": selector} if selector else None)
        if answer.status_code == 404:
            return {}
        if answer.status_code != 200:
            raise CommandError(f"GET {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def pods(self, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the pods of a namespace."""
        return self.get(f"/api/v1/namespaces/{namespace}/pods", selector).get("items", [])


def wait_until(check: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> float:
    """Wait for `check()` to be true; return how long it took, in seconds."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > seconds:
            raise AssertionError(f"after {seconds:.0f} s still not: {what}")
        time.sleep(0.2)
    return time.monotonic() - began


def condition(thing: dict[str, Any], kind: str) -> str:
    """Return the status of a condition of an object; empty when it has none."""
    conditions = thing.get("status", {}).get("conditions", [])
    return next((one["status"] for one in conditions if one["type"] == kind), "")


@dataclass
class Restarts:
    """Containers that were restarted, against those that the tests provoked."""

    reader: Reader
    namespaces: tuple[str, ...]
    provoked: dict[tuple[str, str], int] = field(default_factory=dict)

    def provoke(self, pod: dict[str, Any]) -> None:
        """Say that one restart of a pod's first container is the test's own."""
        key = (pod["metadata"]["uid"], pod["spec"]["containers"][0]["name"])
        self.provoked[key] = self.provoked.get(key, 0) + 1

    def unprovoked(self) -> list[str]:
        """Return the containers that were restarted more often than the tests made them."""
        found = []
        for namespace in self.namespaces:
            for pod in self.reader.pods(namespace):
                for status in pod.get("status", {}).get("containerStatuses", []):
                    allowed = self.provoked.get((pod["metadata"]["uid"], status["name"]), 0)
                    if status["restartCount"] > allowed:
                        name = f"{namespace}/{pod['metadata']['name']}/{status['name']}"
                        found.append(f"{name}: {status['restartCount']} restarts, {status['lastState']}")
        return found


@dataclass
class Timeline:
    """How long the cluster took to do what was asked of it."""

    entries: list[tuple[str, float]] = field(default_factory=list)

    def add(self, what: str, seconds: float) -> None:
        """Note a time, in seconds."""
        self.entries.append((what, seconds))

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.monotonic()
        yield
        self.add(what, time.monotonic() - began)

    def lines(self) -> list[str]:
        """Return the times as lines of a table."""
        return [f"{seconds:7.1f} s  {what}" for what, seconds in self.entries]


def evict(namespace: str, pod: str) -> int:
    """Ask for a pod's eviction as `kubectl drain` does; return the HTTP status: 201, or 429 for a budget."""
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
