# SPDX-License-Identifier: Apache-2.0
"""Golden prompts with real processes: a revision that answers them incorrectly gets no client's request."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

ROOT = Path(__file__).parents[2]
NAME = "golden"
DEMO = Path("/opt/mizzen/models/demo")
"""Folder of the demo model in the image.

The tests do not use the checkout's copy: the checkout may be in /tmp, and each pod has a /tmp of its own.
"""
PROMPT, EXPECTED = "<|user|>What is Mizzen?<|end|><|assistant|>", "Mizzen serves"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def spec(model: Path, pods: int) -> dict[str, Any]:
    """Return the spec of a service with golden prompts; each group has `pods` pods of one rank each."""
    golden = {"prompts": [{"prompt": PROMPT, "expected": EXPECTED}]}
    return {
        "model": {"source": f"file://{model}", "servedName": NAME},
        "parallelism": {"tensor": pods},
        "accelerator": {"perPod": 1},
        "engine": {"device": "CPU", "extraArgs": ["--threads=1", "--kv-cache-tokens=16384"]},
        "rollout": {"verification": golden},
    }


@pytest.fixture
def emptied() -> Iterator[Path]:
    """Yield a copy of the demo model whose weights are all 0: it loads, but its answers are wrong."""
    with tempfile.TemporaryDirectory(
        dir="/var/tmp", prefix="mizzen-"
    ) as folder:  # not in /tmp, because each pod has its own /tmp
        model = Path(shutil.copytree(ROOT / "models/demo", Path(folder) / "model"))
        weights = model / "model.safetensors"
        content = weights.read_bytes()
        begin = 8 + struct.unpack("<Q", content[:8])[0]
        weights.write_bytes(content[:begin] + bytes(len(content) - begin))
        yield model


class Client(threading.Thread):
    """Sends one request after another until `stop` is called, and records the answers."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self._stopping = threading.Event()
        self.answers: list[str] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            self.answers.append(self.ask())

    def ask(self) -> str:
        try:
            answer = self._client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0)
        except openai.APIError as error:
            return repr(error)
        return answer.choices[0].text

    def stop(self) -> None:
        self._stopping.set()
        self.join(150)


def wait_until(
    check: Callable[[], Any], expectation: str, seconds: float = 150, details: Callable[[], Any] = lambda: ""
) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {expectation}; {details()}"
        time.sleep(0.1)


@pytest.fixture(params=[1, 2], ids=["one-pod", "two-pods"])
def pods(request: pytest.FixtureRequest) -> int:
    """Number of pods in a group."""
    return request.param


@pytest.fixture
def golden(cluster: Any, pods: int) -> Iterator[Any]:
    metadata = {"name": NAME, "namespace": "default"}
    kind = {"apiVersion": "mizzen.dev/v1alpha1", "kind": "InferenceService"}
    cluster.apply({**kind, "metadata": metadata, "spec": spec(DEMO, pods)})
    yield cluster
    cluster.kubectl("delete", "infsvc", NAME, "--ignore-not-found", "--wait=true", "--timeout=60s")


def test_a_revision_that_fails_its_golden_prompts_gets_no_request(
    golden: Any, emptied: Path, pods: int
) -> None:
    def status() -> dict[str, Any]:
        return golden.get("infsvc", NAME).get("status", {})

    def condition(name: str) -> tuple[str, str, str]:
        conditions = {c["type"]: c for c in status().get("conditions", [])}
        condition = conditions.get(name, {"status": "", "reason": "", "message": ""})
        return condition["status"], condition["reason"], condition["message"]

    wait_until(lambda: condition("Ready")[0] == "True", "Ready", details=lambda: json.dumps(status()))
    before = status()["currentRevision"]
    assert status().get("podsPerGroup", 1) == pods
    client = Client(golden.url(NAME))
    client.start()
    try:
        patch = {"spec": {"model": {"source": f"file://{emptied}"}}}
        golden.kubectl("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps(patch))
        wait_until(
            lambda: condition("Failed")[1] == "VerificationFailed", "the new revision fails its verification"
        )
        words, after = condition("Failed")[2], status()
        selector = f"mizzen.dev/service={NAME},mizzen.dev/component=engine"
        wait_until(
            lambda: len(golden.get("pods", "-l", selector)["items"]) == pods,
            "the group that answered wrong is gone",
        )
        answered = len(client.answers)
        wait_until(lambda: len(client.answers) > answered, "requests are still answered")
    finally:
        client.stop()
    assert f"expected '{EXPECTED}', got " in words
    assert (after["currentRevision"], after["givenUp"]["revision"]) == (before, after["updateRevision"])
    assert condition("Available")[0] == "True"
    assert set(client.answers) == {client.answers[0]}, "the previous revision answered every request"
    assert client.answers[0].startswith(EXPECTED)
