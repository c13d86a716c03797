"""API keys whose Secrets come and go by their label, as a user meets them: no request is lost."""

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
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
    return found


def keys(name: str) -> dict[str, Any]:
    """A labelled Secret with the key of one holder; all of them have the same file in it."""
    content = yaml.safe_dump({"keys": [{"name": name, "key": f"sk-of-{name}"}]})
    meta = {"name": name, "namespace": SPACE, "labels": {LABEL: "demo-gateway"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"keys.yaml": content}}


class Quay:
    """The namespace with the service."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.url = ""

    def condition(self, name: str) -> dict[str, Any]:
        status = self.cluster.get("infsvc", "demo", "-n", SPACE).get("status", {})
        found = [one for one in status.get("conditions", ()) if one["type"] == name]
        return found[0] if found else {"status": "", "message": ""}

    def code(self, name: str) -> int:
        """What a request with a holder's key is answered."""
        body = {"model": "demo", "prompt": "Mizzen", "max_tokens": 4, "temperature": 0}
        headers = {"authorization": f"Bearer sk-of-{name}"}
        return httpx.post(f"{self.url}/completions", json=body, headers=headers, timeout=60).status_code

    def pods(self) -> int:
        """How many pods the gateway has, those that end among them."""
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
    found = Quay(cluster)
    eventually(lambda: found.condition("Ready")["status"] == "True")
    found.url = cluster.url("demo", SPACE)
    yield found
    cluster.kubectl("delete", "namespace", SPACE, "--wait=true", "--timeout=120s")


def test_secrets_come_and_go_and_no_request_is_lost(quay: Quay) -> None:
    eventually(lambda: quay.answers("first", 401))  # no Secret yet: closed, not open
    assert "every request gets 401" in quay.condition("GatewayReady")["message"]
    quay.cluster.apply(keys("first"))
    eventually(lambda: quay.answers("first", 200) and quay.pods() == 1)  # and the one before is gone

    codes: Counter[object] = Counter()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                codes[quay.code("first")] += 1
            except httpx.HTTPError as error:
                codes[repr(error)] += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        quay.cluster.apply(keys("second"))
        eventually(lambda: quay.answers("second", 200))
        quay.cluster.kubectl("delete", "secret", "second", "-n", SPACE)
        eventually(lambda: quay.answers("second", 401))
    finally:
        stop.set()
        asking.join(90)
    assert set(codes) == {200}

    quay.cluster.kubectl("label", "secret", "first", "-n", SPACE, f"{LABEL}-")
    eventually(lambda: quay.answers("first", 401))


def test_keys_that_cannot_be_read_are_told_and_those_before_stay(quay: Quay) -> None:
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
