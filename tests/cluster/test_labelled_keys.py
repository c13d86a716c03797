# SPDX-License-Identifier: Apache-2.0
"""Labelled Secrets with API keys come and go without a lost request; the processes are real."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPACE = "quay"
LABEL = "mizzen.dev/api-keys"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def eventually(check: Callable[[], Any], seconds: float = 150) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
    return value


def keys(name: str) -> dict[str, Any]:
    """Return a labelled Secret with one API key; the key's file is always named `keys.yaml`."""
    content = yaml.safe_dump({"keys": [{"name": name, "key": f"sk-of-{name}"}]})
    meta = {"name": name, "namespace": SPACE, "labels": {LABEL: "demo-gateway"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"keys.yaml": content}}


class Quay:
    """A service in a namespace of its own, with requests to the service and queries about it."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.url = ""

    def condition(self, name: str) -> dict[str, Any]:
        status = self.cluster.get("infsvc", "demo", "-n", SPACE).get("status", {})
        absent = {"status": "", "message": ""}
        return next((c for c in status.get("conditions", ()) if c["type"] == name), absent)

    def code(self, name: str) -> int:
        """Send a request with the API key of a Secret; return the HTTP status."""
        body = {"model": "demo", "prompt": "Mizzen", "max_tokens": 4, "temperature": 0}
        headers = {"authorization": f"Bearer sk-of-{name}"}
        return httpx.post(f"{self.url}/completions", json=body, headers=headers, timeout=60).status_code

    def pods(self) -> int:
        """Return the number of gateway pods, including terminating ones."""
        selector = "mizzen.dev/component=gateway"
        return len(self.cluster.get("pods", "-n", SPACE, "-l", selector)["items"])

    def answers(self, name: str, code: int) -> bool:
        try:
            return self.code(name) == code
        except httpx.HTTPError:
            return False


@pytest.fixture(scope="module")
def quay(cluster: Any) -> Iterator[Quay]:
    cluster.make_namespace(SPACE)
    body = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    body["metadata"]["namespace"] = SPACE
    body["spec"]["gateway"] |= {"apiKeys": {"fromLabel": True}}
    cluster.apply(body)
    quay = Quay(cluster)
    eventually(lambda: quay.condition("Ready")["status"] == "True")
    quay.url = cluster.url("demo", SPACE)
    yield quay
    cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def test_no_request_is_lost_while_secrets_are_added_and_removed(quay: Quay) -> None:
    eventually(lambda: quay.answers("first", 401))  # without a Secret, all requests are rejected
    assert "every request gets 401" in quay.condition("GatewayReady")["message"]
    quay.cluster.apply(keys("first"))
    eventually(lambda: quay.answers("first", 200) and quay.pods() == 1)  # the previous pod is gone

    codes: Counter[object] = Counter()
    stop = threading.Event()

    def send_requests() -> None:
        while not stop.is_set():
            try:
                codes[quay.code("first")] += 1
            except httpx.HTTPError as error:
                codes[repr(error)] += 1

    sender = threading.Thread(target=send_requests)
    sender.start()
    try:
        quay.cluster.apply(keys("second"))
        eventually(lambda: quay.answers("second", 200))
        quay.cluster.kubectl("delete", "secret", "second", "-n", SPACE)
        eventually(lambda: quay.answers("second", 401))
    finally:
        stop.set()
        sender.join(90)
    assert set(codes) == {200}

    quay.cluster.kubectl("label", "secret", "first", "-n", SPACE, f"{LABEL}-")
    eventually(lambda: quay.answers("first", 401))


def test_unreadable_keys_are_reported_and_the_previous_keys_stay_valid(quay: Quay) -> None:
    quay.cluster.apply(keys("third"))
    eventually(lambda: quay.answers("third", 200))
    eventually(lambda: quay.condition("ApiKeysInForce")["status"] == "True")
    quay.cluster.apply({**keys("third"), "stringData": {"keys.yaml": "keys: [sk-of-fourth"}})
    eventually(lambda: quay.condition("ApiKeysInForce").get("reason") == "ApiKeysUnusable")
    message = quay.condition("ApiKeysInForce")["message"]
    assert "/keys.yaml, line " in message and "this is not YAML" in message
    assert "sk-of" not in message
    assert quay.condition("Ready")["reason"] == "ApiKeysUnusable"
    assert quay.answers("third", 200)
    quay.cluster.apply(keys("third"))
    eventually(lambda: quay.condition("Ready")["status"] == "True")
    quay.cluster.kubectl("delete", "secret", "third", "-n", SPACE)
