"""Kubernetes' own autoscaler and KEDA scale services by our metrics: the examples, under a real load.

Real are the HPA controller, Prometheus (with the labels of the chart's monitors), operator, gateway, engines.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "observability"))
sys.path.insert(0, str(Path(__file__).parent))

import programs
from metrics_apis import Keda, MetricsApi
from noloss.services import slow
from observed import Prometheus

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
STREAMS = 6
AT_ONCE = {
    "stabilizationWindowSeconds": 0,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def wait_until(check: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline, f"after {SECONDS} s still not: {what}"
        time.sleep(0.2)


def example(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The service of an example, made one of simulated engines, and what scales it."""
    service, scaler = yaml.safe_load_all((ROOT / f"examples/{name}.yaml").read_text())
    simulated = slow(service["metadata"]["name"], 1, 1, step_ms=100, drain_seconds=30)
    del simulated["spec"]["replicas"]
    simulated["spec"]["gateway"] |= service["spec"].get("gateway", {})
    return simulated, scaler


def adapter_rule() -> dict[str, Any]:
    """The rule of prometheus-adapter that the operations guide gives."""
    text = (ROOT / "docs/operations.md").read_text()
    block = text.split("prometheus-adapter", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    [rule] = yaml.safe_load(block)["rules"]["custom"]
    return rule


class Streams:
    """Clients that each read one long answer after another until they are told to stop."""

    def __init__(self, url: str, model: str) -> None:
        self._client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
        self._model = model
        self._stopping = threading.Event()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._client.completions.create(
                    model=self._model, prompt="A long story:", max_tokens=300, temperature=0, stream=True
                ) as stream:
                    for _ in stream:
                        if self._stopping.is_set():
                            return
            except openai.OpenAIError as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)


class Scaled:
    """A service that others scale."""

    def __init__(self, cluster: Any, name: str) -> None:
        self.cluster, self.name = cluster, name

    def body(self) -> dict[str, Any]:
        return self.cluster.get("infsvc", self.name)

    def serves(self, groups: int) -> bool:
        body = self.body()
        status = body.get("status", {})
        return (
            body["spec"]["replicas"] == groups
            and status.get("availableReplicas") == status.get("replicas") == groups
            and self.condition("Ready") == "True"
        )

    def condition(self, kind: str) -> str:
        found = self.body().get("status", {}).get("conditions", [])
        return next((one["status"] for one in found if one["type"] == kind), "")

    def writers(self) -> set[str]:
        """Who has written spec.replicas last."""
        found = self.cluster.get("infsvc", self.name, "--show-managed-fields")["metadata"]["managedFields"]
        return {one["manager"] for one in found if "f:replicas" in one["fieldsV1"].get("f:spec", {})}


@pytest.fixture(scope="module")
def prometheus(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus") / "run"
    made = Prometheus(programs.find(), folder, cluster.kubeconfig, [])
    yield made
    made.close()


@pytest.fixture(scope="module")
def metrics(
    cluster: Any, prometheus: Prometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MetricsApi]:
    api = MetricsApi(cluster, prometheus.query, adapter_rule(), tmp_path_factory.mktemp("metrics"))
    yield api
    api.close()


@pytest.fixture
def scaled(cluster: Any) -> Iterator[Callable[[dict[str, Any]], Scaled]]:
    made: list[str] = []

    def make(service: dict[str, Any]) -> Scaled:
        made.append(service["metadata"]["name"])
        cluster.apply(service)
        return Scaled(cluster, made[-1])

    yield make
    for name in made:
        cluster.kubectl("delete", "infsvc", name, "--ignore-not-found", "--wait=true", "--timeout=60s")


def test_kubernetes_autoscaler_scales_a_service_up_and_down_by_its_engines_metrics(
    cluster: Any, metrics: MetricsApi, scaled: Callable[[dict[str, Any]], Scaled]
) -> None:
    service, scaler = example("hpa")
    scaler["spec"] |= {"maxReplicas": 3, "behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}
    scaler["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "2"
    cluster.apply(scaler)
    it = scaled(service)
    wait_until(lambda: it.serves(1), "one group serves")
    streams = Streams(cluster.url(it.name), it.name)
    try:
        wait_until(lambda: it.serves(3), "three groups serve")
    finally:
        streams.stop()
    assert it.writers() == {"kube-controller-manager"}
    wait_until(lambda: it.serves(1), "one group is left")
    assert it.writers() == {"kube-controller-manager"}
    assert streams.failures == []
    asked = {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"]}
    assert asked <= set(metrics.asked)
    told = {one["type"]: one["status"] for one in cluster.get("hpa", it.name)["status"]["conditions"]}
    assert (told["AbleToScale"], told["ScalingActive"]) == ("True", "True")
    cluster.kubectl("delete", "hpa", it.name)


def test_keda_scales_a_service_from_zero_and_to_zero(
    cluster: Any,
    metrics: MetricsApi,
    prometheus: Prometheus,
    scaled: Callable[[dict[str, Any]], Scaled],
) -> None:
    service, scaler = example("keda")
    scaler["spec"] |= {"maxReplicaCount": 3, "cooldownPeriod": 3}
    scaler["spec"]["triggers"][0]["metadata"]["threshold"] = "2"
    behavior = {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}
    scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] = behavior
    it = scaled(service)
    wait_until(lambda: it.serves(1), "one group serves")
    keda = Keda(cluster, metrics, prometheus.query, scaler)
    try:
        wait_until(lambda: it.serves(0), "nobody asks, and nothing is left")
        streams = Streams(cluster.url(it.name), it.name)  # the gateway holds their requests
        try:
            wait_until(lambda: it.serves(3), "three groups serve")
        finally:
            streams.stop()
        wait_until(lambda: it.serves(0), "nobody asks, and nothing is left")
        assert streams.failures == []
    finally:
        keda.close()
