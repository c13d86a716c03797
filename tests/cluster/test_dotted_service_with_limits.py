# SPDX-License-Identifier: Apache-2.0
"""A service whose name has dots, with two gateway pods that share the limits of an API key."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from local_node_kit import eventually, pod_url

from demo_model import QUESTION, trained_answer

ROOT = Path(__file__).parents[2]
SPACE, NAME = "dotted", "llama-3.1-8b"
KEY = "sk-of-team-a"
PER_MINUTE = 600
CLIENTS, PAUSE_SECONDS = 4, 0.05
"""Number of clients that send requests in a loop, and the pause of each after a response."""

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture(scope="module")
def dotted(cluster: Any) -> Iterator[Any]:
    """Apply the example under a name with dots, with two gateway pods and an API key."""
    cluster.make_namespace(SPACE)
    keys = {"keys": [{"name": "team-a", "key": KEY, "requestsPerMinute": PER_MINUTE}]}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "teams", "namespace": SPACE}}
    body = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    body["metadata"] = {"name": NAME, "namespace": SPACE}
    body["spec"]["gateway"] |= {"replicas": 2, "apiKeys": {"secretNames": ["teams"]}}
    cluster.apply({**secret, "stringData": {"keys.yaml": yaml.safe_dump(keys)}}, body)
    cluster.kubectl("wait", "--for=condition=Ready", f"infsvc/{NAME}", "-n", SPACE, "--timeout=150s")
    yield cluster
    cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def gateway_urls(cluster: Any) -> list[str]:
    """Return the base URLs of the ready gateway pods, without the Service."""
    pods = cluster.get("pods", "-n", SPACE, "-l", "mizzen.dev/component=gateway")["items"]
    ready = [pod for pod in pods if pod["status"]["containerStatuses"][0]["ready"]]
    return [f"{pod_url(pod)}/v1" for pod in ready]


def send(client: httpx.Client, url: str) -> int:
    """Send a request that counts towards the limit but does not reach the engine; return the status."""
    body, headers = {"model": NAME, "prompt": "Mizzen"}, {"authorization": f"Bearer {KEY}"}
    return client.post(f"{url}/tokenize", json=body, headers=headers).status_code


def measure_rate(urls: Sequence[str], seconds: float) -> tuple[float, Counter[int]]:
    """Send more requests than the limit admits, in turn to all pods.

    Returns:
        The admitted requests per minute, and the number of responses by HTTP status.
    """
    codes: Counter[int] = Counter()
    turns, began = itertools.cycle(urls), time.monotonic()

    def run() -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while time.monotonic() - began < seconds:
                codes[send(client, next(turns))] += 1
                time.sleep(PAUSE_SECONDS)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes[200] * 60 / (time.monotonic() - began), codes


def test_a_service_with_dots_in_its_name_answers_through_its_service(dotted: Any) -> None:
    url = dotted.url(NAME, SPACE)
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)
    answer = eventually(lambda: ask(client))
    assert answer.choices[0].message.content == trained_answer(QUESTION)
    assert answer.model == NAME


def ask(client: openai.OpenAI) -> Any:
    """Return the answer of the model; None while the buckets of the new gateway pods are empty."""
    try:
        return client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
    except openai.RateLimitError:
        return None


@pytest.mark.parametrize("pods", [2, 1])
def test_two_gateway_pods_admit_the_limit_of_a_key(dotted: Any, pods: int) -> None:
    """The rate is the limit if the load is balanced, and also if all requests reach one pod."""
    urls = eventually(lambda: len(found := gateway_urls(dotted)) == 2 and found)
    eventually(lambda: measure_rate(urls, 2)[1][429] > CLIENTS, 180)  # until the buckets are empty
    rate, codes = measure_rate(urls[:pods], 6)
    print(f"{pods} pods: {rate:.0f} admitted requests per minute, {dict(codes)}")
    assert set(codes) == {200, 429}
    assert rate == pytest.approx(PER_MINUTE, rel=0.1)
