# SPDX-License-Identifier: Apache-2.0
"""A real Job fetches a model from a hub, and real engines serve it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from model_servers import Hub

ROOT = Path(__file__).parents[3]
NAME = "fetched"
SPACE = "fetched"
"""Namespace of the test. It is not restricted, because Pod Security `restricted` forbids HostPath volumes."""

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that requires a token, and withholds half of each file until the test sets `cdn.faults.gate`."""
    hub = Hub()
    hub.token = "hub-token"
    hub.cdn.faults.gate = threading.Event()
    yield hub
    hub.cdn.faults.gate.set()
    hub.close()


def status(cluster: Any) -> dict[str, Any]:
    return cluster.get("infsvc", NAME, "-n", SPACE).get("status", {})


def reason(cluster: Any, kind: str) -> str:
    return next((c["reason"] for c in status(cluster).get("conditions", []) if c["type"] == kind), "")


def test_a_model_is_fetched_from_a_hub_and_served(cluster: Any, hub: Hub, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (ROOT / "models/demo").iterdir() if path.is_file()}
    commit = hub.push(files)
    cache = tmp_path / "cache"
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub-token", "namespace": SPACE},
        "stringData": {"token": "wrong"},
    }
    model = {
        "source": "hf://org/tiny@main",
        "endpoint": hub.api.url,
        "credentialsSecretRef": {"name": "hub-token", "key": "token"},
        "cache": {"mode": "HostPath", "path": str(cache)},
    }
    service = {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME, "namespace": SPACE},
        "spec": {
            "model": model,
            "engine": {"device": "CPU"},
            "gateway": {"replicas": 1},
            "accelerator": {"nodeSelector": {}},
        },
    }
    cluster.kubectl("create", "namespace", SPACE)
    cluster.apply(secret, service)
    try:
        until(lambda: reason(cluster, "Failed") == "DownloadFailed", "the wrong token is reported")
        failed = next(c for c in status(cluster)["conditions"] if c["type"] == "Failed")
        assert "credentialsSecretRef" in failed["message"] and "wrong" not in failed["message"]
        cluster.apply({**secret, "stringData": {"token": "hub-token"}})
        assert hub.cdn.faults.held.wait(180), cluster.kubectl("get", "pods,jobs", "-n", SPACE)
        until(lambda: 0 < status(cluster)["model"].get("downloadPercent", 0) < 100, "the bytes are counted")
        assert status(cluster)["model"]["resolvedRevision"] == commit
        hub.push({"config.json": b"{}"})  # the branch moves on
        hub.cdn.faults.gate.set()
        cluster.kubectl("wait", f"infsvc/{NAME}", "-n", SPACE, "--for=condition=Ready", "--timeout=180s")
        reported = status(cluster)["model"]
        assert reported["resolvedRevision"] == commit and reported["downloadPercent"] == 100
        marker = json.loads((cache / reported["folder"] / ".mizzen.json").read_text())
        assert marker["revision"] == commit
        weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
        assert sum(hub.cdn.served.values()) == weights
        client = openai.OpenAI(base_url=cluster.url(NAME, SPACE), api_key="none", max_retries=0, timeout=60)
        question = [{"role": "user", "content": "What is Mizzen?"}]
        answer = client.chat.completions.create(model=NAME, messages=question, temperature=0)
        assert "Mizzen" in (answer.choices[0].message.content or "")
    finally:
        cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def until(check: Any, expectation: str) -> None:
    deadline = threading.Event()
    for _ in range(120):
        if check():
            return
        deadline.wait(1)
    raise AssertionError(f"still not: {expectation}")
