# SPDX-License-Identifier: Apache-2.0
"""A service without requests is scaled to zero, and a request wakes it: real gateway, engine and operator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "seldom"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def sleepy() -> dict[str, Any]:
    """Return the scale-to-zero example with the demo model; it scales to zero after 5 s without requests."""
    body = yaml.safe_load((EXAMPLES / "scale-to-zero.yaml").read_text())
    small = yaml.safe_load((EXAMPLES / "inferenceservice.yaml").read_text())["spec"]
    autoscaling = {**body["spec"]["autoscaling"], "idleSecondsToZero": 5, "wakeTimeoutSeconds": 120}
    body["spec"] = {**small, "autoscaling": autoscaling}
    return body


@pytest.fixture(scope="module")
def seldom(cluster: Any) -> Iterator[Any]:
    cluster.apply(sleepy())
    yield cluster
    cluster.kubectl("delete", "infsvc", NAME, "--ignore-not-found", "--wait=true", "--timeout=60s")


def groups(cluster: Any) -> int:
    selector = f"mizzen.dev/service={NAME},mizzen.dev/component=engine"
    return len(cluster.get("pods", "-l", selector)["items"])


def wait_until(check: Any, failure: str) -> None:
    deadline = time.monotonic() + 120
    while not check():
        assert time.monotonic() < deadline, failure
        time.sleep(0.2)


def asleep(cluster: Any) -> bool:
    spec = cluster.get("infsvc", NAME)["spec"]
    return spec.get("replicas") == 0 and groups(cluster) == 0


def answer(cluster: Any) -> str:
    """Return a short answer; the gateway holds the request until the service is awake."""
    client = openai.OpenAI(base_url=cluster.url(NAME), api_key="none", max_retries=0, timeout=150)
    reply = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "What is Mizzen?"}], max_tokens=5, temperature=0
    )
    return reply.choices[0].message.content or ""


def test_an_idle_service_is_scaled_to_zero_and_a_request_wakes_it(seldom: Any) -> None:
    wait_until(lambda: groups(seldom) == 1, "the first group was never created")
    for _ in range(2):
        wait_until(lambda: asleep(seldom), "the service was never scaled to zero")
        assert answer(seldom)
        assert groups(seldom) == 1
    status = seldom.get("infsvc", NAME)["status"]
    assert (status["lastScale"]["from"], status["lastScale"]["to"]) == (0, 1)
    assert seldom.get("infsvc", NAME)["spec"]["replicas"] == 1
