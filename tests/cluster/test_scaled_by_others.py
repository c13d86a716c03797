# SPDX-License-Identifier: Apache-2.0
"""Under a real load, the HPA controller and KEDA use Mizzen's metrics to scale the examples' services.

The HPA controller, Prometheus (with the labels of the chart's monitors), operator, gateway and engines are
real; `metrics_apis` stands in for prometheus-adapter and KEDA.
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
from noloss.services import simulated_service
from observed import Prometheus

ROOT = Path(__file__).parents[2]
SECONDS = 180.0
STREAMS = 6
AT_ONCE = {
    "stabilizationWindowSeconds": 0,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster-demo")]


def wait_until(check: Callable[[], Any], expectation: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline, f"after {SECONDS} s still not: {expectation}"
        time.sleep(0.2)


def example(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the service of an example, with simulated engines, and its HPA or ScaledObject."""
    service, scaler = yaml.safe_load_all((ROOT / f"examples/{name}.yaml").read_text())
    simulated = simulated_service(service["metadata"]["name"], 1, 1, step_ms=100, drain_seconds=30)
    del simulated["spec"]["replicas"]
    simulated["spec"]["gateway"] |= service["spec"].get("gateway", {})
    return simulated, scaler


def adapter_rule() -> dict[str, Any]:
    """Return the rule of prometheus-adapter from docs/operations.md."""
    text = (ROOT / "docs/operations.md").read_text()
    block = text.split("prometheus-adapter", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    [rule] = yaml.safe_load(block)["rules"]["custom"]
    return rule


class Streams:
    """Clients that each read one long answer after another until `stop` is called."""

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
    """A service that an HPA or KEDA scales, and queries about it."""

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
        conditions = self.body().get("status", {}).get("conditions", [])
        return next((c["status"] for c in conditions if c["type"] == kind), "")

    def writers(self) -> set[str]:
        """Return the field managers that own spec.replicas."""
        body = self.cluster.get("infsvc", self.name, "--show-managed-fields")
        entries = body["metadata"]["managedFields"]
        return {entry["manager"] for entry in entries if "f:replicas" in entry["fieldsV1"].get("f:spec", {})}


@pytest.fixture(scope="module")
def prometheus(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus") / "run"
    server = Prometheus(programs.find(), folder, cluster.kubeconfig, [])
    yield server
    server.close()


@pytest.fixture(scope="module")
def metrics(
    cluster: Any, prometheus: Prometheus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MetricsApi]:
    api = MetricsApi(cluster, prometheus.query, adapter_rule(), tmp_path_factory.mktemp("metrics"))
    yield api
    api.close()


@pytest.fixture
def scaled(cluster: Any) -> Iterator[Callable[[dict[str, Any]], Scaled]]:
    names: list[str] = []

    def make(service: dict[str, Any]) -> Scaled:
        names.append(service["metadata"]["name"])
        cluster.apply(service)
        return Scaled(cluster, names[-1])

    yield make
    for name in names:
        cluster.kubectl("delete", "infsvc", name, "--ignore-not-found", "--wait=true", "--timeout=60s")


def test_an_hpa_scales_a_service_up_and_down_by_its_engines_metrics(
    cluster: Any, metrics: MetricsApi, scaled: Callable[[dict[str, Any]], Scaled]
) -> None:
    service, scaler = example("hpa")
    scaler["spec"] |= {"maxReplicas": 3, "behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}
    scaler["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "2"
    cluster.apply(scaler)
    demo = scaled(service)
    wait_until(lambda: demo.serves(1), "one group serves")
    streams = Streams(cluster.url(demo.name), demo.name)
    try:
        wait_until(lambda: demo.serves(3), "three groups serve")
    finally:
        streams.stop()
    assert demo.writers() == {"kube-controller-manager"}
    wait_until(lambda: demo.serves(1), "one group is left")
    assert demo.writers() == {"kube-controller-manager"}
    assert streams.failures == []
    configured = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert configured <= set(metrics.requested_metrics)
    conditions = {c["type"]: c["status"] for c in cluster.get("hpa", demo.name)["status"]["conditions"]}
    assert (conditions["AbleToScale"], conditions["ScalingActive"]) == ("True", "True")
    cluster.kubectl("delete", "hpa", demo.name)


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
    demo = scaled(service)
    wait_until(lambda: demo.serves(1), "one group serves")
    keda = Keda(cluster, metrics, prometheus.query, scaler)
    try:
        wait_until(lambda: demo.serves(0), "without requests, no group is left")
        streams = Streams(cluster.url(demo.name), demo.name)  # the gateway holds their requests
        try:
            wait_until(lambda: demo.serves(3), "three groups serve")
        finally:
            streams.stop()
        wait_until(lambda: demo.serves(0), "without requests, no group is left")
        assert streams.failures == []
    finally:
        keda.close()
